"""How long a reconnect takes: open a lease, one all-reduce, close it; gloo, two processes.

Prints one JSON line. A peer to compare with: torchft 0.2.0 reconfigures gloo and all-reduces in
22 ms (median, 2 ranks, same kind of machine), without closing.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier

from fsm_trainer.groups.lease import Lease, Membership
from fsm_trainer.groups.rendezvous import Address, Rendezvous

# Seconds; a process that is late by more than this is broken.
DEADLINE = 120.0


def member(
    rank: int, size: int, epochs: int, store: Address, start: Barrier, answers: Queue[list[float]]
) -> None:
    """Reconnect ``epochs`` times; answers with the seconds of each, the first one left out."""
    import torch

    torch.set_num_threads(1)
    names = tuple(f"member-{index}" for index in range(size))
    seconds = []
    for epoch in range(epochs + 1):
        place = Membership("bench", epoch, rank, size, names, "gloo", store, 20.0)
        start.wait(DEADLINE)
        began = time.perf_counter()
        with Lease.open(place) as lease:
            lease.all_reduce(torch.ones(4))
        seconds.append(time.perf_counter() - began)
    # The first one imports, and connects to the store: a run does that once.
    answers.put(seconds[1:])


def main() -> None:
    """Run and print."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--epochs", type=int, default=20)
    options.add_argument("--size", type=int, default=2)
    chosen = options.parse_args()
    context = multiprocessing.get_context("spawn")
    start, answers = context.Barrier(chosen.size), context.Queue()
    with Rendezvous.bind() as rendezvous:
        processes = [
            context.Process(
                target=member,
                args=(rank, chosen.size, chosen.epochs, rendezvous.address, start, answers),
            )
            for rank in range(chosen.size)
        ]
        for process in processes:
            process.start()
        all_seconds = [answers.get(timeout=DEADLINE) for _ in processes]
        for process in processes:
            process.join(DEADLINE)
    # An epoch is as slow as its slowest member.
    milliseconds = sorted(1e3 * max(epoch) for epoch in zip(*all_seconds, strict=True))
    print(
        json.dumps(
            {
                "benchmark": "reconnect",
                "backend": "gloo",
                "size": chosen.size,
                "epochs": chosen.epochs,
                "min_ms": round(milliseconds[0], 1),
                "median_ms": round(statistics.median(milliseconds), 1),
                "max_ms": round(milliseconds[-1], 1),
            }
        )
    )


if __name__ == "__main__":
    main()
