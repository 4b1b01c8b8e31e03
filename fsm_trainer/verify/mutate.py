"""Would the properties notice? Each part of the tables, and of ``step``, is broken in turn.

A mutant that no property kills is a part that nobody needs, or a property that is missing.
The properties are asked of the tables as they were: a mutant can't change the question.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from unittest.mock import patch

from fsm_trainer.machine import events as on
from fsm_trainer.machine import legal
from fsm_trainer.machine import step as s
from fsm_trainer.machine.guards import Guard, parse
from fsm_trainer.machine.names import LinkState, Role
from fsm_trainer.machine.spec import RoleTable, Spec
from fsm_trainer.machine.world import System, World
from fsm_trainer.verify.check import check

# Of how many rollout workers, and how fine: what a mutant survives first is tried next.
TRIES = ((1, False), (2, False), (1, True))
# In flight at once: two show what excludes them from each other.
JOBS = 2
# States after which a try is given up: the shipped tables have fewer with one rollout worker.
MOST = 60_000


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change: another spec, or a patch of the code while it is explored."""

    name: str
    spec: Spec
    patch: Callable[[], AbstractContextManager[object]] = nullcontext


@dataclass(frozen=True, slots=True)
class Fate:
    """What killed a mutant, and in which schedule; empty if nothing did."""

    mutant: str
    schedule: str = ""
    killed_by: str = ""
    states: int = 0


def fates(specs: Sequence[Spec]) -> Iterator[Fate]:
    """Explore each mutant until a property fails, in one schedule after the other.

    What schedules share is one part: it is enough that one of them needs it.
    """
    both: dict[str, list[tuple[Spec, Mutant]]] = {}
    for spec in specs:
        for mutant in mutants(spec):
            both.setdefault(mutant.name, []).append((spec, mutant))
    for name, ways in both.items():
        tries = ((rollouts, fine, *way) for rollouts, fine in TRIES for way in ways)
        yield next(filter(None, (_fate(*each) for each in tries)), Fate(name))


def _fate(rollouts: int, fine: bool, spec: Spec, mutant: Mutant) -> Fate | None:
    system, original = System.of(mutant.spec, rollouts), System.of(spec, rollouts)
    with mutant.patch():
        verdict = check(system, fine=fine, jobs=JOBS, most=MOST, properties=original)
    if verdict.violation is None:
        return None
    return Fate(mutant.name, spec.name, verdict.violation.because, verdict.states)


def mutants(spec: Spec) -> Iterator[Mutant]:
    """Every mutant of one schedule."""
    yield from _tables(spec)
    yield from _link(spec)
    yield from _code(spec)


def _tables(spec: Spec) -> Iterator[Mutant]:
    for role, table in spec.roles.items():
        for name, changed in _changes(table):
            yield Mutant(f"{role}: {name}", replace(spec, roles={**spec.roles, role: changed}))


def _changes(table: RoleTable) -> Iterator[tuple[str, RoleTable]]:
    for state, held in table.holds.items():
        for resource in held:
            less = tuple(r for r in held if r != resource)
            holds = {**table.holds, state: less}
            yield f"{state} without {resource}", replace(table, holds=holds)
    for i, edge in enumerate(table.transitions):
        where = f"{edge.trigger} from {edge.source}"
        for dropped, guard in _weaker(edge.guard):
            row = edge.model_copy(update={"guard": guard})
            rows = (*table.transitions[:i], row, *table.transitions[i + 1 :])
            yield f"{where} without `{dropped}`", replace(table, transitions=rows)
    for name, action in table.actions.items():
        for dropped, guard in _weaker(action.guard):
            changed = action.model_copy(update={"guard": guard})
            actions = {**table.actions, name: changed}
            yield f"{name} without `{dropped}`", replace(table, actions=actions)


def _weaker(guard: Guard) -> Iterator[tuple[str, Guard]]:
    for i, part in enumerate(guard.parts):
        left = [*guard.parts[:i], *guard.parts[i + 1 :]]
        both = ast.BoolOp(ast.And(), left) if len(left) > 1 else next(iter(left), None)
        yield ast.unparse(part), parse(ast.unparse(both)) if both else Guard()


def _link(spec: Spec) -> Iterator[Mutant]:
    for row in spec.link_moves:
        moves = {other: dest for other, dest in spec.link_moves.items() if other != row}
        yield Mutant(f"link: no {row[1]} from {row[0]}", replace(spec, link_moves=moves))


# -- code ------------------------------------------------------------------------------------------


def _code(spec: Spec) -> Iterator[Mutant]:
    for name, patched in _PATCHES.items():
        yield Mutant(f"step: {name}", spec, patched)


def _instead(event: type[object], step: Callable[..., World]) -> AbstractContextManager[object]:
    return patch.dict(s._STEPS, {event: step})


def _unfenced() -> AbstractContextManager[object]:
    def lease(system: System, world: World, name: str, link: str) -> bool:
        return any(system.get(world, name).epochs)

    return patch.object(System, "lease", lease)


