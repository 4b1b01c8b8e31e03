"""Where the members of a link meet: one store for the whole run.

Whoever binds picks the port and keeps it, so nothing can take it in between; every epoch has a
prefix of its own in the same store, so no epoch needs a new one. Importing this module, and
holding an :class:`Address`, needs no torch.
"""

from __future__ import annotations

import json
import socket
import threading
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

from fsm_trainer.machine.errors import PeerLost

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore


class Address(NamedTuple):
    """Where a rendezvous listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class Mark(NamedTuple):
    """The epoch is over: ``why``, and whether a ``lost`` peer is the reason."""

    why: str
    lost: bool


class Rendezvous:
    """The store that the driver hosts for the whole run; close it when the run ends."""

    def __init__(self, store: TCPStore, address: Address) -> None:
        self._store: TCPStore | None = store
        self.address = address

    @classmethod
    def bind(cls, host: str = "127.0.0.1") -> Rendezvous:
        """Listen on a free port of ``host`` and keep it; does not wait for anybody."""
        from torch._C._distributed_c10d import TCPStore

        store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        return cls(store, Address(host, store.port))

    def revoke(self, link: str, epoch: int, why: str) -> None:
        """End ``epoch`` of ``link`` for all its members; each learns it within a watch interval.

        The driver's word for "a member of this epoch is dead": no member needs to be called.
        """
        if self._store is not None:
            self._store.set(
                f"{epoch_prefix(link, epoch)}/{BROKEN}", json.dumps(Mark(why, lost=False))
            )

    def close(self) -> None:
        """Stop listening; clients that still hold a connection get an error. Idempotent."""
        self._store = None

    def __enter__(self) -> Rendezvous:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# The key under an epoch's prefix that says that the epoch is over, and why.
BROKEN = "broken"

_clients: dict[tuple[Address, str], TCPStore] = {}
_clients_lock = threading.Lock()


def epoch_prefix(link: str, epoch: int) -> str:
    """Return the store prefix that belongs to one epoch of one link, and to nothing else."""
    return f"{link}/{epoch}"


def connect(address: Address, timeout: float, owner: str = "") -> TCPStore:
    """Return this process's client of the store at ``address``, made once and then reused.

    A client serves one request at a time, a blocking one included: two owners that may wait for
    each other inside one process must not share it, hence one per ``owner``. ``timeout`` in
    seconds. Raises PeerLost when nobody answers there.
    """
    from torch._C._distributed_c10d import TCPStore
    from torch.distributed import DistError

    with _clients_lock:
        known = _clients.get((address, owner))
    if known is not None:
        return known
    try:
        client = TCPStore(
            address.host,
            address.port,
            is_master=False,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
        )
    except (DistError, RuntimeError) as error:
        raise PeerLost(
            f"no rendezvous answers at {address} within {timeout:g} s: "
            "is the driver alive, and is its host reachable from here?"
        ) from error
    with _clients_lock:
        return _clients.setdefault((address, owner), client)


def forget(address: Address, owner: str = "") -> None:
    """Drop the cached client, so that the next connect makes a new one: its peer is gone."""
    with _clients_lock:
        _clients.pop((address, owner), None)


def local_interface(address: Address) -> str:
    """Return the IP address of the interface through which this process reaches ``address``."""
    family, kind, _, _, target = socket.getaddrinfo(
        address.host, address.port, type=socket.SOCK_DGRAM
    )[0]
    with socket.socket(family, kind) as probe:
        # Connecting a datagram socket sends nothing; it only chooses the route.
        probe.connect(target)
        return str(probe.getsockname()[0])
