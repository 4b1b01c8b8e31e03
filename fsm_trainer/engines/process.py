"""An engine process, called over the one connection to it. Imports no torch."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, NamedTuple

from fsm_trainer.data.child import PROMPT, Child
from fsm_trainer.machine.errors import DeadlineExceeded, EngineFailed


class Call(NamedTuple):
    """A call: its number, the method, and the arguments."""

    number: int
    method: str
    arguments: tuple[Any, ...]


class Answer(NamedTuple):
    """The answer to the call of this number: a result, or the error to raise."""

    number: int
    result: Any
    error: Exception | None


class EngineProcess:
    """Runs ``main`` of ``module``; a dead process fails pending and later calls."""

    def __init__(self, name: str, module: str) -> None:
        self.name = name
        #: How the process ended, None while it runs.
        self.ended: str | None = None
        self._calls = itertools.count()
        self._pending: dict[int, Future[Any]] = {}
        self._lock, self._sending = threading.Lock(), threading.Lock()
        self._child = Child(module)
        self.pid = self._child.pid
        self._keeper = threading.Thread(target=self._keep, name=f"{name}-engine", daemon=True)
        self._keeper.start()

    def submit(self, method: str, *arguments: Any) -> Future[Any]:
        """Send a call; the future holds its result or its error. Raises EngineFailed if dead."""
        future: Future[Any] = Future()
        number = next(self._calls)
        with self._lock:
            if self.ended is not None:
                raise EngineFailed(f"{self.name}: {self.ended}; start it anew")
            self._pending[number] = future
        try:
            with self._sending:
                self._child.connection.send(Call(number, method, arguments))
        except OSError:
            # A message may be cut in half: the connection is of no use any more, and the call
            # fails with the process.
            self.kill()
        return future

    def call(self, method: str, *arguments: Any, timeout: float) -> Any:
        """Call and wait. A process that does not answer in time is killed: its state is unknown.

        Raises what the call raised, DeadlineExceeded after ``timeout`` seconds, or EngineFailed.
        """
        future = self.submit(method, *arguments)
        try:
            return future.result(timeout)
        except FutureTimeout:
            raise DeadlineExceeded(
                f"{self.name}: the engine process did not answer {method!r} within {timeout:g} s; "
                "it was killed, start it anew"
            ) from None
        finally:
            # Not done: too late, or somebody interrupted us; what it holds is unknown either way.
            if not future.done():
                self.kill()

    def kill(self) -> None:
        """Kill the process, and wait until it is gone and its pending calls have failed."""
        self._child.kill()
        self._keeper.join(PROMPT)

    def _keep(self) -> None:
        """Deliver the answers; bury the process when there are no more."""
        try:
            self._deliver()
        except (EOFError, OSError):
            pass  # it is dead, or about to be
        finally:
            self._child.kill()
            with self._lock:
                self.ended = f"the engine process {self.pid} {self._child.end}"
            with self._sending:
                self._child.connection.close()
            for future in self._pending.values():
                future.set_exception(EngineFailed(f"{self.name}: {self.ended}; start it anew"))

    def _deliver(self) -> None:
        # No answer is awaited here, callers have deadlines: end of file ends the wait.
        while self._child.connection.poll(None):
            answer: Answer = self._child.connection.recv()
            future = self._pending.pop(answer.number)
            if answer.error is not None:
                future.set_exception(answer.error)
            else:
                future.set_result(answer.result)
