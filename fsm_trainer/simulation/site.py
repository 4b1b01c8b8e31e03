"""The simulated site: clock, chance, faults, processes and the groups in which they meet.

It is the truth of a run: who really holds what, whatever the driver believes. Properties are
asked of it, see :mod:`fsm_trainer.simulation.properties`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random

from fsm_trainer.machine.errors import FsmError, LeaseExpired, PeerLost
from fsm_trainer.machine.world import System, World
from fsm_trainer.simulation.faults import Fault, What
from fsm_trainer.simulation.process import Process, Weights
from fsm_trainer.simulation.properties import violated

LINK_SECONDS = 60.0
"""How long an end of a link waits for the others."""


class Violated(Exception):
    """Raised when a property does not hold."""


class Site:
    """Where the simulated processes run.

    Args:
        system: who takes part.
        random: of latencies, durations and the way in which a death shows.
        faults: what goes wrong.
    """

    def __init__(self, system: System, random: Random, faults: Sequence[Fault]) -> None:
        self.system, self.random = system, random
        self.processes: dict[str, Process] = {}
        self.groups: dict[tuple[str, int], Group] = {}
        self.saved: dict[tuple[str, str], Weights] = {}
        """What was written into checkpoints, by step's folder and role."""
        self.fired: list[Fault] = []
        self.violation: Violated | None = None
        self.told: list[str] = []
        """What happened, with its time: two runs of a seed tell the same."""
        self.world: Callable[[], World] = system.initial
        """The world as the driver has it."""
        self._counts = Counter[tuple[str, str]]()
        self._faults = {(f.worker, f.where, f.nth): f for f in faults}
        self._stamp = 0

    def tell(self, text: str) -> None:
        """Add to the trace."""
        self.told.append(f"{asyncio.get_running_loop().time():.3f} {text}")

    def violate(self, text: str) -> None:
        """A property does not hold; the first one ends the run."""
        if self.violation is None:
            self.tell(f"violated: {text}")
            self.violation = Violated(text)

    def look(self) -> None:
        """Ask the properties now."""
        if found := violated(self.system, self.world(), self.processes):
            self.violate(found)

    def fault(self, worker: str, where: str) -> What | None:
        """What goes wrong as a worker comes to a boundary."""
        self._counts[worker, where] += 1
        fault = self._faults.get((worker, where, self._counts[worker, where]))
        if fault is None:
            return None
        self.fired.append(fault)
        self.tell(f"fault: {fault}")
        return fault.what

    def trained(self, *draws: int) -> Weights:
        """Weights that never were before, after these draws."""
        self._stamp += 1
        return Weights(draws, self._stamp)

    async def pause(self, most: float) -> None:
        """Let some time pass."""
        await asyncio.sleep(self.random.random() * most)

    def group(self, link: str, epoch: int) -> Group:
        """The meeting place of an epoch."""
        return self.groups.setdefault((link, epoch), Group(self, link, epoch))

    def revoke(self, link: str, epoch: int, why: str) -> None:
        """The store's word; members look for it at intervals."""
        group = self.group(link, epoch)
        delay = self.random.random()
        asyncio.get_running_loop().call_later(delay, group.end, LeaseExpired(link, epoch, why))

    def died(self, process: Process) -> None:
        """A process is gone: its peers may see a closed connection, or nothing at all."""
        self.tell(f"{process.name}: its process is gone")
        for group in self.groups.values():
            if process in group.arrived.values() and self.random.random() < 0.5:
                error = PeerLost(f"connection closed by {process.name}")
                group.end(error)


class Group:
    """One epoch of a link: its members arrive, and push together."""

    def __init__(self, site: Site, link: str, epoch: int) -> None:
        self.site, self.link, self.epoch = site, link, epoch
        self.arrived: dict[str, Process] = {}
        self.begun: dict[tuple[str, str], int] = {}
        """How often each member has begun each joint action."""
        self.error: FsmError | None = None
        self._waiting: list[asyncio.Future[None]] = []

    def end(self, error: FsmError) -> None:
        """No member may wait here any longer."""
        if self.error is None:
            self.error = error
        self.changed()

    def changed(self) -> None:
        """Whoever waits looks again."""
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            if not one.done():
                one.set_result(None)

    async def arrive(self, process: Process, members: frozenset[str]) -> None:
        """Meet all members.

        Raises:
            PeerLost: one did not arrive in time.
            LeaseExpired: the epoch is over.
        """
        self.arrived[process.name] = process
        self.changed()
        await self.until(process, lambda: members <= self.arrived.keys(), members)

    async def until(
        self, process: Process, true: Callable[[], bool], members: frozenset[str]
    ) -> None:
        """Wait for something that the members bring about."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + LINK_SECONDS
        while not true():
            if self.error is not None:
                raise self.error
            if loop.time() >= deadline:
                self._missed(process, members)
                raise PeerLost(f"link {self.link} epoch {self.epoch}: not all came in time")
            waiter = loop.create_future()
            self._waiting.append(waiter)
            timer = loop.call_at(deadline, self.changed)
            try:
                await waiter
            finally:
                timer.cancel()

    def _missed(self, process: Process, members: frozenset[str]) -> None:
        """Only a peer that hangs may cost the whole deadline: whatever is noticed is passed on."""
        peers = [self.site.processes[name] for name in sorted(members - {process.name})]
        if not any(peer.alive and peer.stuck for peer in peers):
            self.site.violate(
                f"{process.name} waited {LINK_SECONDS:.0f} s on {self.link} epoch {self.epoch} "
                "although no member hangs: it was not told of a failure"
            )
