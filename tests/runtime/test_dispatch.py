"""Dispatch: every part is made, by whom it may be made, and what was made is never lost.

Time here is turns of the event loop, so that who is idle when does not depend on the machine.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from fsm_trainer.machine.errors import (
    ActionFailed,
    EngineFailed,
    FsmError,
    Refused,
    SelfCheckFailed,
    WorkerLost,
)
from fsm_trainer.machine.version import Version
from fsm_trainer.runtime.dispatch import Dispatcher
from fsm_trainer.runtime.port import Outcome
from fsm_trainer.workers.data import Summary

Call = tuple[str, int]
SLOW = 200
"""Turns of the loop: more than all parts of a fast worker take."""


class Fleet:
    """Workers that take parts 0, 1, 2, ...; ``does`` says what else becomes of a worker's n-th."""

    def __init__(
        self,
        turns: Mapping[str, int] | None = None,
        does: Mapping[Call, FsmError | int] | None = None,
        versions: Mapping[str, Version] | None = None,
    ) -> None:
        self.turns, self.does, self.versions = turns or {}, does or {}, versions or {}
        self.asked: list[Call] = []
        self.made: list[Call] = []
        self.running = Counter[str]()
        self.most = Counter[str]()

    async def give(self, name: str, part: int) -> Outcome:
        nth = sum(worker == name for worker, _ in self.asked)
        self.asked.append((name, part))
        self.running.update([name, "all"])
        self.most |= self.running
        try:
            for _ in range(self.turns.get(name, 1)):
                await asyncio.sleep(0)
        finally:
            self.running.subtract([name, "all"])
        happens = self.does.get((name, nth), 0)
        if isinstance(happens, FsmError):
            raise happens
        self.made.append((name, part))
        return Outcome((name, part, happens), 1)

    async def summary(self, payload: tuple[str, int, int]) -> Summary:
        name, _, aborted = payload
        return Summary(aborted, frozenset({self.versions.get(name, Version(1, 1))}))

    def dispatcher(self, parts: int) -> Dispatcher:
        return Dispatcher(range(parts), self.give, self.summary)

    def parts_of(self, name: str, calls: Sequence[Call]) -> list[int]:
        return [part for worker, part in calls if worker == name]


def run(dispatcher: Dispatcher, *workers: str) -> list[tuple[str, int, int]]:
    return [outcome.payload for outcome in asyncio.run(dispatcher.run(workers))]


def numbers(payloads: list[tuple[str, int, int]]) -> list[int]:
    return [part for _, part, _ in payloads]


def test_whoever_is_idle_takes_the_next_part() -> None:
    fleet = Fleet(turns={"slow": SLOW, "fast": 1})

    run(fleet.dispatcher(6), "slow", "fast")

    assert fleet.parts_of("slow", fleet.made) == [0]
    assert fleet.parts_of("fast", fleet.made) == [1, 2, 3, 4, 5]


def test_a_worker_has_one_part_at_a_time_and_all_work_side_by_side() -> None:
    fleet = Fleet(turns={"a": 5, "b": 3, "c": 2})

    run(fleet.dispatcher(10), "a", "b", "c")

    assert fleet.most == {"a": 1, "b": 1, "c": 1, "all": 3}


def test_what_parts_came_to_stands_in_their_order() -> None:
    fleet = Fleet(turns={"a": SLOW, "b": 1})

    results = run(fleet.dispatcher(4), "a", "b")

    assert [part for _, part in fleet.made] == [1, 2, 3, 0]  # as they ended
    assert numbers(results) == [0, 1, 2, 3]


@pytest.mark.parametrize("error", [WorkerLost("it is gone"), EngineFailed("its engine is gone")])
def test_the_part_of_a_lost_worker_is_the_next_one_and_nothing_is_made_twice(
    error: FsmError,
) -> None:
    fleet = Fleet(turns={"a": 1, "b": 20}, does={("a", 1): error})

    results = run(fleet.dispatcher(5), "a", "b")

    assert fleet.asked == [("a", 0), ("b", 1), ("a", 2), ("b", 2), ("b", 3), ("b", 4)]
    assert sorted(part for _, part in fleet.made) == [0, 1, 2, 3, 4]
    assert numbers(results) == [0, 1, 2, 3, 4]


def test_an_idle_worker_waits_for_what_others_may_give_back() -> None:
    fleet = Fleet(turns={"a": SLOW, "b": 1}, does={("a", 0): WorkerLost("it is gone")})

    run(fleet.dispatcher(2), "a", "b")

    assert fleet.made == [("b", 1), ("b", 0)]


