"""Calls over a connection: to an engine process of ours, or to what runs inside a foreign one.

Imports no torch.
"""

from __future__ import annotations

import itertools
import os
import socket
import threading
import traceback
from abc import ABC, abstractmethod
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from fsm_trainer.data.child import PROMPT, Child
from fsm_trainer.machine.errors import ActionFailed, DeadlineExceeded, EngineFailed, FsmError


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


class Vitals(NamedTuple):
    """What only the process that holds the weights knows; see `Health`."""

    epoch: int | None
    groups: tuple[str, ...]
    resident_bytes: int
    device_bytes: int


def hang_up(connection: Connection) -> None:
    """End a connection over a socket, whoever waits on it at either end."""
    with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as wire:
        wire.shutdown(socket.SHUT_RDWR)


class Server(ABC):
    """What is called: once it has ended, pending and later calls raise EngineFailed."""

    name: str
    pid: int
    #: How it ended, None while it answers.
    ended: str | None

    @abstractmethod
    def submit(self, method: str, *arguments: Any) -> Future[Any]:
        """Send a call; the future holds its result or its error. Raises EngineFailed if ended."""

    @abstractmethod
    def kill(self) -> None:
        """End it, and wait until its pending calls have failed; may be called again."""

    def call(self, method: str, *arguments: Any, timeout: float) -> Any:
        """Call and wait. What does not answer in time is killed: its state is unknown.

        Raises what the call raised, DeadlineExceeded after ``timeout`` seconds, or EngineFailed.
        """
        future = self.submit(method, *arguments)
        try:
            return future.result(timeout)
        except FutureTimeout:
            raise DeadlineExceeded(
                f"{self.name}: the engine did not answer {method!r} within {timeout:g} s; "
                "it was killed, start it anew"
            ) from None
        finally:
            # Not done: too late, or somebody interrupted us; what it holds is unknown either way.
            if not future.done():
                self.kill()


class Caller(Server):
    """Calls what answers at the other end of a connection."""

    def __init__(self, name: str, connection: Connection) -> None:
        self.name, self.ended = name, None
        self._connection = connection
        self._calls = itertools.count()
        self._pending: dict[int, Future[Any]] = {}
        self._lock, self._sending = threading.Lock(), threading.Lock()
        self._keeper = threading.Thread(target=self._keep, name=f"{name}-calls", daemon=True)
        self._keeper.start()

    def submit(self, method: str, *arguments: Any) -> Future[Any]:
        """Send a call; see `Server.submit`."""
        future: Future[Any] = Future()
        number = next(self._calls)
        with self._lock:
            if self.ended is not None:
                raise EngineFailed(f"{self.name}: {self.ended}; start it anew")
            self._pending[number] = future
        try:
            with self._sending:
                self._connection.send(Call(number, method, arguments))
        except OSError:
            # A message may be cut in half: the connection is of no use any more, and the call
            # fails with it.
            self.kill()
        return future

    def kill(self) -> None:
        """End the other end; see `Server.kill`."""
        self._end()
        if self._keeper is not threading.current_thread():
            self._keeper.join(PROMPT)

    @abstractmethod
    def _end(self) -> None:
        """See to it that nothing answers any more; called more than once."""

    @abstractmethod
    def _how(self) -> str:
        """How it ended, in words; called after :meth:`_end`."""

    def _keep(self) -> None:
        """Deliver the answers; bury the other end when there are no more."""
        try:
            self._deliver()
        except (EOFError, OSError):
            pass  # it is dead, or about to be
        finally:
            try:
                self._end()
                how = self._how()
            except DeadlineExceeded as error:  # nobody is left to raise it to but the callers
                how = str(error)
            with self._lock:
                self.ended = how
            with self._sending:
                self._connection.close()
            for future in self._pending.values():
                future.set_exception(EngineFailed(f"{self.name}: {self.ended}; start it anew"))

    def _deliver(self) -> None:
        # No answer is awaited here, callers have deadlines: end of file ends the wait.
        while self._connection.poll(None):
            answer: Answer = self._connection.recv()
            future = self._pending.pop(answer.number)
            if answer.error is not None:
                future.set_exception(answer.error)
            else:
                future.set_result(answer.result)


class EngineProcess(Caller):
    """Runs ``main`` of ``module`` in a process of its own."""

    def __init__(self, name: str, module: str) -> None:
        self._child = Child(module)
        self.pid = self._child.pid
        super().__init__(name, self._child.connection)

    def _end(self) -> None:
        self._child.kill()

    def _how(self) -> str:
        return f"the engine process {self.pid} {self._child.end}"


def portable(method: str, error: Exception) -> Exception:
    """Return an error that the client's process can read: our own, or ActionFailed."""
    if isinstance(error, FsmError):
        return error
    last = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{Path(last.filename).name}:{last.lineno}"
    return ActionFailed(f"the engine could not {method}: {type(error).__name__}: {error} ({where})")


def resident_bytes() -> int:
    """The resident set of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
