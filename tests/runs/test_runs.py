"""Whole runs, with real processes, real groups, real DeepSpeed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

from fsm_trainer.machine.names import Role
from fsm_trainer.machine.spec import load
from fsm_trainer.machine.world import System
from fsm_trainer.runtime.journal import Entry, Kind
from fsm_trainer.verify.conformance import check_journal
from fsm_trainer.verify.run import counted
from tests.runs import dying
from tests.runs.training import (
    SMALL,
    Trained,
    command,
    environment,
    leftovers,
    resume,
    running,
    trace,
    train,
)

SCHEDULE = "disaggregated_critic"  # the examples' tests run the other ones
APART = "schedule=disaggregated_critic_apart"
SETS = [part for text in SMALL for part in ("--set", text)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A run of three steps that ended well."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    return train(folder, "steps=3", "checkpoint.every=2", more=["--dump-step", "2"])


@pytest.fixture(scope="module")
def records(trained: Trained) -> list[dict[str, Any]]:
    """Its journal."""
    lines = (trained.folder / "journal.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def by_step(entries: list[Entry]) -> list[list[Entry]]:
    """The records of each step: from one generation to the next."""
    parts: list[list[Entry]] = [[]]
    for entry in entries:
        if entry.trigger == "generate" and entry.worker == "rollout-0":
            parts.append([])
        parts[-1].append(entry)
    return parts[1:]


def numbered(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records with a seq that shows nothing of what was done to them."""
    return [{**record, "seq": seq} for seq, record in enumerate(records, start=1)]


def conforms(records: list[dict[str, Any]]) -> bool:
    return check_journal(records, load(SCHEDULE)) is None


def test_a_run_conforms_to_the_tables_row_29(trained: Trained) -> None:
    traced = trace(trained.folder)

    assert traced.returncode == 0, traced.stdout + traced.stderr


def test_actor_and_critic_wake_once_a_step_also_when_they_save(trained: Trained) -> None:
    steps = by_step(trained.journal)

    done = [Counter((e.worker, e.trigger) for e in step) for step in steps]
    for role in ("actor", "critic"):
        assert [one[role, "wake"] for one in done] == [1, 1, 1]
        assert [one[role, "save"] for one in done] == [0, 1, 1]


def test_a_journal_with_any_transition_changed_does_not_conform(
    records: list[dict[str, Any]],
) -> None:
    transitions = [i for i, r in enumerate(records) if r["kind"] == "transition"]

    assert len(transitions) > 40
    assert conforms(records)
    for i in transitions:
        before, record, after = records[:i], records[i], records[i + 1 :]
        assert not conforms(numbered([*before, *after])), record
        assert not conforms(numbered([*before, record, record, *after])), record
        if after and after[0]["worker"] == record["worker"]:
            assert not conforms(numbered([*before, after[0], record, *after[1:]])), record
        if after:  # others may be independent: then seq and time tell
            assert not conforms([*before, after[0], record, *after[1:]]), record
        for field, value in (
            ("source", "awake" if record["source"] != "awake" else "sleeping"),
            ("dest", "awake" if record["dest"] != "awake" else "sleeping"),
            ("epoch", record["epoch"] + 1),
            ("version", "7.7"),
        ):
            assert not conforms([*before, {**record, field: value}, *after]), (record, field)


def test_every_step_changes_the_weights(trained: Trained) -> None:
    """Or else the tests below could not fail."""
    for role in ("actor", "critic"):
        assert trained.weights(2, role) != trained.weights(3, role)
    for row in trained.metrics:
        if row.phase_seconds:
            assert min(row.numbers()[f"{role}/grad_norm"] for role in ("actor", "critic")) > 0


def test_the_same_seed_gives_bit_equal_weights(trained: Trained, tmp_path: Path) -> None:
    again = train(tmp_path / "run", "steps=3", "checkpoint.every=2")

    for role in ("actor", "critic"):
        assert trained.weights(3, role) == again.weights(3, role)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["critic", "actor"])
