"""KL estimators against exact divergences and J. Schulman's table."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fsm_trainer.algorithms.config import KLEstimator
from fsm_trainer.algorithms.kl import kl

POLICY = torch.tensor([1.0, -0.5, 0.3, 0.0], dtype=torch.float64)
REFERENCE = torch.tensor([0.2, 0.4, -0.8, 0.9], dtype=torch.float64).log_softmax(0)


def exact(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return (p.exp() * (p - q)).sum()


def expected_gradient(estimator: KLEstimator) -> torch.Tensor:
    """E_{x ~ policy} of the gradient of the estimate, exactly: over all x, weights detached."""
    logits = POLICY.clone().requires_grad_()
    logprobs = logits.log_softmax(0)
    (logprobs.detach().exp() * kl(logprobs, REFERENCE, estimator)).sum().backward()
    assert logits.grad is not None
    return logits.grad


def gradient_of(forward: bool) -> torch.Tensor:
    logits = POLICY.clone().requires_grad_()
    logprobs = logits.log_softmax(0)
    (exact(REFERENCE, logprobs) if forward else exact(logprobs, REFERENCE)).backward()
    assert logits.grad is not None
    return logits.grad


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_k1_and_k3_have_the_exact_divergence_as_mean(estimator: KLEstimator) -> None:
    logprobs = POLICY.log_softmax(0)

    mean = (logprobs.exp() * kl(logprobs, REFERENCE, estimator)).sum()

    assert float(mean) == pytest.approx(float(exact(logprobs, REFERENCE)), abs=1e-12)


# The blog's table: q = N(0, 1), p = N(shift, 1), KL = shift^2 / 2; bias and standard deviation
# divided by the KL.
@pytest.mark.parametrize(
    ("shift", "estimator", "bias", "spread"),
    [
        (0.1, "k1", 0.0, 20.0),
        (0.1, "k2", 0.002, 1.42),
        (0.1, "k3", 0.0, 1.42),
        (1.0, "k1", 0.0, 2.0),
        (1.0, "k2", 0.25, 1.73),
        (1.0, "k3", 0.0, 1.7),
    ],
)
def test_bias_and_spread_are_those_of_schulmans_table(
    shift: float, estimator: KLEstimator, bias: float, spread: float
) -> None:
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    x = torch.from_numpy(nodes)
    weight = torch.from_numpy(weights / math.sqrt(2 * math.pi))
    true = shift**2 / 2

    estimate = kl(-(x**2) / 2, -((x - shift) ** 2) / 2, estimator)
    mean = (weight * estimate).sum()
    std = (weight * (estimate - mean) ** 2).sum().sqrt()

    assert float(mean / true - 1) == pytest.approx(bias, abs=6e-4)
    assert float(std / true) == pytest.approx(spread, abs=0.01)


def test_as_a_loss_k2_follows_the_reverse_and_k3_the_forward_divergence() -> None:
    torch.testing.assert_close(expected_gradient("k2"), gradient_of(forward=False))
    torch.testing.assert_close(expected_gradient("k3"), gradient_of(forward=True))


def test_as_a_loss_k1_does_not_hold_the_policy() -> None:
    assert expected_gradient("k1").abs().max() < 1e-12


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_equal_policies_are_at_distance_zero_exactly(estimator: KLEstimator) -> None:
    logprobs = torch.tensor([-0.1, -5.0, -80.0])

    assert kl(logprobs, logprobs.clone(), estimator).tolist() == [0.0, 0.0, 0.0]


def test_k3_keeps_its_digits_close_to_zero() -> None:
    # k3 = x^2 / 2 + O(x^3) = 5e-7; exp(x) - 1 - x in float32 would be off by 6e-8, an eighth of it
    found = kl(torch.tensor(0.0), torch.tensor(1e-3), "k3")

    assert float(found) == pytest.approx(5e-7, rel=1e-3)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_a_policy_far_away_gives_finite_numbers(estimator: KLEstimator) -> None:
    logprobs = torch.tensor([-500.0, 0.0], requires_grad=True)

    estimate = kl(logprobs, torch.tensor([0.0, -500.0]), estimator)
    estimate.sum().backward()

    assert logprobs.grad is not None
    assert bool(estimate.isfinite().all()) and bool(logprobs.grad.isfinite().all())
