"""The kit's machine drives our own lifecycle, and finds what is broken in others."""

from __future__ import annotations

import doctest
import itertools
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

import fsm_trainer.testing
from examples.property_suite import BUGS, find
from fsm_trainer.machine.errors import ActionFailed, Refused
from fsm_trainer.machine.spec import load, schedules
from fsm_trainer.machine.world import System
from fsm_trainer.testing import LifecycleMachine, LifecycleWorker, Order, PropertyViolated, Step
from fsm_trainer.testing.leaks import Footprint
from fsm_trainer.testing.processes import Member, Processes, ProcessWorker, shared
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
        return None if self.lifecycle.worker.version is None else self.lifecycle.name


class Hangs(LifecycleWorker):
    def trigger(self, order: Order) -> None:
        if order.name == "connect":
            threading.Event().wait(5)
        super().trigger(order)


class ServesTornWeights(LifecycleWorker):
    def weights(self) -> object:
        return "whatever there is"


class OpensAnotherEpoch(LifecycleWorker):
    def epochs(self) -> dict[str, int]:
        return {link: epoch + len(self.lifecycle.name) for link, epoch in super().epochs().items()}


class SleepsAtWork(LifecycleWorker):
    def act(self, order: Order) -> None:
        order.meet()  # before its machine knows of the work
        super().act(order)


class FailsAtWork(LifecycleWorker):
    def act(self, order: Order) -> None:
        raise ActionFailed("never")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (TakesAll, "was done, though"),
        (CrashesWhenRefusing, "must be refused, but failed: ZeroDivisionError"),
        (LosesItsWeightsWithAPeer, "8: "),
        (KeepsHalfOfWhatFailed, "8: "),
        (PushesToOneOnly, "5: rollout-0 and actor differ in"),
        (Hangs, "did not come back within 1.0 s"),
        (FailsAtWork, "is legal, and failed"),
        (ServesTornWeights, "5: after wake(rollout-"),
        (OpensAnotherEpoch, "2: "),
        (SleepsAtWork, "was done, though"),
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


def until_nothing(left: Callable[[], list[str]], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while found := left():
        if time.monotonic() > deadline:
            pytest.fail("\n".join(found))
        time.sleep(0.05)


# Seconds that an end of a link waits for the others, and that an end stands still for.
LINK, STALL = 4.0, 10.0
LINKS = itertools.count()


class Real(LifecycleMachine):
    schedule, idle = "", list[Member]()
    born: ClassVar[dict[int, Footprint]] = {}
    """Of each process when its first sequence began."""
    links: ClassVar[Counter[int]] = Counter()
    """How many each process has known: of each it keeps a client of the store."""

    def __init__(self) -> None:
        super().__init__()
        self.link = f"fuzzed-{next(LINKS)}"  # a store keeps what it was told of an epoch

    def make_worker(self, name: str) -> ProcessWorker:
        place = (self.schedule, 2, name, self.link, shared().rendezvous.address, LINK)
        member = self.idle.pop() if self.idle else None
        worker = ProcessWorker(lives.make, *place, member=member)
        self.born.setdefault(worker.member.pid, worker.footprint())
        self.links[worker.member.pid] += 1
        return worker

    def teardown(self) -> None:
        try:
            if sys.exc_info()[0] is None:
                self.go_to("end")
                until_nothing(self.left, 10.0)
                self.idle.extend(worker.member for worker in self.workers.values())
                self.workers.clear()
        finally:
            super().teardown()

    def left(self) -> list[str]:
        """Who holds more than it was born with, and more than a process keeps of a group."""
        found = []
        for name, worker in self.workers.items():
            pid = worker.member.pid
            now, born, keeps = worker.footprint(), self.born[pid], lives.KEEPS
            clients = self.links[pid]
            most = keeps._replace(
                sockets=keeps.sockets + clients, descriptors=keeps.descriptors + clients
            )
            if any(n > b + m for n, b, m in zip(now, born, most, strict=True)):
                found.append(f"{name}: {born} -> {now}")
        return found


def real(schedule: str, stalls: float = 0.0) -> type[Real]:
    system = lives.system(schedule, rollouts=2)
    return type("Fuzzed", (Real,), {"schedule": schedule, "system": system, "stalls": stalls})


@pytest.fixture
def idle(gloo_processes: Processes, no_leaks: None) -> Iterator[None]:
    """Processes that were used are used again, and end with the test."""
    yield
    while Real.idle:
        Real.idle.pop().kill()


@pytest.mark.parametrize(
    ("schedule", "sequences"),
    [
        ("disaggregated_critic", 20),
        *(
            pytest.param(name, 200, marks=[pytest.mark.nightly, pytest.mark.timeout(7200)])
            for name in schedules()
        ),
    ],
)
def test_real_processes_with_real_groups_are_what_the_plain_model_says(
    schedule: str, sequences: int, idle: None
) -> None:
    nightly = sequences > 20
    some = settings(
        max_examples=sequences, stateful_step_count=20, deadline=None, derandomize=not nightly,
        database=None, suppress_health_check=[*HealthCheck], phases=[Phase.generate],
    )  # fmt: skip
    run_state_machine_as_test(real(schedule, STALL if nightly else 0.0), settings=some)


@pytest.mark.parametrize("name", ["actor", "rollout-1"])
def test_who_stands_still_fails_the_connect_for_all_and_then_itself(name: str, idle: None) -> None:
    machine = real("disaggregated_critic")()
    machine.begin()
    machine.go_to("policy")  # the actor is awake
    for rollout in ("rollout-0", "rollout-1"):
        machine.run(Step("start", (rollout,)))
        machine.run(Step("wake", (rollout,)))
    [connect] = [s for s in machine.model.triggers() if s.name == "connect" and s.joint]
    assert machine.workers[name].stall(STALL)
    machine.run(connect, failed=name)
    machine.go_to("sync")  # and the way back is there
    machine.teardown()
