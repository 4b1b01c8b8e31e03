"""What a run without faults does: the planner's moves, played through the same ``step``."""

from __future__ import annotations

from collections import Counter

from fsm_trainer.machine.legal import actors_of
from fsm_trainer.machine.names import Trigger
from fsm_trainer.machine.planner import Few, Move, apply, plan
from fsm_trainer.machine.world import System, World

STEADY = "steady step"
"""Any step of a run but the first."""


def plan_run(system: System) -> dict[str, list[tuple[str, tuple[Move, ...]]]]:
    """What a run without faults does: its prologue, first and steady steps, and epilogue.

    Lanes are planned one after the other.
    """
    few, spec = Few(system, system.initial()), system.spec
    world, system = few.world, few.system
    steps = tuple(phase for lane in spec.schedule.lanes.values() for phase in lane)
    sections = {
        "prologue": spec.schedule.prologue,
        "first step": steps,
        STEADY: steps,
        "epilogue": spec.schedule.epilogue,
    }
    planned: dict[str, list[tuple[str, tuple[Move, ...]]]] = {}
    for section, names in sections.items():
        for name in names:
            phase = spec.phases[name]
            moves = plan(system, world, phase)
            for move in moves:
                world = apply(system, world, move)
            planned.setdefault(section, []).append((name, tuple(map(few.expanded, moves))))
            if phase.action is not None:
                world = _acted(system, world, phase.action)
    return planned


def counted(system: System, steps: int) -> Counter[tuple[str, str]]:
    """How often each worker takes each trigger in a run of so many steps, with a warm-up."""
    counts: Counter[tuple[str, str]] = Counter()
    for section, phases in plan_run(system).items():
        times = steps - 1 if section == STEADY else 1
        for move in (m for _, moves in phases for m in moves if m.name in list(Trigger)):
            counts.update({(worker, move.name): times for worker in move.workers})
    return counts


def _acted(system: System, world: World, action: str) -> World:
    names = actors_of(system, world, action)
    joint = any(system.table(n).actions[action].joint for n in names)
    for workers in [tuple(names)] if joint else [(n,) for n in names]:
        world = apply(system, world, Move(action, workers))
    return world
