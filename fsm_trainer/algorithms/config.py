"""Settings of the updates; free of torch, so that a configuration can be read without it."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

KLEstimator = Literal["k1", "k2", "k3"]
Aggregation = Literal["token", "sequence"]


class PolicyConfig(BaseModel, extra="forbid", frozen=True):
    """What every policy update shares, whatever its advantages come from."""

    clip: float = Field(default=0.2, gt=0, lt=1)
    """The ratio's clip range: [1 - clip, 1 + clip]."""
    kl_coefficient: float = Field(default=0.02, ge=0)
    """Weight of the KL to the reference in the loss; at 0 it is measured, not trained on."""
    kl_estimator: KLEstimator = "k2"
    """Which estimator stands in the loss: k2 has the gradient of the reverse KL, k3 is GRPO's; k1
    has the right mean, but its gradient is zero in expectation."""
    entropy_coefficient: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus."""
    whiten_advantages: bool = True
    """Shift and scale the step's advantages to mean 0 and variance 1 over its generated tokens."""
    epochs: int = Field(default=1, ge=1)
    """Passes over a step's trajectories."""
    minibatches: int = Field(default=4, ge=1)
    """Optimizer steps in a pass; each takes an equal share of the trajectories."""
    aggregation: Aggregation = "token"
    """What counts alike within a minibatch: each generated token, or each sequence."""
    temperature: float = Field(default=1.0, gt=0)
    """Temperature of the log-probabilities: the one that the rollouts are sampled at."""


class PPOConfig(PolicyConfig, extra="forbid", frozen=True):
    """PPO with a critic (Schulman et al. 2017, arXiv:1707.06347)."""

    name: Literal["ppo"] = "ppo"
    """The algorithm."""
    value_clip: float | None = Field(default=0.2, gt=0)
    """How far a value may move from the old one before its gradient ends; null: no limit."""
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount per generated token."""
    lam: float = Field(default=0.95, ge=0, le=1)
    """GAE's lambda: 0 trusts the critic, 1 trusts the reward."""
    critic_epochs: int = Field(default=1, ge=1)
    """The critic's passes over a step's trajectories."""
    critic_warmup_steps: int = Field(default=0, ge=0)
    """First steps in which only the critic is trained; the actor stays as it is."""


class GRPOConfig(PolicyConfig, extra="forbid", frozen=True):
    """GRPO: advantages from the group, no critic (Shao et al. 2024, arXiv:2402.03300)."""

    name: Literal["grpo"] = "grpo"
    """The algorithm."""
    kl_estimator: KLEstimator = "k3"
    """Which estimator stands in the loss; the paper's equation 4 is k3."""
    whiten_advantages: bool = False
    """Whiten once more over the step's tokens; the group has centred them already."""
    normalize_std: bool = True
    """Divide by the group's standard deviation; false is Dr. GRPO (arXiv:2503.20783)."""


class WarmupConfig(BaseModel, extra="forbid", frozen=True):
    """Supervised steps on known answers before reinforcement learning."""

    steps: int = Field(default=0, ge=0)
    """Optimizer steps; 0 leaves the warm-up out."""
    batch_size: int = Field(default=128, ge=1)
    """Answers in a step, drawn with replacement."""
    learning_rate: float = Field(default=2e-3, gt=0)
    """Held constant after the ramp: PPO gains little after an annealed warm-up."""
    ramp_steps: int = Field(default=20, ge=0)
    """Steps over which the learning rate rises linearly to its value."""
