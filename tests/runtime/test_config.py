"""A user's mistake exits with 2, says field, value, file:line and remedy, and starts nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from fsm_trainer.algorithms.config import PPOConfig
from fsm_trainer.cli.main import app
from fsm_trainer.data.models import parameters
from fsm_trainer.machine.errors import ConfigError
from fsm_trainer.machine.names import Role
from fsm_trainer.runtime.config import load_config
from fsm_trainer.training.config import TrainerConfig

GOOD = """\
seed: 0
steps: 4
model:
  tiny: {hidden: 64, layers: 2, heads: 4, kv_heads: 2}
algorithm:
  name: ppo
  minibatches: 2
actor:
  learning_rate: 0.001
critic:
  learning_rate: 0.001
rollout:
  workers: 2
  prompts: 8
data:
  train:
    kind: jsonl
    path: train.jsonl
reward:
  function: good_hooks:score
"""
HOOKS = """\
def score(trajectory): return 1.0
async def generate(context, sample): ...
raise RuntimeError("a check must not import this")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which GOOD is good; to launch anything there fails the test."""
    line = json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n"
    (tmp_path / "train.jsonl").write_text(line * 3)
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "broken.jsonl").write_text('{"prompt": \n')
    (tmp_path / "asks.jsonl").write_text('{"prompt": "1+1="}\n')
    (tmp_path / "good_hooks.py").write_text(HOOKS)
    (tmp_path / "bad_hooks.py").write_text("def score(:\n")
    (tmp_path / "loose" / "inner").mkdir(parents=True)
    (tmp_path / "no_model").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)

    def launched(*_: object, **__: object) -> None:
        pytest.fail("a run was launched")

    monkeypatch.setattr("fsm_trainer.runtime.launch.launch", launched)
    return tmp_path


def run(folder: Path, text: str, *options: str) -> Result:
    (folder / "run.yaml").write_text(text)
    return CliRunner().invoke(app, ["run", "run.yaml", "--out", "out", *options])


@dataclass(frozen=True)
class Mistake:
    """One edit of GOOD; the line with # HERE is the one that the error must name."""

    old: str
    new: str
    field: str
    given: str
    remedy: str


