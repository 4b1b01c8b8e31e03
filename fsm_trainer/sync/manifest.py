"""What a push carries: names, dtypes, shapes and where each tensor lies in which bucket.

Both sides hold the same manifest before a byte moves, and compare its digest. It holds no
tensor, so that it can be pickled, and kept where torch isn't imported.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from fsm_trainer.machine.errors import ManifestMismatch

if TYPE_CHECKING:
    import torch

BUCKET_BYTES = 64 * 2**20

# Bytes per element, for every dtype that weights come in; torch's names without "torch.".
ITEM_SIZE = {
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
    **dict.fromkeys(("float32", "int32", "uint32"), 4),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
    **dict.fromkeys(("int8", "uint8", "bool", "float8_e4m3fn", "float8_e5m2"), 1),
    **dict.fromkeys(("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"), 1),
}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, dtype (``float32``, ``bfloat16`` …) and shape of one tensor.

    Raises ManifestMismatch when the dtype is not one that a push can carry.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_SIZE:
            raise ManifestMismatch(
                f"tensor {self.name!r} has dtype {self.dtype!r}, which a push can't carry; "
                f"convert it to one of {', '.join(sorted(ITEM_SIZE))}"
            )

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> TensorSpec:
        """Describe ``tensor``."""
        return cls(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"

    @property
    def item_size(self) -> int:
        """Bytes of one element."""
        return ITEM_SIZE[self.dtype]

    @property
    def bytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.item_size


class Transfer(NamedTuple):
    """What a push moved, in bytes, and the seconds that it took its sender."""

    bytes: int
    seconds: float

    @property
    def record(self) -> dict[str, float]:
        """The bytes, and their speed in units of 10⁹ a second; 0 when nothing was moved."""
        speed = self.bytes / 1e9 / self.seconds if self.bytes else 0.0
        return {"bytes": self.bytes, "gigabytes_per_second": speed}


@dataclass(frozen=True, slots=True)
class Slot:
    """One tensor's place in a bucket: ``offset`` in bytes, divisible by the item size."""

    spec: TensorSpec
    offset: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """A flat run of ``bytes`` bytes, in slot order, without gaps."""

    slots: tuple[Slot, ...]
    bytes: int


@dataclass(frozen=True)
class Manifest:
    """The tensors of a push in the sender's order, and the buckets that they travel in.

    ``aliases`` maps the name of a tied weight to the name under which its bytes travel. A tensor
    bigger than ``bucket_bytes`` has a bucket of its own.
    """

    tensors: tuple[TensorSpec, ...]
    aliases: tuple[tuple[str, str], ...] = ()
    bucket_bytes: int = BUCKET_BYTES

    @classmethod
    def of(
        cls, named_tensors: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int = BUCKET_BYTES
    ) -> Manifest:
        """Describe tensors in the order given; tied weights (one storage, one view) once.

        A tensor may be gone when the next one comes: gathered shards needn't all exist at once.
        """
        # Not its address: the next tensor may be put where this one was.
        from torch.multiprocessing.reductions import StorageWeakRef

        specs: list[TensorSpec] = []
        aliases: list[tuple[str, str]] = []
        seen: dict[tuple[Any, ...], str] = {}
        for name, tensor in named_tensors:
            storage = tensor.untyped_storage()
            ref = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            view = (ref, tensor.storage_offset(), tensor.dtype, tensor.shape, tensor.stride())
            # A storage at address 0 is empty or on the meta device: equality means nothing.
            first = seen.setdefault(view, name) if storage.data_ptr() and tensor.numel() else name
            if first is name:
                specs.append(TensorSpec.of(name, tensor))
            else:
                aliases.append((name, first))
        return cls(tuple(specs), tuple(aliases), bucket_bytes)

    def __post_init__(self) -> None:
        names = Counter([spec.name for spec in self.tensors] + [name for name, _ in self.aliases])
        twice = sorted(name for name, count in names.items() if count > 1)
        if twice:
            raise ManifestMismatch(f"these names come twice: {', '.join(twice)}")
        if self.bucket_bytes <= 0:
            raise ManifestMismatch(f"bucket_bytes is {self.bucket_bytes}, must be above 0")

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """The tensors in buckets, filled in order; inside a bucket wide dtypes come first."""
        runs: list[list[TensorSpec]] = []
        room = 0
        for spec in self.tensors:
            if not runs or spec.bytes > room:
                runs.append([])
                room = self.bucket_bytes
            runs[-1].append(spec)
            room -= spec.bytes
        return tuple(_pack(run) for run in runs)

    @property
    def bytes(self) -> int:
        """Bytes of all buckets together."""
        return sum(spec.bytes for spec in self.tensors)

    def check(self, receiver_specs: Iterable[TensorSpec]) -> None:
        """Compare with what the receiver holds, before any byte moves.

        A tied name may be absent at the receiver. Raises ManifestMismatch with all differences.
        """
        theirs = {spec.name: str(spec) for spec in receiver_specs}
        ours = {spec.name: str(spec) for spec in self.tensors}
        expected = ours | {alias: ours[first] for alias, first in self.aliases}
        differences = {
            "the receiver lacks": ours.keys() - theirs.keys(),
            "the sender lacks": theirs.keys() - expected.keys(),
            "these differ (sender against receiver)": {
                f"{name} {expected[name]} against {theirs[name]}"
                for name in expected.keys() & theirs.keys()
                if expected[name] != theirs[name]
            },
        }
        found = [f"{kind}: {_some(sorted(names))}" for kind, names in differences.items() if names]
        if found:
            raise ManifestMismatch(
                f"sender and receiver hold different tensors; {'; '.join(found)}. "
                "Load the same model configuration on both sides; nothing was sent"
            )

    @cached_property
    def digest(self) -> str:
        """SHA-256 of all fields, in hex: equal digests mean equal layouts."""
        tensors = [(spec.name, str(spec)) for spec in self.tensors]
        text = json.dumps([self.bucket_bytes, self.aliases, tensors])
        return hashlib.sha256(text.encode()).hexdigest()


def _pack(run: list[TensorSpec]) -> Bucket:
    slots: list[Slot] = []
    offset = 0
    # Before an item of size s lie only items of sizes s, 2s, 4s …: s divides every offset.
    for spec in sorted(run, key=lambda spec: -spec.item_size):
        slots.append(Slot(spec, offset))
        offset += spec.bytes
    return Bucket(tuple(slots), offset)


def _some(names: list[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
