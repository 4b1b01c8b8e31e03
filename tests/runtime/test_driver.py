"""The driver's rollout phases, over fakes: what a lost worker costs, and what it does not."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from fsm_trainer.machine.errors import DataError, WorkerLost
from fsm_trainer.machine.spec import Phase
from fsm_trainer.machine.version import Version
from fsm_trainer.runtime.config import Run, load_config
from fsm_trainer.runtime.driver import Driver, Progress
from fsm_trainer.runtime.metrics import Stage
from fsm_trainer.runtime.port import Outcome, told_by
from fsm_trainer.training.config import Verdict
from fsm_trainer.workers.data import Kept, Summary

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


class Filtered(Data):
    """Of each draw, so many groups are left."""

    def __init__(self, *left: int) -> None:
        super().__init__()
        self.left, self.asked = left, list[int]()

    async def draw(self, prompts: int, copies: int, parts: int) -> list[str]:
        self.asked.append(prompts)
        return await super().draw(prompts, copies, parts)

    async def score(self, payloads: list[str]) -> Outcome:
        await super().score(payloads)
        return Outcome(f"draw {len(self.scored)}", {"reward": 0.5, "count": 1.0})

    async def informative(self, rounds: list[str]) -> Outcome:
        left = sum(self.left[: len(rounds)])
        means = {"reward": 0.25, "count": 2.0 * left}
        return Outcome(" and ".join(rounds), Kept(means, left, sum(self.asked) - left))


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


def filtering(rounds: int) -> Run:
    settings = ["rollout.prompts=9", "rollout.copies=2", f"rollout.filter_rounds={rounds}"]
    return load_config(QUICKSTART.with_name("grpo.yaml"), settings)


def test_the_groups_that_a_filter_drops_are_drawn_again_until_the_step_is_full() -> None:
    workers, data = Workers(filtering(9)), Filtered(4, 3, 2, 9)
    made = driver(filtering(9), workers, data)

    asyncio.run(made._phase("rollout"))

    assert data.asked == [9, 9 - 4, 9 - 4 - 3]
    assert made.progress.batch == "draw 1 and draw 2 and draw 3"
    figures = {name: made.progress.numbers[f"rollout/{name}"] for name in FIGURES}
    assert figures == {"groups": 9, "dropped": 16 - 9, "rounds": 3}
    assert made.progress.numbers["train/reward"] == 0.25


def test_the_rounds_of_a_filter_are_bounded_and_a_short_step_is_trained_on() -> None:
    workers, data = Workers(filtering(2)), Filtered(4, 3, 2)
    made = driver(filtering(2), workers, data)

    asyncio.run(made._phase("rollout"))

    assert data.asked == [9, 5]
    figures = {name: made.progress.numbers[f"rollout/{name}"] for name in FIGURES}
    assert figures == {"groups": 7, "dropped": 7, "rounds": 2}


FIGURES = ("groups", "dropped", "rounds")


def test_a_step_of_which_nothing_is_left_says_what_to_do() -> None:
    made = driver(filtering(2), Workers(filtering(2)), Filtered(0, 0))

    with pytest.raises(DataError, match=r"step 1: .* equal\. Raise rollout\.filter_rounds"):
        asyncio.run(made._phase("rollout"))


def test_a_round_that_loses_its_workers_keeps_the_rounds_before_it() -> None:
    run = filtering(9)
    workers, data = Workers(run, lost=(3, 4)), Filtered(4, 5)
    made = driver(run, workers, data)

    asyncio.run(made._phase("rollout"))

    assert data.asked == [9, 5]
    assert workers.reached == ["rollout", "rollout"]
    assert made.progress.batch == "draw 1 and draw 2"
    assert workers.made == Counter(f"draw {n} part {i}" for n in (1, 2) for i in range(2))


def test_a_step_after_a_filtered_one_begins_anew() -> None:
    workers, data = Workers(filtering(9)), Filtered(9, 9)
    made = driver(filtering(9), workers, data)

    for _ in range(2):
        asyncio.run(made._phase("rollout"))

    assert data.asked == [9, 9]
    assert made.progress.numbers["rollout/rounds"] == 1
