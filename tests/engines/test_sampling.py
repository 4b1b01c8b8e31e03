"""Draws against an independent SplitMix64 and against the distribution itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fsm_trainer.engines.sampling import draw, uniform
from fsm_trainer.machine.errors import ActionFailed

WORD = 2**64


def splitmix64(state: int, count: int) -> list[int]:
    """The generator as its authors wrote it, in Python's integers."""
    words = []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) % WORD
        word = state
        word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % WORD
        word = (word ^ (word >> 27)) * 0x94D049BB133111EB % WORD
        words.append(word ^ (word >> 31))
    return words


def test_uniforms_are_the_splitmix64_stream_of_a_mixed_seed() -> None:
    # Published first outputs for seed 1234567.
    assert splitmix64(1234567, 3) == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]
    for seed in (0, 1, 2**63 + 5, WORD - 1):
        # mix(seed) is the output of the state that precedes seed by one increment.
        mixed = splitmix64((seed - 0x9E3779B97F4A7C15) % WORD, 1)[0]
        expected = [(word >> 12) / 2**52 for word in splitmix64(mixed, 40)]
        positions = np.arange(40, dtype=np.uint64)
        found = uniform(np.full(40, seed, dtype=np.uint64), positions)
        assert found.tolist() == expected


def test_equally_spaced_uniforms_reproduce_the_distribution() -> None:
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(0)) * 2
    count = 20_000
    uniforms = (np.arange(count) + 0.5) / count
    temperatures = np.full(count, 0.5, dtype=np.float32)
    tokens, logprobs = draw(logits.expand(count, -1), temperatures, uniforms)
    exact = torch.softmax(logits[0].double() / 0.5, -1)
    # A cell of the inverted distribution holds its share of the grid, give or take one point.
    counts = torch.bincount(tokens, minlength=50).double()
    assert float((counts / count - exact).abs().max()) < 1.5 / count
    assert torch.allclose(logprobs.double(), exact.log()[tokens], atol=1e-5)


def test_extreme_uniforms_never_draw_an_impossible_token() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]]).expand(2, -1)
    ends = np.array([0.0, 1 - 2.0**-52])
    tokens, _ = draw(logits, np.ones(2, dtype=np.float32), ends)
    assert tokens.tolist() == [1, 3]


def test_temperature_zero_takes_the_likeliest() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [0.0, 3.0, 1.0]])
    temperatures = np.array([0.0, 1.0], dtype=np.float32)
    tokens, logprobs = draw(logits, temperatures, np.array([0.0, 0.0]))
    assert tokens.tolist() == [1, 0]
    expected = torch.log_softmax(logits[0], -1)
    assert torch.equal(logprobs, expected[[1, 0]])


def test_logits_that_are_not_numbers_are_refused() -> None:
    with pytest.raises(ActionFailed, match="not finite"):
        draw(torch.tensor([[0.0, torch.nan]]), np.ones(1, dtype=np.float32), np.zeros(1))
