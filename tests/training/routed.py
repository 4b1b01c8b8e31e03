"""Updates of a mixture of experts under replayed routes, by real trainers.

``python -m tests.training.routed RANK WORLD HOST PORT FOLDER`` runs a rank's share of every case;
rank 0 leaves metrics and weights in FOLDER.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from fsm_trainer.algorithms.config import GRPOConfig
from fsm_trainer.data.routing import Routing
from fsm_trainer.data.tiny import TinyModelConfig, make_tiny_model
from fsm_trainer.data.trajectory import Sample, Status, Trajectory
from fsm_trainer.machine.version import Version
from fsm_trainer.training.ppo import actor_update
from fsm_trainer.training.batch import Batch, collate
from tests.training.ranks import Rank, checksum, finish

RATE, ROWS = 1e-3, 7
SHAPE = TinyModelConfig(hidden=32, intermediate=24, layers=3, heads=2, kv_heads=1, experts=8)
ROUTING = Routing(3, 8, 2)
CONFIG = GRPOConfig(minibatches=2, kl_coefficient=0.1, temperature=0.8)
CASES: dict[str, dict[str, Any]] = {
    "whole": {},
    "accumulated": {"micro_batch": 1},
    "recomputed": {"micro_batch": 1, "activation_checkpointing": True},
    "packed": {"micro_batch_tokens": 26, "packing": True, "activation_checkpointing": True},
    "sharded": {"micro_batch": 2, "zero_stage": 3, "activation_checkpointing": True},
}


def make_moe(folder: Path) -> Path:
    return make_tiny_model(folder / "moe", SHAPE, seed=0)


def engine_answers(folder: Path, seed: int = 0, rows: int = ROWS) -> list[Trajectory]:
    """Answers with the log-probs and routes of plain transformers, as an engine would tell them."""
    from transformers import AutoModelForCausalLM

    model, random, made = AutoModelForCausalLM.from_pretrained(folder), np.random.default_rng(seed), []
    for number in range(rows):
        tokens = random.integers(2, 258, int(random.integers(5, 14))).astype(np.int32)
        mask = np.ones(len(tokens), dtype=np.uint8)
        mask[:2] = 0
        with torch.no_grad():
            found = model(torch.tensor(tokens)[None].long(), output_router_logits=True)
        scores = (found.logits[0, :-1] / CONFIG.temperature).log_softmax(-1)
        logprobs = scores.gather(1, torch.tensor(tokens[1:]).long()[:, None])[:, 0].numpy()
        routes = torch.stack([layer.topk(2).indices for layer in found.router_logits], dim=1)
        made.append(Trajectory(
            sample=Sample(f"sum/{number}", "p", None, group=f"g{number // 3}"),
            tokens=tokens, loss_mask=mask, version=Version(0, 1), status=Status.FINISHED,
            logprobs=np.concatenate([[0], logprobs]).astype(np.float32) * mask,
            text="", reward=float(random.random()), routes=routes[:-1].numpy(),
        ))  # fmt: skip
    return made


def elsewhere(made: list[Trajectory]) -> Batch:
    """The answers as a batch whose routes are not those that the model takes by itself."""
    batch = collate(made, 0, ROUTING)
    assert batch.routes is not None
    batch.routes.copy_(torch.where(batch.routes < 0, -1, (batch.routes + 3) % ROUTING.experts))
    return batch


def scenario(rank: Rank) -> None:
    folder = make_moe(rank.folder / f"model-{rank.rank}")
    batch = elsewhere(engine_answers(folder))
    gains = torch.randn(batch.loss_mask.shape, generator=torch.Generator().manual_seed(1))
    for name, case in CASES.items():
        trainer = rank.start(rank.trainer(folder, learning_rate=RATE, **case))
        trainer.snapshot_reference()
        metrics = [
            actor_update(trainer, batch, gains * batch.loss_mask, CONFIG, torch.Generator())
            for _ in range(2)
        ]
        weights = {name: t.float().clone() for name, t in trainer.named_weights()}
        found = {"metrics": metrics, "weights": weights, "checksum": checksum(trainer)}
        if rank.rank == 0:
            torch.save(found, rank.folder / f"{name}.pt")
        rank.stop(trainer)


if __name__ == "__main__":
    finish(scenario)
