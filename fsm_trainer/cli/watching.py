"""``monitor``: another trainer's events against the tables."""

from __future__ import annotations

import sys
from dataclasses import asdict
from math import inf
from pathlib import Path
from typing import Annotated

import typer

from fsm_trainer.cli import shell
from fsm_trainer.document import Document
from fsm_trainer.machine.errors import ConfigError
from fsm_trainer.machine.spec import load
from fsm_trainer.monitor.stream import Map, Stream
from fsm_trainer.monitor.watch import Monitor, Violation


@shell.command
def monitor(
    stream: Annotated[Path, shell.argument("STREAM", "A file of JSON lines; - reads what comes.")],
    names: Annotated[Path, shell.option("--map", "FILE", "What the stream's names mean: YAML.")],
    schedule: shell.Schedule = None,
    deadline: Annotated[
        float, shell.option("--deadline", "SECONDS", "In which what has begun must end.", min=0)
    ] = inf,
    states: shell.States = None,
    as_json: shell.Json = False,
) -> None:
    """Hold another trainer's events against the tables.

    Tells each kind of violation once, with what led there, and exits with 1 if there is any.
    The schedule is that of the map. See docs/monitor.md.
    """
    document = Document(names, ConfigError)
    known = document.parse(Map)
    spec = load(schedule or known.schedule, states)
    for name in (n for n, place in known.workers.items() if place.role not in spec.roles):
        has = f"schedule {spec.name} has no such role. It has {', '.join(spec.roles)}"
        raise document.error(has, "workers", name, "role")
    watch, read, out = Monitor(*known.compose(spec), deadline), Stream(known), shell.console()
    found: list[Violation] = []
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
        text = f"events: {watch.count}, violations: {len(found)}, kinds: {kinds}"
        out.print(text, style="red" if found else "green")
        for kind, count in read.unread.most_common():
            out.print(f"not read: {count} × {kind}")
    if found:
        raise typer.Exit(1)
