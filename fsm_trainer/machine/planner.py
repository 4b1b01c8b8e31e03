"""The planner: the shortest legal way to what a phase wants, breadth-first on the same ``step``.

Workers of a role that are in equal positions move together, so that the search does not grow with
the number of rollout workers. ``push`` is a move that it may plan; ``sever`` and ``fail`` are not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from fsm_trainer.machine import events as on
from fsm_trainer.machine.errors import Refused
from fsm_trainer.machine.names import Role, Trigger
from fsm_trainer.machine.spec import Phase
from fsm_trainer.machine.step import action_refusals, advance, enabled, joint_ends
from fsm_trainer.machine.world import System, World

ORDER = ("sleep", "disconnect", "start", "wake", "connect", "push", "stop")
"""Ties between ways of equal length are broken in this order: what frees devices goes first."""


@dataclass(frozen=True, slots=True)
class Move:
    """One move of a plan: a trigger, or the action ``push``, for workers that move together."""

    name: str
    workers: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name}({', '.join(self.workers)})"


def settle(system: System, world: World) -> World:
    """Run every effect that is due to its good end, and commit."""
    while due := enabled(system, world):
        for effect in due:  # none of them blocks another one
            world = advance(system, world, on.Done(effect))
    moving = tuple(n for n in system.names if system.get(world, n).move is not None)
    return advance(system, world, on.Commit(moving)) if moving else world


def apply(system: System, world: World, move: Move) -> World:
    """The world after a move that ended well.

    Raises:
        Refused: the move is illegal.
    """
    if move.name in list(Trigger):
        return settle(system, advance(system, world, on.Begin(move.name, move.workers)))
    world = advance(system, world, on.Act(move.name, move.workers))
    return advance(system, world, on.Acted(move.name, move.workers))


def actors_of(system: System, world: World, action: str) -> list[str]:
    """The live workers whose role has the action."""
    names = system.names
    return [n for n in names if system.get(world, n).live and action in system.table(n).actions]


def unmet(system: System, world: World, phase: Phase) -> list[str]:
    """Why a phase can't run its action yet; empty when its wants hold and the action is legal."""
    because = []
    for name, role in system.names.items():
        worker = system.get(world, name)
        if not worker.live:
            continue
        if worker.move is not None:
            because.append(f"{name} is in the middle of {worker.move}")
        wanted = phase.wants.get(role)
        if wanted is not None and worker.state not in wanted:
            because.append(f"{name} is {worker.state}, wanted {' or '.join(sorted(wanted))}")
    if phase.action is not None:
        names = actors_of(system, world, phase.action)
        if not names:
            because.append(f"nobody is left who could {phase.action}")
        for name in names:
            because += action_refusals(system, world, phase.action, name)
    return because


class Planner:
    """Plans, and remembers what it planned.

    Raises (from :meth:`plan`):
        Refused: no legal sequence leads to the phase.
    """

    def __init__(self, system: System) -> None:
        self.system = system
        self._plans: dict[tuple[World, str], tuple[Move, ...]] = {}

    def plan(self, world: World, phase: Phase) -> tuple[Move, ...]:
        """The shortest sequence of moves after which the phase can run."""
        key = (_anonymous(world), phase.name)
        if key not in self._plans:
            self._plans[key] = self._search(key[0], phase)
        return self._plans[key]

    def _search(self, start: World, phase: Phase) -> tuple[Move, ...]:
        came: dict[World, tuple[World, Move] | None] = {start: None}
        todo = deque([start])
        while todo:
            world = todo.popleft()
            if not unmet(self.system, world, phase):
                return self._way(came, world)
            for move in self._moves(world):
                try:
                    after = _anonymous(apply(self.system, world, move))
                except Refused:
                    continue
                if after not in came:
                    came[after] = (world, move)
                    todo.append(after)
        because = unmet(self.system, start, phase)
        raise Refused(
            "the planner", "stuck", phase.name, because, "no sequence of moves leads there"
        )

    def _way(self, came: dict[World, tuple[World, Move] | None], world: World) -> tuple[Move, ...]:
        moves: list[Move] = []
        while (origin := came[world]) is not None:
            world, move = origin
            moves.append(move)
        return tuple(reversed(moves))

    def _moves(self, world: World) -> Iterator[Move]:
        found: set[Move] = set()
        for names in self._classes(world):
            worker = self.system.get(world, names[0])
            for edge in self.system.table(names[0]).transitions:
                if edge.source == worker.state and edge.joint is None:
                    found.add(Move(edge.trigger, names))
        for link in self.system.links:
            for trigger in (Trigger.CONNECT, Trigger.DISCONNECT):
                found.add(Move(trigger, joint_ends(self.system, world, link, trigger)))
            found.add(Move("push", tuple(self.system.ends(world, self.system.spec.links[link]))))
        legal = [m for m in found if m.workers]
        yield from sorted(legal, key=lambda m: (ORDER.index(m.name), m.workers))

    def _classes(self, world: World) -> list[tuple[str, ...]]:
        groups: dict[object, list[str]] = {}
        for name, role in self.system.names.items():
            worker = self.system.get(world, name)
            if worker.live and worker.move is None:
                groups.setdefault((role, worker if role is Role.ROLLOUT else name), []).append(name)
        return [tuple(names) for names in groups.values()]


def _anonymous(world: World) -> World:
    """The world with epochs and lineages counted anew, so that plans can be remembered.

    Guards read epochs and lineages by equality only, and versions by equality and order.
    """
    current = [link.epoch for link in world.links]
    newest = max((w.version for w in world.workers if w.version), default=None)

    def rename(epoch: int, now: int) -> int:
        return 0 if not epoch else 2 if epoch == now else 1

    workers = []
    for w in world.workers:
        epochs = tuple(rename(e, now) for e, now in zip(w.epochs, current, strict=True))
        version = w.version
        if version is not None and newest is not None:
            same = version.lineage == newest.lineage
            version = type(version)(int(same) + 1, version.number - newest.number)
        workers.append(w._replace(epochs=epochs, version=version))
    links = tuple(k._replace(epoch=2 if k.epoch else 0) for k in world.links)
    return World(tuple(workers), links, 2 if world.lineage else 0)


def plan_run(system: System) -> dict[str, list[tuple[str, tuple[Move, ...]]]]:
    """What a run without faults does: its prologue, first and steady steps, and epilogue.

    Lanes are planned one after the other.
    """
    planner, world, spec = Planner(system), system.initial(), system.spec
    steps = tuple(phase for lane in spec.schedule.lanes.values() for phase in lane)
    sections = {
        "prologue": spec.schedule.prologue,
        "first step": steps,
        "steady step": steps,
        "epilogue": spec.schedule.epilogue,
    }
    plan: dict[str, list[tuple[str, tuple[Move, ...]]]] = {}
    for section, names in sections.items():
        for name in names:
            phase = spec.phases[name]
            moves = planner.plan(world, phase)
            for move in moves:
                world = apply(system, world, move)
            plan.setdefault(section, []).append((name, moves))
            if phase.action is not None:
                world = _acted(system, world, phase.action)
    return plan


def _acted(system: System, world: World, action: str) -> World:
    names = actors_of(system, world, action)
    joint = any(system.table(n).actions[action].joint for n in names)
    for workers in [tuple(names)] if joint else [(n,) for n in names]:
        world = apply(system, world, Move(action, workers))
    return world
