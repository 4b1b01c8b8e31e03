"""The one transition relation: ``step(system, world, event) -> (world, effects)``.

Pure: no clock, no I/O, no randomness. The runtime, the planner, the conformance check, the
explorer and the simulator all call it, and no second definition of a transition exists.

A transition runs in four kinds of event: `Begin` (its guard was true), one `Done` or `Failed` for
every effect, and `Commit`. Its effects are derived from what the two states hold: releases first,
in reverse order, on all ends of a joint transition; then acquisitions, in order.

>>> from fsm_trainer.machine.events import Begin, Commit, Done
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

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from fsm_trainer.machine import events as on
from fsm_trainer.machine import legal
from fsm_trainer.machine.errors import LeaseExpired, Refused
from fsm_trainer.machine.events import Effect, Op
from fsm_trainer.machine.names import LinkState, State, Trigger
from fsm_trainer.machine.spec import Transition
from fsm_trainer.machine.version import Version
from fsm_trainer.machine.world import System, Worker, World


def step(system: System, world: World, event: on.Event) -> tuple[World, tuple[Effect, ...]]:
    """The world after ``event``, and the effects that it newly allows.

    Raises:
        Refused: the event is illegal now; the world is as before.
        LeaseExpired: the event speaks of an epoch that has ended.
    """
    before, after = set(legal.enabled(system, world)), advance(system, world, event)
    kill: tuple[Effect, ...] = ()
    match event:
        case on.Died(worker=name) | on.Failed(effect=Effect(worker=name, op=Op.RELEASE)):
            kill = (Effect(name, Op.KILL),)
    return after, (*kill, *(e for e in legal.enabled(system, after) if e not in before))


def advance(system: System, world: World, event: on.Event) -> World:
    """The world after ``event``: `step` for those who ask for effects only when they want them."""
    return _STEPS[type(event)](system, world, event)


def _refuse(
    system: System, world: World, name: str, asked: str, *because: str, needs: str = ""
) -> NoReturn:
    worker = system.get(world, name)
    state = f"{worker.state} (moving to {worker.dest})" if worker.move else worker.state
    raise Refused(name, state, asked, because, needs)


def _together(
    system: System, world: World, asked: str, ends: Iterable[str], workers: tuple[str, ...]
) -> None:
    if set(ends) != set(workers):
        _refuse(system, world, workers[0], asked, f"it moves all of {sorted(ends)} together")


def _begin(system: System, world: World, event: on.Begin) -> World:
    edges = {name: _edge(system, world, event.trigger, name) for name in event.workers}
    for link in {edge.joint for edge in edges.values() if edge.joint is not None}:
        ends = legal.joint_ends(system, world, link, event.trigger)
        _together(system, world, event.trigger, ends, event.workers)
        if event.trigger == Trigger.CONNECT:
            world = _open(system, world, event, link)
    for name, edge in edges.items():
        if edge.joint is None:
            _edge(system, world, event.trigger, name)  # others may have taken what it needs
        worker = system.get(world, name)
        version = event.version if event.trigger == Trigger.START else worker.version
        moved = worker._replace(move=edge.trigger, dest=edge.dest, version=version)
        world = system.put(world, name, moved)
    return world


def _edge(system: System, world: World, trigger: str, name: str) -> Transition:
    because, table = legal.refusals(system, world, trigger, name), system.table(name)
    edge = table.edge(trigger, system.get(world, name).state)
    if because or edge is None:
        ways = [[t.source, t.guard.text] for t in table.transitions if t.trigger == trigger]
        needs = " or ".join(" and ".join(filter(None, way)) for way in ways)
        _refuse(system, world, name, trigger, *because, needs=needs)
    return edge


def _link_moves(system: System, world: World, link: str, trigger: str, **new: Any) -> World:
    """Move a link as ``link.yaml`` says; a trigger that has no row there leaves it as it is."""
    i = system.links[link]
    here = world.links[i]
    state = system.spec.link_moves.get((here.state, trigger), here.state)
    links = (*world.links[:i], here._replace(state=state, **new), *world.links[i + 1 :])
    return world._replace(links=links)


def _open(system: System, world: World, event: on.Begin, link: str) -> World:
    here = world.links[system.links[link]]
    epoch = event.epoch or here.epoch + 1
    if epoch <= here.epoch or (here.state, "open") not in system.spec.link_moves:
        why = f"{link} is {here.state} at epoch {here.epoch} and can't open epoch {epoch}"
        _refuse(system, world, event.workers[0], event.trigger, why)
    members = frozenset(system.ends(world, link))
    return _link_moves(system, world, link, "open", epoch=epoch, members=members)


def _close(system: System, world: World, link: str) -> World:
    """A link whose last end has left is down."""
    i = system.links[link]
    if world.links[i].state == LinkState.OPENING or any(w.epochs[i] for w in world.workers):
        return world
    return _link_moves(system, world, link, "close", members=frozenset())


def _done(system: System, world: World, event: on.Done) -> World:
    effect, name = event.effect, event.effect.worker
    _expected(system, world, effect)
    worker, falls = system.get(world, name), legal.falling(system, world, name)
    acquired, resource = effect.op is Op.ACQUIRE, effect.resource
    held = worker.held | {resource} if acquired else worker.held - {resource}
    epochs = tuple(
        (effect.epoch if acquired else 0) if link == resource else epoch
        for link, epoch in zip(system.links, worker.epochs, strict=True)
    )
    # What a link brings is torn when it is acquired anew.
    links, role = system.spec.links.values(), system.names[name]
    torn = any(link.spokes == role and link.carries == resource for link in links)
    version = None if torn else worker.version
    world = system.put(world, name, worker._replace(held=held, epochs=epochs, version=version))
    if resource in system.links:
        world = _close(system, world, resource)
    return _fall(system, world, name, world) if falls else world


def _expected(system: System, world: World, effect: Effect) -> None:
    """Accept a report of what is due, or of what was under way when the worker began to fall."""
    name, resource = effect.worker, effect.resource
    worker, due = system.get(world, name), legal.due(system, world, name, {})
    late = worker.held if effect.op is Op.RELEASE else worker.ghost - worker.held
    fell = legal.falling(system, world, name) and resource in late
    if fell or (due == effect and system.within(name)):
        return
    if effect.epoch and world.links[system.links[resource]].epoch != effect.epoch:
        epoch = world.links[system.links[resource]].epoch
        raise LeaseExpired(resource, effect.epoch, f"the link is at epoch {epoch}")
    _refuse(system, world, name, str(effect), f"no such effect is due, the next one is {due}")


def _failed(system: System, world: World, event: on.Failed) -> World:
    effect, name = event.effect, event.effect.worker
    _expected(system, world, effect)
    if effect.op is Op.RELEASE:
        # Nobody knows what the process still holds, so it must end.
        return _died(system, world, on.Died(name))
    return world if legal.falling(system, world, name) else _undo(system, world, on.Undo(name))


def _undo(system: System, world: World, event: on.Undo) -> World:
    worker, before = system.get(world, event.worker), world
    if worker.move is None:
        _refuse(system, world, event.worker, "undo", "it is in no transition")
    link, names = legal.joint_of(system, world, event.worker), [event.worker]
    if link is None:
        return _fall(system, world, event.worker, before)
    if worker.move == Trigger.CONNECT:
        names = [n for n in legal.movers_of(system, world, link) if system.within(n)]
    world = _link_moves(system, world, link, "break")
    for name in names:
        world = _fall(system, world, name, before)
    return _close(system, world, link)


def _fall(system: System, world: World, name: str, before: World) -> World:
    """Turn a worker towards the largest state that what it keeps still makes true.

    It keeps what both its committed state and it hold, less a link whose lease is no longer good.
    An undo acquires nothing: what a mixed transition had released already is not taken back, the
    planner will ask for it if it's wanted. What it could acquire ``before`` may arrive all the
    same, so its claim stays until the worker has settled.
    """
    worker, table = system.get(world, name), system.table(name)
    bad = system.links.keys() - system.leases(world, name)
    dest = table.largest_state(worker.held.intersection(table.holds[worker.state]) - bad)
    ghost = worker.ghost | legal.arriving(system, before, name)
    return system.put(world, name, worker._replace(dest=dest, ghost=ghost))


def _commit(system: System, world: World, event: on.Commit) -> World:
    opened = {}
    for name in event.workers:
        worker, todo = system.get(world, name), legal.next_effect(system, world, name)
        if worker.dest is None or todo is not None:
            why = f"not all effects are done: next is {todo}" if todo else "it is in no transition"
            _refuse(system, world, name, "commit", why)
        link = legal.joint_of(system, world, name)
        if link is not None and worker.dest == State.CONNECTED != worker.state:
            opened[link] = {n for n in legal.movers_of(system, world, link) if system.within(n)}
            _together(system, world, "commit", opened[link], event.workers)
    for link in opened:
        world = _link_moves(system, world, link, "opened")
    for name in event.workers:
        world = _settle(system, world, name)
    return world


def _settle(system: System, world: World, name: str) -> World:
    worker = system.get(world, name)
    dest, version = worker.dest or worker.state, worker.version
    hub = any(link.hub == system.names[name] for link in system.spec.links.values())
    if dest == State.DISCONNECTED:
        version = None
    elif hub and worker.move == Trigger.START:
        lineage = version.lineage if version and version.lineage else world.lineage + 1
        version = Version(lineage, version.number if version else 0)
        world = world._replace(lineage=max(world.lineage, lineage))
    # Nothing arrives any more of what it fell from; a zombie's claim stays.
    ghost = frozenset[str]() if legal.falling(system, world, name) else worker.ghost
    settled = worker._replace(state=dest, move=None, dest=None, version=version, ghost=ghost)
    return system.put(world, name, settled)


def _act(system: System, world: World, event: on.Act) -> World:
    for name in event.workers:
        if because := legal.action_refusals(system, world, event.action, name):
            _refuse(system, world, name, event.action, *because)
    link = _joint_action(system, event)
    if link is not None:
        ends = [n for n in legal.actors_of(system, world, event.action) if system.within(n)]
        _together(system, world, event.action, ends, event.workers)
    for name in event.workers:
        worker = system.get(world, name)
        torn = link is not None and system.names[name] == system.spec.links[link].spokes
        version, jobs = None if torn else worker.version, (*worker.jobs, event.action)
        world = system.put(world, name, worker._replace(jobs=jobs, version=version))
    return world


def _joint_action(system: System, event: on.Act | on.Acted) -> str | None:
    actions = (system.table(name).actions[event.action] for name in event.workers)
    return next((action.joint for action in actions if action.joint is not None), None)


def _acted(system: System, world: World, event: on.Acted) -> World:
    action, link = event.action, _joint_action(system, event)
    names = [n for n in event.workers if action in system.get(world, n).jobs]
    # After an abort a collective can return normally, so a result counts only if every lease is
    # still good afterwards.
    leased = link is None or all(system.lease(world, n, link) for n in names)
    complete = event.ok and leased and len(names) == len(event.workers)
    hub = system.spec.links[link].hub if link is not None and complete else None
    versions = [system.get(world, n).version for n, role in system.names.items() if role == hub]
    for name in names:
        worker = system.get(world, name)
        jobs, version = list(worker.jobs), worker.version
        jobs.remove(action)
        if link is not None and system.names[name] == system.spec.links[link].spokes:
            version = versions[0] if versions else None
        elif version is not None and event.ok and system.table(name).actions[action].updates:
            version = Version(version.lineage, version.number + 1)
        world = system.put(world, name, worker._replace(jobs=tuple(jobs), version=version))
    return world


def _sever(system: System, world: World, event: on.Sever) -> World:
    worker, link = system.get(world, event.worker), event.link
    because = [f"it is in the middle of {what}" for what in (worker.move, *worker.jobs) if what]
    if not worker.epochs[system.links[link]]:
        because.append(f"it holds no lease on {link}")
    if system.lease(world, event.worker, link):
        because.append(f"its lease on {link} is good")
    if because:
        _refuse(system, world, event.worker, Trigger.SEVER, *because)
    world = system.put(world, event.worker, worker._replace(move=Trigger.SEVER))
    return _fall(system, world, event.worker, world)


def _died(system: System, world: World, event: on.Died) -> World:
    before, dead = world, system.get(world, event.worker)
    ghost = dead.held | dead.ghost | legal.arriving(system, world, event.worker)
    movers = {link: legal.movers_of(system, world, link) for link in system.links}
    nobody = Worker(epochs=(0,) * len(system.links), live=not event.lost, ghost=ghost)
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


def _confirmed(system: System, world: World, event: on.Confirmed) -> World:
    worker = system.get(world, event.worker)
    return system.put(world, event.worker, worker._replace(ghost=frozenset()))


def _joined(system: System, world: World, event: on.Joined) -> World:
    worker = system.get(world, event.worker)
    if worker.live:
        _refuse(system, world, event.worker, "join", "it was never lost")
    return system.put(world, event.worker, worker._replace(live=True))


_STEPS: dict[type[Any], Callable[[System, World, Any], World]] = {
    on.Begin: _begin, on.Done: _done, on.Failed: _failed, on.Undo: _undo, on.Commit: _commit,
    on.Act: _act, on.Acted: _acted, on.Sever: _sever, on.Died: _died, on.Confirmed: _confirmed,
    on.Joined: _joined,
}  # fmt: skip
