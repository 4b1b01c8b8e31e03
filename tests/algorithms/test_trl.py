"""Our update and TRL's own, on the same tensors: GRPO and RLOO of the installed TRL.

TRL trains a tiny model for two steps on each of two batches; of the last step, where neither the
ratios are 1 nor the reference is the policy, its tensors, its loss and the loss's gradient are
kept. Ours are computed from the same tensors, rewards included: advantages, KL, clip and mean have
to agree. Where TRL defines something else, docs/algorithms.md names it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig as TheirGRPO
from trl import GRPOTrainer, RLOOTrainer
from trl import RLOOConfig as TheirRLOO
from trl.trainer import grpo_trainer, rloo_trainer

from fsm_trainer.algorithms.config import (
    CorrectionConfig,
    GRPOConfig,
    PolicyConfig,
    RLOOConfig,
)
from fsm_trainer.training.batch import Batch
from fsm_trainer.training.port import Scores, Traits
from fsm_trainer.training.ppo import actor_update

WORDS = ["<pad>", "<eos>", *"0123456789+="]
COPIES, LONGEST = 4, 6


@dataclass
class Recorded:
    """One step of TRL, ``[batch, time]`` or ``[batch]``; time is the completion's."""

    inputs: Mapping[str, Any]
    old: torch.Tensor
    reference: torch.Tensor
    logprobs: torch.Tensor
    entropy: torch.Tensor
    loss: torch.Tensor
    gradient: torch.Tensor
    """Of the loss, by ``logprobs``."""


def reward_of(tokens: Sequence[int]) -> float:
    return (sum(tokens) % 11) / 10


def recorded(kind: type[Any], folder: Path, settings: Any, sampled: bool = False) -> Recorded:
    """The last step of TRL; ``sampled``: as if another engine had sampled, a little beside."""
    found: list[Recorded] = []

    class Recording(kind):  # type: ignore[misc]
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            self.before = []  # the old policy's, then the reference's
            return super()._generate_and_score_completions(inputs)

        def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
            seen = super()._get_per_token_logps_and_entropies(*args, **kwargs)
            if torch.is_grad_enabled():
                self.now = seen
            else:
                self.before.append(seen[0])
            return seen

        def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
            old, reference = self.before
            if sampled:
                noise = torch.randn(old.shape, generator=rng(), dtype=old.dtype)
                inputs["engine"] = old + 0.4 * noise
                weights = (old - inputs["engine"]).exp()
                inputs["importance_sampling_ratio"] = weights.clamp(max=1.2)
                self.use_vllm = True
            loss = super()._compute_loss(model, inputs)
            self.use_vllm = False
            logprobs, entropy, _ = self.now
            (gradient,) = torch.autograd.grad(loss, logprobs, retain_graph=True)
            kept = (x.detach().clone() for x in (old, reference, logprobs, entropy, loss, gradient))
            found.append(Recorded(dict(inputs), *kept))
            return loss

    torch.manual_seed(0)
    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(WORDS), hidden_size=16, intermediate_size=16, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=2, pad_token_id=0, eos_token_id=1,
        )
    )  # fmt: skip
    model.double().save_pretrained(folder / "model")  # the reference is read from there
    Recording(
        model=str(folder / "model"),
        processing_class=PreTrainedTokenizerFast(
            tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", padding_side="left"
        ),
        reward_funcs=lambda completion_ids, **_: [reward_of(ids) for ids in completion_ids],
        train_dataset=Dataset.from_list([{"prompt": f"{a}+{b}="} for a in "12" for b in "34"]),
        args=settings,
    ).train()
    return found[-1]


def rng() -> torch.Generator:
    return torch.Generator().manual_seed(3)


SHARED: dict[str, Any] = {
    "use_cpu": True, "bf16": False, "max_steps": 4, "num_iterations": 2, "num_generations": COPIES,
    "per_device_train_batch_size": 4 * COPIES, "report_to": "none", "save_strategy": "no",
    "logging_strategy": "no", "disable_tqdm": True, "max_completion_length": LONGEST,
    "learning_rate": 0.05, "beta": 0.3, "model_init_kwargs": {"dtype": "auto"},
}  # fmt: skip


