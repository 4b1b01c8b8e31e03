from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from pydantic import ValidationError

from fsm_trainer.data.reward_process import as_reward
from fsm_trainer.data.rewards import RewardConfig, RewardPool
from fsm_trainer.data.trajectory import Sample, Status, Trajectory
from fsm_trainer.machine.errors import DeadlineExceeded, RewardFailed
from fsm_trainer.machine.version import Version


@pytest.fixture(autouse=True)
def reward_functions_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def answer(text: str, status: Status = Status.FINISHED) -> Trajectory:
    sample = Sample(id=f"id of {text!r}", prompt="?", answer=None, group="g")
    return Trajectory(sample, [5, 6], [0, 1], [0.0, -1.0], Version(0, 0), status, text)


@contextmanager
def pool(function: str = "number", **settings: Any) -> Iterator[RewardPool]:
    before = set(psutil.Process().children(recursive=True))
    with RewardPool(RewardConfig(function=f"scored_by:{function}", **settings)) as opened:
        yield opened
    assert set(psutil.Process().children(recursive=True)) <= before


def guarded(pid: int) -> int:
    """The process that the guard with this pid looks after."""
    [child] = psutil.Process(pid).children()
    return child.pid


def gone(pid: int, within: float = 5.0) -> bool:
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize("function", ["number", "soon"])
def test_rewards_keep_the_order_whatever_process_is_first(function: str) -> None:
    texts = [str(i) if i % 7 else f"sleep 0.0{i % 5}" for i in range(100)]
    with pool(function, processes=2, chunk=3) as opened:
        scored = opened.score([answer(text) for text in texts])
    assert [t.text for t in scored] == texts
    assert [t.reward for t in scored] == [float(t) if t.isdigit() else 0.5 for t in texts]


def test_512_short_rewards_cost_less_than_0_3_seconds_in_one_process() -> None:
    answers = [answer("1")] * 512
    with pool() as opened:
        seconds = []
        for _ in range(3):
            began = time.perf_counter()
            opened.score(answers)
            seconds.append(time.perf_counter() - began)
    assert min(seconds) < 0.3


def test_what_is_reported_beside_the_reward_becomes_info() -> None:
    with pool("by_name") as opened:
        [scored] = opened.score([answer("four")])
    assert (scored.reward, scored.info) == (1.0, {"length": 4.0})


def test_reward_processes_stay_and_do_not_import_torch() -> None:
    with pool("pid_and_torch", processes=2) as opened:
        scored = [t for _ in range(3) for t in opened.score([answer("a")] * 20)]
        assert {t.info["pid"] for t in scored} == set(map(guarded, opened.pids()))
    assert {t.info["torch"] for t in scored} == {0.0}


def test_who_exceeds_the_timeout_is_replaced_and_the_others_are_scored_once(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    texts = ["1", "sleep 60", "3", *[f"note {notes}"] * 17]  # a chunk is a quarter: 5
    with pool(timeout=0.5, on_error="zero") as opened:
        [before] = opened.pids()
        scored = opened.score([answer(text) for text in texts])
        [after] = opened.pids()
        assert gone(before) and after != before
    assert [t.reward for t in scored] == [1.0, 0.0, 3.0, *[0.5] * 17]
    assert [t.info["reward_failed"] for t in scored] == [0.0, 1.0, *[0.0] * 18]
    assert notes.read_text() == "scored\n" * 17


def test_a_timeout_is_per_trajectory_and_not_per_chunk() -> None:
    # The first chunk is 6 x 0.25 = 1.5 s long; the timeout is 0.8 s, and 0.5 s of grace.
    texts = ["sleep 0.25"] * 6 + ["1"] * 18
    with pool(timeout=0.8) as opened:
        scored = opened.score([answer(text) for text in texts])
    assert [t.reward for t in scored] == [0.5] * 6 + [1.0] * 18


def test_what_a_reward_function_started_is_killed_with_it(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    with pool(timeout=1.0, on_error="zero") as opened:
        opened.score([answer(f"child {note}")])
    assert gone(int(note.read_text()))


def test_a_stopped_process_costs_one_timeout_and_no_reward() -> None:
    with pool(timeout=0.3, on_error="zero") as opened:
        os.kill(guarded(opened.pids()[0]), signal.SIGSTOP)
        scored = opened.score([answer("1"), answer("2")])
    assert [t.reward for t in scored] == [0.0, 2.0]


def test_an_idle_process_that_was_killed_is_replaced_and_no_one_is_blamed() -> None:
    with pool() as opened:
        os.kill(opened.pids()[0], signal.SIGKILL)
        assert gone(opened.pids()[0])
        [scored] = opened.score([answer("2")])
    assert scored.reward == 2.0


def test_a_crash_is_blamed_on_the_trajectory_that_crashes_alone() -> None:
    texts = ["1", "2", "exit 7", *map(str, range(3, 16))]
    with pool(on_error="zero") as opened:
        scored = opened.score([answer(text) for text in texts])
    assert [t.reward for t in scored] == [1.0, 2.0, 0.0, *map(float, range(3, 16))]


@pytest.mark.parametrize("count", [1, 16])
def test_a_process_that_is_killed_from_outside_costs_no_reward(count: int) -> None:
    with pool() as opened:
        [pid] = opened.pids()
        killer = threading.Timer(0.3, os.kill, (pid, signal.SIGKILL))
        killer.start()
        scored = opened.score([answer("sleep 1"), *[answer("2")] * (count - 1)])
        killer.join(10)
        assert gone(pid)
    assert [t.reward for t in scored] == [0.5, *[2.0] * (count - 1)]


def test_async_functions_run_concurrently_within_a_chunk() -> None:
    with pool("soon", chunk=50) as opened:
        began = time.monotonic()
        opened.score([answer("sleep 0.2")] * 50)
        seconds = time.monotonic() - began
    assert seconds < 2.0  # 50 x 0.2 s = 10 s one after the other


def test_an_async_function_that_waits_too_long_costs_no_process() -> None:
    with pool("soon", timeout=0.2, on_error="zero") as opened:
        before = opened.pids()
        scored = opened.score([answer("sleep 60"), answer("2")])
        assert opened.pids() == before
    assert [t.reward for t in scored] == [0.0, 2.0]


def test_an_async_function_that_blocks_its_process_spoils_no_other_reward() -> None:
    with pool("soon", timeout=0.3, on_error="zero") as opened:
        scored = opened.score([answer(t) for t in ("sleep 0.1", "block 60", "3")])
    assert [t.reward for t in scored] == [0.5, 0.0, 3.0]


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("raise ducks", "ValueError: no reward for ducks"),
        ("sleep 60", "longer than its timeout of 0.3 s"),
        ("exit 7", "ended with code 7"),
        ("give nan", "the reward is nan, not a finite number"),
        ("give text", "the reward is 'one', not a number"),
        ("give none", "the reward is None, not a number"),
    ],
)
def test_a_failure_names_function_sample_and_cause_and_leaves_a_usable_pool(
    text: str, cause: str
) -> None:
    with pool(timeout=0.3) as opened:
        with pytest.raises(RewardFailed) as caught:
            # What follows in the failing chunk is still under way when the next call comes.
            opened.score([answer("1"), answer(text), answer("sleep 0.3"), *[answer("3")] * 13])
        [scored] = opened.score([answer("4")])
    message = str(caught.value)
    assert "scored_by:number" in message and repr(f"id of {text!r}") in message
    assert cause in message
    assert scored.reward == 4.0


