"""Stand-ins that cost nothing: a clock, a link's group, and workers whose resources only exist."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import NoReturn, Protocol

from fsm_trainer.machine.errors import ActionFailed, EffectFailed, LeaseExpired, PeerLost
from fsm_trainer.machine.events import Effect, Op
from fsm_trainer.machine.lifecycle import Lifecycle, Report, Resource
from fsm_trainer.machine.names import Trigger
from fsm_trainer.machine.world import System, World
from fsm_trainer.testing.subject import Order


class FakeClock:
    """Seconds that pass only when somebody sleeps."""

    def __init__(self, now: float = 0.0) -> None:
        self._now, self._lock = now, threading.Lock()

    def monotonic(self) -> float:
        """The time, in seconds."""
        return self._now

    def sleep(self, seconds: float) -> None:
        """Let time pass, at once."""
        with self._lock:
            self._now += max(0.0, seconds)


class FakeGroup:
    """The group of one link, without processes: who is in it, under which epoch, and what travels.

    It keeps a group's rules: epochs only grow, a handle of an older one raises, and so does a lost
    member. Who misses one waits out the timeout on the clock, and nobody in truth.

    Args:
        members: all that belong to it, by name.
        clock: pays for the waits.
        timeout: seconds that an operation waits for a member.
    """

    def __init__(
        self, members: Collection[str], clock: FakeClock, timeout: float = 60.0, link: str = "link"
    ) -> None:
        self._members, self._clock = frozenset(members), clock
        self._timeout, self._link = timeout, link
        self.epoch = 0
        self._inside, self._joined = set[str](), set[str]()
        self._sent: list[object] = []

    def end(self, name: str) -> Resource:
        """A member's end of it, as a resource: its epoch is that of the transition."""
        return _FakeEnd(self, name)

    def join(self, name: str, epoch: int) -> None:
        """Be a member in an epoch, once; raises LeaseExpired if that is over."""
        if epoch < self.epoch or (epoch == self.epoch and name in self._joined):
            raise LeaseExpired(self._link, epoch, f"{name} comes late, it is {self.epoch}")
        if epoch > self.epoch:
            self.epoch, self._inside, self._joined, self._sent = epoch, set(), set(), []
        self._inside.add(name)
        self._joined.add(name)

    def leave(self, name: str) -> None:
        """Be no member any more, in good order or because its process is gone."""
        self._inside.discard(name)

    def send(self, name: str, epoch: int, value: object) -> None:
        """Give all members a value; raises as :meth:`check` does."""
        self.check(name, epoch)
        self._sent = [value]

    def receive(self, name: str, epoch: int) -> object:
        """What was sent last in this epoch; raises as :meth:`check` does, and where nothing was."""
        self.check(name, epoch)
        if not self._sent:
            self._miss("nobody sent anything")
        return self._sent[0]

    def check(self, name: str, epoch: int) -> None:
        """Raise LeaseExpired for a handle of no use, and PeerLost, late, where a member is gone."""
        if epoch != self.epoch or name not in self._inside:
            raise LeaseExpired(self._link, epoch, f"{name} is not in epoch {self.epoch}")
        if missing := sorted(self._members - self._inside):
            self._miss(f"{', '.join(missing)} did not answer")

    def _miss(self, why: str) -> NoReturn:
        self._clock.sleep(self._timeout)
        raise PeerLost(f"{self._link} epoch {self.epoch}: {why} within {self._timeout:g} s")


class _FakeEnd:
    def __init__(self, group: FakeGroup, name: str) -> None:
        self._group, self._name = group, name

    def acquire(self, effect: Effect) -> None:
        self._group.join(self._name, effect.epoch)

    def release(self, effect: Effect) -> None:
        self._group.leave(self._name)


class Faulty:
    """A resource, or nothing in its place, that knows whether it is held; it fails when told to."""

    def __init__(self, held: list[Effect], inner: Resource | None = None) -> None:
        self._held, self._inner = held, inner
        self.first: Callable[[Effect], None] | None = None
        """What happens before the next acquisition, once."""

    def fail_next(self) -> None:
        """Have the next acquisition raise ActionFailed."""
        self.first = _fail

    def acquire(self, effect: Effect) -> None:
        """Take it, or whatever was to happen first."""
        first, self.first = self.first, None
        if first is not None:
            first(effect)
        if self._inner is not None:
            self._inner.acquire(effect)
        self._held.append(effect)

    def release(self, effect: Effect) -> None:
        """Give it back."""
        if self._inner is not None:
            self._inner.release(effect)
        taken = [held for held in self._held if held.resource == effect.resource]
        self._held.remove(taken[0])


