"""Estimators of the KL divergence from samples.

Source: J. Schulman, "Approximating KL Divergence", 2020, http://joschu.net/blog/kl-approx.html,
with x ~ q (the policy that sampled), p the reference, r = p(x) / q(x), and KL[q, p] wanted.
"""

from __future__ import annotations

import torch

from fsm_trainer.algorithms.config import KLEstimator

# exp(20) = 5e8: beyond it an estimate says "far away" just as well, and float32 can't overflow.
_LOG_RATIO_LIMIT = 20.0


def kl(logprobs: torch.Tensor, reference: torch.Tensor, estimator: KLEstimator) -> torch.Tensor:
    """Return an estimate of KL[policy, reference] for each token, of the shape of both.

    - ``k1 = -log r``: unbiased, of great variance, may be negative. As a loss its gradient is 0 in
      expectation: it doesn't hold the policy.
    - ``k2 = (log r)^2 / 2``: biased, of small variance. As a loss its gradient is, on samples of
      the policy itself, that of KL[policy, reference].
    - ``k3 = (r - 1) - log r``: unbiased, of small variance, never negative. As a loss it pulls
      along the gradient of KL[reference, policy].

    Log-ratios are cut at 20 in absolute value.
    """
    log_ratio = (reference - logprobs).clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT)
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    return torch.expm1(log_ratio) - log_ratio
