"""Push weights over a lease: flat buckets, two of them in turn, and an acknowledgement.

    header -> every member's verdict -> bucket, bucket, ... -> every member's checksum

A push is complete or raises, on every member: after the last bucket all learn whether all got the
same bytes and could load them. What a raise leaves behind is torn; the machine says so, not this
module. A refusal before the first bucket leaves the lease good; any later error ends it.

The sender is rank 0.
"""

from __future__ import annotations

import hashlib
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from fsm_trainer.groups.lease import Lease, Pending
from fsm_trainer.machine.errors import (
    ActionFailed,
    FsmError,
    LeaseExpired,
    ManifestMismatch,
    SelfCheckFailed,
)
from fsm_trainer.machine.version import Version
from fsm_trainer.sync.checksums import raw_bytes
from fsm_trainer.sync.manifest import Bucket, Manifest, Slot, TensorSpec

# The manifest's digest, the sender's epoch, the weights' lineage and number.
_HEADER = struct.Struct("<32s3q")

# Pushes below this many bytes are hashed whole: SHA-256 of it takes about 0.1 s.
FULL_CHECK_BYTES = 64 * 2**20
# Larger ones are sampled: this much ...
_WINDOW = 4096
# ... out of every so many bytes.
_STRIDE = 256 * _WINDOW
# After each bucket's bytes: its index and its length.
_TRAILER = 16


Views = Mapping[str, torch.Tensor]
Load = Callable[[Views], None]


@dataclass(frozen=True, slots=True)
class PushReport:
    """A complete push: weight bytes, wall time in seconds, number of buckets, version."""

    bytes: int
    seconds: float
    buckets: int
    version: Version


class _Buffers:
    """Two buckets' worth of device memory, kept over pushes."""

    def __init__(self) -> None:
        self._pair: tuple[torch.Tensor, torch.Tensor] | None = None

    def __call__(self, index: int, manifest: Manifest, device: str) -> torch.Tensor:
        bucket = manifest.buckets[index]
        pair = self._pair
        need = max(bucket.bytes for bucket in manifest.buckets) + _TRAILER
        if pair is None or pair[0].numel() < need or pair[0].device != torch.device(device):
            one, two = (torch.empty(need, dtype=torch.uint8, device=device) for _ in range(2))
            pair = self._pair = one, two
        return pair[index % 2][: bucket.bytes + _TRAILER]

    @contextmanager
    def all_or_over(self, lease: Lease) -> Iterator[None]:
        """End the lease for all members on an error: they wait for a bucket that won't come."""
        try:
            yield
        except Exception as error:
            # An operation that was cut off may still write to them.
            self._pair = None
            lease.revoke(f"the push failed at {lease.membership.name}: {error}")
            raise


class Sender:
    """The sending side; owns two buckets that later pushes reuse."""

    def __init__(self) -> None:
        self._buffers = _Buffers()

    def send(
        self,
        lease: Lease,
        named_tensors: Iterable[tuple[str, torch.Tensor]],
        manifest: Manifest,
        version: Version,
    ) -> PushReport:
        """Send all tensors of ``manifest``, which come in its order.

        They are consumed bucket by bucket, so that gathered shards need not all exist at once.
        Raises ManifestMismatch (a receiver refused, nothing was sent; or these are not the
        manifest's tensors, which ends the lease), SelfCheckFailed (a receiver got other bytes),
        ActionFailed (a receiver could not load), PeerLost, LeaseExpired.
        """
        began = time.monotonic()
        header = _HEADER.pack(bytes.fromhex(manifest.digest), lease.epoch, *version)
        lease.broadcast(_tensor(header, lease))
        _agree(lease, None)
        with self._buffers.all_or_over(lease):
            checksum = self._buckets(lease, named_tensors, manifest)
        _acknowledge(lease, checksum, None)
        seconds = time.monotonic() - began
        return PushReport(manifest.bytes, seconds, len(manifest.buckets), version)

    def _buckets(
        self, lease: Lease, pairs: Iterable[tuple[str, torch.Tensor]], manifest: Manifest
    ) -> bytes:
        checksum, pending = _Checksum(manifest.bytes), None
        aliases = {alias for alias, _ in manifest.aliases}
        fresh = ((name, tensor) for name, tensor in pairs if name not in aliases)
        for index, bucket in enumerate(manifest.buckets):
            flat = self._buffers(index, manifest, lease.device)
            _fill(flat, index, bucket, fresh)
            if pending is not None:
                pending.wait()
            pending = lease.start_broadcast(flat)
            checksum.add(flat)
        if pending is not None:
            pending.wait()
        return checksum.value()


