"""Process groups as leases: good for one epoch, fenced, bounded, and freed when closed."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable
from itertools import count
from typing import TYPE_CHECKING

from fsm_trainer.groups import fence
from fsm_trainer.groups.membership import Membership
from fsm_trainer.groups.rendezvous import Mark, connect, forget, local_interface
from fsm_trainer.machine.errors import FsmError, LeaseExpired, PeerLost

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Work

    from fsm_trainer.groups.backend import Group
    from fsm_trainer.groups.roll import RollCall


__all__ = ["Lease", "Membership", "Pending", "open_all", "registered_groups"]

# Seconds between two looks at the epoch's "broken" key: how late a member learns what another saw.
WATCH = 0.1
# Seconds that living members get to answer a roll call: a few looks.
PATIENCE = 0.5
# Seconds that opening may be late, so that the error from inside, which names members, comes first.
GRACE = 1.0


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
        self._group: Group | None = None
        self._end: Mark | None = None
        self._suspicion: Mark | None = None
        self._lock = threading.Lock()
        self._opened = threading.Event()
        self._news = threading.Event()
        self._told = threading.Event()
        self._closing = threading.Event()
        self._silent: tuple[str, ...] = ()
        self._open_error: FsmError | None = None
        self._step = "starting"
        self._works: dict[int, Work] = {}
        self._keys = count()
        self._poll: Callable[[Work, float], bool] = _never
        self._keeper = threading.Thread(
            target=self._keep, name=f"lease {self.link}/{self.epoch}", daemon=True
        )

    @classmethod
    def open(cls, membership: Membership, device: str = "cpu") -> Lease:
        """Build and warm the group within the membership's timeout.

        Raises PeerLost naming who did not arrive, LeaseExpired when this process has opened the
        same or a newer epoch of the link, CapabilityMissing when torch lacks the backend.
        """
        lease = cls(membership, device)
        fence.admit(lease)
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
    def link(self) -> str:
        """The link's name."""
        return self.membership.link

    @property
    def epoch(self) -> int:
        """The epoch that this lease is good for."""
        return self.membership.epoch

    @property
    def rank(self) -> int:
        """This member's rank in the group."""
        return self.membership.rank

    @property
    def size(self) -> int:
        """The number of members."""
        return self.membership.size

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
        parts = [tensor.new_empty(tensor.shape) for _ in range(self.size)]
        self._start("all_gather", lambda group: group.all_gather(parts, tensor)).wait()
        return parts

    def barrier(self) -> None:
        """Return when all members came here."""
        self._start("barrier", lambda group: group.barrier()).wait()

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
        self._finish(Mark("it was closed", lost=False))
        self._closing.set()
        self._news.set()
        if self._keeper.ident is not None and self._keeper is not threading.current_thread():
            self._keeper.join(0.05 if self._works else GRACE)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- operations ------------------------------------------------------------------------------

    def _start(self, what: str, start: Callable[[Group], Work]) -> Pending:
        self._good(what)
        group = self._group
        if group is None:
            raise self._over(what)
        key = next(self._keys)
        began = time.monotonic()
        try:
            self._works[key] = start(group)
        except RuntimeError as error:
            raise self._failed(what, began, str(error)) from error
        finally:
            # An exception keeps its frames: none of ours may keep the group's sockets.
            del group, start
        return Pending(self, what, key, began)

    def _wait(self, what: str, key: int, began: float) -> None:
        deadline = began + self.membership.timeout
        while True:
            if self._end is not None:
                raise self._over(what)
            left = deadline - time.monotonic()
            if left <= 0:
                raise self._failed(what, began, "no answer in time")
            try:
                done = self._done(key, min(WATCH / 2, left))
            except RuntimeError as error:
                raise self._failed(what, began, str(error)) from error
            if done:
                break
        self._works.pop(key, None)
        # After an abort a collective may end without an error: its result counts only if the
        # lease is still good now.
        self._good(what)

    def _done(self, key: int, seconds: float) -> bool:
        # Gone when the lease's thread has freed an ended lease meanwhile.
        work = self._works.get(key)
        try:
            return work is not None and self._poll(work, seconds)
        finally:
            # An exception keeps its frames, and a work keeps the group's sockets.
            del work

    def _good(self, what: str) -> None:
        if self._end is not None:
            raise LeaseExpired(self.link, self.epoch, f"{self._story()} (asked for: {what})")

    def _failed(self, what: str, began: float, cause: str) -> FsmError:
        after = time.monotonic() - began
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
                where, cause = self.membership.store, _first(str(error))
                self._finish(Mark(f"the rendezvous at {where} is gone ({cause})", lost=False))
                self._told.set()
        self._free()

    def _try_open(self) -> RollCall | None:
        from fsm_trainer.groups.backend import build
        from fsm_trainer.groups.roll import RollCall

        me = self.membership
        deadline = time.monotonic() + me.timeout
        owner = f"{me.link} {me.name}"
        try:
            self._step = f"reaching the rendezvous at {me.store}"
            roll = RollCall(me, connect(me.store, me.timeout, owner))
            self._step = f"waiting for {', '.join(me.members)}"
            roll.arrive(deadline)
            self._step = f"building the {me.backend} group of {', '.join(me.members)}"
            group = build(me, roll.store, self.device, local_interface(me.store))
            self._step = f"the first collective of {', '.join(me.members)}"
            _warm(group, deadline)
        except FsmError as error:
            self._open_error = error
        except Exception as error:  # whatever it is, who waits for the opening must hear of it
            # The client may be in the middle of an answer: the next epoch takes a new one.
            forget(me.store, owner)
            self._open_error = PeerLost(
                f"link {me.link!r} epoch {me.epoch}: {me.name} failed in {self._step}: "
                f"{_first(str(error))}. A member, or the rendezvous, died meanwhile: check each, "
                "and open a new epoch with those that live"
            )
        else:
            self._poll, self._group = group.poll, group
            return roll
        return None

    def _watch(self, roll: RollCall) -> None:
        """Look for the end of the epoch, and tell it on; returns when there is an end."""
        while not self._closing.is_set():
            self._news.wait(WATCH)
            end, told = self._end or self._suspicion, roll.broken()
            if end is None and told is None:
                continue
            if told is None and end is not None and not self._closing.is_set():
                told = roll.report(end)
            if told is not None:
                self._finish(told)
            roll.answer()
            if self._end is not None and self._end.lost:
                self._silent = roll.silent(PATIENCE)
            self._told.set()
            return
        roll.answer()

    def _free(self) -> None:
        """Let go of the group when nothing is in flight: gloo's destructor would block on it."""
        group, self._group = self._group, None
        if group is None:
            return
        group.abort()
        # A tree broadcast waits for a few peers in turn, one timeout each.
        until = time.monotonic() + 4 * self.membership.timeout
        while time.monotonic() < until:
            if all(work.is_completed() for work in tuple(self._works.values())):
                break
            time.sleep(WATCH / 2)
        self._works.clear()


