"""``fsm-train simulate``: what it prints, and what it exits with."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from fsm_trainer.cli.main import app
from fsm_trainer.machine.events import Acted
from fsm_trainer.runtime import reconciler
from fsm_trainer.simulation import training

HALF_PUSHED = 59
"""A seed in which one of two engines does not get a push."""


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["simulate", *arguments])
    return result.exit_code, result.output


def test_a_seed_that_is_well_exits_with_0_and_tells_all_that_happened() -> None:
    code, output = run("--seed", "59", "--steps", "2", "--schedule", "disaggregated")

    assert code == 0
    assert "rollout-0: acquire engine" in output
    assert "1 trainings of 2 steps, 1 faults" in output


def test_a_seed_that_fails_exits_with_1_and_its_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    def always_whole(action: str, workers: tuple[str, ...], ok: bool = True) -> Acted:
        return Acted(action, workers, True)

    monkeypatch.setattr(training, "_plans", {})
    monkeypatch.setattr(reconciler, "Acted", always_whole)
    arguments = ("--seed", str(HALF_PUSHED), "--steps", "4", "--schedule", "disaggregated")

    code, output = run(*arguments, "--json")

    assert code == 1
    (failed,) = json.loads(output)["failed"]
    assert failed["seed"] == HALF_PUSHED
    assert any("push" in fault for fault in failed["faults"])


def test_a_schedule_that_does_not_exist_exits_with_2() -> None:
    code, output = run("--schedule", "colocated")

    assert code == 2
    assert "colocated_critic" in output
