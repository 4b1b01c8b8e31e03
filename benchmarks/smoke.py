"""A short run of the real stack, with what it came to as one JSON file.

    python -m benchmarks.smoke examples/quickstart.yaml --result FILE --set steps=5 ...

Runs ``fsm-train run`` and ``fsm-train trace``, and reports the medians of each phase and of each
transition, the held-out rewards, what the devices held while all trainers slept, and the
conditions: date, hardware, versions.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.machine import Devices, write
from fsm_trainer.runtime.journal import read_journal
from fsm_trainer.runtime.metrics import read_metrics

# Seconds.
DEADLINE = 540.0
# Between two looks at what the devices hold.
LOOK = 0.02


def figures(folder: Path) -> dict[str, Any]:
    """Medians over the run, the first step left out: it imports and compiles."""
    seconds: dict[str, list[float]] = defaultdict(list)
    for entry in read_journal(folder / "journal.jsonl"):
        if entry.rank == 0 and entry.ok:
            seconds[f"{entry.role} {entry.trigger}"].append(entry.seconds)
    rows = read_metrics(folder / "metrics.jsonl")
    steps = [row for row in rows if row.phase_seconds and row.step > 1]
    phases: dict[str, list[float]] = defaultdict(list)
    for row in steps:
        for phase, spent in row.phase_seconds.items():
            phases[phase].append(spent)
    return {
        "eval": {str(row.stage): row.eval_reward for row in rows if row.stage is not None},
        "step_seconds": _median([row.seconds for row in steps]),
        "phase_seconds": {name: _median(values) for name, values in phases.items()},
        "median_seconds": {name: _median(values) for name, values in sorted(seconds.items())},
        "last_step": rows[-1].numbers() if not steps else steps[-1].numbers(),
    }


def asleep(folder: Path, seen: list[tuple[float, list[int]]]) -> list[int] | None:
    """What each device held, in bytes, while every trainer slept: the median after the warm-up."""
    trainers = [
        entry
        for entry in read_journal(folder / "journal.jsonl")
        if entry.role != "rollout" and entry.ok and entry.source != entry.dest
    ]
    state: dict[str, str] = {}
    windows: list[tuple[float, float]] = []
    since = None
    for entry in trainers:
        if since is not None:  # it began to move earlier than it had
            windows.append((since, entry.time - entry.seconds))
        state[entry.worker] = entry.dest
        since = entry.time if set(state.values()) == {"sleeping"} else None
    # The first windows are those of the start.
    found = [used for at, used in seen for begin, end in windows[3:] if begin < at < end]
    return [int(statistics.median(column)) for column in zip(*found, strict=True)] or None


def _median(values: list[float]) -> float | None:
    return round(statistics.median(values), 5) if values else None


def main() -> None:
    """Run, and write the result."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("config", type=Path)
    options.add_argument("--result", type=Path, required=True)
    options.add_argument("--set", action="append", default=[], dest="overrides")
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        overrides = [part for text in chosen.overrides for part in ("--set", text)]
        command = [sys.executable, "-m", "fsm_trainer.cli.main"]
        began, seen, devices = time.monotonic(), list[tuple[float, list[int]]](), Devices()
        before = devices.used()
        with devices.watch(seen, LOOK):
            ran = subprocess.run(
                [*command, "run", str(chosen.config), "--out", str(folder), *overrides],
                timeout=DEADLINE,
                check=False,
            )
        result: dict[str, Any] = {
            "command": f"fsm-train run {chosen.config} {' '.join(overrides)}",
            "exit": ran.returncode,
            "seconds": round(time.monotonic() - began, 1),
        }
        if ran.returncode == 0:
            traced = subprocess.run(
                [*command, "trace", str(folder)],
                timeout=DEADLINE,
                check=False,
                capture_output=True,
                text=True,
            )
            result |= {"conforms": traced.returncode == 0, "trace": traced.stdout.strip()}
            result |= figures(folder)
            result["device_bytes"] = {"before": before, "trainers_asleep": asleep(folder, seen)}
        else:
            log = folder / "run.log.jsonl"
            result["log"] = log.read_text().splitlines()[-20:] if log.exists() else []
        write(result, chosen.result)
        sys.exit(ran.returncode)


if __name__ == "__main__":
    main()
