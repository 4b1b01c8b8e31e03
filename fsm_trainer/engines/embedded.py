"""The embedded engine: transformers on torch, in a process of its own, behind the contract.

This is the client; it imports no torch. See `contract` for what each method promises, `admission`
for what is refused, `process` for how the engine process lives and dies.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from concurrent.futures import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, Field

from fsm_trainer.engines.admission import LINK, RECEIVED, UPDATE, Admission
from fsm_trainer.engines.contract import Completion, Health, PauseMode, Request, Tag
from fsm_trainer.engines.process import EngineProcess
from fsm_trainer.machine.errors import (
    ConfigError,
    DeadlineExceeded,
    EngineFailed,
    ManifestMismatch,
    Refused,
)
from fsm_trainer.machine.version import Version

if TYPE_CHECKING:
    from fsm_trainer.engines.contract import Engine
    from fsm_trainer.groups.membership import Membership
    from fsm_trainer.sync.manifest import Manifest, TensorSpec

SERVER = "fsm_trainer.engines.embedded_server"


class EngineConfig(BaseModel, extra="forbid", frozen=True):
    """How the embedded engine runs; what it generates is said by each request."""

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of the weights and the KV cache; a push must carry the same."""

    device: str = "cpu"
    """Where weights and KV cache live, as torch names it."""

    threads: int = Field(default=1, ge=1)
    """CPU threads of the engine process."""

    max_batch_tokens: int = Field(default=65_536, ge=1024)
    """KV cache positions in use at once, padding included; further requests wait their turn."""

    start_timeout: float = Field(default=180.0, gt=0)
    """Seconds until the engine process is up (it imports torch)."""

    call_timeout: float = Field(default=60.0, gt=0)
    """Seconds that any call may take beyond what it waits for; then the process is killed."""

    generate_timeout: float = Field(default=1800.0, gt=0)
    """Seconds that a ``generate`` call may take when it doesn't say so itself."""


