"""The layers that cost no processes: each says what is wrong with the code as it is now."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

import pytest

from fsm_trainer.machine.spec import load
from fsm_trainer.machine.world import System
from fsm_trainer.runtime.journal import read_journal
from fsm_trainer.simulation import training
from fsm_trainer.simulation.seeds import quiet
from fsm_trainer.simulation.training import Training
from fsm_trainer.verify.canon import Canon
from fsm_trainer.verify.check import Search, check
from fsm_trainer.verify.conformance import check_journal
from fsm_trainer.verify.driven import check_driven
from tests.patches.mistakes import Patch
from tests.verify import plain

SEEDS = 200


def explored(schedule: str) -> str:
    """The first violation of a schedule with one rollout worker, in any of four searches."""
    system = System.of(load(schedule), 1)
    canon = Canon(system, symmetric=False)
    anybody = Search(
        system, system, plain.Anybody(system), canon, 100_000, lambda visited, waiting: None
    )
    searches = (
        lambda: check(system, fine=False, jobs=2),
        lambda: check_driven(system),
        anybody.run,
        lambda: check(system, fine=True),
    )
    # Between any two effects: with a critic those are too many states for a test.
    asked = searches if schedule == "disaggregated" else searches[:-1]
    verdicts = (search() for search in asked)
    return next((v.violation.because for v in verdicts if v.violation), "")


@cache
def _plans_under(patch: Patch) -> dict[object, object]:
    """What the planner found with a mistake in it is not for others."""
    return {}


def nothing(patched: pytest.MonkeyPatch) -> None:
    """The code as it stands."""


def simulated(
    schedule: str, seed: int, patch: Patch = nothing, killed: float = 0.0
) -> dict[str, str]:
    """What the simulation says of a seed, and what the tables, unpatched, of its journal."""
    run = Training(schedule, seed, 6 if killed else 3, killed=killed)
    with tempfile.TemporaryDirectory() as name, quiet():
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(training, "_plans", _plans_under(patch))
            patch(patched)
            failure = training._Simulation(run).run(Path(name)).failure
        entries = [e.model_dump(mode="json") for e in read_journal(Path(name, "journal.jsonl"))]
    violation = check_journal(entries, training.configured(run).system, prefix=True)
    found = {"simulation": failure, "conformance": str(violation or "")}
    return {layer: words for layer, words in found.items() if words}
