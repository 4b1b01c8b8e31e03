"""Push weights over a lease: flat buckets, two of them in turn, and an acknowledgement.

    header -> every member's verdict -> bucket, bucket, ... -> every member's checksum

A push is complete or raises, on every member: after the last bucket all learn whether all got the
same bytes and could load them. What a raise leaves behind is torn; the machine says so, not this
module. A refusal before the first bucket leaves the lease good; any later error ends it.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch

from fsm_trainer.groups.lease import Lease
from fsm_trainer.machine.errors import (
    ActionFailed,
    FsmError,
    LeaseExpired,
    ManifestMismatch,
    SelfCheckFailed,
)
from fsm_trainer.machine.version import Version
from fsm_trainer.sync.checksums import raw_bytes
from fsm_trainer.sync.header import HEADER_BYTES, Header
from fsm_trainer.sync.manifest import Bucket, Manifest, Slot, TensorSpec

Verify = Literal["auto", "full", "sampled", "none"]
NamedTensors = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]

# The version of a push that its caller gave none.
UNNUMBERED = Version(0, 0)

# Pushes below this many bytes are hashed whole: SHA-256 of it takes about 0.1 s.
FULL_CHECK_BYTES = 64 * 2**20
# "sampled" hashes this much ...
_WINDOW = 4096
# ... out of every so many bytes.
_STRIDE = 256 * _WINDOW
# After each bucket's bytes: its index and its length.
_TRAILER = 16


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

    def drop(self) -> None:
        """Forget them: an operation that was cut off may still write to them."""
        self._pair = None


class Sender:
    """The sending side; owns two buckets that later pushes reuse.

    ``verify``: which bytes the acknowledgement hashes; ``auto`` is ``full`` below
    ``FULL_CHECK_BYTES`` and ``sampled`` (1/256) above.
    """

    def __init__(self, verify: Verify = "auto") -> None:
        self._verify = verify
        self._buffers = _Buffers()

    def send(
        self,
        lease: Lease,
        named_tensors: NamedTensors,
        manifest: Manifest,
        source: int = 0,
        version: Version = UNNUMBERED,
    ) -> PushReport:
        """Send all tensors of ``manifest``; ``source`` is this member's own rank.

        ``named_tensors`` in the manifest's order; an iterator is consumed bucket by bucket, so
        that gathered shards need not all exist at once. Raises ManifestMismatch (a receiver
        refused, nothing was sent), SelfCheckFailed (a receiver got other bytes), ActionFailed (a
        receiver could not load), PeerLost, LeaseExpired.
        """
        began = time.monotonic()
        pairs = named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors
        if not isinstance(pairs, Iterator):
            _check_all(pairs, manifest)
        window, stride = _sampling(self._verify, manifest.bytes)
        digest = bytes.fromhex(manifest.digest)
        header = Header(digest, lease.epoch, version, manifest.bytes, window, stride)
        lease.broadcast(_tensor(header.pack(), lease), source)
        _agree(lease, source, None)
        with _all_or_over(lease, self._buffers):
            checksum = self._buckets(lease, iter(pairs), manifest, source, header)
        _acknowledge(lease, source, checksum, None)
        seconds = time.monotonic() - began
        return PushReport(manifest.bytes, seconds, len(manifest.buckets), version)

    def _buckets(
        self,
        lease: Lease,
        pairs: Iterator[tuple[str, torch.Tensor]],
        manifest: Manifest,
        source: int,
        header: Header,
    ) -> bytes:
        checksum = _Checksum(header)
        aliases = {alias for alias, _ in manifest.aliases}
        fresh = ((name, tensor) for name, tensor in pairs if name not in aliases)
        pending = None
        for index, bucket in enumerate(manifest.buckets):
            flat = self._buffers(index, manifest, lease.device)
            _fill(flat, index, bucket, fresh)
            if pending is not None:
                pending.wait()
            pending = lease.start_broadcast(flat, source)
            checksum.add(flat)
        if pending is not None:
            pending.wait()
        return checksum.value()


class Receiver:
    """The receiving side; owns two buckets that later pushes reuse."""

    def __init__(self) -> None:
        self._buffers = _Buffers()

    def receive(
        self,
        lease: Lease,
        manifest: Manifest,
        load: Callable[[str, torch.Tensor], None],
        source: int = 0,
    ) -> PushReport:
        """Receive one push and hand each tensor to ``load``, tied names too.

        The tensor is a view of a bucket on the lease's device: ``load`` copies it, and keeps no
        reference. Raises what ``load`` raised (after the push has ended in good order),
        ManifestMismatch (other manifest, nothing was received), SelfCheckFailed, ActionFailed
        (another receiver failed), PeerLost, LeaseExpired.
        """
        began = time.monotonic()
        raw = _tensor(bytes(HEADER_BYTES), lease)
        lease.broadcast(raw, source)
        header, refusal = _read(raw, lease, manifest)
        _agree(lease, source, refusal)
        with _all_or_over(lease, self._buffers):
            checksum, error = self._buckets(lease, manifest, load, source, header)
        _acknowledge(lease, source, checksum, error)
        seconds = time.monotonic() - began
        return PushReport(manifest.bytes, seconds, len(manifest.buckets), header.version)

    def _buckets(
        self,
        lease: Lease,
        manifest: Manifest,
        load: Callable[[str, torch.Tensor], None],
        source: int,
        header: Header,
    ) -> tuple[bytes, Exception | None]:
        checksum, error = _Checksum(header), None
        tied: dict[str, list[str]] = {}
        for alias, first in manifest.aliases:
            tied.setdefault(first, []).append(alias)
        flats = (
            self._buffers(index, manifest, lease.device) for index in range(len(manifest.buckets))
        )
        for flat, bucket in _arriving(lease, flats, manifest, source):
            checksum.add(flat)
            if error is not None:
                # The sender can't be stopped: stay in step, and tell it at the end.
                continue
            try:
                for slot in bucket.slots:
                    for name in (slot.spec.name, *tied.get(slot.spec.name, ())):
                        load(name, _view(flat, slot))
            except Exception as raised:
                error = raised
        return checksum.value(), error


def send(
    lease: Lease,
    named_tensors: NamedTensors,
    manifest: Manifest,
    source: int = 0,
    version: Version = UNNUMBERED,
    verify: Verify = "auto",
) -> PushReport:
    """Send once, as :meth:`Sender.send`; keep a Sender to reuse its buckets."""
    return Sender(verify).send(lease, named_tensors, manifest, source, version)


def receive(
    lease: Lease,
    manifest: Manifest,
    load: Callable[[str, torch.Tensor], None],
    source: int = 0,
) -> PushReport:
    """Receive once, as :meth:`Receiver.receive`; keep a Receiver to reuse its buckets."""
    return Receiver().receive(lease, manifest, load, source)


# -- buckets ---------------------------------------------------------------------------------------


def _view(flat: torch.Tensor, slot: Slot) -> torch.Tensor:
    spec = slot.spec
    dtype: torch.dtype = getattr(torch, spec.dtype)
    return flat[slot.offset : slot.offset + spec.bytes].view(dtype).view(spec.shape)


def _trailer(index: int, bucket: Bucket) -> torch.Tensor:
    return torch.tensor([index, bucket.bytes], dtype=torch.int64).view(torch.uint8)


@torch.no_grad()
def _fill(
    flat: torch.Tensor,
    index: int,
    bucket: Bucket,
    pairs: Iterator[tuple[str, torch.Tensor]],
) -> None:
    slots = {slot.spec.name: slot for slot in bucket.slots}
    while slots:
        name, tensor = next(pairs, ("", None))
        slot = slots.pop(name, None)
        if tensor is None or slot is None or TensorSpec.of(name, tensor) != slot.spec:
            expected = ", ".join([*slots][:4]) if slot is None else str(slot.spec)
            found = "the end" if tensor is None else str(TensorSpec.of(name, tensor))
            raise ManifestMismatch(
                f"bucket {index}: the tensors end or differ from the manifest, expected "
                f"{expected}, found {found}. Pass them in the manifest's order"
            )
        _view(flat, slot).copy_(tensor)
    flat[bucket.bytes :].copy_(_trailer(index, bucket))


def _arriving(
    lease: Lease, flats: Iterator[torch.Tensor], manifest: Manifest, source: int
) -> Iterator[tuple[torch.Tensor, Bucket]]:
    """Yield the buckets in turn, with the next one already on its way."""
    flat = next(flats, None)
    pending = None if flat is None else lease.start_broadcast(flat, source)
    for index, bucket in enumerate(manifest.buckets):
        if flat is None or pending is None:
            return
        pending.wait()
        here, flat = flat, next(flats, None)
        pending = None if flat is None else lease.start_broadcast(flat, source)
        trailer = here[bucket.bytes :].cpu()
        if not torch.equal(trailer, _trailer(index, bucket)):
            raise SelfCheckFailed(
                f"link {lease.link!r} epoch {lease.epoch}: bucket {index} of {bucket.bytes:,} "
                f"bytes ends with {trailer.tolist()}: another length, or another operation's "
                "bytes. The weights are torn; push again under a new epoch"
            )
        yield here, bucket


@contextmanager
def _all_or_over(lease: Lease, buffers: _Buffers) -> Iterator[None]:
    """End the lease for all members on an error: they wait for a bucket that won't come."""
    try:
        yield
    except Exception as error:
        buffers.drop()
        lease.revoke(f"the push failed at {lease.membership.name}: {error}")
        raise


