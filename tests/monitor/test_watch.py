"""The monitor says nothing of what the tables allow, and tells of everything else once."""

from __future__ import annotations

import doctest
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fsm_trainer.monitor
from fsm_trainer.machine.errors import DataError
from fsm_trainer.machine.names import State, Trigger
from fsm_trainer.machine.spec import load, schedules
from fsm_trainer.machine.version import Version
from fsm_trainer.machine.world import System
from fsm_trainer.monitor import Event, Monitor, Violation
from fsm_trainer.monitor.watch import FAULTS
from fsm_trainer.verify.remedy import stand
from tests.verify.fake import FakeRun

ENDS = ("actor", "rollout-0", "rollout-1")
JOINT = ("connect", "disconnect")


def told(monitor: Monitor, *events: Event) -> list[Violation]:
    return [violation for event in events for violation in monitor.tell(event)]


def numbers(found: Iterable[Violation]) -> list[str]:
    """The properties that violations break."""
    return [violation.breaks.partition(":")[0] for violation in found]


def each(trigger: str, *workers: str, **more: Any) -> list[Event]:
    return [Event(worker, trigger, **more) for worker in workers]


@pytest.fixture
def apart() -> Monitor:
    """Actor and rollout workers on devices of their own, awake, with equal weights."""
    system = System.of(load("disaggregated"), rollouts=2)
    awake = dict.fromkeys(ENDS, (State.AWAKE, Version(1, 0)))
    return Monitor(system, stand(system, system.initial(), awake))


def events_of(schedule: str) -> list[Event]:
    """What a run of ours would have told another one's monitor."""
    entries = FakeRun(schedule).run().entries
    return [Event(entry["worker"], entry["trigger"], time=entry["time"]) for entry in entries]


def apart_in_time(events: Iterable[Event]) -> list[Event]:
    """Each event as a begin and an end; the ends of a joint step begin before any of them ends."""
    told: list[Event] = []
    group: list[Event] = []
    for event in [*events, None]:
        if group and (
            event is None or event.trigger != group[0].trigger or event.worker == group[0].worker
        ):
            told += [replace(one, at="begin") for one in group]
            told += [replace(one, at="end") for one in group]
            group = []
        if event is not None:
            group.append(event)
    return told


def test_the_tutorial_in_its_docstring_runs() -> None:
    result = doctest.testmod(fsm_trainer.monitor)
    assert result.attempted > 4 and result.failed == 0


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("schedule", schedules())
def test_a_run_by_the_tables_has_no_violation(schedule: str, split: bool) -> None:
    events = events_of(schedule)
    events = apart_in_time(events) if split else events
    monitor = Monitor(System.of(load(schedule), rollouts=2), deadline=60)
    assert told(monitor, *events) == []
    assert {worker.state for worker in monitor.world.workers} == {State.DISCONNECTED}


@pytest.mark.parametrize("schedule", schedules())
def test_a_trigger_can_be_neither_missing_nor_doubled(schedule: str) -> None:
    events, system = events_of(schedule), System.of(load(schedule), rollouts=2)
    for i, event in enumerate(events):
        again = events[: i + 1] + events[i:]
        missing = events[:i] + events[i + 1 :]
        # Who waits for others may tell it again, and nothing comes after the last stop.
        waits = event.trigger in JOINT and events[i + 1].trigger == event.trigger
        if event.trigger in list(Trigger):
            assert waits or told(Monitor(system), *again), event
            assert event.trigger == "stop" or told(Monitor(system), *missing), event


# -- joint steps -----------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [ENDS, ENDS[::-1]])
def test_a_link_is_up_when_its_last_end_has_told(apart: Monitor, order: tuple[str, ...]) -> None:
    *first, last = each("connect", *order)
    assert told(apart, *first) == []
    assert apart.system.get(apart.world, "actor").state == State.AWAKE
    assert told(apart, last) == []
    assert {worker.state for worker in apart.world.workers} == {State.CONNECTED}


