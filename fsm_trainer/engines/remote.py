"""What every engine of ours does alike: admission, then a call to where the model lives.

Imports no torch. See `contract` for what each method promises, `admission` for what is refused.
"""

from __future__ import annotations

import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as FutureTimeout
from typing import TYPE_CHECKING, Any

from fsm_trainer.engines.admission import LINK, RECEIVED, UPDATE, Admission
from fsm_trainer.engines.config import EngineSettings
from fsm_trainer.engines.contract import Completion, Health, PauseMode, Request, Tag
from fsm_trainer.engines.limits import Limits
from fsm_trainer.engines.process import Server
from fsm_trainer.machine.errors import (
    DeadlineExceeded,
    EngineFailed,
    ManifestMismatch,
    Refused,
)
from fsm_trainer.machine.version import Version

if TYPE_CHECKING:
    from fsm_trainer.groups.membership import Membership
    from fsm_trainer.sync.manifest import Manifest, TensorSpec


class RemoteEngine(ABC):
    """An `Engine` for the causal language model in a folder (Hugging Face layout).

    Only the folder's configuration is read: weights come over a link.
    """

    def __init__(self, name: str, model: str | os.PathLike[str], config: EngineSettings) -> None:
        #: The worker that this engine serves.
        self.name = name
        self._model, self._settings = os.fspath(model), config
        self._life = threading.Lock()
        self._server: Server | None = None
        self._admission = Admission(name, self._living)
        self._specs: list[TensorSpec] | None = None

    @abstractmethod
    def _launch(self) -> Server:
        """Begin to start a server; returns at once."""

    @abstractmethod
    def _bring_up(self, server: Server) -> list[TensorSpec]:
        """Wait until the server is up and sleeps; the tensors that it takes."""

    def start(self) -> None:
        """Bring the engine up, sleeping; see `Engine.start`."""
        limits = Limits.of(self._model)
        with self._life:
            if self._server is not None and self._server.ended is None:
                raise Refused(self.name, "started", "start", ["already started"], "stop it first")
            self._admission, self._specs = Admission(self.name, self._living), None
            self._limits = limits
            server = self._server = self._launch()
        try:
            specs = self._bring_up(server)
        except BaseException:
            server.kill()
            with self._life:
                if self._server is server:
                    self._server = None
            raise
        self._specs = specs

    def stop(self) -> None:
        """End the engine and all it holds; see `Engine.stop`."""
        with self._life:
            server, self._server = self._server, None
        if server is not None:
            server.kill()

    def generate(
        self, requests: Sequence[Request], timeout: float | None = None
    ) -> list[Completion]:
        """Continue each prompt; see `Engine.generate`."""
        server = self._living("generate")
        ids = [request.id for request in requests]
        if not ids:
            return []
        limit = self._settings.generate_timeout if timeout is None else timeout
        for request in requests:
            self._limits.check(request)
        with self._admission.serving(ids) as version:
            future = server.submit("generate", list(requests), version)
            try:
                completions: list[Completion] = future.result(limit)
            except FutureTimeout:
                raise DeadlineExceeded(
                    f"{self.name}: {len(ids)} requests ({ids[0]} …) were not done within "
                    f"{limit:g} s and were aborted; give more time, or fewer tokens"
                ) from None
            finally:
                if not future.done():
                    self._end(server, future, frozenset(ids))
        self._living("generate")  # what came back as it ended may be of other weights
        return completions

    def _end(self, server: Server, future: Future[Any], ids: frozenset[str]) -> None:
        """Abort until it is over: an abort may overtake the requests that it means."""
        until = time.monotonic() + self._settings.call_timeout
        while not future.done() and server.ended is None:
            if time.monotonic() > until:
                return server.kill()
            server.submit("abort", ids)
            wait([future], 1.0)

    def abort(self, ids: Collection[str] | None = None) -> None:
        """End requests in flight; see `Engine.abort`."""
        self._call("abort", None if ids is None else frozenset(ids))

    def pause(self, mode: PauseMode) -> None:
        """Refuse new requests and stop those in flight; see `Engine.pause`."""
        self._admission.pause(PauseMode(mode))
        try:
            self._call("pause", PauseMode(mode))
        except BaseException:
            self._admission.paused = None
            raise

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
        """Ask the engine how it is; see `Engine.health`."""
        server = self._living("health")
        vitals = self._call("vitals")
        admission, held = self._admission, self._admission.holdings
        return Health(
            server.pid,
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

    def _living(self, asked: str) -> Server:
        server = self._server
        if server is not None and server.ended is not None:
            raise EngineFailed(f"{self.name}: {server.ended}; stop and start it anew")
        if server is None or self._specs is None:
            raise Refused(self.name, "disconnected", asked, ["not started"], "start")
        return server

    def _call(self, method: str, *arguments: Any, extra: float = 0.0) -> Any:
        timeout = self._settings.call_timeout + extra
        return self._living(method).call(method, *arguments, timeout=timeout)
