"""What the commands share: options, output, and errors that end in an exit code.

Codes: 0 ok; 1 a run or a check failed; 2 the user's mistake; 130 interrupted.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console

from fsm_trainer.document import nearest
from fsm_trainer.machine.errors import ConfigError, FsmError, SpecError


def option(flag: str, metavar: str | None, told: str, **more: Any) -> Any:
    """An option of a command; the name of its value in capitals, or None for a switch."""
    return typer.Option(flag, metavar=metavar, help=told, **more)


def argument(metavar: str, told: str) -> Any:
    """An argument of a command."""
    return typer.Argument(metavar=metavar, help=told)


Config = Annotated[Path, argument("CONFIG", "The run's configuration, a YAML file.")]
Overrides = Annotated[
    list[str] | None,
    option("--set", "KEY.PATH=VALUE", "Replace a value of the file; may be repeated."),
]
States = Annotated[
    Path | None, option("--states", "DIR", "A folder of tables; default: the shipped ones.")
]
Schedule = Annotated[str | None, option("--schedule", "NAME", "A schedule of states/schedules/.")]
Rollouts = Annotated[int, option("--rollouts", "N", "Rollout workers that take part.", min=1)]
Json = Annotated[bool, option("--json", None, "Print JSON for programs.")]

F = TypeVar("F", bound=Callable[..., Any])


def console(*, stderr: bool = False) -> Console:
    """The terminal as it is now: a test replaces the streams."""
    return Console(stderr=stderr, highlight=False, markup=False, soft_wrap=True)


def print_json(value: object) -> None:
    """Write one JSON document for programs."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))


def command(function: F) -> F:
    """A user's own mistake exits with 2 and one readable message, any other error with 1."""

    @wraps(function)
    def guarded(*arguments: Any, **named: Any) -> Any:
        try:
            return function(*arguments, **named)
        except (ConfigError, SpecError) as error:
            _say(str(error), 2)
        except FsmError as error:
            _say(f"{type(error).__name__}: {error}", 1)
        except (KeyboardInterrupt, asyncio.CancelledError):
            _say("interrupted; no process is left", 130)

    return guarded  # type: ignore[return-value]


def _say(text: str, code: int) -> None:
    console(stderr=True).print(text, style="red")
    raise typer.Exit(code) from None


def chosen(option: str, given: str, known: list[str]) -> str:
    """A name that must be one of the known ones.

    Raises:
        ConfigError: with the nearest name and all of them.
    """
    if given not in known:
        remedy = f"{nearest(given, known)}Choose one of {', '.join(known)}"
        raise ConfigError(f"{option} {given}: there is no such name. {remedy}")
    return given
