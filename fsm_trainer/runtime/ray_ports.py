"""Ports over the processes of a cluster: one for each worker, and one for the data worker."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from fsm_trainer.machine.errors import DeadlineExceeded, PeerLost, SelfCheckFailed, WorkerLost
from fsm_trainer.machine.lifecycle import Report
from fsm_trainer.machine.names import State, Trigger
from fsm_trainer.machine.version import Version
from fsm_trainer.machine.world import Worker, World
from fsm_trainer.runtime.cluster import CONTROL, Cluster, Recipe
from fsm_trainer.runtime.config import DeadlineConfig
from fsm_trainer.runtime.port import Outcome
from fsm_trainer.workers.data import Summary
from fsm_trainer.workers.host import Status


class RayPort:
    """A worker port over the processes of a :class:`Cluster`, one for each rank.

    With ``exits`` a worker that goes to sleep leaves files, and its processes end: only the port
    knows. They are started again before its next transition.
    """

    def __init__(
        self,
        cluster: Cluster,
        name: str,
        recipes: Callable[[], list[Recipe]],
        deadlines: DeadlineConfig,
        exits: bool = False,
    ) -> None:
        self._cluster, self._name, self._deadlines = cluster, name, deadlines
        self._make, self.recipes = recipes, recipes()
        self._exits, self._trigger = exits, ""
        self._gone: Worker | None = None
        self._back = False
        """Whether it has come back from its files, and has not been awake since."""

    @property
    def ranks(self) -> int:
        """Processes of the worker."""
        return len(self.recipes)

    def start(self) -> None:
        """Start the processes; :meth:`setup` waits for them."""
        for recipe in self.recipes:
            self._cluster.start(recipe)

    async def setup(self) -> None:
        """Make the hosts, from the newest checkpoint, and wait until they can be called."""
        await self._setup(self._make())

    async def _setup(self, recipes: list[Recipe]) -> None:
        self.recipes, seconds = recipes, self._deadlines.transition
        await _together(self._cluster.setup(r, seconds) for r in self.recipes)

    async def _all(
        self, method: str, *arguments: Any, seconds: float | None = None, **how: Any
    ) -> list[Any]:
        call, seconds = self._cluster.call, seconds or self._deadlines.transition
        return await _together(
            call(r.name, method, *arguments, seconds=seconds, **how) for r in self.recipes
        )

    async def _report(self, method: str, *arguments: Any) -> Report:
        """All ranks' reports as one: what failed on any has failed, what all did is done."""
        reports: list[Report] = await self._all(method, *arguments)
        failed = [report for report in reports if report.failed is not None]
        peer_lost = PeerLost.__name__  # who lost a peer says less of why than that peer
        return min(failed or reports, key=lambda r: (len(r.done), r.error.startswith(peer_lost)))

    async def begin(
        self, trigger: str, epoch: int, version: Version | None, world: World, generation: int
    ) -> Report:
        """See :class:`~fsm_trainer.runtime.port.WorkerPort`, here and below."""
        if self._gone is not None:
            await self._return(self._gone, world)
        self._trigger = trigger
        return await self._report("begin", trigger, epoch, version, world, generation)

    async def acquire(self) -> Report:
        """All ranks together; raises WorkerLost where the files that it left are damaged."""
        report = await self._report("lifecycle.acquire")
        if self._back and report.error.startswith(SelfCheckFailed.__name__):
            raise WorkerLost(f"{self._name} did not come back from its files: {report.error}")
        self._back = self._back and report.failed is not None
        return report

    async def commit(self) -> Worker:
        """All ranks together."""
        worker = await self._worker("lifecycle.commit")
        if self._exits and worker.state == State.SLEEPING and self._trigger != Trigger.START:
            seconds = self._deadlines.control
            try:
                await _together(self._cluster.end(r.name, seconds) for r in self.recipes)
            except DeadlineExceeded as error:  # the device is not free: no sleeper but a dead one
                raise WorkerLost(str(error)) from error
            self._gone = worker
        return worker

    async def _return(self, worker: Worker, world: World) -> None:
        """Start the processes again, and bring them to where the worker fell asleep."""
        self._gone = None
        told = {"returned": True, "checkpoint": None}  # what it left is newer than any
        self.start()
        await self._setup([replace(r, arguments={**r.arguments, **told}) for r in self.recipes])
        await self._report("begin", Trigger.START, 0, worker.version, world, 0)
        report = await self._report("lifecycle.acquire")
        if report.failed is not None:
            raise WorkerLost(f"{self._name} did not come back from its files: {report.error}")
        back = await self._worker("lifecycle.commit")
        if back != worker:
            raise WorkerLost(f"{self._name} came back as {back}, it had left as {worker}")
        self._back = True

    async def undo(self) -> Worker:
        """All ranks together."""
        return await self._worker("lifecycle.undo")

    async def sever(self, link: str, world: World) -> Worker:
        """All ranks together."""
        return await self._worker("lifecycle.sever", link, world)

    async def _worker(self, method: str, *arguments: Any) -> Worker:
        workers: list[Worker] = await self._all(method, *arguments)
        states = [str(worker.state) for worker in workers]
        if len(set(states)) > 1:
            raise WorkerLost(f"the ranks of {self._name} disagree after {method}: {states}")
        return workers[0]

    async def act(self, action: str, world: World, arguments: tuple[Any, ...]) -> Outcome:
        """All ranks together; rank 0's outcome counts."""
        seconds = self._deadlines.action
        outcomes: list[Outcome] = await _together(
            self._cluster.outcome(r.name, "act", action, world, *arguments, seconds=seconds)
            for r in self.recipes
        )
        return outcomes[0]

    async def call(self, method: str, *arguments: Any) -> Any:
        """All ranks together (they may communicate); rank 0's value counts."""
        return (await self._all(method, *arguments))[0]

    async def died(self, peer: str) -> None:
        """Told at once, also while a collective blocks."""
        if self._gone is None:
            await self._all(
                "died", peer, seconds=self._deadlines.control, concurrency_group=CONTROL
            )

    async def status(self) -> list[Status]:
        """Answered also while an action runs; nothing while there is no process."""
        if self._gone is not None:
            return []
        seconds = self._deadlines.control
        return await self._all("status", seconds=seconds, concurrency_group=CONTROL)

    async def kill(self) -> None:
        """End all ranks."""
        self._gone, self._back = None, False
        seconds = self._deadlines.control
        await asyncio.gather(*(self._cluster.kill(r.name, seconds) for r in self.recipes))

    async def respawn(self) -> None:
        """Start all ranks anew."""
        self.start()
        await self.setup()


