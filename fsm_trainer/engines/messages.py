"""What travels between the embedded engine and its process; holding it needs no torch."""

from __future__ import annotations

from typing import Any, NamedTuple

from fsm_trainer.engines.contract import Finish


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


class Drawn(NamedTuple):
    """What a request has got when it leaves the decoder."""

    id: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: Finish


class Vitals(NamedTuple):
    """What only the engine process knows of itself; memory in bytes."""

    epoch: int | None
    groups: tuple[str, ...]
    resident_bytes: int
    device_bytes: int
