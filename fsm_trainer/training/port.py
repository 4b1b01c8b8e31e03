"""What an update needs of a model: one rank of it, whatever shards it.

The updates in :mod:`fsm_trainer.training.ppo` speak to this port only; a plain torch module and a
DeepSpeed engine both fit behind it.

Quantities "of token t" live at index ``t`` of ``[batch, time]``; index 0 has no predecessor and is
always masked. Padding stands on the right.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple, Protocol

import torch

from fsm_trainer.training.batch import Batch, Place

Bank = Literal["live", "reference"]


class Scores(NamedTuple):
    """Log-probabilities of a batch's tokens, and the entropy they were drawn at if asked for."""

    logprobs: torch.Tensor
    """``[batch, time]``, float32: log p(tokens[t] | tokens[<t]); index 0 is zero."""
    entropy: torch.Tensor | None = None
    """``[batch, time]``, float32: entropy (nats) of what token t was drawn from; index 0 is 0."""
    rerouted: torch.Tensor | None = None
    """``[batch, time]``, float32: the share of layers whose router would have sent token t - 1, the
    last one read before t, to other experts than those it was sent to; None without routes."""


class Traits(NamedTuple):
    """What explains a difference between two passes over the same weights."""

    dtype: torch.dtype
    """Of the weights that compute."""
    layers: int
    """Blocks between embedding and head."""
    dropout: float = 0.0
    """The largest probability of a dropout that is on; 0 is right."""
    experts: bool = False
    """Whether tokens are routed to experts."""


class ModelPort(Place, Protocol):
    """One rank's model, optimizer and training group.

    Forward passes are differentiable exactly when grad mode is on, and deterministic: dropout is
    off in both modes. All ranks of a role make the same calls in the same order, with equal
    numbers of micro-batches, so an implementation may communicate in any of them.
    """

    device: torch.device
    """Where the tensors of :meth:`all_reduce`, batches and results live."""

    @property
    def traits(self) -> Traits:
        """What the model is, as far as a difference between two passes may come from it."""
        ...

    def logprobs(
        self, batch: Batch, temperature: float, *, bank: Bank = "live", with_entropy: bool = False
    ) -> Scores:
        """Log-probabilities of ``batch.tokens`` at a temperature; all ``[batch, time]``.

        Where the batch has routes, the model takes them, also when the backward pass recomputes.
        Calls with the same ``bank`` come in runs, so a swap of banks may wait for the first call
        that names another one. ``bank="reference"`` is only called without gradients.
        """
        ...

    def values(self, batch: Batch) -> torch.Tensor:
        """``[batch, time]`` float32: index t is V(the state before token t).

        That is the value head's output at position t - 1; index 0 is zero.
        """
        ...

    def backward(self, loss: torch.Tensor, last: bool) -> None:
        """Add a micro-batch's gradient; ``last`` marks the accumulation boundary.

        The gradient that :meth:`step` applies is ``1 / world_size * sum over ranks * sum over
        micro-batches`` of the gradients of ``loss``: no division by the number of micro-batches.
        """
        ...

    def step(self) -> Mapping[str, float]:
        """Clip, update the weights, clear the gradients; gives ``grad_norm``, ``learning_rate``."""
        ...

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over the role's ranks; ``tensor`` may be overwritten."""
        ...