class Receiver:
    """The receiving side; owns two buckets that later pushes reuse."""

    def __init__(self) -> None:
        self._buffers = _Buffers()

    def receive(self, lease: Lease, manifest: Manifest, load: Load) -> PushReport:
        """Receive one push and hand it to ``load`` bucket by bucket, tied names too.

        The tensors are views of the bucket on the lease's device: ``load`` copies them, and keeps
        no reference. Raises what ``load`` raised (after the push has ended in good order),
        ManifestMismatch (other manifest, nothing was received), SelfCheckFailed, ActionFailed
        (another receiver failed), PeerLost, LeaseExpired.
        """
        began = time.monotonic()
        header = _tensor(bytes(_HEADER.size), lease)
        lease.broadcast(header)
        digest, epoch, *version = _HEADER.unpack(raw_bytes(header))
        _agree(lease, _refusal(lease, manifest, digest.hex(), epoch))
        with self._buffers.all_or_over(lease):
            checksum, error = self._buckets(lease, manifest, load)
        _acknowledge(lease, checksum, error)
        seconds = time.monotonic() - began
        return PushReport(manifest.bytes, seconds, len(manifest.buckets), Version(*version))

    def _buckets(
        self, lease: Lease, manifest: Manifest, load: Load
    ) -> tuple[bytes, Exception | None]:
        checksum, error = _Checksum(manifest.bytes), None
        tied: dict[str, list[str]] = {}
        for alias, first in manifest.aliases:
            tied.setdefault(first, []).append(alias)
        for flat, bucket in self._arriving(lease, manifest):
            checksum.add(flat)
            if error is not None:
                # The sender can't be stopped: stay in step, and tell it at the end.
                continue
            try:
                load(_views(flat, bucket, tied))
            except Exception as raised:
                error = raised
        return checksum.value(), error

    def _arriving(self, lease: Lease, manifest: Manifest) -> Iterator[tuple[torch.Tensor, Bucket]]:
        """Yield the buckets in turn, with the next one already on its way."""

        def start(index: int) -> tuple[torch.Tensor, Pending]:
            flat = self._buffers(index, manifest, lease.device)
            return flat, lease.start_broadcast(flat)

        if not manifest.buckets:
            return
        coming = start(0)
        for index, bucket in enumerate(manifest.buckets):
            flat, pending = coming
            pending.wait()
            if index + 1 < len(manifest.buckets):
                coming = start(index + 1)
            trailer = flat[bucket.bytes :].cpu()
            if not torch.equal(trailer, _trailer(index, bucket)):
                raise SelfCheckFailed(
                    f"link {lease.link!r} epoch {lease.epoch}: bucket {index} of {bucket.bytes:,} "
                    f"bytes ends with {trailer.tolist()}: another length, or another operation's "
                    "bytes. The weights are torn; push again under a new epoch"
                )
            yield flat, bucket


# -- buckets ---------------------------------------------------------------------------------------


def _view(flat: torch.Tensor, slot: Slot) -> torch.Tensor:
    spec = slot.spec
    dtype: torch.dtype = getattr(torch, spec.dtype)
    return flat[slot.offset : slot.offset + spec.bytes].view(dtype).view(spec.shape)


def _views(flat: torch.Tensor, bucket: Bucket, tied: Mapping[str, list[str]]) -> Views:
    views = {}
    for slot in bucket.slots:
        view = _view(flat, slot)
        views.update(dict.fromkeys((slot.spec.name, *tied.get(slot.spec.name, ())), view))
    return views


def _trailer(index: int, bucket: Bucket) -> torch.Tensor:
    return torch.tensor([index, bucket.bytes], dtype=torch.int64).view(torch.uint8)


