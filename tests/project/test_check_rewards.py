"""The demo's verdict: it fails a run that did not learn, and one that was not evaluated."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fsm_trainer.runtime.metrics import MetricsWriter, Stage

SCRIPT = Path(__file__).parents[2] / "examples" / "check_rewards.py"


def verdict(run: Path, rise: float) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(run), "--rise", str(rise)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize(("rise", "code"), [(0.25, 0), (0.26, 1)])
def test_the_rise_from_warmup_to_end_decides(tmp_path: Path, rise: float, code: int) -> None:
    with MetricsWriter(tmp_path / "metrics.jsonl") as metrics:
        metrics.write(0, {"eval/reward": 0.0}, stage=Stage.START)
        metrics.write(0, {"eval/reward": 0.25}, stage=Stage.WARMUP)
        metrics.write(5, {"train/reward": 0.9, "eval/reward": 0.9}, stage=Stage.TRAIN)
        metrics.write(9, {"eval/reward": 0.5}, stage=Stage.END)
    found, text = verdict(tmp_path, rise)
    assert found == code
    assert "0.250 -> 0.500, rise +0.250" in text


def test_a_run_without_an_evaluation_at_its_end_fails(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path / "metrics.jsonl") as metrics:
        metrics.write(0, {"eval/reward": 0.25}, stage=Stage.WARMUP)
    code, text = verdict(tmp_path, 0.0)
    assert code == 1
    assert "no evaluation of stage end" in text
