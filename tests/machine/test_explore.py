"""The properties of `states/system.yaml` hold in every state of the composed system.

In any order: the guards alone must protect whoever embeds the machine. Each break of the code
below makes a property fail, so the properties are not empty.
"""

from __future__ import annotations

import pytest

from fsm_trainer.machine import events as on
from fsm_trainer.machine import legal
from fsm_trainer.machine import step as s
from fsm_trainer.machine.names import LinkState
from fsm_trainer.machine.planner import settle
from fsm_trainer.machine.spec import load, schedules
from fsm_trainer.machine.world import System, World
from tests.machine.explore import Node, broken, explore


def system(schedule: str, rollouts: int = 1) -> System:
    return System.of(load(schedule), rollouts)


@pytest.mark.parametrize("schedule", schedules())
def test_every_state_is_safe_and_every_phase_can_be_reached_again(schedule: str) -> None:
    result = explore(system(schedule), fine=False)
    assert result.violation == "", result.trace
    # Nothing is proved of what is never reached.
    for name, role in system(schedule).names.items():
        table = system(schedule).spec.roles[role]
        for move in [t.trigger for t in table.transitions if t.joint is None]:
            assert f"{name}: {move}" in result.labels
        for action in [n for n, a in table.actions.items() if a.joint is None]:
            assert f"{name}: {action} ended True" in result.labels
    assert {"pushed True", "pushed False", "rollout-0: sever", "actor: sever"} <= result.labels


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("schedule", schedules())
def test_every_state_is_safe_between_any_two_effects(schedule: str) -> None:
    result = explore(system(schedule), fine=True)
    assert result.violation == "", result.trace


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("schedule", schedules())
def test_every_state_of_two_rollout_workers_is_safe(schedule: str) -> None:
    result = explore(system(schedule, 2), fine=False)
    assert result.violation == "", result.trace


def violation(schedule: str, rollouts: int = 1, fine: bool = False) -> str:
    return explore(system(schedule, rollouts), fine=fine, limit=20_000).violation


def test_without_a_fall_of_the_peers_a_connect_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(legal, "movers_of", lambda *_: [])
    assert violation("disaggregated") != ""


def test_without_the_barrier_a_device_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(legal, "_stage", lambda *_: 2)
    assert violation("colocated_critic")[:2] in ("3:", "4:")


def test_without_the_lease_check_a_broken_push_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        System, "lease", lambda self, world, name, link: any(self.get(world, name).epochs)
    )
    assert violation("disaggregated") != ""


def test_without_the_lease_check_after_a_push_half_of_it_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    acted = s._acted

    def unchecked(system: System, world: World, event: on.Acted) -> World:
        up = tuple(k._replace(state=LinkState.UP) for k in world.links)
        return acted(system, world._replace(links=up), event)._replace(links=world.links)

    monkeypatch.setitem(s._STEPS, on.Acted, unchecked)
    assert violation("disaggregated").startswith("6:")


def test_without_the_ghosts_claim_a_worker_starts_beside_its_zombie(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ghosts: list[frozenset[str]] = []

    def forgetful(system: System, world: World, event: on.Died) -> World:
        after = s._died(system, world, event)
        worker = system.get(after, event.worker)
        if worker.ghost & {"optimizer", "kv"}:
            ghosts.append(worker.ghost)
        return system.put(after, event.worker, worker._replace(ghost=frozenset()))

    monkeypatch.setitem(s._STEPS, on.Died, forgetful)
    one = system("disaggregated_critic")
    world = one.initial()
    for event in [("actor", "start"), ("actor", "wake"), ("critic", "start")]:
        world = settle(one, s.advance(one, world, on.Begin(event[1], (event[0],))))
    world = s.advance(one, world, on.Died("actor"))
    world = settle(one, s.advance(one, world, on.Begin("wake", ("critic",))))
    critic = one.get(world, "critic")
    zombie = one.get(world, "actor")._replace(ghost=ghosts[-1])
    assert broken(one, Node(one.put(world, "actor", zombie))).startswith("3:")
    assert "optimizer" in critic.held


def test_without_a_release_a_sever_leaves_a_communicator(monkeypatch: pytest.MonkeyPatch) -> None:
    def kept(system: System, world: World, event: on.Sever) -> World:
        world = s._sever(system, world, event)
        worker = system.get(world, event.worker)
        return system.put(world, event.worker, worker._replace(move=None, state=worker.dest))

    monkeypatch.setitem(s._STEPS, on.Sever, kept)
    assert violation("disaggregated")[:2] in ("1:", "8:")


def test_a_push_that_does_not_tear_lets_old_weights_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    def whole(system: System, world: World, event: on.Act) -> World:
        versions = [w.version for w in world.workers]
        after = s._act(system, world, event)
        workers = [w._replace(version=v) for w, v in zip(after.workers, versions, strict=True)]
        return after._replace(workers=tuple(workers))

    monkeypatch.setitem(s._STEPS, on.Act, whole)
    assert violation("disaggregated").startswith("6:")


def test_without_the_claim_of_what_arrives_late_a_device_is_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fall = s._fall

    def forgetful(system: System, world: World, name: str, before: World) -> World:
        world = fall(system, world, name, before)
        worker = system.get(world, name)
        return system.put(world, name, worker._replace(ghost=frozenset()))

    monkeypatch.setattr(s, "_fall", forgetful)
    assert violation("disaggregated_critic", fine=True) != ""
