"""Numbers that must agree before a policy is updated, and what is told when they don't.

Two log-probabilities of one token under the same weights may differ by what rounding explains, and
by no more: actor and reference while they are the same weights (:func:`zero_kl`), the first
minibatch and the policy that it starts from (:func:`unit_ratio`), trainer and rollout engine
(:func:`mismatch`). Everything here reads tables that are the same on every rank, so all ranks come
to the same verdict, and none is left in a collective.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import structlog
import torch

from fsm_trainer.algorithms.config import PolicyConfig
from fsm_trainer.algorithms.kl import kl
from fsm_trainer.algorithms.masked import keep, masked_mean
from fsm_trainer.machine.errors import SelfCheckFailed
from fsm_trainer.training.batch import Batch
from fsm_trainer.training.config import (
    MISMATCH,
    REPLICAS,
    UNIT_RATIO,
    ZERO_KL,
    ChecksConfig,
    MismatchConfig,
    Verdict,
)
from fsm_trainer.training.offload import fingerprint
from fsm_trainer.training.port import ModelPort, Traits

EXACT = 1e-8
"""Nats. A float32 log-probability that isn't 0 is at least 6e-8 from the next one for probabilities
under 0.6, so it says: equal to the bit, or as good as certain."""
# Of a Gaussian, beyond six deviations lies one in 5e8.
_DEVIATIONS = 6.0
# A layer rounds about 16 times between the residual stream and itself: norms, products, softmax.
_ROUNDINGS = 16
# Figures of an update that are measured before its first optimizer step.
_BEFORE = (
    "entropy", "advantage_mean", "advantage_max",
    "value_mean", "return_mean", "explained_variance",
)  # fmt: skip

log = structlog.get_logger(__name__)


class Limits(NamedTuple):
    """What rounding explains, in nats; see :class:`Gap`."""

    mean: float
    max: float
    k3: float


class Gap(NamedTuple):
    """How far the log-probabilities of two computations are apart, where the mask is 1."""

    mean: float
    """Mean log-ratio, log of the sampler's probability over the other: k1."""
    absolute: float
    """Mean of its absolute value."""
    max: float
    """Greatest absolute value."""
    k3: float
    """Mean of k3."""
    row: int
    """Where the greatest is: row, token, and the two log-probabilities."""
    token: int
    sampler: float
    other: float

    def within(self, limits: Limits) -> bool:
        """Whether all is explained by rounding; NaN is not."""
        return abs(self.mean) <= limits.mean and self.max <= limits.max and self.k3 <= limits.k3


def measure(sampler: torch.Tensor, other: torch.Tensor, mask: torch.Tensor) -> Gap:
    """Compare the log-probabilities of whoever sampled with another's; all ``[batch, time]``."""
    q, p = keep(sampler, mask).double(), keep(other, mask).double()
    apart = (q - p).abs()
    worst = int(apart.nan_to_num(nan=math.inf).argmax())
    row, token = divmod(worst, mask.shape[1])
    return Gap(
        mean=float(masked_mean(q - p, mask)),
        absolute=float(masked_mean(apart, mask)),
        max=float(apart.max()),
        k3=float(masked_mean(kl(q, p, "k3"), mask)),
        row=row,
        token=token,
        sampler=float(sampler[row, token]),
        other=float(other[row, token]),
    )


def limits(
    traits: Traits, logprobs: torch.Tensor, mask: torch.Tensor, alike: bool = True
) -> Limits:
    """What two passes over the same weights may differ by.

    In batches of the same shapes (``alike``) the same kernels add in the same order: the passes are
    equal in float32, :data:`EXACT`. Otherwise an error is a sum of roundings of either sign. One
    moves a number of size M by at most u M, with u half the type's eps, so by 0.6 u M in the root
    mean square over both signs, and the difference of two passes by less than s = u M. Over k
    independent ones it is s = u M sqrt(k): k is 16 a layer in unlike shapes, and 1 in like ones,
    where a bfloat16 kernel that adds in no fixed order can move the last rounding alone. M is the
    log-probabilities' own size, 1 at least. Then, with n sequences, which are independent of each
    other while the tokens of one are not:

    - one token: 6 s, with M the largest of all;
    - the mean: 6 s / sqrt(n), with M the root mean square;
    - k3, about half the square: s^2 / 2 on average, allowed four times that.
    """
    eps = torch.finfo(traits.dtype).eps
    if alike and eps <= torch.finfo(torch.float32).eps:
        return Limits(EXACT, EXACT, EXACT)
    places = logprobs[mask != 0].double()
    unit = eps / 2 if alike else _rounding(traits)
    usual = unit * max(1.0, float(places.square().mean().sqrt()))
    largest = unit * max(1.0, float(places.abs().max()))
    rows = int((mask != 0).any(dim=1).sum())
    return Limits(_DEVIATIONS * usual / math.sqrt(rows), _DEVIATIONS * largest, 2 * usual**2)


