"""A small random model with a byte-level tokenizer, made on the spot: nothing to download."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, Field, model_validator

from fsm_trainer.data.routing import routers
from fsm_trainer.machine.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

#: The tokenizer's ids: these two, then the 256 bytes.
PAD, EOS = 0, 1
VOCABULARY = 258
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


class TinyModelConfig(BaseModel, extra="forbid", frozen=True):
    """The shape of a Qwen3 model; the defaults have 107k parameters and learn to add digits.

    With ``experts`` it is a Qwen3-MoE model, whose feed-forward layers are all mixtures.
    """

    hidden: int = Field(default=64, ge=8)
    """Width of the residual stream."""
    intermediate: int = Field(default=128, ge=8)
    """Width of the feed-forward layers; of each expert in a mixture of them."""
    layers: int = Field(default=2, ge=1)
    """Number of layers."""
    heads: int = Field(default=4, ge=1)
    """Query heads of a layer."""
    kv_heads: int = Field(default=2, ge=1)
    """Key and value heads of a layer; divides ``heads``."""
    rope_theta: float = Field(default=100.0, gt=0)
    """Base of the rotary frequencies; small, because the sequences are short."""
    positions: int = Field(default=512, ge=16)
    """The most tokens of a sequence."""
    experts: int = Field(default=0, ge=0)
    """Experts of a layer; 0 makes the model dense."""
    experts_per_token: int = Field(default=2, ge=1)
    """Experts that a token is sent to, where there are any."""

    @model_validator(mode="after")
    def _heads_divide(self) -> TinyModelConfig:
        if self.hidden % self.heads or (self.hidden // self.heads) % 2:
            raise ValueError(f"hidden={self.hidden} must be an even multiple of heads={self.heads}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} must be a multiple of kv_heads={self.kv_heads}")
        if 0 < self.experts < self.experts_per_token:
            most = self.experts_per_token
            raise ValueError(f"experts={self.experts} must be experts_per_token={most} at least")
        return self


def make_tiny_model(directory: Path, config: TinyModelConfig, seed: int) -> Path:
    """Write the model that ``config`` and ``seed`` name as a Hugging Face folder; return it.

    float32 safetensors; equal arguments give equal bytes. A complete folder of the same model is
    kept. Raises ``ConfigError`` if the directory holds something else.
    """
    recipe = json.dumps({"seed": seed, **config.model_dump()}, indent=2, sort_keys=True)
    mark = directory / "tiny.json"
    if not mark.exists():
        with new_folder(directory) as folder:
            _write_model(folder, config, seed)
            byte_tokenizer().save_pretrained(folder)
            (folder / mark.name).write_text(recipe, encoding="utf-8")
    if not mark.exists() or mark.read_text(encoding="utf-8") != recipe:
        raise ConfigError(f"{directory} holds another model. Remove it, or name another folder")
    return directory


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yield a folder that becomes ``target`` on success, at once, and is gone after an error.

    If several processes make the same target, the first wins and the others' work is dropped.
    Raises ``ConfigError`` if the target holds something that is no model.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        yield folder
        folder.chmod(0o755)  # mkdtemp's 0o700 would hide the model from others
        try:
            os.replace(folder, target)
        except OSError as error:
            if not (target / "config.json").is_file():
                raise ConfigError(
                    f"{target} can't be written ({error.strerror}). Remove it, or name another "
                    "folder"
                ) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of 258 ids: pad 0, end of text 1, then one for each byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = {name: index for index, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    make: Any = PreTrainedTokenizerFast  # its constructor has no types
    wrapped: PreTrainedTokenizerFast = make(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = _CHAT_TEMPLATE
    return wrapped


def _write_model(folder: Path, config: TinyModelConfig, seed: int) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": config.hidden,
        "intermediate_size": config.intermediate,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.hidden // config.heads,
        "max_position_embeddings": config.positions,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "tie_word_embeddings": False,
        "pad_token_id": PAD,
        "eos_token_id": EOS,
        "bos_token_id": None,
        "dtype": "float32",
    }
    if config.experts:
        shape |= {
            "moe_intermediate_size": config.intermediate,
            "num_experts": config.experts,
            "num_experts_per_tok": config.experts_per_token,
            "norm_topk_prob": True,
        }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        kind = "qwen3_moe" if config.experts else "qwen3"
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **shape))  # type: ignore[no-untyped-call]
        for router in routers(model):
            # At the usual 0.02 all experts look alike, and rounding would choose among them.
            torch.nn.init.normal_(router.weight, std=config.hidden**-0.5)
    model.save_pretrained(folder)
