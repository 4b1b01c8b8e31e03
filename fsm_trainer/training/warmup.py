"""Supervised warm-up: the model learns known answers before it is left to explore."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from fsm_trainer.algorithms.masked import keep
from fsm_trainer.machine.errors import DataError
from fsm_trainer.training.batch import Batch, assemble, deal, parts
from fsm_trainer.training.port import ModelPort
from fsm_trainer.training.tally import Tally


class Pair(NamedTuple):
    """A prompt and its answer in tokens; the answer ends with the end token."""

    prompt: Sequence[int]
    answer: Sequence[int]


def warmup_steps(
    model: ModelPort,
    pairs: Sequence[Pair],
    steps: int,
    batch_size: int,
    generator: torch.Generator,
    *,
    pad_token: int,
) -> dict[str, float]:
    """Minimize the answers' negative log-likelihood, a mean over their tokens, for ``steps`` steps.

    Each step draws ``batch_size`` pairs with replacement, the same on every rank for generators in
    equal states. Gives the mean loss and gradient norm and the last learning rate; call it for a
    few steps at a time to watch them. Raises ``DataError`` if a pair can't be trained on.
    """
    for number, pair in enumerate(pairs):
        if not pair.prompt or not pair.answer:
            raise DataError(
                f"warm-up pair {number}: the {'answer' if pair.prompt else 'prompt'} has no "
                "tokens. Leave samples without an answer out"
            )
    if steps > 0 and not pairs:
        raise DataError("no sample has an answer to warm up on: set warmup.steps to 0")

    tally = Tally()
    for _ in range(steps):
        drawn = torch.randint(len(pairs), (batch_size,), generator=generator)
        batch = _collate([pairs[row] for row in drawn.tolist()], pad_token)
        rows = torch.arange(batch_size)
        minibatch = deal(rows, batch.lengths, model)
        for part in parts(batch, minibatch, "token", model.device):
            scores = model.logprobs(part.batch, 1.0)
            loss = -(part.weights * keep(scores.logprobs, part.batch.loss_mask)).sum()
            model.backward(loss * model.world_size, part.last)
            tally.add("warmup/loss", loss)
        tally.stepped(model.step())
    return tally.reduce(model, "warmup")


def _collate(pairs: Sequence[Pair], pad_token: int) -> Batch:
    tokens = [np.array([*pair.prompt, *pair.answer], dtype=np.int32) for pair in pairs]
    masks = [np.array([0] * len(p.prompt) + [1] * len(p.answer), dtype=np.uint8) for p in pairs]
    return assemble(tokens, masks, pad_token)
