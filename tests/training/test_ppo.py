"""PPO, GRPO and warm-up on a plain torch model behind the port, on one rank and on several."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fsm_trainer.algorithms.config import (
    CorrectionConfig,
    GRPOConfig,
    PolicyConfig,
    PPOConfig,
    ReinforcePPConfig,
    RLOOConfig,
)
from fsm_trainer.algorithms.losses import entropy
from fsm_trainer.data.trajectory import Sample, Status, Trajectory
from fsm_trainer.machine.errors import DataError
from fsm_trainer.machine.version import Version
from fsm_trainer.training.batch import Batch, collate
from fsm_trainer.training.port import Bank, ModelPort, Scores, Traits
from fsm_trainer.training.ppo import (
    actor_update,
    critic_update,
    explained_variance,
    score,
)
from fsm_trainer.training.warmup import Pair, warmup_steps

VOCABULARY, WIDTH, PAD = 7, 6, 0
CPU = torch.device("cpu")


class Net(nn.Module):
    """Causal: token t's state mixes its own embedding with the mean of all up to it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.mix = nn.Linear(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.value = nn.Linear(WIDTH, 1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        embedded = self.embed(tokens)
        steps = torch.arange(1, tokens.shape[1] + 1)[:, None]
        past = embedded.cumsum(dim=1) / steps
        hidden: torch.Tensor = self.mix(torch.cat([embedded, past], dim=-1)).tanh()
        return hidden


