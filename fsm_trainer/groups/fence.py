"""The leases of this process: one live epoch a link, only ever a newer one, none left at exit."""

from __future__ import annotations

import atexit
import threading
import weakref
from typing import TYPE_CHECKING

from fsm_trainer.groups.rendezvous import Address
from fsm_trainer.machine.errors import LeaseExpired

if TYPE_CHECKING:
    from fsm_trainer.groups.lease import Lease

_newest: dict[tuple[Address, str, str], tuple[int, weakref.ref[Lease]]] = {}
_lock = threading.Lock()


def admit(lease: Lease) -> None:
    """Let ``lease`` open, and end the link's older lease if it lives.

    Raises LeaseExpired when this member has opened the same or a newer epoch here.
    """
    me = lease.membership
    place = (me.store, me.link, me.name)
    with _lock:
        epoch, reference = _newest.get(place, (-1, None))
        if me.epoch <= epoch:
            raise LeaseExpired(me.link, me.epoch, f"{me.name} has opened epoch {epoch} already")
        _newest[place] = (me.epoch, weakref.ref(lease))
    older = reference() if reference is not None else None
    if older is not None:
        older.revoke(f"epoch {me.epoch} was opened")


@atexit.register
def close_all() -> None:
    """Close what is still open: a lease's thread must not be inside torch when Python ends."""
    with _lock:
        leases = [reference() for _, reference in _newest.values()]
    for lease in leases:
        if lease is not None:
            lease.close()