@pytest.mark.parametrize(
    ("function", "cause"),
    [
        ("nowhere:number", "No module named 'nowhere'"),
        ("scored_by:missing", "no attribute 'missing'"),
        ("scored_by:constant", "scored_by:constant is a int, not a function"),
    ],
)
def test_a_function_that_cannot_be_loaded_is_refused_at_start(function: str, cause: str) -> None:
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(RewardFailed, match=cause):
        RewardPool(RewardConfig(function=function, processes=2)).start()
    assert set(psutil.Process().children(recursive=True)) <= before


def test_a_function_spec_without_a_colon_is_refused_by_the_config() -> None:
    with pytest.raises(ValidationError, match="function"):
        RewardConfig(function="scored_by.number")


def test_a_second_caller_is_refused_and_the_first_is_served() -> None:
    with pool() as opened:
        results: list[Trajectory] = []
        first = threading.Thread(
            target=lambda: results.extend(opened.score([answer("sleep 1")])), daemon=True
        )
        first.start()
        time.sleep(0.3)
        with pytest.raises(DeadlineExceeded, match="under way"):
            opened.score([answer("1")])
        first.join(10)
    assert [t.reward for t in results] == [0.5]


def test_processes_outlive_the_thread_that_opened_the_pool() -> None:
    # The death signal of a child fires when the thread that started it ends.
    opened = RewardPool(RewardConfig(function="scored_by:number"))
    starter = threading.Thread(target=opened.start)
    starter.start()
    starter.join(60)
    pids = opened.pids()
    time.sleep(0.3)
    assert [t.reward for t in opened.score([answer("1")])] == [1.0]
    assert opened.pids() == pids
    opened.close()


def test_no_process_is_left_after_its_parent_is_killed() -> None:
    texts = ("1", "sleep 600", "freeze 600")  # idle, busy, busy with the interpreter's lock held
    script = textwrap.dedent(
        f"""
        import sys, threading, time
        sys.path[:0] = {sys.path!r}
        from test_rewards import RewardConfig, RewardPool, answer
        config = RewardConfig(function="scored_by:number", processes=2, timeout=900)
        pools = {{text: RewardPool(config) for text in {texts!r}}}
        for pool in pools.values():
            pool.start()
        print(*[pid for pool in pools.values() for pid in pool.pids()], flush=True)
        for text, pool in pools.items():
            threading.Thread(target=pool.score, args=([answer(text)] * 8,)).start()
        time.sleep(600)
        """
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(word) for word in parent.stdout.readline().split()]
    time.sleep(0.5)
    assert len(pids) == 6 and not any(gone(pid, within=0.01) for pid in pids)
    parent.kill()
    parent.wait(10)
    assert all(gone(pid) for pid in pids)


def test_as_reward_accepts_what_counts_as_a_number() -> None:
    import numpy as np

    assert as_reward(True) == (1.0, {})
    assert as_reward(np.float32(0.5)) == (0.5, {})
    assert as_reward({"reward": 2, "x": np.int64(3)}) == (2.0, {"x": 3.0})
    with pytest.raises(TypeError, match="no key 'reward'"):
        as_reward({"score": 1.0})