class Ranks:
    """Sums over threads, in rank order; no wait is longer than its deadline."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._slots: list[torch.Tensor | None] = [None] * size
        self._barrier = threading.Barrier(size, timeout=30)

    def all_reduce(self, rank: int, tensor: torch.Tensor) -> torch.Tensor:
        self._slots[rank] = tensor.clone()
        self._barrier.wait()
        total = torch.stack([slot for slot in self._slots if slot is not None]).sum(dim=0)
        self._barrier.wait()
        return total


class PlainModel:
    """The port over a float64 net and plain gradient descent."""

    def __init__(
        self,
        *,
        micro_batch: int = 64,
        micro_batch_tokens: int | None = None,
        ranks: Ranks | None = None,
        rank: int = 0,
        seed: int = 0,
        rate: float = 0.5,
        adam: bool = False,
    ) -> None:
        torch.manual_seed(seed)
        self.net = Net().double()
        self.reference = copy.deepcopy(self.net)
        self.ranks, self.rank = ranks or Ranks(1), rank
        self.world_size, self.device = self.ranks.size, CPU
        self.micro_batch, self.rate = micro_batch, rate
        self.micro_batch_tokens, self.packing = micro_batch_tokens, False
        kind: Callable[..., torch.optim.Optimizer] = torch.optim.Adam if adam else torch.optim.SGD
        self.optimizer = kind(self.net.parameters(), lr=rate)
        self.gradients: list[torch.Tensor] = []
        self.weights: list[dict[str, torch.Tensor]] = []
        self.forward_rows = 0
        self._closed = False

    @property
    def traits(self) -> Traits:
        return Traits(self.net.mix.weight.dtype, layers=1)

    def logprobs(
        self,
        batch: Batch,
        temperature: float,
        *,
        bank: Bank = "live",
        with_entropy: bool = False,
    ) -> Scores:
        self._fits(batch)
        self.forward_rows += len(batch)
        net = self.net if bank == "live" else self.reference
        logits = net.head(net(batch.tokens))[:, :-1] / temperature
        chosen = logits.log_softmax(-1).gather(-1, batch.tokens[:, 1:, None]).squeeze(-1)
        left = (1, 0)
        spread = nn.functional.pad(entropy(logits), left) if with_entropy else None
        return Scores(nn.functional.pad(chosen, left), spread)

    def values(self, batch: Batch) -> torch.Tensor:
        self._fits(batch)
        states = self.net(batch.tokens)[:, :-1]
        return nn.functional.pad(self.net.value(states).squeeze(-1), (1, 0))

    def _fits(self, batch: Batch) -> None:
        tokens = self.micro_batch_tokens
        assert len(batch) <= self.micro_batch if tokens is None else batch.tokens.numel() <= tokens

    def backward(self, loss: torch.Tensor, last: bool) -> None:
        assert not self._closed, "a micro-batch after the boundary"
        loss.backward()
        self._closed = last

    def step(self) -> Mapping[str, float]:
        assert self._closed, "a step before the boundary"
        self._closed = False
        parameters = list(self.net.parameters())
        own = torch.cat(
            [(p.new_zeros(p.shape) if p.grad is None else p.grad).flatten() for p in parameters]
        )
        mean = self.all_reduce(own) / self.world_size
        self.gradients.append(mean)
        self.weights.append({k: v.clone() for k, v in self.net.state_dict().items()})
        at = 0
        for p in parameters:
            p.grad = mean[at : at + p.numel()].view_as(p).clone()
            at += p.numel()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {"grad_norm": float(mean.norm()), "learning_rate": self.rate}

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.ranks.all_reduce(self.rank, tensor)


def sampled(seed: int, count: int = 11, net: Net | None = None) -> Batch:
    """Ragged random trajectories, some with a masked stretch between two turns."""
    random = np.random.default_rng(seed)
    rows = []
    for number in range(count):
        prompt, answer = int(random.integers(1, 4)), int(random.integers(1, 7))
        mask = np.array([0] * prompt + [1] * answer, dtype=np.uint8)
        if answer > 3:
            mask[prompt + 1] = 0
        tokens = random.integers(1, VOCABULARY, prompt + answer).astype(np.int32)
        rows.append(
            Trajectory(
                sample=Sample(f"s{number}", "p", None, group=f"g{number // 3}"),
                tokens=tokens,
                loss_mask=mask,
                logprobs=-(mask * random.random(len(mask))).astype(np.float32),
                version=Version(0, 0),
                status=Status.TRUNCATED if number % 4 == 0 else Status.FINISHED,
                text="",
                reward=float(random.random()),
            )
        )
    return collate(rows, PAD)


def advantages_for(batch: Batch, seed: int = 5) -> torch.Tensor:
    table = torch.randn(batch.tokens.shape, generator=torch.Generator().manual_seed(seed))
    return table * batch.loss_mask


def rng(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# Steps of rate 0.5 move the ratios across the clip in later minibatches and epochs.
FULL = PPOConfig(
    epochs=2, critic_epochs=2, minibatches=2, entropy_coefficient=0.01, kl_coefficient=0.1, clip=0.1
)


def update_everything(model: PlainModel, batch: Batch, config: PPOConfig) -> dict[str, float]:
    advantages, critic = critic_update(model, batch, config, rng())
    actor = actor_update(model, batch, advantages.advantages, config, rng(2))
    return critic | actor


def on_ranks(
    world: int, micro_batch: int, work: Callable[[PlainModel], Any], **settings: Any
) -> tuple[list[PlainModel], list[Any]]:
    ranks = Ranks(world)
    models = [
        PlainModel(micro_batch=micro_batch, ranks=ranks, rank=r, **settings) for r in range(world)
    ]
    with ThreadPoolExecutor(world) as pool:
        futures = [pool.submit(work, model) for model in models]
        return models, [future.result(timeout=60) for future in futures]


def test_the_stand_in_is_a_model_port() -> None:
    port: ModelPort = PlainModel()

    assert port.world_size == 1


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
@pytest.mark.parametrize(
    ("world", "micro_batch", "tokens"),
    [
        (1, 2, None), (2, 64, None), (2, 2, None), (3, 1, None), (8, 64, None),
        (1, 1, 12), (3, 1, 20), (8, 1, 10),
    ],
)  # fmt: skip
def test_gradients_depend_neither_on_micro_batches_nor_on_ranks(
    aggregation: str, world: int, micro_batch: int, tokens: int | None
) -> None:
    batch = sampled(0)
    length = 6 if aggregation == "constant" else None
    config = FULL.model_copy(update={"aggregation": aggregation, "aggregation_length": length})
    (alone,), (expected,) = on_ranks(1, 64, lambda m: update_everything(m, batch, config))

    models, metrics = on_ranks(
        world,
        micro_batch,
        lambda m: update_everything(m, batch, config),
        micro_batch_tokens=tokens,
    )

    assert len(alone.gradients) == 2 * 2 + 2 * 2
    for model, figures in zip(models, metrics, strict=True):
        for here, there in zip(model.gradients, alone.gradients, strict=True):
            torch.testing.assert_close(here, there, rtol=0, atol=1e-6)
        assert figures == pytest.approx(expected, abs=1e-5)
    assert all(figures == metrics[0] for figures in metrics), "ranks disagree on the metrics"


EVERYTHING: dict[str, Any] = {
    "clip_high": 0.15,
    "dual_clip": 1.3,
    "engine_correction": CorrectionConfig(kind="mask", low=0.5, high=1.2),
    "kl_coefficient": 0.3,
    "entropy_coefficient": 0.1,
    "epochs": 2,
    "minibatches": 2,
    "clip": 0.1,
}


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(
    "config",
    [
        GRPOConfig(
            kl_in="reward",
            kl_estimator="k1",
            ratio="geometric",
            aggregation="sequence",
            **EVERYTHING,
        ),
        RLOOConfig(**EVERYTHING),
        ReinforcePPConfig(aggregation="constant", aggregation_length=6, **EVERYTHING),
    ],
    ids=lambda config: config.name,
)
def test_without_a_critic_too_ranks_change_nothing(config: PolicyConfig, world: int) -> None:
    # Whitening is over the whole batch, so each rank's share of it must not show.
    batch = moved(sampled(0))
    (alone,), (expected,) = on_ranks(1, 64, lambda m: actor_update(m, batch, None, config, rng()))

    models, metrics = on_ranks(world, 2, lambda m: actor_update(m, batch, None, config, rng()))

    assert expected["check/engine_corrected"] > 0 and expected["actor/clip_fraction"] > 0
    for model, figures in zip(models, metrics, strict=True):
        for here, there in zip(model.gradients, alone.gradients, strict=True):
            torch.testing.assert_close(here, there, rtol=0, atol=1e-6)
        assert figures == pytest.approx(expected, abs=1e-5)


def moved(batch: Batch) -> Batch:
    """The batch with an engine that is near the policy, as a real one is."""
    model = PlainModel()
    with torch.no_grad():
        near = model.logprobs(batch, 1.0).logprobs.float()
    noise = 0.3 * torch.randn(near.shape, generator=rng(3))
    return replace(batch, engine_logprobs=(near + noise) * batch.loss_mask)


def loss_as_written(
    net: Net, model: PlainModel, batch: Batch, rows: list[int], gain: torch.Tensor, c: PolicyConfig
) -> float:
    """The minibatch's loss, a token at a time, from the papers' formulas."""
    total, count = 0.0, 0
    for row in rows:
        tokens = batch.tokens[row]
        new, old, ref = (
            (n.head(n(tokens[None]))[0] / c.temperature).log_softmax(-1)
            for n in (net, model.start, model.reference)  # type: ignore[attr-defined]
        )
        for t in range(1, len(tokens)):
            if not batch.loss_mask[row, t]:
                continue
            token = int(tokens[t])
            logp, logq, logr = (float(x[t - 1, token]) for x in (new, old, ref))
            ratio, a = math.exp(logp - logq), float(gain[row, t])
            clipped = min(max(ratio, 1 - c.clip), 1 + (c.clip_high or c.clip))
            kept = min(ratio * a, clipped * a)
            if c.dual_clip is not None and a < 0:
                kept = max(kept, c.dual_clip * a)
            if c.engine_correction is not None:
                weight = math.exp(logq - float(batch.engine_logprobs[row, t]))
                inside = c.engine_correction.low <= weight <= c.engine_correction.high
                kept *= weight if inside else 0.0
            d = logr - logp
            penalty = {"k1": -d, "k2": d * d / 2, "k3": math.exp(d) - 1 - d}[c.kl_estimator]
            spread = -sum(math.exp(float(x)) * float(x) for x in new[t - 1])
            total += -kept + c.kl_coefficient * penalty
            total -= c.entropy_coefficient * spread
            count += 1
    return total / count


@torch.no_grad()
def finite_differences(net: Net, loss: Callable[[Net], float], picks: list[int]) -> list[float]:
    slopes = []
    for pick in picks:
        sides = []
        for shift in (1e-5, -1e-5):
            moved = copy.deepcopy(net)
            vector = nn.utils.parameters_to_vector(moved.parameters())
            vector[pick] += shift
            nn.utils.vector_to_parameters(vector, moved.parameters())
            sides.append(loss(moved))
        slopes.append((sides[0] - sides[1]) / 2e-5)
    return slopes


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_actors_gradient_is_the_finite_difference_of_the_loss_as_written(
    estimator: str,
) -> None:
    batch = moved(sampled(1, count=4))
    config = PolicyConfig(
        clip=0.1,
        clip_high=0.15,
        dual_clip=1.2,
        engine_correction=CorrectionConfig(kind="mask", low=0.85, high=1.2),
        epochs=2,
        minibatches=1,
        whiten_advantages=False,
        kl_estimator=estimator,  # type: ignore[arg-type]
        kl_coefficient=0.3,
        entropy_coefficient=0.2,
        temperature=1.3,
    )
    gain = advantages_for(batch)
    model = PlainModel(rate=1.0)
    with torch.no_grad():
        for p in model.reference.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=rng(9), dtype=p.dtype))
    model.start = copy.deepcopy(model.net)  # type: ignore[attr-defined]

    metrics = actor_update(model, batch, gain, config, rng())

    second = copy.deepcopy(model.net)
    second.load_state_dict(model.weights[1])
    picks = list(range(0, model.gradients[1].numel(), 11))
    expected = finite_differences(
        second,
        lambda net: loss_as_written(net, model, batch, [0, 1, 2, 3], gain, config),
        picks,
    )
    assert metrics["actor/clip_fraction"] > 0, "the case must reach the clip"
    assert 0 < metrics["check/engine_corrected"] < 1, "the case must reach the mask"
    assert model.gradients[1][picks].tolist() == pytest.approx(expected, abs=2e-6)


def test_the_critics_first_loss_and_gradient_are_those_of_its_formula() -> None:
    # One epoch, one minibatch: values are the old ones, so the loss is mean((V - R)^2) / 2 with
    # R = A + V; with lambda = gamma = 1, R is the reward itself.
    batch = sampled(2)
    config = PPOConfig(minibatches=1, lam=1.0)
    model = PlainModel()
    values = model.values(batch)
    mask = batch.loss_mask != 0
    expected = (values - batch.rewards[:, None])[mask].square().mean() / 2
    gradient = torch.autograd.grad(expected, list(model.net.parameters()), allow_unused=True)

    found, metrics = critic_update(model, batch, config, rng())

    assert metrics["critic/loss"] == pytest.approx(expected.item(), abs=1e-6)
    flat = torch.cat(
        [
            (torch.zeros_like(p) if g is None else g).flatten()
            for p, g in zip(model.net.parameters(), gradient, strict=True)
        ]
    )
    torch.testing.assert_close(model.gradients[0], flat, rtol=0, atol=1e-6)
    returns = (batch.rewards[:, None] * batch.loss_mask).float()
    torch.testing.assert_close(found.returns, returns, rtol=0, atol=1e-6)


def test_on_policy_the_first_ratio_is_one_and_the_reference_is_near() -> None:
    batch = sampled(3)

    metrics = actor_update(PlainModel(), batch, advantages_for(batch), FULL, rng(), first=True)

    # The tables are float32, the stand-in float64: half a unit in the last place of ln p < 8.
    assert metrics["check/ratio_drift"] < 5e-7
    assert metrics["check/zero_kl_max"] == metrics["check/zero_kl_k3"] == 0.0
    assert metrics["train/kl"] == metrics["train/kl_k1"] == 0.0


def test_in_the_models_own_precision_the_first_ratio_is_one_exactly() -> None:
    batch = sampled(3)
    model = PlainModel(micro_batch=3)
    model.net.float()
    model.reference.float()

    metrics = actor_update(model, batch, advantages_for(batch), FULL, rng())

    assert metrics["check/ratio_drift"] == 0.0


def test_a_forward_pass_that_is_not_repeatable_shows_as_ratio_drift() -> None:
    batch = sampled(3)
    model = PlainModel()
    plain = model.logprobs

    def noisy(*args: Any, **kwargs: Any) -> Scores:
        scores = plain(*args, **kwargs)
        return Scores(scores.logprobs + 0.01 * torch.is_grad_enabled(), scores.entropy)

    model.logprobs = noisy  # type: ignore[method-assign]

    metrics = actor_update(model, batch, advantages_for(batch), FULL, rng())

    assert metrics["check/ratio_drift"] == pytest.approx(0.01, abs=1e-6)


def test_the_same_seeds_give_the_same_bits() -> None:
    runs = [PlainModel(micro_batch=3), PlainModel(micro_batch=3)]

    figures = [update_everything(model, sampled(4), FULL) for model in runs]

    assert figures[0] == figures[1]
    for left, right in zip(*(model.net.parameters() for model in runs), strict=True):
        assert torch.equal(left, right)


def test_another_generator_seed_gives_other_minibatches() -> None:
    models = [PlainModel(), PlainModel()]

    for seed, model in enumerate(models):
        actor_update(model, sampled(4), advantages_for(sampled(4)), FULL, rng(seed))

    assert not torch.equal(models[0].gradients[0], models[1].gradients[0])


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 4), st.sampled_from([math.nan, math.inf, -1e30]))
def test_padding_and_garbage_in_masked_places_change_nothing(
    seed: int, extra: int, junk: float
) -> None:
    clean = sampled(seed, count=5)
    gain = advantages_for(clean)
    pad = lambda x: nn.functional.pad(x, (0, extra))  # noqa: E731
    dirt = lambda x, m: torch.where(m != 0, x, torch.full_like(x, junk))  # noqa: E731
    wide = replace(
        clean,
        tokens=pad(clean.tokens),
        attention_mask=pad(clean.attention_mask),
        loss_mask=pad(clean.loss_mask),
        engine_logprobs=dirt(pad(clean.engine_logprobs), pad(clean.loss_mask)),
    )
    models = [PlainModel(), PlainModel()]

    figures = [
        actor_update(models[0], clean, gain, FULL, rng()),
        actor_update(models[1], wide, dirt(pad(gain), wide.loss_mask), FULL, rng()),
    ]

    assert figures[0] == pytest.approx(figures[1], abs=1e-6)
    for left, right in zip(models[0].gradients, models[1].gradients, strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=1e-6)


class Dirty(PlainModel):
    """Gives NaN wherever the mask doesn't count."""

    def logprobs(self, batch: Batch, *args: Any, **kwargs: Any) -> Scores:
        clean = super().logprobs(batch, *args, **kwargs)
        logprobs, spread = (
            None if x is None else x.masked_fill(batch.loss_mask == 0, math.nan) for x in clean[:2]
        )
        assert logprobs is not None
        return Scores(logprobs, spread)

    def values(self, batch: Batch) -> torch.Tensor:
        return super().values(batch).masked_fill(batch.loss_mask == 0, math.nan)