def spread(
    traits: Traits,
    batch: Batch,
    figures: Mapping[str, float],
    config: PolicyConfig,
    steps: int,
    scored: bool,
    given: bool,
) -> dict[str, float]:
    """What each figure of an update may differ by when it is computed again on another device.

    What no model computes differs by the last two bits of a float32 of what is summed: lengths,
    rates and verdicts, what follows from tables that were ``scored``, and advantages, unless the
    KL is in the reward, and they were neither ``given`` nor scored. The rest is as in
    :func:`limits`, in unlike shapes, with M the size of the engine's log-probabilities, for the
    critic that of the rewards; what is summed up over ``steps`` optimizer steps has the roundings
    of all. Then:

    - means, and losses, which weigh log-probabilities by advantages: 1 if whitened: the mean's;
    - shares: the mean's, and one token that falls to the other side;
    - a mean of k3 that is x, and the critic's loss, d^2 / 2: k3's, and its slope in the log-ratio,
      at most sqrt(2 x) + x, times the mean's. One minus the explained variance is that over the
      returns' variance, so it moves by 2 / sqrt(2 loss) times the mean's, in proportion;
    - gradient norms: in proportion, 6 u sqrt(k); ratios: by a factor of the largest's exp;
    - an advantage with KLs in it, and what it weighs: also 6 s times their coefficient and the
      longest answer's tokens, which are not independent.
    """
    mask, gain = batch.loss_mask, figures.get("actor/advantage_max", 1.0)
    derived = config.kl_in == "reward" and not scored and not given
    lengths, sizes = mask.sum(dim=1), {"critic": batch.rewards[:, None].expand_as(mask)}
    kls = config.kl_coefficient * float(lengths.max()) if derived else 0.0
    summed = {"learning_rate": 0.0, "advantage_mean": gain, "advantage_max": gain}

    def moved(name: str, value: float) -> float:
        role, what = name.split("/", 1)
        if _fixed(name, scored, derived):
            return 4 * torch.finfo(torch.float32).eps * max(abs(value), summed.get(what, 1.0))
        between = steps if role in ("actor", "critic") and what not in _BEFORE else 1
        whole = traits._replace(layers=traits.layers * between)
        some = limits(whole, sizes.get(role, batch.engine_logprobs), mask, alike=False)
        gains = kls * some.mean * math.sqrt((lengths > 0).sum())
        if what.endswith(("kl", "kl_old", "_k3")) or name == "critic/loss":
            return (math.sqrt(2 * abs(value)) + abs(value)) * some.mean + some.k3
        match what:
            case "loss" | "policy_loss":
                return some.mean * (1.0 if config.whiten_advantages else gain) + gains
            case "clip_fraction" | "engine_corrected" | "route_disagreement":
                return some.mean + 1 / float(lengths.sum())
            case "ratio_max" | "ratio_inverse_max":
                return abs(value) * math.expm1(min(some.max, 99.0))
            case "ratio_drift" | "mismatch_max" | "zero_kl_max" | "unit_ratio_max":
                return some.max
            case "grad_norm":
                return (_DEVIATIONS * _rounding(whole) + gains / (gain or 1.0)) * abs(value)
            case "explained_variance":
                apart = math.sqrt(2 * figures["critic/loss"]) or math.inf
                return 2 * some.mean / apart * abs(1 - value)
            case "advantage_mean" | "advantage_max":
                return gains
            case _:
                return some.mean

    return {name: moved(name, value) for name, value in figures.items()}


def _fixed(name: str, scored: bool, derived: bool) -> bool:
    """Whether no model computes a figure; see :func:`spread`."""
    if name == "check/zero_kl":
        return True
    if name.startswith("actor/advantage"):
        return not derived
    if name.startswith(("train/", "check/mismatch", "check/engine", "actor/entropy")):
        return scored
    return name.startswith(("rollout/", "check/replicas")) or name.endswith("/learning_rate")


