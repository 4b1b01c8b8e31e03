"""An engine's end of the link, in the process that holds the weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

import torch

from fsm_trainer.engines.process import Vitals, resident_bytes
from fsm_trainer.groups.lease import Lease, registered_groups
from fsm_trainer.groups.membership import Membership
from fsm_trainer.sync.manifest import Manifest
from fsm_trainer.sync.push import Receiver


class LinkEnd(ABC):
    """Weights on ``device`` that pushes reach; any thread may revoke the lease.

    Its methods are what the engine calls, over a connection.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._lease: Lease | None = None
        self._receiver = Receiver()
        self._revoked = False
        self._before = registered_groups()

    @abstractmethod
    def _bind(self, tensors: Mapping[str, torch.Tensor]) -> Callable[[], None]:
        """Say how to load a bucket's tensors; see `sync.push.Receiver`."""

    def join(self, membership: Membership) -> None:
        """Open the lease and make ready for pushes; a revocation may come meanwhile."""
        self._revoked = False
        self._lease = Lease.open(membership, str(self.device))
        if self._revoked:
            self.revoke()
        try:
            self._receiver.ready(self._lease, self._bind)
        except BaseException:
            self.leave()
            raise

    def leave(self) -> None:
        """Close the lease."""
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.close()

    def revoke(self) -> None:
        """Revoke the lease, or the one that is about to open."""
        self._revoked = True
        lease = self._lease
        if lease is not None:
            lease.revoke("the worker revoked it")

    def receive(self, manifest: Manifest) -> None:
        """Receive every bucket of a push straight into the weights."""
        assert self._lease is not None  # the engine's admission has seen to it
        self._receiver.receive(self._lease, manifest, self._bind)

    def vitals(self) -> Vitals:
        """What only this process knows: of groups, those that were registered since this began."""
        lease = self._lease
        epoch = lease.epoch if lease is not None and lease.usable else None
        groups = tuple(g for g in registered_groups() if g not in self._before)
        used = torch.cuda.memory_reserved(self.device) if self.device.type == "cuda" else 0
        return Vitals(epoch, groups, resident_bytes(), used)
