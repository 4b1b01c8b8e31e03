"""What may happen now: the effects that are due, who moves together, and why not.

Everything here only reads a world; :mod:`fsm_trainer.machine.step` makes the next one.
"""

from __future__ import annotations

from fsm_trainer.machine.events import Effect, Op
from fsm_trainer.machine.names import Trigger
from fsm_trainer.machine.world import System, Worker, World, WorldView


def enabled(system: System, world: World) -> list[Effect]:
    """The effects that may run now, at most one a worker, in the system's order."""
    stages: dict[str, int] = {}
    effects = (due(system, world, name, stages) for name in system.names if system.within(name))
    return [effect for effect in effects if effect is not None]


def due(system: System, world: World, name: str, stages: dict[str, int]) -> Effect | None:
    """The effect that a worker may run now; ``stages`` remembers how far the links' ends are.

    A joint transition acquires nothing before every end has released; the link comes last.
    """
    effect = next_effect(system, world, name)
    if effect is None or effect.op is Op.RELEASE:
        return effect
    link = joint_of(system, world, name)
    if link is None:
        return effect
    if link not in stages:
        stages[link] = _stage(system, world, link)
    return effect if stages[link] > (effect.resource == link) else None


def _stage(system: System, world: World, link: str) -> int:
    """How far all ends are: 0 some release, 1 some acquire, 2 nothing but the link is left."""
    movers = [name for name in movers_of(system, world, link) if system.within(name)]
    todo = [effect for name in movers if (effect := next_effect(system, world, name))]
    if any(effect.op is Op.RELEASE for effect in todo):
        return 0
    return 1 if any(effect.resource != link for effect in todo) else 2


def next_effect(system: System, world: World, name: str) -> Effect | None:
    """What a moving worker has to do next, whether or not the other ends let it."""
    worker = system.get(world, name)
    first = system.table(name).first(worker.held, worker.dest) if worker.dest else None
    if first is None:
        return None
    goes, resource = first
    op, i = Op.RELEASE if goes else Op.ACQUIRE, system.links.get(resource)
    epoch = 0 if i is None else worker.epochs[i] if goes else world.links[i].epoch
    return Effect(name, op, resource, epoch)


def arriving(system: System, world: World, name: str) -> frozenset[str]:
    """What a worker may acquire now, so may hold before it tells: nothing before the barrier.

    On its way back it acquires nothing: after a late release an undo's end may lack something.
    """
    effect, worker = due(system, world, name, {}), system.get(world, name)
    back = effect is None or effect.op is Op.RELEASE or falling(system, world, name)
    if worker.dest is None or back:
        return frozenset()
    return frozenset(system.table(name).holds[worker.dest])


def joint_of(system: System, world: World, name: str) -> str | None:
    """The link whose ends the worker moves with."""
    worker = system.get(world, name)
    edge = system.table(name).edge(worker.move, worker.state) if worker.move else None
    return edge.joint if edge is not None else None


def movers_of(system: System, world: World, link: str) -> list[str]:
    """The workers that are in a joint transition of a link now."""
    return [name for name in system.names if joint_of(system, world, name) == link]


def joint_ends(system: System, world: World, link: str, trigger: str) -> tuple[str, ...]:
    """Who must move together: every live end to open a link, whoever still holds it to close it."""
    i, closes = system.links[link], trigger == Trigger.DISCONNECT
    ends = [n for n in system.ends(world, link) if system.within(n)]
    return tuple(n for n in ends if not closes or system.get(world, n).epochs[i])


def actors_of(system: System, world: World, action: str) -> list[str]:
    """The live workers whose role has the action: who must do a joint one together."""
    able = (n for n in system.names if action in system.table(n).actions)
    return [name for name in able if system.get(world, name).live]


def refusals(system: System, world: World, trigger: str, name: str) -> list[str]:
    """Why a worker refuses a trigger; empty if it would take it."""
    worker = system.get(world, name)
    edge = system.table(name).edge(trigger, worker.state)
    if because := _absent(name, worker):
        return because[:1]
    if edge is None:
        known = [t.trigger for t in system.table(name).transitions if t.source == worker.state]
        return [f"{worker.state} has no {trigger!r}, only {[str(t) for t in known]}"]
    return edge.guard.explain(WorldView(system, world, edge.dest), name)


def action_refusals(system: System, world: World, action: str, name: str) -> list[str]:
    """Why a worker refuses an action; empty if it would do it."""
    worker, table = system.get(world, name), system.table(name)
    if action not in table.actions:
        return [f"{name} has no action {action!r}, only {sorted(table.actions)}"]
    found, row = _absent(name, worker), table.actions[action]
    if missing := sorted(row.needs - worker.held):
        where = " or ".join(s for s, held in table.holds.items() if row.needs <= {*held})
        found.append(f"it does not hold {', '.join(missing)}: {action} is legal in {where}")
    return found + row.guard.explain(WorldView(system, world), name)


def _absent(name: str, worker: Worker) -> list[str]:
    lost = [] if worker.live else [f"{name} is lost"]
    return lost + ([f"{name} is in the middle of {worker.move}"] if worker.move else [])


def falling(system: System, world: World, name: str) -> bool:
    """Whether a worker is on the way back from a transition that it won't complete."""
    worker = system.get(world, name)
    edge = system.table(name).edge(worker.move or "", worker.state)
    return worker.move is not None and (edge is None or worker.dest != edge.dest)
