"""Whole runs, with real processes, real groups, real DeepSpeed."""

from __future__ import annotations

import json
import signal
from collections import Counter
from pathlib import Path

import psutil
import pytest

from fsm_trainer.machine.names import Role, Trigger
from fsm_trainer.machine.spec import load
from fsm_trainer.machine.world import System
from fsm_trainer.runtime.journal import Entry, Kind
from fsm_trainer.verify.run import plan_run
from tests.runs.training import SMALL, Trained, leftovers, resume, running, trace, train

SCHEDULES = {
    "disaggregated_critic": ("steps=3", "checkpoint.every=2"),
    "disaggregated": (
        "steps=3",
        "algorithm={name: grpo}",
        "critic=null",
        "rollout.prompts=8",
        "rollout.copies=4",
    ),
    "colocated_critic": ("steps=3", "schedule=colocated_critic"),
}
SETS = [part for text in SMALL for part in ("--set", text)]


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trained]:
    """Runs that ended well, by name; each is made when it is first asked for."""
    folder = tmp_path_factory.mktemp("runs")

    class Runs(dict[str, Trained]):
        def __missing__(self, name: str) -> Trained:
            schedule = name.partition(" ")[0]
            where = folder / name.replace(" ", "-")
            self[name] = train(where, *SCHEDULES[schedule])
            return self[name]

    return Runs()


def moves(entries: list[Entry]) -> Counter[tuple[str, str]]:
    return Counter((e.worker, e.trigger) for e in entries if e.kind is Kind.TRANSITION)


def planned(schedule: str) -> dict[str, Counter[tuple[str, str]]]:
    """What ``fsm-train plan`` lists, counted: by section."""
    plan = plan_run(System.of(load(schedule), 2))
    return {
        section: Counter(
            (worker, move.name)
            for _, sequence in phases
            for move in sequence
            if move.name in list(Trigger)
            for worker in move.workers
        )
        for section, phases in plan.items()
    }


def by_step(entries: list[Entry], updates: int) -> list[list[Entry]]:
    """The records up to the first training step, then those of each step, then the rest."""
    parts: list[list[Entry]] = [[]]
    for entry in entries:
        if entry.trigger == "generate" and entry.worker == "rollout-0":
            parts.append([])
        parts[-1].append(entry)
    assert len(parts) == updates + 1
    return parts


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_run_conforms_to_the_tables(runs: dict[str, Trained], schedule: str) -> None:
    traced = trace(runs[schedule].folder)

    assert traced.returncode == 0, traced.stdout + traced.stderr


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_run_makes_exactly_the_planned_transitions(
    runs: dict[str, Trained], schedule: str
) -> None:
    plan = planned(schedule)

    total = moves(runs[schedule].journal)

    expected = plan["prologue"] + plan["first step"] + plan["epilogue"]
    assert total == expected + plan["steady step"] + plan["steady step"]


@pytest.mark.parametrize("schedule", ["disaggregated_critic", "colocated_critic"])
def test_the_actor_wakes_once_a_step(runs: dict[str, Trained], schedule: str) -> None:
    parts = by_step(runs[schedule].journal, updates=3)

    # Between two generations lie exactly one step's value, policy and sync phases.
    for part in parts[1:-1]:
        assert moves(part)["actor", Trigger.WAKE] == 1


def test_a_journal_that_was_changed_does_not_conform(
    runs: dict[str, Trained], tmp_path: Path
) -> None:
    lines = (runs["disaggregated_critic"].folder / "journal.jsonl").read_text().splitlines()
    config = (runs["disaggregated_critic"].folder / "config.yaml").read_text()
    broken = [json.loads(line) for line in lines]
    wake = next(
        i for i, e in enumerate(broken) if e["trigger"] == "wake" and e["worker"] == "critic"
    )
    del broken[wake]
    for seq, entry in enumerate(broken, start=1):
        entry["seq"] = seq
    (tmp_path / "config.yaml").write_text(config)
    (tmp_path / "journal.jsonl").write_text("".join(json.dumps(e) + "\n" for e in broken))

    traced = trace(tmp_path)

    assert traced.returncode == 1
    assert "critic" in traced.stdout + traced.stderr


def test_the_same_seed_gives_bit_equal_weights(runs: dict[str, Trained]) -> None:
    once, again = runs["disaggregated_critic"], runs["disaggregated_critic again"]

    for role in ("actor", "critic"):
        assert once.weights(3, role) == again.weights(3, role)


def test_a_resumed_run_ends_where_an_undisturbed_one_does(
    runs: dict[str, Trained], tmp_path: Path
) -> None:
    undisturbed = runs["disaggregated_critic"]
    folder = tmp_path / "run"
    train(folder, "steps=2", "checkpoint.every=2")

    resumed = resume(folder, "steps=3")

    for role in ("actor", "critic"):
        assert resumed.weights(3, role) == undisturbed.weights(3, role)
    assert trace(folder).returncode == 0
    # A restart begins a lineage of its own.
    assert {e.version for e in resumed.journal if e.worker == "actor" and e.version} == {
        "2.3", "2.4",
    }  # fmt: skip


def test_a_run_goes_on_after_a_rollout_worker_and_an_actor_were_killed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with running(folder, *SETS, "--set", "steps=6", "--set", "checkpoint.every=1") as run:
        run.after_step(1)
        run.kill("rollout-1")
        run.after_step(3)
        run.kill("actor")
        trained = run.wait()

    assert trained.exit == 0, trained.output
    traced = trace(folder)
    assert traced.returncode == 0, traced.stdout + traced.stderr
    died = [e.worker for e in trained.journal if e.kind is Kind.FAULT and e.trigger == "died"]
    assert "rollout-1" in died
    assert "actor" in died
    assert trained.metrics[-1].step == 6


def test_an_interrupted_run_leaves_no_process(tmp_path: Path) -> None:
    before = {process.pid for process in psutil.process_iter()}
    with running(tmp_path / "run", *SETS, "--set", "steps=50") as run:
        run.after_step(1)
        run.process.send_signal(signal.SIGINT)
        trained = run.wait(60)

        assert trained.exit == 130, trained.output
        assert leftovers(before) == []
        assert "Traceback" not in trained.output
        assert trace(tmp_path / "run", "--prefix").returncode == 0


def test_generated_trajectories_can_be_trained_on_later(tmp_path: Path) -> None:
    train(tmp_path / "generated", "steps=1", more=["--rollout-only"])

    trained = train(tmp_path / "run", "steps=1", more=["--train-only", str(tmp_path / "generated")])

    done = Counter(e.trigger for e in trained.journal if e.kind is Kind.ACTION)
    assert done == {"values": 1, "train": 1, "save": 2}
    assert {e.role for e in trained.journal} == {Role.ACTOR, Role.CRITIC}
