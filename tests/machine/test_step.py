"""`step`: what is undone, what is joint, what a fault costs. Rows are those of FAILURES.md."""

from __future__ import annotations

from itertools import combinations

import pytest

from fsm_trainer.machine.errors import LeaseExpired, Refused
from fsm_trainer.machine.events import (
    Act,
    Acted,
    Begin,
    Commit,
    Confirmed,
    Died,
    Done,
    Effect,
    Failed,
    Op,
    Sever,
)
from fsm_trainer.machine.legal import enabled
from fsm_trainer.machine.names import LinkState, State
from fsm_trainer.machine.planner import Move, apply, plan, settle
from fsm_trainer.machine.spec import load
from fsm_trainer.machine.step import advance, step
from fsm_trainer.machine.version import Version
from fsm_trainer.machine.world import System, World

ENDS = ("actor", "rollout-0", "rollout-1")


def at(schedule: str, phase: str) -> tuple[System, World]:
    system = System.of(load(schedule), 2)
    world = system.initial()
    for move in plan(system, world, system.spec.phases[phase]):
        world = apply(system, world, move)
    return system, world


def test_a_failed_acquisition_is_undone_in_reverse_order_row_6() -> None:
    system, world = at("disaggregated_critic", "rollout")
    world = advance(system, world, Begin("wake", ("actor",)))
    world = advance(system, world, Done(Effect("actor", Op.ACQUIRE, "weights")))
    world = advance(system, world, Done(Effect("actor", Op.ACQUIRE, "optimizer")))
    world, due = step(system, world, Failed(Effect("actor", Op.ACQUIRE, "train_groups")))
    assert [str(e) for e in due] == ["release optimizer"]
    world, due = step(system, world, Done(due[0]))
    assert [str(e) for e in due] == ["release weights"]
    world = advance(system, advance(system, world, Done(due[0])), Commit(("actor",)))
    assert system.get(world, "actor").state == State.SLEEPING


def test_a_failed_release_ends_the_process_and_its_claim_stays_until_it_is_seen_dead() -> None:
    system, world = at("disaggregated_critic", "warm_up")
    world = advance(system, world, Begin("sleep", ("actor",)))
    world, due = step(system, world, Failed(Effect("actor", Op.RELEASE, "train_groups")))
    assert due == (Effect("actor", Op.KILL),)
    world = apply(system, world, Move("start", ("critic",)))
    with pytest.raises(Refused, match="the device is full"):
        apply(system, world, Move("wake", ("critic",)))
    world = advance(system, world, Confirmed("actor"))
    world = apply(system, world, Move("wake", ("critic",)))
    assert system.get(world, "critic").state == State.AWAKE


def test_two_workers_of_a_device_cannot_begin_together_what_fits_only_alone_row_26() -> None:
    system, world = at("disaggregated_critic", "rollout")
    with pytest.raises(Refused, match="the device is full"):
        advance(system, world, Begin("wake", ("actor", "critic")))


def test_a_connect_that_fails_at_one_end_fails_at_all_and_keeps_the_weights() -> None:
    system, world = at("disaggregated", "sync")
    world = apply(system, world, Move("disconnect", ENDS))
    world = advance(system, world, Begin("connect", ENDS))
    world = advance(system, world, Done(Effect("actor", Op.ACQUIRE, "link", 2)))
    world = advance(system, world, Failed(Effect("rollout-0", Op.ACQUIRE, "link", 2)))
    world = settle(system, world)
    assert {system.get(world, n).state for n in ENDS} == {State.AWAKE}
    assert all("weights" in system.get(world, n).held for n in ENDS)
    assert world.links[0].state in (LinkState.DOWN, LinkState.BROKEN)


