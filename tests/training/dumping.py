"""Dumped updates, of one rank or several: ``python -m tests.training.dumping RANK WORLD ...``."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch

from fsm_trainer.algorithms.config import PPOConfig
from fsm_trainer.training.config import ChecksConfig, TrainerConfig
from fsm_trainer.training.ppo import Advantages, Scored, actor_update, critic_update
from fsm_trainer.training.stepdump import Told, dumping
from tests.training.ranks import Rank, finish
from tests.training.updates import PPO, models_in, ragged, rng

STEPS, TOTAL = 2, 100


def dumped(
    rank: Rank,
    folder: Path,
    model: Path,
    role: Literal["actor", "critic"],
    kl_in: Literal["loss", "reward"] = "loss",
    **settings: Any,
) -> Path:
    """Two updates, the second of them dumped; gives its folder.

    With the KL in the reward both read what was scored before, here at random.
    """
    config = TrainerConfig(**{"learning_rate": 1e-3, "micro_batch": 4, "timeout": 30.0, **settings})
    given = config.model_dump(exclude_unset=True)
    head = "value" if role == "critic" else "policy"
    trainer = rank.start(rank.trainer(model, head=head, total_steps=TOTAL, **given))
    algorithm = PPO.model_copy(update={"temperature": 1.0, "kl_in": kl_in})
    for step in range(STEPS):
        batch, first = ragged(step), role == "actor" and step == 0
        gain = torch.randn(batch.tokens.shape, generator=rng(9)) * batch.loss_mask
        scored = None
        if kl_in == "reward":
            old, entropy, reference = -torch.rand((3, *batch.tokens.shape), generator=rng(step))
            scored = Scored(old, -entropy, reference)
        if first:
            trainer.snapshot_reference()
        told = Told(
            step=step, role=role, ranks=rank.world, threads=1, seed=step, total_steps=TOTAL,
            first=first, trainer=config, algorithm=algorithm.model_dump(),
            checks=ChecksConfig(zero_kl="off" if scored else "stop"),
        )  # fmt: skip
        with dumping(folder if step == STEPS - 1 else None, trainer, told, batch, gain, scored):
            told.metrics = updated(trainer, batch, gain, algorithm, told, scored)
    rank.stop(trainer)
    return folder


def updated(
    trainer: Any, batch: Any, gain: Any, algorithm: PPOConfig, told: Told, scored: Scored | None
) -> Any:
    generator = torch.Generator().manual_seed(told.seed)
    if told.role == "critic":
        found: tuple[Advantages, dict[str, float]]
        found = critic_update(trainer, batch, algorithm, generator, scored)
        return found[1]
    return actor_update(trainer, batch, gain, algorithm, generator, told.checks, told.first, scored)


def scenario(rank: Rank, *stages: str) -> None:
    models = models_in(rank.folder / f"models-{rank.rank}")
    for stage in stages:
        folder = rank.folder / f"stage-{stage}" / "actor"
        dumped(rank, folder, models["policy"], "actor", zero_stage=int(stage))


if __name__ == "__main__":
    finish(scenario)
