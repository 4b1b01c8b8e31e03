"""What may happen now: the effects that are due, who moves together, and why not.

Everything here only reads a world; :mod:`fsm_trainer.machine.step` makes the next one.
"""

from __future__ import annotations

from fsm_trainer.machine.events import Effect, Op
from fsm_trainer.machine.names import Trigger
from fsm_trainer.machine.world import System, Worker, World, WorldView


def enabled(system: System, world: World) -> list[Effect]:
    """The effects that may run now, at most one a worker, in the system's order."""
    found: list[Effect] = []
    stages: dict[str, int] = {}
    for name, worker in zip(system.names, world.workers, strict=True):
        effect = next_effect(system, world, name, worker)
        if effect is not None and system.within(name) and _unblocked(system, world, effect, stages):
            found.append(effect)
    return found


def next_effect(system: System, world: World, name: str, worker: Worker) -> Effect | None:
    """What a moving worker has to do next, whether or not the other ends let it."""
    if worker.dest is None:
        return None
    order = system.spec.system.resources
    target = system.table(name).holds[worker.dest]
    surplus = [r for r in order if r in worker.held and r not in target]
    if surplus:
        resource, op = _last_acquired(system, name, surplus), Op.RELEASE
    else:
        missing = [r for r in target if r not in worker.held]
        if not missing:
            return None
        resource, op = missing[0], Op.ACQUIRE
    epoch = 0
    if resource in system.links:
        i = system.links[resource]
        epoch = worker.epochs[i] if op is Op.RELEASE else world.links[i].epoch
    return Effect(name, op, resource, epoch)


def _last_acquired(system: System, name: str, resources: list[str]) -> str:
    """The resource that stands last in the states that hold it: releases go in reverse order."""
    holds = system.table(name).holds.values()
    return max(resources, key=lambda r: max(h.index(r) if r in h else -1 for h in holds))


def _unblocked(system: System, world: World, effect: Effect, stages: dict[str, int]) -> bool:
    """A joint transition acquires nothing before every end has released; the link comes last."""
    link = joint_of(system, effect.worker, system.get(world, effect.worker))
    if effect.op is Op.RELEASE or link is None:
        return True
    if link not in stages:
        stages[link] = _stage(system, world, link)
    return stages[link] > (effect.resource == link)


def _stage(system: System, world: World, link: str) -> int:
    """How far all ends are: 0 some release, 1 some acquire, 2 nothing but the link is left."""
    stage = 2
    for name in movers_of(system, world, link):
        todo = next_effect(system, world, name, system.get(world, name))
        if todo is not None and system.within(name) and todo.resource != link:
            stage = min(stage, 0 if todo.op is Op.RELEASE else 1)
        elif todo is not None and system.within(name) and todo.op is Op.RELEASE:
            stage = 0
    return stage


def is_due(system: System, world: World, effect: Effect) -> bool:
    """Whether an effect may run now."""
    name = effect.worker
    due = next_effect(system, world, name, system.get(world, name))
    return due == effect and system.within(name) and _unblocked(system, world, effect, {})


def arriving(system: System, world: World, name: str) -> frozenset[str]:
    """What a worker may acquire now, so may hold before it tells: nothing before the barrier."""
    worker = system.get(world, name)
    due = next_effect(system, world, name, worker)
    if worker.dest is None or due is None or due.op is Op.RELEASE:
        return frozenset()
    target = system.table(name).holds[worker.dest]
    return frozenset(target) if _unblocked(system, world, due, {}) else frozenset()


def joint_of(system: System, name: str, worker: Worker) -> str | None:
    """The link whose ends the worker moves with."""
    edge = system.table(name).edge(worker.move or "", worker.state)
    return edge.joint if edge is not None else None


def movers_of(system: System, world: World, link: str) -> list[str]:
    """The workers that are in a joint transition of a link now."""
    pairs = zip(system.names, world.workers, strict=True)
    return [n for n, w in pairs if w.move is not None and joint_of(system, n, w) == link]


def joint_ends(system: System, world: World, link: str, trigger: str) -> tuple[str, ...]:
    """Who must move together: every live end to open a link, whoever still holds it to close it."""
    ends = system.ends(world, system.spec.links[link])
    i = system.links[link]
    if trigger == Trigger.DISCONNECT:
        ends = [n for n in ends if system.get(world, n).epochs[i]]
    return tuple(n for n in ends if system.within(n))


def refusals(system: System, world: World, trigger: str, name: str) -> list[str]:
    """Why a worker refuses a trigger; empty if it would take it."""
    worker = system.get(world, name)
    edge = system.table(name).edge(trigger, worker.state)
    if not worker.live:
        return [f"{name} is lost"]
    if worker.move is not None:
        return [f"{name} is in the middle of {worker.move}"]
    if edge is None:
        known = [t.trigger for t in system.table(name).transitions if t.source == worker.state]
        return [f"{worker.state} has no {trigger!r}, only {[str(t) for t in known]}"]
    return edge.guard.explain(WorldView(system, world, edge.dest), name)


def action_refusals(system: System, world: World, action: str, name: str) -> list[str]:
    """Why a worker refuses an action; empty if it would do it."""
    worker, known = system.get(world, name), system.table(name).actions
    if action not in known:
        return [f"{name} has no action {action!r}, only {sorted(known)}"]
    found = [] if worker.live else [f"{name} is lost"]
    if worker.move is not None:
        found.append(f"{name} is in the middle of {worker.move}")
    missing = sorted(known[action].needs - worker.held)
    if missing:
        legal = [s for s, h in system.table(name).holds.items() if known[action].needs <= set(h)]
        states = " or ".join(str(s) for s in legal)
        found.append(f"it does not hold {', '.join(missing)}: {action} is legal in {states}")
    return found + known[action].guard.explain(WorldView(system, world), name)


def falling(system: System, name: str, worker: Worker) -> bool:
    """Whether a worker is on the way back from a transition that it won't complete."""
    edge = system.table(name).edge(worker.move or "", worker.state)
    return worker.move is not None and (edge is None or worker.dest != edge.dest)


def described(worker: Worker) -> str:
    """Its state for people."""
    return f"{worker.state} (moving to {worker.dest})" if worker.move else str(worker.state)