def test_garbage_that_the_model_gives_in_masked_places_changes_nothing() -> None:
    batch = sampled(12)
    clean, dirty = PlainModel(micro_batch=4), Dirty(micro_batch=4)

    figures = [update_everything(model, batch, FULL) for model in (clean, dirty)]
    losses = [warmup_steps(m, PAIRS, 1, 5, rng(), pad_token=PAD) for m in (clean, dirty)]

    assert figures[0] == figures[1]
    assert losses[0] == losses[1]
    for left, right in zip(clean.gradients, dirty.gradients, strict=True):
        assert torch.equal(left, right)


@settings(max_examples=15, deadline=None)
@given(st.permutations(range(6)))
def test_the_order_of_the_rows_changes_no_full_batch_gradient(order: list[int]) -> None:
    batch = sampled(6, count=6)
    gain = advantages_for(batch)
    config = FULL.model_copy(update={"minibatches": 1})
    models = [PlainModel(), PlainModel()]

    actor_update(models[0], batch, gain, config, rng())
    actor_update(models[1], batch.select(order), gain[order], config, rng())

    for left, right in zip(models[0].gradients, models[1].gradients, strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=1e-6)


def test_whitening_makes_the_scale_of_the_advantages_irrelevant() -> None:
    batch = sampled(8)
    gain = advantages_for(batch)
    models = [PlainModel(), PlainModel()]

    actor_update(models[0], batch, gain, FULL, rng())
    actor_update(models[1], batch, (40 * gain + 3) * batch.loss_mask, FULL, rng())

    torch.testing.assert_close(models[0].gradients[0], models[1].gradients[0], atol=1e-6, rtol=0)


