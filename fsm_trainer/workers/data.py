"""The data worker: samples, evaluation sets and rewards; it has no machine, nothing to sleep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from fsm_trainer.data.dump import read_dump, write_dump
from fsm_trainer.data.filters import informative
from fsm_trainer.data.models import (
    ModelSpec,
    encode_answer,
    encode_prompt,
    load_tokenizer,
    resolve_model,
)
from fsm_trainer.data.rewards import RewardConfig, RewardPool
from fsm_trainer.data.sources import DataConfig, DataSource
from fsm_trainer.data.trajectory import Sample, Status, Trajectory
from fsm_trainer.machine.version import Version


class Summary(NamedTuple):
    """What the driver is told of trajectories that it never looks into."""

    aborted: int
    """How many of them were aborted."""
    versions: frozenset[Version]
    """The weights that the others are from."""


class Kept(NamedTuple):
    """What a filter has left of a step."""

    means: dict[str, float]
    """Over all trajectories that were scored; only ``count`` is of those that are left."""
    groups: int
    """Groups that are left."""
    dropped: int
    """Groups that are not."""


class DataHost:
    """Draws samples, scores trajectories, and keeps the position in the data."""

    @staticmethod
    def prepare() -> None:
        """Import nothing ahead: only a model that has to be made needs torch."""

    def __init__(
        self, data: DataConfig, reward: RewardConfig, model: ModelSpec, cache: Path, seed: int
    ) -> None:
        self._model = resolve_model(model, cache, seed)
        self._source = DataSource(data, seed)
        self._rewards = RewardPool(reward)
        self._rewards.start()

    def model(self) -> Path:
        """The folder of the run's model; made here where it has to be made."""
        return self._model

    def draw(self, prompts: int, copies: int, parts: int) -> list[list[Sample]]:
        """The next step's samples in parts; a group stays together."""
        samples = self._source.draw(prompts, copies)
        return _deal([samples[i : i + copies] for i in range(0, len(samples), copies)], parts)

    def evaluation_sets(self) -> list[str]:
        """The names of the held-out sets."""
        return list(self._source.evaluation_sets())

    def evaluation(self, name: str, parts: int) -> list[list[Sample]]:
        """A held-out set in parts."""
        return _deal([[s] for s in self._source.evaluation_sets()[name]], parts)

    def summary(self, part: Sequence[Trajectory]) -> Summary:
        """What the driver has to know of a part before it is scored with the others."""
        versions = [t.version for t in part if t.status is not Status.ABORTED]
        return Summary(len(part) - len(versions), frozenset(versions))

    def score(self, *parts: Sequence[Trajectory]) -> tuple[list[Trajectory], dict[str, float]]:
        """The trajectories of all parts with their rewards, and means over them."""
        whole = [t for part in parts for t in part if t.status is not Status.ABORTED]
        scored = self._rewards.score(whole)
        return scored, _means(scored)

    def informative(self, *rounds: Sequence[Trajectory]) -> tuple[list[Trajectory], Kept]:
        """The trajectories of all rounds whose groups teach something, and what was left out."""
        whole = [t for one in rounds for t in one]
        kept = informative(whole)
        groups, left = (len({t.sample.group for t in some}) for some in (whole, kept))
        means = _means(whole) | {"count": float(len(kept))}
        return kept, Kept(means, left, groups - left)

    def warmup_pairs(self) -> list[tuple[list[int], list[int]]]:
        """Prompt and answer of every training sample that has one, in tokens."""
        tokenizer = load_tokenizer(self._model)
        eos = int(tokenizer.eos_token_id)
        samples = self._source.draw(len(self._source), stream="warmup")
        answered = ((s.prompt, s.answer) for s in samples if s.answer is not None)
        return [
            (encode_prompt(tokenizer, prompt), [*encode_answer(tokenizer, answer), eos])
            for prompt, answer in answered
        ]

    def dump(self, path: Path, trajectories: Sequence[Trajectory]) -> None:
        """Write scored trajectories into a file."""
        write_dump(path, trajectories)

    def undump(self, path: Path) -> tuple[list[Trajectory], dict[str, float]]:
        """Scored trajectories from a file, and means over them."""
        trajectories = read_dump(path)
        return trajectories, _means(trajectories)

    def state(self) -> dict[str, Any]:
        """The position in the data, for a checkpoint."""
        return self._source.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where a checkpoint was."""
        self._source.restore(state)


def _deal(groups: Sequence[Sequence[Sample]], parts: int) -> list[list[Sample]]:
    size, extra = divmod(len(groups), parts)
    bounds = [i * size + min(i, extra) for i in range(parts + 1)]
    return [[s for group in groups[a:b] for s in group] for a, b in pairwise(bounds)]


def _means(scored: Sequence[Trajectory]) -> dict[str, float]:
    if not scored:
        return {"reward": 0.0, "count": 0.0}
    names = {name for t in scored for name in t.info}
    means = {name: sum(t.info.get(name, 0.0) for t in scored) / len(scored) for name in names}
    means["reward"] = sum(t.reward or 0.0 for t in scored) / len(scored)
    means["count"] = float(len(scored))
    return means
