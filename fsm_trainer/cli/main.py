"""``fsm-train``: the commands. Heavy parts are imported by the command that needs them."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console

from fsm_trainer.machine.errors import ConfigError, FsmError, SpecError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="RL post-training in which every actor, critic and rollout worker is a state machine.",
)
out = Console()
err = Console(stderr=True)

Config = Annotated[Path, typer.Argument(help="The run's configuration, a YAML file.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", help="Replace a value: key.path=value.")
]
States = Annotated[Path | None, typer.Option("--states", help="A folder of tables.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


@app.callback()
def main() -> None:
    """RL post-training in which every actor, critic and rollout worker is a state machine."""


F = TypeVar("F", bound=Callable[..., Any])


def _typed_errors(command: F) -> F:
    """A user's own mistake exits with 2 and one readable message, any other error with 1."""

    @wraps(command)
    def guarded(*arguments: Any, **named: Any) -> Any:
        try:
            return command(*arguments, **named)
        except (ConfigError, SpecError) as error:
            err.print(str(error), style="red", highlight=False, markup=False, soft_wrap=True)
            raise typer.Exit(2) from None
        except FsmError as error:
            text = f"{type(error).__name__}: {error}"
            err.print(text, style="red", highlight=False, markup=False, soft_wrap=True)
            raise typer.Exit(1) from None
        except (KeyboardInterrupt, asyncio.CancelledError):
            err.print("interrupted; no process is left", highlight=False)
            raise typer.Exit(130) from None

    return guarded  # type: ignore[return-value]


@app.command()
@_typed_errors
def run(
    config: Annotated[Path | None, typer.Argument(help="The configuration.")] = None,
    overrides: Overrides = None,
    folder: Annotated[Path | None, typer.Option("--out", help="The run's folder.")] = None,
    resume: Annotated[
        Path | None, typer.Option("--resume", help="Go on with the run in this folder.")
    ] = None,
    states: States = None,
) -> None:
    """Train."""
    from fsm_trainer.runtime.config import load_config

    if resume is not None:
        folder = resume
        config = config or resume / "config.yaml"
    if config is None:
        raise ConfigError("run: give a configuration, or --resume with a run's folder")
    loaded = load_config(config, overrides or (), states)
    target = folder or Path("runs") / f"{config.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    from fsm_trainer.runtime.launch import launch

    launch(loaded, target.resolve(), out, resume=resume is not None)
    out.print(f"run folder: {target}", highlight=False)


if __name__ == "__main__":
    sys.exit(app())
