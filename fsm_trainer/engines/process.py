"""An engine process and the two channels to it.

Calls that may block go over the *work* channel, those that must always get through over *control*.
The process ends with its parent, however that ends: the kernel kills it when the parent's thread
that started it is gone (hence a thread which lives as long as the process), and it exits by itself
when a channel reads end of file. Imports no torch.
"""

from __future__ import annotations

import itertools
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from multiprocessing.connection import Connection, wait
from typing import Any, Literal

from fsm_trainer.engines.messages import Answer, Call
from fsm_trainer.machine.errors import DeadlineExceeded, EngineFailed

Channel = Literal["work", "control"]

# Seconds for what is instant in a live process: taking a message, dying after a kill.
_PROMPT = 10.0


class EngineProcess:
    """Runs ``python -m module`` and calls it; a dead process fails pending and later calls."""

    def __init__(self, name: str, module: str) -> None:
        self.name = name
        self._module = module
        self._calls = itertools.count()
        self._pending: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        self._ended: str | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._spawned = threading.Event()
        pairs = {channel: socket.socketpair() for channel in ("work", "control")}
        self._remote = [remote for _, remote in pairs.values()]
        self._channels = {channel: _bounded(local) for channel, (local, _) in pairs.items()}
        self._sending = {channel: threading.Lock() for channel in pairs}
        self._keeper = threading.Thread(target=self._keep, name=f"{name}-engine", daemon=True)
        self._keeper.start()
        if not self._spawned.wait(_PROMPT):
            raise EngineFailed(f"{name}: no process could be started within {_PROMPT:g} s")

    @property
    def pid(self) -> int | None:
        """The process id, None where it couldn't be started."""
        return self._process.pid if self._process else None

    @property
    def ended(self) -> str | None:
        """How the process ended, None while it runs."""
        return self._ended

    def submit(self, channel: Channel, method: str, *arguments: Any) -> Future[Any]:
        """Send a call; the future holds its result or its error. Raises EngineFailed if dead."""
        future: Future[Any] = Future()
        number = next(self._calls)
        with self._lock:
            if self._ended is not None:
                raise EngineFailed(f"{self.name}: {self._ended}; start it anew")
            self._pending[number] = future
        try:
            with self._sending[channel]:
                self._channels[channel].send(Call(number, method, arguments))
        except OSError as error:
            # A message may be cut in half: the channel is of no use any more.
            self.kill()
            raise EngineFailed(
                f"{self.name}: the engine process takes no {method!r} call ({error}); it was killed"
            ) from error
        return future

    def call(self, channel: Channel, method: str, *arguments: Any, timeout: float) -> Any:
        """Call and wait. A process that does not answer in time is killed: its state is unknown.

        Raises what the call raised, DeadlineExceeded after ``timeout`` seconds, or EngineFailed.
        """
        future = self.submit(channel, method, *arguments)
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
        """Kill the process and wait until it is gone. Raises EngineFailed if it stays."""
        if self._process is not None:
            self._process.kill()
        self.join(_PROMPT)

    def join(self, timeout: float) -> None:
        """Wait for the end of the process; raises EngineFailed after ``timeout`` seconds."""
        self._keeper.join(timeout)
        if self._keeper.is_alive():
            raise EngineFailed(f"{self.name}: process {self.pid} is still there; kill it by hand")

    def _keep(self) -> None:
        """Own the process: start it, deliver its answers, bury it."""
        try:
            ended = self._start_and_deliver()
        except OSError as error:
            ended = f"the engine process could not be started ({error})"
        finally:
            self._spawned.set()
            for remote in self._remote:
                remote.close()
        with self._lock:
            self._ended = ended
            pending, self._pending = self._pending, {}
        for channel, connection in self._channels.items():
            with self._sending[channel]:
                connection.close()
        for future in pending.values():
            future.set_exception(EngineFailed(f"{self.name}: {ended}; start it anew"))

    def _start_and_deliver(self) -> str:
        files = [remote.fileno() for remote in self._remote]
        command = [sys.executable, "-P", "-m", self._module, *map(str, files), str(os.getpid())]
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        process = self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            pass_fds=files,
            env={**os.environ, "PYTHONPATH": path},
        )
        for remote in self._remote:
            remote.close()
        self._spawned.set()
        started = time.monotonic()
        try:
            self._deliver()
        finally:
            # Both channels are closed: it is dead, or about to be.
            try:
                process.wait(1.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(_PROMPT)
        cause, age = _cause(process.returncode), time.monotonic() - started
        return f"the engine process {process.pid} ended ({cause}) after {age:.1f} s"

    def _deliver(self) -> None:
        connections = list(self._channels.values())
        while True:
            # No answer is awaited here, callers have deadlines: end of file ends the wait.
            for connection in wait(connections):
                assert isinstance(connection, Connection)  # of the kinds that `wait` takes
                try:
                    answer: Answer = connection.recv()
                except (EOFError, OSError):
                    return
                with self._lock:
                    future = self._pending.pop(answer.number, None)
                if future is None:
                    continue
                if answer.error is not None:
                    future.set_exception(answer.error)
                else:
                    future.set_result(answer.result)


def _bounded(local: socket.socket) -> Connection[Any, Any]:
    """Return a connection whose sends fail after a while when the other side takes nothing."""
    seconds = int(_PROMPT)
    local.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", seconds, 0))
    return Connection(local.detach())


def _cause(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit status {code}"
