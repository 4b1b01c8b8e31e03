"""The driver's rollout phases, over fakes: what a lost worker costs, and what it does not."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from fsm_trainer.machine.errors import WorkerLost
from fsm_trainer.machine.spec import Phase
from fsm_trainer.machine.version import Version
from fsm_trainer.runtime.config import Run, load_config
from fsm_trainer.runtime.driver import Driver, Progress
from fsm_trainer.runtime.metrics import Stage
from fsm_trainer.runtime.port import Outcome, told_by
from fsm_trainer.training.config import Verdict
from fsm_trainer.workers.data import Summary

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.yaml"
PARTS = 6
"""Of two workers with ``rollout.parts=3``."""


class Workers:
    """Stands where the reconciler would: workers that are always there, until one is lost."""

    def __init__(self, run: Run, lost: Sequence[int] = ()) -> None:
        self.system, self.world, self.push = run.system, run.system.initial(), None
        self.reached: list[str] = []
        self.asked: list[tuple[str, list[Any]]] = []
        self.made = Counter[str]()
        self.lost, self.acts = lost, 0
        """Which acts, counted from 1, end with the worker lost."""

    async def reach(self, phase: Phase) -> None:
        self.reached.append(phase.name)

    async def act(self, action: str, arguments: Mapping[str, Any]) -> dict[str, Outcome]:
        ((name, (part, *more)),) = arguments.items()
        self.acts += 1
        self.asked.append((action, more))
        if self.acts in self.lost:
            raise WorkerLost(f"{name} is gone")
        self.made[part] += 1
        return {name: Outcome(part, {} if action == "train" else 10)}


class Data:
    """Stands where the data worker would; a part is its own payload."""

    def __init__(self) -> None:
        self.draws, self.scored = 0, list[list[str]]()

    async def draw(self, prompts: int, copies: int, parts: int) -> list[str]:
        self.draws += 1
        return [f"draw {self.draws} part {i}" for i in range(parts)]

    async def evaluation(self, parts: int) -> Mapping[str, list[str]]:
        return {kind: [f"{kind} part {i}" for i in range(parts)] for kind in ("easy", "hard")}

    async def summary(self, payload: str) -> Summary:
        return Summary(0, frozenset({Version(1, 1)}))

    async def score(self, payloads: list[str]) -> Outcome:
        self.scored.append(payloads)
        return Outcome("scored", {"reward": 0.5, "count": float(len(payloads))})


class Metrics:
    """Stands where the metrics' file would."""

    def write(self, *arguments: object, **more: object) -> None: ...


@pytest.fixture(scope="module")
def run() -> Run:
    return load_config(QUICKSTART, ["rollout.parts=3", "rollout.workers=2"])


def driver(run: Run, workers: Workers, data: Data) -> Driver:
    fakes: list[Any] = [workers, data, Metrics(), None]
    made = Driver(run, Path(), *fakes)
    made.progress = Progress(1, Stage.TRAIN)
    return made


def test_a_rollout_phase_that_begins_again_draws_nothing_and_makes_only_what_is_missing(
    run: Run,
) -> None:
    workers, data = Workers(run, lost=(3, 4)), Data()
    made = driver(run, workers, data)

    asyncio.run(made._phase("rollout"))

    parts = [f"draw 1 part {i}" for i in range(PARTS)]
    assert workers.reached == ["rollout", "rollout"]
    assert data.draws == 1
    assert workers.made == dict.fromkeys(parts, 1)
    assert data.scored == [parts]
    assert made.progress.tokens == 10 * PARTS


def test_an_evaluation_that_begins_again_keeps_the_sets_that_it_had(run: Run) -> None:
    workers, data = Workers(run, lost=(9, 10)), Data()

    asyncio.run(driver(run, workers, data)._phase("evaluate"))

    parts = [f"{kind} part {i}" for kind in ("easy", "hard") for i in range(PARTS)]
    assert workers.reached == ["evaluate", "evaluate"]
    assert workers.made == dict.fromkeys(parts, 1)
    assert data.scored[-1] == parts[PARTS:]


def test_every_phase_makes_its_own(run: Run) -> None:
    workers, data = Workers(run), Data()
    made = driver(run, workers, data)

    for phase in ("evaluate", "evaluate", "rollout", "rollout"):
        asyncio.run(made._phase(phase))

    assert data.draws == 2
    assert set(workers.made.values()) == {1, 2}
    assert workers.made["easy part 0"] == 2
    assert workers.made["draw 1 part 0"] == workers.made["draw 2 part 0"] == 1


def test_no_more_parts_are_asked_for_than_there_are_prompts() -> None:
    run = load_config(QUICKSTART, ["rollout.parts=9", "rollout.prompts=5"])
    workers, data = Workers(run), Data()

    asyncio.run(driver(run, workers, data)._phase("rollout"))

    assert len(workers.made) == 5


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_rollouts_are_sampled_at_the_temperature_that_the_trainer_computes_at(
    temperature: float,
) -> None:
    run = load_config(QUICKSTART, [f"algorithm.temperature={temperature}"])
    workers = Workers(run)
    made = driver(run, workers, Data())

    for phase in ("rollout", "policy"):
        asyncio.run(made._phase(phase))

    sampled = {more[0] for action, more in workers.asked if action == "generate"}
    trained = {more[1].temperature for action, more in workers.asked if action == "train"}
    assert sampled == trained == {temperature}


@pytest.mark.parametrize(
    ("verdict", "told"), [(Verdict.PASSED, "passed"), (Verdict.FAILED, "failed"), (-1, "off")]
)
def test_the_journal_tells_what_became_of_the_zero_kl_check(verdict: int, told: str) -> None:
    first, later = {"check/zero_kl": float(verdict), "train/kl": 0.0}, {"train/kl": 0.1}

    assert told_by(Outcome(None, first)) == {"zero_kl": told}
    assert told_by(Outcome(None, later)) == {}
