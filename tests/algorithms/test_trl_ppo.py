"""Our functions and TRL 1.12.0's PPO on the same tensors; make_trl_ppo.py wrote them.

The last response token is where the reward stands here; TRL has it one place later, with a value of
its own there, wherever the response ends early. Given TRL's mask (``padding_mask_p1``) all agrees.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from fsm_trainer.algorithms.advantages import gae, token_rewards
from fsm_trainer.algorithms.config import KLEstimator, PPOConfig
from fsm_trainer.algorithms.losses import policy_loss, value_loss
from fsm_trainer.algorithms.masked import token_weights, whiten
from fsm_trainer.training.ppo import Scored, reward_penalties

GOLDEN = json.loads(Path(__file__).with_name("trl_ppo.json").read_text())
SET = GOLDEN["settings"]
ESTIMATORS: tuple[KLEstimator, ...] = ("k1", "k3")

Tensors = Mapping[str, torch.Tensor]


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=1e-6)


@pytest.fixture(params=ESTIMATORS)
def case(request: pytest.FixtureRequest) -> tuple[KLEstimator, Tensors]:
    """The estimator, and what TRL computed with it."""
    tensors = {k: torch.tensor(v, dtype=torch.float64) for k, v in GOLDEN[request.param].items()}
    return request.param, tensors


def test_the_versions_are_named() -> None:
    assert GOLDEN["versions"]["trl"] == "1.12.0"


def test_advantages_with_the_kl_in_the_reward_are_trls(case: tuple[KLEstimator, Tensors]) -> None:
    estimator, they = case
    mask, longer = 1 - they["padding_mask"], 1 - they["padding_mask_p1"]
    assert 0 < mask.sum() < longer.sum() < mask.numel(), "some responses must end early"
    config = PPOConfig(kl_in="reward", kl_coefficient=SET["kl_coef"], kl_estimator=estimator)

    scored = Scored(they["logprobs"], torch.zeros_like(mask), they["ref_logprobs"])
    penalties = reward_penalties(scored, mask, config)
    rewards = token_rewards(they["scores"].flatten(), penalties, longer)
    advantages = gae(rewards, they["values"], longer, SET["gamma"], SET["lam"])

    assert penalties.abs().max() > 0.01
    close(advantages, they["advantages"] * longer)
    close(advantages + they["values"] * longer, they["returns"] * longer)


def test_whitening_differs_from_trls_by_n_and_n_minus_one(
    case: tuple[KLEstimator, Tensors],
) -> None:
    _, they = case
    mask = 1 - they["padding_mask"]
    n, variance = mask.sum(), they["advantages"][mask != 0].var(correction=0)

    found = whiten(they["advantages"], mask)

    theirs = variance * n / (n - 1) + 1e-8
    close(found * (variance / theirs).sqrt(), they["whitened"])


def test_policy_loss_and_gradient_are_trls(case: tuple[KLEstimator, Tensors]) -> None:
    _, they = case
    mask = 1 - they["padding_mask"][they["rows"].long()]
    logprobs = they["new_logprobs"].clone().requires_grad_()

    found = policy_loss(logprobs, they["mb_logprobs"], they["mb_advantage"], mask, SET["cliprange"])
    loss = (token_weights(mask, "token") * found.loss).sum()
    loss.backward()

    assert found.clipped.any()
    assert logprobs.grad is not None
    close(loss.detach(), they["pg_loss"])
    close(logprobs.grad, they["new_logprobs_gradient"])


def test_value_loss_and_gradient_are_trls(case: tuple[KLEstimator, Tensors]) -> None:
    _, they = case
    mask = 1 - they["padding_mask_p1"][they["rows"].long()]
    values = they["vpred"].clone().requires_grad_()

    found = value_loss(values, they["mb_values"], they["mb_return"], mask, SET["cliprange_value"])
    loss = (token_weights(mask, "token") * found.loss).sum()
    (SET["vf_coef"] * loss).backward()

    assert found.clipped.any()
    assert values.grad is not None
    close(loss.detach(), they["vf_loss"])
    close(values.grad, they["vpred_gradient"])
