"""Actor and critic: a DeepSpeed trainer behind a machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fsm_trainer.algorithms.config import PolicyConfig, PPOConfig, WarmupConfig
from fsm_trainer.data.durable import Seal, seal
from fsm_trainer.data.models import load_tokenizer, pad_token
from fsm_trainer.data.routing import Routing
from fsm_trainer.data.seeds import derive
from fsm_trainer.data.trajectory import Trajectory
from fsm_trainer.groups.lease import Lease
from fsm_trainer.machine.errors import LeaseExpired
from fsm_trainer.machine.events import Effect
from fsm_trainer.machine.lifecycle import Resource
from fsm_trainer.machine.version import Version
from fsm_trainer.sync.checksums import checksums
from fsm_trainer.sync.manifest import Manifest, Transfer
from fsm_trainer.sync.push import Sender
from fsm_trainer.training.batch import collate
from fsm_trainer.training.config import ChecksConfig, ScheduleConfig, TrainerConfig
from fsm_trainer.training.ppo import (
    Advantages,
    Scored,
    actor_update,
    critic_update,
    free_routing,
    score,
)
from fsm_trainer.training.stepdump import Told, dumping
from fsm_trainer.training.trainer import ModelTrainer
from fsm_trainer.training.warmup import Pair, warmup_steps
from fsm_trainer.workers.effects import Effects
from fsm_trainer.workers.host import Host, Place


class TrainerHost(Host):
    """What actor and critic share."""

    head: Any

    def __init__(
        self,
        place: Place,
        config: TrainerConfig,
        model: Path,
        tokenizer: Path,
        seed: int,
        total_steps: int,
        threads: int,
        checkpoint: Path | None = None,
        returned: bool = False,
        routing_replay: bool = False,
    ) -> None:
        torch.set_num_threads(threads)
        self.pad_token, self.seed = pad_token(load_tokenizer(tokenizer)), seed
        # Where the tokenizer is, the run's model is: a critic's own is written by the warm-up.
        self.routing = Routing.of(tokenizer) if routing_replay else None
        self.config, self.total_steps, self.threads = config, total_steps, threads
        self.trainer = ModelTrainer(
            self.head,
            model,
            config,
            rank=place.rank,
            world_size=place.ranks,
            store=place.store,
            role=place.name,
            scratch=place.scratch,
            seed=seed,
            total_steps=total_steps,
        )
        if checkpoint is not None:
            self.trainer.load(checkpoint)
        if returned:
            self.trainer.take_up()
        super().__init__(place)

    def resources(self) -> Mapping[str, Resource]:
        """Bank, weights and optimizer as the trainer has them; groups under a new generation."""

        def held(name: Any) -> Effects:
            return Effects(
                lambda effect: self.trainer.acquire(name, epoch=self.generation),
                lambda effect: self.trainer.release(name),
            )

        return {name: held(name) for name in ("bank", "weights", "optimizer", "train_groups")}

    def generator(self, step: int) -> torch.Generator:
        """The step's random stream, the same on every rank and after a resume."""
        return torch.Generator().manual_seed(derive(self.seed, self.place.name, step))

    def told(self, step: int, algorithm: PolicyConfig, checks: ChecksConfig, first: bool) -> Told:
        """What a dump of this role's update says."""
        own = self.config.model_dump(include=set(TrainerConfig.model_fields))
        return Told(
            step=step,
            role="critic" if self.head == "value" else "actor",
            ranks=self.place.ranks,
            threads=self.threads,
            seed=derive(self.seed, self.place.name, step),
            total_steps=self.total_steps,
            first=first,
            trainer=TrainerConfig(**own),
            algorithm=algorithm.model_dump(mode="json"),
            checks=checks,
        )

    def replicas(self, step: int, checks: ChecksConfig) -> dict[str, float]:
        """Whether all ranks hold the same weights, at the steps that are due."""
        if not checks.replicas_every or step % checks.replicas_every:
            return {}
        return {f"check/replicas_{self.place.name}": float(self.trainer.check_replicas())}

    def do_save(self, directory: Path) -> tuple[None, dict[str, Seal]]:
        """Write a checkpoint of this role; rank 0 gives the seals of all ranks' files."""
        self.trainer.save(directory)
        return None, seal(directory) if self.place.rank == 0 else {}


