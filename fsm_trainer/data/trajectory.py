"""What is asked and what was answered: token in, token out.

A :class:`Sample` is a prompt with what its reward needs. A :class:`Trajectory` is everything that
training needs of one answer, exactly as the engine saw it; nothing is ever tokenized twice. A
rollout of several turns is one trajectory whose ``loss_mask`` is 0 on what the policy did not
write, or several trajectories with equal ``sample.group``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from fsm_trainer.machine.errors import DataError
from fsm_trainer.machine.version import Version

#: A log-probability may exceed 0 by this much: the rounding of a softmax in low precision.
LOGPROB_SLACK = 1e-2


class Message(NamedTuple):
    """One message of a chat prompt."""

    role: str
    content: str


#: Plain text, or a conversation that the tokenizer's chat template renders.
Prompt: TypeAlias = str | tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """One thing to answer.

    ``group`` is shared by the samples that are compared with each other (GRPO, RLOO); ``metadata``
    is what the reward function and the generate hook get to see beside the prompt.
    """

    id: str
    prompt: Prompt
    answer: str | None
    group: str
    metadata: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if not self.prompt:
            raise DataError(f"sample {self.id!r}: the prompt is empty. Remove it, or fill it in")


class Status(StrEnum):
    """How a trajectory ended."""

    FINISHED = "finished"
    TRUNCATED = "truncated"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """One answer to ``sample``, as the engine read and wrote it; checked, then read-only.

    Shapes: ``tokens`` int32, ``loss_mask`` uint8 and ``logprobs`` float32 are ``[time]``;
    ``routes``, if any, int32 ``[time - 1, layers, top_k]``. What belongs to token t stands at index
    t. ``logprobs`` are the engine's, at the training temperature where ``loss_mask`` is 1, else 0.
    ``version`` is that of the weights which generated it; ``text`` is the decoded response.

    Raises ``DataError`` with the sample's id if a shape, type or number can't be right.
    """

    sample: Sample
    tokens: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]
    logprobs: npt.NDArray[np.float32]
    version: Version
    status: Status
    text: str
    reward: float | None = None
    info: Mapping[str, float] = field(default_factory=dict)
    routes: npt.NDArray[np.int32] | None = None

    def __post_init__(self) -> None:
        self._freeze("tokens", self.tokens, np.int32, "iu")
        self._freeze("loss_mask", self.loss_mask, np.uint8, "iub")
        self._freeze("logprobs", self.logprobs, np.float32, "f")
        time = self.tokens.shape
        self._require(len(time) == 1 and time[0] >= 2, f"tokens is {time}, not [time >= 2]")
        for name, shape in (("loss_mask", self.loss_mask.shape), ("logprobs", self.logprobs.shape)):
            self._require(shape == time, f"{name} is {shape}, tokens is {time}")
        self._check_values()
        if self.routes is not None:
            self._freeze("routes", self.routes, np.int32, "iu")
            shape = self.routes.shape
            problem = f"routes is {shape}, not [{time[0] - 1}, layers, top_k]"
            self._require(len(shape) == 3 and shape[0] == time[0] - 1, problem)
        self._check_reward()

    @property
    def trained(self) -> int:
        """How many tokens the policy generated."""
        return int(self.loss_mask.sum())

    def with_reward(self, reward: float, info: Mapping[str, float] | None = None) -> Trajectory:
        """Return a copy that carries ``reward``; ``info`` is added to what it carries already."""
        copied = copy(self)  # not dataclasses.replace: the arrays were checked already
        object.__setattr__(copied, "reward", float(reward))
        object.__setattr__(copied, "info", {**self.info, **(info or {})})
        copied._check_reward()
        return copied

    def _check_reward(self) -> None:
        if self.reward is not None:
            self._require(math.isfinite(self.reward), f"reward is {self.reward}")

    def _check_values(self) -> None:
        mask, logprobs = self.loss_mask, self.logprobs
        empty = f"it is {self.status} but loss_mask is 0 everywhere"
        self._require(self.tokens.min() >= 0, "a token is negative")
        self._require(mask.max() <= 1, "loss_mask holds values other than 0 and 1")
        self._require(mask[0] == 0, "loss_mask is 1 at index 0: nothing precedes that token")
        self._require(self.status is Status.ABORTED or mask.any(), empty)
        self._require(np.isfinite(logprobs).all(), "a log-probability is not finite")
        self._require(logprobs.max() <= LOGPROB_SLACK, "a log-probability is greater than 0")
        self._require(not logprobs[mask == 0].any(), "logprobs is not 0 where loss_mask is 0")

    def _freeze(self, name: str, value: object, dtype: type[np.generic], kinds: str) -> None:
        given = np.asarray(value)
        problem = f"{name} is {given.dtype}, not {np.dtype(dtype).name}"
        self._require(given.dtype.kind in kinds, problem)
        array = np.ascontiguousarray(given, dtype=dtype)
        if given.dtype != array.dtype and array.dtype.kind in "iu":
            # A silent wrap-around would train on another token than the engine wrote.
            self._require(np.array_equal(array, given), f"{name} does not fit {array.dtype}")
        array = array.view()
        array.flags.writeable = False
        object.__setattr__(self, name, array)

    def _require(self, holds: bool | np.bool_, problem: str) -> None:
        if not holds:
            raise DataError(
                f"trajectory of sample {self.sample.id!r}: {problem}. It is refused before any "
                "training step; correct the generate hook or the engine that made it"
            )
