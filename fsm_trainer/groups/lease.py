"""Process groups as leases: good for one epoch, fenced, bounded, and freed when closed."""

from __future__ import annotations

import atexit
import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from fsm_trainer.groups.membership import Membership
from fsm_trainer.groups.pending import Pending
from fsm_trainer.groups.rendezvous import Mark, RollCall, connect, forget, local_interface
from fsm_trainer.machine.errors import FsmError, LeaseExpired, PeerLost

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Work

    from fsm_trainer.groups.backend import Group
    from fsm_trainer.groups.rendezvous import Address

__all__ = ["Lease", "Membership", "Pending", "open_all", "registered_groups"]

# Seconds between two looks at the epoch's "broken" key: how late a member learns what another saw.
WATCH = 0.1
# Seconds that living members get to answer a roll call: a few looks.
PATIENCE = 0.5
# Seconds that opening may be late, so that the error from inside, which names members, comes first.
GRACE = 1.0

_CLOSED = Mark("it was closed", lost=False)


class Lease:
    """A process group that is good for one epoch: fenced, bounded, and freed by :meth:`close`.

    Every operation is refused (LeaseExpired) once the lease is not good, ends within ``timeout``
    seconds, and is checked again afterwards, because a collective can return normally after an
    abort. When an operation fails, the lease is over for all members: each learns it within
    ``WATCH`` seconds and the error names the members that no longer answer (PeerLost).

    One thread uses a lease; any thread may call :meth:`revoke` and :meth:`close`. After an error
    the tensors of that operation must be dropped, not reused: gloo can't be interrupted and may
    write to them until its own timeout.

    Each lease has one thread of its own, which opens the group, watches over its epoch, and frees
    it: all of these may block in C++ without a deadline, and the caller must not.
    """

    def __init__(self, membership: Membership, device: str) -> None:
        """Use :meth:`open`."""
        self.membership, self.device = membership, device
        self.link, self.epoch = membership.link, membership.epoch
        self.rank, self.size = membership.rank, membership.size
        self._group: Group | None = None
        self._pending, self._goes_too = set[Pending](), list[Callable[[], None]]()
        self._end: Mark | None = None
        self._suspicion: Mark | None = None
        self._silent: tuple[str, ...] = ()
        self._lock = threading.Lock()
        self._opened = threading.Event()
        self._news = threading.Event()
        self._told = threading.Event()
        self._open_error: FsmError | None = None
        self._step, self._advanced = "starting", 0.0
        self._keeper = threading.Thread(
            target=self._keep, name=f"lease {self.link}/{self.epoch}", daemon=True
        )

    @classmethod
    def open(cls, membership: Membership, device: str = "cpu") -> Lease:
        """Build and warm the group within the membership's timeout; ``device`` has the weights.

        Operations take tensors on the CPU, and with NCCL on ``device`` too.
        Raises PeerLost naming who did not arrive, LeaseExpired when this process has opened the
        same or a newer epoch of the link, CapabilityMissing when torch lacks the backend.
        """
        if membership.kind != "group":
            membership = replace(membership, backend="gloo")
        lease = cls(membership, device)
        _admit(lease)
        lease._keeper.start()
        error: FsmError | None
        if lease._opened.wait(membership.timeout + GRACE):
            error, lease._open_error = lease._open_error, None
        else:
            error = PeerLost(
                f"link {lease.link!r} epoch {lease.epoch}: {membership.name} is stuck since "
                f"{membership.timeout:g} s in {lease._step}. Is {membership.store} stopped, or "
                "did a member die after it had arrived?"
            )
        if error is not None:
            lease.close()
            try:
                raise error
            finally:
                # The error keeps this frame: a cycle would keep the group's sockets with it.
                del error
        return lease

    @property
    def usable(self) -> bool:
        """Whether the next operation would be let through."""
        return self._end is None and self._suspicion is None and self._group is not None

    def start_broadcast(self, tensor: torch.Tensor, source: int = 0) -> Pending:
        """Start a broadcast and return at once; its result counts only after ``wait``."""
        return self._start("broadcast", lambda group: group.broadcast(tensor, source))

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None:
        """Overwrite ``tensor`` (any shape, contiguous) everywhere with that of rank ``source``."""
        self.start_broadcast(tensor, source).wait()

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum ``tensor`` (any shape) over all members, in place."""
        self._start("all_reduce", lambda group: group.all_reduce(tensor)).wait()

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return every member's ``tensor`` by rank; equal shapes, meant for small ones."""
        rows = tensor.new_zeros((self.size, *tensor.shape))
        rows[self.rank] = tensor
        self.all_reduce(rows)
        return list(rows)

    def start_barrier(self) -> Pending:
        """Say that this member came here; ``wait`` returns when all did."""
        return self._start("barrier", lambda group: group.barrier())

    def barrier(self) -> None:
        """Return when all members came here."""
        self.start_barrier().wait()

    def at_end(self, let_go: Callable[[], None]) -> None:
        """Call ``let_go`` when the lease is over, from its own thread; now if it is over."""
        with self._lock:
            if self._end is None:
                self._goes_too.append(let_go)
                return
        let_go()

    def revoke(self, why: str = "it was revoked") -> None:
        """End the lease for all its members, from any thread: every further use raises.

        What blocks in an operation gets LeaseExpired within ``WATCH`` seconds here, and the peers
        soon after. NCCL's operations are aborted (up to a second); gloo's can't be: their sockets
        and threads stay until they end by themselves, within the timeout.
        """
        self._finish(Mark(why, lost=False))
        group = self._group
        if group is not None:
            group.abort()

    def close(self) -> None:
        """Free the group's threads, sockets and device memory; idempotent, any thread.

        Returns in well under a second. If an operation was cut off, gloo frees them when it
        gives that up, at most one timeout later.
        """
        self._finish(_CLOSED)
        if self._keeper.ident is not None and self._keeper is not threading.current_thread():
            self._keeper.join(0.05 if self._pending else GRACE)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- operations ------------------------------------------------------------------------------

    def _start(self, what: str, start: Callable[[Group], Work]) -> Pending:
        self._good(what)
        pending, group = Pending(self, what), self._group
        if group is None:
            raise self._over(what)
        try:
            pending.work, pending.poll = start(group), group.poll
        except RuntimeError as error:
            raise self._failed(pending, error) from error.with_traceback(None)
        finally:
            # An exception keeps its frames: none of ours may keep the group's sockets.
            del group
        self._pending.add(pending)
        return pending

    def _order(self, pending: Pending) -> None:
        self._good(pending.what)
        work, group = pending.work, self._group
        try:
            ordered = work is not None and group is not None and group.orders(work)
        except RuntimeError as error:
            raise self._failed(pending, error) from error.with_traceback(None)
        finally:
            del group
        if not ordered:
            self._wait(pending)

    def _wait(self, pending: Pending) -> None:
        done = False
        while not done:
            if self._end is not None:
                raise self._over(pending.what)
            # Counted from where it could begin. Looked at once whatever the time: who asks late
            # may find it done.
            began = max(pending.began, self._advanced)
            left = began + self.membership.timeout - time.monotonic()
            try:
                done = pending.done(min(WATCH / 2, max(left, 0.001)))
            except RuntimeError as error:
                raise self._failed(pending, error) from error.with_traceback(None)
            if not done and left <= 0:
                raise self._failed(pending, TimeoutError("no answer in time"))
        self._pending.discard(pending)
        self._advanced = time.monotonic()
        # After an abort a collective may end without an error: its result counts only if the
        # lease is still good now.
        self._good(pending.what)

    def _good(self, what: str) -> None:
        if self._end is not None:
            raise LeaseExpired(self.link, self.epoch, f"{self._story()} (asked for: {what})")

    def _failed(self, pending: Pending, cause: Exception) -> FsmError:
        what, after = pending.what, time.monotonic() - pending.began
        why = f"{what} at {self.membership.name} failed after {after:.1f} s: {_first(cause)}"
        self._suspicion = Mark(why, lost=True)
        self._news.set()
        # Somebody may have ended the epoch on purpose, and its sockets closed before we heard.
        self._told.wait(PATIENCE + GRACE)
        self._finish(self._suspicion)
        return self._over(what)

    def _over(self, what: str) -> FsmError:
        """Return the error for an operation that the lease's end cut off."""
        story = self._story()
        if self._end is None or not self._end.lost:
            return LeaseExpired(self.link, self.epoch, f"{story} (during {what})")
        return PeerLost(
            f"link {self.link!r} epoch {self.epoch}: {story}. Don't use the result of {what}; "
            "open a new epoch with the members that live"
        )

    def _story(self) -> str:
        end = self._end
        if end is None:
            return "it never opened"
        if not end.lost:
            return end.why
        self._told.wait(PATIENCE + GRACE)
        all_of = ", ".join(self.membership.members)
        silent = ", ".join(self._silent)
        return f"{f'no word from {silent}' if silent else f'all of {all_of} answer'}; {end.why}"

    def _finish(self, end: Mark) -> None:
        with self._lock:
            self._end = self._end or end
        self._news.set()

    # -- the lease's own thread --------------------------------------------------------------------

    def _keep(self) -> None:
        roll = self._try_open()
        self._opened.set()
        if roll is not None:
            try:
                self._watch(roll)
            except RuntimeError as error:
                where, cause = self.membership.store, _first(error)
                self._finish(Mark(f"the rendezvous at {where} is gone ({cause})", lost=False))
                self._told.set()
        try:
            for let_go in self._goes_too:
                let_go()
        finally:
            self._goes_too.clear()
            self._free()

    def _try_open(self) -> RollCall | None:
        from fsm_trainer.groups.backend import build

        me = self.membership
        deadline = time.monotonic() + me.timeout
        owner = f"{me.link}/{me.group} {me.name}"
        try:
            self._step = f"reaching the rendezvous at {me.store}"
            roll = RollCall(me, connect(me.store, me.timeout, owner))
            self._step = f"waiting for {', '.join(me.members)}"
            roll.arrive(deadline)
            self._step = f"building the {me.backend} group of {', '.join(me.members)}"
            group = build(me, roll.store, self.device, local_interface(me.store))
            self._step = f"the first collective of {', '.join(me.members)}"
            # Backends connect lazily: without this the first push would pay, and fail.
            if not group.poll(group.first(), max(deadline - time.monotonic(), 0.001)):
                raise RuntimeError("no answer in time")
        except FsmError as error:
            self._open_error = error
        except Exception as error:  # whatever it is, who waits for the opening must hear of it
            # The client may be in the middle of an answer: the next epoch takes a new one.
            forget(me.store, owner)
            self._open_error = PeerLost(
                f"link {me.link!r} epoch {me.epoch}: {me.name} failed in {self._step}: "
                f"{_first(error)}. A member, or the rendezvous, died meanwhile: check each, "
                "and open a new epoch with those that live"
            )
        else:
            self._group = group
            return roll
        return None

    def _watch(self, roll: RollCall) -> None:
        """Look for the end of the epoch, and tell it on; returns when there is an end."""
        end = told = None
        while end is None and told is None:
            self._news.wait(WATCH)
            end, told = self._end or self._suspicion, roll.broken()
        if told is None and end is not None and end is not _CLOSED:
            told = roll.report(end)
        if told is not None:
            self._finish(told)
        roll.answer()
        if self._end is not None and self._end.lost:
            self._silent = roll.silent(PATIENCE)
        self._told.set()

    def _free(self) -> None:
        """Let go of the group when nothing is in flight: gloo's destructor would block on it."""
        group, self._group = self._group, None
        if group is None:
            return
        group.abort()
        # A tree broadcast waits for a few peers in turn, one timeout each.
        until = time.monotonic() + 4 * self.membership.timeout
        works = [pending.work for pending in tuple(self._pending) if pending.work is not None]
        while time.monotonic() < until and not all(work.is_completed() for work in works):
            time.sleep(WATCH / 2)
        for pending in tuple(self._pending):
            pending.work = None
        self._pending.clear()


