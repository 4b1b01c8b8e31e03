"""Reward functions that come with the package; ``rewards.function: fsm_trainer.data.scorers:…``."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

from fsm_trainer.data.trajectory import Status, Trajectory
from fsm_trainer.machine.errors import CapabilityMissing, DataError

try:  # at the top: its 1.5 s must not count against the first trajectory's timeout
    import reasoning_gym
except ImportError:
    reasoning_gym = None

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
#: A score of a task from which on the answer counts as exact.
EXACT = 0.999


def extract_answer(text: str) -> str:
    """Return what the last ``<answer>…</answer>`` holds, else the whole text; stripped."""
    found = _TAGGED.findall(text)
    return str(found[-1] if found else text).strip()


def exact_match(trajectory: Trajectory) -> dict[str, float]:
    """Return 1 if a finished response's extracted answer equals the sample's, else 0.

    Raises ``DataError`` if the sample has no answer.
    """
    answer = trajectory.sample.answer
    if answer is None:
        raise DataError(f"sample {trajectory.sample.id!r} has no answer to compare with")
    same = extract_answer(trajectory.text) == answer.strip()
    score = float(same and trajectory.status is Status.FINISHED)
    return {"reward": score, "exact": score}


def reasoning_gym_score(trajectory: Trajectory) -> dict[str, float]:
    """Return the score of the sample's own task (0 to 1), 0 for a response that was cut off.

    ``exact`` is 1 where the score is at least 0.999. Raises ``DataError`` if the sample is not of
    reasoning-gym.
    """
    sample = trajectory.sample
    if not {"task", "entry"} <= set(sample.metadata):
        raise DataError(
            f"sample {sample.id!r} is not of reasoning-gym: use another reward function"
        )
    score = 0.0
    if trajectory.status is Status.FINISHED:
        scorer = _scorer(sample.metadata["task"])
        score = float(scorer(extract_answer(trajectory.text), sample.metadata["entry"]))
    return {"reward": score, "exact": float(score >= EXACT)}


@functools.cache
def _scorer(task: str) -> Callable[[str, Any], float]:
    if reasoning_gym is None:
        raise CapabilityMissing("reasoning-gym is not installed: pip install reasoning-gym")
    scorer: Callable[[str, Any], float] = reasoning_gym.get_score_answer_fn(task)
    return scorer