MISTAKES = {
    "no such way of the weights": Mistake(
        "seed: 0", "link: {kind: pigeon} # HERE", "link.kind", "'pigeon'", "'ipc' or 'disk'"
    ),
    "memory over several machines": Mistake(
        "seed: 0", "cluster: {address: auto}\nlink: {kind: ipc} # HERE", "link.kind", "'ipc'",
        "Write group or disk",
    ),
    "a folder without files": Mistake(
        "seed: 0", "link: {folder: no_model} # HERE", "link.folder", "no_model'", "kind: disk"
    ),
    "no folder for the files": Mistake(
        "seed: 0", "link: {kind: disk, folder: nowhere} # HERE", "link.folder", "nowhere'",
        "Paths in the file",
    ),
    "unknown key": Mistake(
        "seed: 0", "sed: 0 # HERE", "sed", "0", "Did you mean seed?"
    ),
    "unknown key inside": Mistake(
        "workers: 2", "wrokers: 2 # HERE", "rollout.wrokers", "2", "Did you mean workers?"
    ),
    "unknown key inside a choice": Mistake(
        "minibatches: 2", "minibatch: 2 # HERE", "algorithm.minibatch", "2", "minibatches"
    ),
    "unknown key, nothing near": Mistake(
        "workers: 2", "zzz: 2 # HERE", "rollout.zzz", "2", "Known are: copies, engine,"
    ),
    "a key of the other algorithm": Mistake(
        "minibatches: 2", "normalize_std: true # HERE", "algorithm.normalize_std", "True",
        "minibatches, name, ratio, temperature,",
    ),
    "not a whole number": Mistake("steps: 4", "steps: few # HERE", "steps", "'few'", "whole"),
    "half a step": Mistake("steps: 4", "steps: 4.5 # HERE", "steps", "4.5", "whole number"),
    "yes is no number": Mistake("steps: 4", "steps: yes # HERE", "steps", "True", "number"),
    "not a number": Mistake(
        "learning_rate: 0.001\nc", "learning_rate: fast # HERE\nc", "actor.learning_rate", "'fast'",
        "a number",
    ),
    "infinite": Mistake(
        "learning_rate: 0.001\nc", "learning_rate: .inf # HERE\nc", "actor.learning_rate", "inf",
        "ordinary number",
    ),
    "not a switch": Mistake(
        "minibatches: 2", "whiten_advantages: sure # HERE", "algorithm.whiten_advantages", "'sure'",
        "true or false",
    ),
    "not a text": Mistake(
        "path: train.jsonl", "path: [train.jsonl] # HERE", "data.train.path", "['train.jsonl']",
        "Write a text",
    ),
    "a value for a group": Mistake(
        "rollout:\n  workers: 2\n  prompts: 8", "rollout: 2 # HERE", "rollout", "2", "below it"
    ),
    "an empty group": Mistake(
        "rollout:\n  workers: 2\n  prompts: 8", "rollout: # HERE", "rollout", "None", "below it"
    ),
    "too small": Mistake("workers: 2", "workers: 0 # HERE", "rollout.workers", "0", "at least 1"),
    "not above": Mistake(
        "minibatches: 2", "clip: 0.0 # HERE", "algorithm.clip", "0.0", "more than 0"
    ),
    "not below": Mistake("minibatches: 2", "clip: 1 # HERE", "algorithm.clip", "1", "less than 1"),
    "too large": Mistake("minibatches: 2", "gamma: 1.5 # HERE", "algorithm.gamma", "1.5", "most 1"),
    "not a choice": Mistake(
        "minibatches: 2", "kl_estimator: k4 # HERE", "algorithm.kl_estimator", "'k4'", "'k1', 'k2'"
    ),
    "no such algorithm": Mistake(
        "name: ppo", "name: pppo # HERE", "algorithm.name", "'pppo'", "'ppo', 'grpo'"
    ),
    "no such kind of data": Mistake(
        "kind: jsonl", "kind: csv # HERE", "data.train.kind", "'csv'", "'jsonl'"
    ),
    "kind is missing": Mistake(
        "  train:\n    kind: jsonl", "  train: # HERE", "data.train.kind", "", "Add it"
    ),
    "key is missing": Mistake("steps: 4\n", "# HERE\n", "steps", "", "Add it"),
    "key is missing inside": Mistake(
        "  train:\n    kind: jsonl\n    path: train.jsonl",
        "  train: # HERE\n    kind: jsonl", "data.train.path", "", "Add it",
    ),
    "key is doubled": Mistake("steps: 4", "steps: 4\nsteps: 5 # HERE", "steps", "line 2", "Remove"),
    "not YAML": Mistake("workers: 2", "workers: [2\n  x: 1 # HERE", "", "", "brackets"),
    "two models": Mistake(
        "model:\n  tiny", "model: # HERE\n  path: no_model\n  tiny", "model", "'path', 'tiny'",
        "exactly one",
    ),
    "no model folder": Mistake(
        "tiny: {hidden: 64, layers: 2, heads: 4, kv_heads: 2}", "path: nowhere # HERE",
        "model.path", "nowhere", "relative to it",
    ),
    "no model in the folder": Mistake(
        "tiny: {hidden: 64, layers: 2, heads: 4, kv_heads: 2}", "path: no_model # HERE",
        "model.path", "no_model", "Hugging Face",
    ),
    "no model package": Mistake(
        "tiny: {hidden: 64, layers: 2, heads: 4, kv_heads: 2}", "package: fsm-no-such # HERE",
        "model.package", "fsm-no-such", "pip install",
    ),
    "no such schedule": Mistake(
        "seed: 0", "schedule: disagregated # HERE", "schedule", "'disagregated'",
        "Did you mean disaggregated?",
    ),
    "schedule without the critic": Mistake(
        "seed: 0\nsteps: 4\nmodel:", "schedule: disaggregated\nsteps: 4\nmodel:", "algorithm.name",
        "'ppo'", "grpo",
    ),
    "offload contradicts": Mistake(
        "seed: 0", "train_offload: false # HERE", "train_offload", "False", "Remove the line"
    ),
    "critic ranks contradict": Mistake(
        "critic:\n", "critic:\n  ranks: 2 # HERE\n", "critic.ranks", "2", "the same value"
    ),
    "more minibatches than trajectories": Mistake(
        "minibatches: 2", "minibatches: 9 # HERE", "algorithm.minibatches", "9", "At most 8"
    ),
    "more workers than trajectories": Mistake(
        "workers: 2", "workers: 9 # HERE", "rollout.workers", "9", "At most 8"
    ),
    "dtypes differ": Mistake(
        "workers: 2", "engine: {dtype: bfloat16} # HERE", "rollout.engine.dtype", "'bfloat16'",
        "the same value",
    ),
    "only the critic trains": Mistake(
        "minibatches: 2", "critic_warmup_steps: 4 # HERE", "algorithm.critic_warmup_steps", "4",
        "more steps",
    ),
    "an engine too small": Mistake(
        "workers: 2", "max_new_tokens: 70000 # HERE", "rollout.max_new_tokens", "70000", "Fewer"
    ),
    "nothing to evaluate on": Mistake(
        "data:\n", "evaluation: {every: 5} # HERE\ndata:\n  heldout_fraction: 0\n",
        "evaluation.every", "5", "data.evaluation",
    ),
    "too few devices": Mistake(
        "seed: 0", "cluster: {gpus: 2} # HERE", "cluster.gpus", "2", "More devices"
    ),
    "no devices here": Mistake(
        "seed: 0", "cluster: {gpus: 64} # HERE", "cluster.gpus", "64", "0 for the CPU"
    ),
    "a device for nobody": Mistake(
        "workers: 2", "engine: {device: cuda} # HERE", "rollout.engine.device", "'cuda'", "cpu"
    ),
    "an engine that isn't installed": Mistake(
        "workers: 2", "engine: {kind: sglang} # HERE", "rollout.engine.kind", "'sglang'",
        "write embedded",
    ),
    "an argument of SGLang that is ours": Mistake(
        "workers: 2", "engine: {kind: sglang, arguments: {port: 1}} # HERE",
        "rollout.engine.arguments", "port", "Use the field",
    ),
    "routes of a dense model": Mistake(
        "workers: 2", "engine:\n    routing_replay: true # HERE", "rollout.engine.routing_replay",
        "True", "a mixture of experts",
    ),
    "fewer experts than a token has": Mistake(
        "tiny: {hidden: 64", "tiny: # HERE\n   {experts: 1, hidden: 64", "model.tiny", "experts",
        "at least",
    ),
    "an engine that shares what it spans": Mistake(
        "rollout:\n", "cluster: {share_devices: true}\nrollout:\n"
        "  engine: {kind: sglang, tensor_parallel: 2} # HERE\n",
        "rollout.engine.tensor_parallel", "2", "share_devices",
    ),
    "not module:function": Mistake(
        "good_hooks:score", "good_hooks.score # HERE", "reward.function", "'good_hooks.score'",
        "module:function",
    ),
    "no reward module": Mistake(
        "good_hooks:score", "no_hooks:score # HERE", "reward.function", "'no_hooks:score'",
        "PYTHONPATH",
    ),
    "no reward module in a folder": Mistake(
        "good_hooks:score", "loose.inner.no_hooks:score # HERE", "reward.function",
        "'loose.inner.no_hooks:score'", "PYTHONPATH",
    ),
    "no reward function": Mistake(
        "good_hooks:score", "good_hooks:scores # HERE", "reward.function", "'good_hooks:scores'",
        "Did you mean score?",
    ),
    "no Python": Mistake(
        "good_hooks:score", "bad_hooks:score # HERE", "reward.function", "bad_hooks.py:1",
        "Correct the module",
    ),
    "no generate hook": Mistake(
        "workers: 2", "generate: good_hooks:generat # HERE", "rollout.generate", "good_hooks:gen",
        "Did you mean generate?",
    ),
    "a generate hook that can't wait": Mistake(
        "workers: 2", "generate: good_hooks:score # HERE", "rollout.generate", "good_hooks:score",
        "async def",
    ),
    "no data file": Mistake(
        "path: train.jsonl", "path: tain.jsonl # HERE", "data.train.path", "tain.jsonl", "relative"
    ),
    "an empty data file": Mistake(
        "path: train.jsonl", "path: empty.jsonl # HERE", "data.train.path", "empty.jsonl", "Fill it"
    ),
    "a broken data file": Mistake(
        "path: train.jsonl", "path: broken.jsonl # HERE", "data.train.path", "broken.jsonl:1",
        "one JSON object",
    ),
    "answers for the warm-up": Mistake(
        "path: train.jsonl", "path: asks.jsonl\nwarmup: {steps: 3} # HERE", "warmup.steps", "3",
        "Add an answer",
    ),
    "no such task": Mistake(
        "kind: jsonl\n    path: train.jsonl", "kind: reasoning_gym\n    task: chain_summ # HERE",
        "data.train.task", "'chain_summ'", "Correct task",
    ),
    "a name that is taken": Mistake(
        "data:\n", "data: # HERE\n  evaluation: {heldout: {kind: jsonl, path: train.jsonl}}\n",
        "data", "evaluation.heldout", "Rename",
    ),
}  # fmt: skip


