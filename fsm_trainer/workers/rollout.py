"""A rollout worker: an engine behind a machine; the engine's process is a child of this one."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from fsm_trainer.data.models import load_tokenizer
from fsm_trainer.data.trajectory import Sample, Trajectory
from fsm_trainer.engines.config import EngineConfig, SglangConfig
from fsm_trainer.engines.contract import Tag
from fsm_trainer.engines.embedded import EmbeddedEngine
from fsm_trainer.engines.engine import Engine
from fsm_trainer.engines.sglang import SglangEngine
from fsm_trainer.machine.events import Effect
from fsm_trainer.machine.lifecycle import Resource
from fsm_trainer.machine.version import Version
from fsm_trainer.sync.manifest import Manifest
from fsm_trainer.workers.context import Batcher, Context, Hook, Sampling
from fsm_trainer.workers.effects import Effects
from fsm_trainer.workers.host import Host, Place, Status

DRAIN_SECONDS = 60.0
"""How long requests in flight may take to end before a worker gives up its KV cache."""


class RolloutHost(Host):
    """Generates trajectories with whatever weights were pushed to it."""

    def __init__(
        self, place: Place, config: EngineConfig, model: Path, hook: str, max_new_tokens: int
    ) -> None:
        self.engine: Engine = (
            SglangEngine(place.name, model, config)
            if isinstance(config, SglangConfig)
            else EmbeddedEngine(place.name, model, config)
        )
        self._model, self._max_new_tokens = model, max_new_tokens
        self._hook: Hook = resolve_name(hook)
        self._tokenizer: Any = None
        super().__init__(place)

    def resources(self) -> Mapping[str, Resource]:
        """The engine's process, what it holds on the device, and its end of the link."""
        return {
            "engine": Effects(lambda e: self.engine.start(), lambda e: self.engine.stop()),
            "weights": Effects(
                lambda e: self.engine.acquire(Tag.WEIGHTS),
                lambda e: self.engine.release(Tag.WEIGHTS),
            ),
            "kv": Effects(lambda e: self.engine.acquire(Tag.KV), self._release_kv),
            "link": Effects(self._join, lambda e: self.engine.leave()),
        }

    def _join(self, effect: Effect) -> None:
        self.engine.join(*self.place.memberships(self.lifecycle.world, effect))

    def _release_kv(self, effect: Effect) -> None:
        self.engine.drain(DRAIN_SECONDS)
        self.engine.release(Tag.KV)

    def revoke(self, why: str) -> None:
        """End the engine's lease; a push that waits on it raises."""
        self.engine.revoke()

    def status(self) -> Status:
        """How this process and its engine's stand."""
        status = super().status()
        if "engine" not in status.worker.held:
            return status
        health = self.engine.health()
        return status._replace(
            groups=status.groups + health.groups, resident_bytes=health.resident_bytes
        )

    def checksums(self) -> Mapping[str, str]:
        """A checksum per tensor of the engine's weights."""
        return self.engine.checksums()

    def do_push(
        self, manifest: Manifest, version: Version, verify: bool = False
    ) -> tuple[None, None]:
        """Receive the weights; to ``verify`` the transport, from zeros.

        They are torn from the first byte until all of them are there.
        """
        if verify:
            self.engine.reset_weights()
        self.engine.begin_update(manifest)
        self.engine.receive()
        self.engine.end_update(version)
        return None, None

    def do_generate(
        self, samples: Sequence[Sample], temperature: float, seed: int
    ) -> tuple[list[Trajectory], int]:
        """Trajectories for the samples, in their order; the value is how many tokens they took."""
        sampling = Sampling(temperature, self._max_new_tokens)
        trajectories = asyncio.run(self._generate(samples, sampling, seed))
        return trajectories, sum(t.trained for t in trajectories)

    do_evaluate = do_generate

    async def _generate(
        self, samples: Sequence[Sample], sampling: Sampling, seed: int
    ) -> list[Trajectory]:
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self._model)
        version = self.engine.version() or Version(0, 0)
        batcher = Batcher(self.engine)
        contexts = [
            Context(batcher, self._tokenizer, sampling, version, sample, seed, order)
            for order, sample in enumerate(samples)
        ]
        return await batcher.run(self._hook, contexts, samples)