def _rounding(traits: Traits) -> float:
    """What the roundings of a pass in other shapes come to, in units of what is rounded."""
    return torch.finfo(traits.dtype).eps / 2 * math.sqrt(_ROUNDINGS * traits.layers)


def zero_kl(
    model: ModelPort,
    batch: Batch,
    logprobs: torch.Tensor,
    reference: torch.Tensor,
    entropy: torch.Tensor,
    config: ChecksConfig,
) -> dict[str, float]:
    """While actor and reference are the same weights, their KL is 0; tables are ``[batch, time]``.

    Raises SelfCheckFailed if it isn't and ``checks.zero_kl`` is ``stop``.
    """
    if config.zero_kl == "off":
        return {"check/zero_kl": float(Verdict.OFF)}
    tables, who = (logprobs, reference, entropy), ("actor", "reference")
    passed, figures = _agree(model, batch, batch.loss_mask, tables, who, ZERO_KL, config)
    verdict = Verdict.PASSED if passed else Verdict.FAILED
    return {"check/zero_kl": float(verdict)} | {f"check/zero_kl_{n}": x for n, x in figures.items()}


def unit_ratio(
    model: ModelPort,
    batch: Batch,
    rows: torch.Tensor,
    old: torch.Tensor,
    fresh: torch.Tensor,
    entropy: torch.Tensor,
    config: ChecksConfig,
) -> dict[str, float]:
    """Before its first step the policy is the one that the ratios start from.

    ``rows`` are those of the first minibatch, ``old`` and ``fresh`` the log-probabilities without
    and with gradients, ``[batch, time]``. A ratio of 1 is a KL of 0 and a clip fraction of 0.

    Raises SelfCheckFailed if it isn't and ``checks.zero_kl`` is ``stop``; beside the gap it gives
    the verdict if it was to warn.
    """
    if config.zero_kl == "off":
        return {}
    mask = torch.zeros_like(batch.loss_mask)
    mask[rows] = batch.loss_mask[rows]
    tables, who = (old, fresh, entropy), ("before", "with gradients")
    passed, figures = _agree(model, batch, mask, tables, who, UNIT_RATIO, config)
    told = {f"check/unit_ratio_{name}": figure for name, figure in figures.items()}
    return told if passed else told | {"check/zero_kl": float(Verdict.FAILED)}


def _agree(
    model: ModelPort,
    batch: Batch,
    mask: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    who: tuple[str, str],
    problem: str,
    config: ChecksConfig,
) -> tuple[bool, dict[str, float]]:
    """Whether two passes in like batches agree; and how far apart they are.

    ``tables`` are the log-probabilities of both and the entropy.
    """
    ours, theirs, entropy = tables
    gap, allowed = measure(ours, theirs, mask), limits(model.traits, ours, mask)
    passed = gap.within(allowed)
    if not passed:
        told = f"{problem}: {_numbers(gap, allowed)}; {_worst(batch, gap, *who)}"
        why = causes(model.traits, mask, ours, theirs, entropy)
        _tell(model, told, why, config.zero_kl == "stop", "checks.zero_kl: warn")
    return passed, {"mean": gap.mean, "max": gap.max, "k3": gap.k3}


def mismatch(
    model: ModelPort,
    batch: Batch,
    logprobs: torch.Tensor,
    entropy: torch.Tensor,
    config: MismatchConfig,
) -> dict[str, float]:
    """Trainer against engine, nats a token: how far the step's trajectories are from on-policy.

    Also for each third of the generated tokens of a trajectory. Raises SelfCheckFailed beyond
    ``checks.mismatch.stop``.
    """
    mask, engine = batch.loss_mask, batch.engine_logprobs
    gap = measure(engine, logprobs, mask)
    warns = config.warning(exact=model.traits.dtype == torch.float32)
    stops = config.stop is not None and not gap.absolute <= config.stop
    if stops or not gap.absolute <= warns:
        limit = config.stop if stops else warns
        story = f"{MISMATCH} {gap.absolute:.3g} nats a token, {limit:g} is allowed"
        told = f"{story}; {_worst(batch, gap, 'engine', 'trainer')}"
        why = causes(model.traits, mask, logprobs, engine, entropy)
        _tell(model, told, why, stops, "a larger checks.mismatch.stop")
    place = (mask.cumsum(dim=1) - 1) * 3 // mask.sum(dim=1, keepdim=True).clamp(min=1)
    apart = (engine - logprobs).abs()
    thirds = {
        f"check/mismatch_{name}": float(masked_mean(apart, keep(mask, place == third)))
        for third, name in enumerate(("first", "middle", "last"))
    }
    return thirds | {
        "check/mismatch_mean": gap.absolute,
        "check/mismatch_max": gap.max,
        "check/mismatch_k3": gap.k3,
    }


