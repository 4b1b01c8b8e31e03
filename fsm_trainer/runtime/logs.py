"""Logs: readable lines on the console, JSON lines in the run's folder.

Modules log through ``structlog.get_logger(__name__)``; what libraries warn of arrives too.
"""

from __future__ import annotations

import logging
import os
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
        level: str = "INFO",
        worker: str | None = None,
    ) -> None:
        before = _shared_processors(worker)
        self._handlers: list[logging.Handler] = []
        if console is not None:
            readable = structlog.dev.ConsoleRenderer(colors=console.is_terminal, pad_event_to=0)
            self._add(_ConsoleHandler(console), level, [*before, _short_time], [readable])
        if run_dir is not None:
            run_dir.mkdir(parents=True, exist_ok=True)
            as_json: list[Processor] = [
                structlog.processors.dict_tracebacks,
                structlog.processors.JSONRenderer(),
            ]
            self._add(_LineHandler(run_dir / FILE_NAME), "DEBUG", before, as_json)
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

    def _add(
        self,
        handler: logging.Handler,
        level: str,
        before: list[Processor],
        render: list[Processor],
    ) -> None:
        drop = structlog.stdlib.ProcessorFormatter.remove_processors_meta
        handler.setFormatter(
            structlog.stdlib.ProcessorFormatter(processors=[*before, drop, *render])
        )
        handler.setLevel(level)
        logging.getLogger().addHandler(handler)
        self._handlers.append(handler)


class _ConsoleHandler(logging.Handler):
    """Prints through rich, which keeps a progress bar below the lines."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        self._console.print(Text.from_ansi(self.format(record)), soft_wrap=True)


class _LineHandler(logging.Handler):
    """Appends each line by one write, so that lines of several processes don't mix."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def emit(self, record: logging.LogRecord) -> None:
        os.write(self._descriptor, (self.format(record) + "\n").encode())

    def close(self) -> None:
        os.close(self._descriptor)
        super().close()


def _shared_processors(worker: str | None) -> list[Processor]:
    def name_worker(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
        if worker is not None:
            event.setdefault("worker", worker)
        return event

    return [
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.PositionalArgumentsFormatter(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
        name_worker,
    ]


def _short_time(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    """People want the time of day and not the module's name."""
    event["timestamp"] = event["timestamp"][11:19]
    event.pop("logger", None)
    return event
