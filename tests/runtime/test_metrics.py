"""Metrics and logs: one row a step, nothing not finite, lines that people and programs read."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from io import StringIO
from pathlib import Path

import jsonschema
import pytest
import structlog
from pydantic import ValidationError
from rich.console import Console
from rich.progress import Progress

from fsm_trainer.machine.errors import CapabilityMissing, DataError
from fsm_trainer.runtime import metrics as module
from fsm_trainer.runtime.logs import FILE_NAME, Logs
from fsm_trainer.runtime.metrics import (
    MetricsRow,
    MetricsWriter,
    Stage,
    TensorBoard,
    WeightsAndBiases,
    read_metrics,
)

SCHEMA = Path(module.__file__).parent / "schemas" / "metrics.schema.json"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def write_a_run(path: Path) -> None:
    with MetricsWriter(path) as writer:
        writer.write(0, {"eval/reward": 0.25}, stage=Stage.WARMUP)
        writer.write(
            1,
            {"train/reward": 0.5, "train/kl": 0.01, "train/policy_loss": -0.1},
            seconds=2.0,
            tokens=320,
            phase_seconds={"rollout": 1.5, "policy": 0.5},
        )
        writer.write(1, {"train/reward": 0.5, "eval/reward": 0.75}, stage=Stage.END)


def test_a_row_has_the_documented_fields_and_a_stage_only_where_evaluated(path: Path) -> None:
    write_a_run(path)
    warmup, step, end = (json.loads(line) for line in path.read_text().splitlines())
    assert (warmup["stage"], warmup["eval/reward"], warmup["train/reward"]) == (
        "warmup",
        0.25,
        None,
    )
    assert {"stage", "eval/reward"}.isdisjoint(step)
    assert (step["step"], step["seconds"], step["tokens"]) == (1, 2.0, 320)
    assert (step["train/reward"], step["train/kl"]) == (0.5, 0.01)
    assert step["phase_seconds"] == {"rollout": 1.5, "policy": 0.5}
    assert (end["stage"], end["eval/reward"]) == ("end", 0.75)


def test_rows_meet_the_schema_and_the_schema_is_that_of_the_code(path: Path) -> None:
    write_a_run(path)
    schema = json.loads(SCHEMA.read_text())
    assert schema == MetricsRow.model_json_schema()
    for line in path.read_text().splitlines():
        jsonschema.validate(json.loads(line), schema)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(json.loads(line) | {"stage": "middle"}, schema)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_written_as_null_and_said(path: Path, value: float) -> None:
    with structlog.testing.capture_logs() as logs, MetricsWriter(path) as writer:
        writer.write(7, {"train/kl": value, "train/reward": 1.0})
    row = json.loads(path.read_text())
    assert (row["train/kl"], row["train/reward"]) == (None, 1.0)
    assert [(entry["log_level"], entry["step"], entry["metrics"]) for entry in logs] == [
        ("warning", 7, ["train/kl"])
    ]


def test_an_evaluation_without_a_stage_and_a_stage_without_one_are_refused(path: Path) -> None:
    with MetricsWriter(path) as writer:
        with pytest.raises(ValidationError, match="stand together"):
            writer.write(1, {"eval/reward": 0.5})
        with pytest.raises(ValidationError, match="stand together"):
            writer.write(1, {}, stage=Stage.TRAIN)
    assert path.read_text() == ""


def test_a_resumed_step_counts_once_with_its_last_numbers(path: Path) -> None:
    for reward in (0.1, 0.2):
        with MetricsWriter(path) as writer:
            writer.write(3, {"train/reward": reward})
    with path.open("a") as file:
        file.write('{"format": 1, "st')
    assert [(row.step, row.train_reward) for row in read_metrics(path)] == [(3, 0.2)]
    with MetricsWriter(path) as writer:
        writer.write(4, {"train/reward": 0.3})
    assert [row.step for row in read_metrics(path)] == [3, 4]


def test_a_damaged_row_is_named_by_file_and_line(path: Path) -> None:
    write_a_run(path)
    path.write_text(path.read_text().replace('"tokens": 320', '"tokens": "many"'))
    with pytest.raises(DataError, match="tokens: ") as caught:
        read_metrics(path)
    assert str(caught.value).startswith(f"{path}:2: ")


def test_tensorboard_gets_each_number_at_its_step(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with MetricsWriter(tmp_path / "m.jsonl", (TensorBoard(tmp_path / "tb"),)) as writer:
        writer.write(1, {"train/reward": 0.25}, seconds=2.0)
        writer.write(2, {"train/reward": 0.75})
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    scalars = [(event.step, event.value) for event in events.Scalars("train/reward")]
    assert scalars == [(1, 0.25), (2, 0.75)]
    assert events.Scalars("seconds")[0].value == 2.0


def test_tensorboard_is_written_without_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from fsm_trainer.runtime.metrics import TensorBoard;"
        f"TensorBoard(Path({str(tmp_path)!r})).close(); print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "False"


def test_a_sink_that_is_not_installed_is_refused_with_its_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "find_spec", lambda _: None)
    with pytest.raises(CapabilityMissing, match="pip install wandb"):
        WeightsAndBiases(tmp_path, "project", {})


def test_logs_are_readable_on_the_console_and_json_in_the_folder(tmp_path: Path) -> None:
    screen = StringIO()
    logs = Logs(tmp_path, Console(file=screen, width=200), worker="rollout-1")
    structlog.get_logger("fsm_trainer.runtime.x").info("pushed", epoch=3)
    logging.getLogger("fsm_trainer.y").debug("only in the file")
    logging.getLogger("somebody").warning("careful with %s", "that")
    logs.close()
    structlog.get_logger("fsm_trainer.runtime.x").info("after the end")
    shown = screen.getvalue()
    assert "pushed" in shown and "epoch=3" in shown and "careful with that" in shown
    assert "only in the file" not in shown and "after the end" not in shown
    lines = [json.loads(line) for line in (tmp_path / FILE_NAME).read_text().splitlines()]
    assert [line["event"] for line in lines] == ["pushed", "only in the file", "careful with that"]
    assert (lines[0]["epoch"], lines[0]["level"], lines[0]["worker"]) == (3, "info", "rollout-1")
    assert lines[0]["logger"] == "fsm_trainer.runtime.x"


def test_an_exception_is_logged_with_its_place(tmp_path: Path) -> None:
    logs = Logs(tmp_path)
    try:
        raise ZeroDivisionError("no")
    except ZeroDivisionError:
        structlog.get_logger("fsm_trainer.x").exception("failed")
    logs.close()
    (line,) = (json.loads(text) for text in (tmp_path / FILE_NAME).read_text().splitlines())
    assert line["exception"][0]["exc_type"] == "ZeroDivisionError"
    assert line["exception"][0]["frames"][-1]["filename"] == __file__


def test_a_log_line_does_not_tear_a_progress_bar(tmp_path: Path) -> None:
    screen = StringIO()
    console = Console(file=screen, width=60, force_terminal=True, color_system=None)
    logs = Logs(None, console)
    with Progress(console=console, auto_refresh=False) as progress:
        progress.update(progress.add_task("training", total=2), completed=1, refresh=True)
        structlog.get_logger("fsm_trainer.x").info("pushed")
        progress.refresh()
    logs.close()
    line_of_log = next(line for line in screen.getvalue().splitlines() if "pushed" in line)
    assert "training" not in line_of_log