def test_with_all_workers_lost_a_further_call_makes_only_what_is_missing() -> None:
    gone = WorkerLost("it is gone")
    fleet = Fleet(does={("a", 1): gone, ("b", 1): gone})
    dispatcher = fleet.dispatcher(4)

    with pytest.raises(WorkerLost, match=r"parts \[2, 3\].*it is gone"):
        run(dispatcher, "a", "b")
    results = run(dispatcher, "a", "b")

    assert Counter(part for _, part in fleet.made) == {0: 1, 1: 1, 2: 1, 3: 1}
    assert numbers(results) == [0, 1, 2, 3]


def test_without_workers_there_is_a_typed_error() -> None:
    with pytest.raises(WorkerLost, match=r"parts \[0\]: there is none"):
        run(Fleet().dispatcher(1))


@pytest.mark.parametrize(("again", "kept"), [(0, "b"), (1, "b"), (3, "a"), (5, "a")])
def test_an_aborted_part_is_given_once_more_to_another_and_the_better_one_is_kept(
    again: int, kept: str
) -> None:
    fleet = Fleet(turns={"a": 1, "b": 9}, does={("a", 0): 3, ("b", 1): again})

    results = run(fleet.dispatcher(3), "a", "b")

    assert fleet.parts_of("a", fleet.asked) == [0, 2]
    assert fleet.parts_of("b", fleet.asked) == [1, 0]
    assert results[0] == {"a": ("a", 0, 3), "b": ("b", 0, again)}[kept]


@pytest.mark.parametrize(
    "others", [(), ("lost",)], ids=["there is no other one", "the other one is lost"]
)
def test_an_aborted_part_stays_as_it_is_where_nobody_else_can_make_it(
    others: tuple[str, ...],
) -> None:
    fleet = Fleet(does={("a", 0): 3, ("lost", 0): WorkerLost("it is gone")})

    results = run(fleet.dispatcher(2), "a", *others)

    assert sorted(part for _, part in fleet.made) == [0, 1]
    assert results[0] == ("a", 0, 3)


def test_the_part_that_a_paused_engine_refuses_goes_to_another() -> None:
    paused = Refused("a", "awake", "generate", ["paused (in_place)"])
    fleet = Fleet(does={("a", 0): paused})

    results = run(fleet.dispatcher(3), "a", "b")

    assert fleet.parts_of("a", fleet.asked) == [0]
    assert results == [("b", 0, 0), ("b", 1, 0), ("b", 2, 0)]


def test_where_all_refuse_the_refusal_is_told() -> None:
    paused = Refused("a", "awake", "generate", ["paused (in_place)"])

    with pytest.raises(Refused, match="paused"):
        run(Fleet(does={("a", 0): paused, ("b", 0): paused}).dispatcher(2), "a", "b")


def test_where_one_was_lost_and_the_other_refuses_the_phase_may_begin_again() -> None:
    paused = Refused("a", "awake", "generate", ["paused (in_place)"])
    fleet = Fleet(does={("a", 0): paused, ("b", 0): WorkerLost("it is gone")})

    with pytest.raises(WorkerLost, match=r"parts \[0, 1\].*paused.*it is gone"):
        run(fleet.dispatcher(2), "a", "b")


def test_an_error_of_the_users_code_is_not_retried_and_the_others_end_their_parts() -> None:
    fleet = Fleet(turns={"b": 20}, does={("a", 0): ActionFailed("the hook raised")})

    with pytest.raises(ActionFailed, match="the hook raised"):
        run(fleet.dispatcher(4), "a", "b")

    assert fleet.asked == [("a", 0), ("b", 1)]
    assert fleet.made == [("b", 1)]


def test_a_lost_data_worker_is_not_taken_for_a_lost_rollout_worker() -> None:
    fleet = Fleet()

    async def gone(payload: Any) -> Summary:
        raise WorkerLost("data is gone")

    with pytest.raises(WorkerLost, match=r"^data is gone$"):
        run(Dispatcher(range(2), fleet.give, gone), "a", "b")
    assert len(fleet.asked) == 2


def test_trajectories_of_two_versions_are_an_error_that_names_them() -> None:
    fleet = Fleet(versions={"a": Version(1, 1), "b": Version(1, 2)})

    with pytest.raises(SelfCheckFailed, match=r"'a', '1\.1'.*'b', '1\.2'"):
        run(fleet.dispatcher(2), "a", "b")


def test_a_cancelled_dispatch_leaves_no_call_behind() -> None:
    endless = 10**9
    fleet = Fleet(turns={"a": endless, "b": endless})

    async def cancelled() -> None:
        task = asyncio.create_task(fleet.dispatcher(4).run(("a", "b")))
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait([task], timeout=5)
        assert task.cancelled()
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(cancelled())

    assert fleet.asked == [("a", 0), ("b", 1)]
    assert fleet.made == []
