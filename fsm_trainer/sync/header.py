"""What a sender says before the first byte of weights: 96 bytes that every receiver checks."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from fsm_trainer.groups.lease import Lease
from fsm_trainer.machine.errors import LeaseExpired, ManifestMismatch
from fsm_trainer.machine.version import Version
from fsm_trainer.sync.manifest import Manifest

_MAGIC = b"fsmpush1"
_LAYOUT = struct.Struct("<8s32s6q8x")
HEADER_BYTES = _LAYOUT.size


@dataclass(frozen=True, slots=True)
class Header:
    """One push: under which epoch, of which version, in which layout, checked how.

    ``total`` counts the weights' bytes. ``window`` is how many bytes are hashed out of each
    ``stride`` bytes of a bucket: 0 for no check, equal to the stride for all bytes.
    """

    digest: bytes
    epoch: int
    version: Version
    total: int
    window: int
    stride: int

    def pack(self) -> bytes:
        """Return the header's bytes."""
        return _LAYOUT.pack(
            _MAGIC, self.digest, self.epoch, *self.version, self.total, self.window, self.stride
        )

    @classmethod
    def unpack(cls, raw: bytes) -> Header:
        """Read what :meth:`pack` wrote. Raises ManifestMismatch when it is something else."""
        magic, digest, epoch, lineage, number, total, window, stride = _LAYOUT.unpack(raw)
        if magic != _MAGIC:
            raise ManifestMismatch(
                f"a push begins with {magic!r} instead of {_MAGIC!r}: sender and receiver run "
                "different releases, or the sender is in the middle of something else"
            )
        return cls(digest, epoch, Version(lineage, number), total, window, stride)

    def check(self, lease: Lease, manifest: Manifest) -> None:
        """Raise LeaseExpired or ManifestMismatch unless this is the push that we expect."""
        if self.epoch != lease.epoch:
            raise LeaseExpired(lease.link, lease.epoch, f"the sender is in epoch {self.epoch}")
        if self.digest != bytes.fromhex(manifest.digest):
            raise ManifestMismatch(
                f"link {lease.link!r} epoch {lease.epoch}: the sender pushes {self.total:,} bytes "
                f"under manifest {self.digest.hex()[:16]}, but {lease.membership.name} expects "
                f"{manifest.bytes:,} bytes under {manifest.digest[:16]}. Give both sides the same "
                "manifest; nothing was sent"
            )