class Pending:
    """An operation in flight: its tensors belong to the backend until :meth:`wait` returns."""

    def __init__(self, lease: Lease, what: str, key: int, began: float) -> None:
        self._lease, self._what, self._key, self._began = lease, what, key, began

    def wait(self) -> None:
        """Return when it is done; raises as :class:`Lease` says. Call it once."""
        self._lease._wait(self._what, self._key, self._began)


def open_all(memberships: Iterable[Membership], device: str = "cpu") -> tuple[Lease, ...]:
    """Open a bundle of groups in the one global order (link name, then index), all or none.

    All processes open in the same order whatever order they were told, so that two that share
    several groups can't wait for each other. Returns the leases in that order: use them in it,
    for the same reason. Raises what :meth:`Lease.open` raises, with nothing left open here.
    """
    leases: list[Lease] = []
    try:
        for membership in sorted(memberships, key=lambda one: one.order):
            leases.append(Lease.open(membership, device))
    except BaseException:
        for lease in leases:
            lease.close()
        raise
    return tuple(leases)


def registered_groups() -> tuple[str, ...]:
    """Return the names of the groups that torch.distributed has registered in this process."""
    registry = sys.modules.get("torch.distributed.distributed_c10d")
    return () if registry is None else tuple(registry._world.pg_names.values())


def _warm(group: Group, deadline: float) -> None:
    # Backends connect lazily: without this the first push would pay, and fail, instead of open.
    if not group.poll(group.barrier(), max(deadline - time.monotonic(), 0.001)):
        raise RuntimeError("no answer in time")


def _never(work: Work, seconds: float) -> bool:
    return False


def _first(text: str) -> str:
    """Return the first line of a backend's error: what follows is a C++ stack."""
    return text.strip().splitlines()[0][:300] if text.strip() else "no text"
