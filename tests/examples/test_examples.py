"""The examples: each is valid, runs, does what its plan says, and its journal conforms."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from fsm_trainer.machine.errors import ConfigError
from fsm_trainer.machine.spec import schedules
from fsm_trainer.runtime.config import Run, load_config
from fsm_trainer.runtime.journal import Kind, read_journal
from fsm_trainer.runtime.metrics import MetricsRow, Stage, read_metrics
from fsm_trainer.verify.conformance import check_journal
from fsm_trainer.verify.run import counted

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
STEPS = 2
SHORT = (f"steps={STEPS}", "warmup.steps=100", "evaluation.every=0", "data.evaluation_limit=32")
COLOCATED, APART = "colocated", "critic_apart"
WORKERS = {"quickstart": 2, "grpo": 1, COLOCATED: 2, "kl_in_reward": 1, APART: 2}
"""The rollout workers with which an example is run in short."""


def train(name: str, out: Path, *settings: str, seconds: float = 240) -> list[MetricsRow]:
    """Run an example in processes of its own; its metrics."""
    words = [word for setting in settings for word in ("--set", setting)]
    command = [sys.executable, "-m", "fsm_trainer.cli.main", "run", f"examples/{name}.yaml"]
    done = subprocess.run(
        [*command, "--out", str(out), *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return read_metrics(out / "metrics.jsonl")


def loaded(path: Path) -> Run:
    """An example as it stands, or without the devices that it asks for."""
    here = ("cluster.gpus=0", "rollout.engine.device=cpu") if path.stem == "sglang" else ()
    return load_config(path, here)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_valid(path: Path) -> None:
    if path.stem == "sglang" and find_spec("sglang") is None:
        with pytest.raises(ConfigError, match=r"isn't installed.*pip install '\.\[sglang\]'"):
            loaded(path)
    else:
        assert loaded(path).config.steps > 0


def test_every_schedule_has_an_example() -> None:
    here = [path for path in EXAMPLES if path.stem != "sglang"]
    assert {load_config(path).spec.name for path in here} == set(schedules())


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Run, Path]]:
    """Run an example in short, once for all tests: what it was to do, and its folder."""

    @cache
    def run(name: str) -> tuple[Run, Path]:
        settings = (*SHORT, f"rollout.workers={WORKERS[name]}")
        folder = tmp_path_factory.mktemp(name) / "run"
        train(name, folder, *settings)
        return load_config(ROOT / "examples" / f"{name}.yaml", settings), folder

    return run


# Whole runs of the last one, against the first, are in tests/runs.
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.nightly] * (n == APART)) for n in WORKERS]
)
def test_an_example_runs_and_does_what_its_plan_says(
    short: Callable[[str], tuple[Run, Path]], name: str
) -> None:
    run, folder = short(name)
    stages = [row.stage for row in read_metrics(folder / "metrics.jsonl")]
    assert stages == [Stage.START, Stage.WARMUP, None, None, Stage.END]
    assert json.loads((folder / "run.json").read_text())["finished"]
    entries = read_journal(folder / "journal.jsonl")
    taken = Counter((e.worker, e.trigger) for e in entries if e.kind is Kind.TRANSITION)
    assert taken == counted(run.system, run.config.steps)
    trainings = [e.zero_kl for e in entries if (e.role, e.trigger) == ("actor", "train")]
    assert trainings == ["passed", None]
    assert check_journal([entry.model_dump() for entry in entries], run.spec) is None


def test_the_schedule_changes_nothing_of_what_is_learned(
    short: Callable[[str], tuple[Run, Path]],
) -> None:
    first, second = (
        [(row.step, row.train_reward, row.train_kl, row.eval_reward) for row in rows]
        for rows in (
            read_metrics(short(name)[1] / "metrics.jsonl") for name in ("quickstart", COLOCATED)
        )
    )
    assert first == second
    _, reward, kl, _ = first[3]
    assert reward and kl  # the second step's: something was learned in the first


@pytest.mark.nightly
@pytest.mark.timeout(1500)
def test_smollm2_trains_two_steps(tmp_path: Path) -> None:
    rows = train("smollm2", tmp_path / "run", seconds=1400)
    assert [row.step for row in rows if row.stage is None] == [1, 2]
    kl = [row.train_kl for row in rows if row.stage is None]
    assert kl[0] == 0 and kl[1] is not None and kl[1] > 0


def rise(rows: list[MetricsRow]) -> float:
    """How far the held-out reward rose from the end of the warm-up to the end of the run."""
    rewards = {row.stage: row.eval_reward for row in rows if row.stage is not None}
    before, after = rewards[Stage.WARMUP], rewards[Stage.END]
    assert before is not None and after is not None
    return after - before


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in (1, 2))]
)
def test_the_quickstart_learns(seed: int, tmp_path: Path) -> None:
    assert rise(train("quickstart", tmp_path / "run", f"seed={seed}", seconds=800)) >= 0.2


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_at_learning_rate_0_the_quickstart_does_not_move(tmp_path: Path) -> None:
    rows = train("quickstart", tmp_path / "run", "actor.learning_rate=0", seconds=800)
    assert abs(rise(rows)) < 0.05


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_grpo_learns(tmp_path: Path) -> None:
    assert rise(train("grpo", tmp_path / "run", seconds=800)) >= 0.05


# -- the machines in programs of one's own ---------------------------------------------------------


def said(name: str) -> str:
    """What an example prints, run as its docstring says."""
    path = f"examples/{name}.py"
    assert f"python {path}\n" in (ROOT / path).read_text()
    done = subprocess.run(
        [sys.executable, path],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def refusals(text: str) -> list[tuple[str, ...]]:
    """Worker, state, what was asked and the first words of why, of each refusal that is printed."""
    return re.findall(r"(\S+) is (\w+) and refuses '(\w+)': (.{19})", text)


STALE = "`self.version == ac"


def test_the_loop_in_torch_learns_over_sleeps_and_samples_with_the_newest_weights_only() -> None:
    text = said("embed_torch_loop")
    pushed = re.findall(r"^80 bytes of (\S+) pushed, reward (\S+)$", text, re.MULTILINE)
    assert [version for version, _ in pushed] == ["1.0", "1.1", "1.2", "1.3", "1.4", "1.5"]
    # At random one answer of four is right; a loop that forgets in sleep stays there.
    assert float(pushed[0][1]) < 0.35 and float(pushed[-1][1]) > 0.95
    asleep = ("actor", "sleeping", "train", "it does not hold op")
    assert refusals(text) == [("rollout-0", "awake", "generate", STALE)] * 6 + [asleep]
    versions = re.findall(r"rollout-0.version=(\w+), actor.version=(\d)", text)
    assert versions == [("None", "0"), ("0", "1"), ("1", "2"), ("2", "3"), ("3", "4"), ("4", "5")]


def test_a_machine_in_a_ray_actor_refuses_by_a_typed_error_and_outlives_its_peer() -> None:
    lines = said("embed_ray_actor").splitlines()
    assert [line for line in lines if not line.startswith("  because")] == [
        "both: awake awake",
        "refused: worker=rollout-0 state=awake asked=generate",
        "refused: worker=actor state=awake asked=stop",
        "connect: connected connected",
        "push: push as of 1.0 push as of None",
        "generate as of 1.0",
        "the sampler died; the trainer is awake",
        "refused: worker=actor state=awake asked=push",
        "train as of 1.0",
        "connect: connected connected",
        "push: push as of 1.1 push as of None",
        "generate as of 1.1 at epoch 2",
    ]
    because = [line for line in lines if line.startswith("  because")]
    assert because[1] == "  because awake has no 'stop', only ['connect', 'sleep']"
    assert "push is legal in connected" in because[2]


@pytest.mark.skipif(find_spec("trl") is None, reason="TRL isn't installed: the extra `examples`")
def test_trl_samples_with_what_it_has_trained_or_is_refused() -> None:
    text = said("embed_trl")
    versions = re.findall(r"^8 completions by weights (\S+)$", text, re.MULTILINE)
    assert versions == ["1.0", "1.1", "1.2", "1.0"]  # the last of who syncs once
    assert text.count("trained to 1.3") == 1
    kinds = re.findall(r"^(\w+): rollout-0 is", text, re.MULTILINE)
    assert kinds == ["NeverWakes", "NeverSyncs", "SyncsOnce"]
    assert refusals(text) == [
        ("rollout-0", "sleeping", "generate", "it does not hold kv"),
        ("rollout-0", "awake", "generate", STALE),
        ("rollout-0", "awake", "generate", STALE),
    ]


def test_a_role_of_ones_own_is_checked_drawn_and_run() -> None:
    right, wrong, drawn, run = re.split(r"^-- .*\n", said("bring_your_own_machine"), flags=re.M)[1:]
    assert right.count("holds") == 2
    assert re.search(r"Note over .*: 4: .*\('reward_model', 'weights'\).* on train", wrong)
    assert "sleeping --> awake: wake [fits(device)]" in drawn
    assert "reward_model is awake: 'seven' scores +3.0" in run
    assert refusals(run) == [
        ("reward_model", "sleeping", "wake", "`fits(device)` is f"),
        ("reward_model", "sleeping", "score", "it does not hold we"),
    ]
