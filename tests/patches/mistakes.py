"""Mistakes that the runtime's code could have: each patches what really runs.

``caught.yaml`` says of each which report it repeats and which layers see it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from fsm_trainer.engines.admission import Admission
from fsm_trainer.groups import lease
from fsm_trainer.groups.lease import Lease
from fsm_trainer.groups.membership import Membership
from fsm_trainer.groups.rendezvous import Mark, RollCall
from fsm_trainer.machine import events as on
from fsm_trainer.machine import legal, step, world
from fsm_trainer.machine.lifecycle import Lifecycle, Report, Resource
from fsm_trainer.machine.names import State, Trigger
from fsm_trainer.machine.spec import RoleTable
from fsm_trainer.machine.world import System, Worker, World
from fsm_trainer.runtime import reconciler
from fsm_trainer.runtime.driver import Driver
from fsm_trainer.runtime.journal import Kind
from fsm_trainer.runtime.port import Outcome, now
from fsm_trainer.runtime.reconciler import LOST, Reconciler

Patch = Callable[[pytest.MonkeyPatch], None]
MISTAKES: dict[str, Patch] = {}


def mistake(patch: Patch) -> Patch:
    MISTAKES[patch.__name__] = patch
    return patch


# -- of the machine -------------------------------------------------------------------------------


@mistake
def a_sleeper_keeps_its_groups_row_1(patch: pytest.MonkeyPatch) -> None:
    moves = RoleTable._moves

    def first(self: RoleTable, held: frozenset[str], dest: State) -> tuple[bool, str] | None:
        kept = {"train_groups", "link"} if dest is State.SLEEPING else set[str]()
        return moves(self, held - kept, dest)

    patch.setattr(RoleTable, "first", first)


@mistake
def a_death_breaks_no_link_row_3(patch: pytest.MonkeyPatch) -> None:
    def died(system: System, before: World, event: on.Died) -> World:
        return step._died(system, before, event)._replace(links=before.links)

    patch.setitem(step._STEPS, on.Died, died)


@mistake
def memory_goes_before_communicators_row_6(patch: pytest.MonkeyPatch) -> None:
    def first(self: RoleTable, held: frozenset[str], dest: State) -> tuple[bool, str] | None:
        surplus = held.difference(self.holds[dest])
        place = {r: i for held in self.holds.values() for i, r in enumerate(held)}
        if surplus:  # in the order in which it was acquired
            return True, min(sorted(surplus), key=place.__getitem__)
        return next(((False, r) for r in self.holds[dest] if r not in held), None)

    patch.setattr(RoleTable, "first", first)


@mistake
def work_in_flight_is_not_counted_row_14(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(world._READ, "in_flight", lambda view, name, part: 0)


@mistake
def nobody_asks_what_is_held_row_24(patch: pytest.MonkeyPatch) -> None:
    def refusals(system: System, world: World, action: str, name: str) -> list[str]:
        guard = system.table(name).actions[action].guard
        return guard.explain(world_view(system, world), name)

    world_view = world.WorldView
    patch.setattr(legal, "action_refusals", refusals)


@mistake
def a_mover_claims_only_where_it_goes_row_26(patch: pytest.MonkeyPatch) -> None:
    fit = System.claims_fit

    def there(system: System, name: str, worker: Worker) -> Worker:
        bound = system.table(name).holds[worker.dest] if worker.dest else worker.held
        return worker._replace(held=worker.held.intersection(bound))

    def claims_fit(self: System, world: World, name: str) -> bool:
        both = zip(self.names, world.workers, strict=True)
        moved = world._replace(workers=tuple(there(self, n, worker) for n, worker in both))
        return fit(self, moved, name)

    patch.setattr(System, "claims_fit", claims_fit)


@mistake
def a_connect_takes_whoever_is_there_row_32(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(step, "_together", lambda *asked: None)


# -- of what runs ---------------------------------------------------------------------------------


@mistake
def a_failed_action_stays_in_flight_row_4(patch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def action(self: Lifecycle, name: str, world: World | None = None) -> Iterator[Worker]:
        self._apply(on.Act(name, (self.name,)), world)
        yield self.worker
        self._apply(on.Acted(name, (self.name,), True))

    patch.setattr(Lifecycle, "action", action)


class Later:
    """A resource that says that it is free before it is."""

    def __init__(self, resource: Resource) -> None:
        self.acquire, self._resource = resource.acquire, resource

    def release(self, effect: on.Effect) -> None:
        asyncio.get_running_loop().call_later(0.5, self._resource.release, effect)


@mistake
def a_release_tells_before_it_has_freed_row_5(patch: pytest.MonkeyPatch) -> None:
    run = Lifecycle._run

    def early(self: Lifecycle, op: on.Op) -> Report:
        resources = self._resources
        self._resources = {name: Later(resource) for name, resource in resources.items()}
        try:
            return run(self, op)
        finally:
            self._resources = resources

    patch.setattr(Lifecycle, "_run", early)


@mistake
def a_claim_ends_before_its_process_row_5(patch: pytest.MonkeyPatch) -> None:
    async def bury(self: Reconciler, name: str) -> None:
        self._apply(on.Confirmed(name))
        self._record(name, Kind.FAULT, "confirmed", State.DISCONNECTED, now(), None)
        del self._dead[name]
        await self.ports[name].respawn()

    patch.setattr(Reconciler, "_bury", bury)


@mistake
def a_step_reconnects_for_nothing_row_8(patch: pytest.MonkeyPatch) -> None:
    act = Reconciler.act

    async def acts(self: Reconciler, action: str, given: Mapping[str, Any]) -> dict[str, Outcome]:
        told = await act(self, action, given)
        if action == "push":
            await self._transition(Trigger.DISCONNECT, tuple(given))
        return told

    patch.setattr(Reconciler, "act", acts)


@mistake
def a_failure_is_not_told_to_the_others_row_20(patch: pytest.MonkeyPatch) -> None:
    async def broken(self: Reconciler, name: str, error: object, others: object) -> None:
        if isinstance(error, LOST):
            await self._declare_dead(name, str(error))

    patch.setattr(Reconciler, "_broken", broken)


@mistake
def a_broken_link_is_kept_row_22(patch: pytest.MonkeyPatch) -> None:
    async def sever(self: Reconciler, name: str, link: str) -> None: ...

    patch.setattr(Reconciler, "_sever", sever)


@mistake
def a_failed_connect_is_not_undone_row_22(patch: pytest.MonkeyPatch) -> None:
    async def undo(self: Reconciler, name: str) -> None:
        if not legal.falling(self.system, self.world, name):
            self._apply(on.Undo(name))

    patch.setattr(Reconciler, "_undo", undo)


@mistake
def a_death_is_only_noted_row_29(patch: pytest.MonkeyPatch) -> None:
    async def declare_dead(self: Reconciler, name: str, why: str) -> None:
        self._dead[name] = why

    patch.setattr(Reconciler, "_declare_dead", declare_dead)


@mistake
def a_sever_is_not_written_row_29(patch: pytest.MonkeyPatch) -> None:
    record = Reconciler._record

    def records(self: Reconciler, name: str, kind: Kind, trigger: str, *told: Any) -> None:
        if trigger != Trigger.SEVER:
            record(self, name, kind, trigger, *told)

    patch.setattr(Reconciler, "_record", records)


@mistake
def a_resume_believes_that_all_live_row_31(patch: pytest.MonkeyPatch) -> None:
    def take_over(self: Reconciler, world: World) -> None:
        self.world = world

    patch.setattr(Reconciler, "take_over", take_over)


@mistake
def a_rewind_forgets_the_data_row_31(patch: pytest.MonkeyPatch) -> None:
    async def restore(self: Driver, position: object) -> None:
        self.first_step = 1

    patch.setattr(Driver, "restore", restore)


@mistake
def a_push_to_one_of_two_counts_row_35(patch: pytest.MonkeyPatch) -> None:
    def whole(action: str, workers: tuple[str, ...], ok: bool = True) -> on.Acted:
        return on.Acted(action, workers, True)

    patch.setattr(reconciler, "Acted", whole)


# -- of what only real processes have -------------------------------------------------------------


@mistake
def a_result_counts_after_its_epoch_row_3(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Lease, "_good", lambda self, what: None)


@mistake
def a_second_resume_is_let_through_row_16(patch: pytest.MonkeyPatch) -> None:
    alone = Admission.alone

    def admits(self: Admission, asked: str, *needs: str, absent: str = "") -> Any:
        return alone(self, asked, *needs)

    patch.setattr(Admission, "alone", admits)


@mistake
def a_revocation_stays_at_home_row_20(patch: pytest.MonkeyPatch) -> None:
    def report(self: RollCall, mark: Mark) -> Mark:
        return mark

    patch.setattr(RollCall, "report", report)


@mistake
def groups_open_in_the_order_told_row_21(patch: pytest.MonkeyPatch) -> None:
    def told(memberships: Iterable[Membership], key: object) -> list[Membership]:
        return list(memberships)

    patch.setattr(lease, "sorted", told, raising=False)


@mistake
def sleep_does_not_wait_for_requests_row_23(patch: pytest.MonkeyPatch) -> None:
    alone = Admission.alone

    @contextmanager
    def admits(self: Admission, asked: str, *needs: str, absent: str = "") -> Iterator[Any]:
        in_flight, self.in_flight = self.in_flight, set()
        try:
            with alone(self, asked, *needs, absent=absent) as holdings:
                self.in_flight = in_flight
                yield holdings
        finally:
            self.in_flight = in_flight

    patch.setattr(Admission, "alone", admits)


@mistake
def a_failed_load_is_not_heard_row_35(patch: pytest.MonkeyPatch) -> None:
    from fsm_trainer.sync import push  # imports torch

    patch.setattr(push, "_acknowledge", lambda lease, checksum, failed_here: None)
