"""The weights of an engine: laid out from a model folder, filled by pushes, freed in sleep."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Mapping

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from fsm_trainer.engines.link_end import LinkEnd
from fsm_trainer.machine.errors import CapabilityMissing
from fsm_trainer.sync.buckets import copier
from fsm_trainer.sync.checksums import checksums
from fsm_trainer.sync.manifest import TensorSpec


class Replica(LinkEnd):
    """A causal language model of a folder in the Hugging Face layout; reads its config only.

    It starts without weights, on no device. Raises CapabilityMissing for an architecture that
    can't be decoded here, or a device that isn't here.
    """

    def __init__(self, folder: str, dtype: str, device: str) -> None:
        self._config = AutoConfig.from_pretrained(folder, local_files_only=True)
        self._dtype: torch.dtype = getattr(torch, dtype)
        super().__init__(torch.device(device))
        _check_architecture(self._config.get_text_config(), folder)
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise CapabilityMissing(f"device {device!r}: torch sees no CUDA device; use 'cpu'")
        self.release()
        self.specs = _specs(self.model)

    def acquire(self) -> None:
        """Put zeros in the shape of the weights on the device."""
        self.model = self._build(self.device)
        self.reset()

    def release(self) -> None:
        """Let go of the weights: what is left has shapes and no memory."""
        self.model = self._build(torch.device("meta"))

    def give_back_memory(self) -> None:
        """Return freed memory to the device, and what the C heap keeps to the system."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        ctypes.CDLL(None).malloc_trim(0)

    def reset(self) -> None:
        """Set every tensor of ``specs`` to zero."""
        for tensor in _tensors(self.model).values():
            tensor.detach().zero_()

    def _bind(self, tensors: Mapping[str, torch.Tensor]) -> Callable[[], None]:
        targets = _tensors(self.model)
        # The manifest fits `specs`: a name that isn't there is tied to one that is.
        return copier((targets[name], tensors[name]) for name in tensors if name in targets)

    def checksums(self) -> dict[str, str]:
        """Return a checksum for each tensor of ``specs``."""
        return dict(checksums(_tensors(self.model).items()))

    def _build(self, device: torch.device) -> PreTrainedModel:
        # Built anew each time: the constructor fills buffers that no checkpoint holds (rotary
        # frequencies), which a copy of an empty model would lack.
        return _build(self._config, self._dtype, device)


def layout(folder: str, dtype: str) -> list[TensorSpec]:
    """Describe every tensor of the model in a folder, tied ones once; reads its config only."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    return _specs(_build(config, getattr(torch, dtype), torch.device("meta")))


def _build(config: PretrainedConfig, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    with device, no_init_weights():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=dtype, attn_implementation="sdpa"
        )
    model.tie_weights()
    model.train(False).requires_grad_(False)
    return model


def _specs(model: PreTrainedModel) -> list[TensorSpec]:
    return [TensorSpec.of(name, tensor) for name, tensor in _tensors(model).items()]


def _tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return parameters and saved buffers by name; tied ones once, under their first name."""
    unique: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        unique.setdefault(id(tensor), (name, tensor))
    return dict(unique.values())


def _check_architecture(config: PretrainedConfig, folder: str) -> None:
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if kinds or config.is_encoder_decoder:
        what = ", ".join(sorted(kinds)) or "an encoder"
        raise CapabilityMissing(
            f"model {folder!r} has {what}; the embedded engine decodes models whose layers are "
            "all full attention: use another engine or model"
        )