class EmbeddedEngine:
    """An `Engine` for the causal language model in a folder (Hugging Face layout).

    Only the folder's configuration is read: weights come over a link. Tokens depend on a request
    and the weights alone; on CPU with equal ``threads`` log-probs are bit-equal in every batch.
    """

    def __init__(
        self, name: str, model: str | os.PathLike[str], config: EngineConfig | None = None
    ) -> None:
        #: The worker that this engine serves.
        self.name = name
        self._model = os.fspath(model)
        self._config = config or EngineConfig()
        self._life = threading.Lock()
        self._process: EngineProcess | None = None
        self._admission = Admission(name, self._living)
        self._specs: list[TensorSpec] | None = None

    def start(self) -> None:
        """Bring the engine process up, sleeping; see `Engine.start`."""
        if not (Path(self._model) / "config.json").is_file():
            raise ConfigError(
                f"{self.name}: the model folder {self._model!r} has no config.json; "
                "save a model there, or name another folder"
            )
        with self._life:
            if self._process is not None and self._process.ended is None:
                raise Refused(self.name, "started", "start", ["already started"], "stop it first")
            self._admission, self._specs = Admission(self.name, self._living), None
            process = self._process = EngineProcess(self.name, SERVER)
        try:
            timeout = self._config.start_timeout
            self._specs = process.call("start", self._model, self._config, timeout=timeout)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End the engine process and all it holds; see `Engine.stop`."""
        with self._life:
            process, self._process = self._process, None
        if process is not None:
            process.kill()

    def generate(
        self, requests: Sequence[Request], timeout: float | None = None
    ) -> list[Completion]:
        """Continue each prompt; see `Engine.generate`."""
        process = self._living("generate")
        ids = [request.id for request in requests]
        if not ids:
            return []
        limit = self._config.generate_timeout if timeout is None else timeout
        with self._admission.serving(ids) as version:
            future = process.submit("generate", list(requests), version)
            try:
                completions: list[Completion] = future.result(limit)
            except FutureTimeout:
                raise DeadlineExceeded(
                    f"{self.name}: {len(ids)} requests ({ids[0]} …) were not done within "
                    f"{limit:g} s and were aborted; give more time, or fewer tokens"
                ) from None
            finally:
                if not future.done():
                    process.submit("abort", frozenset(ids))
                    if future not in wait([future], self._config.call_timeout).done:
                        process.kill()
        return completions

    def abort(self, ids: Collection[str] | None = None) -> None:
        """End requests in flight; see `Engine.abort`."""
        self._call("abort", None if ids is None else frozenset(ids))

    def pause(self, mode: PauseMode) -> None:
        """Refuse new requests and stop those in flight; see `Engine.pause`."""
        self._admission.pause(PauseMode(mode))
        self._call("pause", PauseMode(mode))

    def unpause(self) -> None:
        """Take requests again; see `Engine.unpause`."""
        with self._admission.unpausing():
            self._call("unpause")

    def drain(self, timeout: float) -> None:
        """Wait until no request is in flight; see `Engine.drain`."""
        self._admission.drain(timeout)

    def acquire(self, tag: Tag) -> None:
        """Put weights (torn) or the KV cache on the device; see `Engine.acquire`."""
        with self._admission.alone(f"acquire({tag})", absent=tag) as held:
            self._call("acquire", Tag(tag))
            held.tags.add(Tag(tag))

    def release(self, tag: Tag) -> None:
        """Free weights or the KV cache; see `Engine.release`."""
        weights = tag == Tag.WEIGHTS
        with self._admission.alone(f"release({tag})", tag, absent=LINK if weights else "") as held:
            if weights:
                held.version = None
            self._call("release", Tag(tag))
            held.tags.discard(Tag(tag))

    def join(self, membership: Membership) -> None:
        """Open the lease of this membership; see `Engine.join`."""
        with self._admission.alone("join", Tag.WEIGHTS, absent=LINK) as held:
            self._call("join", membership, extra=2 * membership.timeout)
            held.link = membership

    def leave(self) -> None:
        """Close the lease; see `Engine.leave`."""
        with self._admission.alone("leave", LINK) as held:
            held.close_update()
            self._call("leave")
            held.link = None

    def revoke(self) -> None:
        """Make the lease worthless at once; see `Engine.revoke`."""
        self._call("revoke")

    def begin_update(self, manifest: Manifest) -> None:
        """Open an update; see `Engine.begin_update`."""
        with self._admission.alone("begin_update", Tag.WEIGHTS, LINK, absent=UPDATE) as held:
            manifest.check(self.specs())
            held.update = manifest

    def receive(self) -> None:
        """Receive every bucket of the manifest into the weights; see `Engine.receive`."""
        with self._admission.alone("receive", UPDATE, absent=RECEIVED) as held:
            manifest, link = held.update, held.link
            assert manifest is not None and link is not None  # UPDATE; a link outlives it
            before, held.version = held.version, None
            try:
                # Each bucket, and the words before and after, have the link's own deadline.
                extra = link.timeout * (len(manifest.buckets) + 4)
                self._call("receive", manifest, extra=extra)
            except BaseException as error:
                held.close_update()
                if isinstance(error, ManifestMismatch):
                    held.version = before
                raise
            held.received = True

    def end_update(self, version: Version | None) -> None:
        """Close the update; see `Engine.end_update`."""
        needs = [UPDATE] if version is None else [UPDATE, RECEIVED]
        with self._admission.alone("end_update", *needs) as held:
            held.close_update()
            if version is not None:
                held.version = Version(*version)

    def flush(self) -> None:
        """Drop every cached key and value; see `Engine.flush`."""
        with self._admission.alone("flush"):
            self._call("flush")

    def reset_weights(self) -> None:
        """Set all weights to zero; torn; see `Engine.reset_weights`."""
        with self._admission.alone("reset_weights", Tag.WEIGHTS, absent=UPDATE) as held:
            held.version = None
            self._call("reset_weights")

    def version(self) -> Version | None:
        """Return the version that is served; see `Engine.version`."""
        self._living("version")
        return self._admission.holdings.version

    def health(self) -> Health:
        """Ask the engine process how it is; see `Engine.health`."""
        process = self._living("health")
        vitals = self._call("vitals")
        admission, held = self._admission, self._admission.holdings
        return Health(
            process.pid,
            frozenset(held.tags),
            held.version,
            admission.paused,
            len(admission.in_flight),
            held.update is not None,
            *vitals,
        )

    def specs(self) -> list[TensorSpec]:
        """Describe every tensor of an update; see `Engine.specs`."""
        self._living("specs")
        return list(self._specs or ())

    def checksums(self) -> Mapping[str, str]:
        """Return a checksum per tensor of ``specs``; see `Engine.checksums`."""
        with self._admission.alone("checksums", Tag.WEIGHTS):
            return dict(self._call("checksums"))

    def _living(self, asked: str) -> EngineProcess:
        process = self._process
        if process is not None and process.ended is not None:
            raise EngineFailed(f"{self.name}: {process.ended}; stop and start it anew")
        if process is None or self._specs is None:
            raise Refused(self.name, "disconnected", asked, ["not started"], "start")
        return process

    def _call(self, method: str, *arguments: Any, extra: float = 0.0) -> Any:
        timeout = self._config.call_timeout + extra
        return self._living(method).call(method, *arguments, timeout=timeout)


if TYPE_CHECKING:
    _keeps_the_contract: type[Engine] = EmbeddedEngine
