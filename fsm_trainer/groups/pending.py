"""An operation of a lease that was started and is not known to be done."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Work

    from fsm_trainer.groups.lease import Lease


class Pending:
    """An operation in flight: its tensors belong to the backend until :meth:`wait` returns.

    On a device, work that is queued after :meth:`before_next` may use them too.
    """

    def __init__(self, lease: Lease, what: str) -> None:
        self._lease, self.what, self.began = lease, what, time.monotonic()
        # None before it is started, and when the lease's thread has freed an ended lease.
        self.work: Work | None = None
        self.poll: Callable[[Work, float], bool]

    def wait(self) -> None:
        """Return when it is done; raises as :class:`Lease` says."""
        self._lease._wait(self)

    def before_next(self) -> None:
        """Have the device do what is queued from now on after it; on the CPU, wait for it.

        Whether it succeeds is not known before :meth:`wait`.
        """
        self._lease._order(self)

    def done(self, seconds: float) -> bool:
        """Wait at most ``seconds``; whether it is done. Raises the backend's error."""
        work = self.work
        return work is not None and self.poll(work, seconds)
