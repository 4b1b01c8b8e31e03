"""The planner: the shortest legal way to what a phase wants, breadth-first on the same ``step``.

Workers of a role that are in equal positions move together, so that the search does not grow with
the number of rollout workers. ``push`` is a move that it may plan; ``sever`` and ``fail`` are not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from fsm_trainer.machine import events as on
from fsm_trainer.machine import legal
from fsm_trainer.machine.errors import Refused
from fsm_trainer.machine.names import Trigger
from fsm_trainer.machine.spec import Phase
from fsm_trainer.machine.step import advance
from fsm_trainer.machine.world import System, World

ORDER = ("sleep", "disconnect", "start", "wake", "connect", "push", "stop")
"""Ties between ways of equal length are broken in this order: what frees devices goes first."""


Apply = Callable[[System, World, "Move"], World]
"""As :func:`apply`."""


@dataclass(frozen=True, slots=True)
class Move:
    """One move of a plan: a trigger, or the action ``push``, for workers that move together."""

    name: str
    workers: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name}({', '.join(self.workers)})"


def settle(system: System, world: World) -> World:
    """Run every effect that is due to its good end, and commit."""
    while due := legal.enabled(system, world):
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


def unmet(system: System, world: World, phase: Phase) -> Iterator[str]:
    """Why a phase can't run its action yet; nothing when its wants hold and the action is legal."""
    for name, role in system.names.items():
        worker = system.get(world, name)
        if worker.live and worker.move is not None:
            yield f"{name} is in the middle of {worker.move}"
        wanted = phase.wants.get(role)
        if worker.live and wanted is not None and worker.state not in wanted:
            yield f"{name} is {worker.state}, wanted {' or '.join(sorted(wanted))}"
    if phase.action is not None:
        names = legal.actors_of(system, world, phase.action)
        if not names:
            yield f"nobody is left who could {phase.action}"
        for name in names:
            yield from legal.action_refusals(system, world, phase.action, name)


def ready(system: System, world: World, phase: Phase) -> bool:
    """Whether a phase can run its action."""
    return next(unmet(system, world, phase), None) is None


def plan(system: System, world: World, phase: Phase, apply: Apply = apply) -> tuple[Move, ...]:
    """The shortest sequence of moves after which the phase can run.

    Who plans again and again gives an ``apply`` that remembers.

    Raises:
        Refused: no legal sequence leads there.
    """
    few = Few(system, world)
    return tuple(few.expanded(move) for move in _search(few.system, few.world, phase, apply))


class Few:
    """A system in which one worker stands for all that are in the same position.

    They move together, so the search does not grow with them, and the devices of one are as full
    as those of the others.
    """

    def __init__(self, system: System, world: World) -> None:
        self._all = system
        self._classes = {names[0]: names for names in _classes(system, world)}
        roles = {n: role for n, role in system.names.items() if n in self._classes}
        self.system = System(system.spec, roles, system.scope, system.sizes, system.capacity)
        links = tuple(k._replace(members=k.members.intersection(roles)) for k in world.links)
        self.world = World(tuple(system.get(world, name) for name in roles), links, world.lineage)

    def expanded(self, move: Move) -> Move:
        """The move of all for whom its workers stand."""
        moved = {name for one in move.workers for name in self._classes[one]}
        return Move(move.name, tuple(name for name in self._all.names if name in moved))


def _classes(system: System, world: World) -> list[tuple[str, ...]]:
    """The workers by position; who shares a device is alone in its position."""
    classes: dict[object, list[str]] = {}
    for name, role in system.names.items():
        alone = system.spec.schedule.devices[role] != "own" and name
        member = tuple(name in link.members for link in world.links)
        classes.setdefault((role, alone, member, system.get(world, name)), []).append(name)
    return [tuple(names) for names in classes.values()]


def _search(system: System, start: World, phase: Phase, apply: Apply) -> tuple[Move, ...]:
    if ready(system, start, phase):
        return ()
    seen, todo = {position(start)}, [(start, tuple[Move, ...]())]
    for world, way in todo:  # which grows meanwhile
        for move in _moves(system, world):
            try:
                after = apply(system, world, move)
            except Refused:
                continue
            if (here := position(after)) not in seen:
                if ready(system, after, phase):
                    return (*way, move)
                seen.add(here)
                todo.append((after, (*way, move)))
    because = [*unmet(system, start, phase)]
    raise Refused("the planner", "stuck", phase.name, because, "no sequence of moves leads there")


def _moves(system: System, world: World) -> list[Move]:
    found: set[Move] = set()
    for names in _classes(system, world):
        worker = system.get(world, names[0])
        for edge in system.table(names[0]).transitions if worker.live and not worker.move else ():
            if edge.source == worker.state and edge.joint is None:
                found.add(Move(edge.trigger, names))
    found.add(Move("push", tuple(legal.actors_of(system, world, "push"))))
    for link in system.links:
        for trigger in (Trigger.CONNECT, Trigger.DISCONNECT):
            found.add(Move(trigger, legal.joint_ends(system, world, link, trigger)))
    return sorted((m for m in found if m.workers), key=lambda m: (ORDER.index(m.name), m.workers))


def position(world: World) -> object:
    """What guards can tell of a world: epochs and lineages are read by equality only.

    So there are finitely many positions, although epochs and lineages only grow.
    """
    lineages = sorted({w.version.lineage for w in world.workers if w.version})
    now = [link.epoch for link in world.links]
    workers = tuple(
        w._replace(
            epochs=tuple(e and 1 + (e == k) for e, k in zip(w.epochs, now, strict=True)),
            version=w.version and w.version._replace(lineage=lineages.index(w.version.lineage)),
        )
        for w in world.workers
    )
    return workers, tuple((link.state, link.members) for link in world.links)
