"""Runs inside a process of its own: one rank of a trainer that lives through a scenario.

``python scenario.py NAME RANK WORLD HOST PORT FOLDER`` prints one JSON object as its last line.
Several trainers live one after the other in the process, because importing DeepSpeed is slow.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fsm_trainer.groups.rendezvous import Address
from fsm_trainer.training.batch import Batch
from fsm_trainer.training.config import OffloadConfig, TrainerConfig
from fsm_trainer.training.trainer import ModelTrainer

VOCABULARY = 64
WAKE = ("weights", "optimizer", "train_groups")


def make_model(folder: Path, hidden: int = 32, layers: int = 2, vocabulary: int = VOCABULARY,
               tied: bool = False, seed: int = 0) -> Path:  # fmt: skip
    from transformers import Qwen3Config, Qwen3ForCausalLM

    if not folder.exists():
        torch.manual_seed(seed)
        config = Qwen3Config(
            vocab_size=vocabulary, hidden_size=hidden, intermediate_size=2 * hidden,
            num_hidden_layers=layers, num_attention_heads=2, num_key_value_heads=1,
            head_dim=hidden // 2, tie_word_embeddings=tied,
        )  # fmt: skip
        Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def make_batch(seed: int, rows: int = 4, time: int = 9, vocabulary: int = VOCABULARY) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, vocabulary, (rows, time), generator=generator)
    mask = torch.ones(rows, time)
    mask[:, 0] = 0
    return Batch(
        tokens=tokens,
        attention_mask=torch.ones_like(tokens),
        loss_mask=mask,
        engine_logprobs=torch.zeros(rows, time),
        rewards=torch.zeros(rows),
        truncated=torch.zeros(rows),
        index=torch.arange(rows),
        groups=("g",) * rows,
    )


class Rank:
    """What a scenario needs of this process: its rank, the store, and a fresh epoch each time."""

    def __init__(self, rank: int, world: int, store: Address, folder: Path) -> None:
        self.rank, self.world, self.store, self.folder = rank, world, store, folder
        self.epoch = 0

    def trainer(self, model: Path, head: Any = "policy", total_steps: int = 100,
                **config: Any) -> ModelTrainer:  # fmt: skip
        return ModelTrainer(
            head, model, TrainerConfig(**{"learning_rate": 1e-2, "timeout": 30.0, **config}),
            rank=self.rank, world_size=self.world, store=self.store, role="actor",
            scratch=self.folder / f"scratch-{self.rank}", seed=1, total_steps=total_steps,
        )  # fmt: skip

    def wake(self, trainer: ModelTrainer) -> None:
        if "bank" not in trainer.held:
            trainer.acquire("bank")
        self.epoch += 1
        for resource in WAKE:
            if resource not in trainer.held:
                trainer.acquire(resource, epoch=self.epoch)  # type: ignore[arg-type]

    def sleep(self, trainer: ModelTrainer) -> None:
        for resource in reversed(WAKE):
            if resource in trainer.held:
                trainer.release(resource)  # type: ignore[arg-type]

    def stop(self, trainer: ModelTrainer) -> None:
        self.sleep(trainer)
        trainer.release("bank")


def train(trainer: ModelTrainer, step: int, micro_batches: int = 2) -> list[float]:
    """One optimizer step over ``micro_batches``, other data on each rank and step."""
    losses = []
    for micro in range(micro_batches):
        batch = make_batch(1000 * step + 10 * micro + trainer.rank)
        if trainer._head == "policy":
            loss = -trainer.logprobs(batch, 1.0).logprobs.mean() / micro_batches
        else:
            loss = (trainer.values(batch) - 1.0).square().mean() / micro_batches
        trainer.backward(loss, last=micro == micro_batches - 1)
        losses.append(loss.item())
    trainer.step()
    return losses


def main(scenarios: dict[str, Callable[[Rank], Any]]) -> None:
    name, rank, world, host, port, folder = sys.argv[1:]
    torch.set_num_threads(1)
    result = scenarios[name](Rank(int(rank), int(world), Address(host, int(port)), Path(folder)))
    print(json.dumps(result))
