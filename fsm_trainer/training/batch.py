"""Trajectories as tensors, and who computes which of them when.

Quantities "of token t" live at index t of ``[batch, time]``; index 0 is always masked. Padding
stands on the right. Rows are addressed by their place in the collated batch, the same on every
rank; -1 is a blank row, which fills a rank's share up to that of the others and counts for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from fsm_trainer.algorithms.config import Aggregation
from fsm_trainer.algorithms.masked import token_weights
from fsm_trainer.data.routing import Routing
from fsm_trainer.data.trajectory import Status, Trajectory
from fsm_trainer.machine.errors import DataError
from fsm_trainer.training.packing import Rows


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Right-padded trajectories; ``[batch, time]`` or ``[batch]`` tensors on one device."""

    tokens: torch.Tensor
    """int64 ``[batch, time]``: prompt, response, padding."""
    attention_mask: torch.Tensor
    """int64 ``[batch, time]``: 1 on prompt and response."""
    loss_mask: torch.Tensor
    """float32 ``[batch, time]``: 1 where the policy generated the token, so it is trained on."""
    engine_logprobs: torch.Tensor
    """float32 ``[batch, time]``: the rollout engine's log-probabilities."""
    rewards: torch.Tensor
    """float32 ``[batch]``."""
    truncated: torch.Tensor
    """float32 ``[batch]``: 1 where the generation ran into its limit."""
    groups: tuple[str, ...]
    """``[batch]``: rows of equal group are compared with each other."""
    ids: tuple[str, ...]
    """``[batch]``: the sample that each row answers."""
    routes: torch.Tensor | None = None
    """int32 ``[batch, time, layers, top_k]``: the experts that the rollout engine sent each token
    to, for the policy to take again; -1 where a sequence ends and in padding, where none were and
    the routers choose. None: they choose everywhere."""

    def __len__(self) -> int:
        return self.tokens.shape[0]

    @property
    def lengths(self) -> torch.Tensor:
        """int64 ``[batch]``: tokens of prompt and response."""
        return self.attention_mask.sum(dim=1)

    def to(self, device: torch.device | str) -> Batch:
        """Return the batch with its tensors on ``device``."""
        return self._each(lambda tensor: tensor.to(device))

    def select(self, rows: torch.Tensor | Sequence[int]) -> Batch:
        """Return the named rows, in that order; -1 gives a blank row, which is masked throughout.

        A blank row keeps the tokens of row 0, so that a model can run on it.
        """
        given = torch.as_tensor(rows, dtype=torch.int64, device=self.tokens.device)
        source = given.clamp(min=0)
        chosen = replace(
            self._each(lambda tensor: tensor[source]),
            groups=tuple(self.groups[row] for row in source.tolist()),
            ids=tuple(self.ids[row] for row in source.tolist()),
        )
        return replace(chosen, loss_mask=chosen.loss_mask.masked_fill(given[:, None] < 0, 0.0))

    def trim(self) -> Batch:
        """Return the batch without the columns that are padding in every row."""
        time = int(self.lengths.max())
        return self._each(lambda tensor: tensor[:, :time] if tensor.dim() > 1 else tensor)

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        tensors = {k: change(v) for k, v in values.items() if isinstance(v, torch.Tensor)}
        return replace(self, **(values | tensors))


def collate(
    trajectories: Sequence[Trajectory], pad_token: int, routing: Routing | None = None
) -> Batch:
    """Return the trajectories as one right-padded batch on the CPU; with routes of ``routing``.

    Raises ``DataError`` if there is none, or one has no reward, or not the routes that it should.
    """
    if not trajectories:
        raise DataError("no trajectory to train on: every rollout of this step was dropped")
    for trajectory in trajectories:
        if trajectory.reward is None:
            raise DataError(
                f"trajectory of sample {trajectory.sample.id!r} ({trajectory.status}) has no "
                "reward: score it, or drop it, before it is collated"
            )
        if routing is not None:
            routing.check(trajectory)
    plain = assemble(
        [trajectory.tokens for trajectory in trajectories],
        [trajectory.loss_mask for trajectory in trajectories],
        pad_token,
    )
    time, engine = plain.tokens.shape[1], [t.logprobs for t in trajectories]
    routes = [t.routes for t in trajectories if t.routes is not None]
    return replace(
        plain,
        engine_logprobs=_padded(engine, time, 0, torch.float32),
        rewards=torch.tensor([t.reward for t in trajectories], dtype=torch.float32),
        truncated=torch.tensor([float(t.status is Status.TRUNCATED) for t in trajectories]),
        groups=tuple(t.sample.group for t in trajectories),
        ids=tuple(t.sample.id for t in trajectories),
        routes=None if routing is None else _padded(routes, time, -1, torch.int32),
    )


def assemble(
    tokens: Sequence[npt.NDArray[np.int32]],
    loss_masks: Sequence[npt.NDArray[np.uint8]],
    pad_token: int,
) -> Batch:
    """Return sequences without log-probabilities and rewards (zeros) as a batch on the CPU."""
    lengths = torch.tensor([len(row) for row in tokens])
    time, count = int(lengths.max()), len(tokens)
    return Batch(
        tokens=_padded(tokens, time, pad_token, torch.int64),
        attention_mask=(torch.arange(time) < lengths[:, None]).long(),
        loss_mask=_padded(loss_masks, time, 0, torch.float32),
        engine_logprobs=torch.zeros(count, time),
        rewards=torch.zeros(count),
        truncated=torch.zeros(count),
        groups=("",) * count,
        ids=("",) * count,
    )


