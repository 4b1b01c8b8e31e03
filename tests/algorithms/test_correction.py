"""Weights for what engine and trainer compute unlike: by hand, and what must not change them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsm_trainer.algorithms.config import CorrectionConfig
from fsm_trainer.algorithms.correction import engine_correction

MASK = torch.tensor([[0.0, 1, 1, 1], [0, 1, 1, 0]])
# old / engine: 0.5, 1.5, 4 | 1.2, 1.5; the products are 3 and 1.8
RATIOS = torch.tensor([[9.0, 0.5, 1.5, 4.0], [9, 1.2, 1.5, math.nan]])
ENGINE = torch.full((2, 4), -1.0)


@pytest.mark.parametrize(
    ("config", "weights", "changed"),
    [
        ({"high": 2.0}, [[0, 0.5, 1.5, 2.0], [0, 1.2, 1.5, 0]], 1),
        ({"kind": "mask", "low": 0.6, "high": 2.0}, [[0, 0, 1.5, 0], [0, 1.2, 1.5, 0]], 2),
        ({"level": "sequence", "high": 2.0}, [[0, 2.0, 2.0, 2.0], [0, 1.8, 1.8, 0]], 3),
        (
            {"kind": "mask", "level": "sequence", "high": 2.0},
            [[0, 0, 0, 0], [0, 1.8, 1.8, 0]],
            3,
        ),
    ],
)
def test_weights_by_hand(config: dict[str, object], weights: list[object], changed: int) -> None:
    settings = CorrectionConfig.model_validate(config)

    found = engine_correction(ENGINE + RATIOS.log(), ENGINE, MASK, settings)

    torch.testing.assert_close(found.weights, torch.tensor(weights))
    assert int(found.changed.sum()) == changed


@pytest.mark.parametrize("kind", ["truncate", "mask"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_an_engine_that_agrees_changes_nothing(kind: str, level: str) -> None:
    settings = CorrectionConfig.model_validate({"kind": kind, "level": level, "high": 1.0})

    found = engine_correction(ENGINE, ENGINE.clone(), MASK, settings)

    assert torch.equal(found.weights, MASK) and not found.changed.any()


@given(st.integers(0, 1000), st.sampled_from(["token", "sequence"]), st.integers(1, 3))
def test_padding_rows_and_garbage_change_no_weight(seed: int, level: str, extra: int) -> None:
    settings = CorrectionConfig.model_validate({"level": level})
    generator = torch.Generator().manual_seed(seed)
    ours, theirs = (torch.randn(2, 4, generator=generator) for _ in "ab")
    pad = lambda x: torch.nn.functional.pad(x, (0, extra))  # noqa: E731

    plain = engine_correction(ours, theirs, MASK, settings).weights
    junk = torch.where(MASK != 0, theirs, torch.nan)
    wide = engine_correction(pad(ours), pad(junk), pad(MASK), settings).weights
    alone = engine_correction(ours[1:], theirs[1:], MASK[1:], settings).weights

    torch.testing.assert_close(wide, pad(plain))
    torch.testing.assert_close(alone, plain[1:])
