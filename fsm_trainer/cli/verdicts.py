"""What became of a run's checks of its numbers, in a line each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fsm_trainer.runtime.journal import Entry
from fsm_trainer.runtime.metrics import MetricsRow


def verdicts(rows: Sequence[MetricsRow], entries: Iterable[Entry]) -> dict[str, str]:
    """Give the verdict of each check by its name; what was not told is not there."""
    found = [row.numbers() for row in rows]
    told = {
        "zero KL at the first step": _zero_kl(found, entries),
        "trainer against engine": _mismatch(found),
        **{f"replicas of the {role}": _replicas(found, role) for role in ("actor", "critic")},
    }
    return {name: text for name, text in told.items() if text}


def _zero_kl(found: Sequence[dict[str, float]], entries: Iterable[Entry]) -> str:
    training = [e for e in entries if (e.role, e.trigger) == ("actor", "train") and e.rank == 0]
    verdict = next((entry.zero_kl for entry in training if entry.zero_kl), None)
    if verdict is None:
        why = training[0].error if training else None
        return f"stopped the run: {why}" if why and why.startswith("SelfCheckFailed") else ""
    if verdict == "off":
        return "off (checks.zero_kl)"
    one = next((numbers for numbers in found if "check/zero_kl_max" in numbers), None)
    if one is None:
        return str(verdict)
    mean, largest, k3 = (one[f"check/zero_kl_{name}"] for name in ("mean", "max", "k3"))
    told = f"{verdict} in step {one['step']:.0f}: log-ratio {largest:.3g} at most"
    return f"{told}, {mean:.3g} in the mean, k3 {k3:.3g}"


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