def test_the_unedited_configuration_is_good(folder: Path) -> None:
    (folder / "run.yaml").write_text(GOOD)
    run = load_config(folder / "run.yaml")
    assert run.spec.name == "disaggregated_critic"
    assert run.notes == (
        "schedule: disaggregated_critic (algorithm: ppo)",
        "critic ⇒ train offload: on (target: disk)",
    )


def test_the_kl_in_the_reward_chooses_the_schedule_in_which_the_actor_scores(folder: Path) -> None:
    (folder / "run.yaml").write_text(GOOD)

    run = load_config(folder / "run.yaml", ["algorithm.kl_in=reward"])

    assert run.spec.name == "disaggregated_critic_score"


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (["algorithm.kl_in=reward", "schedule=disaggregated_critic"], "nobody scores before"),
        (["schedule=disaggregated_critic_score"], "the actor scores before the critic"),
        (["rollout.filter_rounds=2"], r"rollout\.filter_rounds: algorithm ppo learns from .* too"),
        (["algorithm={name: rloo}"], r"rollout\.copies: RLOO compares .*copies: 8"),
    ],
)
def test_settings_that_contradict_are_refused(folder: Path, settings: list[str], why: str) -> None:
    without = GOOD.replace("critic:\n  learning_rate: 0.001\n", "")
    (folder / "run.yaml").write_text(without)

    with pytest.raises(ConfigError, match=why):
        load_config(folder / "run.yaml", settings)


