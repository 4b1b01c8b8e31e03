"""The inside of a reward process: it loads the user's function and answers chunks of trajectories.

Started by :mod:`fsm_trainer.data.rewards`, with which it shares the messages below. It imports
nothing heavy of its own.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pkgutil import resolve_name
from typing import Any, NamedTuple, SupportsFloat, TypeAlias

from fsm_trainer.data.trajectory import Trajectory


class Ready(NamedTuple):
    """The function is loaded; ``concurrent`` says that it is async."""

    concurrent: bool


class Scored(NamedTuple):
    """The reward of one trajectory."""

    item: int
    reward: float
    info: dict[str, float]


class Failed(NamedTuple):
    """A trajectory got no reward; without ``item`` the process can't work at all, and ends."""

    item: int | None
    cause: str
    story: str


Chunk: TypeAlias = list[tuple[int, Trajectory]]
Function: TypeAlias = Callable[[Trajectory], Any]


def main(connection: Connection, spec: str, timeout: str) -> None:
    """Serve until the pool closes the connection."""
    try:
        _serve(connection, load_function(spec), float(timeout))
    except (EOFError, ConnectionError):
        return  # the pool has closed, or is gone
    except BaseException as error:
        connection.send(Failed(None, *_describe(error)))


def load_function(spec: str) -> Function:
    """Import and return what ``module:function`` names; ``TypeError`` if it can't be called."""
    function: Function = resolve_name(spec)
    if not callable(function):
        raise TypeError(f"{spec} is a {type(function).__name__}, not a function")
    return function


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
