"""Two and four trainer ranks in processes of their own, over real groups."""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fsm_trainer.training import models
from tests.training import orphaned
from tests.training.ranks import CYCLES, DRIFTS, STEPS, make_batch, make_model, run_ranks

STAGES = ("0", "1", "2", "3")
WORLDS = (2, 4)
# Of resident memory over 80 cycles: what a bare program of torch grows by over 200 cycles of four
# groups. A copy of this model's weights each cycle, 20,000 of 4 bytes, would be three times that.
GROWTH = 2 * 2**20

GLOO = pytest.mark.skipif(torch.cuda.is_available(), reason="it asks gloo, or looks at host memory")


@pytest.fixture(scope="module")
def extensions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("extensions")


@pytest.fixture(scope="module")
def run(
    tmp_path_factory: pytest.TempPathFactory, extensions: Path
) -> Callable[[int], list[dict[str, Any]]]:
    """What all ranks of a world printed."""

    @functools.cache
    def once(world: int) -> list[dict[str, Any]]:
        folder = tmp_path_factory.mktemp(f"{world}-ranks")
        return run_ranks(world, folder, TORCH_EXTENSIONS_DIR=str(extensions))

    return once


@pytest.fixture(scope="module")
def results(run: Callable[[int], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return run(2)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("stage", STAGES)
def test_three_cycles_a_step_change_neither_losses_nor_weights(
    run: Callable[[int], list[dict[str, Any]]], world: int, stage: str
) -> None:
    found = [result[stage] for result in run(world)]
    assert len(found) == world
    assert all(result["slept"] == result["awake"] for result in found)
    assert len({json.dumps(result["slept"][1]) for result in found}) == 1
    # Each rank's data are its own: equal losses would say that all ran the same.
    assert len({json.dumps(result["slept"][0]) for result in found}) == world


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("stage", STAGES)
def test_a_sleeping_rank_has_no_group_registered(
    run: Callable[[int], list[dict[str, Any]]], world: int, stage: str
) -> None:
    for result in run(world):
        assert result[stage]["asleep"] == [[False, 0]] * STEPS * CYCLES


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("stage", STAGES)
def test_one_bit_that_drifts_on_one_rank_is_found_by_all_and_named_with_the_ranks(
    run: Callable[[int], list[dict[str, Any]]], world: int, stage: str
) -> None:
    for before, after in (result[stage]["drift"] for result in run(world)):
        if stage == "3":
            assert (before, after) == (0, 0)  # no rank has a copy of another's part
            continue
        agree = list(range(world - 1))
        assert before == 25  # 2 layers of 11 tensors, embedding, last norm, head
        told = f"{DRIFTS} differs between ranks: {agree} against [{world - 1}] (1 of 25 tensors"
        assert str(after).startswith(told)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_that_resumed_or_ended_asleep_continues_bit_equal(
    run: Callable[[int], list[dict[str, Any]]], world: int, stage: str
) -> None:
    for result in run(world):
        assert result[stage]["resumed"] == result[stage]["awake"][1]
        assert result[stage]["returned"] == result[stage]["awake"][1]


@pytest.mark.parametrize(
    ("world", "stage"),
    [
        pytest.param(world, stage, marks=[] if (world, stage) == (2, "1") else pytest.mark.nightly)
        for world in WORLDS
        for stage in STAGES
    ],
)
def test_a_hundred_cycles_leave_threads_descriptors_groups_and_memory_flat(
    tmp_path: Path, world: int, stage: str
) -> None:
    for found in run_ranks(world, tmp_path, "tests.training.leaks", stage):
        assert found["then"] == found["now"]
        assert found["grown"] <= GROWTH
        assert found["hook"], "torch's hook for uncaught errors was wrapped once more"
        assert found["equal"]


def test_a_start_that_fails_on_one_rank_has_failed_on_all_and_can_be_made_again(
    tmp_path: Path,
) -> None:
    first, second = run_ranks(2, tmp_path, "tests.training.starting", *STAGES)
    for stage in STAGES:
        (healthy, learned), (failed, learned_too) = first[stage], second[stage]
        assert healthy.startswith("PeerLost: rank 0 of train/actor: another rank failed in start")
        assert failed == "MemoryError: only here"
        assert learned and learned_too


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_are_averaged_over_ranks_and_summed_over_micro_batches(
    results: list[dict[str, Any]], stage: str, tmp_path: Path
) -> None:
    # The independent implementation: plain torch on the data of both ranks, 1/2 for two ranks.
    model = models.load("policy", make_model(tmp_path / "model"), "float32")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    for step in range(STEPS - 1):
        optimizer.zero_grad()
        for rank in (0, 1):
            for micro in (0, 1):
                tokens = make_batch(1000 * step + 10 * micro + rank).tokens
                logits = model(input_ids=tokens[:, :-1]).logits
                likely = -torch.nn.functional.cross_entropy(
                    logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum"
                )
                # A mean over [4, 9] with the zero at index 0, half for two micro-batches.
                (-likely / 36 / 2 / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    trained = [torch.tensor(value) for value in results[0][stage]["weights"]]

    for ours, theirs in zip(trained, model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-3, atol=2e-4)


@GLOO
def test_a_lost_rank_is_an_error_and_costs_the_other_neither_weights_nor_optimizer(
    results: list[dict[str, Any]],
) -> None:
    assert "rank 0 of train/actor lost a peer in " in results[0]["lost"]["error"]
    assert [result["lost"]["recovered"] for result in results] == [True, True]


def test_suspended_groups_are_unusable_asleep_and_resumed_only_if_all_ranks_kept_them(
    results: list[dict[str, Any]],
) -> None:
    for suspended in (result["suspended"] for result in results):
        assert len(suspended["asleep"]) == 2 and "the training groups are closed" in str(suspended)
        assert suspended["same_group"] == [True, torch.cuda.is_available()]
        assert suspended["equal"]


def test_a_rank_that_ends_asleep_does_not_hold_the_other_ones_suspended_groups(
    tmp_path: Path,
) -> None:
    left, _ = run_ranks(2, tmp_path, "tests.training.orphaned", "asleep")
    assert left["kept"] and left["told"].startswith("rank 0 of train/actor waited 10 s for 2 ranks")
    # The meeting's deadline, and as long again to end what is left.
    assert left["seconds"] < 2 * orphaned.TIMEOUT and left["left"] == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="NCCL needs a GPU; gloo's is above")
def test_over_nccl_a_lost_rank_ends_the_other_ones_process_at_the_deadline(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="Watchdog caught collective operation timeout"):
        run_ranks(2, tmp_path, "tests.training.orphaned", "awake")
    seconds = time.time() - (tmp_path / "gone").stat().st_mtime
    # torch gives its dump four seconds; as many again to end.
    assert orphaned.TIMEOUT < seconds < orphaned.TIMEOUT + 8


def test_nothing_was_compiled_at_run_time(results: list[dict[str, Any]], extensions: Path) -> None:
    assert results
    assert os.listdir(extensions) == []


@GLOO
def test_a_sleeper_gives_its_memory_back_row_5(results: list[dict[str, Any]]) -> None:
    found = results[0]["memory"]
    assert found["parameters"] > 38_000_000
    # ZeRO 1 in float32: weights, masters and two moments, 4 bytes each, on the only rank.
    assert found["bytes"] >= found["parameters"] * 16
    assert found["awake"] - found["asleep"] >= 0.8 * found["bytes"]
    assert found["equal"]
