"""The inside of a reward process: it loads the user's function and answers chunks of trajectories.

Started by :mod:`fsm_trainer.data.rewards`, with which it shares the messages below. It imports
nothing heavy of its own, and it can't outlive its parent.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import inspect
import math
import operator
import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, SupportsFloat, TypeAlias

from fsm_trainer.data.trajectory import Trajectory

_PR_SET_PDEATHSIG = 1
_WATCH_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Order:
    """What a new process is told first: the function, and the seconds for one trajectory."""

    function: str
    timeout: float


@dataclass(frozen=True, slots=True)
class Ready:
    """The function is loaded; ``concurrent`` says that it is async."""

    concurrent: bool


@dataclass(frozen=True, slots=True)
class Broken:
    """The process can't work at all, and ends."""

    cause: str
    story: str


@dataclass(frozen=True, slots=True)
class Scored:
    """The reward of one trajectory."""

    index: int
    reward: float
    info: dict[str, float]


@dataclass(frozen=True, slots=True)
class Failed:
    """One trajectory got no reward; ``story`` is the traceback, or empty."""

    index: int
    cause: str
    story: str


Chunk: TypeAlias = list[tuple[int, Trajectory]]
Function: TypeAlias = Callable[[Trajectory], Any]


def main(descriptor: int, parent: int) -> None:
    """Serve until the other end of the socket closes or the parent process dies."""
    _die_with(parent)
    os.set_inheritable(descriptor, False)
    threading.Thread(target=_watch, args=(descriptor,), daemon=True).start()
    connection = Connection(descriptor)
    try:
        order: Order = connection.recv()
        function = load_function(order.function)
        _serve(connection, function, order.timeout)
    except (EOFError, ConnectionError):
        return  # the pool has closed, or is gone
    except BaseException as error:
        connection.send(Broken(*_describe(error)))


def load_function(spec: str) -> Function:
    """Import and return what ``module:function`` names; ``TypeError`` if it can't be called."""
    module, _, name = spec.partition(":")
    function = operator.attrgetter(name)(importlib.import_module(module))
    if not callable(function):
        raise TypeError(f"{spec} is a {type(function).__name__}, not a function")
    return function  # type: ignore[no-any-return]


def as_reward(value: object) -> tuple[float, dict[str, float]]:
    """Return the reward and what was reported beside it.

    Raises ``TypeError`` for what is neither a number nor a mapping of numbers with the key
    ``reward``, ``ValueError`` for a number that isn't finite.
    """
    if not isinstance(value, Mapping):
        return _number("the reward", value), {}
    if "reward" not in value:
        raise TypeError(f"the mapping {dict(value)!r} has no key 'reward'")
    info = {str(key): _number(repr(key), one) for key, one in value.items()}
    return info.pop("reward"), info


def _number(what: str, value: object) -> float:
    if not isinstance(value, SupportsFloat):
        raise TypeError(f"{what} is {value!r}, not a number")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{what} is {number}, not a finite number")
    return number


def _serve(connection: Connection, function: Function, timeout: float) -> None:
    concurrent = any(
        inspect.iscoroutinefunction(one) for one in (function, type(function).__call__)
    )
    connection.send(Ready(concurrent))
    with asyncio.Runner() as runner:  # one loop for all chunks: clients of the user's stay bound
        while True:
            chunk: Chunk = connection.recv()
            if concurrent:
                runner.run(_score_together(connection, function, timeout, chunk))
            else:
                for index, trajectory in chunk:
                    connection.send(_score_one(function, index, trajectory))


def _score_one(function: Function, index: int, trajectory: Trajectory) -> Scored | Failed:
    try:
        return Scored(index, *as_reward(function(trajectory)))
    except (Exception, SystemExit) as error:
        return Failed(index, *_describe(error))


async def _score_together(
    connection: Connection, function: Function, timeout: float, chunk: Chunk
) -> None:
    async def score(index: int, trajectory: Trajectory) -> None:
        limit = asyncio.timeout(timeout)
        try:
            async with limit:
                value = await function(trajectory)
            answer: Scored | Failed = Scored(index, *as_reward(value))
        except (Exception, SystemExit) as error:
            cause, story = _describe(error)
            if limit.expired():
                cause = f"it took longer than its timeout of {timeout:g} s"
            answer = Failed(index, cause, story)
        connection.send(answer)

    await asyncio.gather(*(score(index, trajectory) for index, trajectory in chunk))


def _describe(error: BaseException) -> tuple[str, str]:
    return f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error)).strip()


def _die_with(parent: int) -> None:
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # it died before the signal was ordered
        os._exit(0)


def _watch(descriptor: int) -> None:
    # The main thread can't see the pool close while it runs the user's function.
    poll = select.poll()
    poll.register(descriptor, 0)  # 0: a hang-up alone, which takes no data from the main thread
    while not poll.poll(_WATCH_SECONDS * 1000):
        pass
    os.killpg(0, signal.SIGKILL)  # with whatever the function has started
