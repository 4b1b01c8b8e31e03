"""A Python process of ours, with one connection to it.

It is killed with its parent: the kernel does it when the parent's *thread* that started it ends,
so one thread starts them all, and stays.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection

from fsm_trainer.machine.errors import DeadlineExceeded

#: Seconds for what is instant in a live process: taking a part of a message, dying after a kill.
PROMPT = 10.0
_PR_SET_PDEATHSIG = 1
# It can import only what its parent can, so the path goes along.
_BOOTSTRAP = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from {} import main; "
    "from fsm_trainer.data.child import attach; main(attach(*sys.argv[2:4]), *sys.argv[4:])"
)
_spawner = ThreadPoolExecutor(1, thread_name_prefix="spawner")


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
            started = _spawner.submit(
                subprocess.Popen,
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is the parent's to handle
            )
            try:
                self._popen = started.result(PROMPT)
            except OSError as error:
                self.connection.close()
                raise DeadlineExceeded(
                    f"no process for {module} could be started ({error!r}): the machine is "
                    "overloaded or out of processes. Configure fewer"
                ) from error
        self.pid: int = self._popen.pid

    def kill(self) -> None:
        """Kill the process and what it started, and wait until it is gone; may be called again.

        Raises ``DeadlineExceeded`` if it is still there after 10 seconds.
        """
        if self._popen.returncode is None:  # else its number may be another's by now
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        try:
            self._popen.wait(PROMPT)
        except subprocess.TimeoutExpired as error:
            raise DeadlineExceeded(
                f"process {self.pid} is still there {PROMPT:g} s after SIGKILL: it hangs in the "
                "kernel. Look at its stack in /proc"
            ) from error

    @property
    def end(self) -> str:
        """How it ended, after :meth:`kill`: with a code of its own, or by a signal."""
        code: int = self._popen.returncode
        return f"ended by signal {-code}" if code < 0 else f"ended with code {code}"


def attach(descriptor: str, parent: str) -> Connection:
    """Return the child's end of the connection; from here on it can't outlive its parent."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != int(parent):  # it died before the signal was ordered
        os._exit(0)
    os.set_inheritable(int(descriptor), False)
    return Connection(int(descriptor))
