"""Pack tensors into flat buckets, look at them as tensors again, and check their bytes."""

from __future__ import annotations

import hashlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from fsm_trainer.machine.errors import ManifestMismatch, SelfCheckFailed
from fsm_trainer.sync.checksums import raw_bytes
from fsm_trainer.sync.manifest import Bucket, Manifest, TensorSpec

# After each bucket's bytes: its index and its length.
TRAILER = 16
# Bytes that are summed together.
CHUNK = 64 * 1024
# Of these a whole list is copied in one launch; others are copied one by one.
_FUSED = (torch.float32, torch.bfloat16, torch.float16)

Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, eq=False)
class Parcel:
    """One bucket of a push in memory; ``flat`` ``[bucket.bytes + TRAILER]`` of bytes.

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
    def _seal(self) -> torch.Tensor:
        return self.trailer.to(self.flat.device)

    def fill(self, pairs: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Take this bucket's tensors, in any order, from ``pairs``, and no further one.

        They must live until all of them are there. Raises ManifestMismatch on other tensors.
        """
        missing, found = dict(self.views), list[Pair]()
        while missing:
            name, tensor = next(pairs, ("the end", None))
            view = missing.pop(name, None)
            if tensor is None or view is None or _unlike(tensor, view):
                want = ", ".join([*missing][:4]) if view is None else TensorSpec.of(name, view)
                other = "" if tensor is None else TensorSpec.of(name, tensor)
                raise ManifestMismatch(
                    f"bucket {self.index}: expected {want}, found {name} {other}. "
                    "Pass the manifest's tensors in its order"
                )
            found.append((view, tensor))
        copy_all(found)
        self.flat[self.bucket.bytes :].copy_(self._seal)


def _unlike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype is not other.dtype or one.shape != other.shape


def copy_all(pairs: Iterable[Pair]) -> None:
    """Copy the second of each pair into the first: on a device, in few launches."""
    copier(pairs)()


def copier(pairs: Iterable[Pair]) -> Callable[[], None]:
    """Make what copies the second of each pair into the first, as often as it is called."""
    alike = defaultdict[tuple[torch.dtype, torch.dtype], list[Pair]](list)
    for into, source in pairs:
        alike[into.dtype, source.dtype].append((into, source))
    lists = [([into for into, _ in g], [source for _, source in g], k) for k, g in alike.items()]

    # Engines make their weights in inference mode, where alone they may be written.
    @torch.inference_mode()
    def copy() -> None:
        for targets, sources, (one, other) in lists:
            if one == other and one in _FUSED:
                torch._foreach_copy_(targets, sources)
            else:
                for into, source in zip(targets, sources, strict=True):
                    into.copy_(source)

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
    flat = torch.zeros(bucket.bytes + TRAILER, dtype=torch.uint8, device=device)
    parcel, checksum = Parcel(0, bucket, flat), Checksum()
    parcel.fill((name, view.clone()) for name, view in parcel.views.items())
    checksum.add(parcel)
    checksum.value()


class Checksum:
    """A checksum over the bytes of all buckets, computed where they are.

    Each ``CHUNK`` is summed as 64-bit integers, and SHA-256 is taken of the sums: it differs for
    any change within one word, and misses only what moves words about within a chunk, or changes
    several by amounts that cancel out. Hashing the bytes themselves took longer than their way.

    A bucket's bytes may change once :meth:`add` has returned: on a device, once the work that was
    queued before is done. Device sums are looked at one bucket late, so that nothing waits.
    """

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._waiting: deque[tuple[Parcel, list[torch.Tensor], torch.cuda.Event | None]] = deque()

    def add(self, parcel: Parcel) -> None:
        """Add one bucket; raises SelfCheckFailed when it or the one before isn't what it claims."""
        flat = parcel.flat
        whole = flat.numel() - flat.numel() % CHUNK
        words = flat[:whole].view(torch.int64).view(-1, CHUNK // 8)
        parts = [words.sum(dim=1), flat[whole:], flat[-TRAILER:]]
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
            if not torch.equal(parts[-1], parcel.trailer):
                raise SelfCheckFailed(
                    f"bucket {parcel.index} of {parcel.bucket.bytes:,} bytes ends with "
                    f"{parts[-1].tolist()}: another length, or another operation's bytes. "
                    "The weights are torn; push again under a new epoch"
                )


def _pinned(part: torch.Tensor) -> torch.Tensor:
    host = torch.empty(part.shape, dtype=part.dtype, pin_memory=True)
    return host.copy_(part, non_blocking=True)
