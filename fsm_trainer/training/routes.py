"""Routing replay (R3): a mixture-of-experts policy takes the experts that the engine took.

Trainer and engine round differently, and a router turns the last bit into another expert. Taken
again, the recorded experts make both compute the same function. Only the choice is replayed: an
expert's weight is the trainer's own, from its router's logits at the recorded experts, so routers
learn (Ma et al. 2025, Stabilizing MoE Reinforcement Learning by Aligning Training and Inference
Routers, arXiv 2510.11370).

A forward pass takes the experts of each place once in each layer, and a backward pass that
recomputes activations takes them once more; both are counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from fsm_trainer.data.routing import routers
from fsm_trainer.machine.errors import CapabilityMissing, SelfCheckFailed


class Taken:
    """The routes of one forward pass, and how often each layer has taken its own."""

    def __init__(self, routes: torch.Tensor) -> None:
        self.routes, layers = routes, routes.shape[2]
        self.forward, self.recomputed = [0] * layers, [0] * layers
        self._other: list[torch.Tensor] = []

    @property
    def rerouted(self) -> torch.Tensor:
        """The share of layers whose router would have chosen others, ``[batch, time]``."""
        shares = torch.stack(self._other).float().mean(dim=0)
        return shares.view(self.routes.shape[:2])

    def take(self, layer: int, own: torch.Tensor, again: bool) -> torch.Tensor:
        """The experts of a layer, ``[places, top_k]``; its router's ``own`` where none is given."""
        given = self.routes[:, :, layer].flatten(0, 1).long()
        given = torch.where(given < 0, own, given)
        if again:
            self.recomputed[layer] += 1
        else:
            self.forward[layer] += 1
            self._other.append((given.sort().values != own.sort().values).any(dim=-1))
        return given


class Replay:
    """The routers of one model; without routes they choose as ever, as in a dense model."""

    def __init__(self, module: Any) -> None:
        self._routers = routers(module)
        self._taken: Taken | None = None
        self._again = False
        self._last: Taken | None = None
        for layer, router in enumerate(self._routers):
            router.register_forward_hook(partial(self._route, layer))

    @contextmanager
    def taking(self, routes: torch.Tensor | None) -> Iterator[Taken | None]:
        """One forward pass that takes ``routes``, ``[batch, time, layers, top_k]``, if given.

        Raises CapabilityMissing for a model without as many routers, and SelfCheckFailed unless
        each of them took its part once.
        """
        self._last = None
        if routes is None:
            yield None
            return
        if routes.shape[2] != len(self._routers):
            raise CapabilityMissing(
                f"the batch has routes of {routes.shape[2]} layers, and the model "
                f"{len(self._routers)} routers that can take some. Turn routing_replay off"
            )
        taken = Taken(routes)
        with self._taking(taken, again=False):
            yield taken
        _expect("the forward pass", taken.forward, 1)
        self._last = taken if torch.is_grad_enabled() else None

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """What `torch.utils.checkpoint` runs a layer in, and what it recomputes the layer in."""
        taken = self._taken
        if taken is None:
            return nullcontext(), nullcontext()
        return nullcontext(), self._taking(taken, again=True)

    def check_recomputed(self, times: int) -> None:
        """Raise SelfCheckFailed unless a backward pass took the last routes so many times."""
        taken, self._last = self._last, None
        if taken is not None:
            _expect("the backward pass", taken.recomputed, times)

    @contextmanager
    def _taking(self, taken: Taken, again: bool) -> Iterator[None]:
        before = self._taken, self._again
        self._taken, self._again = taken, again
        try:
            yield
        finally:
            self._taken, self._again = before

    def _route(self, layer: int, router: Any, given: Any, chosen: Any) -> Any:
        """Replace what a router gives: logits, the weights of its experts, and their indices."""
        if self._taken is None:
            return chosen
        logits, _, own = chosen
        experts = self._taken.take(layer, own, self._again)
        weights = torch.softmax(logits, dim=-1, dtype=torch.float32).gather(-1, experts)
        if router.norm_topk_prob:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return logits, weights.to(logits.dtype), experts


def _expect(where: str, found: list[int], times: int) -> None:
    if found != [times] * len(found):
        raise SelfCheckFailed(
            f"routing replay: {where} should take the routes of each layer {times} times and took "
            f"them {found} times. What was computed belongs to other experts than the engine's; "
            "no optimizer step was taken with it"
        )
