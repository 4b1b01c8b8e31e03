"""Losses of PPO, one number a token; weigh them with ``masked.token_weights`` and add."""

from __future__ import annotations

from typing import NamedTuple

import torch

from fsm_trainer.algorithms.config import Ratio
from fsm_trainer.algorithms.masked import keep

# exp(20) = 5e8. Beyond 88 float32 has inf, and inf * 0 is NaN.
_LOG_RATIO_LIMIT = 20.0


class PolicyLoss(NamedTuple):
    """All ``[batch, time]``."""

    loss: torch.Tensor
    """To be minimized; zeros in masked places."""
    log_ratio: torch.Tensor
    """log(new policy / old policy), cut at 20, detached; zeros in masked places."""
    clipped: torch.Tensor
    """Bool: a clip, or the cut at 20, took this token's gradient away."""


class ValueLoss(NamedTuple):
    """All ``[batch, time]``."""

    loss: torch.Tensor
    """To be minimized; zeros in masked places."""
    clipped: torch.Tensor
    """Bool: the clip took this token's gradient away."""


def policy_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    clip: float,
    clip_high: float | None = None,
    dual_clip: float | None = None,
    ratio: Ratio = "token",
) -> PolicyLoss:
    """Return PPO's clipped surrogate, negated, for each token; all ``[batch, time]``.

    Schulman et al. 2017, arXiv:1707.06347, equation 7:
    ``-min(ratio A, clip(ratio, 1 - clip, 1 + clip) A)``. Another upper side of the clip is DAPO's
    clip-higher, Yu et al. 2025, arXiv:2503.14476, section 3.1. The dual clip of Ye et al. 2019,
    arXiv:1912.09729, lets the loss grow to ``-dual_clip A`` at most where A < 0.
    """
    log_ratio = log_ratios(logprobs, old_logprobs, mask, ratio)
    ratios, gain = log_ratio.exp(), keep(advantages, mask)
    plain = ratios * gain
    bounded = ratios.clamp(1 - clip, 1 + (clip if clip_high is None else clip_high)) * gain
    least = torch.minimum(plain, bounded)
    if dual_clip is not None:
        least = torch.where(gain < 0, torch.maximum(least, dual_clip * gain), least)
    clipped = (least != plain) | (log_ratio.abs() == _LOG_RATIO_LIMIT)
    return PolicyLoss(keep(-least, mask), log_ratio.detach(), clipped.detach())


def log_ratios(
    logprobs: torch.Tensor, old_logprobs: torch.Tensor, mask: torch.Tensor, level: Ratio
) -> torch.Tensor:
    """Return log(new / old policy) at each token, ``[batch, time]``; zeros in masked places.

    ``token``: the token's own. ``sequence``: the sum over the row's tokens, at each of them
    (Ahmadian et al. 2024, arXiv:2402.14740). ``geometric``: their mean (GSPO, Zheng et al. 2025,
    arXiv:2507.18071, equation 7). Cut at 20 in absolute value.
    """
    found = keep(logprobs - old_logprobs, mask)
    if level != "token":
        total, count = found.sum(dim=1, keepdim=True), (mask != 0).sum(dim=1, keepdim=True)
        whole = total if level == "sequence" else total / count.clamp(min=1)
        found = keep(whole.expand_as(found), mask)
    return found.clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT)


def value_loss(
    values: torch.Tensor,
    old_values: torch.Tensor,
    returns: torch.Tensor,
    mask: torch.Tensor,
    clip: float | None,
) -> ValueLoss:
    """Return half the squared error of each value; all ``[batch, time]``.

    With a clip: ``max((V - R)^2, (V_old + clip(V - V_old, -clip, clip) - R)^2) / 2``, the form of
    OpenAI baselines' ``ppo2`` (Engstrom et al. 2020, arXiv:2005.12729, section 3).
    """
    new, old, target = (keep(x, mask) for x in (values, old_values, returns))
    plain = (new - target).square()
    if clip is None:
        return ValueLoss(plain / 2, torch.zeros_like(plain, dtype=torch.bool))
    bounded = (old + (new - old).clamp(-clip, clip) - target).square()
    # Within the clip old + (new - old) may miss new by a rounding.
    clipped = (bounded > plain) & ((new - old).abs() > clip)
    return ValueLoss(torch.maximum(plain, bounded) / 2, clipped.detach())


def entropy(logits: torch.Tensor) -> torch.Tensor:
    """Return the entropy (nats) of the categoricals over the last axis of ``logits``.

    ``logsumexp(z) - sum(softmax(z) z)``; a logit of -inf is a choice that is excluded.
    """
    probabilities = logits.softmax(dim=-1)
    chosen = torch.where(probabilities > 0, logits, torch.zeros_like(logits))
    return logits.logsumexp(dim=-1) - (probabilities * chosen).sum(dim=-1)
