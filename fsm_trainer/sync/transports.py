"""Transports: how one flat bucket gets from the sender's memory into the receivers'.

The words of a push (`push`) go over the lease whatever the transport is, and with them epoch,
deadlines and abort. Both ends have two buckets: while one travels, the next is packed.
"""

from __future__ import annotations

import errno
import json
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from fsm_trainer.groups.lease import WATCH, Lease, Pending
from fsm_trainer.machine.errors import (
    ActionFailed,
    LeaseExpired,
    ManifestMismatch,
    SelfCheckFailed,
)
from fsm_trainer.sync.buckets import AHEAD, TRAILER, Parcel, settle, travelling_bytes, warm
from fsm_trainer.sync.checksums import raw_bytes
from fsm_trainer.sync.manifest import Manifest
from fsm_trainer.sync.memory import OFFER, attach, shared


class Transport(ABC):
    """One end of the way that buckets take, for one lease; rank 0 sends.

    Calls are collective; :meth:`drop` alone may come at any time, from any thread.
    """

    def __init__(self, lease: Lease) -> None:
        self._lease, self._device = lease, torch.device(lease.device)
        self._both: torch.Tensor | None = None
        self._made: tuple[Manifest, list[Parcel]] | None = None
        self.loads: dict[int, Callable[[], None]] = {}
        """How to load each bucket, by its index, for as long as the buckets stay."""

    def warm(self, manifest: Manifest | None) -> list[Parcel]:
        """Make ready for a push, which ``manifest`` describes if it is as the last one was.

        Returns the buckets that are made, if any can be before all ends agree.
        """
        warm(self._device)
        return []

    def known(self, manifest: Manifest) -> Manifest:
        """The same manifest as of the push before, if it is: that one has counted its buckets."""
        made = self._made
        return made[0] if made is not None and made[0].digest == manifest.digest else manifest

    def fits(self, manifest: Manifest) -> bool:
        """Whether the two buckets that are there are large enough."""
        return self._both is not None and self._both.numel() >= 2 * _stride(manifest)

    def prepare(self, manifest: Manifest) -> None:
        """Make room for two buckets; called on all ends where one doesn't fit."""
        self._forget()  # before the new ones: four at once may be too much
        self._both = torch.empty(2 * _stride(manifest), dtype=torch.uint8, device=self._device)

    @abstractmethod
    def outgoing(self, manifest: Manifest, tally: Callable[[Parcel], None]) -> Iterator[Parcel]:
        """Give each bucket to be filled; when the next is asked for, send and ``tally`` it."""

    @abstractmethod
    def incoming(self, manifest: Manifest) -> Iterator[Parcel]:
        """Give each bucket as it comes; it is good until the next is asked for."""

    def drop(self) -> None:
        """Let go of all memory, mappings and files."""
        self._forget()

    def _forget(self) -> None:
        self._both = self._made = None
        self.loads.clear()

    def _parcels(self, manifest: Manifest) -> list[Parcel]:
        both, lease, made = self._both, self._lease, self._made
        if both is None:
            lease.barrier()  # it raises: buffers go with their lease, and it knows why
            raise LeaseExpired(lease.link, lease.epoch, "it ended within a push")
        if made is None or made[0] is not manifest:
            self.loads.clear()
            half = both.numel() // 2
            parcels = [
                Parcel(index, bucket, both[index % 2 * half :][: travelling_bytes(bucket)])
                for index, bucket in enumerate(manifest.buckets)
            ]
            made = self._made = manifest, parcels
        return made[1]


class GroupTransport(Transport):
    """``group``: broadcasts over the lease's own group, NCCL's or gloo's."""

    def warm(self, manifest: Manifest | None) -> list[Parcel]:
        super().warm(manifest)
        if manifest is None:
            return []
        self.prepare(manifest)
        return [parcel for parcel in self._parcels(manifest) if parcel.views]

    # What is queued on a device comes after the broadcasts that it needs, and the host runs ahead:
    # when it waited for each broadcast, a fast link stood still for half of the time.

    def outgoing(self, manifest: Manifest, tally: Callable[[Parcel], None]) -> Iterator[Parcel]:
        sent: list[Pending] = []
        for parcel in self._parcels(manifest):
            if parcel.index >= 2:
                sent[parcel.index - 2].before_next()  # it is in the memory of this one
            yield parcel
            sent.append(self._lease.start_broadcast(parcel.flat))
            tally(parcel)  # while it travels: both only read it, and receivers get their own bytes
            if parcel.index >= AHEAD:
                sent[parcel.index - AHEAD].wait()
        for pending in sent[-AHEAD:]:
            pending.wait()

    def incoming(self, manifest: Manifest) -> Iterator[Parcel]:
        parcels = self._parcels(manifest)
        coming = [self._lease.start_broadcast(parcel.flat) for parcel in parcels[:2]]
        for parcel in parcels:
            if parcel.index >= AHEAD:
                # With the lease's deadline, before anybody waits for what is queued behind it.
                coming[parcel.index - AHEAD].wait()
            coming[parcel.index].before_next()
            yield parcel
            coming.extend(
                self._lease.start_broadcast(later.flat)
                for later in parcels[parcel.index + 2 : parcel.index + 3]
            )
        for pending in coming[-AHEAD:]:
            pending.wait()


