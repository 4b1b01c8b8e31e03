"""The simulation itself: it replays, and it reaches every fault."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from random import Random

import pytest

from fsm_trainer.machine.spec import load, schedules
from fsm_trainer.machine.world import System
from fsm_trainer.simulation import training
from fsm_trainer.simulation.faults import alone, points
from fsm_trainer.simulation.loop import SimulatedLoop, Stuck
from fsm_trainer.simulation.seeds import Campaign, campaign, quiet, shrunk, story
from fsm_trainer.simulation.training import Training, simulate
from tests.patches.mistakes import a_push_to_one_of_two_counts_row_35

SEEDS = 12


@pytest.fixture(autouse=True)
def plans_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a broken runtime planned is not for the tests after it."""
    monkeypatch.setattr(training, "_plans", {})


@pytest.fixture
def silent() -> Iterator[None]:
    with quiet():
        yield


@pytest.mark.parametrize("schedule", schedules())
def test_trainings_with_faults_end_well_or_with_an_error_that_the_faults_explain(
    schedule: str,
) -> None:
    trainings = [Training(schedule, seed, steps=8) for seed in range(1000, 1000 + SEEDS)]

    failed = [story(result) for result in campaign(trainings) if result.failure]

    assert failed == []


@pytest.mark.parametrize("schedule", schedules())
def test_a_training_without_faults_finishes(schedule: str, silent: None) -> None:
    result = simulate(Training(schedule, seed=3, steps=6, faults=()))

    assert (result.failure, result.end) == ("", "finished")


@pytest.mark.parametrize("schedule", schedules())
def test_every_role_meets_every_fault_at_every_boundary(schedule: str) -> None:
    system, trainings = System.of(load(schedule), 2), []
    for seed, (role, where, what) in enumerate(points(system)):
        worker = next(name for name, r in system.names.items() if r is role)
        faults = alone(system, worker, where, what)
        steps = 4 if where in ("call kill", "call respawn") else 2
        trainings.append(Training(schedule, seed, steps, faults=faults))

    came = Campaign()
    for result in campaign(trainings):
        came.add(result)

    assert [story(result) for result in came.failed] == []
    assert came.missed(trainings[0]) == []


@pytest.mark.parametrize("schedule", schedules())
def test_a_training_that_is_killed_and_resumed_learns_each_step_once_row_31(
    schedule: str, silent: None
) -> None:
    # The second step ends, with a checkpoint, after 70 to 145 virtual seconds.
    results = [
        simulate(Training(schedule, seed, steps=8, faults=(), killed=150.0 + 4.0 * seed))
        for seed in range(8)
    ]

    assert [story(result) for result in results if result.failure] == []
    assert [result.end for result in results] == ["finished"] * 8
    assert all(any("the run is killed" in line for line in result.told) for result in results[:4])


def test_a_seed_replays_exactly(silent: None) -> None:
    run = Training("colocated_critic", seed=59, steps=6)

    first, second = simulate(run), simulate(run)

    assert first == second
    assert len(first.told) > 100


def test_a_seed_replays_exactly_in_a_process_that_hashes_otherwise(silent: None) -> None:
    program = (
        "from fsm_trainer.simulation.seeds import quiet\n"
        "from fsm_trainer.simulation.training import Training, simulate\n"
        "with quiet():\n"
        "    told = [simulate(Training('disaggregated_critic', s, 4)) for s in (59, 72)]\n"
        "print([(t.end, t.told, t.story) for t in told])"
    )
    told = [
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        ).stdout
        for seed in ("1", "2")
    ]

    assert told[0] == told[1]


def test_what_is_left_of_a_failing_seed_is_what_makes_it_fail(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    a_push_to_one_of_two_counts_row_35(monkeypatch)
    with quiet():
        results = (simulate(Training("disaggregated_critic", n, steps=6)) for n in range(200))
        first = next(result for result in results if result.failure)

        fewest = shrunk(first)

    assert fewest.failure
    assert len(fewest.fired) == 1
    assert fewest.training.steps == 2
    assert any("push" in line for line in story(fewest))


def loop() -> SimulatedLoop:
    return SimulatedLoop(Random(0))  # type: ignore[abstract]


def test_time_jumps_to_the_next_timer() -> None:
    made = loop()

    made.run(asyncio.sleep(3600.0), until=4000.0)

    assert made.time() == 3600.0


def test_a_run_that_waits_for_nothing_is_stuck() -> None:
    async def waits() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(Stuck, match="nothing will ever happen"):
        loop().run(waits(), until=10.0)


def test_a_run_that_takes_longer_than_it_may_is_stuck() -> None:
    with pytest.raises(Stuck, match="no end within 10 virtual seconds"):
        loop().run(asyncio.sleep(11.0), until=10.0)


def test_a_thread_can_not_slip_into_a_run() -> None:
    with pytest.raises(NotImplementedError):
        loop().run(asyncio.to_thread(int), until=10.0)
