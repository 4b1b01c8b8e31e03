"""Rewards by ``module:function``, in processes that can be killed.

A reward function is the user's code: it may block, crash or never return. A
``concurrent.futures`` pool can't end one call without breaking the pool, so this one owns its
processes: each trajectory has a deadline; whoever misses it is killed and replaced.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import wait
from typing import Literal

import structlog
from pydantic import BaseModel, Field

from fsm_trainer.data.child import Child
from fsm_trainer.data.reward_process import Failed, Ready, Scored
from fsm_trainer.data.trajectory import Trajectory
from fsm_trainer.machine.errors import DeadlineExceeded, RewardFailed

#: Seconds beyond the timeout before a process is killed: an async function's own comes first.
GRACE = 0.5
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
        self.config = config
        self.processes: list[_Process] = []
        self._turn = threading.Lock()

    def __enter__(self) -> RewardPool:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def start(self) -> None:
        """Start the processes and wait until each has loaded the function.

        Raises ``RewardFailed`` if it can't be loaded, or not within ``start_timeout``; then no
        process is left.
        """
        self.score([])

    def score(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """Return the trajectories with rewards, in their order.

        When a process dies, or an async function blocks it, the trajectories that were in flight
        are scored once more, each alone; only then is one of them blamed. Raises ``RewardFailed``
        (with ``on_error: raise``) for the first without a reward, ``DeadlineExceeded`` if another
        call is under way. After an error no process is left; the next call starts them anew.
        """
        if not self._turn.acquire(blocking=False):
            raise DeadlineExceeded(
                "RewardPool.score is under way in another thread: await it first"
            )
        try:
            self.fill()
            return _Round(self, trajectories).run()
        except BaseException:
            self.close()
            raise
        finally:
            self._turn.release()

    def fill(self) -> None:
        """Start the processes that are missing; they load the function in their own time."""
        while len(self.processes) < self.config.processes:
            self.processes.append(_Process(self.config))

    def drop(self, process: _Process) -> None:
        """Kill a process, and forget it."""
        self.processes.remove(process)
        process.kill()
        process.connection.close()

    def pids(self) -> list[int]:
        """Return the ids of the processes, for health checks and tests."""
        return [process.pid for process in self.processes]

    def close(self) -> None:
        """Kill the processes and wait until they are gone; may be called again.

        Raises ``DeadlineExceeded`` if one is still there after 10 seconds.
        """
        while self.processes:
            self.drop(self.processes[-1])


class _Process(Child):
    """One reward process, seen from the pool."""

    def __init__(self, config: RewardConfig) -> None:
        super().__init__("fsm_trainer.data.reward_process", config.function, str(config.timeout))
        self.concurrent: bool | None = None  # until it is ready
        self.pending: list[int] = []
        self._timeout = config.timeout
        self.deadline = time.monotonic() + config.start_timeout

    def give(self, indices: list[int], trajectories: Sequence[Trajectory]) -> None:
        self.pending = indices
        self.touch()
        self.connection.send([(index, trajectories[index]) for index in indices])

    def touch(self) -> None:
        self.deadline = time.monotonic() + self._timeout + GRACE

    @property
    def idle(self) -> bool:
        return self.concurrent is not None and not self.pending


class _Round:
    """One call of ``score``: what is waiting, who works on what, what came back."""

    def __init__(self, pool: RewardPool, trajectories: Sequence[Trajectory]) -> None:
        self._pool, self._config, self._trajectories = pool, pool.config, trajectories
        self._waiting = deque(range(len(trajectories)))
        self._suspects: deque[int] = deque()  # each to be scored alone
        self._accused: set[int] = set()  # in flight when a process died
        self._results: dict[int, Trajectory] = {}

    def run(self) -> list[Trajectory]:
        while len(self._results) < len(self._trajectories) or self._starting():
            for process in list(self._pool.processes):
                if process.idle:
                    self._give(process)
            self._receive()
        return [self._results[index] for index in range(len(self._trajectories))]

    def _starting(self) -> bool:
        # A round without work is the pool's start; others don't wait for a replacement.
        return not self._trajectories and any(p.concurrent is None for p in self._pool.processes)

    def _give(self, process: _Process) -> None:
        if process.connection.poll():  # it died while it was idle: no one is to blame
            self._lost(process, late=False)
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
            self._lost(process, late=False)

    def _receive(self) -> None:
        busy = {p.connection: p for p in self._pool.processes if not p.idle}
        limit = min(p.deadline for p in busy.values()) - time.monotonic()
        ready = wait(list(busy), max(0.0, limit))
        for connection, process in busy.items():
            if connection in ready:
                self._read(process)
            elif process.deadline < time.monotonic() and not connection.poll():
                self._lost(process, late=True)

    def _read(self, process: _Process) -> None:
        try:
            answer = process.connection.recv()
        except (EOFError, OSError):
            self._lost(process, late=False)
            return
        process.touch()
        match answer:
            case Ready(concurrent):
                process.concurrent = concurrent
            case Scored(index, reward, info):
                process.pending.remove(index)
                if self._config.on_error == "zero":
                    info["reward_failed"] = 0.0
                self._results[index] = self._trajectories[index].with_reward(reward, info)
            case Failed(None, cause, story):
                raise self._unusable(cause, story)
            case Failed(int(index), cause, story):
                process.pending.remove(index)
                self._fail(index, cause, story)

    def _lost(self, process: _Process, late: bool) -> None:
        """Replace a process that has died or is late, and find out who is to blame."""
        self._pool.drop(process)
        held, cause = process.pending, f"its process {process.end}"
        if process.concurrent is None:
            late_cause = f"not imported within {self._config.start_timeout:g} s"
            raise self._unusable(late_cause if late else cause)
        self._pool.fill()
        if late:
            cause = f"it took longer than its timeout of {self._config.timeout:g} s"
        # A sync function's process works in order: the rest of its chunk has not begun.
        known = late and (len(held) == 1 or not process.concurrent)
        if known or (len(held) == 1 and held[0] in self._accused):
            self._waiting.extendleft(reversed(held[1:]))
            self._fail(held[0], cause)
        else:
            self._accused.update(held)
            self._suspects.extend(held)

    def _fail(self, index: int, cause: str, story: str = "") -> None:
        trajectory, function = self._trajectories[index], self._config.function
        if self._config.on_error == "raise":
            raise RewardFailed(
                f"reward function {function} failed on sample {trajectory.sample.id!r}: {cause}. "
                f"Correct it, or set rewards.on_error to zero\n{story}".strip()
            )
        _log.warning("reward failed", function=function, sample=trajectory.sample.id, cause=cause)
        self._results[index] = trajectory.with_reward(0.0, {"reward_failed": 1.0})

    def _unusable(self, cause: str, story: str = "") -> RewardFailed:
        return RewardFailed(
            f"reward function {self._config.function} can't be used: {cause}. Correct "
            f"rewards.function; it must be importable as module:function\n{story}".strip()
        )
