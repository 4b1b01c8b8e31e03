"""Leases over real processes: fenced, bounded, freed."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from fsm_trainer.groups.membership import Membership
from fsm_trainer.groups.rendezvous import Address, Rendezvous
from fsm_trainer.testing.processes import Answer, Processes
from tests.groups import members

# Seconds that may pass beyond a lease's timeout: the roll call, and a busy machine.
SLACK = 2.5


def opened(world: Processes, size: int, timeout: float = 5.0) -> list[Any]:
    processes = world.members(size)
    places = world.memberships(size, timeout)
    answers = [
        process.call(members.open_lease, place)
        for process, place in zip(processes, places, strict=True)
    ]
    assert [answer.get() for answer in answers] == ["open"] * size
    return processes


def everywhere(processes: list[Any], function: Callable[..., Any], *args: Any) -> list[Answer]:
    return [process.call(function, *args) for process in processes]


def results(answers: list[Answer], timeout: float = 20.0) -> list[Any]:
    return [answer.get(timeout) for answer in answers]


def test_all_operations_of_three_members_agree(world: Processes) -> None:
    processes = opened(world, 3)

    got = results(everywhere(processes, members.all_operations))

    # Broadcast from rank 1; 1·(1+2+3) and 10·(1+2+3); ranks in order.
    assert got == [([1.0] * 3, [6.0, 60.0], [[0.0], [1.0], [2.0]])] * 3


def test_torch_has_no_group_registered_while_a_lease_is_open(world: Processes) -> None:
    processes = opened(world, 2)

    assert results(everywhere(processes, members.registered)) == [(), ()]


def test_what_belongs_to_a_lease_goes_with_it_however_it_ends(world: Processes) -> None:
    for end in (members.close_lease, members.revoke):
        processes = opened(world, 2)
        results(everywhere(processes, members.end_with_lease))

        processes[0].call(end, *(["a test"] if end is members.revoke else [])).get()

        # A revocation ends it for all members, a close for one.
        ended = processes if end is members.revoke else processes[:1]
        assert results(everywhere(ended, members.is_gone)) == [True] * len(ended)
        results(everywhere(processes, members.end_with_lease) if end is members.revoke else [])
        assert processes[0].call(members.is_gone).get()


def test_where_weights_take_another_way_the_group_is_gloos_whatever_the_backend(
    world: Processes,
) -> None:
    processes = world.members(2)
    places = [replace(p, backend="nccl", kind="ipc") for p in world.memberships(2)]

    opening = [p.call(members.open_lease, m) for p, m in zip(processes, places, strict=True)]

    assert results(opening) == ["open", "open"]
    assert results(everywhere(processes, members.sum_of_ones)) == [2.0, 2.0]


def test_a_closed_lease_refuses_at_once(world: Processes) -> None:
    processes = opened(world, 2)
    closed = results(everywhere(processes, members.close_lease))

    name, text, seconds = processes[0].call(members.broadcast, 4).get()

    assert [usable for usable, _ in closed] == [False, False]
    assert (name, seconds < 0.5) == ("LeaseExpired", True)
    assert "it was closed" in text


def test_opening_a_newer_epoch_ends_the_older_lease_of_the_process(world: Processes) -> None:
    process = opened(world, 1)[0]
    process.call(members.keep_as, "stale").get()
    process.call(members.open_lease, world.memberships(1)[0]).get()

    name, text, seconds = process.call(members.broadcast, 4, 0, "stale").get()

    assert (name, seconds < 0.5) == ("LeaseExpired", True)
    assert "was opened" in text


def test_an_epoch_is_opened_once(world: Processes) -> None:
    process = world.members(1)[0]
    place = world.memberships(1)[0]
    process.call(members.open_lease, place).get()

    name, text, seconds = process.call(members.open_lease, place).get()

    assert (name, seconds < 0.5) == ("LeaseExpired", True)
    assert f"epoch {place.epoch}" in text


def test_a_replaced_process_cannot_take_a_place_that_was_opened(world: Processes) -> None:
    first, second = world.members(2)
    place = world.memberships(1)[0]
    first.call(members.open_lease, place).get()

    name, text, _ = second.call(members.open_lease, place).get()

    assert name == "LeaseExpired"
    assert "opened before" in text


def test_members_that_were_told_different_members_refuse(world: Processes) -> None:
    processes = world.members(2)
    one, two = world.memberships(2)
    two = replace(two, members=("member-0", "somebody-else"))

    got = results(
        [processes[0].call(members.open_lease, one), processes[1].call(members.open_lease, two)]
    )

    assert {name for name, _, _ in got} == {"LeaseExpired"}
    assert "somebody-else" in got[0][1]


def test_a_missing_member_is_named_within_the_timeout(world: Processes) -> None:
    processes = world.members(2)
    places = world.memberships(3, timeout=1.0)

    got = results([p.call(members.open_lease, m) for p, m in zip(processes, places, strict=False)])

    for name, text, seconds in got:
        assert name == "PeerLost"
        assert "member-2 did not arrive" in text
        assert 0.9 < seconds < 1.0 + SLACK


def test_an_absent_rendezvous_is_an_error_within_the_timeout(world: Processes) -> None:
    with Rendezvous.bind() as gone:
        address = Address(*gone.address)
    place = replace(world.memberships(1, timeout=1.0)[0], store=address)

    name, text, seconds = world.members(1)[0].call(members.open_lease, place).get()

    assert name == "PeerLost"
    assert str(address) in text
    assert seconds < 1.0 + SLACK


def test_a_stopped_rendezvous_cannot_hang_an_open(world: Processes) -> None:
    host, guest = world.members(2)
    address = host.call(members.host).get()
    place = replace(world.memberships(1, timeout=1.0)[0], store=address)
    host.kill(signal.SIGSTOP)

    name, text, seconds = guest.call(members.open_lease, place).get()
    host.kill()

    assert name == "PeerLost"
    assert "member-0 is stuck" in text
    assert seconds < 1.0 + SLACK


def test_revoke_from_another_thread_ends_a_blocked_broadcast_for_all(world: Processes) -> None:
    processes = opened(world, 3)
    # Rank 0, the source, never comes: ranks 1 and 2 wait for it.
    blocked = everywhere(processes[1:], members.broadcast, 1_000_000)
    time.sleep(0.3)

    processes[1].call(members.revoke, "the driver says so", thread="control").get()
    began = time.monotonic()
    got = results(blocked)

    for name, text, _ in got:
        assert name == "LeaseExpired"
        assert "the driver says so" in text
    # Far less than the operation's timeout of 5 s.
    assert time.monotonic() - began < 3.0
    # The source, idle until now, hears of it within a watch interval.
    while processes[0].call(members.usable).get() and time.monotonic() - began < 3.0:
        time.sleep(0.05)
    assert processes[0].call(members.broadcast, 4).get()[0] == "LeaseExpired"


def test_the_driver_ends_an_epoch_without_calling_its_members(world: Processes) -> None:
    processes = opened(world, 2)
    epoch = processes[0].call(members.epoch).get()
    blocked = processes[1].call(members.broadcast, 1_000_000)

    world.rendezvous.revoke("weights", epoch, "member-0 is declared dead")
    name, text, seconds = blocked.get()

    assert name == "LeaseExpired"
    assert "declared dead" in text
    assert seconds < 3.0


def test_a_killed_peer_is_named_and_survivors_rebuild_under_a_new_epoch(world: Processes) -> None:
    processes = opened(world, 3, timeout=3.0)
    survivors = everywhere(processes[:2], members.broadcasts_until_error, 4_000_000)
    processes[2].call(members.broadcasts_until_dead, 4_000_000, 0.4)

    began = time.monotonic()
    got = results(survivors)
    took = time.monotonic() - began
    places = world.memberships(2)
    rebuilt = results(
        [p.call(members.open_lease, m) for p, m in zip(processes[:2], places, strict=True)]
    )

    for name, text, _ in got:
        # LeaseExpired, if the other one's error came between two of its broadcasts.
        assert name in ("PeerLost", "LeaseExpired")
        assert "no word from member-2;" in text
    assert took < 3.0 + SLACK
    assert rebuilt == ["open", "open"]
    assert results(everywhere(processes[:2], members.sum_of_ones)) == [2.0, 2.0]


def test_a_stopped_peer_costs_the_timeout_and_no_more(world: Processes) -> None:
    processes = opened(world, 2, timeout=1.5)
    processes[1].kill(signal.SIGSTOP)

    name, text, seconds = processes[0].call(members.sum_of_ones).get()
    processes[1].kill()

    assert name == "PeerLost"
    assert "no word from member-1;" in text
    assert 1.4 < seconds < 1.5 + SLACK


def test_a_result_is_refused_when_the_lease_ended_meanwhile(world: Processes) -> None:
    process = opened(world, 1)[0]

    name, text, _ = process.call(members.ends_normally_after_revoke).get()

    assert name == "LeaseExpired"
    assert "meanwhile" in text


def test_a_hundred_epochs_leave_threads_and_descriptors_flat(world: Processes) -> None:
    processes = world.members(2)
    epochs = [world.memberships(2) for _ in range(100)]

    got = results(
        [
            process.call(members.churn, [places[rank] for places in epochs])
            for rank, process in enumerate(processes)
        ],
        timeout=60,
    )

    for counts in got:
        early, late = counts[4], counts[-1]
        assert late[0] <= early[0] + 1
        assert late[1] <= early[1] + 2
    assert results(everywhere(processes, members.registered)) == [(), ()]


def test_a_bundle_told_in_opposite_orders_opens_row_21(world: Processes) -> None:
    processes = world.members(2)
    links = [world.memberships(2, link=f"bundle/{index}") for index in (7, 8, 9)]
    forward = [places[0] for places in links]
    backward = [places[1] for places in reversed(links)]

    got = results(
        [
            processes[0].call(members.open_bundle, forward),
            processes[1].call(members.open_bundle, backward),
        ]
    )

    assert got == [["bundle/7", "bundle/8", "bundle/9"]] * 2


def test_a_bundle_that_fails_half_way_leaves_nothing_open(world: Processes) -> None:
    process = world.members(1)[0]
    good = world.memberships(1, link="half/0")[0]
    bad = world.memberships(2, timeout=0.5, link="half/1")[0]

    (name, text), before, after = process.call(members.half_a_bundle, [good, bad]).get()

    assert name == "PeerLost"
    assert "member-1 did not arrive" in text
    # The lease's threads and sockets are gone. What stays: gloo's event loop and listener, if this
    # was the process's first group (1 thread, 3 descriptors), and two clients of the store.
    assert after[0] <= before[0] + 1
    assert after[1] <= before[1] + 3 + 2


def groups_of_a_link(world: Processes) -> list[list[Membership]]:
    """By process: the hub is in both groups of one epoch, the two others in one each."""
    hub, spoke = world.memberships(2, link="link")
    sink, critic = (replace(one, group="critic", epoch=hub.epoch) for one in (hub, spoke))
    return [[sink, hub], [spoke], [critic]]


def test_the_groups_of_a_link_are_apart_and_end_as_one(world: Processes) -> None:
    processes = world.members(3)
    told = zip(processes, groups_of_a_link(world), strict=True)
    opened = [process.call(members.keep_bundle, places) for process, places in told]
    assert results(opened) == ["open"] * 3
    hub, spoke, critic = processes
    for group, other in (("", spoke), ("critic", critic)):
        both = [process.call(members.use_of_bundle, group) for process in (hub, other)]
        assert results(both) == [2.0, 2.0]

    critic.kill()

    assert hub.call(members.use_of_bundle, "critic").get().kind == "PeerLost"
    time.sleep(SLACK)  # nobody is gone in the other group: it ends all the same
    both = [process.call(members.use_of_bundle, "") for process in (hub, spoke)]
    assert [failure.kind for failure in results(both)] == ["LeaseExpired"] * 2
    results([process.call(members.close_bundle) for process in (hub, spoke)])


def test_the_drivers_word_ends_all_groups_of_a_link(world: Processes) -> None:
    processes, places = world.members(3), groups_of_a_link(world)
    told = zip(processes, places, strict=True)
    results([process.call(members.keep_bundle, mine) for process, mine in told])

    world.rendezvous.revoke("link", places[0][0].epoch, "a member of it died")
    time.sleep(SLACK)

    for process, mine in zip(processes, places, strict=True):
        for place in mine:
            assert process.call(members.use_of_bundle, place.group).get().kind == "LeaseExpired"
    results([process.call(members.close_bundle) for process in processes])


def test_who_binds_picks_the_port_and_keeps_it_over_all_epochs_row_33(world: Processes) -> None:
    with Rendezvous.bind() as ours, Rendezvous.bind() as another:
        assert ours.address.port != another.address.port
        for epoch in (1, 2):
            [place] = world.memberships(1, epoch=epoch, link="ports")
            place = replace(place, store=ours.address)
            member = world.members(1)[0]
            assert member.call(members.open_lease, place).get() == "open"
            with socket.socket() as late, pytest.raises(OSError, match="in use"):
                late.bind(ours.address)
            member.call(members.close_lease).get()


def test_a_process_has_one_client_of_the_store_over_all_epochs(world: Processes) -> None:
    process = world.members(1)[0]
    before = world.memberships(1)[0]

    assert process.call(members.clients_of_the_store, before).get() is True