def _fail(effect: Effect) -> None:
    raise ActionFailed(f"{effect}: an injected fault")


def _stop(effect: Effect) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


class Steps(Protocol):
    """A `Lifecycle`, or one that is elsewhere."""

    def begin(self, name: str, *, epoch: int, world: World) -> Report:
        """Release."""

    def acquire(self) -> Report:
        """Acquire."""

    def commit(self) -> object:
        """Be there."""

    def undo(self) -> object:
        """Go back."""

    def sever(self, link: str, world: World) -> object:
        """Give up a lease."""


def in_step(lifecycle: Steps, order: Order) -> None:
    """One end's part of a transition: the ends acquire once all have released, and open together.

    Raises EffectFailed, after an undo, `PeerAbsent` when another end failed, and what refuses it.
    """
    if order.name == Trigger.SEVER:
        lifecycle.sever(str(order.link), order.world)
        return
    report = lifecycle.begin(order.name, epoch=order.epoch, world=order.world)
    try:
        _or_raise(order, report)
        order.meet()
        _or_raise(order, lifecycle.acquire())
        if order.name == Trigger.CONNECT:
            order.meet()  # a link is open at all ends, or at none
    except BaseException:
        lifecycle.undo()
        raise
    lifecycle.commit()


def _or_raise(order: Order, report: Report) -> None:
    if (effect := report.failed) is not None:
        state = report.worker.state
        raise EffectFailed(effect.worker, order.name, str(effect), report.error, state)


class LifecycleWorker:
    """A worker under test whose lifecycle is ours: a `Lifecycle` over resources of yours, or none.

    Args:
        system: the tables.
        name: the worker.
        resources: those that are real; the others only exist.
        work: what an action does, by its name, given the order; the others do nothing.
        weights: tells weights apart; see :meth:`Subject.weights`.
        end: ends what is held, as a process's end would; None: everything is released.
    """

    def __init__(
        self,
        system: System,
        name: str,
        resources: Mapping[str, Resource] | None = None,
        *,
        work: Mapping[str, Callable[[Order], None]] | None = None,
        weights: Callable[[], object] = lambda: None,
        end: Callable[[], None] | None = None,
    ) -> None:
        known = {r for held in system.table(name).holds.values() for r in held}
        self._held, given = list[Effect](), resources or {}
        self._faulty = {r: Faulty(self._held, given.get(r)) for r in sorted(known)}
        self._work, self._weights, self._end = work or {}, weights, end
        self._fails = set[str]()
        self.lifecycle = Lifecycle(system, name, self._faulty)

    def trigger(self, order: Order) -> None:
        """Begin, acquire and commit in step with the other ends, or undo it."""
        in_step(self.lifecycle, order)

    def act(self, order: Order) -> None:
        """Do it while the action is under way; a joint one ends well at all ends, or at none."""
        with self.lifecycle.action(order.name, order.world):
            if order.name in self._fails:
                self._fails.remove(order.name)
                raise ActionFailed(f"{order.name}: an injected fault")
            if (work := self._work.get(order.name)) is not None:
                work(order)
            order.meet()

    def holds(self) -> Collection[str]:
        """What was acquired and not released, as often as it was."""
        return [effect.resource for effect in self._held]

    def epochs(self) -> Mapping[str, int]:
        """Of the links that it holds."""
        return {e.resource: e.epoch for e in self._held if e.epoch}

    def weights(self) -> object:
        """What was given for them; None while the lifecycle calls them torn."""
        return self._weights() if self.lifecycle.worker.version is not None else None

    def fail_next(self, what: str) -> bool:
        """The next acquisition of a resource, or the next action of that name, raises."""
        if what in self._faulty:
            self._faulty[what].fail_next()
        else:
            self._fails.add(what)
        return True

    def stop_at_next_link(self) -> None:
        """Stop this process before it opens its end of a link: for a parent that continues it."""
        for link in self._faulty.keys() & self.lifecycle.system.links.keys():
            self._faulty[link].first = _stop

    def stall(self, seconds: float) -> bool:
        """It has no process of its own."""
        return False

    def kill(self) -> None:
        """Let go of everything, the last first."""
        if self._end is not None:
            self._end()
            return
        for held in reversed([*self._held]):
            self._faulty[held.resource].release(replace(held, op=Op.RELEASE))
