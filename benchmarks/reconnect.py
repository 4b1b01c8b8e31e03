"""How long two processes take to come apart and to meet again, by each way that there is.

    python -m benchmarks.reconnect --beside torchft --result FILE      gloo, on the CPU
    python -m benchmarks.reconnect --backend nccl --result FILE        on one or two devices

``destroy`` closes the lease and opens the next epoch's; ``abort`` revokes it first, as a fault
does; ``suspend`` (NCCL 2.29.7 or newer) has NCCL give the memory back and take it again, and keeps
the communicator. Each reconnect ends with an all-reduce over the new group. torchft 0.2.0's gloo
group is reconfigured in turn with ours, in the same processes. Seconds are medians over the epochs.
"""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

from benchmarks.machine import write
from fsm_trainer.groups.lease import Lease, Membership
from fsm_trainer.groups.rendezvous import Address, Rendezvous

# Seconds; a process that is late by more than this is broken.
DEADLINE = 120.0
# What ncclCommSuspend shall give back: memory.
SUSPEND_MEMORY = 1


class Member:
    """One of the two; each way yields after it has come apart, and after it has met again."""

    def __init__(self, rank: int, backend: str, store: Address) -> None:
        import torch

        self.rank, self.backend, self.store, self.epoch = rank, backend, store, 0
        self.device = "cpu"
        if backend == "nccl":
            self.device = f"cuda:{rank % torch.cuda.device_count()}"
            torch.cuda.set_device(self.device)
        self.tensor = torch.ones(4, device=self.device)
        self.lease = self.open()

    def open(self) -> Lease:
        """The next epoch's lease, used once."""
        self.epoch += 1
        names = ("one", "other")
        place = Membership("bench", self.epoch, self.rank, 2, names, self.backend, self.store, 60.0)
        lease = Lease.open(place, self.device)
        self.use(lease)
        return lease

    def use(self, lease: Lease) -> None:
        """An all-reduce that has arrived."""
        lease.all_reduce(self.tensor)
        if self.backend == "nccl":
            import torch

            torch.cuda.synchronize()

    def destroy(self) -> Iterator[None]:
        """As a fault-free transition does."""
        self.lease.close()
        yield
        self.lease = self.open()
        yield

    def abort(self) -> Iterator[None]:
        """As a fault does."""
        self.lease.revoke("the benchmark aborts it")
        self.lease.close()
        yield
        self.lease = self.open()
        yield

    def suspend(self) -> Iterator[None]:
        """Keep the communicator, without its memory."""
        assert self.lease._group is not None
        communicator = ctypes.c_void_p(self.lease._group.backend._comm_ptr())
        library: Any = ctypes.CDLL(None)
        _succeed("ncclCommSuspend", library.ncclCommSuspend(communicator, SUSPEND_MEMORY))
        yield
        _succeed("ncclCommResume", library.ncclCommResume(communicator))
        self.use(self.lease)
        yield

    def torchft(self) -> Iterator[None]:
        """A peer's reconfiguration, which ends the group before."""
        from datetime import timedelta

        import torch
        from torchft.process_group import ProcessGroupGloo

        if not hasattr(self, "other"):
            self.other = ProcessGroupGloo(timeout=timedelta(seconds=20))
        yield
        self.epoch += 1
        where = f"{self.store[0]}:{self.store[1]}/torchft{self.epoch}"
        self.other.configure(where, f"rank {self.rank}", self.rank, 2)
        self.other.allreduce([self.tensor], torch.distributed.ReduceOp.SUM).wait()
        yield


def _succeed(call: str, code: int) -> None:
    if code:
        raise RuntimeError(f"{call} answers {code}")


def free_bytes(device: str) -> int:
    """What a device has left."""
    import torch

    return int(torch.cuda.mem_get_info(device)[0]) if device != "cpu" else 0


def member(
    rank: int,
    backend: str,
    ways: list[str],
    epochs: int,
    store: Address,
    both: Barrier,
    answers: Queue[Any],
) -> None:
    """Go each way in turn, ``epochs`` times; answers with the seconds, the first ones left out."""
    import torch

    torch.set_num_threads(1)
    me = Member(rank, backend, store)
    seconds: dict[str, list[tuple[float, float]]] = defaultdict(list)
    given_back: dict[str, int] = {}
    for epoch in range(epochs + 1):
        for way in ways:
            steps: Callable[[], Iterator[None]] = getattr(me, way)
            walk, spent, before = steps(), [], free_bytes(me.device)
            for _ in range(2):
                both.wait(DEADLINE)
                began = time.perf_counter()
                next(walk)
                spent.append(time.perf_counter() - began)
                both.wait(DEADLINE)
                given_back.setdefault(way, free_bytes(me.device) - before)
            if epoch:  # the first one imports, and connects to the store: a run does that once
                seconds[way].append((spent[0], spent[1]))
    me.lease.close()
    answers.put((rank, dict(seconds), given_back))


def main() -> None:
    """Run, print, and write the result."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--epochs", type=int, default=20)
    options.add_argument("--backend", choices=("gloo", "nccl"), default="gloo")
    options.add_argument("--beside", choices=("torchft",))
    options.add_argument("--result", type=Path)
    chosen = options.parse_args()
    ways = ["destroy", "abort"] + (["suspend"] if chosen.backend == "nccl" else [])
    ways += [chosen.beside] if chosen.beside else []
    context = multiprocessing.get_context("spawn")
    both, answers = context.Barrier(2), context.Queue()
    with Rendezvous.bind() as rendezvous:
        store = rendezvous.address
        processes = [
            context.Process(
                target=member,
                args=(rank, chosen.backend, ways, chosen.epochs, store, both, answers),
                daemon=True,
            )
            for rank in range(2)
        ]
        for process in processes:
            process.start()
        told = sorted(answers.get(timeout=DEADLINE + 3 * chosen.epochs) for _ in processes)
        for process in processes:
            process.join(DEADLINE)
    result: dict[str, Any] = {"benchmark": "reconnect", "backend": chosen.backend}
    for way in ways:
        # Each half is as slow as the slower of the two.
        halves = [
            tuple(map(max, zip(*pair, strict=True)))
            for pair in zip(*(seconds[way] for _, seconds, _ in told), strict=True)
        ]
        whole = sorted(apart + again for apart, again in halves)
        result[way] = {
            "disconnect": round(statistics.median(apart for apart, _ in halves), 4),
            "reconnect": round(statistics.median(again for _, again in halves), 4),
            "both": round(statistics.median(whole), 4),
            "both_least_and_most": [round(whole[0], 4), round(whole[-1], 4)],
        }
        if chosen.backend == "nccl":
            result[way]["device_bytes_given_back"] = told[0][2][way]
    write(result | {"epochs": chosen.epochs}, chosen.result)


if __name__ == "__main__":
    main()
