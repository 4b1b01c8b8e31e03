"""GAE and group advantages against hand calculation, definition and limits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsm_trainer.algorithms.advantages import (
    critic_free,
    gae,
    group_advantages,
    leave_one_out,
    token_rewards,
)
from fsm_trainer.algorithms.config import (
    GRPOConfig,
    PolicyConfig,
    PPOConfig,
    ReinforcePPConfig,
    RLOOConfig,
)

Row = list[tuple[float, int]]
small = st.floats(-3, 3, width=32)
rows = st.lists(st.tuples(small, st.integers(0, 1)), min_size=1, max_size=12)


def one(
    reward: float, values: list[float], mask: list[int], gamma: float, lam: float
) -> list[float]:
    estimates, counts = torch.tensor([values], dtype=torch.float64), torch.tensor([mask])
    whole = torch.tensor([reward], dtype=torch.float64)
    rewards = token_rewards(whole, torch.zeros_like(estimates), counts)
    result = gae(rewards, estimates, counts, gamma, lam)
    return [float(x) for x in result[0]]


def test_gae_of_a_hand_worked_case() -> None:
    # delta_2 = 1 - 0.7 = 0.3; delta_1 = 0.9 * 0.7 - 0.6 = 0.03; delta_0 = 0.9 * 0.6 - 0.5 = 0.04
    # A_2 = 0.3; A_1 = 0.03 + 0.72 * 0.3 = 0.246; A_0 = 0.04 + 0.72 * 0.246 = 0.21712
    found = one(1.0, [9.0, 0.5, 0.6, 0.7, 9.0], [0, 1, 1, 1, 0], gamma=0.9, lam=0.8)

    assert found == pytest.approx([0.0, 0.21712, 0.246, 0.3, 0.0], abs=1e-12)


@given(rows, small, st.floats(0, 1), st.floats(0, 1))
def test_gae_is_the_discounted_sum_of_td_errors(
    row: Row, reward: float, gamma: float, lam: float
) -> None:
    # arXiv:1506.02438, equation 16: A_t = sum_l (gamma lam)^l delta_{t+l}
    values = [v for v, on in row if on]
    last = len(values) - 1
    deltas = [(reward if t == last else gamma * values[t + 1]) - v for t, v in enumerate(values)]
    expected = iter(
        sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, last + 1))
        for t in range(last + 1)
    )

    found = one(reward, [v for v, _ in row], [on for _, on in row], gamma, lam)

    assert found == pytest.approx([next(expected) if on else 0.0 for _, on in row], abs=1e-9)


@given(rows, small)
def test_gae_with_lambda_one_returns_the_reward_whatever_the_critic_says(
    row: Row, reward: float
) -> None:
    found = one(reward, [v for v, _ in row], [on for _, on in row], gamma=1.0, lam=1.0)

    for advantage, (value, on) in zip(found, row, strict=True):
        assert advantage + value * on == pytest.approx(reward * on, abs=1e-6)


def test_what_an_environment_wrote_between_two_turns_does_not_discount() -> None:
    apart = one(1.0, [0, 0.5, 7.0, 8.0, 0.6, 0.7], [0, 1, 0, 0, 1, 1], gamma=0.9, lam=0.8)

    assert apart == pytest.approx([0, 0.21712, 0, 0, 0.246, 0.3], abs=1e-12)


def test_garbage_in_masked_places_does_not_reach_gae() -> None:
    found = one(1.0, [float("nan"), 0.5, 0.6, 0.7, float("inf")], [0, 1, 1, 1, 0], 0.9, 0.8)

    assert found == pytest.approx([0, 0.21712, 0.246, 0.3, 0], abs=1e-12)


def test_a_trajectory_without_generated_tokens_has_no_advantage() -> None:
    assert one(1.0, [0.5, 0.5], [0, 0], 0.9, 0.8) == [0.0, 0.0]


def test_group_advantages_of_a_hand_worked_case() -> None:
    # group a: 1, 0, 0.5: mean 0.5, sample std sqrt((0.25 + 0.25 + 0) / 2) = 0.5
    # group b: 2, 4:      mean 3,   sample std sqrt(2)
    rewards = torch.tensor([1.0, 2.0, 0.0, 4.0, 0.5], dtype=torch.float64)
    groups = ["a", "b", "a", "b", "a"]

    plain = group_advantages(rewards, groups, normalize_std=False)
    scaled = group_advantages(rewards, groups, normalize_std=True)

    assert plain.tolist() == [0.5, -1.0, -0.5, 1.0, 0.0]
    a, b = 0.5 / 0.5001, 1.0 / (2**0.5 + 1e-4)
    assert scaled.tolist() == pytest.approx([a, -b, -a, b, 0.0], abs=1e-12)


@pytest.mark.parametrize("normalize_std", [True, False])
def test_a_group_that_agrees_and_a_row_alone_have_advantage_zero(normalize_std: bool) -> None:
    rewards = torch.tensor([1000.1, 1000.1, 1000.1, 5.0])
    assert rewards[:3].mean() != rewards[0], "in float32 their mean is not what they are"

    found = group_advantages(rewards, ["a", "a", "a", "alone"], normalize_std=normalize_std)

    assert found.tolist() == [0.0] * 4 and found.dtype == torch.float32


@given(st.lists(st.tuples(small, st.sampled_from("abc")), min_size=1, max_size=15), st.randoms())
def test_group_advantages_depend_neither_on_order_nor_on_the_groups_names(
    table: list[tuple[float, str]], random: object
) -> None:
    rewards = torch.tensor([r for r, _ in table], dtype=torch.float64)
    names = [g for _, g in table]
    order = list(range(len(table)))
    random.shuffle(order)  # type: ignore[attr-defined]

    straight = group_advantages(rewards, names, normalize_std=True)
    shuffled = group_advantages(
        rewards[order], [names[i].upper() + "-" for i in order], normalize_std=True
    )

    np.testing.assert_allclose(shuffled, straight[order], atol=1e-9)


def test_leave_one_out_of_a_hand_worked_case() -> None:
    # group a: 1, 0, 0.5: the others' means are 0.25, 0.75, 0.5; group b: 2, 4; c: one row alone
    rewards = torch.tensor([1.0, 2.0, 0.0, 4.0, 0.5, 7.0], dtype=torch.float64)

    found = leave_one_out(rewards, ["a", "b", "a", "b", "a", "c"])

    assert found.tolist() == pytest.approx([0.75, -2.0, -0.75, 2.0, 0.0, 0.0], abs=1e-12)


@given(st.lists(st.tuples(small, st.sampled_from("abc")), min_size=1, max_size=15))
def test_leave_one_out_is_the_reward_less_the_mean_of_the_others(
    table: list[tuple[float, str]],
) -> None:
    found = leave_one_out(torch.tensor([r for r, _ in table]).double(), [g for _, g in table])

    for number, (reward, group) in enumerate(table):
        others = [r for i, (r, g) in enumerate(table) if g == group and i != number]
        expected = reward - sum(others) / len(others) if others else 0.0
        assert float(found[number]) == pytest.approx(expected, abs=1e-6)


def test_the_reward_stands_at_the_last_token_and_each_penalty_at_its_own() -> None:
    mask = torch.tensor([[0, 1, 0, 1, 0], [0, 1, 0, 0, 0], [0, 0, 0, 0, 0]])
    penalties = torch.tensor([[9.0, 0.1, 9.0, 0.2, float("nan")]]).expand(3, 5)

    found = token_rewards(torch.tensor([1.0, 2.0, 3.0]), penalties, mask)

    expected = [[0, -0.1, 0, 0.8, 0], [0, 1.9, 0, 0, 0], [0] * 5]
    torch.testing.assert_close(found, torch.tensor(expected))


MASK = torch.tensor([[0.0, 1, 1, 0], [0, 1, 0, 0], [0, 0, 1, 1], [0, 1, 1, 1]])
PENALTIES = torch.tensor([[9.0, 0.1, 0.2, 9], [0, 0.5, 9, 9], [0, 9, 0.1, 0.1], [0, 0, 0, 0]])
REWARDS = torch.tensor([1.0, 0.5, 0.2, 0.0])
PAIRS = ["a", "a", "b", "b"]


def test_groups_compare_whole_trajectories_less_their_penalties() -> None:
    # less penalties: 0.7, 0.0 | 0.0, 0.0; leave-one-out 0.7, -0.7 | 0, 0; centred 0.35, -0.35
    loo = critic_free(REWARDS, PENALTIES, MASK, PAIRS, RLOOConfig())
    centred = critic_free(REWARDS, PENALTIES, MASK, PAIRS, GRPOConfig(normalize_std=False))

    expected = torch.tensor([0.7, -0.7, 0.0, 0.0])[:, None] * MASK
    torch.testing.assert_close(loo, expected)
    torch.testing.assert_close(centred, expected / 2)


def test_reinforce_pp_is_the_reward_less_the_penalties_from_each_token_on() -> None:
    # arXiv:2501.03262, equation 8: A_t = r - sum_{i >= t} beta KL_i
    found = critic_free(REWARDS, PENALTIES, MASK, PAIRS, ReinforcePPConfig())

    expected = [[0, 0.7, 0.8, 0], [0, 0.0, 0, 0], [0, 0, 0.0, 0.1], [0, 0, 0, 0]]
    torch.testing.assert_close(found, torch.tensor(expected))


@given(
    st.permutations(range(4)), st.sampled_from([RLOOConfig(), GRPOConfig(), ReinforcePPConfig()])
)
def test_neither_the_rows_order_nor_garbage_changes_advantages(
    order: list[int], config: PolicyConfig
) -> None:
    junk = torch.where(MASK != 0, PENALTIES, torch.nan)

    straight = critic_free(REWARDS, PENALTIES, MASK, PAIRS, config)
    shuffled = critic_free(
        REWARDS[order], junk[order], MASK[order], [PAIRS[i] for i in order], config
    )

    torch.testing.assert_close(shuffled, straight[order])


def test_ppo_has_no_advantages_without_its_critic() -> None:
    with pytest.raises(ValueError, match="PPOConfig has no advantages"):
        critic_free(REWARDS, PENALTIES, MASK, PAIRS, PPOConfig())