@torch.no_grad()
def _fill(
    flat: torch.Tensor, index: int, bucket: Bucket, pairs: Iterator[tuple[str, torch.Tensor]]
) -> None:
    slots = {slot.spec.name: slot for slot in bucket.slots}
    while slots:
        name, tensor = next(pairs, ("the end", None))
        slot = slots.pop(name, None)
        if tensor is None or slot is None or TensorSpec.of(name, tensor) != slot.spec:
            expected = f"{slot.spec!r}" if slot is not None else ", ".join([*slots][:4])
            found = name if tensor is None else repr(TensorSpec.of(name, tensor))
            raise ManifestMismatch(
                f"bucket {index}: expected {expected}, found {found}. "
                "Pass the manifest's tensors in its order"
            )
        _view(flat, slot).copy_(tensor)
    flat[bucket.bytes :].copy_(_trailer(index, bucket))


class _Checksum:
    """SHA-256 over the bytes of all buckets, or samples of them where ``total`` is large."""

    def __init__(self, total: int) -> None:
        self._window = _STRIDE if total < FULL_CHECK_BYTES else _WINDOW
        self._hash = hashlib.sha256()

    def add(self, flat: torch.Tensor) -> None:
        """Add one bucket."""
        whole = flat.numel() - flat.numel() % _STRIDE
        sampled = flat[:whole].view(-1, _STRIDE)[:, : self._window]
        self._hash.update(raw_bytes(sampled))
        self._hash.update(raw_bytes(flat[whole:][: self._window]))

    def value(self) -> bytes:
        """Return 32 bytes."""
        return self._hash.digest()


# -- agreement -------------------------------------------------------------------------------------


def _tensor(raw: bytes, lease: Lease) -> torch.Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).to(lease.device)


def _gather(lease: Lease, raw: bytes) -> dict[str, bytes]:
    """Return what each member says, by name; equal lengths."""
    said = (bytes(raw_bytes(row)) for row in lease.all_gather(_tensor(raw, lease)))
    return dict(zip(lease.membership.members, said, strict=True))


def _refusal(lease: Lease, manifest: Manifest, digest: str, epoch: int) -> FsmError | None:
    if digest != manifest.digest:
        return ManifestMismatch(
            f"link {lease.link!r} epoch {lease.epoch}: the sender pushes under manifest "
            f"{digest[:16]}, but {lease.membership.name} expects {manifest.bytes:,} bytes under "
            f"{manifest.digest[:16]}. Give both the same manifest; nothing was sent"
        )
    if epoch != lease.epoch:
        return LeaseExpired(lease.link, lease.epoch, f"the sender is in epoch {epoch}")
    return None


def _agree(lease: Lease, refusal: FsmError | None) -> None:
    """Let all members know whether all accept the header; raise on all if one doesn't."""
    said = _gather(lease, bytes([refusal is not None]))
    if refusal is not None:
        raise refusal
    refused = [name for name, row in said.items() if row[0]]
    if refused:
        raise ManifestMismatch(
            f"link {lease.link!r} epoch {lease.epoch}: {', '.join(refused)} refused the push of "
            f"{lease.membership.members[0]}, holding another manifest; nothing was sent"
        )


def _acknowledge(lease: Lease, checksum: bytes, error: Exception | None) -> None:
    """Compare all members' checksums and outcomes; raise on all if one is not in order."""
    if lease.device != "cpu":
        torch.cuda.current_stream(lease.device).synchronize()
    said = _gather(lease, bytes([error is not None]) + checksum)
    if error is not None:
        raise error
    link = f"link {lease.link!r} epoch {lease.epoch}"
    failed = [name for name, row in said.items() if row[0]]
    if failed:
        raise ActionFailed(
            f"{link}: {', '.join(failed)} could not load the push (see the error there); its "
            "weights are torn everywhere until a push succeeds"
        )
    sent = said[lease.membership.members[0]]
    other = [f"{name} {row[1:9].hex()}" for name, row in said.items() if row != sent]
    if other:
        raise SelfCheckFailed(
            f"{link}: sent bytes of checksum {sent[1:9].hex()}, but received: "
            f"{', '.join(other)}. The weights are torn; suspect memory, the network, or somebody "
            "who wrote to a bucket in flight"
        )