def test_who_pushes_before_the_last_end_has_joined_is_refused(apart: Monitor) -> None:
    found = told(apart, *each("connect", "actor", "rollout-0"), Event("all", "push"))
    assert numbers(found) == ["12"]
    assert found[0].after == ("connect(actor, rollout-0, rollout-1)",)


def test_a_rendezvous_that_failed_moved_nobody_and_may_be_tried_again(apart: Monitor) -> None:
    begun = each("connect", "actor", "rollout-0", at="begin")
    assert told(apart, *begun, *each("connect", "actor", "rollout-0", at="end", ok=False)) == []
    assert told(apart, Event("rollout-1", "connect", at="begin"), *begun) == []
    *first, last = each("connect", *ENDS[::-1], at="end")
    assert told(apart, *first) == []
    assert {worker.state for worker in apart.world.workers} == {State.AWAKE}
    assert told(apart, last) == []
    assert {worker.state for worker in apart.world.workers} == {State.CONNECTED}


def test_a_sleeper_that_joins_is_refused_at_once_and_stays_asleep_row_22(apart: Monitor) -> None:
    asleep = Event("rollout-1", "sleep"), Event("rollout-1", "connect")
    (violation,) = told(apart, *asleep)
    assert violation.after == ("wake(rollout-1)",)
    assert told(apart, Event("rollout-1", "wake"), Event("all", "connect")) == []


def test_the_old_link_is_left_before_a_new_one_is_joined_row_22(apart: Monitor) -> None:
    told(apart, Event("all", "connect"), Event("actor", "sleep"), Event("actor", "wake"))
    (violation,) = told(apart, Event("all", "connect"))
    assert "rollout-1: connected has no 'connect'" in violation.because
    assert violation.breaks == ""
    assert told(apart, Event("all", "push")) == []  # the trainer's word is taken: it is connected


def test_a_push_that_failed_at_one_end_is_torn_at_all(apart: Monitor) -> None:
    told(apart, Event("all", "connect"), Event("actor", "train"), *each("push", *ENDS, at="begin"))
    *rest, last = each("push", *ENDS, at="end")
    assert told(apart, *rest, replace(last, ok=False)) == []
    found = told(apart, Event("rollout-0", "generate"))
    assert numbers(found) == ["5"]
    assert told(apart, Event("all", "push"), Event("rollout", "generate")) == []


def test_a_push_meets_no_request_in_flight(apart: Monitor) -> None:
    told(apart, Event("all", "connect"), Event("rollout-1", "generate", at="begin"))
    (violation,) = told(apart, Event("all", "push", at="begin"))
    assert "rollout-1 is connected and refuses 'push'" in violation.because
    assert "(rollout-1 serves without a version)" in violation.breaks


# -- faults ----------------------------------------------------------------------------------------


def test_after_a_death_the_others_leave_the_link_one_by_one_and_go_on(apart: Monitor) -> None:
    told(apart, Event("all", "connect"), Event("rollout-1", "died"))
    assert told(apart, Event("rollout-0", "disconnect"), Event("actor", "disconnect")) == []
    back = [Event("rollout-1", trigger) for trigger in ("confirmed", "start", "wake")]
    assert told(apart, *back, Event("all", "connect"), Event("all", "push")) == []
    assert told(apart, Event("rollout", "generate")) == []


def test_who_was_joining_somebody_that_died_is_where_it_was(apart: Monitor) -> None:
    told(apart, *each("connect", *ENDS, at="begin"))
    assert told(apart, Event("rollout-1", "died"), Event("actor", "train")) == []


def test_a_new_process_has_kept_nothing(apart: Monitor) -> None:
    told(apart, Event("rollout-0", "died"), Event("rollout-0", "confirmed"))
    told(apart, Event("rollout-0", "start"), Event("rollout-0", "wake", version="kept"))
    assert numbers(told(apart, Event("rollout-0", "generate"))) == ["5"]


