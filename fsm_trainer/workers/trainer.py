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
from fsm_trainer.groups.lease import Lease, open_all
from fsm_trainer.groups.training import install
from fsm_trainer.machine.errors import ActionFailed, LeaseExpired
from fsm_trainer.machine.events import Effect
from fsm_trainer.machine.lifecycle import Resource
from fsm_trainer.machine.names import Role
from fsm_trainer.machine.version import Version
from fsm_trainer.sync.checksums import checksums
from fsm_trainer.sync.manifest import Manifest, Transfer
from fsm_trainer.sync.push import Sender
from fsm_trainer.sync.values import receive_values, send_values
from fsm_trainer.training import selfcheck
from fsm_trainer.training.batch import Batch, collate
from fsm_trainer.training.checkpoint import Origin
from fsm_trainer.training.config import ChecksConfig, ScheduleConfig, TrainerConfig
from fsm_trainer.training.ppo import (
    Advantages,
    Scored,
    actor_update,
    critic_update,
    estimate,
    fit_values,
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

    @staticmethod
    def prepare() -> None:
        """Import DeepSpeed and transformers: two seconds of a first wake."""
        install()
        import transformers.modeling_utils  # noqa: F401

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
        warmed_up: Path | None = None,
    ) -> None:
        self._leases: dict[str, Lease] = {}
        torch.set_num_threads(threads)
        self.pad_token, self.seed = pad_token(load_tokenizer(tokenizer)), seed
        # Where the tokenizer is, the run's model is: a critic's own is written by the warm-up.
        self.routing = Routing.of(tokenizer) if routing_replay else None
        self.config, self.total_steps, self.threads = config, total_steps, threads
        self.trainer = ModelTrainer(
            self.head,
            Origin(model, warmed_up, checkpoint, returned),
            config,
            rank=place.rank,
            world_size=place.ranks,
            store=place.store,
            role=place.name,
            scratch=place.scratch,
            seed=seed,
            total_steps=total_steps,
        )
        super().__init__(place)

    def resources(self) -> Mapping[str, Resource]:
        """Bank, weights and optimizer as the trainer has them; groups under a new generation.

        And its places in the groups of the link, where its role has one.
        """

        def held(name: Any) -> Effects:
            return Effects(
                lambda effect: self.trainer.acquire(name, epoch=self.generation),
                lambda effect: self.trainer.release(name),
            )

        own = {name: held(name) for name in ("bank", "weights", "optimizer", "train_groups")}
        return {**own, "link": Effects(self._open, self._close)}

    def _open(self, effect: Effect) -> None:
        memberships = self.place.memberships(self.lifecycle.world, effect)
        leases = open_all(memberships, str(self.trainer.device))
        self._leases = {lease.membership.group: lease for lease in leases}
        try:
            self.opened()
        except BaseException:
            self._close(effect)
            raise

    def opened(self) -> None:
        """Make ready what is sent over the link."""

    def _close(self, effect: Effect) -> None:
        leases, self._leases = self._leases, {}
        for lease in leases.values():
            lease.close()

    def lease(self, group: str = "") -> Lease:
        """This process's lease on a group of the link; raises LeaseExpired without one."""
        lease = self._leases.get(group)
        if lease is None:
            raise LeaseExpired("link", 0, "it was given up before the work began")
        return lease

    def revoke(self, why: str) -> None:
        """End the link's leases; what waits on one raises."""
        for lease in [*self._leases.values()]:
            lease.revoke(why)

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
    _estimate: tuple[int, Advantages] | None = None

    def do_values(
        self,
        trajectories: Sequence[Trajectory],
        config: PPOConfig,
        step: int,
        scored: Scored | None,
        checks: ChecksConfig,
        dump: Path | None = None,
    ) -> tuple[Advantages | None, dict[str, float]]:
        """Estimate advantages, then train towards the returns; not yet where `train` does."""
        batch, generator = self._batch(trajectories), self.generator(step)
        if "train" in self.place.system.table(self.place.name).actions:
            self._estimate = step, estimate(self.trainer, batch, config, generator, scored)
            return None, {}
        told = self.told(step, config, checks, first=False)
        with dumping(dump, self.trainer, told, batch, None, scored):
            advantages, metrics = critic_update(self.trainer, batch, config, generator, scored)
            told.metrics = metrics
        return advantages, metrics | self.replicas(step, checks)

    def estimated(self, step: int) -> Advantages:
        """What was estimated in a step; raises ActionFailed if nothing was."""
        if self._estimate is None or self._estimate[0] != step:
            raise ActionFailed(f"{self.place.name} has no values of step {step}: `values` first")
        return self._estimate[1]

    def do_send_values(self, step: int) -> tuple[None, Transfer]:
        """Send the advantages to every rank of the actor; gives bytes and seconds."""
        if self.place.rank > 0:
            return None, Transfer(0, 0.0)
        return None, send_values(self.lease(Role.CRITIC), step, self.estimated(step).advantages)

    def do_train(
        self,
        trajectories: Sequence[Trajectory],
        advantages: None,
        config: PPOConfig,
        step: int,
        scored: Scored | None,
        checks: ChecksConfig,
        dump: Path | None = None,
    ) -> tuple[None, dict[str, float]]:
        """Train towards the returns, beside the actor, on its own estimate."""
        batch, generator = self._batch(trajectories), self.generator(step)
        told, estimate = self.told(step, config, checks, first=False), self.estimated(step)
        with dumping(dump, self.trainer, told, batch, None, scored):
            told.metrics = fit_values(self.trainer, batch, estimate, config, generator)
        return None, told.metrics | self.replicas(step, checks)

    def _batch(self, trajectories: Sequence[Trajectory]) -> Batch:
        # Only the actor takes routes; but the critic is first to see them, so it checks them too.
        return replace(collate(trajectories, self.pad_token, self.routing), routes=None)


