"""Pack tensors into flat buckets, look at them as tensors again, and check their bytes."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from fsm_trainer.machine.errors import ManifestMismatch, SelfCheckFailed
from fsm_trainer.sync.checksums import raw_bytes
from fsm_trainer.sync.manifest import Bucket, Slot, TensorSpec

# After each bucket's bytes: its index and its length.
TRAILER = 16
# Pushes below this many bytes are hashed whole: SHA-256 of it takes about 0.1 s.
FULL_CHECK_BYTES = 64 * 2**20
# Larger ones are sampled: this much ...
_WINDOW = 4096
# ... out of every so many bytes.
_STRIDE = 256 * _WINDOW
# Of these a whole list is copied in one launch; others are copied one by one.
_FUSED = (torch.float32, torch.bfloat16, torch.float16)

Pairs = Iterable[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Parcel:
    """One bucket of a push in memory; ``flat`` ``[bucket.bytes + TRAILER]`` of bytes."""

    index: int
    bucket: Bucket
    flat: torch.Tensor

    def views(self) -> dict[str, torch.Tensor]:
        """The bucket's tensors, in the memory of ``flat``."""
        return {slot.spec.name: self._view(slot) for slot in self.bucket.slots}

    def _view(self, slot: Slot) -> torch.Tensor:
        spec = slot.spec
        dtype: torch.dtype = getattr(torch, spec.dtype)
        return self.flat[slot.offset : slot.offset + spec.bytes].view(dtype).view(spec.shape)

    def trailer(self) -> torch.Tensor:
        """What ``flat`` must end with, on the CPU."""
        return torch.tensor([self.index, self.bucket.bytes], dtype=torch.int64).view(torch.uint8)

    def fill(self, pairs: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Take this bucket's tensors, in any order, from ``pairs``, and no further one.

        They must live until all of them are there. Raises ManifestMismatch on other tensors.
        """
        slots = {slot.spec.name: slot for slot in self.bucket.slots}
        found: list[tuple[torch.Tensor, torch.Tensor]] = []
        while slots:
            name, tensor = next(pairs, ("the end", None))
            slot = slots.pop(name, None)
            if tensor is None or slot is None or TensorSpec.of(name, tensor) != slot.spec:
                expected = f"{slot.spec!r}" if slot is not None else ", ".join([*slots][:4])
                other = name if tensor is None else repr(TensorSpec.of(name, tensor))
                raise ManifestMismatch(
                    f"bucket {self.index}: expected {expected}, found {other}. "
                    "Pass the manifest's tensors in its order"
                )
            found.append((self._view(slot), tensor))
        copy_all(found)
        self.flat[self.bucket.bytes :].copy_(self.trailer())


@torch.no_grad()
def copy_all(pairs: Pairs) -> None:
    """Copy the second of each pair into the first: on a device, in few launches."""
    fused: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for into, source in pairs:
        if into.dtype == source.dtype and into.dtype in _FUSED:
            targets, sources = fused.setdefault(into.dtype, ([], []))
            targets.append(into.detach())
            sources.append(source.detach())
        else:
            into.detach().copy_(source)
    for targets, sources in fused.values():
        torch._foreach_copy_(targets, sources)


def settle(device: torch.device | str) -> None:
    """Wait for the work that is queued on a device; on the CPU nothing is."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def with_aliases(
    views: Mapping[str, torch.Tensor], aliases: Iterable[tuple[str, str]]
) -> dict[str, torch.Tensor]:
    """Add the tied names of what is in a bucket."""
    return {**views, **{alias: views[first] for alias, first in aliases if first in views}}


class Checksum:
    """SHA-256 over the bytes of all buckets, or samples of them where ``total`` is large.

    A bucket's bytes may change once :meth:`add` has returned: on a device, once the work that was
    queued before is done. Device bytes are looked at one bucket late, so that nothing waits.
    """

    def __init__(self, total: int) -> None:
        self._window = _STRIDE if total < FULL_CHECK_BYTES else _WINDOW
        self._hash = hashlib.sha256()
        self._waiting: deque[tuple[Parcel, list[torch.Tensor], torch.cuda.Event | None]] = deque()

    def add(self, parcel: Parcel) -> None:
        """Add one bucket; raises SelfCheckFailed when it or the one before isn't what it claims."""
        flat = parcel.flat
        whole = flat.numel() - flat.numel() % _STRIDE
        sampled = flat[:whole].view(-1, _STRIDE)[:, : self._window]
        parts = [sampled, flat[whole:][: self._window], flat[-TRAILER:]]
        event = None
        if flat.is_cuda:
            parts = [_pinned(part) for part in parts]
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(flat.device))
        self._waiting.append((parcel, parts, event))
        self._look(ahead=0 if event is None else 1)

    def value(self) -> bytes:
        """Return 32 bytes."""
        self._look(ahead=0)
        return self._hash.digest()

    def _look(self, ahead: int) -> None:
        while len(self._waiting) > ahead:
            parcel, parts, event = self._waiting.popleft()
            if event is not None:
                event.synchronize()
            for part in parts:
                self._hash.update(raw_bytes(part))
            if not torch.equal(parts[-1], parcel.trailer()):
                raise SelfCheckFailed(
                    f"bucket {parcel.index} of {parcel.bucket.bytes:,} bytes ends with "
                    f"{parts[-1].tolist()}: another length, or another operation's bytes. "
                    "The weights are torn; push again under a new epoch"
                )


def _pinned(part: torch.Tensor) -> torch.Tensor:
    host = torch.empty(part.shape, dtype=part.dtype, pin_memory=True)
    return host.copy_(part, non_blocking=True)
