"""Who would move together, what would make it legal, and a world in which workers stand as told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fsm_trainer.machine.errors import Refused
from fsm_trainer.machine.legal import actors_of, joint_ends
from fsm_trainer.machine.names import LinkState, State
from fsm_trainer.machine.planner import plan
from fsm_trainer.machine.spec import Phase
from fsm_trainer.machine.version import Version
from fsm_trainer.machine.world import Link, System, Worker, World


def together(system: System, world: World, worker: str, asked: str) -> tuple[str, ...]:
    """Who moves or acts with a worker."""
    table = system.table(worker)
    edges = [t.joint for t in table.transitions if t.trigger == asked and t.joint is not None]
    action = table.actions.get(asked)
    ends: Sequence[str] = ()
    if edges:
        ends = joint_ends(system, world, edges[0], asked)
    elif action is not None and action.joint is not None:
        ends = actors_of(system, world, asked)
    return tuple(ends) if worker in ends else (worker,)


def way(
    system: System, world: World, worker: str, asked: str, ends: Sequence[str]
) -> list[str] | None:
    """The moves that would make it legal, as the reconciler would plan them; None without any."""
    if asked in system.table(worker).actions:
        return _moves(system, world, Phase(asked, {}, asked))
    edges = {
        system.names[name]: [t for t in system.table(name).transitions if t.trigger == asked]
        for name in ends
    }
    there = {role: frozenset(t.dest for t in rows) for role, rows in edges.items()}
    before = {role: frozenset(t.source for t in rows) for role, rows in edges.items()}
    for wants in (there, before):
        moves = _moves(system, world, Phase(asked, wants, None)) or []
        names = [move.partition("(")[0] for move in moves]
        if asked in names:
            return moves[: names.index(asked)] or None
    return moves or None


def _moves(system: System, world: World, phase: Phase) -> list[str] | None:
    try:
        return [str(move) for move in plan(system, world, phase)] or None
    except Refused:
        return None


def stand(
    system: System, world: World, places: Mapping[str, tuple[State, Version | None]]
) -> World:
    """The world in which workers are settled at these states; so the links have members.

    A worker at a link's hub that is given no version has a first one.
    """
    hubs = {link.hub for link in system.spec.links.values()}
    for name, (state, version) in places.items():
        held = frozenset(system.table(name).holds[state])
        epochs = tuple(max(world.links[i].epoch, 1) * (n in held) for n, i in system.links.items())
        if system.names[name] in hubs and state != State.DISCONNECTED:
            version = version or Version(1, 0)
        world = system.put(world, name, Worker(state, held, epochs=epochs, version=version))
    links = []
    for i, (link, ends) in enumerate(zip(world.links, system.all_ends.values(), strict=True)):
        members = frozenset(n for n in system.names if system.get(world, n).epochs[i])
        whole = {system.names[n] for n in ends} == {system.names[n] for n in members}
        if link.state != LinkState.BROKEN and members != link.members:
            up = LinkState.UP if whole else LinkState.BROKEN if members else LinkState.DOWN
            link = Link(up, max(link.epoch, 1), members)
        links.append(link)
    lineages = (worker.version.lineage for worker in world.workers if worker.version)
    return World(world.workers, tuple(links), max([world.lineage, *lineages]))