ELSEWHERE = ["cluster.gpus=3", "cluster.address=there:6379", "rollout.engine.device=cuda"]
"""Devices that this machine lacks."""


@pytest.mark.parametrize(
    ("overrides", "target"),
    [
        ([], "disk"),
        (ELSEWHERE, "host"),
        ([*ELSEWHERE, "actor.offload.target=disk"], "disk, host"),
        ([*ELSEWHERE, *(f"{r}.offload.target=disk" for r in ("actor", "critic"))], "disk"),
    ],
)
def test_the_bytes_of_a_sleeper_go_where_its_device_is_fast(
    folder: Path, overrides: list[str], target: str
) -> None:
    (folder / "run.yaml").write_text(GOOD)
    run = load_config(folder / "run.yaml", overrides)
    assert f"critic ⇒ train offload: on (target: {target})" in run.notes


APART = "schedule=disaggregated_critic_apart"


def test_a_critic_apart_has_ranks_of_its_own_and_no_trainer_sleeps(folder: Path) -> None:
    (folder / "run.yaml").write_text(GOOD)
    run = load_config(folder / "run.yaml", [APART, "actor.ranks=2", "critic.ranks=1"])
    assert "critic ⇒ train offload: off" in run.notes
    with pytest.raises(ConfigError, match="in which the trainers sleep in no step"):
        load_config(folder / "run.yaml", [APART, "train_offload=true"])


