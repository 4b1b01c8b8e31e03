"""What a rollout engine promises: one protocol, which every engine implements alike.

An engine is a process of its own that holds, at any time, some of: weights, KV cache, a link.
Every method may be called from any thread, and each ends in bounded time. The preconditions are
checked before anything moves; where one is false the call raises
:class:`~fsm_trainer.machine.errors.Refused` at once and the engine stays as it was. When the
engine process is gone, pending and later calls raise
:class:`~fsm_trainer.machine.errors.EngineFailed` at once (``stop`` and ``start`` don't).

Weights are *torn*, ``version() is None``, from the moment when they are materialised, reset or
touched by an update, until a complete update ends. Torn weights are never served.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from fsm_trainer.machine.errors import DataError
from fsm_trainer.machine.version import Version

if TYPE_CHECKING:
    from fsm_trainer.groups.membership import Membership
    from fsm_trainer.sync.manifest import Manifest, TensorSpec


class Tag(StrEnum):
    """What an engine acquires and releases on its device."""

    WEIGHTS = "weights"
    KV = "kv"


class PauseMode(StrEnum):
    """What becomes of the requests in flight when an engine pauses.

    ``ABORT`` and ``RETRACT`` end them as aborted, with the tokens that they have; a retracted
    request is never continued, since that would mix two versions in one completion. ``IN_PLACE``
    holds them between two tokens until ``unpause``.
    """

    ABORT = "abort"
    RETRACT = "retract"
    IN_PLACE = "in_place"


class Finish(StrEnum):
    """Why a completion ended: a stop token, its token limit, or an abort."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to continue; the tokens drawn depend on these fields and the weights alone.

    ``temperature`` 0 is greedy. ``stop`` holds the token ids that end the completion, beside the
    model's own end tokens; where it is empty only the limit ends it. Raises ``DataError`` when a
    field is out of its range.
    """

    id: str
    tokens: tuple[int, ...]
    max_new_tokens: int
    temperature: float = 1.0
    seed: int = 0
    stop: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for holds, problem in (
            (len(self.tokens) > 0, "the prompt is empty; give at least one token"),
            (self.max_new_tokens >= 1, f"max_new_tokens is {self.max_new_tokens}, not 1 or more"),
            (
                0.0 <= self.temperature < float("inf"),
                f"temperature is {self.temperature}; it must be finite, and 0 (greedy) or more",
            ),
            (0 <= self.seed < 2**64, f"seed {self.seed} is not in [0, 2**64)"),
        ):
            if not holds:
                raise DataError(f"request {self.id}: {problem}")


@dataclass(frozen=True, slots=True)
class Completion:
    """What was generated for a request, the stop token included.

    ``tokens`` and ``logprobs`` (natural logarithm, at the sampling temperature; at temperature 1
    for a greedy request) have equal lengths. ``version`` names the weights that drew every token.
    """

    id: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: Finish
    version: Version


@dataclass(frozen=True, slots=True)
class Health:
    """How an engine stands; memory in bytes, read in the engine process itself.

    ``groups`` are the process groups that torch has registered there, ``epoch`` is that of the
    lease held, if any.
    """

    pid: int
    held: frozenset[Tag]
    version: Version | None
    paused: PauseMode | None
    in_flight: int
    updating: bool
    epoch: int | None
    groups: tuple[str, ...]
    resident_bytes: int
    device_bytes: int


class Engine(Protocol):
    """The contract; see the module's text for what holds for every method."""

    @property
    def name(self) -> str:
        """The worker that this engine serves, as errors name it."""

    def start(self) -> None:
        """Bring the engine process up, sleeping: nothing on the device, no link, no version.

        Pre: no live engine process (else Refused). Raises ConfigError for a folder without a
        model, CapabilityMissing where the model or a library can't be served here,
        DeadlineExceeded when it is not up in time; then nothing of it is left.
        """

    def stop(self) -> None:
        """End the engine process and all it holds; legal always, and more than once.

        Post: no process is left. Requests in flight raise EngineFailed.
        """

    def generate(
        self, requests: Sequence[Request], timeout: float | None = None
    ) -> list[Completion]:
        """Continue each prompt; completions come in the order of the requests.

        Pre: weights and KV cache are held, the version is not torn, the engine is not paused,
        draining, updating or moving, and none of the ids is in flight. ``timeout`` in seconds;
        when it passes, what is unfinished is aborted and DeadlineExceeded is raised. Raises
        DataError for a prompt that the model can't take.
        """

    def abort(self, ids: Collection[str] | None = None) -> None:
        """End the requests with these ids (None: all in flight) between two tokens.

        They return from ``generate`` with ``Finish.ABORT`` and the tokens so far; unknown ids are
        ignored, since a request may just have ended.
        """

    def pause(self, mode: PauseMode) -> None:
        """Refuse new requests and stop those in flight as ``mode`` says.

        Pre: not paused. Post: no token is drawn until ``unpause``.
        """

    def unpause(self) -> None:
        """Take requests again and go on with what is held in place. Pre: paused."""

    def drain(self, timeout: float) -> None:
        """Wait until no request is in flight, refusing new ones meanwhile.

        Pre: not paused in place with requests held. Raises DeadlineExceeded after ``timeout``
        seconds; the requests then go on.
        """

    def acquire(self, tag: Tag) -> None:
        """Put weights (zeros: torn) or the KV cache on the device.

        Pre: not held (a second resume is Refused), nothing in flight.
        """

    def release(self, tag: Tag) -> None:
        """Give the memory of weights or KV cache back to the device and the system.

        Pre: held, no request in flight (drain first); for weights, no link (leave first).
        Post of releasing weights: torn.
        """

    def join(self, membership: Membership) -> None:
        """Open the lease of this membership in the engine process.

        Pre: weights held, no link held, nothing in flight. Raises PeerLost when the members don't
        all arrive within ``membership.timeout`` seconds; then no link is held.
        """

    def leave(self) -> None:
        """Close the lease. Pre: a link is held, nothing in flight.

        An update that is open ends as by ``end_update(None)``.
        """

    def revoke(self) -> None:
        """Make the lease worthless at once, also while a collective runs on it.

        A running ``receive`` ends with LeaseExpired or PeerLost within the lease's timeout. The
        link stays held until ``leave``. Without a link this does nothing.
        """

    def begin_update(self, manifest: Manifest) -> None:
        """Open an update. Pre: weights and link held, no update open, nothing in flight.

        Raises ManifestMismatch, before any byte moves and with no update open, when names, shapes
        or dtypes differ from ``specs``.
        """

    def receive(self) -> None:
        """Receive every bucket of the manifest into the weights.

        Pre: an update is open and has not received. Torn from here on. When it fails the update
        is closed and the weights stay torn; raises LeaseExpired, PeerLost, SelfCheckFailed (other
        bytes came than were sent), or ActionFailed. Raises ManifestMismatch when the sender holds
        another manifest: then nothing was received, and the version stays.
        """

    def end_update(self, version: Version | None) -> None:
        """Close the update; the weights are of this version from now on.

        Pre: an update is open and, for a version, ``receive`` has succeeded. None gives the
        update up: the old version stays if no byte has moved, else the weights are torn.
        """

    def flush(self) -> None:
        """Drop every cached key and value. Pre: nothing in flight."""

    def reset_weights(self) -> None:
        """Set all weights to zero, so that a push can be verified; torn.

        Pre: weights held, no update open, nothing in flight.
        """

    def version(self) -> Version | None:
        """The version that is served, or None where there are no weights or they are torn."""

    def health(self) -> Health:
        """Ask the engine process how it is; answers during generations and collectives too."""

    def specs(self) -> list[TensorSpec]:
        """Name, dtype and shape of every tensor of an update, tied weights once.

        Pre: started; the engine may sleep.
        """

    def checksums(self) -> Mapping[str, str]:
        """A checksum per tensor of ``specs``, as ``sync.checksums``. Pre: weights held."""
