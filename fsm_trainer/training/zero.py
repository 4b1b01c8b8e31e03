"""The one place that knows DeepSpeed: an engine for one model, and what it keeps where."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from fsm_trainer.groups.training import install
from fsm_trainer.training.config import TrainerConfig
from fsm_trainer.training.offload import bytes_of, fingerprint, storages_under

# Elements per collective. DeepSpeed's own 5e8 would hold gigabytes for models of any size.
_BUCKET = 50_000_000


class ZeroEngine:
    """A model, AdamW and gradient reduction in DeepSpeed at one ZeRO stage; groups must be open.

    torch's AdamW, because DeepSpeed's own compiles C++ at run time.
    """

    def __init__(self, module: Any, config: TrainerConfig) -> None:
        install()
        import deepspeed

        self.module = module
        self._stage, self._clip = config.zero_stage, config.gradient_clip
        bfloat16 = config.dtype == "bfloat16"
        # Without masters DeepSpeed clips but doesn't tell the norm, so that case is clipped here.
        self._plain = self._stage == 0 and not bfloat16
        self._fused = next(module.parameters()).device.type == "cuda"
        decay = config.weight_decay
        self._adamw = torch.optim.AdamW(
            module.parameters(), lr=0.0, betas=config.betas, weight_decay=decay, fused=self._fused
        )
        bucket = min(_BUCKET, sum(parameter.numel() for parameter in module.parameters()))
        settings: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 0.0 if self._plain else self._clip,
            "zero_allow_untested_optimizer": True,
            "bf16": {"enabled": bfloat16, **({"check_grad_overflow": True} if bfloat16 else {})},
            "zero_optimization": {
                "stage": self._stage,
                "overlap_comm": False,
                "reduce_bucket_size": bucket,
                "allgather_bucket_size": bucket + bucket % 2,
                # Nothing stays gathered between two passes: what a rank holds is its partition,
                # so weights can be swapped underneath.
                "stage3_param_persistence_threshold": 0,
                "stage3_max_live_parameters": 0,
                "stage3_max_reuse_distance": 0,
                "stage3_prefetch_bucket_size": 0,
            },
        }
        self._engine: Any = deepspeed.initialize(
            model=module, optimizer=self._adamw, config=settings, dist_init_required=False
        )[0]

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        """Logits of ``tokens`` ``[batch, time]``, padded on the right.

        No attention mask: under a causal mask no token sees padding that stands to its right, and
        where ``positions`` begin anew, another sequence does.
        """
        logits: torch.Tensor = self._run(tokens, positions).logits
        return logits

    def hidden(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The last hidden states, ``[batch, time, width]``."""
        output = self._run(tokens, positions, output_hidden_states=True)
        states: torch.Tensor = output.hidden_states[-1]
        return states

    def _run(self, tokens: torch.Tensor, positions: torch.Tensor | None, **more: bool) -> Any:
        given = {} if positions is None else {"position_ids": positions}
        return self._engine(input_ids=tokens, use_cache=False, **given, **more)

    def backward(self, loss: torch.Tensor, last: bool) -> None:
        """Add gradients; at the last micro-batch they are averaged over the ranks."""
        self._engine.set_gradient_accumulation_boundary(last)
        self._engine.backward(loss, scale_wrt_gas=False)

    def step(self, learning_rate: float) -> float:
        """Clip and update; gives the norm before clipping. A non-finite norm updates nothing."""
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        if self._plain:
            clip = self._clip or float("inf")
            norm = float(torch.nn.utils.clip_grad_norm_(self.module.parameters(), clip))
            if math.isfinite(norm):
                self._engine.step()
            else:
                self.drop_gradients()
            return norm
        self._engine.step()
        return float(self._engine.get_global_grad_norm())

    def drop_gradients(self) -> None:
        """Forget all gradients, those of an unfinished or broken accumulation too."""
        self._engine.optimizer.zero_grad()
        if self._stage > 0:
            self._engine.optimizer.exit_backward()
        if self._stage in (1, 2):
            _forget_reductions(self._engine.optimizer)
        for parameter in self.module.parameters():
            parameter.grad = None

    def reset(self) -> None:
        """Forget the moments; in place, because DeepSpeed keeps views of them."""
        for moments in self._adamw.state.values():
            for moment in moments.values():
                moment.zero_()

    def optimizer(self) -> Iterator[torch.UntypedStorage]:
        """The storages of everything else: masters and moments first, then what DeepSpeed holds."""
        weights = {storage._cdata for storage in weights_of(self.module)}
        parameters = list(self.module.parameters())
        device = parameters[0].device.type
        for storage in storages_under(self._adamw, self._engine.optimizer, parameters):
            if storage._cdata not in weights and storage.device.type == device:
                yield storage

    def offload(self) -> None:
        """Have DeepSpeed move masters and moments to host memory, pinned anew; ZeRO 1 and 2."""
        from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum as States

        moved = [States.hp_params, States.optim_states]
        self._engine.offload_states(moved, pin_memory=True, non_blocking=True)
        torch.cuda.synchronize()

    def reload(self) -> None:
        """Have it move them back."""
        self._engine.reload_states(non_blocking=True)

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Each parameter and persistent buffer once, whole; all ranks must iterate together."""
        for name, parameter in self.module.named_parameters():
            with self._gathered(parameter):
                yield name, parameter.detach()
        parameters = {name for name, _ in self.module.named_parameters(remove_duplicate=False)}
        persistent = self.module.state_dict().keys() - parameters
        for name, buffer in self.module.named_buffers():
            if name in persistent:
                yield name, buffer

    def state(self) -> list[dict[str, torch.Tensor]]:
        """This rank's masters and moments, in the order of :meth:`_masters`."""
        return [
            {"master": master.detach(), **self._adamw.state.get(master, {})}
            for master in self._masters()
        ]

    def weights(self) -> list[torch.Tensor]:
        """What the storages of this rank's weights hold, as uint8 tensors on the CPU."""
        return [bytes_of(storage).to("cpu", copy=True) for storage in weights_of(self.module)]

    def fingerprint(self) -> str:
        """Of this rank's weights, masters and moments."""
        weights = (bytes_of(storage) for storage in weights_of(self.module))
        state = (part[name] for part in self.state() for name in sorted(part))
        return fingerprint((*weights, *state))

    def restore(
        self, state: list[dict[str, torch.Tensor]], weights: Sequence[torch.Tensor] = ()
    ) -> None:
        """Take up a :meth:`state`, and the weights of then unless the model has them already."""
        if weights:
            for storage, data in zip(weights_of(self.module), weights, strict=True):
                bytes_of(storage).copy_(data)
        for master, saved in zip(self._masters(), state, strict=True):
            with torch.no_grad():
                master.copy_(saved["master"])
            for name in saved.keys() - {"master"}:
                # A copy, because what torch.load gives can't be freed by resizing. AdamW keeps its
                # step counter on the CPU unless fused.
                device = master.device if saved[name].dim() or self._fused else "cpu"
                self._adamw.state[master][name] = saved[name].to(device, copy=True)

    def destroy(self) -> None:
        """Take DeepSpeed's hooks off the model."""
        self._engine.destroy()

    def _gathered(self, parameter: torch.nn.Parameter) -> contextlib.AbstractContextManager[Any]:
        if self._stage < 3:
            return contextlib.nullcontext()
        import deepspeed

        return deepspeed.zero.GatheredParameters([parameter])  # type: ignore[no-any-return]

    def _masters(self) -> list[torch.Tensor]:
        """The tensors that AdamW updates; at stage 3 DeepSpeed hands them over only in a step."""
        if self._stage == 3:
            return list(self._engine.optimizer.fp32_partitioned_groups_flat)
        return [master for group in self._adamw.param_groups for master in group["params"]]


def weights_of(module: torch.nn.Module) -> Iterator[torch.UntypedStorage]:
    """The storages behind a module's parameters (at ZeRO 3 their partition) and buffers."""
    found = set[int]()
    for inner in module.modules():
        for tensor in (*inner._parameters.values(), *inner._buffers.values()):
            for held in () if tensor is None else (tensor, vars(tensor).get("ds_tensor")):
                storage = None if held is None else held.untyped_storage()
                if storage is not None and storage.nbytes() and storage._cdata not in found:
                    found.add(storage._cdata)
                    yield storage


def _forget_reductions(optimizer: Any) -> None:
    """What ZeRO 1 and 2 keep of a step outside of ``grad``, and clear only when one succeeds."""
    from deepspeed.runtime.zero.stage_1_and_2 import INITIAL_MICRO_STEP_ID

    optimizer.micro_step_id = INITIAL_MICRO_STEP_ID
    optimizer.params_already_reduced = [False] * len(optimizer.params_already_reduced)
    for kept in (optimizer.all_grad_tensors, optimizer.averaged_gradients):
        for group in kept:
            kept[group] = None
    for bucket in optimizer.ipg_buckets.values():
        bucket.clear()
    optimizer._release_ipg_buffers()