def test_a_connect_takes_every_live_end_row_32() -> None:
    system, world = at("disaggregated", "sync")
    world = apply(system, world, Move("disconnect", ENDS))
    with pytest.raises(Refused, match="moves all of"):
        advance(system, world, Begin("connect", ("actor", "rollout-0")))
    world = advance(system, world, Died("rollout-1"))
    with pytest.raises(Refused, match="rollout-1 is disconnected"):
        advance(system, world, Begin("connect", ENDS))


def test_a_peers_death_severs_the_link_and_costs_the_survivors_no_weights() -> None:
    system, world = at("disaggregated", "sync")
    world = advance(system, world, Died("rollout-1"))
    assert not system.lease(world, "actor", "link")
    for name in ("actor", "rollout-0"):
        world = settle(system, advance(system, world, Sever(name, "link")))
        assert system.get(world, name).state == State.AWAKE
        assert "weights" in system.get(world, name).held


APART = ("actor", "critic", "rollout-0", "rollout-1")


def test_with_a_critic_at_the_link_no_end_has_it_without_the_others() -> None:
    """One resource, one epoch: no actor is connected to rollout workers and not to the critic."""
    system, world = at("disaggregated_critic_apart", "sync")
    assert world.links[0].members == {*APART}
    some = [ends for ends in combinations(APART, 3) if "actor" in ends]
    for trigger, here in (
        ("disconnect", world),
        ("connect", apply(system, world, Move("disconnect", APART))),
    ):
        for ends in some:
            with pytest.raises(Refused, match="moves all of"):
                advance(system, here, Begin(trigger, ends))


@pytest.mark.parametrize("dead", ["critic", "rollout-1", "actor"])
def test_any_ends_death_ends_the_lease_of_all_and_costs_nobody_its_weights(dead: str) -> None:
    system, world = at("disaggregated_critic_apart", "sync")
    before = {name: system.get(world, name).version for name in APART}
    world = advance(system, world, Died(dead))
    assert not any(system.lease(world, name, "link") for name in APART)
    for name in (name for name in APART if name != dead):
        world = settle(system, advance(system, world, Sever(name, "link")))
        assert system.get(world, name).state == State.AWAKE
        assert system.get(world, name).version == before[name]
    assert world.links[0].state == LinkState.DOWN


def test_values_are_sent_by_the_critic_and_the_actor_and_a_push_is_not_theirs() -> None:
    system, world = at("disaggregated_critic_apart", "sync")
    world = apply(system, world, Move("push", ENDS))
    versions = [system.get(world, name).version for name in APART]
    assert versions == [Version(1, 0), None, Version(1, 0), Version(1, 0)]
    with pytest.raises(Refused, match=r"moves all of \['actor', 'critic'\] together"):
        advance(system, world, Act("send_values", ("actor",)))
    # Values have no version: neither sending them nor failing to tears anybody's weights.
    for ok in (True, False):
        after = advance(system, world, Act("send_values", ("actor", "critic")))
        after = advance(system, after, Acted("send_values", ("actor", "critic"), ok))
        assert [system.get(after, name).version for name in APART] == versions


def test_values_wait_for_a_lease_that_is_good_at_every_end() -> None:
    system, world = at("disaggregated_critic_apart", "send")
    world = advance(system, world, Died("rollout-0"))
    with pytest.raises(Refused, match=r"`self.lease` is false"):
        advance(system, world, Act("send_values", ("actor", "critic")))


def test_a_sleeper_holds_no_communicator_and_reconnects_under_a_new_epoch_row_1() -> None:
    system, world = at("disaggregated_critic", "sync")
    first = max(system.get(world, "actor").epochs)
    with pytest.raises(Refused, match="connected has no 'sleep'"):
        advance(system, world, Begin("sleep", ("actor",)))
    for move in (Move("disconnect", ENDS), Move("sleep", ("actor",)), Move("wake", ("actor",))):
        world = apply(system, world, move)
        assert system.get(world, "actor").epochs == (0,)
    world = apply(system, world, Move("connect", ENDS))
    assert max(system.get(world, "actor").epochs) == first + 1


