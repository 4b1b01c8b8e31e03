"""Losses of PPO, one number a token; weigh them with ``masked.token_weights`` and add."""

from __future__ import annotations

from typing import NamedTuple

import torch

from fsm_trainer.algorithms.masked import keep

# exp(20) = 5e8 is clipped anyway; float32 overflows to inf at 88, and inf * 0 is NaN.
_LOG_RATIO_LIMIT = 20.0


class PolicyLoss(NamedTuple):
    """All ``[batch, time]``."""

    loss: torch.Tensor
    """To be minimized; zeros in masked places."""
    log_ratio: torch.Tensor
    """log(new policy / old policy), cut at 20, detached; zeros in masked places."""
    clipped: torch.Tensor
    """Bool: the clip took this token's gradient away."""


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
) -> PolicyLoss:
    """Return PPO's clipped surrogate, negated, for each token; all ``[batch, time]``.

    Schulman et al. 2017, arXiv:1707.06347, equation 7:
    ``-min(ratio A, clip(ratio, 1 - clip, 1 + clip) A)``.
    """
    log_ratio = keep(logprobs - old_logprobs, mask).clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT)
    ratio = log_ratio.exp()
    gain = keep(advantages, mask)
    plain = ratio * gain
    bounded = ratio.clamp(1 - clip, 1 + clip) * gain
    loss = keep(-torch.minimum(plain, bounded), mask)
    return PolicyLoss(loss, log_ratio.detach(), bounded.detach() < plain.detach())


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
    return ValueLoss(torch.maximum(plain, bounded) / 2, bounded.detach() > plain.detach())


def entropy(logits: torch.Tensor) -> torch.Tensor:
    """Return the entropy (nats) of the categoricals over the last axis of ``logits``.

    ``logsumexp(z) - sum(softmax(z) z)``; a logit of -inf is a choice that is excluded.
    """
    probabilities = logits.softmax(dim=-1)
    chosen = torch.where(probabilities > 0, logits, torch.zeros_like(logits))
    return logits.logsumexp(dim=-1) - (probabilities * chosen).sum(dim=-1)
