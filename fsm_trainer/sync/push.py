"""Push weights over a lease: flat buckets, two of them in turn, and an acknowledgement.

    header -> every member's verdict -> bucket, bucket, ... -> every member's checksum

A push is complete or raises, on every member: after the last bucket all learn whether all got the
same bytes and could load them. What a raise leaves behind is torn; the machine says so, not this
module. A refusal before the first bucket leaves the lease good; any later error ends it.

The sender is rank 0.
"""

from __future__ import annotations

import struct
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

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
from fsm_trainer.sync.buckets import Checksum, Parcel, settle
from fsm_trainer.sync.checksums import raw_bytes
from fsm_trainer.sync.manifest import Manifest, Transfer
from fsm_trainer.sync.transports import Transport, transport

# The manifest's digest, the sender's epoch, the weights' lineage and number.
_HEADER = struct.Struct("<32s3q")

Views = Mapping[str, torch.Tensor]
Bind = Callable[[Views], Callable[[], None]]
"""Given a bucket's tensors, says how to load them; asked once for a bucket's place in memory."""


class _End:
    """One end of pushes; what its transport needs is kept over the pushes of a lease."""

    def __init__(self) -> None:
        self._lease: Lease | None = None
        self._known: Manifest | None = None
        self._transport: Transport

    def _over(self, lease: Lease) -> Transport:
        if self._lease is not lease:
            self._lease, self._transport = lease, transport(lease)
        return self._transport

    def _drop(self) -> None:
        """Keep no buffer: an operation that was cut off may still write to it."""
        self._transport.drop()


