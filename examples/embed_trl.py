"""TRL's GRPOTrainer, whose sampling engine and weight sync are guarded by our machines.

The engine has weights of its own, as vLLM has beside TRL, and drops them while it sleeps. TRL asks
it for completions through `rollout_func`, and says through a callback when the trainer's weights
change. Three steps are trained; then the three mistakes that such a loop invites are made, and the
engine refuses to sample: asleep, with weights that never came, with those of an earlier step.

    pip install -e '.[train,examples]'
    python examples/embed_trl.py
"""

from __future__ import annotations

import os
import tempfile
from contextlib import ExitStack
from typing import Any

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # `rollout_func` may change, says TRL

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from fsm_trainer import Effect, Lifecycle, Refused, State, System, load

SYSTEM = System.of(load("disaggregated"), rollouts=1)
WORDS = ["<pad>", "<eos>", *"0123456789+="]
MODEL = Qwen2Config(
    vocab_size=len(WORDS), hidden_size=32, intermediate_size=64, num_hidden_layers=1,
    num_attention_heads=2, num_key_value_heads=1, pad_token_id=0, eos_token_id=1,
)  # fmt: skip


class Trainer(TrainerCallback):
    """The actor's machine. TRL holds model and optimizer, so there is nothing to acquire."""

    def __init__(self) -> None:
        resources = dict.fromkeys(SYSTEM.spec.system.resources, self)
        self.machine, self.update = Lifecycle(SYSTEM, "actor", resources), ExitStack()

    def acquire(self, effect: Effect) -> None: ...

    def release(self, effect: Effect) -> None: ...

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.machine.reach(State.AWAKE)

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.update.enter_context(self.machine.action("train"))

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.update.close()  # the trainer's weights have a new version


class Engine:
    """The rollout worker's machine and what it holds; an instance is a `rollout_func`."""

    def __init__(self, trainer: Trainer) -> None:
        self.actor = trainer.machine
        resources = dict.fromkeys(SYSTEM.spec.system.resources, self)
        self.machine = Lifecycle(SYSTEM, "rollout-0", resources)

    def acquire(self, effect: Effect) -> None:
        if effect.resource == "weights":
            self.model = Qwen2ForCausalLM(MODEL)  # random: torn until they are pushed

    def release(self, effect: Effect) -> None:
        if effect.resource == "weights":
            del self.model

    def wake(self) -> None:
        self.machine.reach(State.AWAKE)

    def sync(self, trained: torch.nn.Module) -> None:
        """Push; with vLLM: init_communicator, sync_weights, close_communicator."""
        for end in (self.actor, self.machine):
            end.trigger("connect")
        with self.actor.action("push"), self.machine.action("push", self.actor.world):
            self.model.load_state_dict(trained.state_dict())
        for end in (self.actor, self.machine):
            end.trigger("disconnect")

    def sleep(self) -> None:
        self.machine.reach(State.SLEEPING)

    def __call__(self, prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        self.wake()
        self.sync(trainer.model)
        with self.machine.action("generate", self.actor.world) as worker:
            asked = trainer.processing_class(
                prompts, return_tensors="pt", padding=True, return_token_type_ids=False
            )
            answered = self.model.generate(**asked, do_sample=True, max_new_tokens=4)
        self.sleep()
        print(f"{len(prompts)} completions by weights {worker.version}", flush=True)
        answers = answered[:, asked["input_ids"].shape[1] :].tolist()
        ends = [a.index(1) + 1 if 1 in a else len(a) for a in answers]
        return {
            "prompt_ids": [ids[ids != 0].tolist() for ids in asked["input_ids"]],
            "completion_ids": [a[:end] for a, end in zip(answers, ends, strict=True)],
            "logprobs": None,
        }


class NeverWakes(Engine):
    def wake(self) -> None:
        self.machine.reach(State.SLEEPING)

    def sync(self, trained: torch.nn.Module) -> None: ...


class NeverSyncs(Engine):
    def sync(self, trained: torch.nn.Module) -> None: ...


class SyncsOnce(Engine):
    def sync(self, trained: torch.nn.Module) -> None:
        if self.machine.worker.version is None:
            super().sync(trained)

    def sleep(self) -> None: ...


def train(kind: type[Engine], folder: str) -> None:
    """Three steps of TRL with an engine of that kind."""
    words = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>")
    )
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    sums = Dataset.from_list([{"prompt": f"{a}+{b}="} for a in range(10) for b in range(10)])
    trainer = Trainer()
    GRPOTrainer(
        model=Qwen2ForCausalLM(MODEL),
        processing_class=PreTrainedTokenizerFast(
            tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", padding_side="left"
        ),
        reward_funcs=lambda completions, **_: [float("7" in text) for text in completions],
        train_dataset=sums,
        args=GRPOConfig(
            folder, use_cpu=True, bf16=False, max_steps=3, num_generations=4, report_to="none",
            per_device_train_batch_size=8, save_strategy="no", logging_strategy="no",
            disable_tqdm=True,
        ),
        rollout_func=kind(trainer),
        callbacks=[trainer],
    ).train()  # fmt: skip
    print(f"trained to {trainer.machine.worker.version}", flush=True)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        train(Engine, folder)
        for kind in (NeverWakes, NeverSyncs, SyncsOnce):
            try:
                train(kind, folder)
            except Refused as refused:
                print(f"{kind.__name__}: {refused}", flush=True)


if __name__ == "__main__":
    main()
