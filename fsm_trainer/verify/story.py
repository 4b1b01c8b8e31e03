"""A trace told to people, and to programs."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Template

from fsm_trainer.machine import events as on
from fsm_trainer.machine.errors import ConfigError
from fsm_trainer.machine.names import Role
from fsm_trainer.machine.world import System
from fsm_trainer.verify.check import Step, Verdict, Violation
from fsm_trainer.verify.driven import THOUGHT


def sequence_diagram(system: System, violation: Violation) -> str:
    """A Mermaid sequence diagram of a violation: who was told what, did what, and what broke."""
    lines = ["sequenceDiagram", "    participant driver"]
    lines += [f"    participant {name}" for name in system.names]
    for step in violation.steps:
        lines += [f"    {line}" for line in _lines(system, step)]
    everybody = f"{next(iter(system.names))},{[*system.names][-1]}"
    text = violation.because.replace(";", ",").replace("#", "no. ")
    return "\n".join([*lines, f"    Note over {everybody}: {text}", ""])


def _lines(system: System, step: Step) -> Iterator[str]:
    match step.edge.event:
        case on.Begin(trigger=what, workers=names) | on.Act(action=what, workers=names):
            for name in names:
                yield f"driver->>{name}: {what}"
        case on.Commit(workers=names):
            for name in names:
                state = f", {system.get(step.node.world, name).state}" if step.node else ""
                yield f"{name}->>driver: committed{state}"
        case on.Acted(action=what, workers=names, ok=ok):
            for name in names:
                yield f"{name}->>driver: {what} {'ended' if ok else 'failed'}"
        case on.Done(effect=effect):
            yield f"{effect.worker}->>{effect.worker}: {effect}"
        case on.Failed(effect=effect):
            yield f"Note over {effect.worker}: {effect} fails"
        case on.Died(worker=name, lost=lost):
            yield f"Note over {name}: {'is lost' if lost else 'dies'}"
        case event:
            yield f"Note over {event.worker}: {_TOLD[type(event)]}"


_TOLD: dict[type[object], str] = {
    on.Undo: "its transition is undone",
    on.Sever: "gives up a broken lease",
    on.Confirmed: "is seen dead",
    on.Joined: "its place is taken again",
}


def for_programs(verdict: Verdict) -> dict[str, Any]:
    """What a check found, for programs; events by the names of `machine.events`."""
    found: dict[str, Any] = {
        "states": verdict.states,
        "transitions": verdict.transitions,
        "seconds": round(verdict.seconds, 2),
        "cut": verdict.cut,
        "violations": [],
    }
    if verdict.violation is not None:
        events = [
            {"label": step.edge.label, "event": type(step.edge.event).__name__}
            | asdict(step.edge.event)
            for step in verdict.violation.steps
        ]
        found["violations"] = [{"because": verdict.violation.because, "events": events}]
    return found


def write_test(
    file: Path, found: Iterable[tuple[System, Verdict]], *, fine: bool, states: Path | None
) -> None:
    """Write a pytest file that replays the first violation on the real `Lifecycle`.

    It names ``states`` by the way from itself to them, so that a repository may hold both.

    Raises:
        ConfigError: no trace shows what fails, such as that something never happens.
    """
    for system, violation in ((system, verdict.violation) for system, verdict in found):
        if violation is None:
            continue
        number, always = violation.number, system.spec.system.always
        if not number.isdecimal() and number not in ("refused", "recoverable"):
            remedy = "No trace shows that: fsm-train check itself is its test"
            raise ConfigError(f"--test {file}: {violation.because}. {remedy}")
        lines = [*_replayed(violation)]
        if number == "recoverable":
            lines.append(f'reaches("{violation.because.split()[2]}")')
        source = (files("fsm_trainer.verify") / "templates" / "replay.py.jinja").read_text("utf-8")
        text = Template(source, trim_blocks=True, keep_trailing_newline=True).render(
            number=number,
            holds=always.get(int(number)) if number.isdecimal() else None,
            schedule=system.spec.name,
            rollouts=[*system.names.values()].count(Role.ROLLOUT),
            because=violation.because,
            states=states and Path(os.path.relpath(states, file.parent)).as_posix(),
            names=sorted(set(re.findall(r"\b[A-Z]\w+(?=[(.])", "".join(lines)))),
            fine=fine,
            lines=lines,
        )
        file.write_text(text, encoding="utf-8")
        return


def _replayed(violation: Violation) -> Iterator[str]:
    late = frozenset[on.Effect]()
    for step in violation.steps:
        now = step.node.late if step.node else late
        new, late = sorted(now - late, key=str), now
        if step.edge.event != THOUGHT:
            yield f"event({_call(step.edge.event)}{f', late={_call(new)}' if new else ''})"


def _call(value: object) -> str:
    """An event, or effects, as one would write them."""
    told = re.sub(r"<Op\.(\w+): '\w+'>", r"Op.\1", repr(value))
    told = re.sub(r"<\w+\.\w+: ('\w+')>", r"\1", told)
    as_it_is = r", (epoch=0|version=None|lost=False|ok=True)\b"
    places = r"\b(trigger|action|workers?|effect|op|resource|link)="
    return re.sub(f"{as_it_is}|{places}", "", told).replace("'", '"')