def _check_all(pairs: Iterable[tuple[str, torch.Tensor]], manifest: Manifest) -> None:
    found = [TensorSpec.of(name, tensor) for name, tensor in pairs]
    manifest.check(found)
    aliases = {alias for alias, _ in manifest.aliases}
    if [spec for spec in found if spec.name not in aliases] != list(manifest.tensors):
        raise ManifestMismatch("the tensors are not in the manifest's order; nothing was sent")


# -- agreement -------------------------------------------------------------------------------------


def _tensor(raw: bytes, lease: Lease) -> torch.Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).to(lease.device)


def _read(raw: torch.Tensor, lease: Lease, manifest: Manifest) -> tuple[Header, FsmError | None]:
    nothing = Header(b"", lease.epoch, Version(0, 0), 0, 0, _STRIDE)
    try:
        header = Header.unpack(bytes(raw_bytes(raw)))
        header.check(lease, manifest)
    except (ManifestMismatch, LeaseExpired) as refusal:
        return nothing, refusal
    return header, None


def _agree(lease: Lease, source: int, refusal: FsmError | None) -> None:
    """Let all members know whether all accept the header; raise on all if one doesn't."""
    rows = lease.all_gather(_tensor(bytes([refusal is not None]), lease))
    if refusal is not None:
        raise refusal
    refused = [name for name, row in zip(lease.membership.members, rows, strict=True) if row.item()]
    if refused:
        raise ManifestMismatch(
            f"link {lease.link!r} epoch {lease.epoch}: {', '.join(refused)} refused the push of "
            f"{lease.membership.members[source]}, holding another manifest; nothing was sent"
        )


