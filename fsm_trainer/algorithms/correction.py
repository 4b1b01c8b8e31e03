"""Importance weights for what the engine and the trainer compute unlike.

The engine sampled from its own probabilities; the trainer's of the same weights differ by kernels,
precision and batch shapes. Truncated weights: Yao et al. 2025, "Your Efficient RL Framework
Secretly Brings You Off-Policy RL Training", https://fengyao.notion.site/off-policy-rl. Masked ones,
by token: IcePop, Ling team 2025, arXiv:2510.18855; by sequence: Liu et al. 2025, "When Speed Kills
Stability: Demystifying RL Collapse from the Training-Inference Mismatch".
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from fsm_trainer.algorithms.config import CorrectionConfig
from fsm_trainer.algorithms.losses import log_ratios
from fsm_trainer.algorithms.masked import keep


class Correction(NamedTuple):
    """Both ``[batch, time]``."""

    weights: torch.Tensor
    """What the policy's loss is multiplied by; zeros in masked places."""
    changed: torch.Tensor
    """Bool: the weight lay beyond its bounds."""


def engine_correction(
    logprobs: torch.Tensor,
    engine_logprobs: torch.Tensor,
    mask: torch.Tensor,
    config: CorrectionConfig,
) -> Correction:
    """Return ``w = exp(logprobs - engine_logprobs)``, of the sequence or of each token, bounded.

    ``truncate``: ``min(w, high)``. ``mask``: w where ``low <= w <= high``, else 0. ``logprobs`` are
    the old policy's, by the trainer; all are ``[batch, time]``.
    """
    weights = keep(log_ratios(logprobs, engine_logprobs, mask, config.level).exp(), mask)
    beyond = (mask != 0) & ((weights > config.high) | (weights < config.low))
    bounded = weights.clamp(max=config.high)
    if config.kind == "mask":
        bounded = weights.masked_fill(beyond, 0.0)
    return Correction(bounded, beyond)
