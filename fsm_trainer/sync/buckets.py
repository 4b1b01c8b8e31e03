"""Pack tensors into flat buckets, look at them as tensors again, and check their bytes."""

from __future__ import annotations

import hashlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

import torch

from fsm_trainer.machine.errors import ManifestMismatch, SelfCheckFailed
from fsm_trainer.sync.checksums import raw_bytes
from fsm_trainer.sync.manifest import Bucket, Manifest, TensorSpec

# At the end of each bucket: its index and its length.
TRAILER = 16
# Bytes that are summed together; buckets travel in whole ones.
CHUNK = 64 * 1024
# Buckets that may be on their way, or being summed, before the host looks at the first of them.
AHEAD = 3
# Of these a whole list is copied in one launch; others are copied one by one.
_FUSED = (torch.float32, torch.bfloat16, torch.float16)

Pair = tuple[torch.Tensor, torch.Tensor]


def travelling_bytes(bucket: Bucket) -> int:
    """How long a bucket is in memory: its tensors, zeros, and the trailer, in whole chunks."""
    return -(-(bucket.bytes + TRAILER) // CHUNK) * CHUNK


@dataclass(frozen=True, eq=False)
class Parcel:
    """One bucket of a push in memory; ``flat`` ``[travelling_bytes(bucket)]`` of bytes.

    It is kept over pushes, and with it what is the same each time: to look at hundreds of tensors
    takes longer than their bytes do on a fast link.
    """

    index: int
    bucket: Bucket
    flat: torch.Tensor
    kept: bool = True
    """Whether the next push has its bucket in the same memory."""

    @cached_property
    def views(self) -> dict[str, torch.Tensor]:
        """The bucket's tensors, in the memory of ``flat``."""
        views = {}
        for slot in self.bucket.slots:
            flat = self.flat[slot.offset : slot.offset + slot.spec.bytes]
            views[slot.spec.name] = flat.view(getattr(torch, slot.spec.dtype)).view(slot.spec.shape)
        return views

    @cached_property
    def trailer(self) -> torch.Tensor:
        """What ``flat`` must end with, on the CPU."""
        return torch.tensor([self.index, self.bucket.bytes], dtype=torch.int64).view(torch.uint8)

    @cached_property
    def _seal(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What follows the tensors, and its place."""
        place = self.flat[self.bucket.bytes :]
        seal = torch.zeros(place.numel(), dtype=torch.uint8)
        seal[-TRAILER:] = self.trailer
        return seal.to(self.flat.device), place

    @cached_property
    def _targets(self) -> list[tuple[list[str], list[torch.Tensor]]]:
        """Names and views, those of one dtype together."""
        alike = defaultdict[torch.dtype, dict[str, torch.Tensor]](dict)
        for name, view in self.views.items():
            alike[view.dtype][name] = view
        return [([*group], [*group.values()]) for group in alike.values()]

    def fill(self, pairs: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Take this bucket's tensors, in any order, from ``pairs``, and no further one.

        They must live until all of them are there. Raises ManifestMismatch on other tensors.
        """
        found = dict(islice(pairs, len(self.views)))
        for name, view in self.views.items():
            tensor = found.get(name)
            if tensor is None or tensor.dtype is not view.dtype or tensor.shape != view.shape:
                other = [name] if tensor is not None else [n for n in found if n not in self.views]
                said = ", ".join(str(TensorSpec.of(n, found[n])) for n in other[:4]) or "the end"
                raise ManifestMismatch(
                    f"bucket {self.index}: expected {TensorSpec.of(name, view)}, found {said}. "
                    "Pass the manifest's tensors in its order"
                )
        for names, targets in self._targets:
            _copy(targets, [found[name] for name in names])
        seal, place = self._seal
        place.copy_(seal)


# Engines make their weights in inference mode, where alone they may be written.
@torch.inference_mode()
def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy tensors of one dtype each: on a device, in few launches."""
    if targets[0].dtype is sources[0].dtype and targets[0].dtype in _FUSED:
        torch._foreach_copy_(targets, sources)
    else:
        for into, source in zip(targets, sources, strict=True):
            into.copy_(source)


def copier(pairs: Iterable[Pair]) -> Callable[[], None]:
    """Make what copies the second of each pair into the first, as often as it is called."""
    alike = defaultdict[tuple[torch.dtype, torch.dtype], list[Pair]](list)
    for into, source in pairs:
        alike[into.dtype, source.dtype].append((into, source))
    lists = [([into for into, _ in group], [one for _, one in group]) for group in alike.values()]

    def copy() -> None:
        for targets, sources in lists:
            _copy(targets, sources)

    return copy


def settle(device: torch.device | str) -> None:
    """Wait for the work that is queued on a device; on the CPU nothing is."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def warm(device: torch.device) -> None:
    """Load the kernels that pack, sum and copy: a device takes tens of ms at their first use."""
    if device.type != "cuda":
        return
    specs = tuple(TensorSpec(str(kind), str(kind)[6:], (CHUNK,)) for kind in _FUSED)
    [bucket] = Manifest(specs).buckets
    flat = torch.zeros(travelling_bytes(bucket), dtype=torch.uint8, device=device)
    parcel, checksum = Parcel(0, bucket, flat), Checksum()
    parcel.fill((name, view.clone()) for name, view in parcel.views.items())
    checksum.add(parcel)
    checksum.value()


_Event = torch.cuda.Event | None


class Checksum:
    """A checksum over the bytes of all buckets, computed where they are.

    Each ``CHUNK`` is summed as 64-bit integers, and SHA-256 is taken of the sums: it differs for
    any change within one word, and misses only what moves words about within a chunk, or changes
    several by amounts that cancel out. Hashing the bytes themselves took longer than their way.

    A bucket's bytes may change once :meth:`add` has returned: on a device, once the work that was
    queued before is done. Device sums are looked at ``AHEAD`` buckets late, so that nothing waits.
    """

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._waiting: deque[tuple[str, torch.Tensor, torch.Tensor, _Event]] = deque()

    def add(self, parcel: Parcel) -> None:
        """Add one bucket; raises SelfCheckFailed when it or one before isn't what it claims."""
        words = parcel.flat.view(torch.int64)
        parts = torch.cat([words.view(-1, CHUNK // 8).sum(dim=1), words[-TRAILER // 8 :]])
        event = None
        if parts.is_cuda:
            parts = torch.empty_like(parts, device="cpu", pin_memory=True).copy_(
                parts, non_blocking=True
            )
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(parcel.flat.device))
        # Not the parcel: its bytes may be gone by then.
        told = f"bucket {parcel.index} of {parcel.bucket.bytes:,} bytes"
        self._waiting.append((told, parcel.trailer, parts, event))
        self._look(ahead=0 if event is None else AHEAD)

    def value(self) -> bytes:
        """Return 32 bytes."""
        self._look(ahead=0)
        return self._hash.digest()

    def _look(self, ahead: int) -> None:
        while len(self._waiting) > ahead:
            told, trailer, parts, event = self._waiting.popleft()
            if event is not None:
                event.synchronize()
            self._hash.update(raw_bytes(parts))
            found = parts[-TRAILER // 8 :].view(torch.uint8)
            if not torch.equal(found, trailer):
                raise SelfCheckFailed(
                    f"{told} ends with {found.tolist()}: another length, or another operation's "
                    "bytes. The weights are torn; push again under a new epoch"
                )