def test_metrics_of_the_batch_are_those_computed_by_hand() -> None:
    batch = sampled(9)
    model = PlainModel()
    with torch.no_grad():
        model.reference.head.bias[2] += 0.7
        old = model.logprobs(batch, 1.0, with_entropy=True)
        reference = model.logprobs(batch, 1.0, bank="reference").logprobs
    mask = batch.loss_mask != 0
    d = (old.logprobs - reference)[mask]
    gap = (old.logprobs - batch.engine_logprobs)[mask]
    assert old.entropy is not None

    metrics = actor_update(model, batch, advantages_for(batch), FULL, rng())

    expected = {
        "train/kl": ((-d).exp() - 1 + d).mean(),
        "train/kl_k1": d.mean(),
        "check/mismatch_max": gap.abs().max(),
        "check/mismatch_mean": gap.abs().mean(),
        "check/mismatch_k3": (gap.exp() - 1 - gap).mean(),
        "actor/entropy": old.entropy[mask].mean(),
        "rollout/length_mean": mask.sum() / len(batch),
        "rollout/length_max": mask.sum(dim=1).max(),
        "rollout/truncated": 3 / 11,
    }
    assert {k: metrics[k] for k in expected} == pytest.approx(
        {k: float(v) for k, v in expected.items()}, abs=1e-6
    )