def test_a_second_sleep_is_a_typed_error_row_2() -> None:
    system, world = at("disaggregated_critic", "rollout")
    with pytest.raises(Refused, match="actor is sleeping and refuses 'sleep'"):
        advance(system, world, Begin("sleep", ("actor",)))


def test_a_report_of_an_old_epoch_raises_row_3() -> None:
    system, world = at("disaggregated", "sync")
    world = apply(system, world, Move("disconnect", ENDS))
    world = advance(system, world, Begin("connect", ENDS))
    with pytest.raises(LeaseExpired, match="epoch 1 is no longer good"):
        advance(system, world, Done(Effect("actor", Op.ACQUIRE, "link", 1)))


def test_training_and_a_push_wait_for_each_other_row_14() -> None:
    system, world = at("disaggregated", "sync")
    training = advance(system, world, Act("train", ("actor",)))
    with pytest.raises(Refused, match="in_flight == 0"):
        advance(system, training, Act("push", ENDS))
    with pytest.raises(Refused, match="in_flight == 0"):
        advance(system, advance(system, world, Act("push", ENDS)), Act("train", ("actor",)))


def test_a_second_wake_is_refused_row_16() -> None:
    system, world = at("disaggregated", "rollout")
    with pytest.raises(Refused, match="connected has no 'wake'"):
        advance(system, world, Begin("wake", ("rollout-0",)))


def test_a_connect_while_the_old_link_is_held_is_refused_row_22() -> None:
    system, world = at("disaggregated", "sync")
    with pytest.raises(Refused, match="connected has no 'connect'"):
        advance(system, world, Begin("connect", ENDS))


def test_a_push_within_a_push_is_refused_row_30() -> None:
    system, world = at("disaggregated", "sync")
    world = advance(system, world, Act("push", ENDS))
    with pytest.raises(Refused, match="in_flight == 0"):
        advance(system, world, Act("push", ENDS))


def test_a_failed_push_leaves_torn_weights_that_nobody_serves_row_35() -> None:
    system, world = at("disaggregated", "rollout")
    world = advance(system, world, Act("push", ENDS))
    world = advance(system, world, Acted("push", ENDS, ok=False))
    assert [system.get(world, n).version for n in ENDS] == [Version(1, 0), None, None]
    with pytest.raises(Refused, match=r"self\.version == actor\.version"):
        advance(system, world, Act("generate", ("rollout-0",)))
    world = apply(system, world, Move("push", ENDS))
    assert apply(system, world, Move("generate", ("rollout-0",))) == world


def test_a_push_that_returns_after_a_members_death_does_not_count() -> None:
    system, world = at("disaggregated", "rollout")
    world = advance(system, world, Act("push", ENDS))
    world = advance(system, world, Died("rollout-1"))
    world = advance(system, world, Acted("push", ("actor", "rollout-0")))
    assert system.get(world, "rollout-0").version is None


def test_a_restarted_actor_begins_a_lineage_that_old_weights_do_not_match_row_31() -> None:
    system, world = at("disaggregated", "rollout")
    world = advance(system, advance(system, world, Died("actor")), Confirmed("actor"))
    world = settle(system, advance(system, world, Begin("start", ("actor",))))
    assert system.get(world, "actor").version == Version(2, 0)
    assert system.get(world, "rollout-0").version == Version(1, 0)
    with pytest.raises(Refused, match=r"self\.lineage == actor\.lineage"):
        advance(system, world, Act("generate", ("rollout-0",)))


def test_colocated_nobody_acquires_before_all_have_released() -> None:
    system, world = at("colocated_critic", "policy")
    world = advance(system, world, Begin("connect", ENDS))
    assert [str(e) for e in enabled(system, world)] == ["release optimizer"]
    world, due = step(system, world, Done(enabled(system, world)[0]))
    assert [str(e) for e in due] == ["acquire weights", "acquire weights"]
