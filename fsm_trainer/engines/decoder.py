"""Continuous batched decoding with a KV cache, in which no row can feel another.

Each sequence has a slot (a row of the cache) and stands at its left edge: position ``p`` lies in
column ``p`` whatever shares the batch, so no padding shifts it, and a row reads only columns that
it has written. That, and two roundings, make the results bit-equal in every batch on CPU: rows are
rounded up to 8, since MKL's matrix product gives fewer than 4 rows other bits, and columns to 16,
since a vectorised sum groups its tail differently. Prefill stops one token before the end of the
prompt; so every token drawn comes from the same kind of step. A mixture of experts is outside of
that: each expert computes the rows that chose it, so last bits depend on who shares the batch.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers.cache_utils import Cache

from fsm_trainer.data.routing import routers
from fsm_trainer.engines.contract import Completion, Finish, Request
from fsm_trainer.engines.replica import Replica
from fsm_trainer.engines.sampling import draw, uniform
from fsm_trainer.machine.errors import DataError
from fsm_trainer.machine.version import Version

ROWS = 8
COLUMNS = 16


@dataclass(slots=True)
class _Sequence:
    request: Request
    version: Version
    ends: Collection[int]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    routes: list[npt.NDArray[np.int32]] = field(default_factory=list)

    @property
    def position(self) -> int:
        """The position of the last token, the one that the next step feeds."""
        return len(self.request.tokens) + len(self.tokens) - 1

    @property
    def last(self) -> int:
        return self.tokens[-1] if self.tokens else self.request.tokens[-1]

    @property
    def finish(self) -> Finish | None:
        if self.tokens and self.tokens[-1] in self.ends:
            return Finish.STOP
        return Finish.LENGTH if len(self.tokens) == self.request.max_new_tokens else None

    @property
    def span(self) -> int:
        """How many columns it may come to need."""
        return _up(len(self.request.tokens) + self.request.max_new_tokens, COLUMNS)

    def completion(self, finish: Finish) -> Completion:
        tokens, logprobs = tuple(self.tokens), tuple(self.logprobs)
        whole = self.routes and finish is not Finish.ABORT
        routes = np.concatenate(self.routes) if whole else None
        return Completion(self.request.id, tokens, logprobs, finish, self.version, routes)


class _Slots(Cache):
    """Keys and values ``[rows, heads, columns, size]`` a layer.

    A step writes one column a row, at ``at``; a prefill the first columns of the rows ``filling``.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.rows = self.columns = 0
        self.at = torch.empty(0, dtype=torch.int64)
        self.filling: list[int] = []
        self.width = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Say nothing of the past: the decoder gives positions and masks itself."""
        return 0

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store this step's ``[rows, heads, 1, size]``; return what the rows may look at.

        Of a prefill ``[rows, heads, width, size]``, whose rows look at nothing else.
        """
        if layer_idx == len(self.pairs):
            # Zeros: what is masked is still multiplied by 0, and must be finite.
            self.pairs.append((self._empty(key_states), self._empty(value_states)))
        keys, values = self.pairs[layer_idx]
        if self.filling:
            keys[self.filling, :, : self.width] = key_states[: len(self.filling)]
            values[self.filling, :, : self.width] = value_states[: len(self.filling)]
            return key_states, value_states
        row = torch.arange(len(self.at), device=self.at.device)
        keys[row, :, self.at] = key_states[:, :, 0]
        values[row, :, self.at] = value_states[:, :, 0]
        return keys[: len(row), :, : self.width], values[: len(row), :, : self.width]

    def _empty(self, like: torch.Tensor) -> torch.Tensor:
        return like.new_zeros(self.rows, like.shape[1], self.columns, like.shape[3])

    def resize(self, rows: int, columns: int, used: int) -> None:
        """Change the capacity; the first ``used`` rows keep what they hold."""
        self.rows, self.columns = rows, columns
        for index, old in enumerate(self.pairs):
            new = self._empty(old[0]), self._empty(old[1])
            kept = min(columns, old[0].shape[2])
            for source, target in zip(old, new, strict=True):
                target[:used, :, :kept] = source[:used, :, :kept]
            self.pairs[index] = new

    def move(self, sources: list[int], targets: list[int]) -> None:
        """Copy whole rows."""
        for pair in self.pairs:
            for tensor in pair:
                tensor[targets, :, : self.width] = tensor[sources, :, : self.width]