def test_a_worker_is_not_started_beside_a_process_of_its_own_that_may_live(apart: Monitor) -> None:
    (violation,) = told(apart, Event("rollout-1", "died"), Event("rollout-1", "start"))
    assert "`not self.undead` is false" in violation.because


def test_a_request_that_ends_with_its_process_is_no_violation(apart: Monitor) -> None:
    begun = Event("rollout-0", "generate", at="begin")
    assert told(apart, begun, Event("rollout-0", "died"), replace(begun, at="end", ok=False)) == []


def test_a_wake_that_was_undone_leaves_a_sleeper(apart: Monitor) -> None:
    wake = Event("rollout-0", "wake", at="begin")
    assert told(apart, Event("rollout-0", "sleep"), wake, replace(wake, at="end", ok=False)) == []
    assert apart.system.get(apart.world, "rollout-0").state == State.SLEEPING


# -- what the worker's word says of epochs and versions --------------------------------------------


def test_an_epoch_is_used_once_and_all_ends_have_the_same(apart: Monitor) -> None:
    assert told(apart, *each("connect", *ENDS, epoch=7)) == []
    told(apart, Event("all", "disconnect"))
    (again,) = told(apart, Event("all", "connect", epoch=7))
    assert "can't open epoch 7" in again.because


def test_an_end_that_joined_another_epoch_breaks_property_2(apart: Monitor) -> None:
    other = Event("rollout-1", "connect", epoch=6)
    found = told(apart, *each("connect", "actor", "rollout-0", epoch=7), other)
    assert numbers(found) == ["2"]


def test_a_handle_of_an_old_epoch_is_seen_when_it_is_used_row_3(apart: Monitor) -> None:
    for epoch in (1, 2):
        told(apart, Event("all", "connect", epoch=epoch), Event("all", "push"))
        told(apart, *[Event("all", "disconnect")] * (epoch == 1))
    stale = replace(Event("rollout-0", "push", at="begin"), epoch=1)
    found = told(apart, *each("push", "actor", "rollout-1", at="begin"), stale)
    assert numbers(found) == ["12"]
    assert "rollout-0 would wait for others over a broken link" in found[0].breaks


def test_who_serves_other_weights_than_the_trainers_is_named_row_18(apart: Monitor) -> None:
    told(apart, Event("all", "connect"), Event("actor", "train", version=8), Event("all", "push"))
    assert told(apart, Event("rollout-0", "generate", version=8)) == []
    found = told(apart, Event("rollout-1", "generate", version=0))
    assert numbers(found) == ["5"]


@pytest.mark.parametrize(("version", "properties"), [("kept", []), (None, ["5"])])
def test_weights_that_a_sleeper_kept_are_as_good_as_before(
    apart: Monitor, version: Literal["kept"] | None, properties: list[str]
) -> None:
    told(apart, Event("rollout-0", "sleep"), Event("rollout-0", "wake", version=version))
    assert numbers(told(apart, Event("rollout-0", "generate"))) == properties


# -- the violation ---------------------------------------------------------------------------------


def test_an_engine_half_awake_serves_nobody_row_24(apart: Monitor) -> None:
    told(apart, Event("rollout-0", "sleep"), Event("rollout-0", "wake", at="begin"))
    (violation,) = told(apart, Event("rollout-0", "generate"))
    assert "rollout-0 is in the middle of wake" in violation.because


def test_who_leaves_a_link_already_cannot_begin_to_leave_it() -> None:
    system = System.of(load("colocated_critic"), rollouts=1)
    ends = dict.fromkeys(("actor", "rollout-0"), (State.CONNECTED, Version(1, 0)))
    monitor = Monitor(system, stand(system, system.initial(), ends))
    told(monitor, Event("all", "disconnect", at="begin"), Event("all", "push", epoch=9))
    (violation,) = told(monitor, Event("rollout-0", "disconnect", at="begin"))
    assert "rollout-0 is in the middle of disconnect" in violation.because


