"""Hugging Face folders in, Hugging Face folders out: the policy and the value model."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch

from fsm_trainer.groups.training import install
from fsm_trainer.machine.errors import CapabilityMissing, ConfigError
from fsm_trainer.training.config import Dtype
from fsm_trainer.training.port import Traits

Head = Literal["policy", "value"]

# What others need beside weights and config: the tokenizer, in any of its forms.
_TOKENIZER_FILES = (
    "tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json",
    "chat_template*", "*.model",
)  # fmt: skip


def check_folder(directory: Path) -> None:
    """Raise ConfigError unless ``directory`` looks like a model's folder."""
    if not (directory / "config.json").is_file():
        raise ConfigError(
            f"{directory} is no model folder: it has no config.json. Give a folder that "
            "save_pretrained or fsm-trainer wrote"
        )


def load(head: Head, directory: Path, dtype: Dtype) -> Any:
    """The model of a folder, its parameters in memory of their own, without dropout.

    ``policy`` is a causal language model with ``[batch, time, vocabulary]`` logits. ``value`` is
    its backbone under a scalar head, logits ``[batch, time, 1]``; the head starts at zero when the
    folder holds a language model. Raises CapabilityMissing when transformers has no such class.
    """
    install()  # transformers imports DeepSpeed where it finds it, so it must come first
    import transformers

    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    config = transformers.AutoConfig.from_pretrained(directory)
    for name in _dropouts(config):
        setattr(config, name, 0.0)
    kind: Any = transformers.AutoModelForCausalLM
    if head == "value":
        kind, config.num_labels = transformers.AutoModelForTokenClassification, 1
    try:
        model, info = kind.from_pretrained(
            directory, config=config, dtype=getattr(torch, dtype), output_loading_info=True
        )
    except ValueError as error:
        raise CapabilityMissing(f"{directory}: no {head} model can be built: {error}") from error
    _check_complete(model, info["missing_keys"], directory, head)
    _own_memory(model)
    return model.train()


def save(model: Any, weights: Mapping[str, torch.Tensor], directory: Path, source: Path) -> None:
    """Write ``weights`` as safetensors with the model's config, and ``source``'s tokenizer."""
    model.save_pretrained(directory, state_dict=dict(weights))
    for pattern in _TOKENIZER_FILES:
        for path in source.glob(pattern):
            shutil.copy2(path, directory / path.name)


def traits(model: Any) -> Traits:
    """What the model is, as far as a difference between two passes may come from it."""
    modules = [m for m in model.modules() if isinstance(m, torch.nn.Dropout) and m.training]
    named = list(_dropouts(model.config).values()) if model.training else []
    return Traits(
        next(model.parameters()).dtype,
        model.config.num_hidden_layers,
        max([0.0, *(module.p for module in modules), *named]),
        # transformers writes one or the other.
        not {"num_experts", "num_local_experts"}.isdisjoint(model.config.to_dict()),
    )


def _dropouts(config: Any) -> dict[str, float]:
    """A config's probabilities of dropout; what has none of its own modules reads them there."""
    named = config.to_dict().items()
    return {k: v for k, v in named if "dropout" in k and isinstance(v, (int, float))}


@contextmanager
def replacing(directory: Path, leads: bool, barrier: Callable[[], None]) -> Iterator[Path]:
    """A folder that all ranks fill; it takes ``directory``'s place when none has an error.

    One rank ``leads``. ``barrier`` waits for all ranks; it has a deadline and raises.
    """
    partial = directory.with_name(f".{directory.name}.partial")
    previous = directory.with_name(f".{directory.name}.previous")
    if leads:
        for stale in (partial, previous):
            shutil.rmtree(stale, ignore_errors=True)
        partial.mkdir(parents=True)
    barrier()
    try:
        yield partial
        barrier()
    except BaseException:
        if leads:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    if leads:
        if directory.exists():
            os.replace(directory, previous)
        os.replace(partial, directory)
        shutil.rmtree(previous, ignore_errors=True)
    barrier()


def _check_complete(model: Any, missing: set[str], directory: Path, head: Head) -> None:
    fresh = ("score.", "classifier.") if head == "value" else ()
    new_head = {name for name in missing if name.startswith(fresh)}
    for name in new_head:
        torch.nn.init.zeros_(model.get_parameter(name))
    lacking = sorted(missing - new_head)[:5]
    if lacking:
        raise ConfigError(f"{directory} lacks weights that its config.json asks for: {lacking}")


def _own_memory(model: torch.nn.Module) -> None:
    """Copy what is mapped from the file, which could be neither freed nor changed on its own."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    for tensor in (*model.parameters(), *model.buffers()):
        storage = tensor.untyped_storage()
        if not storage.resizable() or storage.nbytes() != tensor.nbytes:
            tensor.data = tensor.data.clone()
