"""Faults: what can go wrong where, and which of it a seed asks for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from random import Random

from fsm_trainer.machine.events import Op
from fsm_trainer.machine.names import Role
from fsm_trainer.machine.world import System


class What(StrEnum):
    """What goes wrong at a boundary."""

    CRASH_BEFORE = "crash before"
    """The process dies, and the work is not done."""
    CRASH_AFTER = "crash after"
    """The process dies when the work is done, before it tells."""
    FAIL = "fail"
    """An error; what was to be acquired is not held."""
    HANG = "hang"
    """Neither work nor answer, ever; the process lives on until it is killed."""
    LATE = "late"
    """Work and answer come when the deadline has passed and the worker was declared dead."""
    LOST = "lost"
    """The work is done, and the answer does not arrive."""


EFFECT = (What.CRASH_BEFORE, What.CRASH_AFTER, What.FAIL, What.HANG)
CALLS = {
    "begin": (What.CRASH_BEFORE, What.LOST),
    "acquire": (What.CRASH_BEFORE, What.LOST),
    "commit": (What.CRASH_BEFORE, What.LOST),
    "undo": (What.CRASH_BEFORE, What.LOST),
    "sever": (What.CRASH_BEFORE, What.LOST),
    "died": (What.CRASH_BEFORE, What.LOST),
    "checksums": (What.CRASH_BEFORE, What.FAIL, What.LOST),
    "kill": (What.FAIL,),
    "respawn": (What.FAIL, What.LATE),
}
"""The calls that a worker answers beside its effects and actions, and what may happen to them."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Something goes wrong when a worker comes to a boundary for the ``nth`` time.

    ``where`` is an effect ("acquire weights"), an action ("train") or a call ("call commit").
    """

    worker: str
    where: str
    what: What
    nth: int = 1

    def __str__(self) -> str:
        return f"{self.worker}: {self.what} {self.where!r} ({self.nth}.)"


def points(system: System) -> list[tuple[Role, str, What]]:
    """All that can go wrong in a system: role, boundary and kind."""
    return list(dict.fromkeys(_points(system)))


def _points(system: System) -> Iterator[tuple[Role, str, What]]:
    for role, table in system.spec.roles.items():
        for resource in dict.fromkeys(r for held in table.holds.values() for r in held):
            yield from ((role, f"{Op.RELEASE} {resource}", what) for what in EFFECT)
            late = (*EFFECT, What.LATE)
            yield from ((role, f"{Op.ACQUIRE} {resource}", what) for what in late)
        for action in table.actions:
            yield from ((role, action, what) for what in What)
        linked = any(r in system.links for held in table.holds.values() for r in held)
        told = {"sever": linked, "checksums": "push" in table.actions}
        for call, kinds in CALLS.items():
            if told.get(call, True):
                yield from ((role, f"call {call}", what) for what in kinds)


def draw(system: System, seed: int, random: Random, most: int) -> tuple[Fault, ...]:
    """The faults of a seed, at most ``most``; consecutive seeds begin with all points in turn."""
    known = points(system)
    chosen = [known[seed % len(known)]]
    chosen += [random.choice(known) for _ in range(random.randrange(most))]
    faults: list[Fault] = []
    for role, where, what in chosen:
        worker = random.choice([name for name, r in system.names.items() if r is role])
        nth = 1 if random.random() < 0.2 else random.randint(2, 12)
        faults += alone(system, worker, where, what, nth)
    return tuple(dict.fromkeys(faults[:most]))


def alone(system: System, worker: str, where: str, what: What, nth: int = 1) -> tuple[Fault, ...]:
    """A fault, after another one where only that leads to its boundary."""
    cause = _cause(system, worker, where, nth)
    return (*cause, Fault(worker, where, what, 1 if cause else nth))


def _cause(system: System, worker: str, where: str, nth: int) -> tuple[Fault, ...]:
    table = system.table(worker)
    match where:
        case "call kill" | "call respawn":
            # A trainer is started again only where there is a checkpoint to go back to.
            work = {Role.ACTOR: "train", Role.CRITIC: "values"}.get(system.names[worker])
            fault = Fault(worker, work or "generate", What.CRASH_BEFORE, nth + 2)
            return (fault,)
        case "call undo":
            last = max(table.holds.values(), key=len)[-1]
            return (Fault(worker, f"{Op.ACQUIRE} {last}", What.FAIL, nth),)
        case "call died":
            peer = next(name for name in system.names if name != worker)
            return (Fault(peer, "call commit", What.CRASH_BEFORE, nth),)
        case "call sever":
            peer = next(n for n in reversed([*system.names]) if n != worker)
            return (Fault(peer, "push", What.CRASH_BEFORE, nth),)
    return ()