def _unchecked_push() -> AbstractContextManager[object]:
    def acted(system: System, world: World, event: on.Acted) -> World:
        up = tuple(link._replace(state=LinkState.UP) for link in world.links)
        return s._acted(system, world._replace(links=up), event)._replace(links=world.links)

    return _instead(on.Acted, acted)


def _untorn() -> AbstractContextManager[object]:
    def act(system: System, world: World, event: on.Act) -> World:
        after = s._act(system, world, event)
        both = zip(world.workers, after.workers, strict=True)
        return after._replace(workers=tuple(w._replace(version=v.version) for v, w in both))

    return _instead(on.Act, act)


def _unreleased() -> AbstractContextManager[object]:
    def sever(system: System, world: World, event: on.Sever) -> World:
        after = s._sever(system, world, event)
        worker = system.get(after, event.worker)
        state = worker.dest or worker.state
        return system.put(after, event.worker, worker._replace(move=None, state=state))

    return _instead(on.Sever, sever)


def _ghostless_death() -> AbstractContextManager[object]:
    def died(system: System, world: World, event: on.Died) -> World:
        after = s._died(system, world, event)
        worker = system.get(after, event.worker)
        return system.put(after, event.worker, worker._replace(ghost=frozenset()))

    return _instead(on.Died, died)


def _unnoticed_death() -> AbstractContextManager[object]:
    def died(system: System, world: World, event: on.Died) -> World:
        return s._died(system, world, event)._replace(links=world.links)

    return _instead(on.Died, died)


def _early_death() -> AbstractContextManager[object]:
    """A zombie's claim ends when it is declared dead, and it starts again beside itself."""
    fall = s._fall

    def forgetful(system: System, world: World, name: str, before: World) -> World:
        after = fall(system, world, name, before)
        return system.put(after, name, system.get(after, name)._replace(ghost=frozenset()))

    return patch.object(s, "_fall", forgetful)


def _no_rollback() -> AbstractContextManager[object]:
    def undo(system: System, world: World, event: on.Undo) -> World:
        worker = system.get(world, event.worker)
        still = worker._replace(move=None, dest=None)
        return system.put(world, event.worker, still)

    return _instead(on.Undo, undo)


def _early_commit() -> AbstractContextManager[object]:
    def commit(system: System, world: World, event: on.Commit) -> World:
        for name in event.workers:
            world = s._settle(system, world, name)
        return world

    return _instead(on.Commit, commit)


def _same_epoch() -> AbstractContextManager[object]:
    def opened(system: System, world: World, event: on.Begin, link: str) -> World:
        here = world.links[system.links[link]]
        members = frozenset(system.ends(world, link))
        return s._link_moves(system, world, link, "open", epoch=max(here.epoch, 1), members=members)

    return patch.object(s, "_open", opened)


def _ledgerless() -> AbstractContextManager[object]:
    return patch.object(System, "claims_fit", lambda system, world, name: True)


def _unreserved() -> AbstractContextManager[object]:
    """The ledger forgets where a mover goes."""
    fit = System.claims_fit

    def without(system: System, world: World, name: str) -> bool:
        workers = tuple(
            w._replace(dest=w.dest if n == name else None)
            for n, w in zip(system.names, world.workers, strict=True)
        )
        return fit(system, world._replace(workers=workers), name)

    return patch.object(System, "claims_fit", without)


def _kept_version() -> AbstractContextManager[object]:
    def done(system: System, world: World, event: on.Done) -> World:
        version = system.get(world, event.effect.worker).version
        after = s._done(system, world, event)
        worker = system.get(after, event.effect.worker)
        return system.put(after, event.effect.worker, worker._replace(version=version))

    return _instead(on.Done, done)


def _hub_alone() -> AbstractContextManager[object]:
    def ends(system: System, world: World, link: str, trigger: str) -> tuple[str, ...]:
        named = legal_joint_ends(system, world, link, trigger)
        return tuple(n for n in named if system.names[n] is not Role.ROLLOUT) or named

    return patch.object(legal, "joint_ends", ends)


legal_joint_ends = legal.joint_ends

_PATCHES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "a death is not told to the movers": lambda: patch.object(legal, "movers_of", lambda *_: []),
    "no barrier between releases and acquisitions": lambda: patch.object(
        legal, "_stage", lambda *_: 2
    ),
    "any epoch is a lease": _unfenced,
    "a push counts whatever its leases": _unchecked_push,
    "a push doesn't tear": _untorn,
    "a sever releases nothing": _unreleased,
    "a zombie claims nothing": _ghostless_death,
    "a death breaks no link": _unnoticed_death,
    "what arrives late claims nothing": _early_death,
    "an undo takes nothing back": _no_rollback,
    "a commit before its effects": _early_commit,
    "an epoch is used twice": _same_epoch,
    "no ledger": _ledgerless,
    "no reservation for movers": _unreserved,
    "weights keep their version over a wake": _kept_version,
    "a link opens at its hub alone": _hub_alone,
}
