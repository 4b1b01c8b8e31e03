"""Links in any order of use and faults: bounded, torn or complete, and always a way back.

``--rounds`` sets how many; ``--result FILE`` writes what the faults cost.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.machine import write
from fsm_trainer.engines.contract import Request, Tag
from fsm_trainer.machine.errors import EngineFailed, FsmError, LeaseExpired, PeerLost, Refused
from fsm_trainer.sync.checksums import checksums
from tests.contract import weights as peer
from tests.contract.conftest import AT_ONCE, Bench, background, kill, until

# Seconds: the link's deadline, and how long a fault waits within a push before it comes.
DEADLINE, WITHIN = 4.0, 0.1
ONE = [Request("one", (5, 6, 7), 3)]

pytestmark = pytest.mark.timeout(1200)


class Fuzz:
    """A bench on which acts follow each other; after each the way back is gone and timed."""

    def __init__(self, bench: Bench, seed: int) -> None:
        self.bench, self.engine = bench, bench.engine
        self.random, self.seed = random.Random(seed), 100
        self.done = Counter[str]()
        self.seconds = defaultdict[str, list[float]](list)

    def connect(self) -> None:
        self.bench.connect(timeout=DEADLINE)

    def push(self) -> None:
        """A complete one, to the bit."""
        self.seed += 1
        version = self.bench.push(self.seed)
        sent = checksums(peer.weights(self.engine.specs(), self.seed).items())
        assert self.engine.checksums() == sent
        assert self.engine.version() == version

    def begun(self) -> Future[Any]:
        """A push that the engine waits for, and the sender never completes."""
        receiving = background(self.bench.receive)
        time.sleep(self.random.uniform(0, WITHIN))
        return receiving

    def torn(self, receiving: Future[Any], limit: float, *kinds: type[FsmError]) -> None:
        """The push ended within the limit, and what it left is not served."""
        error = receiving.exception(limit)
        assert isinstance(error, kinds), error
        assert self.engine.version() is None
        with pytest.raises(Refused, match="torn"):
            self.engine.generate(ONE)

    # What may happen over a link that is open. Each leaves it open, or returns when it broke.

    def pushes(self) -> None:
        for _ in range(self.random.randint(1, 3)):
            self.push()

    def reconnect(self) -> None:
        self.bench.disconnect()
        self.connect()

    def old_epoch(self) -> None:
        """A late message from before."""
        old = self.bench.memberships(DEADLINE)[1]
        self.reconnect()
        self.bench.disconnect()
        with pytest.raises(LeaseExpired):
            self.engine.join(old)
        self.connect()

    def double_join(self) -> None:
        with pytest.raises(Refused):
            self.engine.join(self.bench.memberships(DEADLINE)[1])

    def sender_killed(self) -> float:
        receiving = self.begun()
        self.bench.sender.kill()
        at = time.monotonic()
        self.torn(receiving, DEADLINE + 3 * AT_ONCE, PeerLost, LeaseExpired)
        self.engine.leave()
        return at

    def sender_dies_midway(self) -> float:
        at = time.monotonic()
        self.bench.sender.call(peer.die_within_a_push, self.engine.specs(), 0)
        self.torn(background(self.bench.receive), DEADLINE + 3 * AT_ONCE, PeerLost, LeaseExpired)
        self.engine.leave()
        return at

    def revoked_by_the_engine(self) -> float:
        receiving = self.begun()
        at = time.monotonic()
        self.engine.revoke()
        self.torn(receiving, AT_ONCE, LeaseExpired)
        self.engine.leave()
        self.bench.sender.call(peer.leave).get()
        return at

    def revoked_by_the_sender(self) -> float:
        receiving = self.begun()
        at = time.monotonic()
        self.bench.sender.call(peer.revoke).get()
        self.torn(receiving, 2 * AT_ONCE, LeaseExpired)
        self.engine.leave()
        self.bench.sender.call(peer.leave).get()
        return at

    def engine_killed(self) -> float:
        """Its worker knows at once, and has the trainer abort."""
        sender = self.bench.sender
        pushing = sender.call(peer.push_and_wait, self.engine.specs())
        receiving = self.begun()
        pid = self.engine.health().pid
        at = time.monotonic()
        kill(pid)
        assert isinstance(receiving.exception(AT_ONCE), EngineFailed)
        sender.call(peer.revoke, thread="control")
        name, text, _ = pushing.get(2 * AT_ONCE)
        assert name in ("PeerLost", "LeaseExpired"), text
        self.seconds["trainer_aborted_after_the_engine_was_killed"].append(time.monotonic() - at)
        self.bench.sender.call(peer.leave).get()
        self.engine.stop()
        self.engine.start()
        for tag in Tag:
            self.engine.acquire(tag)
        return at

    def round(self, acts: dict[Callable[[], float | None], int]) -> None:
        [act] = self.random.choices([*acts], [*acts.values()])
        self.done[act.__name__] += 1
        broken_at = act()
        if broken_at is not None:
            self.connect()
            self.push()
            name = f"next_complete_push_after_{act.__name__}"
            self.seconds[name].append(time.monotonic() - broken_at)


def test_any_order_of_use_and_faults_has_a_way_back(
    awake: Bench, request: pytest.FixtureRequest
) -> None:
    rounds, result = (request.config.getoption(name) for name in ("--rounds", "--result"))
    fuzz = Fuzz(awake, seed=rounds)
    slow_start = "sglang" in request.node.name
    acts: dict[Callable[[], float | None], int] = {
        fuzz.pushes: 3,
        fuzz.reconnect: 3,
        fuzz.old_epoch: 1,
        fuzz.double_join: 1,
        fuzz.sender_killed: 1,
        fuzz.sender_dies_midway: 1,
        fuzz.revoked_by_the_engine: 2,
        fuzz.revoked_by_the_sender: 2,
        fuzz.engine_killed: 0 if slow_start else 1,
    }
    fuzz.connect()
    fuzz.push()
    held = None
    for number in range(rounds):
        if slow_start and number in (rounds // 3, 2 * rounds // 3) and rounds >= 20:
            fuzz.round({fuzz.engine_killed: 1})
        fuzz.round(acts)
        if number == rounds // 4:
            held = kept()
    awake.disconnect()
    if held is not None:  # threads of leases that were cut off end within the deadline
        until(lambda: all(now <= then + 2 for now, then in zip(kept(), held, strict=True)), 20)
    if result:
        write(report(fuzz, awake, rounds), Path(result))


def kept() -> tuple[int, int]:
    """Threads and descriptors of this process, where the engine's worker lives."""
    process = psutil.Process()
    return process.num_threads(), process.num_fds()


def report(fuzz: Fuzz, bench: Bench, rounds: int) -> dict[str, Any]:
    return {
        "benchmark": "fuzzed rounds",
        "engine": type(bench.engine).__name__,
        "rounds": rounds,
        "deadline": DEADLINE,
        "devices": {"engine": bench.site.device, "sender": bench.site.sender},
        "acts": dict(fuzz.done),
        "median_and_most_seconds": {
            name: [round(statistics.median(each), 3), round(max(each), 3)]
            for name, each in sorted(fuzz.seconds.items())
        },
    }
