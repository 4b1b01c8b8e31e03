"""Two trainer ranks in processes of their own, over real groups."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from fsm_trainer.training import models
from tests.training.ranks import make_batch, make_model, run_ranks

STAGES = ("0", "1", "2", "3")


@pytest.fixture(scope="module")
def extensions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("extensions")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, extensions: Path) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("two-ranks")
    return run_ranks(2, folder, TORCH_EXTENSIONS_DIR=str(extensions))


@pytest.mark.parametrize("stage", STAGES)
def test_sleeping_changes_neither_losses_nor_weights(
    results: list[dict[str, Any]], stage: str
) -> None:
    for result in results:
        assert result[stage]["slept"] == result[stage]["awake"]
    checksums = [result[stage]["slept"][1] for result in results]
    assert checksums[0] == checksums[1]


@pytest.mark.parametrize("stage", STAGES)
def test_a_sleeping_rank_has_no_group_registered(results: list[dict[str, Any]], stage: str) -> None:
    for result in results:
        assert result[stage]["asleep"] == [[False, 0]] * 3


@pytest.mark.parametrize("stage", STAGES)
def test_a_resumed_rank_continues_bit_equal(results: list[dict[str, Any]], stage: str) -> None:
    for result in results:
        assert result[stage]["resumed"] == result[stage]["awake"][1]


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_are_averaged_over_ranks_and_summed_over_micro_batches(
    results: list[dict[str, Any]], stage: str, tmp_path: Path
) -> None:
    # The independent implementation: plain torch on the data of both ranks, 1/2 for two ranks.
    model = models.load("policy", make_model(tmp_path / "model"), "float32")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    for step in range(3):
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
        assert suspended["same_group"] == [True, False]
        assert suspended["equal"]


def test_nothing_was_compiled_at_run_time(results: list[dict[str, Any]], extensions: Path) -> None:
    assert results
    assert os.listdir(extensions) == []


def test_a_sleeper_gives_its_memory_back_row_5(results: list[dict[str, Any]]) -> None:
    found = results[0]["memory"]
    assert found["parameters"] > 38_000_000
    # ZeRO 1 in float32: weights, masters and two moments, 4 bytes each, on the only rank.
    assert found["bytes"] >= found["parameters"] * 16
    assert found["awake"] - found["asleep"] >= 0.8 * found["bytes"]
    assert found["equal"]