def test_metrics_of_the_update_are_those_computed_by_hand() -> None:
    # Two steps on the whole batch: at the first all ratios are 1, so means are half the second's.
    batch = sampled(9)
    config = PPOConfig(epochs=2, minibatches=1, kl_coefficient=0.0, whiten_advantages=False)
    model = PlainModel(rate=2.0, micro_batch=4)
    start = PlainModel(rate=2.0)
    gain = advantages_for(batch)

    metrics = actor_update(model, batch, gain, config, rng())

    with torch.no_grad():
        old = start.logprobs(batch, 1.0).logprobs
        start.net.load_state_dict(model.weights[1])
        new = start.logprobs(batch, 1.0).logprobs
    mask = batch.loss_mask != 0
    d, a = (new - old)[mask], gain[mask]
    clipped = ((d.exp() > 1.2) & (a > 0)) | ((d.exp() < 0.8) & (a < 0))
    surrogate = torch.where(clipped, d.exp().clamp(0.8, 1.2), d.exp()) * a
    expected = {
        "actor/policy_loss": (-a.mean() - surrogate.mean()) / 2,
        "actor/clip_fraction": clipped.double().mean() / 2,
        "actor/ratio_mean": (1 + d.exp().mean()) / 2,
        "actor/kl_old": (d.exp() - 1 - d).mean() / 2,
        "actor/kl_loss": d.square().mean() / 4,
        "actor/ratio_max": d.max().exp(),
        "actor/ratio_inverse_max": (-d).max().exp(),
        "actor/grad_norm": (model.gradients[0].norm() + model.gradients[1].norm()) / 2,
    }
    assert clipped.any(), "the case must reach the clip"
    assert {k: metrics[k] for k in expected} == pytest.approx(
        {k: float(v) for k, v in expected.items()}, rel=1e-5, abs=1e-6
    )


