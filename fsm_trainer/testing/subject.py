"""What is under test: one worker, what it is asked, and where the ends of a step meet."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from fsm_trainer.machine.errors import FsmError
from fsm_trainer.machine.world import World


class PropertyViolated(AssertionError):
    """A worker does what the tables refuse, or refuses what they allow, or is not as they say.

    Where a property of ``system.yaml`` fails, it begins with its number.
    """


class PeerAbsent(FsmError):
    """Raised when a worker waits for another end of its step, which has failed."""


@dataclass(frozen=True)
class Order:
    """What a worker is asked to do, and what it is told with it."""

    name: str
    """A trigger, or an action."""
    ends: tuple[str, ...]
    """Who does it at the same time."""
    link: str | None
    """Of a joint one, and of ``sever``."""
    epoch: int
    """Of that link: the one that opens, or the worker's own."""
    world: World
    """How everybody stands; what isn't told by it, a worker can't know."""
    meet: Callable[[], None]
    """Waits until all ends have come here; raises `PeerAbsent` if one has failed before. Who does
    an action alone says by it that it is at work."""


class Subject(Protocol):
    """One worker under test. A call that is refused, or fails, raises."""

    def trigger(self, order: Order) -> None:
        """Do a whole transition; of a joint one, this end's part of it."""

    def act(self, order: Order) -> None:
        """Do an action; of a joint one, this end's part of it."""

    def holds(self) -> Collection[str]:
        """The resources that it holds, measured where that is possible."""

    def epochs(self) -> Mapping[str, int]:
        """The links that it holds, each with its epoch."""

    def weights(self) -> object:
        """Something that is equal for equal weights; None if it has none that it would serve."""

    def fail_next(self, what: str) -> bool:
        """Have the next acquisition of a resource, or the next action of that name, fail.

        False if that can't be arranged.
        """

    def stall(self, seconds: float) -> bool:
        """Stand still for so long before its next link opens; False if that can't be arranged."""

    def kill(self) -> None:
        """End at once, as its process might; returns when nothing of it is left."""


class Meeting:
    """Where the ends of one step wait for each other, as often as they like."""

    def __init__(self, names: Iterable[str], deadline: float) -> None:
        self._visits, self._deadline = dict.fromkeys(names, 0), deadline
        self._left, self.waiting = set[str](), set[str]()
        self._changed = threading.Condition()

    def meet(self, name: str) -> None:
        """Wait until all others have met as often; raises PeerAbsent if one won't."""
        with self._changed:
            self._visits[name] += 1
            turn = self._visits[name]
            self._changed.notify_all()
            here = lambda n: self._visits[n] >= turn or n in self._left  # noqa: E731
            self.waiting.add(name)
            if self._changed.wait_for(lambda: all(map(here, self._visits)), self._deadline):
                self.waiting.remove(name)
            absent = [n for n, visits in self._visits.items() if visits < turn]
        if absent:
            raise PeerAbsent(f"{name} waited for {', '.join(absent)}, which failed or hangs")

    def leave(self, name: str) -> None:
        """Meet nobody any more."""
        with self._changed:
            self._left.add(name)
            self._changed.notify_all()


def started(does: Callable[[], None], then: Callable[[], None]) -> Future[None]:
    """Run a function in a thread, and another one when it has ended, however it has."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            does()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(None)
        finally:
            then()

    threading.Thread(target=run, daemon=True).start()
    return future
