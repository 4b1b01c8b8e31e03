"""The ports of the simulated site: calls that take time, go wrong, and have deadlines."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from fsm_trainer.machine.errors import ActionFailed, DeadlineExceeded, WorkerLost
from fsm_trainer.machine.lifecycle import Report
from fsm_trainer.machine.names import Role
from fsm_trainer.machine.version import Version
from fsm_trainer.machine.world import Worker, World
from fsm_trainer.runtime.config import DeadlineConfig
from fsm_trainer.runtime.port import Outcome
from fsm_trainer.simulation.faults import What
from fsm_trainer.simulation.process import Batch, Crashed, Hung, Process, Weights
from fsm_trainer.simulation.site import Site
from fsm_trainer.workers.data import Kept, Summary
from fsm_trainer.workers.host import Status

T = TypeVar("T")


class SimulatedPort:
    """A worker port over one simulated process, see :class:`~fsm_trainer.runtime.port.WorkerPort`.

    ``restored`` gives the weights with which a trainer starts: the newest checkpoint's.
    """

    def __init__(
        self,
        site: Site,
        name: str,
        deadlines: DeadlineConfig,
        restored: Callable[[Role], Weights | None],
    ) -> None:
        self._site, self._name, self._deadlines = site, name, deadlines
        self._restored = restored
        self.tasks: list[asyncio.Task[None]] = []
        """What the processes do, whether or not anybody waits for it."""
        self._start()

    @property
    def ranks(self) -> int:
        """One process."""
        return 1

    def _start(self) -> None:
        weights = self._restored(self._site.system.names[self._name])
        self._site.processes[self._name] = Process(self._site, self._name, weights)

    async def begin(
        self, trigger: str, epoch: int, version: Version | None, world: World, generation: int
    ) -> Report:
        """Releases happen at one instant."""

        async def work(process: Process) -> Report:
            return process.begin(trigger, epoch=epoch, version=version, world=world)

        return await self._call("begin", work)

    async def acquire(self) -> Report:
        """Each effect takes its time."""
        seconds = self._deadlines.transition
        return await self._call("acquire", lambda process: process.acquire_in_time(seconds))

    async def commit(self) -> Worker:
        """As the lifecycle does."""

        async def work(process: Process) -> Worker:
            return process.commit()

        return await self._call("commit", work)

    async def undo(self) -> Worker:
        """As the lifecycle does."""

        async def work(process: Process) -> Worker:
            return process.undo()

        return await self._call("undo", work)

    async def sever(self, link: str, world: World) -> Worker:
        """As the lifecycle does."""

        async def work(process: Process) -> Worker:
            return process.sever(link, world)

        return await self._call("sever", work)

    async def act(self, action: str, world: World, arguments: tuple[Any, ...]) -> Outcome:
        """Its boundary is the action's own."""
        seconds = self._deadlines.action

        async def work(process: Process) -> Outcome:
            return Outcome(*await process.act(action, world, arguments, seconds))

        return await self._call(action, work, seconds, boundary=False)

    async def call(self, method: str, *arguments: Any) -> Any:
        """The weights' checksums; a manifest says nothing here."""

        async def work(process: Process) -> Mapping[str, str]:
            return {"weights": str(process.weights)} if method == "checksums" else {}

        return await self._call(method, work)

    async def died(self, peer: str) -> None:
        """Heard at once, whatever else the process does."""

        async def work(process: Process) -> None:
            process.peer_died(peer)

        await self._call("died", work, self._deadlines.control, waits=False)

    async def status(self) -> list[Status]:
        """What the process holds."""
        process = self._site.processes[self._name]
        return [Status(0, process.worker, tuple(sorted(process.has)), 0)]

    async def kill(self) -> None:
        """Ends it, unless it can't be seen dead."""
        await self._site.pause(1.0)
        if self._site.fault(self._name, "call kill") is What.FAIL:
            raise DeadlineExceeded(f"{self._name} was killed and is still there")
        self._site.processes[self._name].die()

    async def respawn(self) -> None:
        """A new process, from the newest checkpoint."""
        what = self._site.fault(self._name, "call respawn")
        await self._site.pause(20.0)
        if what is What.LATE:
            await asyncio.sleep(self._deadlines.transition)
        if what is not None:
            raise WorkerLost(f"{self._name} could not be started again")
        self._start()
        self._site.tell(f"{self._name}: a new process")

    async def _call(
        self,
        what: str,
        work: Callable[[Process], Awaitable[T]],
        seconds: float | None = None,
        *,
        boundary: bool = True,
        waits: bool = True,
    ) -> T:
        """Have the process do something and wait for its answer, for a while."""
        site, name = self._site, self._name
        seconds = seconds or self._deadlines.transition
        await site.pause(0.5)
        process, loop = site.processes[name], asyncio.get_running_loop()
        fault = site.fault(name, f"call {what}") if boundary and process.alive else None
        if fault is What.CRASH_BEFORE:
            process.die()
        if not process.alive:
            raise WorkerLost(f"{name}'s process is gone")
        answer: asyncio.Future[T] = loop.create_future()
        if fault is What.FAIL:
            raise ActionFailed(f"{name}: {what}: a fault of the simulation")
        serve = self._serve(process, work, answer, waits, lost=fault is What.LOST)
        self.tasks.append(asyncio.ensure_future(serve))

        def expire() -> None:
            if not answer.done():
                answer.set_exception(WorkerLost(f"{name} did not answer within {seconds:g} s"))

        timer = loop.call_later(seconds, expire)
        try:
            return await answer
        finally:
            timer.cancel()

    async def _serve(
        self,
        process: Process,
        work: Callable[[Process], Awaitable[T]],
        answer: asyncio.Future[T],
        waits: bool,
        lost: bool,
    ) -> None:
        """The process's side of a call; one at a time, but for what ``waits`` for nothing."""
        told: T | None = None
        problem: Exception | None = None
        if waits:
            await process.mailbox.acquire()
        try:
            if process.alive:
                told = await work(process)
        except Crashed:
            process.die()
        except Hung:
            process.stuck = True
            return  # and keeps the mailbox: it answers nothing any more
        except Exception as error:
            problem = error
        if waits:
            process.mailbox.release()
        if lost:
            process.stuck = True
            return
        await self._site.pause(0.5)
        if answer.done():
            return
        if not process.alive:
            answer.set_exception(WorkerLost(f"{self._name}'s process is gone"))
        elif problem is not None:
            answer.set_exception(problem)
        else:
            answer.set_result(told)  # type: ignore[arg-type]