def test_all_metrics_are_finite_plain_floats() -> None:
    metrics = update_everything(PlainModel(), sampled(10), FULL)

    assert all(type(figure) is float and math.isfinite(figure) for figure in metrics.values())
    assert {"critic/explained_variance", "actor/clip_fraction", "actor/grad_norm"} <= set(metrics)


def test_explained_variance_of_a_perfect_a_constant_and_a_wrong_critic() -> None:
    mask = torch.ones(1, 3)
    returns = torch.tensor([[0.0, 1.0, 2.0]])

    assert explained_variance(returns, returns, mask) == 1.0
    constant = torch.full((1, 3), 0.5)
    assert explained_variance(constant, returns, mask) == pytest.approx(0.0, abs=1e-9)
    assert explained_variance(-returns, returns, mask) == pytest.approx(-3.0)
    assert explained_variance(returns, torch.ones(1, 3), mask) == 0.0


def test_grpo_is_the_actors_update_on_group_advantages() -> None:
    batch = sampled(11, count=6)
    config = GRPOConfig(minibatches=1, normalize_std=False)
    models = [PlainModel(), PlainModel()]
    r = batch.rewards
    centred = torch.cat([r[:3] - r[:3].mean(), r[3:] - r[3:].mean()])

    actor_update(models[0], batch, None, config, rng())
    actor_update(models[1], batch, centred[:, None] * batch.loss_mask, config, rng())

    torch.testing.assert_close(models[0].gradients[0], models[1].gradients[0], atol=1e-6, rtol=0)
    assert models[0].gradients[0].abs().max() > 1e-3


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_with_the_kl_in_the_reward_it_lowers_advantages_and_is_not_in_the_loss(
    estimator: str,
) -> None:
    batch = sampled(11, count=6)
    config = ReinforcePPConfig(
        minibatches=1, kl_coefficient=0.3, kl_estimator=estimator, whiten_advantages=False
    )  # type: ignore[arg-type]
    models = [PlainModel(), PlainModel()]
    for model in models:
        with torch.no_grad():
            model.reference.head.bias[2] += 0.7
    with torch.no_grad():
        ours = models[0].logprobs(batch, 1.0).logprobs
        theirs = models[0].logprobs(batch, 1.0, bank="reference").logprobs
    r = theirs - ours
    taken = {"k1": -r, "k2": r.square() / 2, "k3": r.exp() - 1 - r}[estimator] * batch.loss_mask
    to_come = taken.flip(1).cumsum(1).flip(1)
    gain = (batch.rewards[:, None] - 0.3 * to_come) * batch.loss_mask

    metrics = actor_update(models[0], batch, None, config, rng())
    plain = config.model_copy(update={"kl_in": "loss", "kl_coefficient": 0.0})
    actor_update(models[1], batch, gain.float(), plain, rng())

    torch.testing.assert_close(models[0].gradients[0], models[1].gradients[0], atol=1e-6, rtol=0)
    assert metrics["actor/loss"] == pytest.approx(metrics["actor/policy_loss"], abs=1e-9)


