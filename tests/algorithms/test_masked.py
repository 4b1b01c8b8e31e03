"""Sums over the places that count don't depend on the rest, nor on how they are parted."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsm_trainer.algorithms.config import Aggregation
from fsm_trainer.algorithms.masked import (
    keep,
    masked_max,
    masked_mean,
    masked_sum,
    token_weights,
    whiten,
)

MASK = torch.tensor([[0, 1, 1, 0], [0, 1, 0, 0], [0, 0, 0, 0]])
VALUES = torch.tensor([[9.0, 1.0, 2.0, 9.0], [9.0, 6.0, 9.0, 9.0], [9.0] * 4])


@st.composite
def masked_tables(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    shape = draw(st.integers(1, 6)), draw(st.integers(1, 7))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    mask = random.random(shape) < draw(st.sampled_from([0.2, 0.5, 0.9]))
    return torch.from_numpy(random.normal(size=shape) * 3 + 1), torch.from_numpy(mask)


def test_sums_by_hand() -> None:
    assert float(masked_sum(VALUES, MASK)) == 9.0
    assert float(masked_mean(VALUES, MASK)) == 3.0
    assert float(masked_max(-VALUES, MASK)) == -1.0
    # 1, 2, 6: mean 3, variance ((1 - 3)^2 + (2 - 3)^2 + (6 - 3)^2) / 3 = 14 / 3
    expected = torch.tensor([-2.0, -1.0, 3.0]) / (14 / 3) ** 0.5
    torch.testing.assert_close(whiten(VALUES, MASK)[MASK != 0], expected)


def test_nothing_counted_gives_zero_everywhere() -> None:
    empty = torch.zeros_like(MASK)

    assert float(masked_mean(VALUES, empty)) == float(masked_max(VALUES, empty)) == 0.0
    assert not whiten(VALUES, empty).any()
    assert not token_weights(empty, "token").any() and not token_weights(empty, "sequence").any()


@given(masked_tables())
def test_masked_figures_are_numpys_on_the_places_that_count(
    table: tuple[torch.Tensor, torch.Tensor],
) -> None:
    values, mask = table
    counted = values.numpy()[mask.numpy()]
    if not counted.size:
        return

    assert float(masked_mean(values, mask)) == pytest.approx(counted.mean())
    assert float(masked_max(values, mask)) == counted.max()


@given(masked_tables(), st.sampled_from([float("nan"), float("inf"), -1e30]))
def test_masked_garbage_changes_nothing_gradients_neither(
    table: tuple[torch.Tensor, torch.Tensor], junk: float
) -> None:
    clean, mask = table
    dirty = clean.masked_fill(~mask, junk).requires_grad_()

    for function in (keep, masked_sum, masked_mean, masked_max, whiten):
        assert torch.equal(function(dirty, mask).detach(), function(clean, mask))
    masked_mean(dirty, mask).backward()

    assert dirty.grad is not None
    assert not dirty.grad[~mask].any()
    assert bool(dirty.grad.isfinite().all())


@given(masked_tables())
def test_whitening_has_mean_zero_and_variance_one(
    table: tuple[torch.Tensor, torch.Tensor],
) -> None:
    values, mask = table
    if int(mask.sum()) < 2:
        return

    white = whiten(values, mask)[mask]

    assert float(white.mean()) == pytest.approx(0, abs=1e-9)
    assert float(white.var(unbiased=False)) == pytest.approx(1, abs=1e-9)


@given(masked_tables(), st.integers(1, 4))
def test_the_weights_of_parts_are_those_of_the_whole(
    table: tuple[torch.Tensor, torch.Tensor], ranks: int
) -> None:
    _, mask = table

    for rank in range(ranks):
        for how, length in (("token", None), ("sequence", None), ("constant", 5)):
            aggregation: Aggregation = how  # type: ignore[assignment]
            assert torch.equal(
                token_weights(mask[rank::ranks], aggregation, mask, length),
                token_weights(mask, aggregation, None, length)[rank::ranks],
            )


def test_equal_values_whiten_to_zero_not_to_noise() -> None:
    assert not whiten(torch.full((2, 3), 0.1), torch.ones(2, 3)).abs().gt(0.01).any()


def test_weights_by_hand() -> None:
    # three tokens in all; two sequences that have any
    by_token = [[0, 1 / 3, 1 / 3, 0], [0, 1 / 3, 0, 0], [0] * 4]
    by_sequence = [[0, 1 / 4, 1 / 4, 0], [0, 1 / 2, 0, 0], [0] * 4]
    # of two sequences of ten tokens each
    by_constant = [[0, 1 / 20, 1 / 20, 0], [0, 1 / 20, 0, 0], [0] * 4]

    torch.testing.assert_close(token_weights(MASK, "token"), torch.tensor(by_token))
    torch.testing.assert_close(token_weights(MASK, "sequence"), torch.tensor(by_sequence))
    constant = token_weights(MASK, "constant", None, 10)
    torch.testing.assert_close(constant, torch.tensor(by_constant))


@given(masked_tables(), st.sampled_from(["token", "sequence"]))
def test_weights_sum_to_one_and_are_zero_where_masked(
    table: tuple[torch.Tensor, torch.Tensor], aggregation: Aggregation
) -> None:
    _, mask = table

    weights = token_weights(mask, aggregation)

    assert not weights[~mask].any()
    if mask.any():
        assert float(weights.sum()) == pytest.approx(1.0, abs=1e-5)