@dataclass
class SimulatedData:
    """The data worker: draws are numbered, and every part of a draw must come back once."""

    site: Site
    drawn: int = 0
    dumped: dict[Path, Any] = field(default_factory=dict)

    async def draw(self, prompts: int, copies: int, parts: int) -> list[Any]:
        """The next draw, in parts."""
        self.drawn += 1
        return [(self.drawn, part) for part in range(parts)]

    async def evaluation(self, parts: int) -> Mapping[str, list[Any]]:
        """Draw 0."""
        return {"heldout": [(0, part) for part in range(parts)]}

    async def summary(self, payload: Batch) -> Summary:
        """Nothing was aborted."""
        await self.site.pause(0.2)
        return Summary(0, frozenset({payload.version}))

    async def score(self, payloads: list[Batch]) -> Outcome:
        """All parts as one batch."""
        await self.site.pause(1.0)
        parts = [part for one in payloads for part in one.parts]
        same = {(one.draw, one.weights) for one in payloads}
        if sorted(parts) != list(range(len(parts))) or len(same) != 1:
            self.site.violate(f"5: a step is made of {payloads}")
        whole = payloads[0]._replace(parts=frozenset(parts))
        return Outcome(whole, {"reward": 0.5, "count": float(len(parts))})

    async def informative(self, rounds: list[Batch]) -> Outcome:
        """Every group of the last round."""
        groups = len(rounds[-1].parts)
        return Outcome(rounds[-1], Kept({"reward": 0.5, "count": float(groups)}, groups, 0))

    async def warmup_pairs(self) -> Any:
        """Nothing to look at."""
        return None

    async def dump(self, path: Path, payload: Any) -> None:
        """Keep it."""
        self.dumped[path] = payload

    async def undump(self, path: Path) -> Outcome:
        """Give it back."""
        return Outcome(self.dumped[path], {"reward": 0.5, "count": 1.0})

    async def state(self) -> dict[str, Any]:
        """How many draws there were."""
        return {"drawn": self.drawn}

    async def restore(self, state: Mapping[str, Any]) -> None:
        """Go back to a position."""
        self.drawn = state["drawn"]
