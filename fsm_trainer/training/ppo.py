"""PPO with a critic, and GRPO without: one step's update, top to bottom.

Every rank of a role calls the same function with the same batch (all of the step's trajectories),
settings and generator state; each computes its share. A minibatch's loss is a mean over all of its
tokens (or sequences), whichever rank or micro-batch computes them, so results don't depend on how
many there are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from fsm_trainer.algorithms.advantages import gae, group_advantages
from fsm_trainer.algorithms.config import GRPOConfig, PolicyConfig, PPOConfig
from fsm_trainer.algorithms.kl import kl
from fsm_trainer.algorithms.losses import PolicyLoss, policy_loss, value_loss
from fsm_trainer.algorithms.masked import keep, masked_max, masked_mean, whiten
from fsm_trainer.training.batch import Batch, Minibatch, draw_epochs, parts
from fsm_trainer.training.port import ModelPort
from fsm_trainer.training.tally import Tally


@dataclass(frozen=True, slots=True, eq=False)
class Advantages:
    """What the critic estimates; ``[batch, time]`` float32 on the CPU, zeros where masked."""

    advantages: torch.Tensor
    """How much better each token was than expected; not whitened."""
    returns: torch.Tensor
    """What the values are trained towards."""
    values: torch.Tensor
    """The critic's, before it is trained."""


def critic_update(
    model: ModelPort, batch: Batch, config: PPOConfig, generator: torch.Generator
) -> tuple[Advantages, dict[str, float]]:
    """Estimate advantages with the critic as it is, then train it; ``batch`` is on the CPU.

    Gives the same advantages (of every row) and metrics on every rank.
    """
    told = estimate(model, batch, config, generator.clone_state())
    return told, fit_values(model, batch, told, config, generator)


def estimate(
    model: ModelPort, batch: Batch, config: PPOConfig, generator: torch.Generator
) -> Advantages:
    """Estimate advantages in the micro-batches in which the critic will be trained."""
    epochs = draw_epochs(config.critic_epochs, config.minibatches, batch.lengths, generator, model)
    mask = batch.loss_mask
    (values,) = _table(model, batch, epochs[0], lambda part: (model.values(part),))
    advantages = gae(batch.rewards, values, mask, config.gamma, config.lam)
    return Advantages(advantages, keep(advantages + values, mask), values)


def fit_values(
    model: ModelPort,
    batch: Batch,
    told: Advantages,
    config: PPOConfig,
    generator: torch.Generator,
) -> dict[str, float]:
    """Train the critic towards what it estimated, with a generator as it was for that."""
    epochs = draw_epochs(config.critic_epochs, config.minibatches, batch.lengths, generator, model)
    mask, old_values, returns = batch.loss_mask, told.values, told.returns
    tally = Tally()
    for minibatch in (minibatch for epoch in epochs for minibatch in epoch):
        for part in parts(batch, minibatch, config.aggregation, model.device, old_values, returns):
            old, target = part.tables
            values = model.values(part.batch)
            errors = value_loss(values, old, target, part.batch.loss_mask, config.value_clip)
            loss = (part.weights * errors.loss).sum()
            model.backward(loss * model.world_size, part.last)
            tally.add("critic/loss", loss)
            tally.add("critic/clip_fraction", (part.weights * errors.clipped).sum())
        tally.stepped(model.step())

    metrics = {
        "critic/value_mean": float(masked_mean(old_values, mask)),
        "critic/return_mean": float(masked_mean(returns, mask)),
        "critic/explained_variance": explained_variance(old_values, returns, mask),
    }
    return metrics | tally.reduce(model, "critic")


def actor_update(
    model: ModelPort,
    batch: Batch,
    advantages: torch.Tensor,
    config: PolicyConfig,
    generator: torch.Generator,
) -> dict[str, float]:
    """Train the policy on ``advantages``, ``[batch, time]``; both are on the CPU, all rows.

    Gives the same metrics on every rank: ``train/``, ``check/`` and ``rollout/`` ones describe the
    batch under the policy as it was before the update.
    """
    epochs = draw_epochs(config.epochs, config.minibatches, batch.lengths, generator, model)
    mask = batch.loss_mask
    # In the first epoch's own micro-batches: shapes are those of the gradient pass, so the first
    # ratio is 1 to the last bit, and a drift means a fault rather than another reduction order.
    temperature, passes = config.temperature, partial(_table, model, batch, epochs[0])
    old, entropy = passes(lambda part: model.logprobs(part, temperature, with_entropy=True))
    (reference,) = passes(lambda part: model.logprobs(part, temperature, bank="reference")[:1])
    measured = _measure(batch, old, reference, entropy, advantages)
    if config.whiten_advantages:
        advantages = whiten(advantages, mask)

    tally = Tally()
    for number, minibatch in enumerate(minibatch for epoch in epochs for minibatch in epoch):
        tables = (old, reference, advantages)
        for part in parts(batch, minibatch, config.aggregation, model.device, *tables):
            before, anchor, gain = part.tables
            here = part.batch.loss_mask
            with_entropy = config.entropy_coefficient > 0
            scores = model.logprobs(part.batch, temperature, with_entropy=with_entropy)
            surrogate = policy_loss(scores.logprobs, before, gain, here, config.clip)
            # Masked first: the estimators are not linear, so garbage would reach the gradient.
            penalty = kl(keep(scores.logprobs, here), keep(anchor, here), config.kl_estimator)
            loss = (part.weights * (surrogate.loss + config.kl_coefficient * penalty)).sum()
            if scores.entropy is not None:
                bonus = (part.weights * keep(scores.entropy, here)).sum()
                loss = loss - config.entropy_coefficient * bonus
            model.backward(loss * model.world_size, part.last)
            if number == 0:
                tally.peak("check/ratio_drift", surrogate.log_ratio.abs().max())
            tally.add("actor/loss", loss)
            tally.add("actor/kl_loss", (part.weights * penalty).sum())
            _tally_ratios(tally, part.weights, surrogate)
        tally.stepped(model.step())
    return measured | tally.reduce(model, "actor")