def test_actor_and_critic_awake_on_one_device_break_property_3_row_26() -> None:
    monitor = Monitor(System.of(load("disaggregated_critic"), rollouts=1))
    workers = ("actor", "critic")
    (violation,) = told(monitor, *each("start", *workers), *each("wake", *workers))
    assert violation.breaks.startswith("3: at most one exclusive resource on a device")
    assert violation.after == ("sleep(actor)",)


def test_the_like_is_counted_and_the_monitor_goes_on(apart: Monitor) -> None:
    step = [Event("all", "connect"), Event("actor", "sleep"), Event("actor", "wake"),
            Event("rollout", "disconnect")]  # fmt: skip
    found = told(apart, *step, *step, *step)
    assert [(violation.event.trigger, violation.again) for violation in found] == [
        ("sleep", 0), ("sleep", 1), ("sleep", 2),
    ]  # fmt: skip


def test_the_story_speaks_of_everybody_that_the_reason_names(apart: Monitor) -> None:
    told(apart, Event("rollout-1", "sleep"), Event("actor", "train"))
    (violation,) = told(apart, Event("rollout-0", "generate"))
    assert violation.story == ("event 2: actor train",)
    assert str(violation).startswith("event 3: rollout-0 is awake and refuses 'generate'")


SYSTEMS = [System.of(load(schedule), rollouts=2) for schedule in schedules()]


@st.composite
def words(draw: st.DrawFn) -> tuple[System, list[Event]]:
    """A schedule, and what a trainer without any order might tell."""
    system = draw(st.sampled_from(SYSTEMS))
    tables = {name: system.table(name) for name in system.names}
    asked = {(n, str(edge.trigger)) for n, t in tables.items() for edge in t.transitions}
    asked |= {(name, action) for name, table in tables.items() for action in table.actions}
    asked |= {("all", trigger) for trigger in (*JOINT, "push")}
    asked |= {(name, fault) for name in tables for fault in FAULTS}
    event = st.builds(
        lambda whom, at, ok, epoch, version: Event(*whom, at, ok, epoch, version),
        st.sampled_from(sorted(asked)),
        st.sampled_from([None, "begin", "end"]),
        st.booleans(),
        st.sampled_from([None, 1, 2]),
        st.sampled_from([None, "kept", 0, 1]),
    )
    return system, draw(st.lists(event, max_size=40))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(words())
def test_whatever_is_told_the_monitor_goes_on(told_by: tuple[System, list[Event]]) -> None:
    system, events = told_by
    monitor = Monitor(system)
    told(monitor, *events)
    assert monitor.count == len(events)


# -- deadlines -------------------------------------------------------------------------------------


def test_what_does_not_end_is_told_once_with_who_is_waited_for() -> None:
    system = System.of(load("disaggregated"), rollouts=2)
    awake = dict.fromkeys(ENDS, (State.AWAKE, Version(1, 0)))
    monitor = Monitor(system, stand(system, system.initial(), awake), deadline=30)
    begun = [Event("actor", "connect", at="begin", time=0.0)]
    dies = [Event("rollout-0", "generate", at="begin", time=0.0), Event("rollout-0", "died")]
    beat = [Event("rollout-1", "generate", time=time) for time in (30.0, 31.0, 90.0)]
    (violation,) = told(monitor, *begun, *dies, *beat)
    expected = (
        "actor connect begin, and has not ended 31 s later: it waits for rollout-0, rollout-1"
    )
    assert violation.because == expected


# -- mistakes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "event", [Event("rollout-7", "wake"), Event("actor", "wakes"), Event("actor", "generate"),
              Event("all", "wake"), Event("actor", "sever")],
)  # fmt: skip
def test_what_the_tables_do_not_know_is_an_error_that_names_the_place(
    apart: Monitor, event: Event
) -> None:
    with pytest.raises(DataError, match=r"line 3: .*The workers: actor, rollout-0, rollout-1"):
        apart.tell(replace(event, where="line 3"))
