"""An event loop in which time is virtual and the order of what is ready comes from a seed.

It knows no threads, no sockets and no executor: code that reaches for one of them gets
NotImplementedError, so nothing real can slip into a run that must be repeatable.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context
from random import Random
from typing import Any, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Stuck(Exception):
    """Raised when nothing will ever happen again, or not before the virtual deadline."""


class SimulatedLoop(asyncio.AbstractEventLoop):
    """Runs one coroutine to its end.

    ``stop`` is read after each callback; what it gives, if anything, is raised.
    """

    def __init__(self, random: Random, stop: Callable[[], Exception | None] = lambda: None) -> None:
        self._random, self._stop, self._now = random, stop, 0.0
        self._ready: list[asyncio.Handle] = []
        self._timers: list[tuple[float, float, int, asyncio.TimerHandle]] = []
        self._count = 0
        self.problems: list[str] = []
        """What callbacks raised: nobody else would hear of it."""

    def time(self) -> float:
        """Virtual seconds since the beginning."""
        return self._now

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """Run it at this time, after or before whatever else is ready."""
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_later(
        self,
        delay: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """Run it ``delay`` virtual seconds from now."""
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """Run it at a time."""
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self._count += 1
        heapq.heappush(self._timers, (when, self._random.random(), self._count, handle))
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """A cancelled timer is skipped when its time comes."""

    def create_future(self) -> asyncio.Future[Any]:
        """A future of this loop."""
        return asyncio.Future(loop=self)

    def create_task(
        self,
        coro: Coroutine[Any, Any, T] | Generator[Any, None, T],
        *,
        name: str | None = None,
        context: Context | None = None,
        **more: Any,
    ) -> asyncio.Task[T]:
        """A task of this loop."""
        return asyncio.Task(coro, loop=self, name=name, context=context)

    def get_debug(self) -> bool:
        """Never: debugging looks at the real clock."""
        return False

    def is_running(self) -> bool:
        """Whether code of this loop runs now."""
        return asyncio._get_running_loop() is self

    def is_closed(self) -> bool:
        """There is nothing to close."""
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Keep what went wrong in a callback."""
        if "never retrieved" not in context["message"]:  # told when garbage is collected: any time
            self.problems.append(f"{context['message']}: {context.get('exception')!r}")

    def run(self, main: Coroutine[Any, Any, T], until: float) -> T:
        """Run ``main`` to its end.

        Raises:
            Stuck: it would not end before the virtual time ``until``.
        """
        task = self.create_task(main)
        asyncio._set_running_loop(self)
        try:
            while not task.done():
                if not self._ready:
                    self._jump(until)
                place = int(self._random.random() * len(self._ready))
                self._ready[place], self._ready[-1] = self._ready[-1], self._ready[place]
                handle = self._ready.pop()
                if not handle.cancelled():
                    handle._run()
                if (problem := self._stop()) is not None:
                    raise problem
        finally:
            self._end()
            asyncio._set_running_loop(None)
        return task.result()

    def _end(self) -> None:
        """Cancel what is left, so that no coroutine is forgotten half-way."""
        for task in asyncio.all_tasks(self):
            task.cancel()
        while self._ready:
            self._ready.pop()._run()

    def _jump(self, until: float) -> None:
        """Go to the time of the next timer."""
        timers = self._timers
        while timers and timers[0][3].cancelled():
            heapq.heappop(timers)
        if not timers:
            raise Stuck(f"after {self._now:.0f} virtual seconds nothing will ever happen again")
        self._now = timers[0][0]
        if self._now > until:
            raise Stuck(f"no end within {until:.0f} virtual seconds")
        while timers and timers[0][0] <= self._now:
            self._ready.append(heapq.heappop(timers)[3])