SCORED = PPOConfig(kl_in="reward", kl_estimator="k1", kl_coefficient=0.3, minibatches=2, lam=1.0)


def apart() -> PlainModel:
    """A policy that has left its reference."""
    model = PlainModel(micro_batch=4)
    with torch.no_grad():
        model.reference.head.bias[2] += 0.7
    return model


def test_the_critic_learns_the_reward_less_the_kl_that_the_actor_scored() -> None:
    # With lambda = gamma = 1 the return of token t is the reward less all penalties from t on.
    batch, actor = sampled(2), apart()

    scored = score(actor, batch, SCORED, rng())
    found, _ = critic_update(PlainModel(), batch, SCORED, rng(), scored)

    taken = 0.3 * (scored.old - scored.reference) * batch.loss_mask
    returns = (batch.rewards[:, None] - taken.flip(1).cumsum(1).flip(1)) * batch.loss_mask
    assert taken.abs().max() > 0.01
    torch.testing.assert_close(found.returns, returns, rtol=0, atol=1e-6)


def test_what_was_scored_is_what_the_update_would_have_computed() -> None:
    batch, gain = sampled(2), advantages_for(sampled(2))
    models = [apart(), apart()]

    before = actor_update(models[0], batch, gain, SCORED, rng())
    scored = score(models[1], batch, SCORED, rng())
    passes = models[1].forward_rows
    after = actor_update(models[1], batch, gain, SCORED, rng(), scored=scored)

    assert before == after
    for left, right in zip(models[0].gradients, models[1].gradients, strict=True):
        assert torch.equal(left, right)
    assert models[0].forward_rows == models[1].forward_rows > passes


def test_a_critic_that_was_told_no_scores_refuses_the_kl_in_the_reward() -> None:
    with pytest.raises(ValueError, match="what the actor scored"):
        critic_update(PlainModel(), sampled(2), SCORED, rng())


def test_the_critic_takes_several_steps_for_each_of_the_actor() -> None:
    config = PPOConfig(epochs=1, critic_epochs=3, minibatches=2)
    critic, actor = PlainModel(), PlainModel()

    found, _ = critic_update(critic, sampled(1), config, rng())
    actor_update(actor, sampled(1), found.advantages, config, rng())

    assert (len(critic.gradients), len(actor.gradients)) == (3 * 2, 1 * 2)


