"""Checks of the numbers: what passes, what is caught before an update, and what is then told."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from fsm_trainer.algorithms.config import PPOConfig, RLOOConfig
from fsm_trainer.machine.errors import SelfCheckFailed
from fsm_trainer.training import selfcheck
from fsm_trainer.training.batch import Batch
from fsm_trainer.training.config import ChecksConfig, MismatchConfig, Verdict
from fsm_trainer.training.port import Scores, Traits
from fsm_trainer.training.ppo import actor_update, critic_update
from tests.training.ranks import VOCABULARY, make_model
from tests.training.test_ppo import PlainModel, advantages_for, on_ranks, rng, sampled

CONFIG = PPOConfig(minibatches=2)
FLOAT32 = Traits(torch.float32, layers=2)


def first_update(model: PlainModel, batch: Batch, **checks: Any) -> dict[str, float]:
    gain = advantages_for(batch)
    return actor_update(model, batch, gain, CONFIG, rng(), ChecksConfig(**checks), first=True)


def off_by_one_weight(model: PlainModel) -> None:
    with torch.no_grad():
        model.reference.embed.weight[3, 0] += 1e-3


def noisy_with_gradients(model: PlainModel) -> None:
    """As a dropout that is on in training mode only."""
    plain = model.logprobs

    def noisy(*args: Any, **kwargs: Any) -> Scores:
        scores = plain(*args, **kwargs)
        return Scores(scores.logprobs + 1e-3 * torch.is_grad_enabled(), scores.entropy)

    model.logprobs = noisy  # type: ignore[method-assign]


FAULTS = [
    (off_by_one_weight, "the first step's actor is not its reference"),
    (noisy_with_gradients, "the first minibatch's ratio is not 1"),
]


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize(("fault", "story"), FAULTS)
def test_a_fault_stops_every_rank_with_the_same_words_before_anything_moves(
    fault: Callable[[PlainModel], None], story: str, world: int
) -> None:
    batch = sampled(3)

    def broken(model: PlainModel) -> str:
        fault(model)
        with pytest.raises(SelfCheckFailed, match=story) as caught:
            first_update(model, batch)
        return str(caught.value)

    models, told = on_ranks(world, 2, broken)

    assert len(set(told)) == 1
    for model in models:
        assert model.weights == [], "a step was taken"


@pytest.mark.parametrize("world", [1, 2, 3])
def test_without_a_fault_every_rank_passes_and_says_so(world: int) -> None:
    batch = sampled(3)

    models, metrics = on_ranks(world, 2, lambda model: first_update(model, batch))

    for model, figures in zip(models, metrics, strict=True):
        assert figures["check/zero_kl"] == Verdict.PASSED
        assert figures["check/zero_kl_max"] == 0.0
        assert len(model.weights) == CONFIG.minibatches


def test_the_worst_sample_is_named_with_its_token_and_both_log_probabilities() -> None:
    batch, model = sampled(3), PlainModel()
    off_by_one_weight(model)
    with torch.no_grad():
        ours = model.logprobs(batch, 1.0).logprobs.float()
        theirs = model.logprobs(batch, 1.0, bank="reference").logprobs.float()
    apart = ((ours - theirs).abs() * batch.loss_mask).tolist()
    gap, row, token = max((x, r, t) for r, line in enumerate(apart) for t, x in enumerate(line))

    with pytest.raises(SelfCheckFailed) as caught:
        first_update(model, batch)

    there = f"{ours[row, token]:.9g} (actor), {theirs[row, token]:.9g} (reference)"
    assert f"log-ratio {gap:.3g} at most" in str(caught.value)
    assert f"worst at token {token} of sample 's{row}': log-probability {there}" in str(
        caught.value
    )


def test_warn_goes_on_and_says_so_and_off_looks_at_nothing() -> None:
    batch, models = sampled(3), [PlainModel(), PlainModel()]
    for model in models:
        off_by_one_weight(model)

    with capture_logs() as logs:
        warned = first_update(models[0], batch, zero_kl="warn", mismatch={"warn": 9.0})
        off = first_update(models[1], batch, zero_kl=False, mismatch={"warn": 9.0})

    assert (warned["check/zero_kl"], warned["check/zero_kl_max"] > 0) == (Verdict.FAILED, True)
    assert [one["log_level"] for one in logs] == ["warning"]
    assert off["check/zero_kl"] == Verdict.OFF
    assert "check/zero_kl_max" not in off
    assert all(len(model.weights) == CONFIG.minibatches for model in models)


def test_a_ratio_that_is_not_one_is_warned_of_as_a_check_that_failed() -> None:
    batch, model = sampled(3), PlainModel()
    noisy_with_gradients(model)

    with capture_logs():
        warned = first_update(model, batch, zero_kl="warn")

    assert warned["check/zero_kl"] == Verdict.FAILED
    assert warned["check/zero_kl_max"] == 0.0
    # Of what is 1e-3 everywhere, in either way of the log-ratio; k3 is about half its square.
    assert warned["check/unit_ratio_mean"] == pytest.approx(-1e-3, rel=1e-3)
    assert warned["check/unit_ratio_max"] == pytest.approx(1e-3, rel=1e-3)
    assert warned["check/unit_ratio_k3"] == pytest.approx(5e-7, rel=1e-2)


def test_after_the_first_step_an_actor_may_leave_its_reference() -> None:
    batch, model = sampled(3), PlainModel()
    off_by_one_weight(model)

    metrics = actor_update(model, batch, advantages_for(batch), CONFIG, rng(), first=False)

    assert "check/zero_kl" not in metrics
    assert metrics["train/kl"] > 0


# What two passes over a real model differ by.


@pytest.fixture(scope="module")
def forward(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., torch.Tensor]:
    """Log-probabilities and entropies of a small model.

    ``one`` row at a time, and with eager attention: numbers are added in another order.
    """
    from transformers import AutoModelForCausalLM

    folder = make_model(tmp_path_factory.mktemp("model") / "model", hidden=64, layers=4)

    def run(
        dtype: torch.dtype, one: bool = False, temperature: float = 1.0, autocast: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        attention = "eager" if one else "sdpa"
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation=attention
        )
        with torch.no_grad():
            for weight in model.parameters():  # sharper than at random: logits of a trained size
                weight.mul_(4.0 if weight.dim() > 1 else 1.0)
            rows = TOKENS.split(1) if one else [TOKENS]
            with torch.autocast("cpu", enabled=autocast):
                logits = torch.cat([model(row[:, : 40 - one]).logits for row in rows])
        drawn = torch.distributions.Categorical(logits=logits[:, :30].float() / temperature)
        return drawn.log_prob(TOKENS[:, 1:31]), drawn.entropy()

    return run


TOKENS = torch.randint(VOCABULARY, (16, 40), generator=rng(0))
MASK = torch.ones(16, 30)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_in_other_batch_shapes_is_within_the_derived_bound(
    forward: Callable[..., Any], dtype: torch.dtype
) -> None:
    (together, _), (alone, _) = forward(dtype), forward(dtype, one=True)
    gap = selfcheck.measure(together, alone, MASK)
    allowed = selfcheck.limits(Traits(dtype, layers=4), together, MASK, alike=False)

    assert gap.max > 0, "the case must round differently"
    assert gap.within(allowed)
    # Neither is the bound a skip: it is within two orders of what happens.
    assert gap.max > allowed.max / 100


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_passes_in_like_shapes_are_equal_and_a_temperature_is_out_of_bounds(
    forward: Callable[..., Any], dtype: torch.dtype
) -> None:
    (first, _), (again, _) = forward(dtype), forward(dtype)
    warmer, _ = forward(dtype, temperature=1.05)
    allowed = selfcheck.limits(Traits(dtype, layers=4), first, MASK)

    assert selfcheck.measure(first, again, MASK).max == 0.0
    assert not selfcheck.measure(first, warmer, MASK).within(allowed)


def test_in_float32_one_part_in_a_hundred_million_is_allowed_either_way() -> None:
    logprobs = torch.full((2, 3), -0.001, dtype=torch.float64)
    mask = torch.ones(2, 3)
    allowed = selfcheck.limits(FLOAT32, logprobs, mask)

    assert allowed == (1e-8, 1e-8, 1e-8)
    for sign in (1, -1):
        assert selfcheck.measure(logprobs, logprobs + sign * 0.9e-8, mask).within(allowed)
        assert not selfcheck.measure(logprobs, logprobs + sign * 1.1e-8, mask).within(allowed)
    assert not selfcheck.measure(logprobs, logprobs * math.nan, mask).within(allowed)


def test_the_derived_bound_is_that_of_its_formula() -> None:
    # bfloat16: u = 2^-8; 3 layers of 16 roundings: s = u sqrt(48) M, M = 2, the largest 4.
    logprobs, mask = torch.tensor([[0.0, -4.0, 0.0, -99.0]] * 4), torch.tensor([[1, 1, 1, 0.0]] * 4)
    size = math.sqrt(16 / 3)
    unit = 2**-8 * math.sqrt(48)

    allowed = selfcheck.limits(Traits(torch.bfloat16, layers=3), logprobs, mask, alike=False)

    expected = (6 * unit * size / math.sqrt(4), 6 * unit * 4, 2 * (unit * size) ** 2)
    assert tuple(allowed) == pytest.approx(expected)


SEEN = [
    ("train/kl", 0.0, 0.9),
    ("actor/clip_fraction", 0.0, 0.9),
    ("actor/learning_rate", 1e-5, 0.0),
    ("actor/policy_loss", 0.0, 0.5),
    ("actor/grad_norm", 1.0, 0.0),
    ("actor/advantage_mean", 0.0, 0.01),
    ("check/zero_kl", 1.0, 0.1),
    ("check/replicas_actor", 25.0, 24.0),
    ("rollout/length_mean", 6.0, 6.1),
    ("critic/learning_rate", 1e-5, 0.0),
    ("critic/loss", 0.01, 0.5),
]


@pytest.mark.parametrize(("name", "was", "now"), SEEN)
def test_in_bfloat16_a_figure_that_is_another_is_not_taken_for_rounding(
    name: str, was: float, now: float
) -> None:
    traits, batch = Traits(torch.bfloat16, layers=28), sampled(3)
    figures = {name: was, "actor/advantage_max": 2.0}
    batch = batch.select([*range(len(batch))] * 8)

    allowed = selfcheck.spread(traits, batch, figures, CONFIG, steps=4, scored=False, given=True)

    assert allowed[name] < abs(now - was)


def test_what_a_step_may_differ_by_is_that_of_the_formula() -> None:
    # bfloat16, 3 layers: as above, over 4 rows; M is 2, and 4 steps double what they sum up.
    batch = replace(
        sampled(3).select([0, 1, 2, 3]),
        loss_mask=torch.ones(4, 5), engine_logprobs=torch.full((4, 5), -2.0),
        rewards=torch.tensor([2.0, -2.0, 1.0, 1.0]),
    )  # fmt: skip
    unit = 2**-8 * math.sqrt(48)
    figures = {"actor/entropy": 3.0, "train/kl": 0.02, "actor/policy_loss": 0.0,
               "actor/clip_fraction": 0.1, "actor/grad_norm": 5.0, "check/mismatch_max": 0.1,
               "rollout/length_mean": 2.0}  # fmt: skip

    allowed = selfcheck.spread(
        Traits(torch.bfloat16, layers=3), batch, figures, CONFIG, steps=4, scored=False, given=True
    )

    assert allowed == pytest.approx({
        "actor/entropy": 6 * unit,
        "train/kl": (0.2 + 0.02) * 6 * unit + 2 * (2 * unit) ** 2,
        "actor/policy_loss": 12 * unit,
        "actor/clip_fraction": 12 * unit + 1 / 20,
        "actor/grad_norm": 12 * unit * 5.0,
        "check/mismatch_max": 12 * unit,
        "rollout/length_mean": 2**-21 * 2.0,
    })  # fmt: skip


def test_an_advantage_with_kls_in_it_moves_with_those_of_its_answer() -> None:
    # As above with M 1: the KLs of 5 tokens, not independent, each a tenth.
    batch = replace(
        sampled(3).select([0, 1, 2, 3]),
        loss_mask=torch.ones(4, 5), engine_logprobs=torch.full((4, 5), -1.0),
    )  # fmt: skip
    config, traits = RLOOConfig(kl_coefficient=0.1), Traits(torch.bfloat16, layers=3)
    figures = {"actor/advantage_mean": 0.0, "actor/advantage_max": 2.0}

    fresh, scored = (
        selfcheck.spread(traits, batch, figures, config, steps=4, scored=scored, given=False)
        for scored in (False, True)
    )

    assert fresh["actor/advantage_mean"] == pytest.approx(6 * 2**-8 * math.sqrt(48) * 0.5)
    assert scored["actor/advantage_mean"] == pytest.approx(2**-21 * 2.0)


CAUSES = {
    "temperature": ({"temperature": 1.05}, FLOAT32),
    "dropout": ({}, FLOAT32._replace(dropout=0.1)),
    "precision": ({"autocast": True}, FLOAT32),
    "batch shapes": ({"one": True}, FLOAT32),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_the_likeliest_cause_is_the_one_that_the_numbers_speak_for(
    forward: Callable[..., Any], cause: str
) -> None:
    change, traits = CAUSES[cause]
    (ours, entropy), (theirs, _) = forward(torch.float32), forward(torch.float32, **change)
    if cause == "dropout":
        theirs = ours + torch.randn(ours.shape, generator=rng(3))

    assert cause in selfcheck.causes(traits, MASK, ours, theirs, entropy)[0]


def test_log_probs_that_are_all_the_same_are_no_sign_of_torn_weights() -> None:
    ours = torch.full((1, 4), -2.0)
    theirs = ours + torch.tensor([0.0, 1e-3, 0.0, 2e-3])

    found = selfcheck.causes(FLOAT32, torch.ones(1, 4), ours, theirs, torch.ones(1, 4))

    assert found.index("torn weights") > found.index("another temperature")


def test_zeroed_weights_are_told_as_torn_and_routes_only_where_there_are_experts(
    forward: Callable[..., Any],
) -> None:
    ours, entropy = forward(torch.float32)
    zeroed = torch.full_like(ours, -math.log(VOCABULARY))  # what an engine without weights answers
    dense, routed = (
        selfcheck.causes(FLOAT32._replace(experts=experts), MASK, ours, zeroed, entropy)
        for experts in (False, True)
    )

    assert dense[0] == "torn weights"
    assert [cause for cause in routed if cause not in dense] == ["other routes to the experts"]


# Trainer against engine.


def shifted(batch: Batch, model: PlainModel, by: torch.Tensor) -> Batch:
    """The batch as an engine would have it that is off ``by`` nats."""
    with torch.no_grad():
        logprobs = model.logprobs(batch, 1.0).logprobs
    return replace(batch, engine_logprobs=((logprobs + by) * batch.loss_mask).float())


def test_the_meter_tells_mean_maximum_k3_and_each_third_of_an_answer() -> None:
    # Answers of 6, 3 and 1 tokens, off by 0.1 in their first, 0.2 in their middle and 0.6 in their
    # last third; an answer of one token is all first.
    batch, model = sampled(0).select([0, 1, 2]), PlainModel()
    mask, by = torch.zeros_like(batch.loss_mask), torch.zeros_like(batch.loss_mask)
    mask = torch.nn.functional.pad(mask, (0, 7 - mask.shape[1]))[:, :7]
    by = mask.clone()
    mask[0, 1:7], by[0, 1:7] = 1, torch.tensor([0.1, 0.1, -0.2, 0.2, 0.6, 0.6])
    mask[1, 2:5], by[1, 2:5] = 1, torch.tensor([0.1, 0.2, 0.6])
    mask[2, 3], by[2, 3] = 1, 0.1
    tokens = torch.ones(3, 7, dtype=torch.int64)
    batch = replace(batch, tokens=tokens, attention_mask=tokens, loss_mask=mask)
    batch = shifted(batch, model, by)
    logprobs = model.logprobs(batch, 1.0).logprobs.detach().float()
    warn = MismatchConfig(warn=9.0)

    found = selfcheck.mismatch(model, batch, logprobs, logprobs, warn)

    # The engine sampled: d = log p - log q is -by, and k3 is exp(d) - 1 - d.
    off = [0.1, 0.1, -0.2, 0.2, 0.6, 0.6, 0.1, 0.2, 0.6, 0.1]
    assert found == pytest.approx({
        "check/mismatch_first": 0.1,
        "check/mismatch_middle": 0.2,
        "check/mismatch_last": 0.6,
        "check/mismatch_mean": sum(map(abs, off)) / 10,
        "check/mismatch_max": 0.6,
        "check/mismatch_k3": sum(math.exp(-x) - 1 + x for x in off) / 10,
    }, abs=1e-6)  # fmt: skip


@pytest.mark.parametrize("world", [1, 2])
def test_a_mismatch_beyond_the_limit_stops_before_the_update_and_below_it_warns(world: int) -> None:
    model = PlainModel()
    batch = shifted(sampled(3), model, torch.tensor(0.02))

    def run(model: PlainModel) -> str:
        checks = ChecksConfig(mismatch=MismatchConfig(warn=0.001, stop=0.01))
        with pytest.raises(SelfCheckFailed, match=r"trainer and engine differ by 0\.02") as caught:
            actor_update(model, batch, advantages_for(batch), CONFIG, rng(), checks)
        assert model.weights == []
        checks = ChecksConfig(mismatch=MismatchConfig(warn=0.001, stop=0.03))
        actor_update(model, batch, advantages_for(batch), CONFIG, rng(), checks)
        return str(caught.value)

    with capture_logs() as logs:
        _, told = on_ranks(world, 64, run)

    assert len(set(told)) == 1
    assert len(logs) == 1, "one rank warns for all"


def test_unless_told_otherwise_half_precision_may_differ_by_more_and_nothing_stops() -> None:
    assert MismatchConfig().warning(exact=True) == 1e-4
    assert MismatchConfig().warning(exact=False) == 0.05
    assert MismatchConfig(warn=0.5).warning(exact=True) == 0.5
    assert MismatchConfig().stop is None


def test_the_value_head_is_not_scaled_by_the_temperature() -> None:
    batch = sampled(5)
    cold, warm = (PPOConfig(temperature=temperature) for temperature in (0.25, 4.0))

    found = [critic_update(PlainModel(), batch, config, rng()) for config in (cold, warm)]

    assert torch.equal(found[0][0].advantages, found[1][0].advantages)
    assert torch.equal(found[0][0].returns, found[1][0].returns)
    assert found[0][1] == found[1][1]
    assert found[0][0].returns.any()


def test_a_folder_of_a_model_tells_its_traits(tmp_path: Path) -> None:
    from fsm_trainer.training import models

    model = models.load("policy", make_model(tmp_path / "model"), "bfloat16")

    assert models.traits(model) == Traits(torch.bfloat16, layers=2)
    model.config.attention_dropout = 0.2
    assert models.traits(model).dropout == 0.2
    model.model.extra = torch.nn.Dropout(0.3)
    assert models.traits(model.eval()).dropout == 0.0
    assert models.traits(model.train()).dropout == 0.3