def _acknowledge(lease: Lease, source: int, checksum: bytes, error: Exception | None) -> None:
    """Compare all members' checksums and outcomes; raise on all if one is not in order."""
    if lease.device != "cpu":
        torch.cuda.current_stream(lease.device).synchronize()
    rows = lease.all_gather(_tensor(bytes([error is not None]) + checksum, lease))
    if error is not None:
        raise error
    named = dict(
        zip(lease.membership.members, (bytes(raw_bytes(row)) for row in rows), strict=True)
    )
    link = f"link {lease.link!r} epoch {lease.epoch}"
    failed = [name for name, row in named.items() if row[0]]
    if failed:
        raise ActionFailed(
            f"{link}: {', '.join(failed)} could not load the push (see the error there); its "
            "weights are torn everywhere until a push succeeds"
        )
    sent = rows[source]
    other = [
        f"{name} {bytes(raw_bytes(row))[1:9].hex()}"
        for name, row in zip(named, rows, strict=True)
        if not torch.equal(row, sent)
    ]
    if other:
        raise SelfCheckFailed(
            f"{link}: sent bytes of checksum {bytes(raw_bytes(sent))[1:9].hex()}, but received: "
            f"{', '.join(other)}. The weights are torn; suspect memory, the network, or somebody "
            "who wrote to a bucket in flight"
        )


def _sampling(verify: Verify, total: int) -> tuple[int, int]:
    if verify == "none":
        return 0, _STRIDE
    if verify == "full" or (verify == "auto" and total < FULL_CHECK_BYTES):
        return _STRIDE, _STRIDE
    return _WINDOW, _STRIDE


class _Checksum:
    """SHA-256 over the sampled bytes of all buckets, as the sender's header says."""

    def __init__(self, header: Header) -> None:
        self._window, self._stride = header.window, header.stride
        self._hash = hashlib.sha256()

    def add(self, flat: torch.Tensor) -> None:
        """Add one bucket."""
        if not self._window:
            return
        whole = flat.numel() - flat.numel() % self._stride
        sampled = flat[:whole].view(-1, self._stride)[:, : self._window]
        self._hash.update(raw_bytes(sampled))
        self._hash.update(raw_bytes(flat[whole:][: self._window]))

    def value(self) -> bytes:
        """Return 32 bytes."""
        return self._hash.digest()
