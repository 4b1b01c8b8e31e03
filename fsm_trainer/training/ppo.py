"""PPO with a critic, and without one GRPO, RLOO and REINFORCE++: one step's update, top to bottom.

Every rank of a role calls the same function with the same batch (all of the step's trajectories),
settings and generator state; each computes its share. A minibatch's loss is a mean over all of its
tokens (or sequences), whichever rank or micro-batch computes them, so results don't depend on how
many there are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from fsm_trainer.algorithms.advantages import critic_free, gae, token_rewards
from fsm_trainer.algorithms.config import PolicyConfig, PPOConfig
from fsm_trainer.algorithms.correction import engine_correction
from fsm_trainer.algorithms.kl import kl
from fsm_trainer.algorithms.losses import PolicyLoss, policy_loss, value_loss
from fsm_trainer.algorithms.masked import keep, masked_max, masked_mean, whiten
from fsm_trainer.training import selfcheck
from fsm_trainer.training.batch import Batch, Minibatch, deal, draw_epochs, parts
from fsm_trainer.training.config import ChecksConfig
from fsm_trainer.training.port import ModelPort
from fsm_trainer.training.tally import Tally

_DEFAULT_CHECKS = ChecksConfig()


@dataclass(frozen=True, slots=True, eq=False)
class Advantages:
    """What the critic estimates; ``[batch, time]`` float32 on the CPU, zeros where masked."""

    advantages: torch.Tensor
    """How much better each token was than expected; not whitened."""
    returns: torch.Tensor
    """What the values are trained towards."""
    values: torch.Tensor
    """The critic's, before it is trained."""


@dataclass(frozen=True, slots=True, eq=False)
class Scored:
    """The batch under the policy before its update; ``[batch, time]`` float32 on the CPU."""

    old: torch.Tensor
    """Log-probabilities by the policy."""
    entropy: torch.Tensor
    """The policy's, in nats."""
    reference: torch.Tensor
    """Log-probabilities by the reference."""
    rerouted: torch.Tensor | None = None
    """See ``Scores``; with replayed routes."""


def critic_update(
    model: ModelPort,
    batch: Batch,
    config: PPOConfig,
    generator: torch.Generator,
    scored: Scored | None = None,
) -> tuple[Advantages, dict[str, float]]:
    """Estimate advantages with the critic as it is, then train it; ``batch`` is on the CPU.

    With the KL in the reward it needs what the actor ``scored``. Gives the same advantages (of
    every row) and metrics on every rank.
    """
    told = estimate(model, batch, config, generator.clone_state(), scored)
    return told, fit_values(model, batch, told, config, generator)


def estimate(
    model: ModelPort,
    batch: Batch,
    config: PPOConfig,
    generator: torch.Generator,
    scored: Scored | None = None,
) -> Advantages:
    """Estimate advantages in the micro-batches in which the critic will be trained."""
    epochs = draw_epochs(config.critic_epochs, config.minibatches, batch.lengths, generator, model)
    mask = batch.loss_mask
    (values,) = _table(model, batch, epochs[0], lambda part: (model.values(part),))
    rewards = token_rewards(batch.rewards, reward_penalties(scored, mask, config), mask)
    advantages = gae(rewards, values, mask, config.gamma, config.lam)
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
        tables, length = (old_values, returns), config.aggregation_length
        walked = parts(batch, minibatch, config.aggregation, model.device, *tables, length=length)
        for part in walked:
            old, target = part.tables
            values = model.values(part.batch)
            errors = value_loss(values, old, target, part.batch.loss_mask, config.value_clip)
            loss = (part.weights * errors.loss).sum()
            model.backward(loss * model.world_size, part.last)
            tally.add("critic/loss", loss)
            tally.add("critic/clip_fraction", (part.shares * errors.clipped).sum())
        tally.stepped(model.step())

    metrics = {
        "critic/value_mean": float(masked_mean(old_values, mask)),
        "critic/return_mean": float(masked_mean(returns, mask)),
        "critic/explained_variance": explained_variance(old_values, returns, mask),
    }
    return metrics | tally.reduce(model, "critic")


