"""The preconditions of the engine contract, kept where the calls are made.

Every engine has one `Admission`: it knows what the engine holds, so a refusal costs no round trip,
and two engines can't differ in what they refuse. It knows no engine and no torch.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fsm_trainer.engines.contract import PauseMode, Tag
from fsm_trainer.machine.errors import DeadlineExceeded, Refused
from fsm_trainer.machine.version import Version

if TYPE_CHECKING:
    from fsm_trainer.groups.membership import Membership
    from fsm_trainer.sync.manifest import Manifest


@dataclass
class Holdings:
    """What an engine holds; written only inside an operation of `Admission`."""

    tags: set[Tag] = field(default_factory=set)
    version: Version | None = None
    link: Membership | None = None
    update: Manifest | None = None
    received: bool = False

    def close_update(self) -> None:
        """End the update, if one is open, without a version of its own."""
        self.update, self.received = None, False


class Admission:
    """Admits requests side by side, and every other operation alone; refuses at once."""

    def __init__(self, worker: str) -> None:
        self.worker = worker
        self.holdings = Holdings()
        self._changed = threading.Condition()
        self._in_flight: set[str] = set()
        self._operation: str | None = None
        self._paused: PauseMode | None = None
        self._draining = False

    @property
    def paused(self) -> PauseMode | None:
        """How the engine is paused, if it is."""
        return self._paused

    @property
    def in_flight(self) -> frozenset[str]:
        """The ids of the requests that have begun and not ended."""
        with self._changed:
            return frozenset(self._in_flight)

    @contextmanager
    def serving(self, ids: Sequence[str]) -> Iterator[Version]:
        """Admit requests, or raise Refused; gives the version that serves them."""
        with self._changed:
            because = self._why_not_serving()
            again = self._in_flight.intersection(ids)
            if again or len(set(ids)) != len(ids):
                because.append(f"ids are not unique: {sorted(again or ids)[:5]}")
            version = self.holdings.version
            if because or version is None:
                raise self._refused(
                    "generate", because, "weights, KV cache, a complete update, not paused"
                )
            self._in_flight.update(ids)
        try:
            yield version
        finally:
            with self._changed:
                self._in_flight.difference_update(ids)
                self._changed.notify_all()

    @contextmanager
    def alone(
        self,
        asked: str,
        *,
        tags: Sequence[Tag] = (),
        absent: Sequence[Tag] = (),
        link: bool | None = None,
        update: bool | None = None,
        received: bool | None = None,
    ) -> Iterator[Holdings]:
        """Admit one operation that excludes requests and all others, or raise Refused.

        ``tags`` must be held and ``absent`` must not; ``link``, ``update`` and ``received`` say
        whether a link, an open update, and its tensors must be there (None: either).
        """
        with self._changed:
            held = self.holdings
            because = [f"{tag} not held" for tag in tags if tag not in held.tags]
            because += [f"{tag} already held" for tag in absent if tag in held.tags]
            because += _presence("a link", held.link is not None, link)
            because += _presence("an update", held.update is not None, update)
            because += _presence("what the update sends", held.received, received)
            if self._operation:
                because.append(f"{self._operation!r} is running")
            if self._in_flight:
                because.append(f"{len(self._in_flight)} requests in flight")
            if because:
                raise self._refused(asked, because, _remedy(bool(self._in_flight), self._operation))
            self._operation = asked
        try:
            yield held
        finally:
            with self._changed:
                self._operation = None
                self._changed.notify_all()

    @contextmanager
    def pausing(self, mode: PauseMode) -> Iterator[None]:
        """Refuse requests from now on; undone when the block raises."""
        with self._changed:
            if self._paused is not None:
                raise self._refused(f"pause({mode})", [f"already paused ({self._paused})"])
            self._paused = mode
        try:
            yield
        except BaseException:
            self._paused = None
            raise

    @contextmanager
    def unpausing(self) -> Iterator[None]:
        """Admit requests again once the block has succeeded."""
        with self._changed:
            if self._paused is None:
                raise self._refused("unpause", ["not paused"])
        yield
        with self._changed:
            self._paused = None

    def drain(self, timeout: float) -> None:
        """Wait up to ``timeout`` seconds until nothing is in flight; refuse requests meanwhile."""
        deadline = time.monotonic() + timeout
        with self._changed:
            if self._paused is PauseMode.IN_PLACE and self._in_flight:
                raise self._refused(
                    "drain", [f"{len(self._in_flight)} requests held in place"], "unpause or abort"
                )
            self._draining = True
            try:
                while self._in_flight:
                    left = deadline - time.monotonic()
                    if left <= 0:
                        raise DeadlineExceeded(
                            f"{self.worker}: {len(self._in_flight)} requests still in flight after "
                            f"{timeout:g} s of draining; abort them, or give more time"
                        )
                    self._changed.wait(left)
            finally:
                self._draining = False

    def _why_not_serving(self) -> list[str]:
        held = self.holdings
        because = [f"{tag} not held" for tag in Tag if tag not in held.tags]
        if Tag.WEIGHTS in held.tags and held.version is None:
            because.append("the weights are torn")
        if held.update is not None:
            because.append("an update is open")
        if self._paused is not None:
            because.append(f"paused ({self._paused})")
        if self._draining:
            because.append("draining")
        if self._operation:
            because.append(f"{self._operation!r} is running")
        return because

    def _refused(self, asked: str, because: Sequence[str], needs: str = "") -> Refused:
        return Refused(self.worker, self.describe(), asked, because, needs)

    def describe(self) -> str:
        """What the engine holds, in words, as errors show it."""
        held = self.holdings
        parts = [str(tag) for tag in Tag if tag in held.tags]
        if held.link is not None:
            parts.append(f"link {held.link.link} epoch {held.link.epoch}")
        return "holding " + ", ".join(parts) if parts else "sleeping"


def _presence(what: str, present: bool, wanted: bool | None) -> list[str]:
    if wanted is None or wanted is present:
        return []
    return [f"{what} is missing" if wanted else f"{what} is already there"]


def _remedy(in_flight: bool, operation: str | None) -> str:
    if in_flight:
        return "drain or abort the requests first"
    return f"{operation!r} to end" if operation else ""
