"""What the simulation found in driver and reconciler: each is one training with its faults."""

from __future__ import annotations

import pytest

from fsm_trainer.simulation.faults import Fault, What
from fsm_trainer.simulation.seeds import quiet
from fsm_trainer.simulation.training import Result, Training, simulate


def came_to(schedule: str, *faults: Fault, steps: int = 2) -> Result:
    with quiet():
        return simulate(Training(schedule, seed=0, steps=steps, faults=faults))


@pytest.mark.parametrize("what", [What.LOST, What.CRASH_BEFORE])
def test_a_worker_that_is_lost_as_several_begin_does_not_keep_the_others_from_arriving(
    what: What,
) -> None:
    result = came_to("disaggregated", Fault("rollout-0", "call begin", what))

    assert result.fired
    assert result.end == "finished"


def test_what_was_acquired_before_the_others_told_does_not_end_a_run_when_one_is_lost() -> None:
    result = came_to("colocated_critic", Fault("rollout-0", "call acquire", What.LOST, 5))

    assert result.fired
    assert result.end == "finished"


def test_a_trainer_that_can_not_be_started_again_at_once_is_tried_again() -> None:
    train = Fault("actor", "train", What.CRASH_BEFORE, 3)
    result = came_to("disaggregated", train, Fault("actor", "call respawn", What.FAIL), steps=4)

    assert len(result.fired) == 2
    assert result.end == "finished"