def score(
    model: ModelPort, batch: Batch, config: PolicyConfig, generator: torch.Generator
) -> Scored:
    """Return the batch's log-probabilities, with the generator as the update will get it."""
    epochs = draw_epochs(config.epochs, config.minibatches, batch.lengths, generator, model)
    # In the first epoch's own micro-batches: shapes are those of the gradient pass, so the first
    # ratio is 1 to the last bit, and a drift means a fault rather than another reduction order.
    temperature, passes = config.temperature, partial(_table, model, batch, epochs[0])
    old, entropy, rerouted = passes(
        lambda part: model.logprobs(part, temperature, with_entropy=True)
    )
    (reference,) = passes(lambda part: model.logprobs(part, temperature, bank="reference")[:1])
    return Scored(old, entropy, reference, rerouted if batch.routes is not None else None)


def actor_update(
    model: ModelPort,
    batch: Batch,
    advantages: torch.Tensor | None,
    config: PolicyConfig,
    generator: torch.Generator,
    checks: ChecksConfig = _DEFAULT_CHECKS,
    first: bool = False,
    scored: Scored | None = None,
) -> dict[str, float]:
    """Train the policy on ``advantages``, ``[batch, time]``; both are on the CPU, all rows.

    Without a critic there are none yet: they follow from the rewards. What was ``scored`` for the
    critic is not computed again. ``first`` says that the policy still is its reference. Gives the
    same metrics on every rank: ``train/``, ``check/`` and ``rollout/`` ones describe the batch
    under the policy as it was before the update. Raises SelfCheckFailed, on all ranks and with
    nothing updated, where ``checks`` say so.
    """
    scored = scored or score(model, batch, config, generator.clone_state())
    old, entropy, reference = scored.old, scored.entropy, scored.reference
    epochs = draw_epochs(config.epochs, config.minibatches, batch.lengths, generator, model)
    mask, temperature = batch.loss_mask, config.temperature
    if advantages is None:
        penalties = reward_penalties(scored, mask, config)
        advantages = critic_free(batch.rewards, penalties, mask, batch.groups, config)
    measured = _measure(batch, old, reference, entropy, advantages)
    if scored.rerouted is not None:
        other = masked_mean(scored.rerouted[:, 1:], batch.attention_mask[:, 1:])
        measured["check/route_disagreement"] = float(other)
    if first:
        measured |= selfcheck.zero_kl(model, batch, old, reference, entropy, checks)
    measured |= selfcheck.mismatch(model, batch, old, entropy, checks.mismatch)
    if config.whiten_advantages:
        advantages = whiten(advantages, mask)
    if config.engine_correction is not None:
        # On the advantages: the surrogate is linear in them, and the KL keeps its weight.
        found = engine_correction(old, batch.engine_logprobs, mask, config.engine_correction)
        advantages = advantages * found.weights
        measured["check/engine_weight_mean"] = float(masked_mean(found.weights, mask))
        measured["check/engine_corrected"] = float(masked_mean(found.changed.float(), mask))
    in_loss = config.kl_coefficient if config.kl_in == "loss" else 0.0

    tally, fresh = Tally(), torch.zeros_like(old, device=model.device)
    for number, minibatch in enumerate(minibatch for epoch in epochs for minibatch in epoch):
        tables, length = (old, reference, advantages), config.aggregation_length
        walked = parts(batch, minibatch, config.aggregation, model.device, *tables, length=length)
        for part in walked:
            before, anchor, gain = part.tables
            here = part.batch.loss_mask
            with_entropy = config.entropy_coefficient > 0
            scores = model.logprobs(part.batch, temperature, with_entropy=with_entropy)
            surrogate = policy_loss(
                scores.logprobs, before, gain, here,
                config.clip, config.clip_high, config.dual_clip, config.ratio,
            )  # fmt: skip
            # Masked first: the estimators are not linear, so garbage would reach the gradient.
            penalty = kl(keep(scores.logprobs, here), keep(anchor, here), config.kl_estimator)
            loss = (part.weights * (surrogate.loss + in_loss * penalty)).sum()
            if scores.entropy is not None:
                bonus = (part.weights * keep(scores.entropy, here)).sum()
                loss = loss - config.entropy_coefficient * bonus
            model.backward(loss * model.world_size, part.last)
            if number == 0:
                tally.peak("check/ratio_drift", surrogate.log_ratio.abs().max())
                if first:
                    _put(fresh, part.rows, scores.logprobs.detach())
            tally.add("actor/loss", loss)
            tally.add("actor/kl_loss", (part.weights * penalty).sum())
            tally.add("actor/policy_loss", (part.weights * surrogate.loss).sum())
            _tally_ratios(tally, part.shares, surrogate)
        if first and number == 0:
            fresh = model.all_reduce(fresh).cpu()
            measured |= selfcheck.unit_ratio(
                model, batch, minibatch.rows, old, fresh, entropy, checks
            )
        tally.stepped(model.step())
    return measured | tally.reduce(model, "actor")


