"""The one transition relation: ``step(system, world, event) -> (world, effects)``.

Pure: no clock, no I/O, no randomness. The runtime, the planner, the conformance check, the
explorer and the simulator all call it, and no second definition of a transition exists.

A transition runs in four kinds of event: `Begin` (its guard was true), one `Done` or `Failed` for
every effect, and `Commit`. Its effects are derived from what the two states hold: releases first,
in reverse order, on all ends of a joint transition; then acquisitions, in order.

>>> from fsm_trainer.machine.spec import load
>>> system = System.of(load("disaggregated"), rollouts=1)
>>> world, effects = step(system, system.initial(), Begin("start", ("actor",)))
>>> str(effects[0])
'acquire bank'
>>> world, _ = step(system, world, Done(effects[0]))
>>> world, _ = step(system, world, Commit(("actor",)))
>>> str(system.get(world, "actor").state)
'sleeping'
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fsm_trainer.machine.errors import LeaseExpired, Refused
from fsm_trainer.machine.events import (
    Act,
    Acted,
    Begin,
    Commit,
    Confirmed,
    Died,
    Done,
    Effect,
    Event,
    Failed,
    Joined,
    Op,
    Sever,
    Undo,
)
from fsm_trainer.machine.legal import (
    action_refusals,
    arriving,
    described,
    enabled,
    falling,
    is_due,
    joint_ends,
    joint_of,
    movers_of,
    next_effect,
    refusals,
)
from fsm_trainer.machine.names import LinkState, State, Trigger
from fsm_trainer.machine.spec import Action, LinkSpec, Transition
from fsm_trainer.machine.version import Version
from fsm_trainer.machine.world import Link, System, Worker, World

__all__ = [
    "Act", "Acted", "Begin", "Commit", "Confirmed", "Died", "Done", "Effect", "Event", "Failed",
    "Joined", "Op", "Sever", "Undo", "action_refusals", "advance", "enabled", "falling",
    "joint_ends", "next_effect", "refusals", "step",
]  # fmt: skip

Effects = tuple[Effect, ...]


def step(system: System, world: World, event: Event) -> tuple[World, Effects]:
    """The world after ``event``, and the effects that it newly allows.

    Raises:
        Refused: the event is illegal now; the world is as before.
        LeaseExpired: the event speaks of an epoch that has ended.
    """
    before, after = set(enabled(system, world)), advance(system, world, event)
    kill: Effects = ()
    if isinstance(event, Died) or (isinstance(event, Failed) and event.effect.op is Op.RELEASE):
        name = event.worker if isinstance(event, Died) else event.effect.worker
        kill = (Effect(name, Op.KILL),)
    return after, (*kill, *(e for e in enabled(system, after) if e not in before))


def advance(system: System, world: World, event: Event) -> World:
    """The world after ``event``: `step` for those who ask for effects only when they want them."""
    return _STEPS[type(event)](system, world, event)


def _begin(system: System, world: World, event: Begin) -> World:
    edges = {name: _edge(system, world, event, name) for name in event.workers}
    links = {edge.joint for edge in edges.values() if edge.joint is not None}
    for link in links:
        ends = joint_ends(system, world, link, event.trigger)
        if set(ends) != set(event.workers):
            _refuse(system, world, event, [f"{link} moves all of {list(ends)} together"])
        if event.trigger == Trigger.CONNECT:
            world = _open(system, world, event, link)
    for name, edge in edges.items():
        if edge.joint is None:
            _edge(system, world, event, name)  # those before it may have taken what it needs
        worker = system.get(world, name)
        version = event.version if event.trigger == Trigger.START else worker.version
        moved = worker._replace(move=edge.trigger, dest=edge.dest, version=version)
        world = system.put(world, name, moved)
    return world


def _edge(system: System, world: World, event: Begin, name: str) -> Transition:
    because = refusals(system, world, event.trigger, name)
    worker = system.get(world, name)
    edge = system.table(name).edge(event.trigger, worker.state)
    if because or edge is None:
        raise Refused(name, described(worker), event.trigger, because, _ways(system, event, name))
    return edge


def _ways(system: System, event: Begin, name: str) -> str:
    edges = [t for t in system.table(name).transitions if t.trigger == event.trigger]
    return " or ".join(
        f"{t.source}" + (f" and {t.guard.text}" if t.guard.text else "") for t in edges
    )


def _refuse(system: System, world: World, event: Begin | Act, because: list[str]) -> None:
    name = event.workers[0] if event.workers else "nobody"
    state = described(system.get(world, name)) if event.workers else "absent"
    asked = event.trigger if isinstance(event, Begin) else event.action
    raise Refused(name, state, asked, because)


def _link_moves(system: System, world: World, link: str, trigger: str, **new: Any) -> World:
    """Move a link as ``link.yaml`` says; a trigger that has no row there leaves it as it is."""
    i = system.links[link]
    here = world.links[i]
    state = system.spec.link_moves.get((here.state, trigger), here.state)
    links = (*world.links[:i], here._replace(state=state, **new), *world.links[i + 1 :])
    return world._replace(links=links)


def _open(system: System, world: World, event: Begin, link: str) -> World:
    here: Link = world.links[system.links[link]]
    epoch = event.epoch or here.epoch + 1
    if epoch <= here.epoch or (LinkState(here.state), "open") not in system.spec.link_moves:
        why = f"{link} is {here.state} at epoch {here.epoch} and can't open epoch {epoch}"
        _refuse(system, world, event, [why])
    members = frozenset(system.ends(world, system.spec.links[link]))
    return _link_moves(system, world, link, "open", epoch=epoch, members=members)


def _done(system: System, world: World, event: Done) -> World:
    effect = event.effect
    if effect.op is Op.KILL:
        return _confirmed(system, world, Confirmed(effect.worker))
    worker = system.get(world, effect.worker)
    falls = falling(system, effect.worker, worker)
    _expected(system, world, effect, falls)
    acquired = effect.op is Op.ACQUIRE
    held = worker.held | {effect.resource} if acquired else worker.held - {effect.resource}
    worker = worker._replace(held=held)
    if effect.resource in system.links:
        i = system.links[effect.resource]
        epoch = effect.epoch if acquired else 0
        epochs = (*worker.epochs[:i], epoch, *worker.epochs[i + 1 :])
        world = system.put(world, effect.worker, worker._replace(epochs=epochs))
        world = _close(system, world, effect.resource)
    else:
        torn = _receives(system, effect.worker, effect.resource)
        version = None if torn else worker.version
        world = system.put(world, effect.worker, worker._replace(version=version))
    return _fall(system, world, effect.worker, world) if falls else world


def _receives(system: System, name: str, resource: str) -> bool:
    """Whether the resource is what a link brings to the worker: acquired anew, it is torn."""
    links = system.spec.links.values()
    return any(k.spokes == system.names[name] and k.carries == resource for k in links)


def _close(system: System, world: World, link: str) -> World:
    """A link whose last end has left is down."""
    i = system.links[link]
    held = any(w.epochs[i] for w in world.workers)
    if held or world.links[i].state == LinkState.OPENING:
        return world
    return _link_moves(system, world, link, "close", members=frozenset())


def _expected(system: System, world: World, effect: Effect, falls: bool) -> None:
    """Accept a report of what is due, or of what was under way when the worker began to fall."""
    worker = system.get(world, effect.worker)
    late = worker.held if effect.op is Op.RELEASE else worker.late - worker.held
    if is_due(system, world, effect) or (falls and effect.resource in late):
        return
    if effect.epoch and effect.resource in system.links:
        epoch = world.links[system.links[effect.resource]].epoch
        if epoch != effect.epoch:
            raise LeaseExpired(effect.resource, effect.epoch, f"the link is at epoch {epoch}")
    because = [f"no such effect is due; {due_of(system, world, effect.worker)}"]
    raise Refused(effect.worker, described(worker), str(effect), because)


def due_of(system: System, world: World, name: str) -> str:
    effect = next_effect(system, world, name, system.get(world, name))
    return f"the next one is {effect}" if effect else "none is"


def _failed(system: System, world: World, event: Failed) -> World:
    effect = event.effect
    if effect.op is Op.KILL:
        return world  # not confirmed: its claim on the devices stays
    falls = falling(system, effect.worker, system.get(world, effect.worker))
    _expected(system, world, effect, falls)
    if effect.op is Op.RELEASE:
        # Nobody knows what the process still holds, so it must end.
        return _died(system, world, Died(effect.worker))
    return world if falls else _undo(system, world, Undo(effect.worker))


def _undo(system: System, world: World, event: Undo) -> World:
    worker = system.get(world, event.worker)
    if worker.move is None:
        _refuse(system, world, Begin("undo", (event.worker,)), ["it is in no transition"])
    link = joint_of(system, event.worker, worker)
    before = world
    if link is None:
        return _fall(system, world, event.worker, before)
    movers = [n for n in movers_of(system, world, link) if system.within(n)]
    world = _link_moves(system, world, link, "break")
    for name in movers if worker.move == Trigger.CONNECT else [event.worker]:
        world = _fall(system, world, name, before)
    return _close(system, world, link)


def _fall(system: System, world: World, name: str, before: World) -> World:
    """Turn a worker towards the largest state that what it keeps still makes true.

    It keeps what both its committed state and it hold, less a link whose lease is no longer good.
    An undo acquires nothing: what a mixed transition had released already is not taken back, the
    planner will ask for it if it's wanted. What it could acquire ``before`` may arrive all the
    same, so its claim stays until the worker has settled.
    """
    worker = system.get(world, name)
    table = system.table(name)
    late = arriving(system, before, name)
    bad = {k for k in system.links if not system.lease(world, name, k)}
    dest = table.largest_state(worker.held & frozenset(table.holds[worker.state]) - bad)
    return system.put(world, name, worker._replace(dest=dest, late=worker.late | late))


def _commit(system: System, world: World, event: Commit) -> World:
    for name in event.workers:
        worker = system.get(world, name)
        due = next_effect(system, world, name, worker)
        if worker.dest is None or due is not None:
            why = due_of(system, world, name) if worker.dest else "it is in no transition"
            _refuse(system, world, Begin("commit", (name,)), [f"not all effects are done: {why}"])
        link = joint_of(system, name, worker)
        opens = worker.move == Trigger.CONNECT and worker.dest == State.CONNECTED
        if link is not None and opens:
            movers = {n for n in movers_of(system, world, link) if system.within(n)}
            if movers != set(event.workers):
                why = f"{link} commits {sorted(movers)} together"
                _refuse(system, world, Begin("commit", (name,)), [why])
    for name in event.workers:
        world = _settle(system, world, name)
    return world


def _settle(system: System, world: World, name: str) -> World:
    worker = system.get(world, name)
    link = joint_of(system, name, worker)
    if link is not None and worker.move == Trigger.CONNECT and worker.dest == State.CONNECTED:
        world = _link_moves(system, world, link, "opened")
    dest = worker.dest or worker.state
    version = worker.version if dest != State.DISCONNECTED else None
    hub = any(k.hub == system.names[name] for k in system.spec.links.values())
    if hub and worker.move == Trigger.START and dest != State.DISCONNECTED:
        lineage = version.lineage if version and version.lineage else world.lineage + 1
        world = world._replace(lineage=max(world.lineage, lineage))
        version = Version(lineage, version.number if version else 0)
    settled = worker._replace(state=dest, move=None, dest=None, version=version, late=frozenset())
    return system.put(world, name, settled)


def _act(system: System, world: World, event: Act) -> World:
    for name in event.workers:
        because = action_refusals(system, world, event.action, name)
        if because:
            state = described(system.get(world, name))
            raise Refused(name, state, event.action, because)
    link = _joint_action(system, event)
    if link is not None:
        ends = tuple(n for n in system.ends(world, link[1]) if system.within(n))
        if set(ends) != set(event.workers):
            _refuse(system, world, event, [f"{event.action} takes all of {list(ends)} together"])
    for name in event.workers:
        worker = system.get(world, name)
        torn = link is not None and system.names[name] == link[1].spokes
        version = None if torn else worker.version
        started = worker._replace(jobs=(*worker.jobs, event.action), version=version)
        world = system.put(world, name, started)
    return world


def _joint_action(system: System, event: Act | Acted) -> tuple[str, LinkSpec] | None:
    actions: list[Action] = [system.table(n).actions[event.action] for n in event.workers]
    joint = next((a.joint for a in actions if a.joint is not None), None)
    return None if joint is None else (joint, system.spec.links[joint])


def _acted(system: System, world: World, event: Acted) -> World:
    link = _joint_action(system, event)
    workers = [n for n in event.workers if event.action in system.get(world, n).jobs]
    complete = event.ok and len(workers) == len(event.workers)
    if link is not None:
        # After an abort a collective can return normally, so a result counts only if every lease
        # is still good afterwards.
        complete = complete and all(system.lease(world, n, link[0]) for n in workers)
    for name in workers:
        worker = system.get(world, name)
        jobs = list(worker.jobs)
        jobs.remove(event.action)
        version = _version_after(system, world, event, name, link if complete else None)
        world = system.put(world, name, worker._replace(jobs=tuple(jobs), version=version))
    return world


def _version_after(
    system: System, world: World, event: Acted, name: str, link: tuple[str, LinkSpec] | None
) -> Version | None:
    worker = system.get(world, name)
    version = worker.version
    if link is not None and system.names[name] == link[1].spokes:
        hubs = [n for n, r in system.names.items() if r == link[1].hub]
        return system.get(world, hubs[0]).version
    updates = system.table(name).actions[event.action].updates
    if updates and event.ok and version is not None:
        return Version(version.lineage, version.number + 1)
    return version


def _sever(system: System, world: World, event: Sever) -> World:
    worker = system.get(world, event.worker)
    held = worker.epochs[system.links[event.link]]
    good = system.lease(world, event.worker, event.link)
    if not held or good or worker.move is not None or worker.jobs:
        why = (
            f"it is in the middle of {worker.move or worker.jobs[0]}"
            if worker.move or worker.jobs
            else f"its lease on {event.link} is good" if good
            else f"it holds no lease on {event.link}"
        )  # fmt: skip
        raise Refused(event.worker, described(worker), Trigger.SEVER, [why])
    world = system.put(world, event.worker, worker._replace(move=Trigger.SEVER))
    return _fall(system, world, event.worker, world)


def _died(system: System, world: World, event: Died) -> World:
    dead = system.get(world, event.worker)
    ghost = dead.held | dead.undead | dead.late | arriving(system, world, event.worker)
    before, movers = world, {k: movers_of(system, world, k) for k in system.links}
    nobody = Worker(epochs=(0,) * len(system.links), live=not event.lost, undead=ghost)
    world = system.put(world, event.worker, nobody)
    for link, i in system.links.items():
        if event.worker not in world.links[i].members.union(movers[link]):
            continue
        world = _link_moves(system, world, link, "break")
        for name in movers[link]:  # the dead will not release what they wait for
            if name != event.worker and system.within(name):
                world = _fall(system, world, name, before)
        world = _close(system, world, link)
    return world


def _confirmed(system: System, world: World, event: Confirmed) -> World:
    worker = system.get(world, event.worker)
    return system.put(world, event.worker, worker._replace(undead=frozenset()))


def _joined(system: System, world: World, event: Joined) -> World:
    worker = system.get(world, event.worker)
    if worker.live:
        raise Refused(event.worker, described(worker), "join", ["it was never lost"])
    return system.put(world, event.worker, worker._replace(live=True))


_STEPS: dict[type[Any], Callable[[System, World, Any], World]] = {
    Begin: _begin, Done: _done, Failed: _failed, Undo: _undo, Commit: _commit, Act: _act,
    Acted: _acted, Sever: _sever, Died: _died, Confirmed: _confirmed, Joined: _joined,
}  # fmt: skip
