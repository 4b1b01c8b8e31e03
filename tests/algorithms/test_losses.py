"""Clipped losses by hand, gradients by finite differences, entropy against torch."""

from __future__ import annotations

import math

import pytest
import torch
from torch.autograd import gradcheck

from fsm_trainer.algorithms.config import Ratio
from fsm_trainer.algorithms.losses import entropy, log_ratios, policy_loss, value_loss

ONE = torch.ones(1, 1)
NAN = float("nan")


def row(*numbers: float, grad: bool = False) -> torch.Tensor:
    return torch.tensor([numbers], dtype=torch.float64, requires_grad=grad)


# arXiv:1707.06347, figure 1: with A > 0 the clip acts above 1 + clip, with A < 0 below 1 - clip.
@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.5, 2.0, -1.2 * 2, 0.0),
        (0.5, 2.0, -0.5 * 2, -0.5 * 2),
        (1.5, -2.0, 1.5 * 2, 1.5 * 2),
        (0.5, -2.0, 0.8 * 2, 0.0),
        (1.1, -2.0, 1.1 * 2, 1.1 * 2),
    ],
)
def test_policy_loss_by_hand(ratio: float, advantage: float, loss: float, slope: float) -> None:
    logprobs = row(math.log(ratio) - 1.0, grad=True)

    found = policy_loss(logprobs, row(-1.0), row(advantage), ONE, clip=0.2)
    found.loss.sum().backward()

    # d loss / d logprob = d ratio / d logprob * (-A) = -ratio * A where the clip doesn't act
    assert found.loss.item() == pytest.approx(loss, abs=1e-12)
    assert logprobs.grad is not None and float(logprobs.grad) == pytest.approx(slope, abs=1e-12)
    assert bool(found.clipped) == (slope == 0.0)
    assert float(found.log_ratio) == pytest.approx(math.log(ratio), abs=1e-12)


# arXiv:2503.14476, section 3.1: 1 + clip_high bounds where A > 0, 1 - clip where A < 0.
# arXiv:1912.09729: where A < 0, the loss -min(..) is at most -c A; c = 3.
@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (1.25, 2.0, -1.25 * 2, -1.25 * 2),  # between 1 + clip and 1 + clip_high
        (1.5, 2.0, -1.3 * 2, 0.0),
        (0.7, -2.0, 0.8 * 2, 0.0),
        (0.7, 2.0, -0.7 * 2, -0.7 * 2),
        (2.5, -2.0, 2.5 * 2, 2.5 * 2),  # below c: as without
        (5.0, -2.0, 3.0 * 2, 0.0),
        (5.0, 2.0, -1.3 * 2, 0.0),  # the dual clip is for negative advantages alone
    ],
)
def test_clip_higher_and_dual_clip_by_hand(
    ratio: float, advantage: float, loss: float, slope: float
) -> None:
    logprobs = row(math.log(ratio) - 1.0, grad=True)

    found = policy_loss(
        logprobs, row(-1.0), row(advantage), ONE, clip=0.2, clip_high=0.3, dual_clip=3.0
    )
    found.loss.sum().backward()

    assert found.loss.item() == pytest.approx(loss, abs=1e-12)
    assert logprobs.grad is not None and float(logprobs.grad) == pytest.approx(slope, abs=1e-12)
    assert bool(found.clipped) == (slope == 0.0)


def test_ratios_by_token_and_by_sequence_by_hand() -> None:
    # log-ratios 0.1, (0.7, masked), 0.3: their sum is 0.4, the mean of the two that count 0.2
    new, old, mask = row(0.0, -0.3, -0.1), row(-0.1, -1.0, -0.4), row(1, 0, 1)

    assert log_ratios(new, old, mask, "token").tolist() == [pytest.approx([0.1, 0, 0.3])]
    assert log_ratios(new, old, mask, "sequence").tolist() == [pytest.approx([0.4, 0, 0.4])]
    assert log_ratios(new, old, mask, "geometric").tolist() == [pytest.approx([0.2, 0, 0.2])]


def test_a_row_without_tokens_has_the_ratio_one() -> None:
    levels: tuple[Ratio, ...] = ("token", "sequence", "geometric")
    for level in levels:
        assert log_ratios(row(3.0), row(1.0), row(0.0), level).tolist() == [[0.0]]


# old value 1, clip 0.2: the value may move to [0.8, 1.2].
@pytest.mark.parametrize(
    ("value", "target", "loss", "slope"),
    [
        (1.1, 2.0, 0.9**2 / 2, -0.9),  # within the clip
        (1.5, 2.0, 0.8**2 / 2, 0.0),  # towards the target beyond 1.2: (1.2 - 2)^2 / 2, no gradient
        (0.5, 2.0, 1.5**2 / 2, -1.5),  # away from the target: the plain error is the greater
        (1.5, 1.1, 0.4**2 / 2, 0.4),  # overshot: the plain error is the greater, pulls back
    ],
)
def test_value_loss_by_hand(value: float, target: float, loss: float, slope: float) -> None:
    values = row(value, grad=True)

    found = value_loss(values, row(1.0), row(target), ONE, clip=0.2)
    found.loss.sum().backward()

    assert found.loss.item() == pytest.approx(loss, abs=1e-12)
    assert values.grad is not None and float(values.grad) == pytest.approx(slope, abs=1e-12)
    assert bool(found.clipped) == (slope == 0.0)


