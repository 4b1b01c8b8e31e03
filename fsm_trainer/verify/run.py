"""What a run without faults does: the planner's moves, played through the same ``step``."""

from __future__ import annotations

from fsm_trainer.machine.planner import Few, Move, actors_of, apply, plan
from fsm_trainer.machine.world import System, World


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
        "steady step": steps,
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


def _acted(system: System, world: World, action: str) -> World:
    names = actors_of(system, world, action)
    joint = any(system.table(n).actions[action].joint for n in names)
    for workers in [tuple(names)] if joint else [(n,) for n in names]:
        world = apply(system, world, Move(action, workers))
    return world
