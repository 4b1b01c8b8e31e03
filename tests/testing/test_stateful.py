"""The kit's machine drives our own lifecycle, and finds what is broken in others."""

from __future__ import annotations

import doctest
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

import fsm_trainer.testing
from examples.property_suite import BUGS, find
from fsm_trainer.machine.errors import ActionFailed, Refused
from fsm_trainer.machine.spec import load, schedules
from fsm_trainer.machine.world import System
from fsm_trainer.testing import LifecycleMachine, LifecycleWorker, Order, PropertyViolated
from fsm_trainer.testing.leaks import Footprint
from fsm_trainer.testing.processes import Processes, ProcessWorker
from tests.testing import lives

QUICK = settings(
    max_examples=30, stateful_step_count=30, deadline=None, derandomize=True,
    phases=[Phase.generate],
)  # fmt: skip


def machine(
    schedule: str, make: Callable[..., Any], rollouts: int = 2, **more: Any
) -> type[LifecycleMachine]:
    system = System.of(load(schedule), rollouts)
    body = {"system": system, "make_worker": lambda self, name: make(system, name), **more}
    return type("Machine", (LifecycleMachine,), body)


def test_the_package_s_tutorial_runs() -> None:
    flags = doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL
    assert doctest.testmod(fsm_trainer.testing, optionflags=flags).failed == 0


@pytest.mark.parametrize("schedule", schedules())
def test_our_own_lifecycle_is_what_the_plain_model_says(schedule: str) -> None:
    run_state_machine_as_test(machine(schedule, LifecycleWorker), settings=QUICK)


# -- what is broken is found -----------------------------------------------------------------------


class TakesAll(LifecycleWorker):
    def trigger(self, order: Order) -> None:
        try:
            super().trigger(order)
        except Refused:
            return


class CrashesWhenRefusing(LifecycleWorker):
    def act(self, order: Order) -> None:
        try:
            super().act(order)
        except Refused as refused:
            raise ZeroDivisionError from refused


class LosesItsWeightsWithAPeer(LifecycleWorker):
    def holds(self) -> list[str]:
        lost = [link for link in self.lifecycle.world.links if link.state == "broken"]
        return [r for r in super().holds() if r != "weights" or not lost]


class KeepsHalfOfWhatFailed(LifecycleWorker):
    failed = False

    def fail_next(self, resource: str) -> bool:
        self.failed = True
        return super().fail_next(resource)

    def holds(self) -> list[str]:
        return [*super().holds(), *(["kv"] if self.failed else [])]


class PushesToOneOnly(LifecycleWorker):
    def weights(self) -> object:
        return self.lifecycle.name


class Hangs(LifecycleWorker):
    def trigger(self, order: Order) -> None:
        if order.name == "connect":
            threading.Event().wait(5)
        super().trigger(order)


class FailsAtWork(LifecycleWorker):
    def act(self, order: Order) -> None:
        raise ActionFailed("never")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (TakesAll, "was done, though"),
        (CrashesWhenRefusing, "must be refused, but failed: ZeroDivisionError"),
        (LosesItsWeightsWithAPeer, "8: "),
        (KeepsHalfOfWhatFailed, "8: after"),
        (PushesToOneOnly, "5: rollout-0 and actor differ in"),
        (Hangs, "did not come back within 1.0 s"),
        (FailsAtWork, "is legal, and failed"),
    ],
)
def test_a_broken_lifecycle_is_found_and_told(make: Callable[..., Any], says: str) -> None:
    with pytest.raises(PropertyViolated) as violated:
        run_state_machine_as_test(machine("disaggregated", make, deadline=1.0), settings=QUICK)
    assert says in str(violated.value) and "the way there:" in str(violated.value)


@pytest.mark.parametrize("bug", ["", *BUGS])
def test_the_example_finds_the_bugs_of_code_that_is_not_ours(bug: str) -> None:
    assert bool(find(bug)) == bool(bug)


# -- real processes --------------------------------------------------------------------------------


def until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.05)


SEQUENCES = [
    pytest.param(20, True),
    pytest.param(200, False, marks=[pytest.mark.nightly, pytest.mark.timeout(3600)]),
]


@pytest.mark.parametrize(("sequences", "fixed"), SEQUENCES)
@pytest.mark.parametrize(
    "schedule",
    ["disaggregated_critic", pytest.param("colocated_critic", marks=pytest.mark.nightly)],
)
def test_real_processes_with_real_groups_are_what_the_plain_model_says(
    schedule: str, sequences: int, fixed: bool, gloo_processes: Processes, no_leaks: None
) -> None:
    links = iter(range(10_000))

    class Real(LifecycleMachine):
        system = lives.system(schedule, rollouts=2)

        def __init__(self) -> None:
            super().__init__()
            self.link = f"{schedule}-{sequences}-{next(links)}"  # a store keeps what it was told
            self.born = dict[str, Footprint]()

        def make_worker(self, name: str) -> ProcessWorker:
            store = gloo_processes.rendezvous.address
            worker = ProcessWorker(lives.make, schedule, 2, name, self.link, store, 4.0)
            self.born[name] = worker.footprint()
            return worker

        def teardown(self) -> None:
            try:
                if sys.exc_info()[0] is None:
                    self.go_to("end")
                    until(lambda: not self.left(), 10.0)
            finally:
                super().teardown()

        def left(self) -> list[str]:
            """Who holds more than it was born with, and more than a process keeps of a group."""
            found = []
            for name, born in self.born.items():
                now = self.workers[name].footprint()
                grown = [a - b for a, b in zip(now, born, strict=True)][:-1]
                if any(g > most for g, most in zip(grown, lives.KEEPS, strict=True)):
                    found.append(f"{name}: {born} -> {now}")
            return found

    some = settings(
        max_examples=sequences, stateful_step_count=20, deadline=None, derandomize=fixed,
        database=None, suppress_health_check=[*HealthCheck], phases=[Phase.generate],
    )  # fmt: skip
    run_state_machine_as_test(Real, settings=some)
