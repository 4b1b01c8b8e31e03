"""The data worker: how samples are cut into parts, and what is told of trajectories."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fsm_trainer.data.models import ModelSpec
from fsm_trainer.data.rewards import RewardConfig
from fsm_trainer.data.sources import DataConfig
from fsm_trainer.data.trajectory import Sample, Status, Trajectory
from fsm_trainer.machine.version import Version
from fsm_trainer.workers import data as module
from fsm_trainer.workers.data import DataHost, Kept, Summary

NEWEST = Version(1, 1)


class NoRewards:
    """Stands where the reward processes would."""

    def __init__(self, config: RewardConfig) -> None: ...

    def start(self) -> None: ...


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DataHost:
    """A data worker with a hundred prompts, without model and rewards."""
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(f'{{"prompt": "question {i}"}}\n' for i in range(100)))
    data = DataConfig.model_validate(
        {"train": {"kind": "jsonl", "path": str(path)}, "heldout_fraction": 0.1}
    )
    monkeypatch.setattr(module, "resolve_model", lambda *arguments: tmp_path)
    monkeypatch.setattr(module, "RewardPool", NoRewards)
    unused: Any = None
    return DataHost(data, unused, ModelSpec(path=tmp_path), tmp_path, 0)


@pytest.mark.parametrize("parts", [1, 2, 3, 6])
def test_the_copies_of_a_prompt_are_in_one_part_in_every_number_of_parts(
    host: DataHost, parts: int
) -> None:
    before = host.state()
    whole = host.draw(7, 3, 1)[0]
    host.restore(before)

    dealt = host.draw(7, 3, parts)

    assert len(dealt) == parts
    assert [sample for part in dealt for sample in part] == whole
    groups = [{sample.group for sample in part} for part in dealt]
    assert sum(map(len, groups)) == len(set().union(*groups)) == 7
    # 7 groups of 3 in 2 parts are 4 and 3 groups.
    assert {len(part) for part in dealt} <= {7 // parts * 3, (7 // parts + 1) * 3}


def test_an_evaluation_set_is_the_same_in_every_number_of_parts(host: DataHost) -> None:
    (name,) = host.evaluation_sets()
    whole = host.evaluation(name, 1)[0]

    dealt = host.evaluation(name, 4)

    assert len(dealt) == 4
    assert [sample for part in dealt for sample in part] == whole


def test_a_part_is_summed_up_by_what_was_aborted_and_the_versions_of_the_rest(
    host: DataHost,
) -> None:
    part = [
        trajectory(Status.FINISHED, Version(1, 2)),
        trajectory(Status.TRUNCATED, Version(1, 3)),
        trajectory(Status.ABORTED, Version(1, 1)),  # dropped before scoring, so it may be older
    ]

    assert host.summary(part) == Summary(1, frozenset({Version(1, 2), Version(1, 3)}))


def test_groups_of_equal_rewards_are_dropped_and_counted_over_all_rounds(host: DataHost) -> None:
    def scored(group: str, *rewards: float) -> list[Trajectory]:
        return [replace(trajectory(group=group), reward=reward) for reward in rewards]

    split, late, won, alone = (
        scored("a", 1, 0),
        scored("d", 0, 1),
        scored("b", 1, 1),
        scored("c", 1),
    )

    kept, found = host.informative([*split[:1], *won, *split[1:], *alone], late)

    assert kept == [*split, *late]
    # Means are of all seven, so that filtering doesn't flatter: 5 of 7 rewards are 1.
    assert found == Kept({"reward": pytest.approx(5 / 7), "count": 4.0}, groups=2, dropped=2)


def trajectory(
    status: Status = Status.FINISHED, version: Version = NEWEST, group: str = "a"
) -> Trajectory:
    return Trajectory(
        sample=Sample("a", "1+1=", "2", group),
        tokens=np.array([1, 2], dtype=np.int32),
        loss_mask=np.array([0, 1], dtype=np.uint8),
        logprobs=np.array([0.0, -0.5], dtype=np.float32),
        version=version,
        status=status,
        text="2",
    )
