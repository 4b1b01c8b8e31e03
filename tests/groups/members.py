"""What a member does in its own process; ``held`` is what it keeps between calls."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import torch

from fsm_trainer.groups.lease import Lease, Membership, open_all, registered_groups
from fsm_trainer.groups.rendezvous import connect

Held = dict[str, Any]


def open_lease(held: Held, membership: Membership) -> str:
    held["lease"] = Lease.open(membership)
    return "open"


def end_with_lease(held: Held) -> None:
    """Have something that goes when the lease is over."""
    held["gone"] = threading.Event()
    held["lease"].at_end(held["gone"].set)


def is_gone(held: Held) -> bool:
    return bool(held["gone"].wait(2.0))


def close_lease(held: Held) -> tuple[bool, float]:
    began = time.monotonic()
    held["lease"].close()
    held["lease"].close()
    return held["lease"].usable, time.monotonic() - began


def revoke(held: Held, why: str) -> float:
    began = time.monotonic()
    held["lease"].revoke(why)
    return time.monotonic() - began


def usable(held: Held) -> bool:
    return bool(held["lease"].usable)


def all_operations(held: Held) -> tuple[list[float], list[float], list[list[float]]]:
    lease: Lease = held["lease"]
    copied = torch.full((3,), float(lease.rank))
    lease.broadcast(copied, 1)
    summed = torch.tensor([1.0, 10.0]) * (lease.rank + 1)
    lease.all_reduce(summed)
    gathered = lease.all_gather(torch.tensor([float(lease.rank)]))
    lease.barrier()
    return copied.tolist(), summed.tolist(), [part.tolist() for part in gathered]


def broadcast(held: Held, count: int, source: int = 0, which: str = "lease") -> str:
    held[which].broadcast(torch.zeros(count), source)
    return "done"


def broadcasts_until_dead(held: Held, count: int, after: float) -> None:
    threading.Timer(after, os.kill, (os.getpid(), 9)).start()
    while True:
        held["lease"].broadcast(torch.zeros(count), 0)


def broadcasts_until_error(held: Held, count: int) -> None:
    while True:
        held["lease"].broadcast(torch.zeros(count), 0)


def churn(held: Held, memberships: list[Membership]) -> list[tuple[int, int]]:
    """Open, use and close one lease per membership; (threads, descriptors) after each."""
    counts = []
    for membership in memberships:
        with Lease.open(membership) as lease:
            lease.barrier()
        counts.append((len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))))
    return counts


def open_bundle(held: Held, memberships: list[Membership]) -> list[str]:
    leases = open_all(memberships)
    for lease in leases:
        lease.barrier()
        lease.close()
    return [lease.link for lease in leases]


def keep_bundle(held: Held, memberships: list[Membership]) -> str:
    held["bundle"] = {lease.membership.group: lease for lease in open_all(memberships)}
    return "open"


def use_of_bundle(held: Held, group: str) -> float:
    one = torch.ones(1)
    held["bundle"][group].all_reduce(one)
    return one.item()


def close_bundle(held: Held) -> None:
    for lease in held["bundle"].values():
        lease.close()


def clients_of_the_store(held: Held, membership: Membership) -> bool:
    first = connect(membership.store, 5.0, "somebody")
    return first is connect(membership.store, 5.0, "somebody")


def registered(held: Held) -> tuple[str, ...]:
    return registered_groups()


def keep_as(held: Held, name: str) -> None:
    held[name] = held["lease"]


def epoch(held: Held) -> int:
    return int(held["lease"].epoch)


def host(held: Held) -> Any:
    from fsm_trainer.groups.rendezvous import Rendezvous

    held["rendezvous"] = Rendezvous.bind()
    return held["rendezvous"].address


def sum_of_ones(held: Held) -> float:
    one = torch.ones(1)
    held["lease"].all_reduce(one)
    return one.item()


def ends_normally_after_revoke(held: Held) -> None:
    """What NCCL does after an abort: the work ends, and says nothing."""
    lease: Lease = held["lease"]
    pending = lease.start_broadcast(torch.zeros(4))
    wait = pending.poll

    def ends(work: Any, seconds: float) -> bool:
        lease.revoke("revoked meanwhile")
        return wait(work, 5.0)

    pending.poll = ends
    pending.wait()


def half_a_bundle(held: Held, memberships: list[Membership]) -> tuple[Any, Any, Any]:
    if "lease" in held:
        held["lease"].close()
    before = len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
    try:
        open_all(memberships)
    except Exception as error:
        said = type(error).__name__, str(error)
    time.sleep(0.3)
    return said, before, (len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")))
