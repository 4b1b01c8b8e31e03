"""Many seeds: run them side by side, and make of one that fails a story that can be read."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from typing import Any

import structlog

from fsm_trainer.machine.names import Role
from fsm_trainer.simulation.faults import Fault, What, points
from fsm_trainer.simulation.training import Result, Training, configured, simulate

CHUNK = 8
"""Trainings that a process of the pool takes at once: one alone is over too soon."""
Point = tuple[Role, str, What]


@dataclass
class Campaign:
    """What came of many seeds."""

    trainings: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    """How the runs ended: finished, or the kind of error."""
    hit: Counter[Point] = field(default_factory=Counter)
    """How often each role met each fault at each boundary."""
    failed: list[Result] = field(default_factory=list)

    def add(self, result: Result) -> None:
        """Count a result."""
        self.trainings += 1
        self.ends["failed" if result.failure else result.end.partition(":")[0]] += 1
        names = configured(result.training).system.names
        self.hit.update((names[f.worker], f.where, f.what) for f in result.fired)
        if result.failure:
            self.failed.append(result)

    def missed(self, training: Training) -> list[Point]:
        """The points of a training's system that no seed came to."""
        return [p for p in points(configured(training).system) if p not in self.hit]


@contextmanager
def quiet() -> Iterator[None]:
    """Without the runtime's logs: thousands of faults are nothing to warn of."""
    before = structlog.get_config()
    structlog.configure(processors=[_drop])
    try:
        yield
    finally:
        structlog.configure(**before)


def _drop(logger: Any, name: str, event: Any) -> Any:
    raise structlog.DropEvent


def _quietly(training: Training) -> Result:
    with quiet():
        return simulate(training)


def campaign(trainings: Sequence[Training], processes: int | None = None) -> Iterator[Result]:
    """Run trainings, and give their results in order.

    Args:
        trainings: what is run.
        processes: how many run side by side; by default one a core, and 1 runs them here.
    """
    count = min(processes or os.cpu_count() or 1, 1 + len(trainings) // CHUNK)
    if count == 1:
        yield from map(_quietly, trainings)
        return
    # Forked workers would share the caller's threads' locks.
    with ProcessPoolExecutor(count, get_context("forkserver")) as pool:
        try:
            yield from pool.map(_quietly, trainings, chunksize=CHUNK)
        finally:
            pool.shutdown(cancel_futures=True)


def shrunk(result: Result) -> Result:
    """The same training with as few of its faults, and steps, as still make it fail."""
    with quiet():
        for steps in (2, 4, 8):
            if steps < result.training.steps:
                result = _still(result, steps=steps)
        result = _still(result, faults=result.fired)
        for fault in result.fired:
            result = _still(result, faults=tuple(f for f in result.fired if f != fault))
    return result


def _still(result: Result, **smaller: Any) -> Result:
    """What a smaller training came to, if it fails too."""
    tried = simulate(replace(result.training, **smaller))
    return tried if tried.failure else result


def story(result: Result, last: int = 20) -> list[str]:
    """What a failing training did, for people: its faults, and the journal's last lines."""
    run = result.training
    faults: Sequence[Fault] = result.fired
    lines = [
        f"{run.schedule}, seed {run.seed}, {run.steps} steps, {run.rollouts} rollout workers: "
        f"{result.failure}",
        "faults that are enough:" if faults else "no fault is needed",
        *(f"  {fault}" for fault in faults),
        "the end of the journal:",
        *(f"  {line}" for line in result.story[-last:]),
    ]
    return lines