@contextmanager
def all_or_over(
    lease: Lease, what: str, let_go: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """End the lease for all members on an error, once let go: they wait for what won't come."""
    try:
        yield
    except Exception as error:
        let_go()
        lease.revoke(f"{what} failed at {lease.membership.name}: {error}")
        raise


class Sender(_End):
    """The sending side; later pushes over the same lease reuse its two buckets."""

    def ready(self, lease: Lease) -> None:
        """Do, when a lease has opened, what its first push would have to wait for."""
        self._over(lease).warm(self._known)

    def send(
        self,
        lease: Lease,
        named_tensors: Iterable[tuple[str, torch.Tensor]],
        manifest: Manifest,
        version: Version,
    ) -> Transfer:
        """Send all tensors of ``manifest``, which come in its order; gives bytes and seconds.

        The seconds are those from all verdicts to all checksums: packing, travelling, loading and
        checking, and no wait for who comes late.
        They are consumed bucket by bucket: a tensor must live until its bucket is full, so that of
        gathered shards one bucket exists at once.
        Raises ManifestMismatch (a receiver refused, nothing was sent; or these are not the
        manifest's tensors, which ends the lease), SelfCheckFailed (a receiver got other bytes),
        ActionFailed (a receiver could not load), PeerLost, LeaseExpired.
        """
        header = _HEADER.pack(bytes.fromhex(manifest.digest), lease.epoch, *version)
        way = self._over(lease)
        manifest = way.known(manifest)
        lease.broadcast(_tensor(header))
        fit = _agree(lease, None, way.fits(manifest))
        began = time.monotonic()
        with all_or_over(lease, "the push", self._drop):
            if not fit:
                way.prepare(manifest)
            checksum = Checksum()
            aliases = {alias for alias, _ in manifest.aliases}
            fresh = (pair for pair in named_tensors if pair[0] not in aliases)
            for parcel in way.outgoing(manifest, checksum.add):
                parcel.fill(fresh)
            value = checksum.value()
        _acknowledge(lease, value, False)
        self._known = manifest
        return Transfer(manifest.bytes, time.monotonic() - began)


class Receiver(_End):
    """The receiving side; later pushes over the same lease reuse its two buckets."""

    def ready(self, lease: Lease, bind: Bind) -> None:
        """Do, when a lease has opened, what its first push would have to wait for."""
        way, manifest = self._over(lease), self._known
        if manifest is not None:
            for parcel in way.warm(manifest):
                way.loads[parcel.index] = _bound(parcel, manifest, bind)
        else:
            way.warm(None)

    def receive(self, lease: Lease, manifest: Manifest, bind: Bind) -> Version:
        """Receive one push and load it bucket by bucket, tied names too, as ``bind`` says.

        Gives the version that the sender told.

        The tensors are views of the bucket on the lease's device; loading copies them. What was
        bound is kept for later pushes under the same manifest, and goes with the lease. Raises what
        loading raised (after the push has ended in good order), ManifestMismatch (other manifest,
        nothing was received), SelfCheckFailed, ActionFailed (another receiver failed), PeerLost,
        LeaseExpired.
        """
        header = _tensor(bytes(_HEADER.size))
        way = self._over(lease)
        manifest = way.known(manifest)
        lease.broadcast(header)
        digest, epoch, *version = _HEADER.unpack(raw_bytes(header))
        refusal = _refusal(lease, manifest, digest.hex(), epoch)
        fit = _agree(lease, refusal, way.fits(manifest))
        with all_or_over(lease, "the push", self._drop):
            if not fit:
                way.prepare(manifest)
            checksum, error = _load_all(way, manifest, bind)
        _acknowledge(lease, checksum, error is not None)
        if error is not None:
            try:
                raise error
            finally:
                # The error keeps this frame: a cycle would keep the buckets with it.
                del error
        self._known = manifest
        return Version(*version)


def _load_all(way: Transport, manifest: Manifest, bind: Bind) -> tuple[bytes, Exception | None]:
    checksum, error = Checksum(), None
    for parcel in way.incoming(manifest):
        checksum.add(parcel)
        # After an error too: the sender can't be stopped, and is told at the end.
        error = error or _loaded(way, parcel, manifest, bind)
    if error is not None:
        # An error keeps its frames, and their callers: none of them may keep the buckets, nor it.
        traceback.clear_frames(error.__traceback__)
        del parcel
    try:
        return checksum.value(), error
    finally:
        del error


def _loaded(way: Transport, parcel: Parcel, manifest: Manifest, bind: Bind) -> Exception | None:
    try:
        load = way.loads.get(parcel.index)
        if load is None:
            load = _bound(parcel, manifest, bind)
            if parcel.kept:
                way.loads[parcel.index] = load
        load()
    except Exception as error:
        return error
    return None


def _bound(parcel: Parcel, manifest: Manifest, bind: Bind) -> Callable[[], None]:
    views = parcel.views
    tied = {alias: views[first] for alias, first in manifest.aliases if first in views}
    return bind(views | tied)


# -- agreement -------------------------------------------------------------------------------------


def _tensor(raw: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


def _gather(lease: Lease, raw: bytes) -> dict[str, bytes]:
    """Return what each member says, by name; equal lengths."""
    said = (bytes(raw_bytes(row)) for row in lease.all_gather(_tensor(raw)))
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


def _agree(lease: Lease, refusal: FsmError | None, fit: bool) -> bool:
    """Let all members know whether all accept the header; raise on all if one doesn't.

    Returns whether it fits what all of them keep from the push before.
    """
    said = _gather(lease, bytes([refusal is not None, fit]))
    if refusal is not None:
        raise refusal
    refused = [name for name, row in said.items() if row[0]]
    if refused:
        raise ManifestMismatch(
            f"link {lease.link!r} epoch {lease.epoch}: {', '.join(refused)} refused the push of "
            f"{lease.membership.members[0]}, holding another manifest; nothing was sent"
        )
    return all(row[1] for row in said.values())


def _acknowledge(lease: Lease, checksum: bytes, failed_here: bool) -> None:
    """Compare all members' checksums and outcomes; raise on all others if one is not in order."""
    settle(lease.device)
    said = _gather(lease, bytes([failed_here]) + checksum)
    if failed_here:
        return  # the caller has the error, and raises it
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
