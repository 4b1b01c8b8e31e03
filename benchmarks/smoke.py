"""A short run of the real stack, with what it came to as one JSON file.

    python benchmarks/smoke.py examples/quickstart.yaml --result FILE --set steps=5 ...

Runs ``fsm-train run`` and ``fsm-train trace``, and reports the medians of each phase and of each
transition, the held-out rewards, and the conditions: date, hardware, versions, command.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from fsm_trainer.runtime.journal import read_journal
from fsm_trainer.runtime.metrics import read_metrics

PACKAGES = ("torch", "deepspeed", "transformers", "ray", "sglang", "transitions")
DEADLINE = 540.0


def conditions() -> dict[str, Any]:
    """The hardware and the versions."""
    found: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    import torch

    found["cpus"] = os.cpu_count()
    if torch.cuda.is_available():
        found["device"] = torch.cuda.get_device_name()
        found["nccl"] = _nccl()
    found["environment"] = {k: v for k, v in os.environ.items() if k.startswith("NCCL_")}
    return found


def _nccl() -> int:
    """The version of the library that is loaded, not of the one that torch was built with."""
    version = ctypes.c_int()
    ctypes.CDLL(None).ncclGetVersion(ctypes.byref(version))
    return version.value


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
        began = time.monotonic()
        ran = subprocess.run(
            [*command, "run", str(chosen.config), "--out", str(folder), *overrides],
            timeout=DEADLINE,
            check=False,
        )
        result: dict[str, Any] = {
            "command": f"fsm-train run {chosen.config} {' '.join(overrides)}",
            "exit": ran.returncode,
            "seconds": round(time.monotonic() - began, 1),
            "conditions": conditions(),
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
        else:
            log = folder / "run.log.jsonl"
            result["log"] = log.read_text().splitlines()[-20:] if log.exists() else []
        chosen.result.parent.mkdir(parents=True, exist_ok=True)
        chosen.result.write_text(json.dumps(result, indent=1) + "\n")
        sys.exit(ran.returncode)


if __name__ == "__main__":
    main()
