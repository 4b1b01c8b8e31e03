"""The roll call of one epoch: who arrived, whether it is over, who still answers.

Plain keys under the epoch's prefix in the rendezvous' store. A backend's error seldom says which
peer is gone ("connection closed by peer"); the roll call does.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from torch._C._distributed_c10d import PrefixStore
from torch.distributed import DistError

from fsm_trainer.groups.rendezvous import BROKEN, Mark, epoch_prefix
from fsm_trainer.machine.errors import LeaseExpired, PeerLost

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from fsm_trainer.groups.membership import Membership


class RollCall:
    """One member's view of one epoch's keys; every method blocks on the store."""

    def __init__(self, membership: Membership, store: Store) -> None:
        self._me = membership
        self.store = PrefixStore(epoch_prefix(membership.link, membership.epoch), store)

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
        except DistError as error:
            missing = self._without(keys)
            raise PeerLost(
                f"link {me.link!r} epoch {me.epoch}: {', '.join(missing) or 'somebody'} did not "
                f"arrive within {me.timeout:g} s (waiting: {me.name}). "
                "Check that each is alive, and open a new epoch with those that are"
            ) from error
        for rank, told in enumerate(self.store.multi_get(keys)):
            _, backend, *members = json.loads(told)
            if (backend, tuple(members)) != (me.backend, me.members):
                raise LeaseExpired(
                    me.link,
                    me.epoch,
                    f"{me.name} was told {me.backend} {list(me.members)}, but "
                    f"{me.members[rank]} {backend} {members}",
                )

    def broken(self) -> Mark | None:
        """Return the mark that ended the epoch, or None."""
        return Mark(*json.loads(self.store.get(BROKEN))) if self.store.check([BROKEN]) else None

    def report(self, mark: Mark) -> Mark:
        """Tell all members that the epoch is over; the first mark stays, and is returned."""
        return Mark(*json.loads(self.store.compare_set(BROKEN, "", json.dumps(mark))))

    def answer(self) -> None:
        """Say that this member is alive (or left in good order)."""
        self.store.set(f"alive/{self._me.rank}", "1")

    def silent(self, patience: float) -> tuple[str, ...]:
        """Return the members that do not answer within ``patience`` seconds."""
        keys = [f"alive/{rank}" for rank in range(self._me.size)]
        try:
            self.store.wait(keys, timedelta(seconds=patience))
        except DistError:
            return self._without(keys)
        return ()

    def _without(self, keys: Sequence[str]) -> tuple[str, ...]:
        found = zip(self._me.members, keys, strict=True)
        return tuple(name for name, key in found if not self.store.check([key]))
