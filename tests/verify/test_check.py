"""Every state of the composed system is visited, and none breaks a property."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fsm_trainer.cli.main import app
from fsm_trainer.machine import events as on
from fsm_trainer.machine.errors import SpecError
from fsm_trainer.machine.names import Role, State
from fsm_trainer.machine.planner import Apply, Move, apply, plan, ready
from fsm_trainer.machine.spec import Phase, load, schedules
from fsm_trainer.machine.world import System, World
from fsm_trainer.verify.canon import Canon, Code, Node
from fsm_trainer.verify.check import Verdict, check
from fsm_trainer.verify.driven import _Driven, check_driven
from fsm_trainer.verify.mutate import fates, mutants
from fsm_trainer.verify.properties import wrong_step
from fsm_trainer.verify.relation import Relation
from tests.verify import plain

STATES = Path(__file__).parents[2] / "states"
APART = "disaggregated_critic_apart"
DRIVEN = {
    "colocated_critic": 1461, "disaggregated": 644, "disaggregated_critic": 1215,
    "disaggregated_critic_score": 1241, APART: 4379,
}  # fmt: skip
# With one rollout worker, whose own moves run to their ends; TLC finds as many.
COUNTS = {
    "colocated_critic": 2_413, "disaggregated": 1_099, "disaggregated_critic": 4_153,
    "disaggregated_critic_score": 4_468, APART: 18_335,
}  # fmt: skip


def explored(schedule: str, rollouts: int, *, fine: bool = False) -> Verdict:
    return check(System.of(load(schedule), rollouts), fine=fine)


@pytest.mark.parametrize("schedule", schedules())
def test_every_state_is_safe_and_every_phase_can_be_reached_again(schedule: str) -> None:
    verdict = explored(schedule, 1)
    assert verdict.violation is None
    assert verdict.states == COUNTS[schedule]


def test_two_rollout_workers_are_safe_too() -> None:
    assert explored("disaggregated", 2).violation is None


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("schedule", schedules())
def test_every_state_of_two_rollout_workers_is_safe(schedule: str) -> None:
    assert explored(schedule, 2).violation is None


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("schedule", schedules())
def test_every_state_is_safe_between_any_two_effects(schedule: str) -> None:
    assert explored(schedule, 1, fine=True).violation is None


@pytest.mark.parametrize("jobs", [1, 2])
def test_the_search_finds_what_a_plain_one_finds(jobs: int) -> None:
    system = System.of(load("disaggregated"), 1)
    states = check(system, fine=False, jobs=jobs, symmetric=False).states
    assert states == len(plain.every(system, Canon(system), jobs=jobs))


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_symmetric_workers_are_every_order_of_them() -> None:
    system = System.of(load("disaggregated"), 2)
    ordered, canon = Canon(system, symmetric=False), Canon(system)
    full = plain.every(system, ordered)
    assert len(full) == check(system, fine=False, symmetric=False).states
    assert len({canon.encode(ordered.decode(code)) for code in full}) == (
        check(system, fine=False).states
    )


def test_rollout_workers_are_symmetric_wherever_a_schedule_names_their_role() -> None:
    roles = {"rollout-0": Role.ROLLOUT, "rollout-1": Role.ROLLOUT, "actor": Role.ACTOR}
    system = System(load("disaggregated"), roles)
    canon, codes = Canon(system), set()
    alone = apply(system, system.initial(), Move("start", ("actor",)))
    canon.encode(Node(alone))  # so that the actor's part has a number below those of the others
    for name in ("rollout-0", "rollout-1"):
        node = Node(apply(system, alone, Move("start", (name,))))
        code = canon.encode(node)
        codes |= {code, canon.replaced(code, ((2, canon.part_of(node, "actor")),))}
        assert system.get(canon.decode(code).world, "actor").held == {"bank"}
    assert len(codes) == 1


# -- what is broken is found, and told -------------------------------------------------------------


def broken_tables(folder: Path, file: str, old: str, new: str) -> Path:
    shutil.copytree(STATES, folder / "states")
    path = folder / "states" / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    return folder / "states"


def test_a_violation_is_told_by_the_shortest_way(tmp_path: Path) -> None:
    weak = "self.version == actor.version and self.lineage == actor.lineage"
    states = broken_tables(tmp_path, "rollout.yaml", weak, "self.live")
    options = ["check", "--rollouts", "1", "--driven", "0", "--schedule", "disaggregated"]
    options += ["--states", str(states)]
    told = CliRunner().invoke(app, options)
    assert told.exit_code == 1
    diagram = told.stdout.partition("sequenceDiagram")[2].strip()
    steps = [line.strip() for line in diagram.splitlines()]
    # Nothing shorter than to start, to wake and to serve what was never pushed.
    assert [line for line in steps if "driver->>" in line] == [
        "driver->>rollout-0: start",
        "driver->>rollout-0: wake",
        "driver->>rollout-0: generate",
    ]
    assert steps[-1].startswith("Note over actor,rollout-0: 5: rollout-0 begins to serve None")
    [found] = json.loads(CliRunner().invoke(app, [*options, "--json"]).stdout)
    assert [event["event"] for event in found["violations"][0]["events"]] == [
        "Begin",
        "Begin",
        "Act",
    ]


def test_the_last_event_names_the_twin_that_the_way_there_was_of() -> None:
    """A code forgets which twin is which, and the last event was read from a code."""
    spec = load("disaggregated")
    weak = "rollout: disconnect from connected without `self.lease`"
    [mutant] = [each for each in mutants(spec) if each.name == weak]
    system = System.of(mutant.spec, 2)
    violation = check(system, fine=False).violation
    assert violation is not None
    relation, node = Relation(system, fine=False), Node(system.initial())
    for step in violation.steps[:-1]:
        nodes = relation.after(node, step.edge.event)
        node = next(after for after in nodes if after == step.node)
    event = violation.steps[-1].edge.event
    after = next(relation.after(node, event))
    assert wrong_step(system, node.world, event, after.world) == violation.because


def test_a_trap_is_a_violation(tmp_path: Path) -> None:
    states = broken_tables(
        tmp_path, "link.yaml", "{trigger: close, from: [up, broken]", "{trigger: close, from: up"
    )
    verdict = check(System.of(load("disaggregated", states), 1), fine=False)
    assert verdict.violation is not None
    assert verdict.violation.number == "recoverable"


def test_a_transition_that_never_happens_is_a_violation(tmp_path: Path) -> None:
    states = broken_tables(
        tmp_path, "actor.yaml", "from: awake, to: sleeping, guard: self.in_flight == 0}",
        "from: awake, to: sleeping, guard: self.in_flight == 0}\n"
        "  - {trigger: stop, from: awake, to: disconnected, guard: self.in_flight == 99}",
    )  # fmt: skip
    verdict = check(System.of(load("disaggregated", states), 1), fine=False)
    assert verdict.violation is not None
    assert verdict.violation.because == "sometimes: never actor stop awake"


def test_a_guard_that_counts_is_refused(tmp_path: Path) -> None:
    weak = "self.version == actor.version and self.lineage == actor.lineage"
    states = broken_tables(tmp_path, "rollout.yaml", weak, "self.version < 7")
    with pytest.raises(SpecError, match=r"`self\.version < 7` can't be checked"):
        check(System.of(load("disaggregated", states), 1))


# -- as a schedule drives it -----------------------------------------------------------------------


@pytest.mark.parametrize("schedule", schedules())
def test_the_driver_passes_every_phase_again_and_again(schedule: str) -> None:
    verdict = check_driven(System.of(load(schedule), 1))
    assert verdict.violation is None
    assert verdict.states == DRIVEN[schedule]


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("schedule", schedules())
def test_the_driver_passes_every_phase_with_three_rollout_workers(schedule: str) -> None:
    assert check_driven(System.of(load(schedule), 3)).violation is None


class EveryOrder(_Driven):
    """The driven search without its reduction: nobody waits for a turn."""

    def _waiting(self, node: Node) -> set[str]:
        return set()


def driven(search: type[_Driven], schedule: str, rollouts: int) -> _Driven:
    system = System.of(load(schedule), rollouts)
    relation = Relation(system, fine=False, begins=False)
    return search(system, system, relation, Canon(system), 2_000_000, lambda *_: None)


def decisions(search: _Driven) -> set[object]:
    """Where the driver decides something, whichever code that has, or place a rollout worker."""
    found = set[object]()
    for code in search._order:
        node, *_ = search._state(code)
        system, world = search._system, node.world
        busy = any(w.move or w.jobs or w.undead for w in world.workers)
        wrong = any(isinstance(e.event, on.Sever) for e in search._relation.edges(node))
        if not busy and not wrong:
            canon, size = search._canon, len(system.names)
            parts = zip(system.names.values(), map(canon.parts.__getitem__, code), strict=False)
            links = tuple(link.state for link in world.links)
            found.add((frozenset(Counter(parts).items()), links, code[size + 1 :]))
    return found


@pytest.mark.parametrize(
    ("schedule", "rollouts"),
    [(schedule, 1) for schedule in schedules()]
    + [pytest.param(schedule, 2, marks=pytest.mark.nightly) for schedule in schedules()]
    + [("disaggregated", 2)],
)
def test_the_driver_decides_in_the_same_states_whoever_is_first(
    schedule: str, rollouts: int
) -> None:
    full, reduced = (driven(kind, schedule, rollouts) for kind in (EveryOrder, _Driven))
    every, few = full.run(), reduced.run()
    assert every.violation is few.violation is None
    assert few.states < every.states
    assert few.happened == every.happened
    assert decisions(reduced) == decisions(full)


def test_a_run_can_be_told_to_whatever_state_of_several_workers() -> None:
    search = driven(_Driven, "disaggregated", 2)
    search.run()
    for at in range(0, len(search._order), 500):
        codes = list[Code]()
        while at > 0:
            codes.insert(0, search._order[at])
            at = search._came[at]
        assert len([*search._walk(codes)]) == len(codes)


def test_a_phase_that_can_not_run_is_where_the_driver_is_stuck(tmp_path: Path) -> None:
    needs = "train: {needs: [weights, optimizer, train_groups], guard: self.in_flight == "
    states = broken_tables(tmp_path, "actor.yaml", f"{needs}0", f"{needs}1")
    verdict = check_driven(System.of(load("disaggregated", states), 1))
    assert verdict.violation is not None
    assert verdict.violation.because == "stuck: no way to policy"


def test_a_driver_that_goes_in_circles_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planner that takes a link apart and puts it together again passes nothing."""

    def undecided(system: System, world: World, phase: Phase, _: Apply) -> tuple[Move, ...]:
        connected = system.get(world, "rollout-0").state == State.CONNECTED
        if system.get(world, "actor").state == State.CONNECTED and phase.name == "policy":
            raise AssertionError("policy can run where the actor is connected")
        if connected and phase.name == "sync":
            return (Move("disconnect", ("actor", "rollout-0")),)
        return plan(system, world, phase)

    monkeypatch.setattr("fsm_trainer.verify.driven.ready", never("sync", ready))
    monkeypatch.setattr("fsm_trainer.verify.driven.plan", undecided)
    verdict = check_driven(System.of(load("disaggregated"), 1))
    assert verdict.violation is not None
    assert verdict.violation.number == "livelock"


def never(name: str, really: Callable[..., bool]) -> Callable[..., bool]:
    return lambda system, world, phase: phase.name != name and really(system, world, phase)


def test_too_many_states_are_no_proof() -> None:
    verdict = check(System.of(load("disaggregated"), 1), fine=False, most=100)
    assert verdict.cut
    assert verdict.violation is None


@pytest.mark.timeout(600)
def test_every_mutant_is_killed_by_a_property() -> None:
    told = list(fates([load(name) for name in schedules()]))
    assert [fate.mutant for fate in told if not fate.killed_by] == []
    # Guards, holds and link rows of the shipped tables, and patches of the code.
    assert len(told) == 86
