"""All processes of a run SIGKILLed at once, at any moment: resumed, it learns the same."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from enum import Enum
from itertools import chain
from pathlib import Path
from random import Random

import pytest

from fsm_trainer.runtime.journal import read_journal
from tests.runs import telling
from tests.runs.training import SMALL, RunningRun, Trained, resume, running, trace

STEPS = 5
SETTINGS = (*SMALL, f"steps={STEPS}", "checkpoint.every=1", "rollout.generate=telling:generate")
SETS = [part for text in SETTINGS for part in ("--set", text)]
POINTS = [*range(3), *(pytest.param(n, marks=pytest.mark.nightly) for n in range(3, 20))]
LONGEST = 0.1
"""Seconds from what is waited for to the kill, at most: what the longest phase takes here."""


@pytest.fixture(scope="module", autouse=True)
def hook() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(telling.__file__).parent), prepend=os.pathsep)
        yield


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """The run that nobody kills."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(telling.FILE, str(folder.with_name("told")))
        with running(folder, *SETS) as run:
            trained = run.wait()
    assert trained.exit == 0, trained.output
    return trained


class When(Enum):
    """Moments of a kill: a record of the journal and then some, or a part is half-written."""

    EARLY = 0
    """Before the critic's first values, so without a checkpoint."""
    LATER = 1
    SAVING = 2


def moment(run: RunningRun, undisturbed: Trained, random: Random, when: When) -> None:
    """Wait for a random moment."""
    checkpoints, journal = run.folder / "checkpoints", run.folder / "journal.jsonl"
    triggers = [entry.trigger for entry in undisturbed.journal]
    second = [n for n, trigger in enumerate(triggers) if trigger == "generate"][2]
    last = len(triggers) - triggers[::-1].index("push")
    between = (0, triggers.index("values")) if when is When.EARLY else (second, last)
    count = random.randrange(*between)
    step, role = random.randrange(2, STEPS + 1), random.choice(("actor", "critic"))
    partial = checkpoints / f"step-{step:06d}" / f".{role}.partial"

    def reached() -> bool:
        if when is When.SAVING:
            return partial.exists()
        return journal.exists() and journal.read_bytes().count(b"\n") > count

    wait(reached, 240)
    time.sleep(random.random() * (0.02 if when is When.SAVING else LONGEST))


def wait(until: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < deadline, until
        time.sleep(0.001)


@pytest.mark.parametrize("point", POINTS)
def test_a_run_killed_at_a_random_moment_and_resumed_learns_what_an_undisturbed_one_does(
    point: int, undisturbed: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, told = tmp_path / "run", tmp_path / "told"
    monkeypatch.setenv(telling.FILE, str(told))

    with running(folder, *SETS) as run:
        moment(run, undisturbed, Random(point), When(point % 3))
        run.kill_all()
    wait(lambda: telling.processes(told) == [], 20)
    assert not (folder / "run.json").exists()
    journal = folder / "journal.jsonl"
    left = read_journal(journal) if journal.exists() else []
    begun = any(entry.worker == "actor" and entry.version for entry in left)

    resumed = resume(folder)

    begins = "no checkpoint is complete" in resumed.output
    assert begins is (When(point % 3) is When.EARLY)
    for role in ("actor", "critic"):
        assert resumed.weights(STEPS, role) == undisturbed.weights(STEPS, role)
    # No sample twice, none lost: each step has the samples that it has in the undisturbed run.
    steps = telling.trained(told)
    assert steps == telling.trained(undisturbed.folder.with_name("told"))
    assert {*Counter(chain(*steps.values())).values()} == {1}
    assert [row.step for row in resumed.metrics if row.phase_seconds] == [*range(1, STEPS + 1)]
    assert trace(folder).returncode == 0
    versions = [e.version for e in resumed.journal if e.worker == "actor" and e.version]
    # A restart begins a lineage of its own.
    assert versions[-1] == f"{1 + begun}.{STEPS + 1}"
