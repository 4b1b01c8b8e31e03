"""Sums over the places that count.

A mask is ``[batch, time]``, nonzero where a place counts. What stands in a masked place, NaN
included, changes neither a result nor a gradient. Sums are linear in the places, so they may be
taken over parts of a batch and added, by :func:`sum` or by an all-reduce.
"""

from __future__ import annotations

import torch

from fsm_trainer.algorithms.config import Aggregation

# Advantages that are all alike carry no signal; dividing by less would train on rounding errors.
_SMALLEST_STD = 1e-6


def keep(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return ``values`` with zeros in masked places; no gradient reaches those."""
    # 0 * NaN is NaN, in the backward pass too: a multiplication would let garbage through.
    return torch.where(mask != 0, values, torch.zeros_like(values))


def masked_sum(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the sum over the places that count: a scalar."""
    return keep(values, mask).sum()


def masked_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the mean over the places that count: a scalar, 0 where none does."""
    return masked_sum(values, mask) / (mask != 0).sum().clamp(min=1)


def masked_max(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the greatest of the places that count: a scalar, 0 where none does."""
    chosen = values[mask != 0]
    return chosen.max() if chosen.numel() else values.new_zeros(())


def whiten(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Shift and scale to mean 0 and variance 1 over the places that count; zeros elsewhere."""
    kept = keep(values, mask).double()
    mean = masked_mean(kept, mask)
    variance = masked_mean((kept - mean).square(), mask)
    return keep(((kept - mean) / variance.sqrt().clamp(min=_SMALLEST_STD)).to(values.dtype), mask)


def token_weights(
    mask: torch.Tensor,
    aggregation: Aggregation,
    whole: torch.Tensor | None = None,
    length: int | None = None,
) -> torch.Tensor:
    """Return each place's share of a mean, float32 ``[batch, time]``; together they are 1.

    ``token``: every place counts alike. ``sequence``: every sequence that has any place counts
    alike, and so do the places within it. ``constant``: a place is ``1 / length`` of a sequence,
    however long that is, so the shares of short ones don't add up to 1 (Liu et al. 2025,
    arXiv:2503.20783, section 3.2). ``whole`` is the mask of all that the mean is taken over, where
    ``mask`` is only a part (whole sequences) of it: the mean doesn't depend on the parts.
    """
    counts = (mask != 0).double()
    total = counts if whole is None else (whole != 0).double()
    if aggregation == "token":
        return (counts / total.sum().clamp(min=1)).float()
    sequences = (total.sum(dim=1) > 0).sum().clamp(min=1)
    tokens = counts.sum(dim=1, keepdim=True).clamp(min=1) if length is None else length
    return (counts / tokens / sequences).float()