def replicas(model: ModelPort, weights: Iterable[tuple[str, torch.Tensor]]) -> int:
    """Compare what every rank holds a copy of, by its bytes; gives the number of tensors.

    Raises SelfCheckFailed, on all ranks, with the first tensor that differs and who agrees on it.
    """
    prints = {name: int(fingerprint([weight]), 16) - 2**63 for name, weight in weights}
    table = torch.zeros(model.world_size, len(prints), dtype=torch.int64, device=model.device)
    table[model.rank] = torch.tensor(list(prints.values()), device=model.device)
    table = model.all_reduce(table).cpu()
    differ = (table != table[0]).any(dim=0).nonzero().flatten().tolist()
    if differ:
        found = table[:, differ[0]].tolist()
        sides = sorted([r for r, one in enumerate(found) if one == this] for this in {*found})
        raise SelfCheckFailed(
            f"{list(prints)[differ[0]]} {REPLICAS}: {' against '.join(map(str, sides))} "
            f"({len(differ)} of {len(prints)} tensors differ). All must hold the same bytes. "
            "Likely causes: a weight that is written outside the optimizer, a gradient that isn't "
            "reduced, faulty memory. Go on from the last checkpoint"
        )
    return len(prints)


def causes(
    traits: Traits,
    mask: torch.Tensor,
    ours: torch.Tensor,
    theirs: torch.Tensor,
    entropy: torch.Tensor,
) -> list[str]:
    """What may have set two passes apart, those that the numbers speak for first.

    A temperature scales the logits, so to first order it moves a log-probability by the
    same multiple of ``log p + entropy``: its derivative by the log of 1 / temperature.
    """
    places = mask != 0
    p, q, spread = (table[places].double() for table in (ours, theirs, entropy))
    apart = float((q - p).abs().max())
    half = traits._replace(dtype=torch.bfloat16)
    by_shape, by_half = (limits(t, ours, mask, alike=False).max for t in (traits, half))
    torn = not math.isfinite(apart) or (bool(p.max() > p.min()) and _correlation(p, q) < 0.5)
    scaled = not torn and abs(_correlation(q - p, p + spread)) > 0.9
    known = {
        "other tokens or masks in the two passes, such as another chat template": False,
        "another temperature": scaled,
        f"dropout (the largest that is on: {traits.dropout:g})": traits.dropout > 0,
        f"another precision than {traits.dtype}".replace("torch.", ""): by_shape < apart <= by_half,
        "other batch shapes, so another order of additions": apart <= by_shape,
        "torn weights": torn,
        **({"other routes to the experts": False} if traits.experts else {}),
    }
    return sorted(known, key=lambda cause: not known[cause])


def _correlation(x: torch.Tensor, y: torch.Tensor) -> float:
    """Pearson's; 0 where one of them doesn't vary, or isn't finite."""
    x, y = x - x.mean(), y - y.mean()
    scale = float(x.norm() * y.norm())
    return float(x @ y) / scale if math.isfinite(scale) and scale > 0 else 0.0


def _numbers(gap: Gap, allowed: Limits) -> str:
    return (
        f"log-ratio {gap.max:.3g} at most ({allowed.max:.3g} is allowed), {gap.mean:.3g} in the "
        f"mean ({allowed.mean:.3g}), k3 {gap.k3:.3g} ({allowed.k3:.3g})"
    )


def _worst(batch: Batch, gap: Gap, sampler: str, other: str) -> str:
    return (
        f"worst at token {gap.token} of sample {batch.ids[gap.row]!r}: log-probability "
        f"{gap.sampler:.9g} ({sampler}), {gap.other:.9g} ({other})"
    )


def _tell(model: ModelPort, told: str, why: list[str], stops: bool, further: str) -> None:
    """Stop, on all ranks, or warn, on the first."""
    if stops:
        likely = f"Likely causes, the likeliest first: {'; '.join(why)}"
        raise SelfCheckFailed(f"{told}. {likely}. The policy was not updated. To go on: {further}")
    if model.rank == 0:
        log.warning("a self check failed", problem=told, causes=why)