class Place(Protocol):
    """Which share of the rows a rank walks, and in which steps; every ``ModelPort`` is one."""

    rank: int
    """This rank among the role's ranks."""
    world_size: int
    """Ranks of the role."""
    micro_batch: int
    """Sequences in one forward pass, at most; says nothing where ``micro_batch_tokens`` does."""
    micro_batch_tokens: int | None
    """Tokens in one forward pass, at most, padding included."""
    packing: bool
    """Whether sequences share rows in a forward pass."""


class Minibatch(NamedTuple):
    """What one optimizer step reads."""

    rows: torch.Tensor
    """int64 ``[rows]``: all ranks' rows, without blanks."""
    micro_batches: tuple[torch.Tensor, ...]
    """This rank's rows, a forward pass each; as many on every rank."""


class Part(NamedTuple):
    """One micro-batch of a rank, on the model's device."""

    batch: Batch
    rows: torch.Tensor
    """Its rows' places in the whole batch, on the CPU."""
    weights: torch.Tensor
    """Each place's share of the whole minibatch's mean, ``[batch, time]``."""
    shares: torch.Tensor
    """The same for a mean over tokens, whatever the loss is aggregated by: for figures."""
    tables: tuple[torch.Tensor, ...]
    """The same rows and columns of the tables that were given."""
    last: bool
    """No other micro-batch follows in this minibatch."""


def deal(rows: torch.Tensor, lengths: torch.Tensor, place: Place) -> Minibatch:
    """Return the minibatch of ``rows`` as the rank at ``place`` walks it.

    ``lengths`` are the tokens of each row of the batch. Each ``world_size``-th row from ``rank`` on
    is the rank's own, filled up with -1 to equal lengths; where micro-batches are measured in
    tokens, each ``world_size``-th micro-batch is.
    """
    if place.micro_batch_tokens is not None:
        found = _by_tokens(rows.tolist(), lengths.tolist(), place.micro_batch_tokens, place)
        own = found[place.rank :: place.world_size]
        return Minibatch(rows, tuple(torch.tensor(micro_batch) for micro_batch in own))
    share = -(-len(rows) // place.world_size)
    filled = torch.full((share * place.world_size,), -1, dtype=torch.int64)
    filled[: len(rows)] = rows
    return Minibatch(rows, torch.split(filled[place.rank :: place.world_size], place.micro_batch))


def _by_tokens(
    rows: Sequence[int], lengths: Sequence[int], limit: int, place: Place
) -> list[list[int]]:
    """Micro-batches of at most ``limit`` tokens, as many as a multiple of the ranks."""
    filled: list[Rows] = []
    for row in sorted(rows, key=lambda row: -lengths[row]):
        if lengths[row] > limit:
            raise DataError(
                f"a sequence has {lengths[row]} tokens, but micro_batch_tokens allows {limit} in a "
                f"forward pass. Set it to {lengths[row]} at least, or generate fewer"
            )
        if not any(micro_batch.add(row, lengths[row], limit) for micro_batch in filled):
            filled.append(Rows(lengths[row], place.packing))
            filled[-1].add(row, lengths[row])
    found = [micro_batch.sequences for micro_batch in filled]
    while len(found) % place.world_size:
        # At a width of its own the second half may need more rows, but all of them are half full on
        # average: it fits, because it is not the larger one.
        largest = max(found, key=len)
        found.remove(largest)
        middle = -(-len(largest) // 2)
        found += [largest[:middle], largest[middle:] or [[-1]]]
    return [[row for packed in micro_batch for row in packed] for micro_batch in found]


def draw_epochs(
    epochs: int, minibatches: int, lengths: torch.Tensor, generator: torch.Generator, place: Place
) -> list[list[Minibatch]]:
    """Return passes over rows, each in a random order, as the rank at ``place`` walks it.

    ``lengths`` are the tokens of each row. The order is drawn over global rows and only then dealt
    to the ranks: with generators in equal states, every rank draws the same minibatches, and so
    does another number of ranks.
    """
    count = len(lengths)
    orders = [torch.randperm(count, generator=generator) for _ in range(epochs)]
    shares = (order.tensor_split(min(minibatches, count)) for order in orders)
    return [[deal(rows, lengths, place) for rows in epoch] for epoch in shares]


def parts(
    batch: Batch,
    minibatch: Minibatch,
    aggregation: Aggregation,
    device: torch.device,
    *tables: torch.Tensor,
    length: int | None = None,
) -> Iterator[Part]:
    """Yield this rank's micro-batches with their shares of the minibatch's mean.

    ``aggregation`` and ``length`` are those of ``token_weights``. ``tables`` are ``[batch, time]``
    as ``batch``; sums of ``weights * x`` over all parts of all ranks are the mean of x over the
    minibatch.
    """
    whole = batch.loss_mask[minibatch.rows]
    for number, rows in enumerate(minibatch.micro_batches, start=1):
        part = batch.select(rows).trim()
        weights = token_weights(part.loss_mask, aggregation, whole, length)
        shares = token_weights(part.loss_mask, "token", whole)
        time = part.tokens.shape[1]
        cut = tuple(table[rows.clamp(min=0), :time].to(device) for table in tables)
        last = number == len(minibatch.micro_batches)
        yield Part(part.to(device), rows, weights.to(device), shares.to(device), cut, last)


def _padded(
    rows: Iterable[npt.NDArray[np.generic]], time: int, fill: float, dtype: torch.dtype
) -> torch.Tensor:
    table = [
        np.pad(row, [(0, time - len(row)), *[(0, 0)] * (row.ndim - 1)], constant_values=fill)
        for row in rows
    ]
    return torch.from_numpy(np.stack(table)).to(dtype)
