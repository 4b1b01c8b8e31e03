"""The properties of ``states/system.yaml``, by their numbers there, asked of one node.

They speak of resources, epochs, versions and bytes, never of guards.
"""

from __future__ import annotations

from collections.abc import Iterable

from fsm_trainer.machine import events as on
from fsm_trainer.machine.events import Op
from fsm_trainer.machine.names import LinkState, Role, State, Trigger
from fsm_trainer.machine.world import System, Worker, World
from fsm_trainer.verify.relation import Node

DOWN = (State.SLEEPING, State.DISCONNECTED)


def broken(system: System, node: Node) -> str:
    """The first property that a node violates, with its number; empty if none."""
    for name in system.names:
        worker = system.get(node.world, name)
        if problem := _alone(system, name, worker) or _linked(system, node.world, name, worker):
            return problem
    return _devices(system, node)


def _alone(system: System, name: str, worker: Worker) -> str:
    resources, table = system.spec.system.resources, system.table(name)
    communicators = sorted(r for r in worker.held if resources[r].communicator)
    still = worker.move is None
    if still and worker.state in DOWN and (communicators or any(worker.epochs)):
        return f"1: {name} is {worker.state} with {communicators}"
    if still and worker.held != frozenset(table.holds[worker.state]):
        return f"8: {name} is {worker.state} with {sorted(worker.held)}"
    for resource in worker.held:
        needed = resources[resource].requires
        if needed and worker.held.isdisjoint(needed):
            return f"14: {name} holds {resource} without any of {[*needed]}"
    twice = sorted(worker.held & worker.ghost)
    if worker.undead and twice:
        return f"10: {name} holds {twice} beside a process of its own that may live"
    for job in worker.jobs:
        busy = any(resources[r].communicator for r in table.actions[job].needs)
        if not still or (busy and len(worker.jobs) > 1):
            return f"11: {name} works at {' and '.join(worker.jobs)}, moving: {worker.move}"
        if worker.version is None and _serves(system, name, job):
            return f"5: {name} serves without a version"
        if job == "push" and system.names[name] is Role.ROLLOUT and worker.version is not None:
            return f"6: {name} has a version during a push"
        if not table.actions[job].needs <= worker.held:
            return f"7: {name} works at {job} without what it needs"
    return ""


def _linked(system: System, world: World, name: str, worker: Worker) -> str:
    for link, i in system.links.items():
        here, epoch = world.links[i], worker.epochs[i]
        if (link in worker.held) != (epoch != 0):
            return f"8: {name} holds epoch {epoch} of {link} beside {sorted(worker.held)}"
        if here.state == LinkState.UP and epoch not in (0, here.epoch):
            return f"2: {name} holds epoch {epoch} of {link}, it is {here.epoch}"
        leased = worker.move is None and system.lease(world, name, link)
        if leased and sum(other.epochs[i] == epoch for other in world.workers) < 2:
            return f"9: {name} holds {link} alone"
    return ""


def _devices(system: System, node: Node) -> str:
    """What is held, arrives late, or may not be dead yet, on each device."""
    resources, late = system.spec.system.resources, dict[str, str]()
    for effect in node.late:
        if effect.op is Op.ACQUIRE:
            late[effect.worker] = effect.resource
    tenants: dict[str, list[tuple[str, str]]] = {}
    for name, worker in zip(system.names, node.world.workers, strict=True):
        held = worker.held | (worker.ghost if worker.undead else frozenset())
        held |= {late[name]} if name in late else frozenset()
        sized = [(name, r) for r in held if resources[r].size or resources[r].exclusive]
        for device in system.placement[name] if sized else ():
            tenants.setdefault(device, []).extend(sized)
    for device, held_there in sorted(tenants.items()):
        if sum(resources[r].exclusive for _, r in held_there) > 1:
            return f"3: {held_there} on {device}"
        if sum(resources[r].size for _, r in held_there) > system.spec.system.capacity:
            return f"4: {held_there} on {device}"
    return ""


def wrong_step(system: System, before: World, event: on.Event, after: World) -> str:
    """The property that an event violates by how it leads from one world to the next."""
    match event:
        case on.Acted(action="push"):
            return _half_pushed(system, before, event, after)
        case on.Act(action=action, workers=names) if _serves(system, names[0], action):
            return _stale(system, before, names)
        case on.Act(action=action, workers=names) if system.table(names[0]).actions[action].joint:
            return _unleased(system, before, names)
        case on.Begin(trigger=Trigger.DISCONNECT, workers=names):
            return _unleased(system, before, names)
        case on.Begin(trigger=Trigger.CONNECT):
            moved = zip(before.links, after.links, strict=True)
            if any(old.state != new.state and new.epoch <= old.epoch for old, new in moved):
                return "13: a link opens under an epoch that was used before"
        case on.Done(effect=on.Effect(worker=name, op=Op.ACQUIRE, resource=resource)):
            carried = [k for k in system.spec.links.values() if k.spokes == system.names[name]]
            if system.get(after, name).version and resource in {k.carries for k in carried}:
                return f"5: {name} calls {resource} complete that it has just acquired"
        case on.Died(worker=name):
            forgotten = system.get(before, name).held - system.get(after, name).ghost
            if forgotten:
                return f"10: nobody claims {sorted(forgotten)} of {name}, which may live"
    return ""


def _serves(system: System, name: str, action: str) -> bool:
    """Whether it is work with what a link carries to this worker, and not the carrying itself."""
    known, role = system.table(name).actions[action], system.names[name]
    links = system.spec.links.values()
    return known.joint is None and any(k.spokes == role and k.carries in known.needs for k in links)


def _stale(system: System, world: World, names: Iterable[str]) -> str:
    hubs = {link.hub for link in system.spec.links.values()}
    newest = [system.get(world, n).version for n, role in system.names.items() if role in hubs]
    for name in names:
        version = system.get(world, name).version
        if version is None or version not in newest:
            return f"5: {name} begins to serve {version}, the trainer has {newest}"
    return ""


def _unleased(system: System, world: World, names: Iterable[str]) -> str:
    for link in system.links:
        alone = [name for name in names if not system.lease(world, name, link)]
        if alone:
            return f"12: {', '.join(alone)} would wait for others over a broken {link}"
    return ""


def _half_pushed(system: System, before: World, event: on.Acted, after: World) -> str:
    """A version only if every member was in the push to its end."""
    for i in system.links.values():
        members = [n for n in before.links[i].members if "push" in system.table(n).actions]
        whole = all("push" in system.get(before, name).jobs for name in members)
        spokes = [n for n in event.workers if system.names[n] is Role.ROLLOUT]
        versions = {system.get(after, n).version for n in spokes}
        if len(versions) > 1 or (not (whole and event.ok) and versions - {None}):
            return f"6: {event} ends with versions {versions}"
    return ""
