"""Advantages: how much better an action was than expected."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fsm_trainer.algorithms.masked import keep

# As in TRL; keeps a group of equal rewards at 0 and hardly scales any other.
_STD_EPSILON = 1e-4


def gae(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, gamma: float, lam: float
) -> torch.Tensor:
    """Return generalized advantage estimates, ``[batch, time]``, zeros in masked places.

    Schulman et al. 2015, "High-Dimensional Continuous Control Using GAE", arXiv:1506.02438,
    equations 11-16: ``A_t = delta_t + gamma lam A_{t+1}``, ``delta_t = r_t + gamma V_{t+1} - V_t``.

    ``rewards`` ``[batch]`` is each trajectory's, given at its last generated token. ``values``
    ``[batch, time]``: index t is V(the state before token t). Time runs over the generated tokens
    alone: what an environment wrote between two of them neither discounts nor separates them. The
    value after the last generated token is 0.
    """
    advantages = torch.zeros_like(values)
    next_value = torch.zeros_like(values[:, 0])
    advantage = torch.zeros_like(next_value)
    pending = rewards.to(values.dtype)
    for time in reversed(range(values.shape[1])):
        here = mask[:, time] != 0
        delta = pending + gamma * next_value - values[:, time]
        advantage = torch.where(here, delta + gamma * lam * advantage, advantage)
        next_value = torch.where(here, values[:, time], next_value)
        pending = torch.where(here, torch.zeros_like(pending), pending)
        advantages[:, time] = advantage
    return keep(advantages, mask)


def group_advantages(
    rewards: torch.Tensor, groups: Sequence[str], *, normalize_std: bool
) -> torch.Tensor:
    """Return each reward less its group's mean, ``[batch]``; divided by its spread if asked.

    Shao et al. 2024, "DeepSeekMath", arXiv:2402.03300, section 4.1.2: ``A = (r - mean(r)) /
    std(r)``, with the sample's standard deviation (n - 1) plus 1e-4. Without it: Dr. GRPO, Liu et
    al. 2025, arXiv:2503.20783. ``groups`` names the group of each row, in any order; a row alone
    in its group has advantage 0.
    """
    numbers = {group: number for number, group in enumerate(dict.fromkeys(groups))}
    index = torch.tensor([numbers[group] for group in groups], device=rewards.device)
    zeros = rewards.new_zeros(len(numbers))
    count = zeros.index_add(0, index, torch.ones_like(rewards))
    mean = zeros.index_add(0, index, rewards) / count
    centred = rewards - mean[index]
    if not normalize_std:
        return centred
    square = zeros.index_add(0, index, centred.square())
    std = (square / (count - 1).clamp(min=1)).sqrt()
    return centred / (std[index] + _STD_EPSILON)
