"""An engine's end of the link, in the process that holds the weights."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from fsm_trainer.machine.errors import ActionFailed, FsmError

if TYPE_CHECKING:
    from fsm_trainer.groups.lease import Lease
    from fsm_trainer.groups.membership import Membership


class Vitals(NamedTuple):
    """What only the process that holds the weights knows; see `Health`."""

    epoch: int | None
    groups: tuple[str, ...]
    resident_bytes: int
    device_bytes: int


class LinkEnd:
    """Holds the lease; any thread may revoke it, also while it opens."""

    def __init__(self) -> None:
        from fsm_trainer.groups.lease import registered_groups

        self.lease: Lease | None = None
        self._revoked = False
        self._before = registered_groups()

    def join(self, membership: Membership, device: str, ready: Callable[[Lease], None]) -> None:
        """Open the lease and make ``ready`` for pushes; a revocation may come meanwhile."""
        from fsm_trainer.groups.lease import Lease

        self._revoked = False
        self.lease = Lease.open(membership, device)
        if self._revoked:
            self.revoke()
        try:
            ready(self.lease)
        except BaseException:
            self.leave()
            raise

    def leave(self) -> None:
        """Close the lease."""
        lease, self.lease = self.lease, None
        if lease is not None:
            lease.close()

    def revoke(self) -> None:
        """Revoke the lease, or the one that is about to open."""
        self._revoked = True
        lease = self.lease
        if lease is not None:
            lease.revoke("the worker revoked it")

    @property
    def groups(self) -> tuple[int | None, tuple[str, ...]]:
        """The epoch of a lease that is good, and the groups registered here since this began."""
        from fsm_trainer.groups.lease import registered_groups

        lease = self.lease
        epoch = lease.epoch if lease is not None and lease.usable else None
        return epoch, tuple(g for g in registered_groups() if g not in self._before)


def portable(method: str, error: Exception) -> Exception:
    """Return an error that the client's process can read: our own, or ActionFailed."""
    if isinstance(error, FsmError):
        return error
    last = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{Path(last.filename).name}:{last.lineno}"
    return ActionFailed(f"the engine could not {method}: {type(error).__name__}: {error} ({where})")


def resident_bytes() -> int:
    """The resident set of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