def test_rounding_within_the_clip_is_no_clipping() -> None:
    torch.manual_seed(0)
    old, new, target = (0.1 * torch.rand(1, 999) - 0.05 for _ in range(3))
    rounded = (old + (new - old) - target).square() > (new - target).square()
    assert rounded.sum() > 9

    assert not value_loss(new, old, target, torch.ones_like(old), clip=0.2).clipped.any()


def test_a_ratio_beyond_what_float32_holds_has_no_gradient_and_counts_as_clipped() -> None:
    logprobs = row(21.0, grad=True)

    found = policy_loss(logprobs, row(0.0), row(-1.0), ONE, clip=0.2)
    found.loss.sum().backward()

    assert logprobs.grad is not None and float(logprobs.grad) == 0.0
    assert bool(found.clipped) and found.loss.item() == pytest.approx(math.exp(20))


def test_value_loss_without_a_clip_is_half_the_squared_error() -> None:
    found = value_loss(row(5.0), row(1.0), row(2.0), ONE, clip=None)

    assert found.loss.item() == 4.5
    assert not bool(found.clipped)


def test_gradients_are_the_finite_differences() -> None:
    torch.manual_seed(0)
    logprobs, values = (torch.randn(3, 5, dtype=torch.float64, requires_grad=True) for _ in "ab")
    old, advantages = (torch.randn(3, 5, dtype=torch.float64) for _ in "ab")
    mask = (torch.rand(3, 5) < 0.7).float()
    assert 0 < mask.sum() < mask.numel()

    levels: tuple[Ratio, ...] = ("token", "sequence", "geometric")
    for level in levels:
        bounds = (0.2, 0.3, 1.5, level)
        assert gradcheck(lambda x: policy_loss(x, old, advantages, mask, *bounds).loss, (logprobs,))  # noqa: B023
    assert gradcheck(lambda x: policy_loss(x, old, advantages, mask, 0.2).loss, (logprobs,))
    assert gradcheck(lambda x: value_loss(x, old, advantages, mask, 0.2).loss, (values,))
    assert gradcheck(entropy, (logprobs,))


def test_garbage_in_masked_places_reaches_neither_losses_nor_gradients() -> None:
    mask = torch.tensor([[0.0, 1.0, 0.0]])
    for junk in (NAN, float("inf"), -1e30):
        moved = row(junk, -0.5, junk, grad=True)
        dirty, clean = row(junk, 2.0, junk), row(0.0, 2.0, 0.0)
        losses = (
            (
                policy_loss(moved, dirty, dirty, mask, 0.2),
                policy_loss(row(0, -0.5, 0), clean, clean, mask, 0.2),
            ),
            (
                value_loss(moved, dirty, dirty, mask, 0.2),
                value_loss(row(0, -0.5, 0), clean, clean, mask, 0.2),
            ),
        )
        for found, expected in losses:
            moved.grad = None
            found.loss.sum().backward()

            for here, there in zip(found, expected, strict=True):
                assert torch.equal(here, there)
            assert moved.grad is not None
            assert moved.grad[0, 0] == moved.grad[0, 2] == 0.0
            assert bool(moved.grad.isfinite().all())


def test_a_policy_far_away_gives_finite_losses_and_gradients() -> None:
    # float32: exp overflows at 88
    logprobs = torch.zeros(1, 2, requires_grad=True)
    old, advantages = torch.tensor([[-500.0, -500.0]]), torch.tensor([[0.0, -1.0]])

    found = policy_loss(logprobs, old, advantages, torch.ones(1, 2), 0.2)
    found.loss.sum().backward()

    assert bool(found.loss.isfinite().all())
    assert logprobs.grad is not None and bool(logprobs.grad.isfinite().all())


def test_entropy_is_that_of_torchs_categorical() -> None:
    torch.manual_seed(1)
    logits = torch.randn(4, 6, 9, dtype=torch.float64)

    expected = torch.distributions.Categorical(logits=logits).entropy()

    torch.testing.assert_close(entropy(logits), expected)
    assert float(entropy(torch.zeros(8))) == pytest.approx(math.log(8), abs=1e-6)


def test_an_excluded_choice_adds_no_entropy_and_no_nan() -> None:
    logits = torch.tensor([0.3, 0.3, -math.inf], requires_grad=True)

    found = entropy(logits)
    found.backward()

    assert float(found.detach()) == pytest.approx(math.log(2), abs=1e-6)
    assert logits.grad is not None and bool(logits.grad.isfinite().all())
