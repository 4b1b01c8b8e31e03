"""A Python process of ours, with one connection to it; nothing of it stays behind.

It runs under a guard: a process of a few megabytes that ends everything that the process has
started, and their children, when it ends or its parent does, however that came. The kernel hands
orphans to the guard, so it is done only when the kernel says that it has no child left.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection
from typing import NoReturn

from fsm_trainer.machine.errors import DeadlineExceeded

#: Seconds for what is instant in a live process: taking a part of a message, dying after a kill.
PROMPT = 10.0
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
# It can import only what its parent can, so the path goes along.
_BOOTSTRAP = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from fsm_trainer.data.child import attach; connection = attach(*sys.argv[2:4]); "
    "from {} import main; main(connection, *sys.argv[4:])"
)


class Child:
    """A process of its own group that runs ``main(connection, *arguments)`` of ``module``.

    ``connection`` is our end, for its owner to close; a read or write that stands still for 10
    seconds fails with ``OSError``. Raises ``DeadlineExceeded`` if no process comes to be.
    """

    def __init__(self, module: str, *arguments: str) -> None:
        ours, theirs = socket.socketpair()
        limit = struct.pack("ll", int(PROMPT), 0)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            ours.setsockopt(socket.SOL_SOCKET, option, limit)
        self.connection = Connection(ours.detach())
        where = [json.dumps(sys.path), str(theirs.fileno()), str(os.getpid())]
        command = [sys.executable, "-c", _BOOTSTRAP.format(module), *where, *arguments]
        with theirs:
            try:
                self._popen = subprocess.Popen(
                    command,
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C is the parent's to handle
                )
            except OSError as error:
                self.connection.close()
                raise DeadlineExceeded(
                    f"no process for {module} could be started ({error!r}): the machine is "
                    "overloaded or out of processes. Configure fewer"
                ) from error
        self.pid: int = self._popen.pid
        self._burying, self._buried = threading.Lock(), False

    def kill(self) -> None:
        """Kill the process and what it started, and wait until it is gone; may be called again.

        Raises ``DeadlineExceeded`` if it is still there after 10 seconds.
        """
        with self._burying:
            if not self._buried:  # else its number may be another's by now
                self._bury()
                self._buried = True

    def _bury(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)
            os.kill(self.pid, signal.SIGCONT)
        try:
            self._popen.wait(PROMPT)
        except subprocess.TimeoutExpired as error:
            os.killpg(self.pid, signal.SIGKILL)
            raise DeadlineExceeded(
                f"process {self.pid} is still there {PROMPT:g} s after SIGKILL: it hangs in the "
                "kernel. Look at its stack in /proc"
            ) from error
        # A guard that was killed could not do it: what is in its group goes without it.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    @property
    def end(self) -> str:
        """How it ended, after :meth:`kill`: with a code of its own, or by a signal."""
        code: int = self._popen.returncode
        return f"ended by signal {-code}" if code < 0 else f"ended with code {code}"


def attach(descriptor: str, parent: str) -> Connection:
    """Return the child's end of the connection, in a process under a guard."""
    watched = os.pidfd_open(int(parent))
    if os.getppid() != int(parent):  # it died before we could watch it
        os._exit(0)
    _control(_PR_SET_CHILD_SUBREAPER, 1)
    # What is sent before the guard listens must not kill it.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    guard, child = os.getpid(), os.fork()
    if child:
        os.close(int(descriptor))
        _guard(child, watched)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    os.close(watched)
    _control(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != guard:  # it died before the signal was ordered
        os._exit(0)
    os.set_inheritable(int(descriptor), False)
    return Connection(int(descriptor))


def _control(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")


def _guard(child: int, parent: int) -> NoReturn:
    """Wait for the end of the child, of the parent (a descriptor), or for SIGTERM; clean up."""
    told, tell = os.pipe()
    os.set_blocking(tell, False)
    signal.set_wakeup_fd(tell)
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    # A guard waits as long as there is something to guard: that is its whole work.
    ended, _, _ = select.select([parent, os.pidfd_open(child), told], [], [])
    status = 0 if ended == [parent] else None
    while True:
        for orphan in _children():
            os.kill(orphan, signal.SIGKILL)
        try:
            pid, code = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            break
        if pid == child and status is None:
            status = code
        if not pid:
            time.sleep(0.005)
    if status is not None and os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:  # which has no handler to take away
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)  # so that it is told how the child ended
    os._exit(os.waitstatus_to_exitcode(status or 0))


def _children() -> list[int]:
    with open(f"/proc/self/task/{os.getpid()}/children") as listed:
        return [int(pid) for pid in listed.read().split()]
