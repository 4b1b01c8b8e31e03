"""Plans: the schedules written out, and how long planning takes."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from fsm_trainer.machine.errors import Refused
from fsm_trainer.machine.events import Confirmed, Died, Sever
from fsm_trainer.machine.names import Role
from fsm_trainer.machine.planner import Move, _search, apply, plan, settle
from fsm_trainer.machine.spec import load, schedules
from fsm_trainer.machine.step import advance
from fsm_trainer.machine.world import System, World
from fsm_trainer.verify.run import plan_run

BOTH = "(actor, rollout-0)"
ROLLOUT = "(rollout-0)"
LINK_UP = f"connect{BOTH} push{BOTH}"
THREE = "(actor, critic, rollout-0)"
PLANS = {
    "disaggregated": {
        "prologue": [
            f"evaluate: start(actor) start{ROLLOUT} wake(actor) wake{ROLLOUT} {LINK_UP}",
            "warm_up:",
            f"evaluate: push{BOTH}",
        ],
        "first step": ["rollout:", "policy:", "sync:"],
        "steady step": ["rollout:", "policy:", "sync:"],
        "epilogue": [
            "evaluate:",
            f"end: disconnect{BOTH} sleep(actor) sleep{ROLLOUT} stop(actor) stop{ROLLOUT}",
        ],
    },
    "disaggregated_critic": {
        "prologue": [
            f"evaluate: start(actor) start{ROLLOUT} wake(actor) wake{ROLLOUT} {LINK_UP}"
            f" disconnect{BOTH} sleep(actor)",
            "warm_up: wake(actor)",
            f"evaluate: {LINK_UP} disconnect{BOTH} sleep(actor)",
        ],
        "first step": [
            "rollout: start(critic)",
            "value: wake(critic)",
            "policy: sleep(critic) wake(actor)",
            f"sync: connect{BOTH}",
        ],
        "steady step": [
            f"rollout: disconnect{BOTH} sleep(actor)",
            "value: wake(critic)",
            "policy: sleep(critic) wake(actor)",
            f"sync: connect{BOTH}",
        ],
        "epilogue": [
            f"evaluate: disconnect{BOTH} sleep(actor)",
            f"end: sleep{ROLLOUT} stop(actor) stop(critic) stop{ROLLOUT}",
        ],
    },
    "disaggregated_critic_score": {
        "prologue": [
            f"evaluate: start(actor) start{ROLLOUT} wake(actor) wake{ROLLOUT} {LINK_UP}"
            f" disconnect{BOTH} sleep(actor)",
            "warm_up: wake(actor)",
            f"evaluate: {LINK_UP} disconnect{BOTH} sleep(actor)",
        ],
        "first step": [
            "rollout: start(critic)",
            "score: wake(actor)",
            "value: sleep(actor) wake(critic)",
            "policy: sleep(critic) wake(actor)",
            f"sync: connect{BOTH}",
        ],
        "steady step": [
            f"rollout: disconnect{BOTH} sleep(actor)",
            "score: wake(actor)",
            "value: sleep(actor) wake(critic)",
            "policy: sleep(critic) wake(actor)",
            f"sync: connect{BOTH}",
        ],
        "epilogue": [
            f"evaluate: disconnect{BOTH} sleep(actor)",
            f"end: sleep{ROLLOUT} stop(actor) stop(critic) stop{ROLLOUT}",
        ],
    },
    "disaggregated_critic_apart": {
        "prologue": [
            f"evaluate: start(actor) start(critic) start{ROLLOUT}"
            f" wake(actor) wake(critic) wake{ROLLOUT} connect{THREE} push{BOTH}",
            # The critic begins from the model that is warmed up here.
            f"warm_up: disconnect{THREE} sleep(critic) stop(critic)",
            f"evaluate: start(critic) wake(critic) connect{THREE} push{BOTH}",
        ],
        "first step": ["rollout:", "value:", "send:", "policy:", "sync:"],
        "steady step": ["rollout:", "value:", "send:", "policy:", "sync:"],
        "epilogue": [
            "evaluate:",
            f"end: disconnect{THREE} sleep(actor) sleep(critic) sleep{ROLLOUT}"
            f" stop(actor) stop(critic) stop{ROLLOUT}",
        ],
    },
    "colocated_critic": {
        "prologue": [
            f"evaluate: start(actor) start{ROLLOUT} wake(actor) {LINK_UP} disconnect{BOTH}",
            f"warm_up: sleep{ROLLOUT} wake(actor)",
            f"evaluate: {LINK_UP} disconnect{BOTH}",
        ],
        "first step": [
            "rollout: start(critic)",
            f"value: sleep{ROLLOUT} wake(critic)",
            "policy: sleep(critic) wake(actor)",
            f"sync: connect{BOTH}",
        ],
        "steady step": [
            f"rollout: disconnect{BOTH}",
            f"value: sleep{ROLLOUT} wake(critic)",
            "policy: sleep(critic) wake(actor)",
            f"sync: connect{BOTH}",
        ],
        "epilogue": [
            f"evaluate: disconnect{BOTH}",
            f"end: sleep{ROLLOUT} stop(actor) stop(critic) stop{ROLLOUT}",
        ],
    },
}


@pytest.mark.parametrize("schedule", schedules())
def test_a_run_without_faults_does_what_is_written_here(schedule: str) -> None:
    planned = plan_run(System.of(load(schedule), 1))
    found = {
        section: [" ".join([f"{phase}:", *map(str, moves)]) for phase, moves in phases]
        for section, phases in planned.items()
    }
    assert found == PLANS[schedule]


@pytest.mark.parametrize("schedule", ["disaggregated_critic", "colocated_critic"])
def test_the_actor_wakes_once_in_a_steady_step(schedule: str) -> None:
    steady = plan_run(System.of(load(schedule), 2))["steady step"]
    moves = [move for _, found in steady for move in found]
    assert [m.name for m in moves if "actor" in m.workers].count("wake") == 1


def test_the_plan_does_not_depend_on_how_many_rollout_workers_move_together() -> None:
    def names(rollouts: int) -> list[list[str]]:
        planned = plan_run(System.of(load("disaggregated_critic"), rollouts))
        return [[m.name for m in moves] for phases in planned.values() for _, moves in phases]

    assert names(1) == names(3)


@pytest.mark.parametrize("schedule", schedules())
def test_a_run_with_sixty_four_rollout_workers_is_planned_in_a_moment(schedule: str) -> None:
    system, began = System.of(load(schedule), 64), time.process_time()
    planned = plan_run(system)
    assert time.process_time() - began < 0.3
    one = plan_run(System.of(load(schedule), 1))
    for section, phases in planned.items():
        for (_, moves), (_, few) in zip(phases, one[section], strict=True):
            assert [m.name for m in moves] == [m.name for m in few]
            for move in moves:
                rollouts = [name for name in move.workers if name.startswith("rollout")]
                assert len(rollouts) in (0, 64)


def test_without_a_rollout_worker_the_planner_is_stuck_and_says_why() -> None:
    system = System.of(load("disaggregated"), 1)
    world = advance(system, system.initial(), Died("rollout-0", lost=True))
    with pytest.raises(Refused, match="nobody is left who could generate"):
        plan(system, world, system.spec.phases["rollout"])


def scattered(schedule: str) -> tuple[System, World]:
    """Four rollout workers: two have died, one of them is back and asleep, two are ahead."""
    system = System.of(load(schedule), 4)
    world = system.initial()
    for move in plan(system, world, system.spec.phases["rollout"]):
        world = apply(system, world, move)
    for name in ("rollout-1", "rollout-3"):
        world = advance(system, advance(system, world, Died(name)), Confirmed(name))
    for name in system.names:
        if any(system.get(world, name).epochs):
            world = settle(system, advance(system, world, Sever(name, "link")))
    return system, apply(system, world, Move("start", ("rollout-3",)))


@pytest.mark.parametrize("schedule", schedules())
def test_the_plan_is_the_same_when_one_stands_for_all_that_are_in_the_same_position(
    schedule: str,
) -> None:
    system, world = scattered(schedule)
    whole = System.of(load(schedule), 3)
    for phase in system.spec.phases.values():
        assert plan(system, world, phase) == _search(system, world, phase, apply)
        assert plan(whole, whole.initial(), phase) == _search(whole, whole.initial(), phase, apply)


def test_who_shares_a_device_stands_for_nobody_else() -> None:
    system = System.of(load("disaggregated"), 2)
    devices = {**system.spec.schedule.devices, Role.ROLLOUT: "shared"}
    schedule = system.spec.schedule.model_copy(update={"devices": devices})
    shared = System(replace(system.spec, schedule=schedule), system.names)
    with pytest.raises(Refused, match="no sequence of moves"):  # a device has one token
        plan(shared, shared.initial(), shared.spec.phases["rollout"])