class CriticHost(TrainerHost):
    """The value model."""

    head = "value"

    def revoke(self, why: str) -> None:
        """A critic on the actor's devices has no link."""

    def do_values(
        self,
        trajectories: Sequence[Trajectory],
        config: PPOConfig,
        step: int,
        scored: Scored | None,
        checks: ChecksConfig,
        dump: Path | None = None,
    ) -> tuple[Advantages, dict[str, float]]:
        """Estimate advantages, then train towards the returns."""
        # Only the actor takes routes; but the critic is updated first, so it checks them too.
        batch = replace(collate(trajectories, self.pad_token, self.routing), routes=None)
        told, generator = self.told(step, config, checks, first=False), self.generator(step)
        with dumping(dump, self.trainer, told, batch, None, scored):
            advantages, metrics = critic_update(self.trainer, batch, config, generator, scored)
            told.metrics = metrics
        return advantages, metrics | self.replicas(step, checks)


class ActorHost(TrainerHost):
    """The policy, and the hub of the link."""

    head = "policy"

    def __init__(self, place: Place, *arguments: Any, **named: Any) -> None:
        self._lease: Lease | None = None
        self._sender = Sender()
        super().__init__(place, *arguments, **named)

    def resources(self) -> Mapping[str, Resource]:
        """As every trainer's, and the link; its source is rank 0."""
        return {**super().resources(), "link": Effects(self._open, self._close)}

    def _open(self, effect: Effect) -> None:
        if self.place.rank == 0:
            membership = self.place.membership(self.lifecycle.world, effect)
            lease = self._lease = Lease.open(membership, str(self.trainer.device))
            try:
                self._sender.ready(lease)
            except BaseException:
                self._close(effect)
                raise

    def _close(self, effect: Effect) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.close()

    def revoke(self, why: str) -> None:
        """End the lease; a push that waits on it raises."""
        lease = self._lease
        if lease is not None:
            lease.revoke(why)

    def manifest(self, bucket_bytes: int) -> Manifest:
        """What a push carries; needs the weights on the device."""
        return Manifest.of(self.trainer.named_weights(), bucket_bytes)

    def checksums(self) -> Mapping[str, str]:
        """A checksum per tensor of the weights; needs them on the device."""
        return checksums(self.trainer.named_weights())

    def do_push(self, manifest: Manifest, version: Version) -> tuple[None, Transfer]:
        """Send the weights; gives bytes and seconds."""
        weights = self.trainer.named_weights()
        lease = self._lease
        sent = Transfer(0, 0.0)
        try:
            if self.place.rank == 0:
                if lease is None:
                    raise LeaseExpired("link", 0, "it was given up before the push began")
                sent = self._sender.send(lease, weights, manifest, version=version)
        finally:
            for _ in weights:  # ranks gather shards together, to the end
                pass
        return None, sent

    def do_warm_up(
        self, pairs: Sequence[tuple[list[int], list[int]]], config: WarmupConfig, folder: Path
    ) -> tuple[None, dict[str, float]]:
        """Learn known answers, then begin reinforcement learning with a fresh optimizer.

        Writes the warmed-up model into ``folder``: the critic starts from it.
        """
        generator = self.generator(0)
        ramp = ScheduleConfig(warmup_steps=config.ramp_steps)
        self.trainer.begin(config.learning_rate, ramp, config.steps)
        metrics = warmup_steps(
            self.trainer,
            [Pair(prompt, answer) for prompt, answer in pairs],
            config.steps,
            config.batch_size,
            generator,
            pad_token=self.pad_token,
        )
        self.trainer.begin()
        self.trainer.export(folder)
        return None, metrics

    def do_score(
        self, trajectories: Sequence[Trajectory], config: PolicyConfig, step: int
    ) -> tuple[Scored, dict[str, float]]:
        """Log-probabilities of actor and reference; the first time freezes the reference."""
        self._freeze()
        batch = collate(trajectories, self.pad_token, self.routing)
        return score(self.trainer, batch, config, self.generator(step)), {}

    def do_train(
        self,
        trajectories: Sequence[Trajectory],
        advantages: Advantages | None,
        config: PolicyConfig,
        step: int,
        scored: Scored | None,
        checks: ChecksConfig,
        dump: Path | None = None,
    ) -> tuple[None, dict[str, float]]:
        """One step of the algorithm; the first one freezes the reference."""
        self._freeze()
        first = self.trainer.steps == 0  # not after a resume, and whenever the reference was taken
        batch = collate(trajectories, self.pad_token, self.routing)
        every = checks.free_routing_every
        due = batch.routes is not None and every and (first or (step - 1) % every == 0)
        free = free_routing(self.trainer, batch, config.temperature) if due else {}
        gain = advantages.advantages if advantages is not None else None
        told, generator = self.told(step, config, checks, first), self.generator(step)
        with dumping(dump, self.trainer, told, batch, gain, None):
            metrics = actor_update(
                self.trainer, batch, gain, config, generator, checks, first, scored
            )
            told.metrics = metrics
        return None, metrics | free | self.replicas(step, checks)

    def _freeze(self) -> None:
        if not self.trainer.has_reference:
            self.trainer.snapshot_reference()