def answers(model: PlainModel, seed: int, count: int = 48) -> Batch:
    """Four tokens each, drawn from the policy; the reward is the share of token 3."""
    generator, rows = rng(seed), []
    tokens = torch.ones(count, 1, dtype=torch.int64)
    with torch.no_grad():
        for _ in range(4):
            p = model.net.head(model.net(tokens)[:, -1]).softmax(-1)
            tokens = torch.cat([tokens, torch.multinomial(p, 1, generator=generator)], dim=1)
    for number, row in enumerate(tokens.numpy().astype(np.int32)):
        rows.append(
            Trajectory(
                sample=Sample(f"s{number}", "p", None, group=f"g{number // 8}"),
                tokens=row,
                loss_mask=np.array([0, 1, 1, 1, 1], dtype=np.uint8),
                logprobs=np.zeros(5, dtype=np.float32),
                version=Version(0, 0),
                status=Status.FINISHED,
                text="",
                reward=float((row[1:] == 3).mean()),
            )
        )
    return collate(rows, PAD)


WITHOUT_CRITIC: dict[str, PolicyConfig] = {
    "grpo": GRPOConfig(minibatches=2),
    "rloo": RLOOConfig(minibatches=2),
    "reinforce_pp": ReinforcePPConfig(minibatches=2),
}


@pytest.mark.parametrize("algorithm", ["ppo", *WITHOUT_CRITIC])
def test_a_policy_learns_what_is_rewarded(algorithm: str) -> None:
    actor, critic = PlainModel(adam=True, rate=0.02), PlainModel(adam=True, rate=0.02, seed=1)
    rewards, explained = [], []
    for step in range(30):
        batch = answers(actor, step)
        if algorithm == "ppo":
            config = PPOConfig(minibatches=2)
            found, figures = critic_update(critic, batch, config, rng(step))
            explained.append(figures["critic/explained_variance"])
            actor_update(actor, batch, found.advantages, config, rng(step))
        else:
            actor_update(actor, batch, None, WITHOUT_CRITIC[algorithm], rng(step))
        rewards.append(float(batch.rewards.mean()))

    # Seven tokens: a policy that hasn't learnt stays near 1 / 7.
    assert rewards[0] < 0.3
    assert np.mean(rewards[-3:]) > 0.6
    assert algorithm != "ppo" or max(explained[5:]) > 0.2


PAIRS = [Pair([1, 2], [3, 4, 6]), Pair([5], [2, 6]), Pair([4, 4, 1], [6])]


def test_warmup_minimizes_the_mean_over_answer_tokens() -> None:
    model = PlainModel(micro_batch=2)
    start = copy.deepcopy(model.net)

    metrics = warmup_steps(model, PAIRS, 1, 5, rng(), pad_token=PAD)

    drawn = torch.randint(len(PAIRS), (5,), generator=rng()).tolist()
    losses = []
    for prompt, answer in (PAIRS[i] for i in drawn):
        tokens = torch.tensor([[*prompt, *answer]])
        logprobs = start.head(start(tokens))[0].log_softmax(-1)
        losses += [-logprobs[len(prompt) + k - 1, token] for k, token in enumerate(answer)]
    expected = torch.stack(losses).mean()
    gradient = torch.autograd.grad(expected, start.head.bias)[0]
    assert metrics["warmup/loss"] == pytest.approx(expected.item(), abs=1e-6)
    torch.testing.assert_close(
        start.head.bias.detach() - model.net.head.bias, 0.5 * gradient, atol=1e-6, rtol=0
    )


def test_warmup_learns_and_does_not_depend_on_ranks() -> None:
    work = lambda m: warmup_steps(m, PAIRS, 40, 5, rng(), pad_token=PAD)  # noqa: E731
    (alone,), (expected,) = on_ranks(1, 64, work)

    models, metrics = on_ranks(2, 2, work)

    first = warmup_steps(PlainModel(), PAIRS, 1, 5, rng(), pad_token=PAD)
    last = warmup_steps(alone, PAIRS, 1, 5, rng(), pad_token=PAD)
    assert last["warmup/loss"] < 0.5 * first["warmup/loss"]
    assert metrics[0] == metrics[1] == pytest.approx(expected, abs=1e-6)
    for left, right in zip(alone.gradients, models[0].gradients, strict=False):
        torch.testing.assert_close(left, right, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("pairs", "reason"),
    [([], "set warmup.steps to 0"), ([Pair([1], [])], "answer"), ([Pair([], [1])], "prompt")],
)
def test_warmup_refuses_pairs_that_teach_nothing(pairs: list[Pair], reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        warmup_steps(PlainModel(), pairs, 1, 4, rng(), pad_token=PAD)
