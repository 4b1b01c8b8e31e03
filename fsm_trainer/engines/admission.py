"""The preconditions of the engine contract, kept where the calls are made.

Every engine has one `Admission`: it knows what the engine holds, so a refusal costs no round trip,
and two engines can't differ in what they refuse. It knows no engine and no torch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fsm_trainer.engines.contract import PauseMode, Tag
from fsm_trainer.machine.errors import DeadlineExceeded, Refused
from fsm_trainer.machine.version import Version

if TYPE_CHECKING:
    from fsm_trainer.groups.membership import Membership
    from fsm_trainer.sync.manifest import Manifest


LINK, UPDATE, RECEIVED = "link", "update", "the update's tensors"
"""What an operation may need or exclude, beside the tags."""


@dataclass
class Holdings:
    """What an engine holds; written only inside an operation of `Admission`."""

    tags: set[Tag] = field(default_factory=set)
    version: Version | None = None
    link: Membership | None = None
    update: Manifest | None = None
    received: bool = False

    def names(self) -> list[str]:
        """What is held, in words."""
        rest = {LINK: self.link is not None, UPDATE: self.update is not None}
        rest[RECEIVED] = self.received
        return [tag for tag in Tag if tag in self.tags] + [name for name in rest if rest[name]]

    def close_update(self) -> None:
        """End the update, if one is open, without a version of its own."""
        self.update, self.received = None, False


class Admission:
    """Admits requests side by side, and every other operation alone; refuses at once.

    ``living`` raises when there is no engine process to serve what it is given the name of.
    """

    def __init__(self, worker: str, living: Callable[[str], object]) -> None:
        self.worker, self._living = worker, living
        self.holdings = Holdings()
        self.paused: PauseMode | None = None
        self.in_flight: set[str] = set()
        self._changed = threading.Condition()
        self._operation: str | None = None
        self._draining = False

    @contextmanager
    def serving(self, ids: Sequence[str]) -> Iterator[Version]:
        """Admit requests, or raise Refused; gives the version that serves them."""
        self._living("generate")
        with self._changed:
            held = self.holdings
            because = [f"{tag} not held" for tag in Tag if tag not in held.tags]
            if Tag.WEIGHTS in held.tags and held.version is None:
                because.append("the weights are torn")
            if held.update is not None:
                because.append("an update is open")
            if self.paused is not None:
                because.append(f"paused ({self.paused})")
            if self._draining:
                because.append("draining")
            if self._operation:
                because.append(f"{self._operation!r} is running")
            again = self.in_flight.intersection(ids)
            if again or len(set(ids)) != len(ids):
                because.append(f"ids are not unique: {sorted(again or ids)[:5]}")
            if because or held.version is None:
                raise self._refused(
                    "generate", *because, needs="weights, KV cache, a complete update, not paused"
                )
            self.in_flight.update(ids)
        try:
            yield held.version
        finally:
            with self._changed:
                self.in_flight.difference_update(ids)
                self._changed.notify_all()

    @contextmanager
    def alone(self, asked: str, *needs: str, absent: str = "") -> Iterator[Holdings]:
        """Admit one operation that excludes requests and all others, or raise Refused.

        All of ``needs`` must be held (tags, ``LINK``, ``UPDATE``, ``RECEIVED``), and ``absent``
        must not.
        """
        self._living(asked)
        with self._changed:
            names = self.holdings.names()
            because = [f"{name} not held" for name in needs if name not in names]
            if absent in names:
                because.append(f"{absent} already held")
            if self._operation:
                because.append(f"{self._operation!r} is running: let it end")
            if self.in_flight:
                because.append(f"{len(self.in_flight)} requests in flight: drain or abort them")
            if because:
                raise self._refused(asked, *because)
            self._operation = asked
        try:
            yield self.holdings
        finally:
            with self._changed:
                self._operation = None

    def pause(self, mode: PauseMode) -> None:
        """Refuse requests from now on."""
        self._living("pause")
        with self._changed:
            if self.paused is not None:
                raise self._refused(f"pause({mode})", f"already paused ({self.paused})")
            self.paused = mode

    @contextmanager
    def unpausing(self) -> Iterator[None]:
        """Admit requests again once the block has succeeded."""
        self._living("unpause")
        if self.paused is None:
            raise self._refused("unpause", "not paused")
        yield
        self.paused = None

    def drain(self, timeout: float) -> None:
        """Wait up to ``timeout`` seconds until nothing is in flight; refuse requests meanwhile."""
        self._living("drain")
        with self._changed:
            if self.paused is PauseMode.IN_PLACE and self.in_flight:
                held = f"{len(self.in_flight)} requests held in place"
                raise self._refused("drain", held, needs="unpause or abort")
            self._draining = True
            try:
                done = self._changed.wait_for(lambda: not self.in_flight, timeout)
            finally:
                self._draining = False
            if not done:
                raise DeadlineExceeded(
                    f"{self.worker}: {len(self.in_flight)} requests still in flight after "
                    f"{timeout:g} s of draining; abort them, or give more time"
                )
        self._living("drain")

    def _refused(self, asked: str, *because: str, needs: str = "") -> Refused:
        names = self.holdings.names()
        state = f"holding {', '.join(names)}" if names else "sleeping"
        return Refused(self.worker, state, asked, because, needs)