def test_a_critic_apart_needs_devices_of_its_own(folder: Path) -> None:
    (folder / "run.yaml").write_text(GOOD)
    there = [text for text in ELSEWHERE if "gpus" not in text]
    there += [APART, "rollout.workers=2", "actor.ranks=2", "critic.ranks=3", "cluster.gpus=6"]
    with pytest.raises(ConfigError, match=r"5 trainer ranks and 2 engine processes need 7"):
        load_config(folder / "run.yaml", there)


def test_values_have_no_way_without_rollout_workers(folder: Path) -> None:
    said = run(folder, GOOD, "--set", APART, "--train-only", str(folder)).stderr
    assert "--train-only: disaggregated_critic_apart sends values over a link that opens" in said
    assert "--set schedule=disaggregated_critic" in said


def huge_model(folder: Path) -> None:
    """A model folder whose file says that it has 10^12 numbers; the head is all of it."""
    folder.mkdir()
    for name in ("config.json", "tokenizer_config.json"):
        (folder / name).write_text("{}")
    head = json.dumps({"weight": {"shape": [10**6, 10**6]}, "__metadata__": {}}).encode()
    (folder / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head)


def test_sleepers_that_cannot_fit_into_host_memory_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    huge_model(folder / "huge")
    model = ["--set", "model={path: huge}"]
    to_host = [f"{role}.offload.target=host" for role in ("actor", "critic")]

    said = run(folder, GOOD, *model, "--set", to_host[0], "--set", to_host[1]).stderr

    # Actor: weights, reference and two moments of 4 bytes a number; critic: without a reference.
    assert f"need {(16 + 12) * 10**12:,} bytes of host memory" in said
    assert "actor.offload.target" in said
    limit = folder / "memory.max"
    limit.write_text("4096\n")
    monkeypatch.setattr("fsm_trainer.runtime.checks.CONTAINER", limit)
    assert "there are 4,096" in run(folder, GOOD, *model, "--set", to_host[0]).stderr
    elsewhere = run(folder, GOOD, *model, "--set", "actor.offload.target=disk", "--set", to_host[1])
    assert "critic.offload.target" in elsewhere.stderr and "actor.off" not in elsewhere.stderr
    (folder / "run.yaml").write_text(GOOD)
    load_config(folder / "run.yaml", model[1::2])  # to disk


