"""What became of a run's checks of its numbers, in a line each."""

from __future__ import annotations

from collections.abc import Sequence

from fsm_trainer.runtime.journal import Entry, Kind
from fsm_trainer.runtime.metrics import MetricsRow
from fsm_trainer.training.config import MISMATCH, REPLICAS, UNIT_RATIO, ZERO_KL

_FIRST, _ENGINE, _REPLICAS = (
    "zero KL at the first step",
    "trainer against engine",
    "replicas of the",
)
_KNOWN = {ZERO_KL: _FIRST, UNIT_RATIO: _FIRST, MISMATCH: _ENGINE}


def verdicts(rows: Sequence[MetricsRow], entries: Sequence[Entry]) -> dict[str, str]:
    """Give the verdict of each check by its name; what was not told is not there."""
    found, stopped = [row.numbers() for row in rows], _stopped(entries)
    told = {
        _FIRST: _zero_kl(found, entries),
        _ENGINE: _mismatch(found),
        **{f"{_REPLICAS} {role}": _replicas(found, role) for role in ("actor", "critic")},
    }
    names = [*told, *(name for name in stopped if name not in told)]
    both = {name: [stopped.get(name, ""), told.get(name, "")] for name in names}
    return {name: "; ".join(filter(None, texts)) for name, texts in both.items() if any(texts)}


def _stopped(entries: Sequence[Entry]) -> dict[str, str]:
    """The first error of each check that ended the run, by the check's name."""
    stopped = dict[str, str]()
    for entry in entries:
        if entry.kind is Kind.ACTION and (error := entry.error or "").startswith("SelfCheckFailed"):
            of_ranks = f"{_REPLICAS} {entry.role}" if REPLICAS in error else "other"
            name = next((name for part, name in _KNOWN.items() if part in error), of_ranks)
            stopped.setdefault(name, f"stopped the run: {error}")
    return stopped


def _zero_kl(found: Sequence[dict[str, float]], entries: Sequence[Entry]) -> str:
    training = [e for e in entries if (e.role, e.trigger) == ("actor", "train") and e.rank == 0]
    verdict = next((entry.zero_kl for entry in training if entry.zero_kl), None)
    if verdict is None:
        return ""
    if verdict == "off":
        return "off (checks.zero_kl)"
    one = next((numbers for numbers in found if "check/zero_kl_max" in numbers), None)
    if one is None:
        return str(verdict)
    told = f"{verdict} in step {one['step']:.0f}: log-ratio {_gap(one, 'check/zero_kl')}"
    if "check/unit_ratio_max" not in one:
        return told
    return f"{told}; of the first minibatch {_gap(one, 'check/unit_ratio')}"


def _gap(numbers: dict[str, float], name: str) -> str:
    mean, largest, k3 = (numbers[f"{name}_{part}"] for part in ("mean", "max", "k3"))
    return f"{largest:.3g} at most, {mean:.3g} in the mean, k3 {k3:.3g}"


def _mismatch(found: Sequence[dict[str, float]]) -> str:
    measured = [numbers for numbers in found if "check/mismatch_mean" in numbers]
    if not measured:
        return ""
    worst = max(measured, key=lambda numbers: numbers["check/mismatch_mean"])
    largest = max(numbers["check/mismatch_max"] for numbers in measured)
    mean = f"{worst['check/mismatch_mean']:.3g} nats a token at most (step {worst['step']:.0f})"
    return f"{mean}, {largest:.3g} for a single one, in {len(measured)} steps"


def _replicas(found: Sequence[dict[str, float]], role: str) -> str:
    counts = [numbers[name] for numbers in found if (name := f"check/replicas_{role}") in numbers]
    if not counts:
        return ""
    if not any(counts):
        return "no rank holds a copy of another's weights"
    return f"{max(counts):.0f} tensors equal on all ranks, looked at in {len(counts)} steps"
