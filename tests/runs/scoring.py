"""A reward that differs between samples from the first step on, however little the model knows."""

from __future__ import annotations

from fsm_trainer.data.trajectory import Trajectory


def reward(trajectory: Trajectory) -> float:
    """A number from 0 to 1 that the tokens decide."""
    return sum(trajectory.tokens) % 8 / 8