class Replayed:
    """A model port that gives TRL's log-probabilities back, and keeps loss and gradient."""

    rank, world_size, micro_batch, micro_batch_tokens, packing = 0, 1, 64, None, False
    device = torch.device("cpu")
    traits = Traits(torch.float32, layers=1)

    def __init__(self, one: Recorded) -> None:
        self.old, self.reference, self.entropy = one.old, one.reference, one.entropy
        self.leaf = one.logprobs.clone().requires_grad_()

    def logprobs(
        self, batch: Batch, temperature: float, *, bank: str = "live", with_entropy: bool = False
    ) -> Scores:
        rows = batch.tokens[:, 0]  # where a prompt would stand, the row's number does
        live = self.leaf if torch.is_grad_enabled() else self.old
        table = self.reference if bank == "reference" else live
        shape = (1, 0)
        wide = torch.nn.functional.pad(table[rows], shape)[:, : batch.tokens.shape[1]]
        spread = torch.nn.functional.pad(self.entropy[rows], shape)[:, : batch.tokens.shape[1]]
        return Scores(wide, spread if with_entropy else None)

    def backward(self, loss: torch.Tensor, last: bool) -> None:
        self.loss = loss.detach()
        (self.gradient,) = torch.autograd.grad(loss, self.leaf)

    def step(self) -> dict[str, float]:
        return {"grad_norm": 0.0, "learning_rate": 0.0}

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


def ours(one: Recorded, config: PolicyConfig) -> Replayed:
    """Our update on what TRL saw; the advantages are ours too."""
    ids, mask = one.inputs["completion_ids"], one.inputs["completion_mask"]
    count, time = ids.shape
    engine = one.inputs.get("engine", torch.zeros_like(one.logprobs))
    left = lambda x: torch.nn.functional.pad(x, (1, 0))  # noqa: E731
    batch = Batch(
        tokens=torch.cat([torch.arange(count)[:, None], ids], dim=1),
        attention_mask=torch.cat([torch.ones(count, 1, dtype=torch.int64), mask], dim=1),
        loss_mask=left(mask).float(),
        engine_logprobs=left(engine).float(),
        rewards=torch.tensor(
            [reward_of(row[on != 0].tolist()) for row, on in zip(ids, mask, strict=True)]
        ),
        truncated=torch.zeros(count),
        groups=tuple(str(row.tolist()) for row in one.inputs["prompt_ids"]),
        ids=tuple(map(str, range(count))),
    )
    assert len(set(batch.groups)) == 4 and 0 < int(mask.sum()) < count * time
    model = Replayed(one)
    actor_update(model, batch, None, config, rng())  # type: ignore[arg-type]
    return model


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": (
        {"loss_type": "grpo", "epsilon": 0.2},
        {"aggregation": "sequence"},
    ),
    "bnpo, clip-higher, two-sided clip": (
        {"loss_type": "bnpo", "epsilon": 0.1, "epsilon_high": 0.15, "delta": 1.3},
        {"aggregation": "token", "clip": 0.1, "clip_high": 0.15, "dual_clip": 1.3},
    ),
    "dr_grpo": (
        {"loss_type": "dr_grpo", "scale_rewards": "none"},
        {"aggregation": "constant", "aggregation_length": LONGEST, "normalize_std": False},
    ),
    "gspo": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.1},
        {"aggregation": "sequence", "ratio": "geometric", "clip": 0.1},
    ),
    "dapo, entropy bonus": (
        {"loss_type": "dapo", "entropy_coef": 0.1},
        {"aggregation": "token", "entropy_coefficient": 0.1},
    ),
    "truncated importance sampling": (
        {"loss_type": "bnpo"},
        {"aggregation": "token", "engine_correction": CorrectionConfig(high=1.2)},
    ),
}


@pytest.fixture(autouse=True)
def in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL shuffles a batch between generation and loss; here rows keep their places."""
    for module in (grpo_trainer, rloo_trainer):
        monkeypatch.setattr(module, "shuffle_sequence_dict", lambda batch: batch)


def agree(mine: Replayed, theirs: Recorded) -> None:
    assert theirs.gradient.abs().max() > 1e-3
    for ours, one in ((mine.loss, theirs.loss), (mine.gradient, theirs.gradient)):
        torch.testing.assert_close(ours.double(), one.double(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_grpo_is_trls(name: str, tmp_path: Path) -> None:
    theirs, mine = CASES[name]
    settings = TheirGRPO(str(tmp_path), use_bias_correction_kl=False, **SHARED, **theirs)
    one = recorded(GRPOTrainer, tmp_path, settings, sampled="engine_correction" in mine)

    found = ours(one, GRPOConfig(minibatches=1, kl_coefficient=0.3, **mine))

    agree(found, one)


def test_rloo_is_trls(tmp_path: Path) -> None:
    one = recorded(RLOOTrainer, tmp_path, TheirRLOO(str(tmp_path), epsilon=0.4, **SHARED))
    assert (one.old - one.reference).abs().max() > 0.1, "the KL in the reward must count"

    found = ours(one, RLOOConfig(minibatches=1, kl_coefficient=0.3, clip=0.4))

    agree(found, one)