def test_a_trainer_that_ends_when_it_sleeps_learns_the_same(
    trained: Trained, tmp_path: Path, name: str
) -> None:
    exits = train(tmp_path / "run", "steps=2", f"{name}.offload.target=exit")

    for role in ("actor", "critic"):
        assert trained.weights(2, role) == exits.weights(2, role)
    assert trace(exits.folder).returncode == 0
    events = map(json.loads, (exits.folder / "run.log.jsonl").read_text().splitlines())
    started = Counter(e["worker"] for e in events if e["event"] == "a process is up")
    sleeps = [e for e in exits.journal if (e.worker, e.trigger) == (name, "sleep")]
    assert len(sleeps) >= 2
    # Once for each time that it had slept, to go on or to stop.
    assert started == {"data": 1, "actor": 1, "critic": 1, "rollout-0": 1, "rollout-1": 1} | {
        name: 1 + len(sleeps)
    }


def test_a_run_resumed_before_a_damaged_checkpoint_ends_where_an_undisturbed_one_does(
    trained: Trained, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    train(folder, "steps=2", "checkpoint.every=1")
    damaged = folder / "checkpoints" / "step-000002" / "critic" / "trainer" / "rank-0.pt"
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    with (folder / "journal.jsonl").open("ab") as journal:
        journal.write(b"\0\0\0\n")  # as a power cut may leave it: a new journal begins

    resumed = resume(folder, "steps=3")

    assert "a checkpoint is damaged, the one before it is taken" in resumed.output
    assert "critic/trainer/rank-0.pt holds other bytes than were written" in resumed.output
    for role in ("actor", "critic"):
        assert resumed.weights(3, role) == trained.weights(3, role)
    assert trace(folder).returncode == 0
    assert len([*folder.glob("journal-*.jsonl")]) == 1
    # A restart begins a lineage of its own, the new journal tells of it too.
    versions = [e.version for e in resumed.journal if e.worker == "actor" and e.version]
    assert versions[-1] == "2.4"
    # The reference came with the checkpoint, and the actor had left it: nothing to compare.
    assert [e.zero_kl for e in resumed.journal if e.trigger == "train"] == [None, None]


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
    # No sample was lost or trained twice: it learned what a run without faults learns.
    undisturbed = train(tmp_path / "undisturbed", "steps=6", "checkpoint.every=1")
    for role in ("actor", "critic"):
        assert trained.weights(6, role) == undisturbed.weights(6, role)


def test_a_critic_on_devices_of_its_own_learns_the_same_bit_for_bit(
    trained: Trained, tmp_path: Path
) -> None:
    """Over the link or through the object store, beside the actor or before it."""
    apart = train(tmp_path / "run", "steps=3", "checkpoint.every=2", APART)

    for role in ("actor", "critic"):
        assert apart.weights(3, role) == trained.weights(3, role)
    rewards = [[row.train_reward for row in run.metrics] for run in (apart, trained)]
    assert rewards[0] == rewards[1]
    assert trace(apart.folder).returncode == 0
    entries = [entry for entry in apart.journal if entry.ok]
    done = Counter((e.worker, e.trigger) for e in entries if e.kind is Kind.ACTION)
    for worker in ("actor", "critic"):
        assert done[worker, "send_values"] == done[worker, "train"] == 3
    moved = Counter((e.worker, e.trigger) for e in entries if e.kind is Kind.TRANSITION)
    system = System.of(load(APART.partition("=")[2]), 2)
    assert moved == counted(system, 3)
    # Both train at once: whoever ends first ends after the other one has begun.
    times = [(e.time - e.seconds, e.time) for e in entries if e.trigger == "train"]
    for one, two in zip(times[::2], times[1::2], strict=True):
        assert max(one[0], two[0]) < min(one[1], two[1])


@pytest.mark.nightly
def test_a_run_goes_on_after_both_ends_of_the_values_were_killed_in_them(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "killed").mkdir()
    monkeypatch.setenv("KILLED_ONCE_FLAGS", str(tmp_path / "killed"))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "killed"), prepend=os.pathsep)

    run = train(tmp_path / "run", "steps=3", "checkpoint.every=1", APART)

    died = [f"{e.error}" for e in run.journal if e.trigger == "died"]
    for worker in ("actor", "critic"):
        assert any(error.startswith(f"{worker}'s process is gone") for error in died)
    assert {"actor", "critic"} == {path.name for path in (tmp_path / "killed").iterdir()}
    traced = trace(run.folder)
    assert traced.returncode == 0, traced.stdout + traced.stderr
    for role in ("actor", "critic"):
        assert run.weights(3, role) == trained.weights(3, role)


