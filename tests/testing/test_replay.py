"""The real lifecycles do what the relation says, and a violation becomes a test that fails."""

from __future__ import annotations

import doctest
import random
import re
import runpy
import shutil
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest
from typer.testing import CliRunner

import fsm_trainer.testing.replay
from fsm_trainer.cli.main import app
from fsm_trainer.machine import events as on
from fsm_trainer.machine.errors import Refused
from fsm_trainer.machine.events import Effect, Op
from fsm_trainer.machine.lifecycle import Lifecycle
from fsm_trainer.machine.spec import load, schedules
from fsm_trainer.machine.world import System
from fsm_trainer.testing import PropertyViolated
from fsm_trainer.testing.replay import Replay
from fsm_trainer.verify.check import check
from fsm_trainer.verify.mutate import mutants
from fsm_trainer.verify.relation import Edge, Node, Relation
from fsm_trainer.verify.story import write_test

ROOT = Path(__file__).parents[2]
STATES = ROOT / "states"
# What leads to pushes, and to what comes of them, is rare in a walk where all is alike.
LIKELY = {
    "connect": 30, "push": 10, "Sever": 10, "Commit": 8, "start": 6, "wake": 6, "disconnect": 5,
    "Done": 4, "Acted": 3, "stop": 0.3, "sleep": 0.3,
}  # fmt: skip


def test_the_module_s_tutorial_runs() -> None:
    assert doctest.testmod(fsm_trainer.testing.replay).failed == 0


# -- the running code is the relation --------------------------------------------------------------


def walk(replay: Replay, seed: int, length: int, *, fine: bool = True) -> Counter[str]:
    """Replay a random walk; how often each kind of event came."""
    chance, kinds = random.Random(seed), Counter[str]()
    relation = Relation(replay.system, fine=fine, symmetric=False)
    while kinds.total() < length:
        edges = [*relation.edges(replay.node)]
        edge = chance.choices(edges, [likely(each) for each in edges])[0]
        try:
            nodes = [*relation.after(replay.node, edge.event)]
        except Refused:
            continue
        node = chance.choice(nodes)
        late = node.late - nodes[0].late
        replay.event(edge.event, late)
        assert replay.node == Node(node.world, node.late)
        kinds[type(edge.event).__name__] += 1
        kinds["late"] += len(late)
    return kinds


def likely(edge: Edge) -> float:
    kind = type(edge.event).__name__
    what = getattr(edge.event, "trigger", None) or getattr(edge.event, "action", None) or kind
    return LIKELY.get(str(what), LIKELY.get(kind, 0.15 if edge.fault else 1.0))


@pytest.mark.parametrize("fine", [True, False], ids=["fine", "coarse"])
@pytest.mark.parametrize("schedule", schedules())
def test_every_lifecycle_is_what_the_relation_says_at_each_event(schedule: str, fine: bool) -> None:
    seen = Counter[str]()
    for seed in range(12):
        with Replay(schedule, rollouts=2, fine=fine) as replay:
            seen += walk(replay, seed, 60, fine=fine)
    kinds = {kind.__name__ for kind in on.Event.__args__} - {"Sever"}
    assert kinds <= set(seen), "these walks show nothing of an event that never came"
    assert not [t for t in threading.enumerate() if t.name.startswith("replay-")]


def test_a_lifecycle_that_forgets_a_failure_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lifecycle, "_failed", lambda self, effect: None)
    with pytest.raises(PropertyViolated, match="by the tables"), Replay("disaggregated", 1) as told:
        for seed in range(5):
            walk(told, seed, 60)


def test_an_effect_that_was_under_way_reports_after_its_worker_began_to_fall() -> None:
    bank = Effect("actor", Op.ACQUIRE, "bank")
    with Replay("disaggregated", rollouts=1) as replay:
        replay.event(on.Begin("start", ("actor",)))
        replay.event(on.Undo("actor"), late=[bank])
        replay.event(on.Done(bank))
        assert replay.lifecycles["actor"].worker.held == {"bank"}
        replay.event(on.Done(Effect("actor", Op.RELEASE, "bank")))
        replay.event(on.Commit(("actor",)))
        assert replay.lifecycles["actor"].worker.held == frozenset()


def test_what_can_not_be_under_way_is_refused() -> None:
    with Replay("disaggregated", rollouts=1) as replay:
        replay.event(on.Begin("start", ("actor",)))
        with pytest.raises(Refused, match="acquire weights can't be under way"):
            replay.event(on.Undo("actor"), late=[Effect("actor", Op.ACQUIRE, "weights")])


# -- a violation as a test -------------------------------------------------------------------------