class RayData:
    """The data worker in a :class:`Cluster`."""

    name = "data"

    def __init__(self, cluster: Cluster, deadlines: DeadlineConfig) -> None:
        self._call = partial(cluster.call, self.name, seconds=deadlines.action)
        self._outcome = partial(cluster.outcome, self.name, seconds=deadlines.action)
        self._spread = partial(cluster.spread, self.name)
        self._payload = partial(cluster.payload, self.name)
        self._evaluation: dict[int, dict[str, list[Any]]] = {}

    async def draw(self, prompts: int, copies: int, parts: int) -> list[Any]:
        """References to the step's samples."""
        return self._spread("draw", prompts, copies, parts, returns=parts)

    async def evaluation(self, parts: int) -> Mapping[str, list[Any]]:
        """References to the held-out sets; they never change, so they are asked for once."""
        if parts not in self._evaluation:
            self._evaluation[parts] = {
                name: self._spread("evaluation", name, parts, returns=parts)
                for name in await self._call("evaluation_sets")
            }
        return self._evaluation[parts]

    async def summary(self, payload: Any) -> Summary:
        """What became of a part's trajectories, which stay where they are."""
        summary: Summary = await self._call("summary", payload)
        return summary

    async def score(self, payloads: list[Any]) -> Outcome:
        """A reference to the scored trajectories, and means."""
        return await self._outcome("score", *payloads)

    async def informative(self, rounds: list[Any]) -> Outcome:
        """A reference to the trajectories that are left, and what was left out."""
        return await self._outcome("informative", *rounds)

    async def dump(self, path: Path, payload: Any) -> None:
        """Write scored trajectories into a file."""
        await self._call("dump", path, payload)

    async def undump(self, path: Path) -> Outcome:
        """A reference to scored trajectories from a file, and means."""
        return await self._outcome("undump", path)

    async def warmup_pairs(self) -> Any:
        """A reference to prompts and answers in tokens."""
        return self._payload("warmup_pairs")

    async def model(self) -> Path:
        """The folder of the run's model."""
        return Path(await self._call("model"))

    async def state(self) -> dict[str, Any]:
        """The position in the data."""
        return dict(await self._call("state"))

    async def restore(self, state: Mapping[str, Any]) -> None:
        """Go back to a position."""
        await self._call("restore", state)


async def _together(calls: Iterable[Awaitable[Any]]) -> list[Any]:
    """Await all ranks, also after one has failed; but none that may wait for one that is lost.

    NCCL tells nobody of a peer's death before the collective's deadline.
    """
    tasks = [asyncio.ensure_future(call) for call in calls]
    todo, errors = set(tasks), list[BaseException]()
    try:
        while todo and not any(isinstance(error, WorkerLost) for error in errors):
            _, todo = await asyncio.wait(todo, return_when=asyncio.FIRST_COMPLETED)
            errors = [error for task in tasks if task.done() and (error := task.exception())]
    finally:
        for task in tasks:
            task.cancel()
    lost = next((e for e in errors if isinstance(e, WorkerLost)), None)
    failed = next((e for e in errors if not isinstance(e, WorkerLost)), None)
    if lost and failed:  # it may have waited for the one that failed until a deadline ended it
        raise WorkerLost(f"{lost}. Another rank failed: {failed}") from failed
    if error := lost or failed:
        raise error
    return [task.result() for task in tasks]