_newest: dict[tuple[Address, str, str, str], Lease] = {}
"""The last lease that each member opened in this process: only a newer epoch follows it."""
_newest_lock = threading.Lock()


def _admit(lease: Lease) -> None:
    """Let ``lease`` open, and end the link's older one; LeaseExpired unless its epoch is newer."""
    me = lease.membership
    place = (me.store, me.link, me.group, me.name)
    with _newest_lock:
        older = _newest.get(place)
        if older is not None and me.epoch <= older.epoch:
            why = f"{me.name} has opened epoch {older.epoch} already"
            raise LeaseExpired(me.link, me.epoch, why)
        _newest[place] = lease
    if older is not None:
        older.revoke(f"epoch {me.epoch} was opened")


@atexit.register
def _close_all() -> None:
    """A lease's thread must not be inside torch when Python ends."""
    for lease in tuple(_newest.values()):
        lease.close()


def open_all(memberships: Iterable[Membership], device: str = "cpu") -> tuple[Lease, ...]:
    """Open a bundle of groups in the one global order (that of their names), all or none.

    All processes open in the same order whatever order they were told, so that two that share
    several groups can't wait for each other. Returns the leases in that order: use them in it,
    for the same reason. Raises what :meth:`Lease.open` raises, with nothing left open here.
    """
    with contextlib.ExitStack() as opened:
        leases = tuple(
            opened.enter_context(Lease.open(membership, device))
            for membership in sorted(memberships, key=lambda one: (one.link, one.group))
        )
        opened.pop_all()
    return leases


def registered_groups() -> tuple[str, ...]:
    """Return the names of the groups that torch.distributed has registered in this process."""
    registry = sys.modules.get("torch.distributed.distributed_c10d")
    return () if registry is None else tuple(registry._world.pg_names.values())


def _first(error: Exception) -> str:
    """Return the first line of a backend's error: what follows is a C++ stack."""
    return f"{error}".strip().partition("\n")[0][:300] or type(error).__name__