VERSION = "self.version == actor.version and self.lineage == actor.lineage"
START, LEAVE = "disconnected, to: sleeping", "when: not colocated"
# What is replaced in the tables, the properties that may fail first, and what the traces show.
BROKEN = {
    "a stale version serves": ("disaggregated", "rollout.yaml", VERSION, "self.live", "5", "Act("),
    "a zombie starts again": (
        "disaggregated", "actor.yaml", f"{START}, guard: not self.undead", START, "10", "Died(",
    ),
    "a link to nobody": (
        "disaggregated", "actor.yaml", "any(rollout.live) and ", "", "9", "lost=True",
    ),
    "a barrier with the dead": (
        "disaggregated", "actor.yaml", f"and self.lease, {LEAVE}", f", {LEAVE}", "12", "Died(",
    ),
    "moving at work": (
        "disaggregated", "rollout.yaml", f"guard: self.in_flight == 0, {LEAVE}", LEAVE, "11",
        "Acted(",
    ),
    "no ledger": ("colocated_critic", "critic.yaml", ", guard: fits(device)", "", "3|4", "wake"),
    "too much on a device": (
        "colocated_critic", "actor.yaml", "{optimizer: not colocated}", "optimizer", "4", "Done(",
    ),
    "a death breaks nothing": (
        "disaggregated", "link.yaml", "[opening, up], to: b", "opening, to: b", "9", "Died(",
    ),
    "a trap": (
        "disaggregated", "link.yaml", "[up, broken], to: d", "up, to: d", "recoverable", "reaches(",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fine", [False, True], ids=["coarse", "fine"])
@pytest.mark.parametrize("what", BROKEN)
def test_the_test_of_a_violation_fails_for_it_and_passes_once_the_tables_are_right(
    tmp_path: Path, what: str, fine: bool
) -> None:
    schedule, file, old, new, numbers, shows = BROKEN[what]
    states = shutil.copytree(STATES, tmp_path / "states")
    right = (states / file).read_text()
    assert old in right
    (states / file).write_text(right.replace(old, new))
    test = tmp_path / "tests" / "test_found.py"
    test.parent.mkdir()
    options = ["check", "--schedule", schedule, "--rollouts", "1", "--driven", "0"]
    options += ["--states", str(states), "--test", str(test), *(["--fine"] if fine else [])]

    assert CliRunner().invoke(app, options).exit_code == 1

    text = test.read_text()
    assert shows in text
    assert "<" not in text
    [name] = re.findall(rf"def (test_property_(?:{numbers})_holds)", text)
    with pytest.raises(PropertyViolated, match=rf"^({numbers}): "):
        runpy.run_path(str(test))[name]()
    (states / file).write_text(right)
    runpy.run_path(str(test))[name]()


# Breaks of the code that only a race shows: reports that fail, come late, or come from the dead.
RACES = {
    "step: no barrier between releases and acquisitions": "late=",
    "step: a sever releases nothing": "Sever(",
    "step: weights keep their version over a wake": "Failed(",
    "step: what arrives late claims nothing": "late=",
    "step: an epoch is used twice": "Undo(",
    "step: a death breaks no link": "Died(",
}


@pytest.mark.parametrize("name", RACES)
def test_the_test_of_a_race_fails_in_the_code_that_has_it(tmp_path: Path, name: str) -> None:
    spec, test = load("colocated_critic"), tmp_path / "test_found.py"
    [mutant] = [each for each in mutants(spec) if each.name == name]
    with mutant.patch():
        system = System.of(spec, 1)
        verdict = check(system, fine=False)
        write_test(test, [(system, verdict)], fine=False, states=None)
        assert verdict.violation is not None
        number = verdict.violation.number
        found = runpy.run_path(str(test))[f"test_property_{number}_holds"]
        with pytest.raises(PropertyViolated, match=f"^{number}: "):
            found()
    assert RACES[name] in test.read_text()
    found()


def test_plain_pytest_runs_the_file_from_anywhere(tmp_path: Path) -> None:
    states = shutil.copytree(STATES, tmp_path / "mine")
    rollout = states / "rollout.yaml"
    right = rollout.read_text()
    rollout.write_text(right.replace("self.version == actor.version and ", ""))
    test = tmp_path / "test_found.py"
    options = ["check", "--schedule", "disaggregated", "--rollouts", "1", "--driven", "0"]
    CliRunner().invoke(app, [*options, "--states", str(states), "--test", str(test)])

    failed = pytest_on(test)
    rollout.write_text(right)
    passed = pytest_on(test)

    assert failed.returncode == 1, failed.stdout
    assert "test_property_5_holds" in failed.stdout
    assert "property 5: nobody serves weights that are torn" in failed.stdout
    assert passed.returncode == 0, passed.stdout


def pytest_on(test: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(test)]
    path = {"PYTHONPATH": str(ROOT), "PATH": ""}
    return subprocess.run(
        command, cwd="/", env=path, capture_output=True, text=True, timeout=120, check=False
    )


def test_what_no_trace_shows_is_not_written(tmp_path: Path) -> None:
    states, test = shutil.copytree(STATES, tmp_path / "states"), tmp_path / "test_found.py"
    actor = states / "actor.yaml"
    never = "  - {trigger: stop, from: awake, to: disconnected, guard: self.in_flight == 99}\n"
    actor.write_text(actor.read_text().replace("actions:\n", f"{never}actions:\n"))
    options = ["check", "--schedule", "disaggregated", "--rollouts", "1", "--driven", "0"]
    told = CliRunner().invoke(app, [*options, "--states", str(states), "--test", str(test)])
    assert told.exit_code == 2
    assert "sometimes: never actor stop awake. No trace shows that" in told.stderr
    assert not test.exists()
