"""Updates of a mixture of experts under replayed routes, by real trainers.

``python -m tests.training.routed RANK WORLD HOST PORT FOLDER`` runs a rank's share of every case;
rank 0 leaves metrics and weights in FOLDER.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fsm_trainer.algorithms.config import GRPOConfig
from fsm_trainer.data.routing import Routing
from fsm_trainer.data.tiny import TinyModelConfig, make_tiny_model
from fsm_trainer.data.trajectory import Sample, Status, Trajectory
from fsm_trainer.machine.errors import SelfCheckFailed
from fsm_trainer.machine.version import Version
from fsm_trainer.training.batch import Batch, collate
from fsm_trainer.training.config import ChecksConfig, MismatchConfig
from fsm_trainer.training.ppo import actor_update, free_routing
from fsm_trainer.training.trainer import ModelTrainer
from tests.training.ranks import Rank, checksum, finish

RATE, LENGTHS = 1e-3, (9, 13, 6, 9, 5, 12, 9)
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


def engine_answers(folder: Path) -> list[Trajectory]:
    """Answers with the log-probs and routes of plain transformers, as an engine would tell them."""
    from transformers import AutoModelForCausalLM

    model, random = AutoModelForCausalLM.from_pretrained(folder), np.random.default_rng(0)
    made = []
    for number, length in enumerate(LENGTHS):
        tokens = random.integers(2, 258, length).astype(np.int32)
        mask = np.ones(length, dtype=np.uint8)
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


def shifted(made: list[Trajectory], axis: int) -> list[Trajectory]:
    return [replace(each, routes=np.roll(each.routes, 1, axis)) for each in made]


def of_another_sample(made: list[Trajectory]) -> list[Trajectory]:
    """The first and the last answer, which are as long, have each other's routes."""
    first, *others, last = made
    assert first.tokens.shape == last.tokens.shape
    return [replace(first, routes=last.routes), *others, replace(last, routes=first.routes)]


def faults(rank: Rank, folder: Path) -> dict[str, dict[str, str]]:
    """What each check says of each planted fault; nothing is learned, so each meets the same."""
    made = engine_answers(folder)
    right = collate(made, 0, ROUTING)
    plans = {
        "none": right,
        "a token": collate(shifted(made, 0), 0, ROUTING),
        "a layer": collate(shifted(made, 1), 0, ROUTING),
        "another sample": collate(of_another_sample(made), 0, ROUTING),
        "a reference with one weight changed": right,
        "a reference that routes freely": elsewhere(made),
    }
    found = {}
    for plan, batch in plans.items():
        trainer = rank.start(rank.trainer(folder, learning_rate=0.0))
        [weight] = [p for n, p in trainer._module.named_parameters() if n == "lm_head.weight"]
        moves = plan == "a reference with one weight changed"
        with torch.no_grad():
            weight[7, 7] += 0.5 * moves
            trainer.snapshot_reference()
            weight[7, 7] -= 0.5 * moves
        if plan == "a reference that routes freely":
            taking = trainer.logprobs

            def logprobs(batch: Batch, *given: Any, bank: Any = "live", **more: Any) -> Any:
                free = replace(batch, routes=None) if bank == "reference" else batch
                return taking(free, *given, bank=bank, **more)  # noqa: B023

            trainer.logprobs = logprobs  # type: ignore[method-assign]
        found[plan] = {
            name: said(trainer, batch, checks)
            for name, checks in {
                "zero_kl": ChecksConfig(),
                "mismatch": ChecksConfig(zero_kl="off", mismatch=MismatchConfig(stop=1e-4)),
                "skipped": ChecksConfig(zero_kl="off"),
            }.items()
        }
        rank.stop(trainer)
    return found


def said(trainer: ModelTrainer, batch: Batch, checks: ChecksConfig) -> str:
    gains = batch.loss_mask.clone()
    try:
        actor_update(trainer, batch, gains, CONFIG, torch.Generator(), checks, first=True)
    except SelfCheckFailed as error:
        return str(error)
    return ""


def free(rank: Rank, folder: Path) -> list[list[float]]:
    """KL with free routing before and after an update, by us and by transformers alone."""
    from transformers import AutoModelForCausalLM

    batch = elsewhere(engine_answers(folder))
    trainer = rank.start(rank.trainer(folder, learning_rate=RATE))
    trainer.snapshot_reference()
    ours, theirs = AutoModelForCausalLM.from_pretrained(folder), []
    anchor, found = plain_logprobs(ours, batch), []
    for _ in range(2):
        ours.load_state_dict({name: t.clone() for name, t in trainer.named_weights()})
        d = (anchor - plain_logprobs(ours, batch))[batch.loss_mask[:, 1:] != 0]
        theirs.append(float((d.exp() - 1 - d).mean()))
        found.append(free_routing(trainer, batch, CONFIG.temperature)["check/free_routing_kl"])
        actor_update(trainer, batch, batch.loss_mask.clone(), CONFIG, torch.Generator())
    rank.stop(trainer)
    return [found, theirs]


@torch.no_grad()
def plain_logprobs(model: Any, batch: Batch) -> torch.Tensor:
    scores = (model(batch.tokens).logits[:, :-1] / CONFIG.temperature).log_softmax(-1)
    return scores.gather(-1, batch.tokens[:, 1:, None])[..., 0]


def scenario(rank: Rank) -> dict[str, Any]:
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
    if rank.world > 1:
        return {}
    return {"faults": faults(rank, folder), "free": free(rank, folder)}


if __name__ == "__main__":
    finish(scenario)