def free_routing(model: ModelPort, batch: Batch, temperature: float) -> dict[str, float]:
    """The KL of policy and reference when the routers of both choose; ``batch`` is on the CPU.

    With replayed routes both compute what the engine did, and a router that has moved shows in its
    weights alone. This is what the policy is without them, on the same tokens.
    """
    free, whole = replace(batch, routes=None), torch.arange(len(batch))
    passes = partial(_table, model, free, [deal(whole, batch.lengths, model)])
    (ours,) = passes(lambda part: model.logprobs(part, temperature)[:1])
    (theirs,) = passes(lambda part: model.logprobs(part, temperature, bank="reference")[:1])
    mask = batch.loss_mask
    found = masked_mean(kl(keep(ours, mask), keep(theirs, mask), "k3"), mask)
    return {"check/free_routing_kl": float(found)}


def reward_penalties(
    scored: Scored | None, mask: torch.Tensor, config: PolicyConfig
) -> torch.Tensor:
    """Return what the KL takes from each token's reward, ``[batch, time]``; in the loss, nothing.

    Raises ValueError if it is in the reward and nothing was scored.
    """
    if config.kl_in == "loss":
        return torch.zeros_like(mask)
    if scored is None:
        raise ValueError("with the KL in the reward the critic needs what the actor scored")
    ours, theirs = keep(scored.old, mask), keep(scored.reference, mask)
    return config.kl_coefficient * kl(ours, theirs, config.kl_estimator)


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
    lengths = mask.sum(dim=1)
    figures = {
        "train/kl": masked_mean(kl(ours, theirs, "k3"), mask),
        "train/kl_k1": masked_mean(kl(ours, theirs, "k1"), mask),
        "actor/entropy": masked_mean(entropy, mask),
        "actor/advantage_mean": masked_mean(advantages, mask),
        "actor/advantage_max": masked_max(advantages.abs(), mask),
        "rollout/length_mean": lengths.mean(),
        "rollout/length_max": lengths.max(),
        "rollout/truncated": batch.truncated.mean(),
    }
    return {name: float(figure) for name, figure in figures.items()}


def _tally_ratios(tally: Tally, shares: torch.Tensor, surrogate: PolicyLoss) -> None:
    log_ratio = surrogate.log_ratio
    # The old policy sampled, so it is KL[old, new] that these tokens estimate.
    moved = kl(torch.zeros_like(log_ratio), log_ratio, "k3")
    tally.add("actor/clip_fraction", (shares * surrogate.clipped).sum())
    tally.add("actor/ratio_mean", (shares * log_ratio.exp()).sum())
    tally.add("actor/kl_old", (shares * moved).sum())
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
        for layer, values in zip(table, found, strict=True):
            if values is not None:
                _put(layer, rows, values)
    return model.all_reduce(table).cpu()


def _put(table: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> None:
    """Write a micro-batch's rows into a table of all rows, on the device of both."""
    # Each row has one rank, and blank ones are left out: the sum over ranks is exact.
    here = rows.to(table.device)
    table[here[here >= 0], : values.shape[1]] = values[here >= 0].float()
