"""Sequences in shared rows: the same numbers as alone, or a refusal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsm_trainer.groups.lease import registered_groups
from fsm_trainer.groups.rendezvous import Rendezvous
from fsm_trainer.machine.errors import CapabilityMissing
from fsm_trainer.training.packing import Layout, check
from fsm_trainer.training.trainer import ModelTrainer
from tests.training.ranks import Rank
from tests.training.updates import ROUNDING, models_in, ragged

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1,
}  # fmt: skip


@given(st.lists(st.integers(2, 9), min_size=1, max_size=12))
def test_a_layout_holds_each_token_once_in_order_and_gives_it_back(lengths: list[int]) -> None:
    time, sizes = max(lengths), torch.tensor(lengths)
    tokens = torch.arange(1, len(lengths) * time + 1).view(len(lengths), time)
    real = torch.arange(time) < sizes[:, None]
    tokens = tokens * real

    layout = Layout(tokens, sizes, packing=True)

    assert torch.equal(layout.restore(layout.targets)[:, 1:], tokens[:, 1:])
    assert layout.inputs.shape[1] == time - 1
    assert len(layout.inputs) <= len(lengths)
    placed = layout.inputs != 0
    assert sorted(layout.inputs[placed].tolist()) == sorted(
        token for row, n in zip(tokens.tolist(), lengths, strict=True) for token in row[: n - 1]
    )
    assert layout.positions is not None
    # A sequence's own column in the table is its position, whatever row it was put into.
    assert torch.equal(layout.positions[placed], (layout.inputs[placed] - 1) % time)


def test_sequences_that_fit_share_a_row() -> None:
    layout = Layout(torch.ones(4, 9, dtype=torch.int64), torch.tensor([5, 9, 4, 6]), packing=True)
    # Read are 4, 8, 3 and 5 tokens: 8, and 5 + 3, and 4 in rows of 8.
    assert layout.inputs.shape == (3, 8)
    assert layout.positions is not None
    assert layout.positions[1].tolist() == [0, 1, 2, 3, 4, 0, 1, 2]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return models_in(tmp_path_factory.mktemp("models"))


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    with Rendezvous.bind() as rendezvous:
        yield Rank(0, 1, rendezvous.address, tmp_path)
    assert registered_groups() == ()


def policy(trainer: ModelTrainer) -> torch.Tensor:
    scores = trainer.logprobs(ragged(), 0.8, with_entropy=True)
    assert scores.entropy is not None
    return scores.logprobs + scores.entropy


def value(trainer: ModelTrainer) -> torch.Tensor:
    return trainer.values(ragged())


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("compute", [policy, value])
def test_packed_numbers_and_gradients_are_those_of_rows_of_their_own(
    rank: Rank,
    models: dict[str, Path],
    compute: Callable[[ModelTrainer], torch.Tensor],
    stage: int,
) -> None:
    found = []
    for packing in (False, True):
        head = compute.__name__
        trainer = rank.start(
            rank.trainer(models[head], head=head, zero_stage=stage, packing=packing)
        )
        mask = ragged().attention_mask.bool()
        numbers = compute(trainer)[:, 1:][mask[:, 1:]]
        trainer.backward(numbers.square().mean(), last=True)
        norm = trainer.step()["grad_norm"]
        weights = torch.cat([t.flatten() for _, t in trainer.named_weights()])
        found.append((numbers.detach(), norm, weights))
        rank.stop(trainer)

    (alone, norm, weights), (packed, packed_norm, packed_weights) = found
    torch.testing.assert_close(packed, alone, rtol=ROUNDING, atol=ROUNDING)
    assert packed_norm == pytest.approx(norm, rel=ROUNDING)
    # Adam's first step is the rate, 1e-2, times g / (|g| + 1e-8): a hundredth of it is a gradient
    # that is wrong in its sign, or near 1e-8.
    torch.testing.assert_close(packed_weights, weights, rtol=0, atol=1e-2 * 1e-2)


def made(name: str, **more: Any) -> Any:
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **more})
    return getattr(transformers, f"{name}ForCausalLM")(config)


def asked(model: Any) -> Callable[..., torch.Tensor]:
    def hidden(tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        output = model(
            input_ids=tokens, position_ids=positions, use_cache=False, output_hidden_states=True
        )
        states: torch.Tensor = output.hidden_states[-1]
        return states

    return hidden


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("Qwen3", {}),
        ("Llama", {}),
        ("Mistral", {"sliding_window": 4}),
        ("Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
    ],
)
def test_transformers_keep_packed_sequences_apart(
    name: str, more: dict[str, Any], attention: str, dtype: torch.dtype
) -> None:
    model = made(name, **more, attn_implementation=attention).to(dtype)
    check(asked(model), 64, CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "more"),
    [
        # Positions of its own; attention without position ids; a state that runs through the row.
        ("OPT", {"ffn_dim": 64, "dropout": 0.0, "word_embed_proj_dim": 32}),
        ("Bloom", {"n_layer": 2, "n_head": 2}),
        ("Mamba", {"state_size": 8}),
    ],
)
def test_a_model_that_lets_packed_sequences_meet_is_refused(
    name: str, more: dict[str, Any], dtype: torch.dtype
) -> None:
    model = made(name, **more).to(dtype)
    with pytest.raises(CapabilityMissing, match=r"doesn't keep .* Set packing to false"):
        check(asked(model), 64, CPU)


def test_a_leak_that_is_smaller_than_rounding_shows_in_the_bits() -> None:
    # The convolution of an untrained LFM2 hardly mixes two tokens; a trained one does.
    model = made("Lfm2", layer_types=["conv", "full_attention"])
    with pytest.raises(CapabilityMissing, match="doesn't keep"):
        check(asked(model), 64, CPU)


def test_a_model_that_counts_positions_through_the_row_is_refused() -> None:
    hidden = asked(made("Qwen3"))
    with pytest.raises(CapabilityMissing, match="doesn't keep"):
        check(lambda *asked: hidden(*asked) + torch.arange(16)[:, None] / 16, 64, CPU)


def test_a_model_without_position_ids_is_refused() -> None:
    with pytest.raises(CapabilityMissing, match="takes no position ids"):
        check(lambda tokens: tokens, 64, CPU)  # type: ignore[misc]


def test_a_trainer_of_such_a_model_doesnt_start_and_leaves_no_group(rank: Rank) -> None:
    made("OPT", ffn_dim=64, word_embed_proj_dim=32).save_pretrained(rank.folder / "opt")
    trainer = rank.trainer(rank.folder / "opt", packing=True)
    with pytest.raises(CapabilityMissing, match="Set packing to false"):
        rank.start(trainer)
    assert registered_groups() == ()
    rank.stop(trainer)
    trainer = rank.start(rank.trainer(rank.folder / "opt"))
    rank.stop(trainer)
