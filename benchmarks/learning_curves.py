"""Learning curves of PPO, GRPO and RLOO on the quickstart's task, as one JSON file.

    python -m benchmarks.learning_curves --result benchmarks/results/learning-curves-cpu.json
    python -m docs.generate

Nine trainings, three seeds each, one after the other; a run that the file has already is not made
again, so it goes on where it was ended. ``--only``, ``--seeds`` and ``--set`` make fewer or other
ones. All generate 512 answers a step and have the same learning rate, warm-up and KL coefficient.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.machine import write
from fsm_trainer.runtime.metrics import Stage, read_metrics

# Seconds of one training.
DEADLINE = 1800.0
RUNS = {
    "ppo": ["examples/quickstart.yaml"],
    "grpo": ["examples/grpo.yaml"],
    "rloo": ["examples/grpo.yaml", "--set", "algorithm.name=rloo"],
}
EVERY = 5


def trained(arguments: list[str]) -> dict[str, Any]:
    """One training: its command, its seconds, and its rewards by step."""
    with tempfile.TemporaryDirectory() as scratch:
        folder, began = Path(scratch) / "run", time.monotonic()
        command = [sys.executable, "-m", "fsm_trainer.cli.main", "run", *arguments]
        subprocess.run([*command, "--out", str(folder)], timeout=DEADLINE, check=True)
        seconds, rows = time.monotonic() - began, read_metrics(folder / "metrics.jsonl")
    steps = [row for row in rows if row.stage is None]
    return {
        "command": " ".join(["fsm-train run", *arguments]),
        "seconds": round(seconds, 1),
        # By the steps that were trained: what the warm-up left is at 0.
        "heldout": {
            str(row.step): row.eval_reward
            for row in rows
            if row.eval_reward is not None and row.stage is not Stage.START
        },
        "train": [row.train_reward for row in steps],
        "kl": [row.train_kl for row in steps],
    }


def main() -> None:
    """Make the runs that are missing."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--result", type=Path, required=True)
    options.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS))
    options.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    options.add_argument("--set", action="append", default=[], dest="overrides")
    chosen = options.parse_args()
    runs: dict[str, Any] = {}
    if chosen.result.exists():
        runs = json.loads(chosen.result.read_text(encoding="utf-8"))["runs"]
    for seed in chosen.seeds:
        for name in chosen.only:
            settings = [f"seed={seed}", f"evaluation.every={EVERY}", *chosen.overrides]
            further = [part for text in settings for part in ("--set", text)]
            if f"{name}-{seed}" not in runs:
                runs[f"{name}-{seed}"] = trained([*RUNS[name], *further])
                write({"benchmark": "learning curves", "runs": runs}, chosen.result)


if __name__ == "__main__":
    main()
