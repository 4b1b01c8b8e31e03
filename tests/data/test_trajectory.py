from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsm_trainer.data.seeds import derive
from fsm_trainer.data.trajectory import Sample, Status, Trajectory
from fsm_trainer.machine.errors import DataError
from fsm_trainer.machine.version import Version

SAMPLE = Sample(id="sum/7", prompt="1+2=", answer="3", group="sum/7")


def trajectory(**changes: Any) -> Trajectory:
    fields: dict[str, Any] = {
        "sample": SAMPLE,
        "tokens": [7, 8, 9, 1],
        "loss_mask": [0, 0, 1, 1],
        "logprobs": [0.0, 0.0, -0.5, -1.5],
        "version": Version(0, 3),
        "status": Status.FINISHED,
        "text": "3",
    }
    return Trajectory(**{**fields, **changes})


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"tokens": [7]}, "not [time >= 2]"),
        ({"tokens": [[7, 8, 9, 1]]}, "not [time >= 2]"),
        ({"tokens": [7, 8, 9]}, "loss_mask is (4,), tokens is (3,)"),
        ({"tokens": [7.0, 8.0, 9.0, 1.0]}, "tokens is float64, not int32"),
        ({"tokens": [7, 8, 9, -1]}, "a token is negative"),
        ({"tokens": [7, 8, 9, 2**32 + 1]}, "tokens does not fit int32"),
        ({"loss_mask": [1, 0, 1, 1]}, "loss_mask is 1 at index 0"),
        ({"loss_mask": [0, 0, 2, 1]}, "values other than 0 and 1"),
        ({"loss_mask": [0, 0, 0, 0], "logprobs": [0.0] * 4}, "loss_mask is 0 everywhere"),
        ({"logprobs": [0.0, 0.0, -0.5]}, "logprobs is (3,), tokens is (4,)"),
        ({"logprobs": [0.0, 0.0, -0.5, float("nan")]}, "not finite"),
        ({"logprobs": [0.0, 0.0, -0.5, 0.5]}, "greater than 0"),
        ({"logprobs": [0.0, -0.1, -0.5, -1.5]}, "not 0 where loss_mask is 0"),
        ({"reward": float("inf")}, "reward is inf"),
        ({"routes": np.zeros((4, 2, 2), np.int32)}, "not [3, layers, top_k]"),
    ],
)
def test_a_malformed_trajectory_is_refused_with_the_sample_and_the_reason(
    changes: dict[str, Any], problem: str
) -> None:
    with pytest.raises(DataError) as caught:
        trajectory(**changes)
    assert "'sum/7'" in str(caught.value) and problem in str(caught.value)


def test_an_aborted_trajectory_may_have_generated_nothing() -> None:
    aborted = trajectory(loss_mask=[0] * 4, logprobs=[0.0] * 4, status=Status.ABORTED)
    assert aborted.trained == 0


def test_arrays_have_the_promised_types_and_cannot_be_written() -> None:
    made = trajectory(routes=np.zeros((3, 2, 2), np.int64))
    assert made.routes is not None
    arrays = [made.tokens, made.loss_mask, made.logprobs, made.routes]
    assert [a.dtype for a in arrays] == [np.int32, np.uint8, np.float32, np.int32]
    for array in arrays:
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_a_reward_makes_a_copy_and_keeps_what_was_reported_before() -> None:
    before = trajectory(info={"turns": 2.0})
    after = before.with_reward(0.5, {"exact": 0.0})
    assert (before.reward, dict(before.info)) == (None, {"turns": 2.0})
    assert (after.reward, dict(after.info)) == (0.5, {"turns": 2.0, "exact": 0.0})
    assert after.tokens is before.tokens
    with pytest.raises(DataError, match="reward is nan"):
        before.with_reward(float("nan"))


def test_a_trajectory_survives_pickling() -> None:
    made = trajectory().with_reward(1.0)
    copy = pickle.loads(pickle.dumps(made))
    assert (copy.sample, copy.version, copy.status) == (SAMPLE, Version(0, 3), Status.FINISHED)
    assert copy.tokens.tolist() == [7, 8, 9, 1] and copy.reward == 1.0


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(DataError, match=r"'a'.*prompt is empty"):
        Sample(id="a", prompt="", answer=None, group="a")


def test_derive_is_fixed_for_ever() -> None:
    # $ printf '[7,"data",3]' | sha256sum | cut -c1-16
    # 95a3238b6418dce2
    assert derive(7, "data", 3) == 0x95A3238B6418DCE2 >> 1


PARTS = st.lists(st.text(max_size=4) | st.integers(0, 99), max_size=3)


@given(st.integers(0, 3), PARTS, st.integers(0, 3), PARTS)
def test_derived_seeds_differ_unless_the_names_are_equal(
    seed: int, parts: list[str | int], other: int, others: list[str | int]
) -> None:
    equal = (seed, parts) == (other, others)
    first, second = derive(seed, *parts), derive(other, *others)
    assert (first == second) is equal
    assert 0 <= first < 2**63
