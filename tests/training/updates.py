"""PPO and GRPO updates of real trainers, and the same written out in plain torch.

``python -m tests.training.updates RANK WORLD HOST PORT FOLDER WHICH`` runs a rank's share of the
``default`` cases, or those of a ZeRO stage; it leaves rank 0's weights and all ranks' metrics in
FOLDER.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from fsm_trainer.algorithms.config import GRPOConfig, PolicyConfig, PPOConfig
from fsm_trainer.data.trajectory import Sample, Status, Trajectory
from fsm_trainer.machine.version import Version
from fsm_trainer.training.batch import Batch, collate
from fsm_trainer.training.ppo import actor_update, critic_update
from tests.training.ranks import VOCABULARY, Rank, checksum, finish, make_model

RATE, CLIP_NORM, UPDATES, WORLDS = 1e-3, 1.0, 2, (1, 2, 4)
# 13 rows in minibatches of 7 and 6: uneven over 2 and over 4 ranks, some of which get blanks.
ROWS, LONGEST = 13, 20
# A hundred float32 roundings in a row: 2 layers of about 10 products and norms each, over sums of
# 16 to 32 terms, which may be taken in another order.
ROUNDING = 100 * 2.0**-24
# In the second minibatch the ratios have left 1, and reach the clip.
SHARED: dict[str, Any] = {
    "minibatches": 2, "clip": 0.01, "entropy_coefficient": 0.01,
    "kl_coefficient": 0.1, "kl_estimator": "k3", "temperature": 0.8,
}  # fmt: skip
PPO = PPOConfig(value_clip=0.002, **SHARED)
GRPO = GRPOConfig(**SHARED)

VARIANTS: dict[str, dict[str, Any]] = {
    "accumulated": {"micro_batch": 1},
    "recomputed": {"micro_batch": 1, "activation_checkpointing": True},
    "tokens": {"micro_batch_tokens": 2 * LONGEST},
    "packed": {"micro_batch_tokens": 2 * LONGEST, "packing": True},
    "bfloat16": {"micro_batch": 2, "dtype": "bfloat16"},
}
DEFAULT = [("accumulated", 1), ("recomputed", 1), ("packed", 3), ("bfloat16", 1)]
NIGHTLY = [(variant, stage) for variant in VARIANTS for stage in range(4)]


def ragged(seed: int = 0) -> Batch:
    """Random prompts and short answers, one as long as allowed, in groups of three."""
    random, rows = np.random.default_rng(seed), []
    for number in range(ROWS):
        prompt = int(random.integers(1, 5))
        answer = LONGEST - prompt if number == 5 else int(random.integers(1, LONGEST // 2))
        mask = np.array([0] * prompt + [1] * answer, dtype=np.uint8)
        rows.append(Trajectory(
            sample=Sample(f"s{number}", "p", None, group=f"g{number // 3}"),
            tokens=random.integers(1, VOCABULARY, prompt + answer).astype(np.int32),
            loss_mask=mask, logprobs=-mask.astype(np.float32), version=Version(0, 0),
            status=Status.FINISHED, text="", reward=float(random.random()),
        ))  # fmt: skip
    return collate(rows, 0)


def rng(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(step)


def update(rank: Rank, models: dict[str, Path], case: dict[str, Any]) -> dict[str, Any]:
    """Critic and actor by PPO, another actor by GRPO; metrics and weights of each."""
    found: dict[str, Any] = {}
    gains: list[torch.Tensor] = []
    for role, head in (("critic", "value"), ("actor", "policy"), ("grpo", "policy")):
        trainer = rank.start(
            rank.trainer(
                models[head], head=head, learning_rate=RATE, gradient_clip=CLIP_NORM, **case
            )
        )
        if head == "policy":
            trainer.snapshot_reference()
        metrics = []
        for step in range(UPDATES):
            batch = ragged(step)
            if role == "critic":
                advantages, figures = critic_update(trainer, batch, PPO, rng(step))
                gains.append(advantages.advantages)
            elif role == "actor":
                gain, first = gains[step], step == 0
                figures = actor_update(trainer, batch, gain, PPO, rng(step), first=first)
            else:
                figures = actor_update(trainer, batch, None, GRPO, rng(step), first=step == 0)
            metrics.append(figures)
        # Not in the arena of a gathered parameter, which the next one takes over.
        weights = {name: t.float().clone() for name, t in trainer.named_weights()}
        found[role] = {"metrics": metrics, "weights": weights, "checksum": checksum(trainer)}
        rank.stop(trainer)
    return found


def scenario(rank: Rank, which: str) -> None:
    models = models_in(rank.folder / f"models-{rank.rank}")
    every = [case for case in NIGHTLY if str(case[1]) == which]
    for variant, stage in DEFAULT if which == "default" else every:
        found = update(rank, models, {"zero_stage": stage, **VARIANTS[variant]})
        if rank.rank > 0:
            for outcome in found.values():
                del outcome["weights"]
        torch.save(found, rank.folder / f"{variant}-{stage}-{rank.rank}.pt")


def models_in(folder: Path) -> dict[str, Path]:
    """The folders of a language model and of a value model whose head isn't zero."""
    from transformers import AutoModelForTokenClassification

    policy = make_model(folder / "policy", hidden=16)
    value = AutoModelForTokenClassification.from_pretrained(policy, num_labels=1)
    torch.manual_seed(1)
    torch.nn.init.normal_(value.score.weight, std=0.1)
    value.save_pretrained(folder / "value")
    return {"policy": policy, "value": folder / "value"}


