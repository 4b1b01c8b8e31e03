"""Settings of the updates; free of torch, so that a configuration can be read without it."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field, model_validator

KLEstimator = Literal["k1", "k2", "k3"]
Ratio = Literal["token", "sequence", "geometric"]
Aggregation = Literal["token", "sequence", "constant"]


class CorrectionConfig(BaseModel, extra="forbid", frozen=True):
    """Importance weights old policy / engine, on the policy's loss (docs/algorithms.md)."""

    kind: Literal["truncate", "mask"] = "truncate"
    """What becomes of a weight beyond its bounds: ``truncate`` cuts it at ``high``, ``mask`` makes
    it 0, so that the token (or sequence) teaches nothing."""
    level: Literal["token", "sequence"] = "token"
    """A weight for each token, or one for each sequence: the product of its tokens'."""
    low: float = Field(default=0.0, ge=0, le=1)
    """The smallest weight that ``mask`` lets through; ``truncate`` has none."""
    high: float = Field(default=2.0, ge=1)
    """The greatest weight."""

    @model_validator(mode="after")
    def _only_a_mask_has_a_lower_bound(self) -> CorrectionConfig:
        if self.kind == "truncate" and self.low:
            raise ValueError("low says nothing with kind truncate: write kind: mask, or drop low")
        return self


class PolicyConfig(BaseModel, extra="forbid", frozen=True):
    """What every policy update shares, whatever its advantages come from."""

    clip: float = Field(default=0.2, gt=0, lt=1)
    """The ratio's clip range: [1 - clip, 1 + clip]."""
    clip_high: float | None = Field(default=None, gt=0)
    """The range's upper side, if it is another: 1 + clip_high (DAPO's clip-higher)."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Where the advantage is negative, the ratio counts at most this much; null: no limit."""
    ratio: Ratio = "token"
    """Ratio new / old policy: of each token; of each ``sequence``, its tokens' product (RLOO); or
    their ``geometric`` mean (GSPO). For the last two, ``aggregation: sequence``."""
    kl_coefficient: float = Field(default=0.02, ge=0)
    """Weight of the KL to the reference; at 0 it is measured, not trained on."""
    kl_estimator: KLEstimator = "k2"
    """Which estimator counts. In the loss k2 has the gradient of the reverse KL, k3 is GRPO's, and
    k1's gradient is zero in expectation; in the reward k1 has the right one."""
    kl_in: Literal["loss", "reward"] = "loss"
    """``loss`` adds the KL to it; ``reward`` takes each token's KL, under the policy that sampled,
    from that token's reward."""
    entropy_coefficient: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus."""
    whiten_advantages: bool = True
    """Shift and scale the step's advantages to mean 0 and variance 1 over its generated tokens."""
    epochs: int = Field(default=1, ge=1)
    """Passes over a step's trajectories."""
    minibatches: int = Field(default=4, ge=1)
    """Optimizer steps in a pass; each takes an equal share of the trajectories."""
    aggregation: Aggregation = "token"
    """What counts alike within a minibatch: each generated token; each sequence; or, ``constant``,
    each token as 1 / aggregation_length of a sequence (Dr. GRPO)."""
    aggregation_length: int | None = Field(default=None, ge=1)
    """Tokens of a sequence for ``aggregation: constant``, such as ``rollout.max_new_tokens``."""
    engine_correction: CorrectionConfig | None = None
    """Weights for tokens that engine and trainer give unlike probabilities; null: none."""
    temperature: float = Field(default=1.0, gt=0)
    """Temperature of the log-probabilities: the one that the rollouts are sampled at."""

    @model_validator(mode="after")
    def _a_constant_needs_a_length(self) -> PolicyConfig:
        if (self.aggregation == "constant") != (self.aggregation_length is not None):
            raise ValueError(
                "aggregation constant and aggregation_length need each other: set both, or neither"
            )
        return self

    @model_validator(mode="after")
    def _a_sequences_ratio_counts_once(self) -> PolicyConfig:
        if self.ratio != "token" and self.aggregation != "sequence":
            raise ValueError(
                f"ratio {self.ratio} is one of a whole sequence, which aggregation "
                f"{self.aggregation} would count by its tokens: write aggregation: sequence"
            )
        return self


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


class RLOOConfig(PolicyConfig, extra="forbid", frozen=True):
    """RLOO: a leave-one-out baseline, no critic (Ahmadian et al. 2024, arXiv:2402.14740)."""

    name: Literal["rloo"] = "rloo"
    """The algorithm."""
    ratio: Ratio = "sequence"
    """Ratio new / old policy: RLOO takes the whole answer as one action."""
    kl_estimator: KLEstimator = "k1"
    """Which estimator counts."""
    kl_in: Literal["loss", "reward"] = "reward"
    """Where the KL counts; in the reward, the sum over a trajectory's tokens."""
    whiten_advantages: bool = False
    """Whiten over the step's tokens; the baseline has centred them already."""
    aggregation: Aggregation = "sequence"
    """What counts alike within a minibatch."""


class ReinforcePPConfig(PolicyConfig, extra="forbid", frozen=True):
    """REINFORCE++: whitened rewards to come, no critic (Hu et al. 2025, arXiv:2501.03262)."""

    name: Literal["reinforce_pp"] = "reinforce_pp"
    """The algorithm."""
    kl_estimator: KLEstimator = "k1"
    """Which estimator counts."""
    kl_in: Literal["loss", "reward"] = "reward"
    """Where the KL counts; in the reward, from each token on."""
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount per generated token."""


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