def test_weights_that_are_no_safetensors_are_a_mistake_not_a_crash(folder: Path) -> None:
    huge_model(folder / "huge")
    (folder / "huge" / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1")

    result = run(folder, GOOD, "--set", "model={path: huge}", "--set", "actor.offload.target=host")

    assert result.exit_code == 2
    assert "model.safetensors is not safetensors" in result.stderr


def test_routes_of_a_dense_model_in_a_folder_are_a_mistake(folder: Path) -> None:
    huge_model(folder / "dense")
    (folder / "dense" / "config.json").write_text('{"model_type": "llama"}')
    text = GOOD.replace("workers: 2", "engine: {routing_replay: true}")

    said = run(folder, text, "--set", "model={path: dense}").stderr

    assert said.startswith("run.yaml:13: rollout.engine.routing_replay: ")
    assert "is a llama model: routes are replayed for qwen3_moe (given: True)" in said


def test_weights_in_two_forms_are_counted_once(folder: Path) -> None:
    huge_model(folder / "huge")
    content = (folder / "huge" / "model.safetensors").read_bytes()
    (folder / "huge" / "consolidated.safetensors").write_bytes(content)

    assert parameters(folder / "huge") == 10**12


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        (["actor.offload.target=memory_saver"], "needs a GPU, and cluster.gpus is 0"),
        (
            [*ELSEWHERE, "actor.offload.target=offload_states", "actor.zero_stage=3"],
            "DeepSpeed has it for ZeRO 1 and 2, not for zero_stage: 3",
        ),
        (
            [*ELSEWHERE, "actor.offload.target=memory_saver", "schedule=colocated_critic"],
            "moves the optimizer with the weights, which stay while weights are pushed",
        ),
    ],
)
def test_ways_to_sleep_are_refused_where_they_do_not_work(
    folder: Path, sets: list[str], said: str
) -> None:
    result = run(folder, GOOD, *(part for text in sets for part in ("--set", text)))

    assert result.exit_code == 2
    assert f"actor.offload.target: {said}" in result.stderr


def test_a_bank_shards_what_its_zero_stage_shards() -> None:
    def bank(stage: int) -> int:
        return TrainerConfig(zero_stage=stage, dtype="bfloat16").bank_bytes(100, 2, 2)  # type: ignore[arg-type]

    # Two sets of weights in 2 bytes; masters and two moments in 4, of which a rank has half.
    assert [bank(stage) for stage in range(4)] == [1600, 1000, 1000, 800]


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_names_field_value_line_and_remedy(folder: Path, name: str) -> None:
    mistake = MISTAKES[name]
    text = GOOD.replace(mistake.old, mistake.new, 1)
    assert text != GOOD
    marked = [n for n, line in enumerate(text.splitlines(), start=1) if "# HERE" in line]
    if not marked:  # the line stands in GOOD: the value is what the other one contradicts
        marked = [n for n, line in enumerate(text.splitlines(), start=1) if "name: ppo" in line]
    if name == "key is missing":
        marked = [1]

    result = run(folder, text)

    assert result.exit_code == 2, result.output
    (said,) = result.stderr.splitlines()
    assert said.startswith(f"run.yaml:{marked[0]}: ")
    for part in (mistake.field, mistake.given, mistake.remedy):
        assert part in said
    assert not (folder / "out").exists()


SETTINGS = {
    "no value": (["steps"], "--set steps", "key.path=value"),
    "unknown key": (["stepz=3"], "--set stepz=3", "Did you mean steps?"),
    "out of range": (["rollout.workers=0"], "--set rollout.workers=0", "at least 1"),
    "below a value": (["steps.more=3"], "--set steps.more=3", "Set steps itself"),
    "not YAML": (["steps=[1"], "--set steps=[1", "Close brackets"),
    "wrong choice": (["algorithm.name=ddpg"], "--set algorithm.name=ddpg", "'ppo', 'grpo'"),
    "contradiction": (["rollout.workers=9"], "--set rollout.workers=9", "At most 8"),
    "the last one counts": (["steps=2", "steps=-1"], "--set steps=-1", "at least 0"),
    "the group counts": (
        ["rollout.workers=2", "rollout={workers: 0}"], "--set rollout={workers: 0}", "at least 1"
    ),
    "the last one counts, whatever its depth": (
        ["rollout.workers=0", "rollout={workers: 1}", "rollout.workers=-1"],
        "--set rollout.workers=-1", "at least 1",
    ),
    "a new group": (["link.timeot=3"], "--set link.timeot=3", "Did you mean timeout?"),
}  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
def test_a_mistake_of_set_names_the_option(folder: Path, name: str) -> None:
    settings, origin, remedy = SETTINGS[name]
    result = run(folder, GOOD, *(part for text in settings for part in ("--set", text)))
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith(f"{origin}: ")
    assert remedy in result.stderr


