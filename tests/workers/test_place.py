"""Who stands where in the groups of a link."""

from __future__ import annotations

from pathlib import Path

from fsm_trainer.groups.membership import Membership
from fsm_trainer.groups.rendezvous import Address
from fsm_trainer.machine.events import Begin, Effect, Op
from fsm_trainer.machine.names import Role
from fsm_trainer.machine.planner import Move, apply, plan
from fsm_trainer.machine.spec import load
from fsm_trainer.machine.step import advance
from fsm_trainer.machine.world import System
from fsm_trainer.workers.host import Place

STORE = Address("127.0.0.1", 1)


def places(schedule: str, name: str, rank: int, ranks: int = 2) -> dict[str, Membership]:
    """The memberships of a process, by group, as all ends begin to connect."""
    system = System.of(load(schedule), rollouts=2)
    world = system.initial()
    for move in plan(system, world, system.spec.phases["sync"]):
        if move.name == "connect":
            world = advance(system, world, Begin(move.name, move.workers))
            break
        world = apply(system, world, Move(move.name, move.workers))
    wide = {Role.ROLLOUT: 3, Role.ACTOR: ranks}
    place = Place(system, name, rank, ranks, STORE, 1.0, "gloo", Path(), wide, "ipc")
    effect = Effect(name, Op.ACQUIRE, "link", world.links[0].epoch)
    return {one.group: one for one in place.memberships(world, effect)}


ENGINES = tuple(f"rollout-{worker}/{index}" for worker in (0, 1) for index in (0, 1, 2))
VALUES = ("critic", "actor/0", "actor/1")


def test_rank_0_of_the_actor_alone_sends_to_the_engines() -> None:
    for schedule in ("disaggregated_critic", "disaggregated_critic_apart"):
        weights = places(schedule, "actor", 0)[""]
        assert (weights.members, weights.rank) == (("actor", *ENGINES), 0)
        assert "" not in places(schedule, "actor", 1)
        engine = places(schedule, "rollout-1", 0)
        assert [*engine] == [""]
        assert (engine[""].members, engine[""].rank) == (weights.members, 4)


def test_rank_0_of_a_critic_apart_sends_to_all_ranks_of_the_actor() -> None:
    found = {
        (name, rank): places("disaggregated_critic_apart", name, rank).get("critic")
        for name in ("critic", "actor")
        for rank in (0, 1)
    }
    assert found.pop(("critic", 1)) is None
    ranks = {process: one.rank for process, one in found.items() if one is not None}
    assert ranks == {("critic", 0): 0, ("actor", 0): 1, ("actor", 1): 2}
    assert {one.members for one in found.values() if one is not None} == {VALUES}


def test_groups_of_a_link_share_the_epoch_and_only_weights_leave_them() -> None:
    both = places("disaggregated_critic_apart", "actor", 0)
    assert {group: (one.link, one.epoch, one.kind) for group, one in both.items()} == {
        "": ("link", 1, "ipc"),
        "critic": ("link", 1, "group"),
    }
