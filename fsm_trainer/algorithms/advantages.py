"""Advantages: how much better an action was than expected."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fsm_trainer.algorithms.config import (
    GRPOConfig,
    PolicyConfig,
    ReinforcePPConfig,
    RLOOConfig,
)
from fsm_trainer.algorithms.masked import keep

# As in TRL; keeps a group of equal rewards at 0 and hardly scales any other.
_STD_EPSILON = 1e-4


def token_rewards(
    rewards: torch.Tensor, penalties: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Return ``[batch, time]``: each token's penalty taken off, ``rewards`` at the last one.

    ``rewards`` is ``[batch]``. Ouyang et al. 2022 (InstructGPT), arXiv:2203.02155, appendix C.4:
    a token's reward is ``-beta KL_t``, and the last one has the trajectory's beside.
    """
    counts = mask != 0
    following = counts.flip(1).cumsum(dim=1).flip(1)  # places from here on
    last = counts & (following == 1)
    return keep(last * rewards[:, None], mask) - keep(penalties, mask)


def gae(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, gamma: float, lam: float
) -> torch.Tensor:
    """Return generalized advantage estimates, ``[batch, time]``, zeros in masked places.

    Schulman et al. 2015, "High-Dimensional Continuous Control Using GAE", arXiv:1506.02438,
    equations 11-16: ``A_t = delta_t + gamma lam A_{t+1}``, ``delta_t = r_t + gamma V_{t+1} - V_t``.

    All are ``[batch, time]``. ``rewards`` are those of :func:`token_rewards`; ``values`` at index t
    is V(the state before token t). Time runs over the generated tokens alone: what an environment
    wrote between two of them neither discounts nor separates them. The value after the last
    generated token is 0.
    """
    advantages = torch.zeros_like(values)
    next_value = torch.zeros_like(values[:, 0])
    advantage = torch.zeros_like(next_value)
    for time in reversed(range(values.shape[1])):
        here = mask[:, time] != 0
        delta = rewards[:, time] + gamma * next_value - values[:, time]
        advantage = torch.where(here, delta + gamma * lam * advantage, advantage)
        next_value = torch.where(here, values[:, time], next_value)
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
    index, count, centred = _groups(rewards, groups)
    if normalize_std:
        square = torch.zeros_like(count).index_add(0, index, centred.square())
        std = (square / (count - 1).clamp(min=1)).sqrt()
        centred = centred / (std[index] + _STD_EPSILON)
    return centred.to(rewards.dtype)


def leave_one_out(rewards: torch.Tensor, groups: Sequence[str]) -> torch.Tensor:
    """Return each reward less the mean of the others of its group, ``[batch]``.

    Ahmadian et al. 2024, "Back to Basics", arXiv:2402.14740; with n in the group that is
    ``n / (n - 1) (r - mean(r))``. A row alone in its group has advantage 0.
    """
    index, count, centred = _groups(rewards, groups)
    return (centred * (count / (count - 1).clamp(min=1))[index]).to(rewards.dtype)


def critic_free(
    rewards: torch.Tensor,
    penalties: torch.Tensor,
    mask: torch.Tensor,
    groups: Sequence[str],
    config: PolicyConfig,
) -> torch.Tensor:
    """Return the advantages of an algorithm without a critic, ``[batch, time]``, not whitened.

    ``penalties`` ``[batch, time]`` are the KL's in the reward. REINFORCE++ has the rewards from
    each token on, Hu et al. 2025, arXiv:2501.03262, equation 8; GRPO and RLOO compare whole
    trajectories, so all tokens of a row have the same advantage.
    """
    whole = rewards - keep(penalties, mask).sum(dim=1)
    match config:
        case ReinforcePPConfig():
            each = token_rewards(rewards, penalties, mask)
            return gae(each, torch.zeros_like(each), mask, config.gamma, 1.0)
        case GRPOConfig():
            found = group_advantages(whole, groups, normalize_std=config.normalize_std)
        case RLOOConfig():
            found = leave_one_out(whole, groups)
        case _:
            raise ValueError(f"{type(config).__name__} has no advantages without a critic's values")
    return keep(found[:, None].expand_as(mask), mask)


def _groups(
    rewards: torch.Tensor, groups: Sequence[str]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The group of each row, the size of each group, and each reward less its group's mean.

    In float64, where the mean of equal float32 rewards is what they are. In float32 it may miss
    them by a rounding, and their spread is that rounding too: the quotient would be about 1.
    """
    numbers = {group: number for number, group in enumerate(dict.fromkeys(groups))}
    index = torch.tensor([numbers[group] for group in groups], device=rewards.device)
    exact = rewards.double()
    zeros = exact.new_zeros(len(numbers))
    count = zeros.index_add(0, index, torch.ones_like(exact))
    return index, count, exact - (zeros.index_add(0, index, exact) / count)[index]
