"""Where the members of a link meet: one store for the whole run, and who came to each epoch.

Whoever binds picks the port and keeps it, so nothing can take it in between; every epoch has a
prefix of its own in the same store, so no epoch needs a new one. Importing this module, and
holding an :class:`Address`, needs no torch.
"""

from __future__ import annotations

import json
import socket
import time
import uuid
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

from fsm_trainer.machine.errors import LeaseExpired, PeerLost

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store, TCPStore

    from fsm_trainer.groups.membership import Membership

# The key under an epoch's prefix that says that the epoch is over, and why.
_BROKEN = "broken"


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
            mark = json.dumps(Mark(why, lost=False))
            self._store.set(f"{epoch_prefix(link, epoch)}/{_BROKEN}", mark)

    def close(self) -> None:
        """Stop listening; clients that still hold a connection get an error. Idempotent."""
        self._store = None

    def __enter__(self) -> Rendezvous:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RollCall:
    """One member's view of one epoch: who arrived, whether it is over, who still answers.

    Plain keys under the group's prefix; that the epoch is over stands under the epoch's own, so the
    groups of a bundle end as one. Every method blocks on the store. A backend's error seldom says
    which peer is gone ("connection closed by peer"); the roll call does.
    """

    def __init__(self, membership: Membership, store: Store) -> None:
        from torch._C._distributed_c10d import PrefixStore

        self._me = membership
        epoch = PrefixStore(epoch_prefix(membership.link, membership.epoch), store)
        self.store = PrefixStore(membership.group, epoch) if membership.group else epoch
        self._epoch = epoch

    def arrive(self, deadline: float) -> None:
        """Write one's name and wait for everybody else's, until ``deadline`` (monotonic).

        Raises PeerLost naming who is missing, LeaseExpired when this place in this epoch was
        taken before or when a member was told other members.
        """
        me = self._me
        mine = json.dumps([uuid.uuid4().hex, me.backend, *me.members])
        if self.store.compare_set(f"arrived/{me.rank}", "", mine) != mine.encode():
            raise LeaseExpired(me.link, me.epoch, f"the place of {me.name} was opened before")
        keys = [f"arrived/{rank}" for rank in range(me.size)]
        try:
            self.store.wait(keys, timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
        except RuntimeError as error:
            missing = self._without(keys)
            raise PeerLost(
                f"link {me.link!r} epoch {me.epoch}: {', '.join(missing) or 'somebody'} did not "
                f"arrive within {me.timeout:g} s (waiting: {me.name}). "
                "Check that each is alive, and open a new epoch with those that are"
            ) from error
        for rank, told in enumerate(self.store.multi_get(keys)):
            _, backend, *members = json.loads(told)
            if (backend, tuple(members)) != (me.backend, me.members):
                ours, theirs = f"{me.backend} {list(me.members)}", f"{backend} {members}"
                why = f"{me.name} was told {ours}, but {me.members[rank]} {theirs}"
                raise LeaseExpired(me.link, me.epoch, why)

    def broken(self) -> Mark | None:
        """Return the mark that ended the epoch, or None."""
        return Mark(*json.loads(self._epoch.get(_BROKEN))) if self._epoch.check([_BROKEN]) else None

    def report(self, mark: Mark) -> Mark:
        """Tell all members that the epoch is over; the first mark stays, and is returned."""
        return Mark(*json.loads(self._epoch.compare_set(_BROKEN, "", json.dumps(mark))))

    def answer(self) -> None:
        """Say that this member is alive (or left in good order)."""
        self.store.set(f"alive/{self._me.rank}", "1")

    def silent(self, patience: float) -> tuple[str, ...]:
        """Return the members that do not answer within ``patience`` seconds."""
        keys = [f"alive/{rank}" for rank in range(self._me.size)]
        try:
            self.store.wait(keys, timedelta(seconds=patience))
        except RuntimeError:
            return self._without(keys)
        return ()

    def _without(self, keys: Sequence[str]) -> tuple[str, ...]:
        found = zip(self._me.members, keys, strict=True)
        return tuple(name for name, key in found if not self.store.check([key]))


def epoch_prefix(link: str, epoch: int) -> str:
    """Return the store prefix that belongs to one epoch of one link, and to nothing else."""
    return f"{link}/{epoch}"


_clients: dict[tuple[Address, str], TCPStore] = {}


def connect(address: Address, timeout: float, owner: str) -> TCPStore:
    """Return this process's client of the store at ``address``, made once and then reused.

    A client serves one request at a time, a blocking one included: two owners that may wait for
    each other inside one process must not share it, hence one per ``owner``. ``timeout`` in
    seconds. Raises PeerLost when nobody answers there.
    """
    from torch._C._distributed_c10d import TCPStore

    known = _clients.get((address, owner))
    if known is not None:
        return known
    deadline = timedelta(seconds=timeout)
    try:
        client = TCPStore(*address, is_master=False, timeout=deadline, wait_for_workers=False)
    except RuntimeError as error:
        raise PeerLost(
            f"no rendezvous answers at {address} within {timeout:g} s: "
            "is the driver alive, and is its host reachable from here?"
        ) from error
    return _clients.setdefault((address, owner), client)


def forget(address: Address, owner: str) -> None:
    """Drop the cached client, so that the next connect makes a new one: its peer is gone."""
    _clients.pop((address, owner), None)


def local_interface(address: Address) -> str:
    """Return the IP address of the interface through which this process reaches ``address``."""
    family, kind, _, _, target = socket.getaddrinfo(*address, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        # Connecting a datagram socket sends nothing; it only chooses the route.
        probe.connect(target)
        return str(probe.getsockname()[0])
