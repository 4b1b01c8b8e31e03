"""Values over a lease: all members have the same bytes, or each learns why not."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fsm_trainer.sync.values import receive_values, send_values
from fsm_trainer.testing.processes import Member, Processes
from tests.groups import members

Held = dict[str, Any]
TIMEOUT, SLACK = 5.0, 2.5
"""Of an operation; and what a roll call on a busy machine may take beside it."""


def table() -> torch.Tensor:
    """Odd sizes, zeros of both signs, the smallest number, and what equals nothing."""
    values = torch.randn(33, 17, generator=torch.Generator().manual_seed(1))
    values[0, :4] = torch.tensor([-0.0, 0.0, 1e-45, float("nan")])
    return values


def send(held: Held, step: int) -> int:
    return send_values(held["lease"], step, table()).bytes


def receive(held: Held, step: int) -> bytes:
    return bytes(receive_values(held["lease"], step).numpy().tobytes())


def receive_another_bit(held: Held, step: int) -> None:
    """Receive a table in which a bit was flipped since it was sent."""
    lease = held["lease"]
    broadcast = lease.broadcast

    def spoilt(tensor: torch.Tensor, source: int = 0) -> None:
        broadcast(tensor, source)
        if tensor.dtype == torch.float32:
            tensor.view(torch.int32)[3, 3] ^= 1

    lease.broadcast = spoilt
    receive_values(lease, step)


def send_and_die(held: Held, step: int) -> None:
    held["lease"].broadcast(torch.tensor([step, 33, 17]))
    os.kill(os.getpid(), 9)


@pytest.fixture
def critic_and_actor(world: Processes) -> Iterator[list[Member]]:
    """A critic, and two ranks of an actor, on one lease."""
    processes = world.members(3)
    places = world.memberships(3, TIMEOUT)
    both = zip(processes, places, strict=True)
    for answer in [process.call(members.open_lease, place) for process, place in both]:
        assert answer.get() == "open"
    yield processes
    for process in processes:
        if process.alive:
            process.call(members.close_lease).get()


def test_every_rank_of_the_actor_has_the_bytes_that_were_sent(
    critic_and_actor: list[Member],
) -> None:
    critic, *actor = critic_and_actor
    for step in (1, 2):
        answers = [critic.call(send, step), *(rank.call(receive, step) for rank in actor)]
        sent, *received = [answer.get() for answer in answers]
        assert sent == 33 * 17 * 4
        assert received == [table().numpy().tobytes()] * 2


def test_values_of_another_step_are_refused_and_end_the_lease(
    critic_and_actor: list[Member],
) -> None:
    critic, one, two = critic_and_actor
    answers = [critic.call(send, 4), one.call(receive, 4), two.call(receive, 5)]
    *_, (kind, why, _) = [answer.get() for answer in answers]
    assert kind == "SelfCheckFailed"
    assert "is at step 5 and got the values of step 4" in why
    assert critic.call(send, 5).get().kind == "LeaseExpired"


def test_a_flipped_bit_is_seen_by_all(critic_and_actor: list[Member]) -> None:
    critic, one, two = critic_and_actor
    answers = [critic.call(send, 1), one.call(receive, 1), two.call(receive_another_bit, 1)]
    for kind, why, _ in [answer.get() for answer in answers]:
        assert kind == "SelfCheckFailed"
        assert "member-2 got other values than member-0 sent" in why


def test_a_critic_that_dies_in_it_is_named_within_the_deadline(
    critic_and_actor: list[Member],
) -> None:
    critic, *actor = critic_and_actor
    began = time.monotonic()
    critic.call(send_and_die, 1)
    lost = [answer.get() for answer in [rank.call(receive, 1) for rank in actor]]
    assert {kind for kind, _, _ in lost} <= {"PeerLost", "LeaseExpired"}
    assert any("no word from member-0" in why for _, why, _ in lost)
    assert time.monotonic() - began < TIMEOUT + SLACK
