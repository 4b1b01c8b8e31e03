"""What a generate hook sees: ``async generate(context, sample) -> Trajectory | list[Trajectory]``.

Requests of all samples that wait at the same time go to the engine as one batch, in the order of
the samples: which ones that are depends on the hooks alone, not on the clock, so that a run can be
repeated bit by bit.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fsm_trainer.data.models import encode_prompt
from fsm_trainer.data.seeds import derive
from fsm_trainer.data.trajectory import Prompt, Sample, Status, Trajectory
from fsm_trainer.engines.contract import Completion, Finish, Request
from fsm_trainer.engines.engine import Engine
from fsm_trainer.machine.errors import DataError
from fsm_trainer.machine.version import Version

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Hook = Callable[["Context", Sample], Awaitable[Trajectory | list[Trajectory]]]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn."""

    temperature: float
    max_new_tokens: int


class Context:
    """One sample's way to the engine and the tokenizer."""

    def __init__(
        self,
        batcher: Batcher,
        tokenizer: PreTrainedTokenizerBase,
        sampling: Sampling,
        version: Version,
        sample: Sample,
        seed: int,
        order: int,
    ) -> None:
        self.tokenizer, self.sampling, self.version = tokenizer, sampling, version
        self._batcher, self._sample, self._seed, self._order = batcher, sample, seed, order
        self._turn = 0

    def encode(self, prompt: Prompt) -> list[int]:
        """The tokens of a prompt."""
        return encode_prompt(self.tokenizer, prompt)

    async def complete(
        self,
        tokens: Sequence[int],
        max_new_tokens: int | None = None,
        stop: Sequence[int] | None = None,
    ) -> Completion:
        """Continue ``tokens`` with the policy; by default to the end token."""
        self._turn += 1
        eos = self.tokenizer.eos_token_id
        request = Request(
            id=f"{self._sample.id}/{self._turn}",
            tokens=tuple(tokens),
            max_new_tokens=max_new_tokens or self.sampling.max_new_tokens,
            temperature=self.sampling.temperature,
            seed=derive(self._seed, self._sample.id, self._turn),
            stop=tuple(stop) if stop is not None else (int(eos),),
        )
        return await self._batcher.complete(self._order, request)

    def trajectory(
        self, sample: Sample, prompt: Sequence[int], completion: Completion
    ) -> Trajectory:
        """The trajectory of a single turn: the prompt, then what the policy wrote."""
        before, after = len(prompt), len(completion.tokens)
        logprobs = np.zeros(before + after, dtype=np.float32)
        logprobs[before:] = completion.logprobs
        status = {
            Finish.STOP: Status.FINISHED,
            Finish.LENGTH: Status.TRUNCATED,
            Finish.ABORT: Status.ABORTED,
        }[completion.finish]
        text = self.tokenizer.decode(list(completion.tokens), skip_special_tokens=True)
        return Trajectory(
            sample=sample,
            tokens=np.array([*prompt, *completion.tokens], dtype=np.int32),
            loss_mask=np.repeat(np.array([0, 1], dtype=np.uint8), [before, after]),
            logprobs=logprobs,
            version=completion.version,
            status=status,
            text=str(text),
            routes=completion.routes,
        )


class Batcher:
    """Sends a batch when every hook that still runs waits for the engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._running = 0
        self._waiting: dict[int, tuple[Request, asyncio.Future[Completion]]] = {}

    async def run(
        self, hook: Hook, contexts: Sequence[Context], samples: Sequence[Sample]
    ) -> list[Trajectory]:
        """Run the hook for every sample; trajectories come in the order of the samples."""
        self._running = len(samples)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._one(hook, context, sample))
                    for context, sample in zip(contexts, samples, strict=True)
                ]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None  # the first one has cancelled the others
        return [trajectory for task in tasks for trajectory in task.result()]

    async def _one(self, hook: Hook, context: Context, sample: Sample) -> list[Trajectory]:
        try:
            found = hook(context, sample)
            if not inspect.isawaitable(found):
                raise DataError(
                    f"{hook!r} is not async: write `async def generate(context, sample)`"
                )
            result = await found
        finally:
            self._running -= 1
            self._flush()
        return result if isinstance(result, list) else [result]

    async def complete(self, order: int, request: Request) -> Completion:
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        if order in self._waiting:
            raise DataError(f"{request.id}: a hook awaits one completion at a time")
        self._waiting[order] = (request, future)
        self._flush()
        try:
            return await future
        finally:
            waiting = self._waiting.get(order)
            if waiting is not None and waiting[1] is future:
                del self._waiting[order]  # given up before it was sent

    def _flush(self) -> None:
        if self._waiting and len(self._waiting) == self._running:
            batch = [self._waiting[order] for order in sorted(self._waiting)]
            self._waiting.clear()
            self._task = asyncio.get_running_loop().create_task(self._send(batch))

    async def _send(self, batch: list[tuple[Request, asyncio.Future[Completion]]]) -> None:
        try:
            requests = [request for request, _ in batch]
            completions = await asyncio.to_thread(self._engine.generate, requests)
        except Exception as error:
            for _, future in batch:
                if not future.done():
                    future.set_exception(error)
            return
        for completion, (_, future) in zip(completions, batch, strict=True):
            if not future.done():
                future.set_result(completion)
