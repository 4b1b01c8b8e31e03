"""Writes trl_ppo.json: tensors of one minibatch of TRL's PPOTrainer, and what TRL makes of them.

TRL 1.12.0 is the last line of releases with PPO, and can't be installed beside a newer one:

    pip install --no-deps --target /tmp/trl trl==1.12.0
    PYTHONPATH=/tmp/trl python tests/algorithms/make_trl_ppo.py

TRL computes all of it within one method, so its local variables are read from there.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
)
from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

WORDS = ["<pad>", "<eos>", *"0123456789+="]
SETTINGS: dict[str, Any] = {
    "kl_coef": 0.3, "gamma": 0.9, "lam": 0.8, "cliprange": 0.1, "cliprange_value": 0.05,
    "vf_coef": 0.5,
}  # fmt: skip
ROLLED_OUT = (
    "logprobs", "ref_logprobs", "values", "scores", "padding_mask", "padding_mask_p1", "advantages",
    "returns",
)  # fmt: skip
TRAINED = (
    "mb_logprobs", "mb_values", "mb_return", "mb_advantage", "new_logprobs", "vpred", "pg_loss",
    "vf_loss",
)  # fmt: skip


def record(estimator: str, folder: Path) -> dict[str, Any]:
    """The last minibatch of two batches with two epochs each."""
    found: dict[str, torch.Tensor] = {}
    whiten = ppo_trainer.masked_whiten

    def whitened(values: torch.Tensor, mask: torch.Tensor, shift_mean: bool = True) -> torch.Tensor:
        local = sys._getframe(1).f_locals
        found.update({name: local[name].detach().clone() for name in ROLLED_OUT})
        result = whiten(values, mask, shift_mean)
        found["whitened"] = torch.masked_fill(result, local["padding_mask"], 0).clone()
        return result

    def backward(loss: torch.Tensor) -> None:
        local = sys._getframe(1).f_locals
        found.update({name: local[name].detach().clone() for name in TRAINED})
        found["rows"] = torch.as_tensor(local["micro_batch_inds"])
        moved = [local["new_logprobs"], local["vpred"]]
        gradients = torch.autograd.grad(loss, moved, retain_graph=True)
        found["new_logprobs_gradient"], found["vpred_gradient"] = gradients
        loss.backward()

    ppo_trainer.masked_whiten = whitened
    trainer = made(estimator, folder)
    trainer.accelerator.backward = backward
    trainer.train()
    ppo_trainer.masked_whiten = whiten
    return {name: listed(value) for name, value in found.items()}


def made(estimator: str, folder: Path) -> PPOTrainer:
    """A trainer of models of a few thousand parameters, in float64."""
    torch.manual_seed(0)
    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )
    shape = Qwen2Config(
        vocab_size=len(WORDS), hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, pad_token_id=0, eos_token_id=1, num_labels=1,
    )  # fmt: skip
    policy, reference = (Qwen2ForCausalLM(shape).double() for _ in "ab")
    reward, value = (Qwen2ForSequenceClassification(shape).double() for _ in "ab")
    sums = [{"input_ids": tokenizer(f"{a}+{b}=")["input_ids"]} for a in "1234" for b in "5678"]
    settings = PPOConfig(
        str(folder), use_cpu=True, bf16=False, per_device_train_batch_size=8,
        gradient_accumulation_steps=1, num_mini_batches=1, num_ppo_epochs=2, total_episodes=16,
        response_length=6, stop_token="eos", learning_rate=0.03, report_to="none",
        num_sample_generations=0, save_strategy="no", gradient_checkpointing=False,
        kl_estimator=estimator, **SETTINGS,
    )  # fmt: skip
    return PPOTrainer(
        args=settings, processing_class=tokenizer, model=policy, ref_model=reference,
        reward_model=reward, value_model=value, train_dataset=Dataset.from_list(sums),
        eval_dataset=Dataset.from_list(sums),
    )  # fmt: skip


def listed(value: torch.Tensor) -> Any:
    """Nested lists; nine digits are a hundred times finer than what is compared."""
    return json.loads(
        json.dumps(value.double().tolist()), parse_float=lambda x: float(f"{float(x):.9g}")
    )


def main() -> None:
    """Write the file beside this one."""
    versions = {m.__name__: m.__version__ for m in (trl, transformers, torch)}
    with tempfile.TemporaryDirectory() as folder:
        cases = {name: record(name, Path(folder)) for name in ("k1", "k3")}
    told = {"versions": versions, "settings": SETTINGS, **cases}
    Path(__file__).with_name("trl_ppo.json").write_text(json.dumps(told) + "\n")


if __name__ == "__main__":
    main()