class _Reached(Transport):
    """The bucket lies where all ends reach it, and the lease says when.

    In this order on all ends: bucket 0 is there, 1 is there, 0 was taken, 2 is there, 1 was taken …
    """

    def outgoing(self, manifest: Manifest, tally: Callable[[Parcel], None]) -> Iterator[Parcel]:
        for parcel in self._parcels(manifest):
            if parcel.index >= 2:
                self._lease.barrier()
            yield parcel
            tally(parcel)  # before: receivers may read this memory, and would see the same bit flip
            self._put(parcel)
            self._lease.broadcast(parcel.trailer)
        for _ in manifest.buckets[:2]:
            self._lease.barrier()
        self._clear()

    def incoming(self, manifest: Manifest) -> Iterator[Parcel]:
        parcels, taken = self._parcels(manifest), None
        words = [torch.zeros(TRAILER, dtype=torch.uint8) for _ in parcels]
        coming = [self._lease.start_broadcast(word) for word in words[:1]]
        for parcel, word in zip(parcels, words, strict=True):
            coming[parcel.index].wait()
            later = words[parcel.index + 1 : parcel.index + 2]
            coming.extend(self._lease.start_broadcast(each) for each in later)
            yield self._get(parcel, word)
            settle(self._lease.device)
            if taken is not None:
                taken.wait()
            taken = self._lease.start_barrier()
        if taken is not None:
            taken.wait()

    @abstractmethod
    def _put(self, parcel: Parcel) -> None:
        """Have the bucket where the receivers reach it."""

    def _get(self, parcel: Parcel, word: torch.Tensor) -> Parcel:
        """Reach it, given its trailer."""
        return parcel

    def _clear(self) -> None:
        """All receivers have all buckets."""

    def _tell(self, offer: dict[str, Any]) -> dict[str, Any]:
        """Return the sender's ``offer`` at all ends."""
        text = bytearray(json.dumps(offer).encode().ljust(OFFER))
        raw = torch.frombuffer(text, dtype=torch.uint8)
        self._lease.broadcast(raw)
        told: dict[str, Any] = json.loads(bytes(raw_bytes(raw)))
        return told


class IpcTransport(_Reached):
    """``ipc``: receivers on the sender's machine and device map its two buckets."""

    def prepare(self, manifest: Manifest) -> None:
        """Share the sender's memory; the handle is exported and mapped once, not for each push."""
        self.drop()
        self._lease.barrier()  # nobody has the old one mapped any more
        if self._lease.rank > 0:
            self._both = attach(self._tell({}), self._device)
            self._lease.barrier()
            return
        with shared(2 * _stride(manifest), self._device) as (self._both, offer):
            self._tell(offer)
            self._lease.barrier()

    def _put(self, parcel: Parcel) -> None:
        settle(self._device)


class DiskTransport(_Reached):
    """``disk``: safetensors files, two at most, in a folder that all ends see."""

    def __init__(self, lease: Lease) -> None:
        super().__init__(lease)
        self._above = Path(lease.membership.folder or tempfile.gettempdir())
        self._folder = self._above / "not agreed on"
        # Buckets are written from, and read into, the host's memory.
        self._device = torch.device("cpu")

    def prepare(self, manifest: Manifest) -> None:
        """Agree on a folder of the lease's own; its name is the sender's to choose."""
        self.drop()
        super().prepare(manifest)
        if self._lease.rank == 0:
            with self._files(self._above):
                self._above.mkdir(parents=True, exist_ok=True)
                prefix = f"{self._lease.link}-{self._lease.epoch}-"
                self._folder = Path(tempfile.mkdtemp(prefix=prefix, dir=self._above))
        self._folder = self._above / self._tell({"folder": self._folder.name})["folder"]

    def drop(self) -> None:
        """Remove the folder too, on every end: the sender may be dead."""
        super().drop()
        self._clear()
        try:
            self._folder.rmdir()
        except OSError as error:
            # Another end was faster; or the sender is writing still, and drops when that fails.
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY):
                raise

    def _put(self, parcel: Parcel) -> None:
        path = self._path(parcel.index)
        with self._files(path):
            save_file(parcel.views, path)

    def _get(self, parcel: Parcel, word: torch.Tensor) -> Parcel:
        path = self._path(parcel.index)
        with self._files(path), safe_open(path, framework="pt") as file:
            try:
                parcel.fill((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118
            except ManifestMismatch as error:  # said before the first bucket, it means: none came
                raise SelfCheckFailed(f"{path} is not the bucket that was sent: {error}") from error
        parcel.flat[-TRAILER:].copy_(word)
        there = parcel.flat.to(self._lease.device)
        return Parcel(parcel.index, parcel.bucket, there, kept=False)

    def _clear(self) -> None:
        for index in range(2):
            self._path(index).unlink(missing_ok=True)

    @contextmanager
    def _files(self, path: Path) -> Iterator[None]:
        try:
            yield
        except (OSError, SafetensorError, RuntimeError) as error:  # torch's, of a file that it maps
            # An end that fails removes what is there; the lease is about to say why.
            time.sleep(2 * WATCH)
            if not self._lease.usable:
                self._lease.barrier()
            remedy = "Is link.folder the same one everywhere, writable, with room for two buckets?"
            raise ActionFailed(f"{path}: {error}. {remedy}") from error

    def _path(self, index: int) -> Path:
        return self._folder / f"bucket-{index % 2}.safetensors"


def transport(lease: Lease) -> Transport:
    """Make this end of the lease's transport; it is dropped when the lease is over."""
    kinds: dict[str, Any] = {"group": GroupTransport, "ipc": IpcTransport, "disk": DiskTransport}
    made: Transport = kinds[lease.membership.kind](lease)
    lease.at_end(made.drop)
    return made


def _stride(manifest: Manifest) -> int:
    return max((travelling_bytes(bucket) for bucket in manifest.buckets), default=0)
