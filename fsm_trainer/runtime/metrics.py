"""The numbers of a run: ``metrics.jsonl``, and where wanted TensorBoard and Weights & Biases."""

from __future__ import annotations

import importlib
import json
import math
import time
from collections.abc import Callable, Mapping
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Protocol, Self

import structlog
from pydantic import BaseModel, ConfigDict, Field, model_validator

from fsm_trainer.document import LineFile, read_lines
from fsm_trainer.machine.errors import CapabilityMissing

FORMAT: Literal[1] = 1

log = structlog.get_logger(__name__)


class Stage(StrEnum):
    """When the held-out sets were evaluated."""

    START = "start"
    WARMUP = "warmup"
    TRAIN = "train"
    END = "end"


class MetricsRow(BaseModel):
    """One line of ``metrics.jsonl``; further numbers may stand beside these, null if not finite."""

    model_config = ConfigDict(
        extra="allow",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        validate_by_name=True,
    )
    __pydantic_extra__: dict[str, float | None]

    format: Literal[1]
    """Version of this format."""
    step: int = Field(ge=0)
    """0 before the first step of reinforcement learning."""
    time: float
    """When it was written: seconds since the epoch of Unix."""
    seconds: float = Field(ge=0)
    """How long the step took."""
    tokens: int = Field(ge=0)
    """Tokens that the step generated."""
    phase_seconds: dict[str, float]
    """Seconds in each phase of the step, by the phase's name."""
    train_reward: float | None = Field(default=None, alias="train/reward")
    """Mean reward of the step's trajectories; null if there were none."""
    train_kl: float | None = Field(default=None, alias="train/kl")
    """Mean KL of the policy to the reference, nats a token; null without one."""
    eval_reward: float | None = Field(default=None, alias="eval/reward")
    """Mean reward on the held-out sets; only where evaluated."""
    stage: Stage | None = Field(default=None, strict=False)
    """When it was evaluated; only where evaluated."""

    @model_validator(mode="after")
    def _evaluated_with_stage(self) -> Self:
        if ("eval_reward" in self.model_fields_set) != (self.stage is not None):
            raise ValueError("eval/reward and stage stand together or not at all")
        return self

    def numbers(self) -> dict[str, float]:
        """Every number but time and phases, by its name in the file; nulls left out."""
        row = self.model_dump(by_alias=True, exclude={"format", "time", "stage", "phase_seconds"})
        return {name: value for name, value in row.items() if value is not None}


class Sink(Protocol):
    """Something else that wants the numbers."""

    def write(self, step: int, numbers: Mapping[str, float], when: float) -> None:
        """Take the numbers of a step, written at ``when`` (seconds since the epoch of Unix)."""

    def close(self) -> None:
        """Flush and end."""


class MetricsWriter(LineFile):
    """Appends rows to ``metrics.jsonl`` and hands their numbers to the sinks; thread-safe."""

    def __init__(
        self,
        path: Path,
        sinks: tuple[Sink, ...] = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(path)
        self._sinks, self._clock = sinks, clock

    def write(
        self,
        step: int,
        values: Mapping[str, float],
        *,
        seconds: float = 0.0,
        tokens: int = 0,
        phase_seconds: Mapping[str, float] | None = None,
        stage: Stage | None = None,
    ) -> MetricsRow:
        """Append a row; with ``stage``, ``values`` must hold ``eval/reward``.

        What is not finite is written as null, with a warning that names it.
        """
        fields: dict[str, Any] = {
            "format": FORMAT,
            "step": step,
            "time": self._clock(),
            "seconds": seconds,
            "tokens": tokens,
            "phase_seconds": dict(phase_seconds or {}),
            "train/reward": None,
            "train/kl": None,
            **_finite(step, values),
        }
        if stage is not None:
            fields["stage"] = stage.value
        row = MetricsRow.model_validate(fields)
        with self.lock:
            self.file.write(json.dumps(fields, allow_nan=False) + "\n")
            for sink in self._sinks:
                sink.write(step, row.numbers(), row.time)
        return row

    def close(self) -> None:
        """Close the file and the sinks; a second call does nothing."""
        if not self.file.closed:
            super().close()
            for sink in self._sinks:
                sink.close()


class TensorBoard:
    """Writes the numbers as TensorBoard scalars, without importing torch.

    Raises :class:`CapabilityMissing` if TensorBoard isn't installed.
    """

    def __init__(self, folder: Path) -> None:
        _require("tensorboard", "metrics.tensorboard")
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self._writer = EventFileWriter(str(folder))

    def write(self, step: int, numbers: Mapping[str, float], when: float) -> None:
        """Add a scalar for each number."""
        values = [self._summary.Value(tag=tag, simple_value=v) for tag, v in numbers.items()]
        summary = self._summary(value=values)
        self._writer.add_event(self._event(wall_time=when, step=step, summary=summary))

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


class WeightsAndBiases:
    """Sends the numbers to Weights & Biases.

    Raises :class:`CapabilityMissing` if wandb isn't installed.
    """

    def __init__(self, folder: Path, project: str, config: Mapping[str, Any]) -> None:
        _require("wandb", "metrics.wandb")
        self._run = importlib.import_module("wandb").init(
            project=project, dir=str(folder), config=dict(config)
        )

    def write(self, step: int, numbers: Mapping[str, float], when: float) -> None:
        """Log the numbers under their step."""
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        """End wandb's run."""
        self._run.finish()


def read_metrics(path: Path) -> list[MetricsRow]:
    """Read all rows; where a resumed run repeats a step (and stage), the last row counts.

    A last line that doesn't end is no row. Raises :class:`DataError`, with file and line, for a
    line that isn't one.
    """
    rows = {(row.step, row.stage): row for row in read_lines(path, MetricsRow)}
    return sorted(rows.values(), key=lambda row: (row.step, row.time))


def _finite(step: int, values: Mapping[str, float]) -> dict[str, float | None]:
    finite = {name: float(v) if math.isfinite(v) else None for name, v in values.items()}
    lost = [name for name, value in finite.items() if value is None]
    if lost:
        log.warning("metrics not finite, written as null", step=step, metrics=lost)
    return finite


def _require(package: str, field: str) -> None:
    if find_spec(package) is None:
        raise CapabilityMissing(
            f"{field} asks for {package}, which isn't installed: "
            f"python -m pip install {package}, or leave the field out"
        )
