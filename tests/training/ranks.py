"""Trainer ranks for the tests: in this process (one rank), or each in a process of its own.

``python -m MODULE RANK WORLD HOST PORT FOLDER`` runs a rank's part of a scenario, this module's or
another's, and prints one line of JSON.
Several trainers live one after the other in a process, because importing DeepSpeed is slow.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fsm_trainer.groups.lease import registered_groups
from fsm_trainer.groups.rendezvous import Address, Rendezvous
from fsm_trainer.groups.training import install
from fsm_trainer.machine.errors import LeaseExpired, PeerLost, SelfCheckFailed
from fsm_trainer.sync.checksums import checksums
from fsm_trainer.training.batch import Batch
from fsm_trainer.training.checkpoint import Origin
from fsm_trainer.training.config import TrainerConfig
from fsm_trainer.training.trainer import ModelTrainer
from fsm_trainer.training.zero import weights_of

ROOT = Path(__file__).resolve().parents[2]
VOCABULARY = 64
ON_DEVICE = ("weights", "optimizer", "train_groups")
STEPS, CYCLES = 3, 3
DRIFTS = "model.layers.1.mlp.up_proj.weight"


def make_model(folder: Path, hidden: int = 32, vocabulary: int = VOCABULARY,
               layers: int = 2, tied: bool = False) -> Path:  # fmt: skip
    """A random causal language model's folder, the same at each call."""
    install()
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=2 * hidden,
        num_hidden_layers=layers, num_attention_heads=2, num_key_value_heads=1,
        head_dim=hidden // 2, tie_word_embeddings=tied,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def make_batch(seed: int, rows: int = 4, time: int = 9) -> Batch:
    """Random tokens, none of them padding, all but the first trained on."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY, (rows, time), generator=generator)
    mask = torch.ones(rows, time)
    mask[:, 0] = 0
    return Batch(
        tokens=tokens,
        attention_mask=torch.ones_like(tokens),
        loss_mask=mask,
        engine_logprobs=torch.zeros(rows, time),
        rewards=torch.zeros(rows),
        truncated=torch.zeros(rows),
        groups=("g",) * rows,
        ids=tuple(f"s{row}" for row in range(rows)),
    )


class Rank:
    """One rank's place, and triggers in the order in which a worker's machine fires them."""

    def __init__(self, rank: int, world: int, store: Address, folder: Path) -> None:
        self.rank, self.world, self.store, self.folder = rank, world, store, folder
        self.epoch = 0
        self.scratch = folder / f"scratch-{rank}"
        torch.set_num_threads(1)

    def trainer(self, origin: Path | Origin, head: Any = "policy", total_steps: int = 100,
                **config: Any) -> ModelTrainer:  # fmt: skip
        origin = origin if isinstance(origin, Origin) else Origin(origin)
        return ModelTrainer(
            head, origin, TrainerConfig(**{"learning_rate": 1e-2, "timeout": 30.0, **config}),
            rank=self.rank, world_size=self.world, store=self.store, role="actor",
            scratch=self.scratch, seed=1, total_steps=total_steps,
        )  # fmt: skip

    def start(self, trainer: ModelTrainer) -> ModelTrainer:
        trainer.acquire("bank")
        self.wake(trainer)
        return trainer

    def wake(self, trainer: ModelTrainer) -> None:
        self.epoch += 1
        for resource in ON_DEVICE:
            trainer.acquire(resource, epoch=self.epoch)  # type: ignore[arg-type]
        # As in a run: all ranks are awake before one goes on, possibly to sleep again.
        trainer.all_reduce(torch.zeros(1, device=trainer.device))

    def sleep(self, trainer: ModelTrainer) -> None:
        for resource in reversed(ON_DEVICE):
            if resource in trainer.held:
                trainer.release(resource)  # type: ignore[arg-type]

    def stop(self, trainer: ModelTrainer) -> None:
        self.sleep(trainer)
        trainer.release("bank")


def policy_loss(trainer: ModelTrainer, step: int, micro: int, rank: int) -> torch.Tensor:
    batch = make_batch(1000 * step + 10 * micro + rank).to(trainer.device)
    return -trainer.logprobs(batch, 1.0).logprobs.mean()


def checksum(trainer: ModelTrainer) -> dict[str, str]:
    return checksums(trainer.named_weights())


def train(trainer: ModelTrainer, step: int, micro_batches: int = 2) -> list[float]:
    """One optimizer step on data that differ by rank and step; gives the losses."""
    losses = []
    for micro in range(micro_batches):
        loss = policy_loss(trainer, step, micro, trainer.rank) / micro_batches
        trainer.backward(loss, last=micro == micro_batches - 1)
        losses.append(loss.item())
    trainer.step()
    return losses


def sleeping_changes_nothing(rank: Rank, stage: int, dtype: str = "float32") -> dict[str, Any]:
    """Train without a pause, then asleep thrice after each step, then resumed before the last.

    At last in a process that ends when it sleeps, also before the last step.
    """
    model = make_model(rank.folder / f"model-{rank.rank}")
    checkpoint = rank.folder / f"checkpoint-{stage}-{dtype}"
    result: dict[str, Any] = {"asleep": []}

    trainer = rank.start(rank.trainer(model, zero_stage=stage, dtype=dtype))
    losses = [train(trainer, step) for step in range(STEPS - 1)]
    result["weights"] = [tensor.tolist() for _, tensor in trainer.named_weights()]
    trainer.save(checkpoint)
    result["awake"] = [[*losses, train(trainer, STEPS - 1)], checksum(trainer)]
    rank.stop(trainer)

    trainer, losses = rank.start(rank.trainer(model, zero_stage=stage, dtype=dtype)), []
    for step in range(STEPS):
        losses.append(train(trainer, step))
        for _ in range(CYCLES):
            rank.sleep(trainer)
            result["asleep"].append([torch.distributed.is_initialized(), len(registered_groups())])
            rank.wake(trainer)
    result["slept"] = [losses, checksum(trainer)]
    rank.stop(trainer)

    trainer = rank.trainer(Origin(model, checkpoint=checkpoint), zero_stage=stage, dtype=dtype)
    rank.start(trainer)
    train(trainer, STEPS - 1)
    result["resumed"] = checksum(trainer)
    result["drift"] = drift(rank, trainer)
    rank.stop(trainer)

    exits: dict[str, Any] = {"zero_stage": stage, "dtype": dtype, "offload": {"target": "exit"}}
    trainer = rank.start(rank.trainer(model, **exits))
    for step in range(STEPS - 1):
        train(trainer, step)
    rank.sleep(trainer)
    left = rank.scratch / "left"
    kept = left.rename(left.with_name("kept"))  # a process that ends as it should deletes it
    trainer.release("bank")
    kept.rename(left)
    trainer = rank.trainer(Origin(model, returned=True), **exits)
    rank.start(trainer)
    train(trainer, STEPS - 1)
    result["returned"] = checksum(trainer)
    rank.stop(trainer)
    result["files"] = left.exists()
    return result


def drift(rank: Rank, trainer: ModelTrainer) -> list[Any]:
    """What a comparison of the ranks finds, before and after a bit of the last one has changed."""
    found: list[Any] = [trainer.check_replicas()]
    if rank.rank == rank.world - 1:
        with torch.no_grad():
            weight = trainer._module.get_parameter(DRIFTS).data.view(-1)
            weight[:1] = weight[:1].nextafter(weight.new_tensor(9.0))
    try:
        found.append(trainer.check_replicas())
    except SelfCheckFailed as error:
        found.append(str(error))
    return found


def all_stages(rank: Rank) -> dict[str, Any]:
    """All stages; of two ranks one goes away, and the other shows what a sleeper gives back.

    Over NCCL nobody goes away here: a lost peer ends the process, see :mod:`.orphaned`.
    """
    result: dict[str, Any] = {
        str(stage): sleeping_changes_nothing(rank, stage) for stage in (0, 1, 2, 3)
    }
    if rank.world == 2:
        result["suspended"] = suspend(rank, rank.folder / f"model-{rank.rank}")
    if rank.world == 2 and not torch.cuda.is_available():
        result["lost"] = lose_a_peer(rank, rank.folder / f"model-{rank.rank}")
        if rank.rank == 0:
            alone = Rank(0, 1, rank.store, rank.folder / "alone")
            alone.epoch = 1000
            result["memory"] = memory(alone)
    return result


def lose_a_peer(rank: Rank, model: Path) -> dict[str, Any]:
    """Rank 1 goes away between two steps and comes back; rank 0 waits for it in a step."""
    straight = rank.start(rank.trainer(model))
    train(straight, 0)
    train(straight, 1)
    expected = checksum(straight)
    rank.stop(straight)

    trainer, error = rank.start(rank.trainer(model, timeout=5.0)), ""
    train(trainer, 0)
    if rank.rank == 0:
        try:
            train(trainer, 1)
        except PeerLost as lost:
            error = str(lost)
    rank.sleep(trainer)
    rank.wake(trainer)
    train(trainer, 1)
    recovered = checksum(trainer) == expected
    rank.stop(trainer)
    return {"error": error, "recovered": recovered}


def suspend(rank: Rank, model: Path) -> dict[str, Any]:
    """Groups that both ranks keep while asleep; over gloo rank 1 then has none, as if new."""
    alone = rank.rank == 1 and not torch.cuda.is_available()
    straight = rank.start(rank.trainer(model))
    expected = [train(straight, step) for step in range(3)], checksum(straight)
    rank.stop(straight)

    trainer = rank.start(rank.trainer(model, offload={"groups": "suspend"}))
    result: dict[str, Any] = {"same_group": [], "asleep": []}
    losses = [train(trainer, 0)]
    for step, forgets in ((1, False), (2, alone)):
        before = trainer._groups.world.live
        rank.sleep(trainer)
        try:
            trainer._groups.world.resolve()
        except LeaseExpired as error:
            result["asleep"].append(str(error))
        if forgets:
            trainer._groups._destroy()
        rank.wake(trainer)
        result["same_group"].append(trainer._groups.world.live is before)
        losses.append(train(trainer, step))
    result["equal"] = (losses, checksum(trainer)) == expected
    rank.stop(trainer)
    return result


def run_ranks(
    world: int, folder: Path, module: str = __name__, *arguments: str, **environment: str
) -> list[Any]:
    """Run a module's scenario with each rank in a process of its own; gives what each printed."""
    with Rendezvous.bind() as rendezvous:
        host, port = rendezvous.address
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", module, str(rank), str(world), host, str(port),
                 str(folder), *arguments],
                cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            )
            for rank in range(world)
        ]  # fmt: skip
        try:
            outputs = [process.communicate(timeout=280) for process in processes]
        finally:
            for process in processes:
                process.kill()
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors[-6000:]
    return [json.loads(output.splitlines()[-1]) for output, _ in outputs]


