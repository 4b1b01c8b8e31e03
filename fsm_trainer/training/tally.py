"""Figures of one update, gathered over micro-batches, optimizer steps and ranks."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fsm_trainer.training.port import ModelPort


class Tally:
    """Sums and peaks that stay on the device until the update is over: no step waits for them."""

    def __init__(self) -> None:
        self._sums: dict[str, torch.Tensor] = {}
        self._peaks: dict[str, torch.Tensor] = {}
        self._steps: list[Mapping[str, float]] = []

    def add(self, name: str, share: torch.Tensor) -> None:
        """Add a micro-batch's share of a minibatch's mean; a scalar."""
        self._sums[name] = self._sums.get(name, 0.0) + share.detach().double()

    def peak(self, name: str, value: torch.Tensor) -> None:
        """Keep the greatest value; a scalar."""
        value = value.detach().double()
        self._peaks[name] = torch.maximum(self._peaks.get(name, value), value)

    def stepped(self, figures: Mapping[str, float]) -> None:
        """Count an optimizer step; ``figures`` are what :meth:`ModelPort.step` gave."""
        self._steps.append(figures)

    def reduce(self, model: ModelPort, role: str) -> dict[str, float]:
        """Return means over the optimizer steps and peaks over all, the same on every rank.

        The mean gradient norm and the last learning rate join them, named after ``role``. Empty
        if no step was taken.
        """
        if not self._steps:
            return {}
        figures = [*self._sums.values(), *self._peaks.values()]
        # The port can only add: each rank fills a row of its own.
        shape = model.world_size, len(figures)
        table = torch.zeros(shape, dtype=torch.float64, device=model.device)
        table[model.rank] = torch.stack(figures)
        table = model.all_reduce(table).cpu()
        count = len(self._steps)
        means = (table.sum(dim=0) / count).tolist()[: len(self._sums)]
        peaks = table.max(dim=0).values.tolist()[len(self._sums) :]
        norms = [step["grad_norm"] for step in self._steps]
        return {
            **dict(zip(self._sums, means, strict=True)),
            **dict(zip(self._peaks, peaks, strict=True)),
            f"{role}/grad_norm": sum(norms) / count,
            f"{role}/learning_rate": self._steps[-1]["learning_rate"],
        }
