"""Deals the parts of a phase to the rollout workers: whoever is idle takes the next one.

A part is a list of whole groups of samples, and one worker makes all of it: the copies of a prompt,
and every turn of a sample, meet the same engine and its cache of their prefix (session affinity).
A worker has one part at a time, so the idle one is the least loaded; many parts even out lengths.

What each part came to stands in the order of the parts, whoever made it, so that a run can be
repeated. What was made is kept: a part is made again only if its worker was lost or refused it, or,
once and by another worker, if its engine aborted requests of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import structlog

from fsm_trainer.machine.errors import FsmError, Refused, SelfCheckFailed, WorkerLost
from fsm_trainer.runtime.port import Outcome
from fsm_trainer.runtime.reconciler import LOST
from fsm_trainer.workers.data import Summary

log = structlog.get_logger(__name__)

Give = Callable[[str, Any], Awaitable[Outcome]]
"""Has a worker make a part, with a deadline; raises what the reconciler's ``act`` raises."""
Summarize = Callable[[Any], Awaitable[Summary]]
"""Looks into a payload, which the dispatcher itself never does."""


class _Made(NamedTuple):
    worker: str
    outcome: Outcome
    summary: Summary


@dataclass(eq=False)
class _Part:
    number: int
    samples: Any
    made: _Made | None = None


class Dispatcher:
    """Parts, and what became of each; ``samples`` and payloads are references."""

    def __init__(self, samples: Sequence[Any], give: Give, summarize: Summarize) -> None:
        self._parts = [_Part(number, one) for number, one in enumerate(samples)]
        self._give, self._summarize = give, summarize
        self._queue: list[_Part] = []

    async def run(self, workers: Sequence[str]) -> list[Outcome]:
        """Have all parts made that are not made yet; gives all outcomes in the order of the parts.

        Raises:
            WorkerLost: no worker is left; a further call makes only what is missing.
            Refused: every worker refused, none was lost.
            SelfCheckFailed: the trajectories are not all of one version.
            FsmError: what a part's own code raised, after the others have ended theirs.
        """
        self._queue = [part for part in self._parts if part.made is None]
        idle, problems, fatal = list(workers), list[FsmError](), list[BaseException]()
        busy: dict[asyncio.Task[FsmError | None], str] = {}
        try:
            while True:
                if not fatal:
                    self._deal(idle, busy)
                if not busy:
                    break
                await asyncio.wait(busy, return_when=asyncio.FIRST_COMPLETED)
                for task in [task for task in busy if task.done()]:
                    name, error = busy.pop(task), task.exception()
                    if error is not None:
                        fatal.append(error)
                    elif (problem := task.result()) is not None:
                        problems.append(problem)
                    else:
                        idle.append(name)
        finally:
            for task in busy:
                task.cancel()
        if fatal:
            raise fatal[0]
        return self._outcomes(problems)

    def _deal(self, idle: list[str], busy: dict[asyncio.Task[FsmError | None], str]) -> None:
        """Give each idle worker the next part that it may take, if there is one."""
        for name in tuple(idle):
            free = (p for p in self._queue if p.made is None or p.made.worker != name)
            part = next(free, None)
            if part is not None:
                idle.remove(name)
                self._queue.remove(part)
                busy[asyncio.create_task(self._make(part, name))] = name

    async def _make(self, part: _Part, name: str) -> FsmError | None:
        """Have a worker make a part; gives why it can take no further one, if that is so."""
        try:
            outcome = await self._give(name, part.samples)
        except (*LOST, Refused) as error:
            self._again(part, name, str(error))
            return error
        summary, before = await self._summarize(outcome.payload), part.made
        if before is None or summary.aborted < before.summary.aborted:
            part.made = _Made(name, outcome, summary)
        if before is None and summary.aborted:
            self._again(part, name, f"{summary.aborted} of its trajectories were aborted")
        return None

    def _again(self, part: _Part, name: str, why: str) -> None:
        log.warning("a part goes to another worker", part=part.number, worker=name, why=why)
        self._queue.insert(0, part)

    def _outcomes(self, problems: Sequence[FsmError]) -> list[Outcome]:
        made = [part.made for part in self._parts if part.made is not None]
        if len(made) < len(self._parts):
            if problems and all(isinstance(problem, Refused) for problem in problems):
                raise problems[0]
            missing = [part.number for part in self._parts if part.made is None]
            story = "; ".join(map(str, problems)) or "there is none"
            raise WorkerLost(f"no worker is left that could make the parts {missing}: {story}")
        if len({version for one in made for version in one.summary.versions}) > 1:
            told = [(one.worker, *map(str, sorted(one.summary.versions))) for one in made]
            raise SelfCheckFailed(
                f"the trajectories of one step come from several versions of the weights: {told}. "
                "Likely causes: a generate hook that keeps trajectories of an earlier step, or an "
                "engine that took new weights while it generated"
            )
        return [one.outcome for one in made]
