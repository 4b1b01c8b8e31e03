"""What a rollout engine promises: one class, of which every engine is one.

An engine is a process of its own that holds, at any time, some of: weights, KV cache, a link.
Every method may be called from any thread, and each ends in bounded time. The preconditions are
checked before anything moves; where one is false the call raises
:class:`~fsm_trainer.machine.errors.Refused` at once and the engine stays as it was. When the
engine process is gone, pending and later calls raise
:class:`~fsm_trainer.machine.errors.EngineFailed` at once (``stop`` and ``start`` don't).

Weights are *torn*, ``version() is None``, from the moment when they are materialised, reset or
touched by an update, until a complete update ends. Torn weights are never served.

All of that is here, once: admission, then a call to where the model lives. An engine adds how its
server comes up. Imports no torch.
"""

from __future__ import annotations

import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsm_trainer.data.routing import Routing
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


class Engine(ABC):
    """An engine for the causal language model in a folder (Hugging Face layout).

    Only the folder's configuration is read: weights come over a link. The module's text says what
    holds for every method.
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
        """Bring the engine process up, sleeping: nothing on the device, no link, no version.

        Pre: no live engine process (else Refused). Raises ConfigError for a folder without a
        model, CapabilityMissing where the model or a library can't be served here,
        DeadlineExceeded when it is not up in time; then nothing of it is left.
        """
        limits = Limits.of(self._model)
        if self._settings.routing_replay:
            Routing.of(Path(self._model))
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
        """End the engine process and all it holds; legal always, and more than once.

        Post: no process is left. Requests in flight raise EngineFailed.
        """
        with self._life:
            server, self._server = self._server, None
        if server is not None:
            server.kill()

    def generate(
        self, requests: Sequence[Request], timeout: float | None = None
    ) -> list[Completion]:
        """Continue each prompt; completions come in the order of the requests.

        Pre: weights and KV cache are held, the version is not torn, the engine is not paused,
        draining, updating or moving, and none of the ids is in flight. ``timeout`` in seconds;
        when it passes, what is unfinished is aborted and DeadlineExceeded is raised. Raises
        DataError for a prompt that the model can't take.
        """
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
        """End the requests with these ids (None: all in flight) between two tokens.

        They return from ``generate`` with ``Finish.ABORT`` and the tokens so far; unknown ids are
        ignored, since a request may just have ended.
        """
        self._call("abort", None if ids is None else frozenset(ids))

    def pause(self, mode: PauseMode) -> None:
        """Refuse new requests and stop those in flight as ``mode`` says.

        Pre: not paused. Post: no token is drawn until ``unpause``.
        """
        self._admission.pause(PauseMode(mode))
        try:
            self._call("pause", PauseMode(mode))
        except BaseException:
            self._admission.paused = None
            raise

    def unpause(self) -> None:
        """Take requests again and go on with what is held in place. Pre: paused."""
        with self._admission.unpausing():
            self._call("unpause")

    def drain(self, timeout: float) -> None:
        """Wait until no request is in flight, refusing new ones meanwhile.

        Pre: not paused in place with requests held. Raises DeadlineExceeded after ``timeout``
        seconds; the requests then go on.
        """
        self._admission.drain(timeout)

    def acquire(self, tag: Tag) -> None:
        """Put weights (zeros: torn) or the KV cache on the device.

        Pre: not held (a second resume is Refused), nothing in flight.
        """
        with self._admission.alone(f"acquire({tag})", absent=tag) as held:
            self._call("acquire", Tag(tag))
            held.tags.add(Tag(tag))

    def release(self, tag: Tag) -> None:
        """Give the memory of weights or KV cache back to the device and the system.

        Pre: held, no request in flight (drain first); for weights, no link (leave first).
        Post of releasing weights: torn.
        """
        weights = tag == Tag.WEIGHTS
        with self._admission.alone(f"release({tag})", tag, absent=LINK if weights else "") as held:
            if weights:
                held.version = None
            self._call("release", Tag(tag))
            held.tags.discard(Tag(tag))

    def join(self, membership: Membership) -> None:
        """Open the lease of this membership in the engine process.

        Pre: weights held, no link held, nothing in flight. Raises PeerLost when the members don't
        all arrive within ``membership.timeout`` seconds; then no link is held.
        """
        with self._admission.alone("join", Tag.WEIGHTS, absent=LINK) as held:
            self._call("join", membership, extra=2 * membership.timeout)
            held.link = membership

    def leave(self) -> None:
        """Close the lease. Pre: a link is held, nothing in flight.

        An update that is open ends as by ``end_update(None)``.
        """
        with self._admission.alone("leave", LINK) as held:
            held.close_update()
            self._call("leave")
            held.link = None

    def revoke(self) -> None:
        """Make the lease worthless at once, also while a collective runs on it.

        A running ``receive`` ends with LeaseExpired or PeerLost within the lease's timeout. The
        link stays held until ``leave``. Without a link this does nothing.
        """
        self._call("revoke")

    def begin_update(self, manifest: Manifest) -> None:
        """Open an update. Pre: weights and link held, no update open, nothing in flight.

        Raises ManifestMismatch, before any byte moves and with no update open, when names, shapes
        or dtypes differ from ``specs``.
        """
        with self._admission.alone("begin_update", Tag.WEIGHTS, LINK, absent=UPDATE) as held:
            manifest.check(self.specs())
            held.update = manifest

    def receive(self) -> None:
        """Receive every bucket of the manifest into the weights.

        Pre: an update is open and has not received. Torn from here on. When it fails the update
        is closed and the weights stay torn; raises LeaseExpired, PeerLost, SelfCheckFailed (other
        bytes came than were sent), or ActionFailed. Raises ManifestMismatch when the sender holds
        another manifest: then nothing was received, and the version stays.
        """
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
        """Close the update; the weights are of this version from now on.

        Pre: an update is open and, for a version, ``receive`` has succeeded. None gives the
        update up: the old version stays if no byte has moved, else the weights are torn.
        """
        needs = [UPDATE] if version is None else [UPDATE, RECEIVED]
        with self._admission.alone("end_update", *needs) as held:
            held.close_update()
            if version is not None:
                held.version = Version(*version)

    def flush(self) -> None:
        """Drop every cached key and value. Pre: nothing in flight."""
        with self._admission.alone("flush"):
            self._call("flush")

    def reset_weights(self) -> None:
        """Set all weights to zero, so that a push can be verified; torn.

        Pre: weights held, no update open, nothing in flight.
        """
        with self._admission.alone("reset_weights", Tag.WEIGHTS, absent=UPDATE) as held:
            held.version = None
            self._call("reset_weights")

    def version(self) -> Version | None:
        """The version that is served, or None where there are no weights or they are torn."""
        self._living("version")
        return self._admission.holdings.version

    def health(self) -> Health:
        """Ask the engine process how it is; answers during generations and collectives too."""
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
        """Name, dtype and shape of every tensor of an update, tied weights once.

        Pre: started; the engine may sleep.
        """
        self._living("specs")
        return list(self._specs or ())

    def checksums(self) -> Mapping[str, str]:
        """A checksum per tensor of ``specs``, as ``sync.checksums``. Pre: weights held."""
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