def test_grpo_with_one_copy_and_a_critic_of_no_use(folder: Path) -> None:
    text = GOOD.replace("name: ppo", "name: grpo")
    assert "run.yaml:10: critic: schedule disaggregated has no critic" in run(folder, text).stderr
    without = text.replace("critic:\n  learning_rate: 0.001\n", "")
    result = run(folder, without)
    assert result.exit_code == 2
    assert "rollout.copies: GRPO compares" in result.stderr
    assert "(given: 1). Set rollout.copies: 8" in result.stderr


def test_all_mistakes_of_a_kind_are_told_at_once(folder: Path) -> None:
    text = GOOD.replace("seed: 0", "sed: 0").replace("workers: 2", "workers: 0")
    lines = run(folder, text).stderr.splitlines()
    assert [line.partition(" ")[0] for line in lines] == ["run.yaml:13:", "run.yaml:1:"]


FILES = {
    "missing": ("nowhere.yaml", "nowhere.yaml:1: the file is missing"),
    "a folder": ("no_model", "no_model:1: can't be read: Is a directory"),
    "not UTF-8": ("latin.yaml", "latin.yaml:1: not UTF-8"),
    "binary": ("binary.yaml", "binary.yaml:1: not YAML"),
    "a list": ("list.yaml", "list.yaml:1: the file is not a mapping"),
    "a mapping as key": ("key.yaml", "key.yaml:2: a key is a mapping or a list"),
    "a date that isn't": ("date.yaml", "date.yaml:1: '2024-13-45' is no timestamp"),
    "a Python object": ("object.yaml", "object.yaml:1: not YAML: could not determine"),
    "itself": ("loop.yaml", "loop.yaml:1: an anchor stands inside itself"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_no_configuration(folder: Path, name: str) -> None:
    (folder / "latin.yaml").write_bytes("schedule: ä".encode("latin-1"))
    (folder / "binary.yaml").write_bytes(b"steps: \x00")
    (folder / "list.yaml").write_text("- steps: 1\n")
    (folder / "key.yaml").write_text("steps: 1\n? {a: 1}\n: 2\n")
    (folder / "date.yaml").write_text("seed: 2024-13-45\n")
    (folder / "object.yaml").write_text("seed: !!python/name:os.system\n")
    (folder / "loop.yaml").write_text("model: &a {tiny: *a}\n")
    path, message = FILES[name]
    result = CliRunner().invoke(app, ["run", path])
    assert result.exit_code == 2, result.output
    assert message in result.stderr


FOLDERS = {
    "taken by a file": (["--out", "train.jsonl"], "--out train.jsonl: "),
    "resume of nothing": (["--resume", "no_model"], "--resume no_model: there is no config.yaml"),
    "resume elsewhere": (["--resume", "x", "--out", "y"], "--out y: a resumed run stays"),
    "no tables": (["--states", "no_model"], "--states no_model: there is no system.yaml"),
    "no configuration": ([], "CONFIG: no file is given"),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_wrong_folder(folder: Path, name: str) -> None:
    (folder / "run.yaml").write_text(GOOD)
    options, message = FOLDERS[name]
    config = ["run.yaml"] if "--out" in options[:1] or "--states" in options else []
    result = CliRunner().invoke(app, ["run", *config, *options])
    assert result.exit_code == 2, result.output
    assert message in result.stderr


def test_a_folder_with_a_run_is_not_written_and_one_without_checkpoints_not_resumed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # the real launch refuses both before it starts anything
    monkeypatch.syspath_prepend(folder)
    monkeypatch.chdir(folder)
    (folder / "out").mkdir()
    (folder / "out" / "journal.jsonl").write_text("")
    (folder / "out" / "config.yaml").write_text(GOOD.replace("path: train", "path: ../train"))
    taken = run(folder, GOOD)
    resumed = CliRunner().invoke(app, ["run", "--resume", "out", "--rollout-only"])
    assert (taken.exit_code, resumed.exit_code) == (2, 2)
    assert "a run stands there already" in taken.stderr
    assert "a run that only generates has no checkpoints" in resumed.stderr


def test_nothing_heavy_is_imported_and_no_process_started_for_a_mistake(folder: Path) -> None:
    (folder / "run.yaml").write_text(GOOD.replace("workers: 2", "workers: 9"))
    code = (
        "import sys; from fsm_trainer.cli.main import app\n"
        "sys.addaudithook(lambda e, _: e in ('subprocess.Popen', 'os.fork', 'os.posix_spawn') "
        "and sys.exit('a process was started'))\n"
        "try: app(['run', 'run.yaml'])\n"
        "except SystemExit as exit: print(exit.code)\n"
        "print({'torch', 'ray', 'transformers', 'deepspeed'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert done.stdout.split() == ["2", "set()"]
    assert "Traceback" not in done.stderr


def test_paths_of_the_file_are_relative_to_it_and_those_of_set_to_the_working_folder(
    folder: Path,
) -> None:
    inner = folder / "inner"
    inner.mkdir()
    (inner / "run.yaml").write_text(GOOD)
    (inner / "train.jsonl").write_text('{"prompt": "2+2=", "answer": "4"}\n')
    plain = load_config(inner / "run.yaml")
    changed = load_config(inner / "run.yaml", ["data.train.path=train.jsonl"])
    assert plain.document["data"]["train"]["path"] == str(inner / "train.jsonl")
    assert changed.document["data"]["train"]["path"] == str(folder / "train.jsonl")


def test_what_set_gives_is_what_the_run_keeps(folder: Path) -> None:
    (folder / "run.yaml").write_text(GOOD)
    run = load_config(folder / "run.yaml", ["rollout.workers=3", "link.timeout=5"])
    assert run.config.rollout.workers == 3
    assert run.config.link.timeout == 5.0
    assert run.document["rollout"] == {"workers": 3, "prompts": 8}
    assert run.document["link"] == {"timeout": 5}
    assert list(run.system.names) == ["actor", "critic", "rollout-0", "rollout-1", "rollout-2"]


def test_optimizer_steps_leave_the_critics_warm_up_to_the_critic(folder: Path) -> None:
    # 10 steps of 2 minibatches: the critic with 3 epochs takes 60, the actor, from step 5, 6 × 2.
    settings = ["steps=10", "algorithm.critic_epochs=3", "algorithm.critic_warmup_steps=4"]
    (folder / "run.yaml").write_text(GOOD)
    run = load_config(folder / "run.yaml", settings)
    assert isinstance(run.config.algorithm, PPOConfig)
    assert run.optimizer_steps(Role.CRITIC) == 60
    assert run.optimizer_steps(Role.ACTOR) == 12


def test_a_run_has_no_worker_for_a_role_of_ones_own(folder: Path) -> None:
    (folder / "run.yaml").write_text(GOOD)
    states = Path(__file__).parents[2] / "examples" / "reward_model"
    with pytest.raises(
        ConfigError, match="schedule: has reward_model: a run has workers for actor"
    ):
        load_config(folder / "run.yaml", ["schedule=rewarded"], states)


def test_a_schedule_of_ones_own_has_every_action_of_a_step(folder: Path) -> None:
    (folder / "run.yaml").write_text(GOOD)
    states = shutil.copytree(Path(__file__).parents[2] / "states", folder / "states")
    table = states / "schedules" / "disaggregated_critic.yaml"
    table.write_text(table.read_text().replace("[rollout, value, policy", "[rollout, policy"))
    with pytest.raises(ConfigError, match="has no phase in its lanes with action values"):
        load_config(folder / "run.yaml", ["schedule=disaggregated_critic"], states)


def test_a_mistake_is_a_config_error_for_who_embeds(folder: Path) -> None:
    (folder / "run.yaml").write_text(GOOD.replace("steps: 4", "steps: -1"))
    with pytest.raises(ConfigError, match=r"run\.yaml:2: steps: is too small \(given: -1\)"):
        load_config(folder / "run.yaml")
