"""One worker's lifecycle: effects run once, whoever asks meanwhile is refused, and it is told."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from fsm_trainer.machine.errors import EffectFailed, LeaseExpired, Refused
from fsm_trainer.machine.events import Effect, Op
from fsm_trainer.machine.lifecycle import Lifecycle, Record
from fsm_trainer.machine.names import State
from fsm_trainer.machine.spec import load
from fsm_trainer.machine.version import Version
from fsm_trainer.machine.world import Link, System

WAIT = 10.0
"""Seconds after which a test gives up."""


class Held:
    """A resource that remembers, and does what a test wants in the middle of an effect."""

    def __init__(self, log: list[str], hooks: dict[str, Callable[[], object]]) -> None:
        self.log, self.hooks = log, hooks

    def acquire(self, effect: Effect) -> None:
        self._run(effect)

    def release(self, effect: Effect) -> None:
        self._run(effect)

    def _run(self, effect: Effect) -> None:
        self.log.append(str(effect))
        self.hooks.get(str(effect), lambda: None)()


class Bench:
    def __init__(self, name: str = "actor", kill: Callable[[], None] | None = None) -> None:
        self.log: list[str] = []
        self.hooks: dict[str, Callable[[], object]] = {}
        self.records: list[Record] = []
        system = System.of(load("disaggregated"), 1)
        held = {r for resources in system.table(name).holds.values() for r in resources}
        resources = {r: Held(self.log, self.hooks) for r in held}
        self.worker = Lifecycle(system, name, resources, kill=kill, observe=self.records.append)

    def awake(self) -> None:
        self.worker.trigger("start")
        self.worker.trigger("wake")


def raising(error: BaseException) -> Callable[[], object]:
    def hook() -> None:
        raise error

    return hook


def test_a_transition_runs_its_effects_in_order_and_is_told() -> None:
    bench = Bench()
    bench.worker.trigger("start")
    bench.worker.trigger("wake")
    assert bench.log == [
        "acquire bank", "acquire weights", "acquire optimizer", "acquire train_groups",
    ]  # fmt: skip
    told = [(r.name, r.before.state, r.after.state, r.after.version, r.ok) for r in bench.records]
    assert told == [
        ("start", "disconnected", "sleeping", Version(1, 0), True),
        ("wake", "sleeping", "awake", Version(1, 0), True),
    ]


def test_of_two_threads_one_is_refused_and_the_effect_runs_once() -> None:
    bench, inside, go = Bench(), threading.Event(), threading.Event()

    def wait() -> None:
        inside.set()
        assert go.wait(WAIT)

    bench.hooks["acquire bank"] = wait
    first = threading.Thread(target=bench.worker.trigger, args=("start",))
    first.start()
    assert inside.wait(WAIT)
    with pytest.raises(Refused, match="in the middle of start"):
        bench.worker.trigger("start")
    go.set()
    first.join(WAIT)
    assert bench.log == ["acquire bank"] and bench.worker.state == State.SLEEPING


def test_a_trigger_from_within_an_effect_is_refused_and_nothing_else_moves() -> None:
    bench, seen = Bench(), list[str]()

    def again() -> None:
        with pytest.raises(Refused) as error:
            bench.worker.trigger("stop")
        seen.append(str(error.value))

    bench.hooks["acquire bank"] = again
    bench.worker.trigger("start")
    assert "in the middle of start" in seen[0] and bench.worker.state == State.SLEEPING


def test_an_effect_that_fails_is_undone_and_the_error_says_where_it_stands() -> None:
    bench = Bench()
    bench.worker.trigger("start")
    bench.hooks["acquire train_groups"] = raising(RuntimeError("no peers"))
    with pytest.raises(EffectFailed, match=r"acquire train_groups failed.*no peers.*sleeping"):
        bench.worker.trigger("wake")
    assert bench.log[-2:] == ["release optimizer", "release weights"]
    last = bench.records[-1]
    assert (last.name, last.ok) == ("wake", False)
    assert (last.before.state, last.after.state) == ("sleeping", "sleeping")


def test_ctrl_c_inside_an_effect_is_raised_and_can_be_undone() -> None:
    bench = Bench()
    bench.worker.trigger("start")
    bench.hooks["acquire optimizer"] = raising(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        bench.worker.trigger("wake")
    assert bench.worker.undo().state == State.SLEEPING
    assert bench.worker.worker.held == {"bank"}


def test_a_failed_release_kills_and_leaves_nothing_on_the_ledger() -> None:
    killed: list[bool] = []
    bench = Bench(kill=lambda: killed.append(True))
    bench.worker.trigger("start")
    bench.hooks["release bank"] = raising(OSError("stuck"))
    with pytest.raises(EffectFailed):
        bench.worker.trigger("stop")
    assert killed == [True]
    assert (bench.worker.state, bench.worker.worker.ghost) == (State.DISCONNECTED, frozenset())
    assert (bench.records[-1].name, bench.records[-1].ok) == ("fail", False)


def test_reach_goes_the_shortest_way_and_does_nothing_twice() -> None:
    bench = Bench()
    bench.worker.reach(State.AWAKE)
    done = len(bench.log)
    assert bench.worker.reach(State.AWAKE).state == State.AWAKE
    assert len(bench.log) == done
    bench.worker.reach(State.DISCONNECTED)
    assert [r.name for r in bench.records] == ["start", "wake", "sleep", "stop"]


def test_an_action_is_counted_in_flight_and_told_even_if_its_body_fails() -> None:
    bench = Bench()
    bench.awake()
    with pytest.raises(ValueError), bench.worker.action("train"):
        assert bench.worker.worker.jobs == ("train",)
        with pytest.raises(Refused, match="in_flight"):
            bench.worker.trigger("sleep")
        raise ValueError("nan")
    with bench.worker.action("train"):
        pass
    assert bench.worker.worker.jobs == ()
    told = [(r.name, r.ok, r.after.version) for r in bench.records[-2:]]
    assert told == [("train", False, Version(1, 0)), ("train", True, Version(1, 1))]


def test_an_illegal_action_does_not_run() -> None:
    bench = Bench()
    with pytest.raises(Refused, match="train is legal in awake or connected"):  # noqa: SIM117
        with bench.worker.action("train"):
            pytest.fail("the body ran")


def test_news_older_than_a_link_that_was_seen_raise_row_3() -> None:
    bench = Bench()
    world = bench.worker.world
    bench.worker.tell(world._replace(links=(Link(epoch=3),)))
    with pytest.raises(LeaseExpired, match="has seen epoch 3"):
        bench.worker.tell(world._replace(links=(Link(epoch=2),)))


def test_a_connect_under_an_old_epoch_is_refused() -> None:
    bench = Bench()
    bench.awake()
    bench.worker.tell(bench.worker.world._replace(links=(Link(epoch=3),)))
    with pytest.raises(Refused, match="can't open epoch 2"):
        bench.worker.begin("connect", epoch=2)


def test_a_joint_transition_waits_between_release_and_acquire() -> None:
    bench = Bench()
    bench.awake()
    assert bench.worker.begin("connect", epoch=4).done == ()
    assert bench.worker.acquire().done == (Effect("actor", Op.ACQUIRE, "link", 4),)
    assert bench.worker.commit().epochs == (4,)


def test_the_death_of_a_peer_ends_the_lease_and_sever_keeps_the_weights() -> None:
    bench = Bench()
    bench.awake()
    bench.worker.trigger("connect", epoch=1)
    bench.worker.peer_died("rollout-0")
    assert bench.worker.sever("link").state == State.AWAKE
    assert "weights" in bench.worker.worker.held and bench.worker.worker.epochs == (0,)
    assert bench.log[-1] == "release link"
