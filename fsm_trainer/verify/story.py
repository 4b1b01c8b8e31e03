"""A trace told to people, and to programs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from fsm_trainer.machine import events as on
from fsm_trainer.machine.world import System
from fsm_trainer.verify.check import Step, Verdict, Violation


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