class ActorHost(TrainerHost):
    """The policy, and the hub of the link."""

    head = "policy"
    _received: tuple[int, torch.Tensor] | None = None

    def __init__(self, place: Place, *arguments: Any, **named: Any) -> None:
        self._sender = Sender()
        super().__init__(place, *arguments, **named)

    def opened(self) -> None:
        """Make ready for pushes; their source is rank 0."""
        if self.place.rank == 0:
            self._sender.ready(self.lease())

    def manifest(self, bucket_bytes: int) -> Manifest:
        """What a push carries; needs the weights on the device."""
        return Manifest.of(self.trainer.named_weights(), bucket_bytes)

    def checksums(self) -> Mapping[str, str]:
        """A checksum per tensor of the weights; needs them on the device."""
        return checksums(self.trainer.named_weights())

    def do_push(self, manifest: Manifest, version: Version) -> tuple[None, Transfer]:
        """Send the weights; gives bytes and seconds."""
        weights = self.trainer.named_weights()
        sent = Transfer(0, 0.0)
        try:
            if self.place.rank == 0:
                sent = self._sender.send(self.lease(), weights, manifest, version=version)
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
        self,
        trajectories: Sequence[Trajectory],
        config: PolicyConfig,
        step: int,
        checks: ChecksConfig,
    ) -> tuple[Scored, dict[str, float]]:
        """Log-probabilities of actor and reference; the first time freezes the reference."""
        self._freeze()
        batch = collate(trajectories, self.pad_token, self.routing)
        found = score(self.trainer, batch, config, self.generator(step))
        if self.trainer.steps == 0:  # before the critic learns from it
            selfcheck.zero_kl(
                self.trainer, batch, found.old, found.reference, found.entropy, checks
            )
        return found, {}

    def do_send_values(self, step: int) -> tuple[None, None]:
        """Receive the step's advantages from the critic."""
        self._received = step, receive_values(self.lease(Role.CRITIC), step)
        return None, None

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
        if self._received is not None and self._received[0] == step:
            gain = self._received[1]
        told, generator = self.told(step, config, checks, first), self.generator(step)
        with dumping(dump, self.trainer, told, batch, gain, scored):
            metrics = actor_update(
                self.trainer, batch, gain, config, generator, checks, first, scored
            )
            told.metrics = metrics
        return None, metrics | free | self.replicas(step, checks)

    def _freeze(self) -> None:
        if not self.trainer.has_reference:
            self.trainer.snapshot_reference()
