"""Rewards by ``module:function``, in processes that can be killed.

A reward function is the user's code: it may block, crash or never return. A
``concurrent.futures`` pool can't end one call without breaking the pool, so this one owns its
processes: each trajectory has a deadline; whoever misses it is killed and replaced.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Literal

import structlog
from pydantic import BaseModel, Field

from fsm_trainer.data.reward_process import Broken, Failed, Order, Ready, Scored
from fsm_trainer.data.trajectory import Trajectory
from fsm_trainer.machine.errors import DeadlineExceeded, RewardFailed

#: Seconds beyond the timeout before a process is killed: an async function's own comes first.
GRACE = 0.5
#: Seconds that one read or write on a process's socket may stand still.
IO_TIMEOUT = 10.0
#: Seconds that a killed process may take to be gone.
KILL_TIMEOUT = 10.0
# What a new process runs: it can import only what its parent can, so the path goes along.
_BOOTSTRAP = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from fsm_trainer.data.reward_process import main; main(int(sys.argv[2]), int(sys.argv[3]))"
)
_log = structlog.get_logger(__name__)


class RewardConfig(BaseModel, extra="forbid", frozen=True):
    """How trajectories are scored."""

    function: str = Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$")
    """``module:function``; gets a ``Trajectory``, returns a number, or numbers by name among which
    ``reward``; may be async."""
    timeout: float = Field(default=30.0, gt=0)
    """Seconds that one trajectory may take."""
    start_timeout: float = Field(default=120.0, gt=0)
    """Seconds that a process may take to import the function."""
    processes: int = Field(default=1, ge=1)
    """Reward processes of the run."""
    chunk: int = Field(default=64, ge=1)
    """The most trajectories given to a process at once; an async function has them in flight
    together."""
    on_error: Literal["raise", "zero"] = "raise"
    """Whether a trajectory without a reward stops the run, or gets 0 and is counted in
    ``reward_failed``."""


class RewardPool:
    """The reward processes of a run. One caller at a time; use it as a context manager."""

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        self._crew = _Crew(config)
        self._turn = threading.Lock()

    def __enter__(self) -> RewardPool:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def start(self) -> None:
        """Start the processes and wait until each has loaded the function.

        Raises ``RewardFailed`` if it can't be loaded, or not within ``start_timeout``; then no
        process is left.
        """
        try:
            self._crew.fill()
            _Round(self._config, self._crew, []).run()
        except BaseException:
            self._crew.dismiss()
            raise

    def score(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """Return the trajectories with rewards, in their order.

        When a process dies, or an async function blocks it, the trajectories that were in flight
        are scored once more, each alone; only then is one of them blamed. Raises ``RewardFailed``
        (with ``on_error: raise``) for the first without a reward, ``DeadlineExceeded`` if another
        call is under way.
        """
        if not self._turn.acquire(blocking=False):
            raise DeadlineExceeded(
                "RewardPool.score is under way in another thread: await it first"
            )
        try:
            self._crew.fill()
            return _Round(self._config, self._crew, trajectories).run()
        except BaseException:
            for process in [p for p in self._crew.processes if p.pending]:
                self._crew.drop(process)  # what it still answers belongs to no one
            raise
        finally:
            self._turn.release()

    def pids(self) -> list[int]:
        """Return the ids of the processes, for health checks and tests."""
        return [process.pid for process in self._crew.processes]

    def close(self) -> None:
        """Kill the processes and wait until they are gone; may be called again.

        Raises ``DeadlineExceeded`` if one is still there after 10 seconds.
        """
        self._crew.dismiss()


class _Crew:
    """The processes that a pool has, and how they come and go."""

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        # PR_SET_PDEATHSIG fires when the *thread* that started a child ends: keep one that stays.
        self._spawner: ThreadPoolExecutor | None = None
        self.processes: list[_Process] = []

    def fill(self) -> None:
        if self._spawner is None:
            self._spawner = ThreadPoolExecutor(1, thread_name_prefix="reward-spawner")
        while len(self.processes) < self._config.processes:
            started = self._spawner.submit(_Process, self._config)
            try:
                self.processes.append(started.result(timeout=IO_TIMEOUT))
            except TimeoutError as error:
                raise DeadlineExceeded(
                    f"a reward process was not created within {IO_TIMEOUT:g} s: the machine is "
                    "overloaded or out of processes. Lower rewards.processes"
                ) from error

    def drop(self, process: _Process) -> None:
        self.processes.remove(process)
        process.kill()

    def replace(self, process: _Process) -> None:
        self.drop(process)
        self.fill()

    def dismiss(self) -> None:
        while self.processes:
            self.drop(self.processes[-1])
        if self._spawner is not None:
            self._spawner.shutdown(wait=False)
            self._spawner = None


class _Process:
    """One reward process, seen from the pool."""

    def __init__(self, config: RewardConfig) -> None:
        ours, theirs = socket.socketpair()
        limit = struct.pack("ll", int(IO_TIMEOUT), 0)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            ours.setsockopt(socket.SOL_SOCKET, option, limit)
        descriptor = theirs.fileno()
        arguments = [json.dumps(sys.path), str(descriptor), str(os.getpid())]
        with theirs:
            self._popen = subprocess.Popen(
                [sys.executable, "-c", _BOOTSTRAP, *arguments],
                pass_fds=(descriptor,),
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is the pool's to handle
            )
        self.connection = Connection(ours.detach())
        self.pid = self._popen.pid
        self.concurrent: bool | None = None  # until it is ready
        self.pending: dict[int, None] = {}  # in order
        self._timeout = config.timeout
        self.deadline = time.monotonic() + config.start_timeout
        self.connection.send(Order(config.function, config.timeout))

    def give(self, indices: Sequence[int], trajectories: Sequence[Trajectory]) -> None:
        self.pending = dict.fromkeys(indices)
        self.touch()
        self.connection.send([(index, trajectories[index]) for index in indices])

    def touch(self) -> None:
        self.deadline = time.monotonic() + self._timeout + GRACE

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.connection.close()
        try:
            self._popen.wait(KILL_TIMEOUT)
        except subprocess.TimeoutExpired as error:
            raise DeadlineExceeded(
                f"reward process {self.pid} is not gone {KILL_TIMEOUT:g} s after SIGKILL: it hangs "
                "in the kernel. Look at its stack in /proc"
            ) from error

    @property
    def idle(self) -> bool:
        return self.concurrent is not None and not self.pending

    @property
    def exit_code(self) -> int | None:
        return self._popen.returncode


class _Round:
    """One call of ``score``: what is waiting, who works on what, what came back."""

    def __init__(
        self, config: RewardConfig, crew: _Crew, trajectories: Sequence[Trajectory]
    ) -> None:
        self._config, self._crew, self._trajectories = config, crew, trajectories
        self._waiting = deque(range(len(trajectories)))
        self._suspects: deque[int] = deque()  # each to be scored alone
        self._accused: set[int] = set()  # in flight when a process died
        self._results: dict[int, Trajectory] = {}

    def run(self) -> list[Trajectory]:
        while len(self._results) < len(self._trajectories) or self._starting():
            for process in list(self._crew.processes):
                if process.idle:
                    self._give(process)
            self._receive()
        return [self._results[index] for index in range(len(self._trajectories))]

    def _starting(self) -> bool:
        # A round without work is the pool's start; others don't wait for a replacement.
        return not self._trajectories and any(p.concurrent is None for p in self._crew.processes)

    def _give(self, process: _Process) -> None:
        if process.connection.poll():  # it has died since it was last seen, and no one is to blame
            self._crew.replace(process)
            return
        if self._suspects:
            indices = [self._suspects.popleft()]
        else:
            # A sync function's chunks are short, so that the processes end at the same time.
            parts = self._config.processes * (1 if process.concurrent else 4)
            size = min(self._config.chunk, math.ceil(len(self._trajectories) / parts))
            indices = [self._waiting.popleft() for _ in range(min(size, len(self._waiting)))]
        if not indices:
            return
        try:
            process.give(indices, self._trajectories)
        except OSError:
            self._lost(process)

    def _receive(self) -> None:
        busy = {p.connection: p for p in self._crew.processes if not p.idle}
        limit = min(p.deadline for p in busy.values()) - time.monotonic()
        ready = wait(list(busy), max(0.0, limit))
        for connection, process in busy.items():
            if connection in ready:
                self._read(process)
            elif process.deadline < time.monotonic() and not connection.poll():
                self._overdue(process)

    def _read(self, process: _Process) -> None:
        try:
            answer = process.connection.recv()
            process.touch()
        except (EOFError, OSError):
            self._lost(process)
            return
        match answer:
            case Ready(concurrent):
                process.concurrent = concurrent
            case Scored(index, reward, info):
                del process.pending[index]
                self._settle(index, reward, info)
            case Failed(index, cause, story):
                del process.pending[index]
                self._fail(index, cause, story)
            case Broken(cause, story):
                self._crew.drop(process)
                raise self._unusable(cause, story)

    def _overdue(self, process: _Process) -> None:
        if process.concurrent is None:
            self._crew.drop(process)
            raise self._unusable(f"not imported within {self._config.start_timeout:g} s", "")
        late = list(process.pending)
        self._crew.replace(process)
        if process.concurrent and len(late) > 1:
            self._suspects.extend(late)  # any of them may block the process
            return
        self._waiting.extendleft(reversed(late[1:]))
        self._fail(late[0], f"it took longer than its timeout of {self._config.timeout:g} s", "")

    def _lost(self, process: _Process) -> None:
        held = list(process.pending)
        if process.concurrent is None:
            self._crew.drop(process)
            raise self._unusable(f"the process ended with code {process.exit_code}", "")
        self._crew.replace(process)
        if len(held) > 1 or not self._accused.issuperset(held):
            self._accused.update(held)
            self._suspects.extend(held)
        elif held:
            self._fail(held[0], f"its process ended with code {process.exit_code}", "")

    def _settle(self, index: int, reward: float, info: dict[str, float]) -> None:
        if self._config.on_error == "zero":
            info = {**info, "reward_failed": 0.0}
        self._results[index] = self._trajectories[index].with_reward(reward, info)

    def _fail(self, index: int, cause: str, story: str) -> None:
        trajectory, function = self._trajectories[index], self._config.function
        if self._config.on_error == "raise":
            raise RewardFailed(
                f"reward function {function} failed on sample {trajectory.sample.id!r}: {cause}. "
                "Correct it, or set rewards.on_error to zero" + (f"\n{story}" if story else "")
            )
        _log.warning("reward failed", function=function, sample=trajectory.sample.id, cause=cause)
        self._results[index] = trajectory.with_reward(0.0, {"reward_failed": 1.0})

    def _unusable(self, cause: str, story: str) -> RewardFailed:
        return RewardFailed(
            f"reward function {self._config.function} can't be used: {cause}. Correct "
            "rewards.function; it must be importable as module:function"
            + (f"\n{story}" if story else "")
        )
