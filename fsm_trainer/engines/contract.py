"""What an engine is asked for and what it answers; `engine` says what it promises."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from fsm_trainer.machine.errors import DataError
from fsm_trainer.machine.version import Version


class Tag(StrEnum):
    """What an engine acquires and releases on its device."""

    WEIGHTS = "weights"
    KV = "kv"


class PauseMode(StrEnum):
    """What becomes of the requests in flight when an engine pauses.

    ``ABORT`` and ``RETRACT`` end them as aborted, with the tokens that they have; a retracted
    request is never continued, since that would mix two versions in one completion. ``IN_PLACE``
    holds them between two tokens until ``unpause``.
    """

    ABORT = "abort"
    RETRACT = "retract"
    IN_PLACE = "in_place"


class Finish(StrEnum):
    """Why a completion ended: a stop token, its token limit, or an abort."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to continue; the tokens drawn depend on these fields and the weights alone.

    ``temperature`` 0 is greedy. ``stop`` holds the token ids that end the completion, beside the
    model's own end tokens; where it is empty only the limit ends it. Raises ``DataError`` when a
    field is out of its range.
    """

    id: str
    tokens: tuple[int, ...]
    max_new_tokens: int
    temperature: float = 1.0
    seed: int = 0
    stop: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for holds, problem in (
            (len(self.tokens) > 0, "the prompt is empty; give at least one token"),
            (self.max_new_tokens >= 1, f"max_new_tokens is {self.max_new_tokens}, not 1 or more"),
            (
                0.0 <= self.temperature < float("inf"),
                f"temperature is {self.temperature}; it must be finite, and 0 (greedy) or more",
            ),
            (0 <= self.seed < 2**64, f"seed {self.seed} is not in [0, 2**64)"),
        ):
            if not holds:
                raise DataError(f"request {self.id}: {problem}")


@dataclass(frozen=True, slots=True)
class Completion:
    """What was generated for a request, the stop token included.

    ``tokens`` and ``logprobs`` (natural logarithm, at the sampling temperature; at temperature 1
    for a greedy request) have equal lengths. ``version`` names the weights that drew every token.
    ``routes``, int32 ``[prompt + generated - 1, layers, top_k]``, are the experts of each token
    that the model read, best first; None without ``routing_replay``, and for an aborted request.
    """

    id: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: Finish
    version: Version
    routes: npt.NDArray[np.int32] | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Health:
    """How an engine stands; memory in bytes, read in the engine process itself.

    ``groups`` are the process groups that torch has registered there, ``epoch`` is that of the
    lease held, if any.
    """

    pid: int
    held: frozenset[Tag]
    version: Version | None
    paused: PauseMode | None
    in_flight: int
    updating: bool
    epoch: int | None
    groups: tuple[str, ...]
    resident_bytes: int
    device_bytes: int
