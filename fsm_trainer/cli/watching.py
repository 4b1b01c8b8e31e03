"""``monitor``: another trainer's events against the tables."""

from __future__ import annotations

import sys
from dataclasses import asdict
from math import inf
from pathlib import Path
from typing import Annotated

import typer

from fsm_trainer.cli import shell
from fsm_trainer.cli.tables import DEFAULT_SCHEDULE
from fsm_trainer.machine.errors import ConfigError
from fsm_trainer.machine.spec import load
from fsm_trainer.machine.world import System
from fsm_trainer.monitor.stream import Map, Stream
from fsm_trainer.monitor.watch import Monitor, Violation


@shell.command
def monitor(
    stream: Annotated[Path, shell.argument("STREAM", "A file of JSON lines; - reads what comes.")],
    names: Annotated[
        Path | None, shell.option("--map", "FILE", "What the stream's names mean, a YAML file.")
    ] = None,
    schedule: shell.Schedule = None,
    rollouts: shell.Rollouts = 2,
    deadline: Annotated[
        float, shell.option("--deadline", "SECONDS", "In which what has begun must end.", min=0)
    ] = inf,
    states: shell.States = None,
    as_json: shell.Json = False,
) -> None:
    """Hold another trainer's events against the tables.

    Tells each kind of violation once, with what led there, and exits with 1 if there is any.
    Without --map the lines speak of the tables' workers in the tables' words. See docs/monitor.md.
    """
    known = Map.read(names) if names is not None else None
    spec = load(schedule or (known.schedule if known else DEFAULT_SCHEDULE), states)
    system = System.of(spec, rollouts)
    system, world = known.compose(spec) if known else (system, system.initial())
    watch, read = Monitor(system, world, deadline), Stream(known)
    found: list[Violation] = []
    out = shell.console()
    try:
        with sys.stdin if str(stream) == "-" else stream.open(encoding="utf-8") as lines:
            for event in read.events(lines):
                for violation in watch.tell(event):
                    found.append(violation)
                    if not violation.again and not as_json:
                        out.print(str(violation), end="\n\n")
    except OSError as error:
        raise ConfigError(f"{stream}: can't be read: {error.strerror}. Give a file, or -") from None
    if not watch.count:
        raise ConfigError(f"{stream}: no event was told. Does --map name its fields and values?")
    if as_json:
        told = {"events": watch.count, "unread": dict(read.unread)}
        shell.print_json({**told, "violations": [asdict(each) for each in found]})
    else:
        kinds = sum(not each.again for each in found)
        text = f"{watch.count} events, {len(found)} violations of {kinds} kinds"
        out.print(text, style="red" if found else "green")
        for kind, count in read.unread.most_common():
            out.print(f"not read: {count} lines, {kind}")
    if found:
        raise typer.Exit(1)