class Decoder:
    """Decodes submitted requests, one token for each of them a step.

    At most ``max_tokens`` cache positions are in use; further requests wait their turn, in order.
    With ``records`` completions tell the experts of each token.
    """

    def __init__(
        self,
        replica: Replica,
        max_tokens: int,
        ends: frozenset[int] = frozenset(),
        records: bool = False,
    ) -> None:
        self._replica, self._max_tokens, self._ends = replica, max_tokens, ends
        self._records = records
        parameters = inspect.signature(replica.model.forward).parameters
        # transformers 5.2x renames the argument; the old name goes in 5.40.
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []
        self._slots = _Slots()

    @property
    def active(self) -> bool:
        """Whether a step has anything to do."""
        return bool(self._running or self._waiting)

    def submit(self, requests: Sequence[Request], version: Version) -> None:
        """Queue requests, all or none; raises DataError for one that can't be decoded."""
        for request in requests:
            self._check(request)
        self._waiting.extend(
            _Sequence(request, version, request.stop and {*request.stop, *self._ends})
            for request in requests
        )

    def _check(self, request: Request) -> None:
        spans = len(request.tokens) + request.max_new_tokens
        if ROWS * _up(spans, COLUMNS) > self._max_tokens:
            raise DataError(
                f"request {request.id} (prompt and max_new_tokens): {spans} tokens; with "
                f"max_batch_tokens {self._max_tokens} only {self._max_tokens // ROWS} fit"
            )

    def clear(self) -> None:
        """Forget every request and free the cache."""
        self._waiting.clear()
        self._running.clear()
        self._slots = _Slots()

    @torch.inference_mode()
    def abort(self, ids: Collection[str] | None = None) -> list[Completion]:
        """Take these requests (None: all) out; returns what they have got."""

        def stays(sequence: _Sequence) -> bool:
            return ids is not None and sequence.request.id not in ids

        gone = [each for each in (*self._running, *self._waiting) if not stays(each)]
        self._waiting = deque(filter(stays, self._waiting))
        self._compact([stays(each) for each in self._running])
        return [sequence.completion(Finish.ABORT) for sequence in gone]

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        """Draw one token for each running request; returns those that ended by it."""
        self._admit()
        tokens, logprobs = self._decode()
        for sequence, token, logprob in zip(self._running, tokens, logprobs, strict=True):
            sequence.tokens.append(token)
            sequence.logprobs.append(logprob)
        finishes = [sequence.finish for sequence in self._running]
        ended = [
            sequence.completion(finish)
            for sequence, finish in zip(self._running, finishes, strict=True)
            if finish is not None
        ]
        self._compact([finish is None for finish in finishes])
        return ended

    def _admit(self) -> None:
        """Move as many waiting requests as fit into slots, and prefill them."""
        first = len(self._running)
        columns = max((sequence.span for sequence in self._running), default=0)
        while self._waiting:
            wider = max(columns, self._waiting[0].span)
            rows = _up(len(self._running) + 1, ROWS)
            if self._running and rows * wider > self._max_tokens:
                break
            columns = wider
            self._running.append(self._waiting.popleft())
        rows = _up(len(self._running), ROWS)
        if rows > self._slots.rows or columns > self._slots.columns:
            # Twice the rows, where they fit: requests that trickle in don't copy it each time.
            room = self._max_tokens // columns // ROWS * ROWS
            self._slots.resize(max(rows, min(2 * first, room) // ROWS * ROWS), columns, first)
        by_width: dict[int, list[int]] = {}
        for row in range(first, len(self._running)):
            width = _up(len(self._running[row].request.tokens) - 1, COLUMNS)
            by_width.setdefault(width, []).append(row)
        by_width.pop(0, None)
        for width, members in by_width.items():
            most = max(ROWS, self._max_tokens // width)
            for start in range(0, len(members), most):
                self._prefill(members[start : start + most], width)

    def _prefill(self, rows: list[int], width: int) -> None:
        """Fill the slots with all but the last token of each prompt."""
        tokens = np.zeros((_up(len(rows), ROWS), width), dtype=np.int64)
        for index, row in enumerate(rows):
            prompt = self._running[row].request.tokens[:-1]
            tokens[index, : len(prompt)] = prompt
        device = self._replica.model.device
        self._slots.filling, self._slots.width = rows, width
        _, routes = self._forward(
            self._replica.model.base_model,
            input_ids=torch.from_numpy(tokens).to(device),
            position_ids=torch.arange(width, device=device)[None],
        )
        self._slots.filling = []
        if routes is not None:
            for row, own in zip(rows, np.split(routes, len(tokens)), strict=False):
                sequence = self._running[row]
                sequence.routes.append(own[: len(sequence.request.tokens) - 1])

    def _decode(self) -> tuple[list[int], list[float]]:
        running, device = self._running, self._replica.model.device
        rows = _up(len(running), ROWS)
        state = np.zeros((2, rows), dtype=np.int64)
        state[0, : len(running)] = [sequence.position for sequence in running]
        state[1, : len(running)] = [sequence.last for sequence in running]
        positions, tokens = torch.from_numpy(state).to(device)
        slots = self._slots
        slots.at, slots.width = positions, _up(int(state[0].max()) + 1, COLUMNS)
        visible = torch.arange(slots.width, device=device) <= positions[:, None]
        output, routes = self._forward(
            self._replica.model,
            input_ids=tokens[:, None],
            position_ids=positions[:, None],
            attention_mask=visible[:, None, None],
            logits_to_keep=1,
        )
        logits = output.logits[: len(running), -1]
        if routes is not None:
            for row, sequence in enumerate(running):
                sequence.routes.append(routes[row : row + 1])
        seeds = np.array([sequence.request.seed for sequence in running], dtype=np.uint64)
        drawn, logprobs = draw(
            logits,
            np.array([sequence.request.temperature for sequence in running], dtype=np.float32),
            uniform(seeds, state[0, : len(running)].astype(np.uint64) + np.uint64(1)),
        )
        return drawn.tolist(), logprobs.tolist()

    def _forward(
        self, model: Callable[..., Any], **inputs: Any
    ) -> tuple[Any, npt.NDArray[np.int32] | None]:
        """One forward pass with the cache, and its routes ``[places, layers, top_k]`` if wanted."""
        inputs |= {"use_cache": True, self._cache_name: self._slots}
        if not self._records:
            return model(**inputs), None
        with _recorded(self._replica.model) as chosen:
            output = model(**inputs)
        return output, torch.stack(chosen, dim=1).to("cpu", torch.int32).numpy()

    def _compact(self, stays: list[bool]) -> None:
        """Drop the rows that don't stay; the last ones move into the gaps."""
        kept = sum(stays)
        sources = [row for row in range(kept, len(stays)) if stays[row]]
        targets = [row for row in range(kept) if not stays[row]]
        if sources:
            self._slots.move(sources, targets)
            for source, target in zip(sources, targets, strict=True):
                self._running[target] = self._running[source]
        del self._running[kept:]


@contextmanager
def _recorded(model: torch.nn.Module) -> Iterator[list[torch.Tensor]]:
    """What each router chooses in the forward passes within, ``[places, top_k]`` each."""
    chosen: list[torch.Tensor] = []
    hooks = [
        router.register_forward_hook(lambda router, given, output: chosen.append(output[2]))
        for router in routers(model)
    ]
    try:
        yield chosen
    finally:
        for hook in hooks:
            hook.remove()


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
