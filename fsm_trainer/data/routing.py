"""Which experts a mixture-of-experts model sends its tokens to: what a record of it must be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fsm_trainer.data.trajectory import Trajectory
from fsm_trainer.machine.errors import CapabilityMissing, DataError

#: Model types of transformers, and the class of their routers, which is called with hidden states
#: and gives logits, weights and indices of the experts.
_ROUTERS = {"qwen3_moe": "Qwen3MoeTopKRouter"}


class Routing(NamedTuple):
    """The shape of a model's routes: each token goes to ``top_k`` of ``experts`` in each layer."""

    layers: int
    experts: int
    top_k: int

    @classmethod
    def of(cls, folder: Path) -> Routing:
        """Read a model's ``config.json``; CapabilityMissing if its routes can't be replayed."""
        config = json.loads((folder / "config.json").read_text())
        kind, known = config.get("model_type"), ", ".join(_ROUTERS)
        if kind not in _ROUTERS:
            raise CapabilityMissing(
                f"{folder} is a {kind} model: routes are replayed for {known}. Turn "
                "routing_replay off, which a dense model doesn't need"
            )
        if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
            raise CapabilityMissing(
                f"{folder} has dense layers between its mixtures, and routes are replayed for "
                "models without. Turn routing_replay off"
            )
        # transformers has written both names.
        experts = config.get("num_experts") or config["num_local_experts"]
        return cls(config["num_hidden_layers"], experts, config["num_experts_per_tok"])

    def check(self, trajectory: Trajectory) -> None:
        """Raise DataError, with the sample's id, for routes that the model can't have taken."""
        routes, expected = trajectory.routes, (len(trajectory.tokens) - 1, self.layers, self.top_k)
        if routes is None:
            problem = "its routes are missing"
        elif routes.shape != expected:
            problem = f"its routes are {routes.shape}, the model's are {expected}"
        elif routes.min() < 0 or routes.max() >= self.experts:
            problem = f"its routes name experts outside of [0, {self.experts})"
        elif not routes.any() or self._silent(routes[trajectory.loss_mask[:-1] != 0]):
            problem = "its routes are all 0, of all tokens or of all generated: none was recorded"
        elif (twice := (np.diff(np.sort(routes)) == 0).any(axis=(1, 2))).any():
            row = int(twice.argmax())
            problem = f"its routes send token {row} to one expert twice: {routes[row].tolist()}"
        else:
            return
        raise DataError(
            f"trajectory of sample {trajectory.sample.id!r}: {problem}. With routing_replay it "
            "can't be trained on; the generate hook has to hand on what the engine recorded"
        )

    def _silent(self, generated: npt.NDArray[np.int32]) -> bool:
        """A single expert 0 in each layer may be a route; of two, both can't be the same."""
        return self.top_k == 1 and self.experts > 1 and len(generated) > 1 and not generated.any()


def routers(model: Any) -> list[Any]:
    """The routers of a transformers model, layer by layer; none in a dense model."""
    return [each for each in model.modules() if type(each).__name__ in _ROUTERS.values()]
