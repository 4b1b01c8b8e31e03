"""One rank of an actor or a critic: its model, its optimizer, and how they sleep and wake.

A trainer holds four resources, which its worker acquires and releases as its machine says:

- ``bank``: the process has its weights and optimizer, off the device;
- ``weights``, ``optimizer``: they are on the device;
- ``train_groups``: the ranks of the role can communicate.

They are acquired in this order and released in the reverse one; ``optimizer`` alone may also be
released and acquired under living groups. Everything else is the work that
:class:`~fsm_trainer.training.port.ModelPort` describes.
"""

from __future__ import annotations

import gc
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args

import torch
import torch.distributed as dist

from fsm_trainer.algorithms.losses import entropy
from fsm_trainer.data.seeds import derive
from fsm_trainer.groups.rendezvous import Address
from fsm_trainer.groups.training import TrainingGroups, suspended
from fsm_trainer.machine.errors import Refused, SelfCheckFailed
from fsm_trainer.training import checkpoint, models, packing, selfcheck
from fsm_trainer.training.batch import Batch
from fsm_trainer.training.checkpoint import Origin
from fsm_trainer.training.config import ScheduleConfig, TrainerConfig
from fsm_trainer.training.device import Meter, process_bytes
from fsm_trainer.training.offload import BANKS, Bank, trim
from fsm_trainer.training.packing import Layout
from fsm_trainer.training.port import Bank as BankName
from fsm_trainer.training.port import Scores, Traits
from fsm_trainer.training.reference import Reference
from fsm_trainer.training.routes import Replay
from fsm_trainer.training.zero import ZeroEngine, weights_of

Resource = Literal["bank", "weights", "optimizer", "train_groups"]
# Each needs those before it.
RESOURCES: tuple[Resource, ...] = get_args(Resource)