# The plain path: one process, whole minibatches, formulas from the papers.


def plain(models: dict[str, Path]) -> dict[str, Any]:
    """The same updates with torch alone."""
    from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

    found: dict[str, Any] = {}
    gains: list[torch.Tensor] = []
    for role, kind in (
        ("critic", AutoModelForTokenClassification),
        ("actor", AutoModelForCausalLM),
        ("grpo", AutoModelForCausalLM),
    ):
        folder = models["value" if role == "critic" else "policy"]
        model, reference = kind.from_pretrained(folder), kind.from_pretrained(folder)
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
        metrics = []
        for step in range(UPDATES):
            batch = ragged(step)
            shares = list(torch.randperm(ROWS, generator=rng(step)).tensor_split(2))
            if role == "critic":
                gain, figures = plain_critic(model, optimizer, batch, shares)
                gains.append(gain)
            elif role == "actor":
                figures = plain_actor(model, reference, optimizer, batch, gains[step], shares, PPO)
            else:
                gain = plain_groups(batch)
                figures = plain_actor(model, reference, optimizer, batch, gain, shares, GRPO)
            metrics.append(figures)
        weights = {name: p.detach() for name, p in model.named_parameters()}
        found[role] = {"metrics": metrics, "weights": weights}
    return found


def stepped(model: Any, optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> float:
    optimizer.zero_grad()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
    optimizer.step()
    return float(norm)


def mean_of(rows: list[dict[str, Any]]) -> dict[str, float]:
    return {name: float(sum(row[name] for row in rows)) / len(rows) for name in rows[0]}


def plain_values(model: Any, batch: Batch) -> torch.Tensor:
    output = model(input_ids=batch.tokens, attention_mask=batch.attention_mask).logits[:, :-1, 0]
    return torch.nn.functional.pad(output, (1, 0))


def plain_critic(
    model: Any, optimizer: torch.optim.Optimizer, batch: Batch, shares: list[torch.Tensor]
) -> tuple[torch.Tensor, dict[str, float]]:
    mask = batch.loss_mask.bool()
    old = plain_values(model, batch).detach()
    gain = torch.zeros_like(old)
    for row in range(ROWS):
        places = mask[row].nonzero().flatten().tolist()
        for at, t in enumerate(places):
            for k, u in enumerate(places[at:]):  # eq. 16: a discounted sum of the deltas to come
                later = places[at + k + 1 : at + k + 2]
                reward = float(batch.rewards[row]) if not later else 0.0
                after = float(old[row, later[0]]) if later else 0.0
                delta = reward + PPO.gamma * after - float(old[row, u])
                gain[row, t] += (PPO.gamma * PPO.lam) ** k * delta
    target = gain + old
    steps = []
    for rows in shares:
        here, before, goal = mask[rows], old[rows], target[rows]
        values = plain_values(model, batch.select(rows))
        limited = before + (values - before).clamp(-PPO.value_clip, PPO.value_clip)  # type: ignore
        far, near = (limited - goal).square()[here], (values - goal).square()[here]
        loss = torch.maximum(far, near).mean() / 2
        beyond = ((values - before).abs() > PPO.value_clip)[here]  # type: ignore
        clipped = (beyond & (far > near)).float().mean()
        norm = stepped(model, optimizer, loss)
        steps.append(
            {
                "critic/loss": loss.detach(),
                "critic/clip_fraction": clipped,
                "critic/grad_norm": norm,
            }
        )
    unexplained = (target - old)[mask].var(correction=0) / target[mask].var(correction=0)
    return gain, {
        "critic/value_mean": float(old[mask].mean()),
        "critic/return_mean": float(target[mask].mean()),
        "critic/explained_variance": 1 - float(unexplained),
    } | mean_of(steps)


def plain_groups(batch: Batch) -> torch.Tensor:
    gain = torch.zeros_like(batch.loss_mask)
    for group in set(batch.groups):
        rows = [row for row in range(ROWS) if batch.groups[row] == group]
        rewards = batch.rewards[rows]
        spread = float(rewards.std()) if len(rows) > 1 else 0.0
        gain[rows] = ((rewards - rewards.mean()) / (spread + 1e-4))[:, None] * batch.loss_mask[rows]
    return gain


def plain_scores(model: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropy of tokens 1 on, by torch's own distribution."""
    output = model(input_ids=batch.tokens, attention_mask=batch.attention_mask).logits[:, :-1]
    drawn = torch.distributions.Categorical(logits=output / SHARED["temperature"])
    return drawn.log_prob(batch.tokens[:, 1:]), drawn.entropy()


def plain_actor(
    model: Any,
    reference: Any,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    gain: torch.Tensor,
    shares: list[torch.Tensor],
    config: PolicyConfig,
) -> dict[str, float]:
    mask, gain = batch.loss_mask[:, 1:].bool(), gain[:, 1:]
    with torch.no_grad():
        (old, spread), (anchor, _) = (plain_scores(m, batch) for m in (model, reference))
    d = (anchor - old)[mask]
    measured = {
        "train/kl": float((d.exp() - 1 - d).mean()),
        "train/kl_k1": float(-d.mean()),
        "actor/entropy": float(spread[mask].mean()),
        "actor/advantage_mean": float(gain[mask].mean()),
        "actor/advantage_max": float(gain[mask].abs().max()),
        "rollout/length_mean": float(mask.sum(dim=1).float().mean()),
    }
    if config.whiten_advantages:
        gain = (gain - gain[mask].mean()) / gain[mask].std(correction=0)
    steps, peaks = [], []
    for rows in shares:
        here = mask[rows]
        new, entropy = (table[here] for table in plain_scores(model, batch.select(rows)))
        a, ratio = gain[rows][here], (new - old[rows][here]).exp()
        limited = ratio.clamp(1 - config.clip, 1 + config.clip) * a
        surrogate = -torch.minimum(ratio * a, limited)
        d = anchor[rows][here] - new
        penalty = d.exp() - 1 - d
        loss = surrogate.mean() + config.kl_coefficient * penalty.mean()
        loss = loss - config.entropy_coefficient * entropy.mean()
        norm = stepped(model, optimizer, loss)
        peaks.append(float(ratio.detach().max()))
        steps.append({
            "actor/loss": loss.detach(), "actor/policy_loss": surrogate.detach().mean(),
            "actor/kl_loss": penalty.detach().mean(), "actor/ratio_mean": ratio.detach().mean(),
            "actor/clip_fraction": (limited < ratio * a).float().mean(),
            "actor/kl_old": (ratio - 1 - ratio.log()).detach().mean(), "actor/grad_norm": norm,
        })  # fmt: skip
    return measured | mean_of(steps) | {"actor/ratio_max": max(peaks)}


if __name__ == "__main__":
    finish(scenario)