def memory(rank: Rank) -> dict[str, int]:
    """Resident bytes awake and asleep, of a model of 40 million parameters."""
    import psutil

    model = make_model(rank.folder / "model", hidden=512, vocabulary=16_384, layers=18)
    trainer = rank.start(rank.trainer(model))
    trainer.backward(policy_loss(trainer, 0, 0, 0), last=True)
    trainer.step()
    engine: Any = trainer._engine
    parameters = sum(tensor.numel() for _, tensor in trainer.named_weights())
    held = [*weights_of(engine.module), *engine.optimizer()]
    nbytes = sum(storage.nbytes() for storage in held)
    process = psutil.Process()
    before, weights = process.memory_info().rss, checksum(trainer)
    rank.sleep(trainer)
    after = process.memory_info().rss
    rank.wake(trainer)
    return {
        "parameters": parameters, "bytes": nbytes, "awake": before, "asleep": after,
        "equal": int(weights == checksum(trainer)),
    }  # fmt: skip


def finish(scenario: Callable[..., Any]) -> None:
    """Run this process's part of ``scenario``, print what it gives, and end the process."""
    number, world, host, port, folder, *arguments = sys.argv[1:]
    here = Rank(int(number), int(world), Address(host, int(port)), Path(folder))
    print(json.dumps(scenario(here, *arguments)), flush=True)
    # A rank whose peer is gone on purpose has nobody to say goodbye to.
    os._exit(0)


if __name__ == "__main__":
    finish(all_stages)
