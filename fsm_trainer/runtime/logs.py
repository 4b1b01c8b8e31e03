"""Logs: readable lines on the console, JSON lines in the run's folder.

Modules log through ``structlog.get_logger(__name__)``; what libraries warn of arrives too.
"""

from __future__ import annotations

import logging
from pathlib import Path

import structlog
from rich.console import Console
from rich.text import Text
from structlog.typing import EventDict, Processor, WrappedLogger

FILE_NAME = "run.log.jsonl"


class Logs:
    """Sets logging up for this process until :meth:`close`.

    ``console`` is where people read, and must be the one that a progress bar draws on; None
    prints nothing. ``run_dir`` gets ``run.log.jsonl``, to which any number of processes may
    append; None writes no file. ``worker`` is put into each line.
    """

    def __init__(
        self,
        run_dir: Path | None = None,
        console: Console | None = None,
        worker: str | None = None,
    ) -> None:
        self._handlers: list[logging.Handler] = []
        self._worker = worker
        if console is not None:
            readable = structlog.dev.ConsoleRenderer(colors=console.is_terminal, pad_event_to=0)
            self._add(_ConsoleHandler(console), "INFO", _short_time, readable)
        if run_dir is not None:
            run_dir.mkdir(parents=True, exist_ok=True)
            # It appends each line by one write, so lines of several processes don't mix.
            file = logging.FileHandler(run_dir / FILE_NAME, encoding="utf-8")
            as_json = structlog.processors.JSONRenderer()
            self._add(file, "DEBUG", structlog.processors.dict_tracebacks, as_json)
        logging.getLogger("fsm_trainer").setLevel(logging.DEBUG)
        structlog.configure(
            processors=[
                structlog.stdlib.filter_by_level,
                structlog.contextvars.merge_contextvars,
                structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
            ],
            logger_factory=structlog.stdlib.LoggerFactory(),
            wrapper_class=structlog.stdlib.BoundLogger,
        )

    def close(self) -> None:
        """Take the handlers away and close them; a second call does nothing."""
        while self._handlers:
            handler = self._handlers.pop()
            logging.getLogger().removeHandler(handler)
            handler.close()

    def _add(self, handler: logging.Handler, level: str, *render: Processor) -> None:
        before: list[Processor] = [
            structlog.stdlib.add_log_level,
            structlog.stdlib.add_logger_name,
            structlog.stdlib.PositionalArgumentsFormatter(),
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.StackInfoRenderer(),
            self._name_worker,
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
        ]
        formatter = structlog.stdlib.ProcessorFormatter(processors=[*before, *render])
        handler.setFormatter(formatter)
        handler.setLevel(level)
        logging.getLogger().addHandler(handler)
        self._handlers.append(handler)

    def _name_worker(self, _: WrappedLogger, __: str, event: EventDict) -> EventDict:
        return event if self._worker is None else {"worker": self._worker, **event}


class _ConsoleHandler(logging.Handler):
    """Prints through rich, which keeps a progress bar below the lines."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        self._console.print(Text.from_ansi(self.format(record)), soft_wrap=True)


def _short_time(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    """People want the time of day and not the module's name."""
    event["timestamp"] = event["timestamp"][11:19]
    event.pop("logger", None)
    return event