@pytest.mark.nightly
def test_two_ranks_of_actor_and_critic_learn_what_they_learn_sharing_devices(
    tmp_path: Path,
) -> None:
    ranks = ("steps=2", "actor.ranks=2", "critic.ranks=2")
    together, apart = train(tmp_path / "a", *ranks), train(tmp_path / "b", *ranks, APART)

    assert trace(apart.folder).returncode == 0
    for role in ("actor", "critic"):
        assert apart.weights(2, role) == together.weights(2, role)


@pytest.mark.nightly
def test_a_run_goes_on_after_one_of_two_ranks_was_killed(tmp_path: Path) -> None:
    sets = ("steps=4", "checkpoint.every=1", "actor.ranks=2", "critic.ranks=2")
    folder = tmp_path / "run"
    with running(folder, *SETS, *(part for text in sets for part in ("--set", text))) as run:
        run.after_step(1)
        run.kill("actor.1")
        trained = run.wait()

    assert trained.exit == 0, trained.output
    died = [e.worker for e in trained.journal if e.kind is Kind.FAULT and e.trigger == "died"]
    assert "actor" in died
    traced = trace(folder)
    assert traced.returncode == 0, traced.stdout + traced.stderr
    undisturbed = train(tmp_path / "undisturbed", *sets)
    for role in ("actor", "critic"):
        assert trained.weights(4, role) == undisturbed.weights(4, role)


@pytest.mark.nightly
def test_a_run_goes_back_to_its_checkpoint_where_what_a_sleeper_left_is_damaged(
    trained: Trained, tmp_path: Path
) -> None:
    sets = ("steps=3", "checkpoint.every=1", "critic.offload.target=exit")
    folder = tmp_path / "run"
    file = folder / "scratch" / "critic" / "left" / "trainer" / "rank-0.pt"
    with running(folder, *SETS, *(part for text in sets for part in ("--set", text))) as run:
        run.after_step(1)
        with file.open("r+b") as left:  # it sleeps until the next step's values
            left.seek(-5000, os.SEEK_END)
            byte = left.read(1)[0]
            left.seek(-1, os.SEEK_CUR)
            left.write(bytes([byte ^ 1]))
        resumed = run.wait()

    assert resumed.exit == 0, resumed.output
    died = [f"{e.error}" for e in resumed.journal if e.kind is Kind.FAULT and e.trigger == "died"]
    assert any("critic did not come back from its files: SelfCheckFailed" in why for why in died)
    assert trace(folder).returncode == 0
    for role in ("actor", "critic"):
        assert resumed.weights(3, role) == trained.weights(3, role)


def test_the_part_of_a_worker_that_dies_in_it_is_made_by_another_and_no_other_part_again(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(dying.FLAG, str(tmp_path / "died"))
    monkeypatch.setenv("PYTHONPATH", str(Path(dying.__file__).parent), prepend=os.pathsep)
    hook = "rollout.generate=dying:generate"

    run = train(tmp_path / "run", "steps=3", "checkpoint.every=2", "rollout.parts=3", hook)

    made = Counter(
        (str(e.version), e.worker)
        for e in run.journal
        if e.trigger == "generate" and e.kind is Kind.ACTION and e.ok
    )
    died = [e.worker for e in run.journal if e.trigger == "died"]
    assert len(died) == 1
    # Two workers have three parts each: it had made one of them, and was at its second one.
    assert made[f"1.{dying.STEP}", died[0]] == 1
    steps = Counter(version for version, _ in made.elements())
    assert steps == {"1.1": 6, "1.2": 6, "1.3": 6}
    traced = trace(run.folder)
    assert traced.returncode == 0, traced.stdout + traced.stderr
    # Who made a part, and in how many parts a step is made, has no part in what is learned.
    for role in ("actor", "critic"):
        assert run.weights(3, role) == trained.weights(3, role)


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


def test_a_dumped_step_of_a_run_is_computed_again_to_the_bit(trained: Trained) -> None:
    done = subprocess.run(
        command("replay-step", str(trained.folder / "dump" / "step-000002"), "--json"),
        capture_output=True, text=True, env=environment(), timeout=240, check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["ok"] and set(found["roles"]) == {"actor", "critic"}
    for role in found["roles"].values():
        assert role["exact"] == role["figures"] > 5
