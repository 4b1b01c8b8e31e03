"""Which groups teach something."""

from __future__ import annotations

from collections.abc import Sequence

from fsm_trainer.data.trajectory import Trajectory


def informative(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """Return those of groups whose rewards are not all equal, in the order given.

    Where they are equal each is its group's mean, so GRPO and RLOO see nothing better in it, and
    nothing worse: DAPO's dynamic sampling, Yu et al. 2025, arXiv:2503.14476, section 3.2.
    """
    rewards: dict[str, set[float | None]] = {}
    for trajectory in trajectories:
        rewards.setdefault(trajectory.sample.group, set()).add(trajectory.reward)
    return [t for t in trajectories if len(rewards[t.sample.group]) > 1]
