"""Updates of actor and critic on 1, 2 and 4 ranks, against the same in plain torch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fsm_trainer.training.batch import draw_epochs
from fsm_trainer.training.packing import Layout
from tests.training.ranks import run_ranks
from tests.training.updates import (
    DEFAULT,
    NIGHTLY,
    RATE,
    ROUNDING,
    UPDATES,
    VARIANTS,
    models_in,
    plain,
    ragged,
    rng,
)

WORLDS, ROLES = (1, 2, 4), ("critic", "actor", "grpo")
STEPS = 2 * UPDATES
Outcome = Callable[[int, str, int], list[dict[str, Any]]]

# bfloat16 rounds to 2^-8 of a number; twenty roundings in a row, as 2 layers have.
METRICS = {"float32": ROUNDING, "bfloat16": 20 * 2.0**-8}


def cases() -> list[Any]:
    return [
        pytest.param(*case, marks=[] if case in DEFAULT else pytest.mark.nightly)
        for case in NIGHTLY
    ]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    torch.set_num_threads(1)
    return plain(models_in(tmp_path_factory.mktemp("plain")))


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """What all ranks of a world have of a case."""

    @functools.cache
    def folder(world: int, which: str) -> Path:
        made = tmp_path_factory.mktemp(f"{which}-{world}")
        run_ranks(world, made, "tests.training.updates", which)
        return made

    def load(world: int, variant: str, stage: int) -> list[dict[str, Any]]:
        where = folder(world, "default" if (variant, stage) in DEFAULT else str(stage))
        return [torch.load(where / f"{variant}-{stage}-{rank}.pt") for rank in range(world)]

    return load


def close(found: Mapping[str, float], plain: Mapping[str, float], dtype: str) -> None:
    assert {name: found[name] for name in plain} == pytest.approx(
        plain, rel=METRICS[dtype], abs=METRICS[dtype]
    )


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(("variant", "stage"), cases())
def test_an_update_is_that_of_plain_torch_whatever_the_ranks_and_micro_batches(
    outcome: Outcome, expected: dict[str, Any], world: int, variant: str, stage: int
) -> None:
    ranks = outcome(world, variant, stage)
    dtype = VARIANTS[variant].get("dtype", "float32")
    for role in ROLES:
        for step, plain_metrics in enumerate(expected[role]["metrics"]):
            close(ranks[0][role]["metrics"][step], plain_metrics, dtype)
        weights = ranks[0][role]["weights"]
        assert weights.keys() == expected[role]["weights"].keys()
        gaps = [(weights[name] - there).abs() for name, there in expected[role]["weights"].items()]
        if dtype == "float32":
            # A hundredth of what a step of Adam moves a weight by.
            assert max(float(gap.max()) for gap in gaps) < RATE / 100
        else:
            # Where a gradient is smaller than its rounding, steps may go the other way: few may.
            # Beside that the weights are rounded: the norms', 1, by up to 2^-8.
            flat = torch.cat([gap.flatten() for gap in gaps])
            assert float(flat.max()) < 2 * RATE * STEPS + 2.0**-8
            assert float(flat.square().mean().sqrt()) < RATE


@pytest.mark.parametrize("world", WORLDS[1:])
@pytest.mark.parametrize(("variant", "stage"), cases())
def test_all_ranks_have_the_same_metrics_and_weights_to_the_bit(
    outcome: Outcome, world: int, variant: str, stage: int
) -> None:
    first, *others = outcome(world, variant, stage)
    for other in others:
        for role in ROLES:
            assert other[role]["metrics"] == first[role]["metrics"]
            assert other[role]["checksum"] == first[role]["checksum"]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(
    "stage", [1, *(pytest.param(n, marks=pytest.mark.nightly) for n in (0, 2, 3))]
)
def test_recomputing_activations_changes_no_bit(outcome: Outcome, world: int, stage: int) -> None:
    kept, recomputed = (outcome(world, name, stage) for name in ("accumulated", "recomputed"))
    for role in ROLES:
        assert kept[0][role]["metrics"] == recomputed[0][role]["metrics"]
        assert kept[0][role]["checksum"] == recomputed[0][role]["checksum"]


def test_the_case_reaches_what_it_compares(expected: dict[str, Any]) -> None:
    place = SimpleNamespace(rank=0, world_size=1, micro_batch=1, **VARIANTS["packed"])
    batch = ragged()
    (epoch,) = draw_epochs(1, 2, batch.lengths, rng(0), place)
    walked = [batch.select(rows).trim() for both in epoch for rows in both.micro_batches]
    assert len(walked) > 2, "no gradient is accumulated"
    shared = [len(Layout(part.tokens, part.lengths, True).inputs) < len(part) for part in walked]
    assert any(shared), "no two sequences share a row"
    for role in ("actor", "grpo"):
        second = expected[role]["metrics"][1]
        assert 0 < second["actor/clip_fraction"] < 1
        assert second["train/kl"] > 0
        assert second["actor/grad_norm"] > 0
    assert 0 < expected["critic"]["metrics"][1]["critic/clip_fraction"] < 1