class ModelTrainer:
    """One rank's model and AdamW in DeepSpeed; implements ``ModelPort``.

    ``origin`` is what each start begins from, ``total_steps`` the optimizer steps of the whole run.
    All methods raise :class:`~fsm_trainer.machine.errors.Refused` when a resource that they need
    isn't held, and :class:`~fsm_trainer.machine.errors.PeerLost` when another rank is gone.
    """

    def __init__(
        self,
        head: models.Head,
        origin: Origin,
        config: TrainerConfig,
        *,
        rank: int,
        world_size: int,
        store: Address,
        role: str,
        scratch: Path,
        seed: int,
        total_steps: int,
    ) -> None:
        self.rank, self.world_size, self.packing = rank, world_size, config.packing
        self.micro_batch, self.micro_batch_tokens = config.micro_batch, config.micro_batch_tokens
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.held, self.steps = set[str](), 0
        self._head, self._config = head, config
        self._origin, self._left = origin, scratch / "left"
        self._name, self._seed = f"{role}-{rank}", derive(seed, role, rank)
        self._planned = self._configured = config.learning_rate, config.schedule, total_steps
        backend = "nccl" if self.device.type == "cuda" else "gloo"
        kept = suspended(config.offload.groups, backend, world_size, self._name)
        self._groups = TrainingGroups(store, role, rank, world_size, config.timeout, backend, kept)
        self._target = config.offload.on(self.device.type)
        kind = BANKS.get(self._target, Bank)
        self._bank = kind(self._target, scratch, self._name, config.offload.tight)
        self._meter, self._settled = Meter(self._name, self.device, process_bytes), False
        self._module: Any = None
        self._replay: Any = None
        self._engine: ZeroEngine | None = None
        self._reference = self._no_reference()

    # Resources

    def acquire(self, resource: Resource, epoch: int = 0) -> None:
        """Take a resource; ``epoch`` names the meeting of the ranks for ``train_groups``."""
        if resource in self.held:
            self._refuse(f"acquire {resource}", f"{resource} is held", needs="release it first")
        self._need(f"acquire {resource}", *RESOURCES[: RESOURCES.index(resource)])
        if resource == "bank":
            self._origin = self._origin.settled()
        elif resource == "weights":
            self._wake_weights()
        elif resource == "train_groups":
            self._open_groups(epoch)
        elif self._engine is not None:
            self._bank.wake("optimizer")
        self.held.add(resource)

    def release(self, resource: Resource) -> None:
        """Give a resource back; gradients of an unfinished step are dropped with it."""
        self._need(f"release {resource}", resource)
        if resource == "bank":
            self._forget()
        elif resource == "train_groups":
            self._groups.close()
        elif self._engine is None:
            if resource == "weights":  # the start was undone, and may have changed the module
                self._module = self._replay = None
                self._drop()
        else:
            self._engine.drop_gradients()
            if resource == "weights":
                self._reference.show("live")
                self._bank.sleep("weights", weights_of(self._module))
            else:
                if self._target == "exit":
                    self._leave(self._engine)
                self._bank.sleep("optimizer", self._engine.optimizer())
        if resource == "weights" and self.device.type == "cuda" and self._target != "exit":
            self._meter.check(self._settled, self._bank.hollow)
        self.held.discard(resource)

    def _wake_weights(self) -> None:
        if self._module is not None:
            self._bank.wake("weights")
            return
        torch.manual_seed(self._seed)
        config = self._config
        with self._bank.region():
            module = models.load(self._head, self._origin.weights, config.dtype).to(self.device)
        self._module = module
        self._replay = Replay(module)
        if config.activation_checkpointing:
            again = {"use_reentrant": False, "context_fn": self._replay.contexts}
            module.gradient_checkpointing_enable(again)

    def _open_groups(self, epoch: int) -> None:
        self._groups.open(epoch)
        if self._engine is not None:
            return
        try:
            with self._groups.together("start"):
                self._engine = self._bank.engine = self._started()
                if self.packing:
                    vocabulary = self._module.get_input_embeddings().num_embeddings
                    packing.check(self._engine.hidden, vocabulary, self.device)
        except BaseException:
            self._drop()
            raise

    def _started(self) -> ZeroEngine:
        """A new engine, which stands where a checkpoint or a sleeper that ended left it."""
        with self._bank.region():
            engine = ZeroEngine(self._module, self._config)
            folder = self._left if self._origin.returned else self._origin.checkpoint
            if folder is None:
                return engine
            shard = checkpoint.read(folder, self.rank, self._config.zero_stage, self.world_size)
            engine.restore(shard["optimizer"], shard["weights"])
        self._reference.adopt(shard["reference"])
        if shard["weights"] and (found := self._fingerprint(engine)) != shard["fingerprint"]:
            raise SelfCheckFailed(
                f"{self._name} came back with checksum {found}, it had left with "
                f"{shard['fingerprint']}. Memory or disk is damaged, or something wrote to the file"
            )
        self.steps = shard["steps"]
        return engine

    def _leave(self, engine: ZeroEngine) -> None:
        """Write what another process continues from."""
        self._reference.show("live")
        shard = self._shard(engine, engine.weights(), self._fingerprint(engine))
        checkpoint.write(self._left, self.rank, shard)

    def _fingerprint(self, engine: ZeroEngine) -> str:
        return f"{engine.fingerprint()} {self._reference.fingerprint}"

    def _drop(self) -> None:
        """Forget the engine and its groups, and give back what nobody refers to."""
        with self._bank.region():
            try:
                if self._engine is not None:
                    self._engine.destroy()
            finally:
                self._engine = self._bank.engine = None
                self._groups.forget()
                gc.collect()  # the engine and its hooks refer to each other
                torch.cuda.empty_cache()  # without CUDA, nothing
        trim()

    def _forget(self) -> None:
        self._module = self._replay = None
        self._drop()
        self._origin = replace(self._origin, returned=False)
        shutil.rmtree(self._left, ignore_errors=True)
        self._bank.close()
        self._reference, self.steps = self._no_reference(), 0
        self.held.clear()

    # The model port

    @property
    def traits(self) -> Traits:
        """What of the model may make a difference between two passes."""
        return models.traits(self._module)

    def logprobs(
        self,
        batch: Batch,
        temperature: float,
        *,
        bank: BankName = "live",
        with_entropy: bool = False,
    ) -> Scores:
        """Log-probabilities ``[batch, time]`` (nats, float32) of the tokens at a temperature.

        ``bank="reference"`` puts the frozen weights in the place of the live ones; they stay
        there until something needs the live ones again.
        """
        layout = Layout(batch.tokens, batch.lengths, self.packing)
        routes = None if batch.routes is None else layout.arrange(batch.routes[:, :-1], fill=-1)
        with self._using("logprobs", bank) as engine, self._replay.taking(routes) as taken:
            logits = engine.forward(layout.inputs, layout.positions).float() / temperature
        chosen = logits.gather(-1, layout.targets[..., None]).squeeze(-1)
        spread = layout.restore(entropy(logits)) if with_entropy else None
        rerouted = None if taken is None else layout.restore(taken.rerouted)
        return Scores(layout.restore(chosen - logits.logsumexp(-1)), spread, rerouted)

    def values(self, batch: Batch) -> torch.Tensor:
        """``[batch, time]`` float32: index t is the head's output at position t - 1."""
        layout = Layout(batch.tokens, batch.lengths, self.packing)
        with self._using("values") as engine:
            output = engine.forward(layout.inputs, layout.positions).float()
        return layout.restore(output.squeeze(-1))

    def backward(self, loss: torch.Tensor, last: bool) -> None:
        """Add a micro-batch's gradient; ``last`` marks the accumulation boundary."""
        with self._using("backward", "live", "optimizer") as engine:
            engine.backward(loss, last)
        self._replay.check_recomputed(int(self._config.activation_checkpointing))

    def step(self) -> Mapping[str, float]:
        """Clip, update, clear the gradients; gives ``grad_norm`` and ``learning_rate``.

        Raises SelfCheckFailed, with the weights as they were, when the norm isn't finite.
        """
        peak, schedule, total_steps = self._planned
        rate = peak * schedule.factor(self.steps, total_steps)
        with self._using("step", "live", "optimizer") as engine, self._bank.region():
            norm = engine.step(rate)
        if not math.isfinite(norm):
            raise SelfCheckFailed(
                f"{self._name}: the gradient norm is {norm} at optimizer step {self.steps}, which "
                "was not applied. Likely causes: an empty mask, or a learning rate that is too high"
            )
        self.steps, self._settled = self.steps + 1, True
        return {"grad_norm": norm, "learning_rate": rate}

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over the role's ranks; ``tensor`` may be overwritten."""
        self._need("all_reduce", "train_groups")
        with self._groups.guard("all_reduce"):
            dist.all_reduce(tensor)
        return tensor

    def begin(
        self,
        learning_rate: float | None = None,
        schedule: ScheduleConfig | None = None,
        total_steps: int | None = None,
    ) -> None:
        """Train on from here with a fresh optimizer: no moments, step 0, and this learning rate.

        A supervised warm-up is one such stretch, what follows it another. Arguments left out are
        those of the configuration, and of the constructor.
        """
        with self._using("begin", "live", "optimizer") as engine:
            engine.reset()
        peak, usual, total = self._configured
        rate = peak if learning_rate is None else learning_rate
        total = total if total_steps is None else total_steps
        self.steps, self._planned = 0, (rate, schedule or usual, total)

    @property
    def has_reference(self) -> bool:
        """Whether there is a reference: taken here, or come with a checkpoint."""
        return self._reference.frozen

    def snapshot_reference(self) -> None:
        """Freeze a copy of the live weights, in the bank, as the reference."""
        with self._using("snapshot_reference"):
            self._reference.freeze()

    # Weights for others, and checkpoints

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and whole tensor of each parameter and persistent buffer, tied ones once.

        A tensor is good for as long as it is held, and at ZeRO 3 whole memory of its own that long;
        all ranks iterate together.
        """
        with self._using("named_weights") as engine:
            yield from engine.named_weights()

    def check_replicas(self) -> int:
        """Compare the weights that all ranks hold; gives how many tensors those are, all together.

        At ZeRO 3 there are none: each rank has a part of its own. Raises SelfCheckFailed.
        """
        if self.world_size == 1 or self._config.zero_stage == 3:
            return 0
        return selfcheck.replicas(self, self.named_weights())

    def save(self, directory: Path) -> None:
        """Write weights, reference, optimizer and step; whole or not at all.

        ``directory`` becomes a model folder that transformers loads, with what a checkpoint to
        begin from needs beside. All ranks call it together.
        """
        with self._using("save", "live", "optimizer") as engine:
            shard = self._shard(engine)
        with self._replacing(directory) as folder:
            checkpoint.write(folder, self.rank, shard)

    def export(self, directory: Path) -> None:
        """Write a model folder that transformers loads, and no more; all ranks call it together."""
        with self._replacing(directory):
            pass

    def _shard(
        self, engine: ZeroEngine, weights: Sequence[torch.Tensor] = (), fingerprint: str = ""
    ) -> checkpoint.Shard:
        return checkpoint.Shard(
            format=checkpoint.FORMAT,
            zero_stage=self._config.zero_stage,
            world_size=self.world_size,
            steps=self.steps,
            optimizer=engine.state(),
            reference=self._reference.to_bytes(),
            weights=list(weights),
            fingerprint=fingerprint,
        )

    @contextmanager
    def _replacing(self, directory: Path) -> Iterator[Path]:
        """A folder with the live weights that becomes ``directory``, whole or not at all."""
        leads = self.rank == 0
        weights = {name: t.cpu().clone() for name, t in self.named_weights() if leads}  # all gather
        with models.replacing(directory, leads, self._barrier) as folder:
            if leads:
                models.save(self._module, weights, folder, self._origin.model)
            yield folder

    # What everything above asks first

    def _no_reference(self) -> Reference:
        return Reference(self._bank, self._name, lambda: list(weights_of(self._module)))

    def _barrier(self) -> None:
        with self._groups.guard("barrier"):
            self.all_reduce(torch.zeros(1, device=self.device)).item()  # NCCL queues; to read waits

    @contextmanager
    def _using(self, asked: str, bank: BankName = "live", *more: Resource) -> Iterator[ZeroEngine]:
        """The engine with one set of weights in it; Refused and PeerLost say what was ``asked``."""
        self._need(asked, "weights", "train_groups", *more)
        if self._engine is None:
            self._refuse(asked, "the engine was never started", needs="acquire train_groups")
        if bank == "reference" and not self._reference.frozen:
            self._refuse(asked, "there is no reference", needs="snapshot_reference()")
        self._reference.show(bank)
        with self._groups.guard(asked):
            yield self._engine

    def _need(self, asked: str, *resources: Resource) -> None:
        missing = [resource for resource in resources if resource not in self.held]
        if missing:
            lacks = [f"{resource} is not held" for resource in missing]
            self._refuse(asked, *lacks, needs=f"acquire {', '.join(missing)}")

    def _refuse(self, asked: str, *because: str, needs: str) -> NoReturn:
        holds = f"holding {', '.join(sorted(self.held)) or 'nothing'}"
        raise Refused(self._name, holds, asked, because, needs)
