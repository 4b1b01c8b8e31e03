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


def moments(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return ``[count, sum, sum of squares]``, float64 ``[3]``: add these over parts or ranks."""
    kept = keep(values, mask).double()
    return torch.stack([(mask != 0).sum().double(), kept.sum(), (kept * kept).sum()])


def mean_and_variance(sums: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and (population) variance from :func:`moments`; both 0 for an empty count."""
    count = sums[0].clamp(min=1)
    mean = sums[1] / count
    return mean, (sums[2] / count - mean * mean).clamp(min=0)


def whiten(
    values: torch.Tensor, mask: torch.Tensor, sums: torch.Tensor | None = None
) -> torch.Tensor:
    """Shift and scale to mean 0 and variance 1 over the places that count; zeros elsewhere.

    ``sums`` are the :func:`moments` of everything that is whitened together, where ``values`` is
    only a part of it; by default ``values`` is all.
    """
    mean, variance = mean_and_variance(moments(values, mask) if sums is None else sums)
    scaled = (values - mean) / variance.sqrt().clamp(min=_SMALLEST_STD)
    return keep(scaled.to(values.dtype), mask)


def token_weights(
    mask: torch.Tensor, aggregation: Aggregation, whole: torch.Tensor | None = None
) -> torch.Tensor:
    """Return each place's share of a mean, float32 ``[batch, time]``; together they are 1.

    ``token``: every place counts alike. ``sequence``: every sequence that has any place counts
    alike, and so do the places within it. ``whole`` is the mask of all that the mean is taken over,
    where ``mask`` is only a part (whole sequences) of it: the mean doesn't depend on the parts.
    """
    counts = (mask != 0).double()
    total = counts if whole is None else (whole != 0).double()
    if aggregation == "token":
        return (counts / total.sum().clamp(min=1)).float()
    sequences = (total.sum(dim=1) > 0).sum().clamp(min=1)
    return (counts / counts.sum(dim=1, keepdim=True).clamp(min=1) / sequences).float()