def grpo_update(
    model: ModelPort, batch: Batch, config: GRPOConfig, generator: torch.Generator
) -> dict[str, float]:
    """Train the policy on advantages over each row's group; otherwise as :func:`actor_update`."""
    advantages = group_advantages(batch.rewards, batch.groups, normalize_std=config.normalize_std)
    spread = keep(advantages[:, None].expand_as(batch.loss_mask), batch.loss_mask)
    return actor_update(model, batch, spread, config, generator)


def explained_variance(values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor) -> float:
    """Return ``1 - Var(returns - values) / Var(returns)``; 0 where the returns don't vary."""
    unexplained, total = (
        table[mask != 0].double().var(correction=0) for table in (returns - values, returns)
    )
    return 1.0 - float(unexplained / total) if total > 0 else 0.0


def _measure(
    batch: Batch,
    logprobs: torch.Tensor,
    reference: torch.Tensor,
    entropy: torch.Tensor,
    advantages: torch.Tensor,
) -> dict[str, float]:
    mask = batch.loss_mask
    ours, theirs = keep(logprobs, mask), keep(reference, mask)
    engine, lengths = (ours - keep(batch.engine_logprobs, mask)).abs(), mask.sum(dim=1)
    figures = {
        "train/reward": batch.rewards.mean(),
        "train/kl": masked_mean(kl(ours, theirs, "k3"), mask),
        "train/kl_k1": masked_mean(kl(ours, theirs, "k1"), mask),
        "check/reference_gap": (ours - theirs).abs().max(),
        "check/engine_gap_max": engine.max(),
        "check/engine_gap_mean": masked_mean(engine, mask),
        "actor/entropy": masked_mean(entropy, mask),
        "actor/advantage_mean": masked_mean(advantages, mask),
        "actor/advantage_max": masked_max(advantages.abs(), mask),
        "rollout/length_mean": lengths.mean(),
        "rollout/length_max": lengths.max(),
        "rollout/truncated": batch.truncated.mean(),
    }
    return {name: float(figure) for name, figure in figures.items()}


def _tally_ratios(tally: Tally, weights: torch.Tensor, surrogate: PolicyLoss) -> None:
    log_ratio = surrogate.log_ratio
    # The old policy sampled, so it is KL[old, new] that these tokens estimate.
    moved = kl(torch.zeros_like(log_ratio), log_ratio, "k3")
    tally.add("actor/policy_loss", (weights * surrogate.loss).sum())
    tally.add("actor/clip_fraction", (weights * surrogate.clipped).sum())
    tally.add("actor/ratio_mean", (weights * log_ratio.exp()).sum())
    tally.add("actor/kl_old", (weights * moved).sum())
    tally.peak("actor/ratio_max", log_ratio.max().exp())
    tally.peak("actor/ratio_inverse_max", (-log_ratio).max().exp())


@torch.no_grad()
def _table(
    model: ModelPort,
    batch: Batch,
    epoch: Sequence[Minibatch],
    compute: Callable[[Batch], Sequence[torch.Tensor | None]],
) -> torch.Tensor:
    """What ``compute`` gives for each row, ``[figures, batch, time]``, on the CPU of every rank."""
    table = torch.empty(0)
    for rows in (rows for minibatch in epoch for rows in minibatch.micro_batches):
        found = compute(batch.select(rows).trim().to(model.device))
        if not len(table):
            table = torch.zeros(len(found), *batch.loss_mask.shape, device=model.device)
        # Each row has one rank, and blank ones are left out: the sum over ranks is exact.
        real = (rows >= 0).to(model.device)
        for layer, values in zip(table, found, strict=True):
            if values is not None:
                layer[rows.to(model.device)[real], : values.shape[1]] = values[real].float()
    return model.all_reduce(table).cpu()
