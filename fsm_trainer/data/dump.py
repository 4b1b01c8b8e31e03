"""Scored trajectories in a file, to train on again without generating, or to look at."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from fsm_trainer.data.trajectory import Message, Sample, Status, Trajectory
from fsm_trainer.machine.errors import DataError
from fsm_trainer.machine.version import Version


def dump_path(folder: Path, step: int) -> Path:
    """The file of a step under a run's folder."""
    return folder / "trajectories" / f"step-{step:06d}.jsonl"


def write_dump(path: Path, trajectories: Sequence[Trajectory]) -> None:
    """Write one JSON object a line; floats keep all their bits, routes are left out."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for trajectory in trajectories:
            fields = {
                "sample": asdict(trajectory.sample),
                "tokens": trajectory.tokens.tolist(),
                "loss_mask": trajectory.loss_mask.tolist(),
                "logprobs": trajectory.logprobs.tolist(),
                "version": list(trajectory.version),
                "status": str(trajectory.status),
                "text": trajectory.text,
                "reward": trajectory.reward,
                "info": dict(trajectory.info),
            }
            file.write(json.dumps(fields, default=str) + "\n")


def read_dump(path: Path) -> list[Trajectory]:
    """Read what :func:`write_dump` wrote; raises DataError with file and line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise DataError(f"{path}: can't be read ({error.strerror})") from error
    found = []
    for number, line in enumerate(lines, start=1):
        try:
            found.append(_trajectory(json.loads(line)))
        except (ValueError, KeyError, TypeError, DataError) as error:
            raise DataError(f"{path}:{number}: not a trajectory ({error})") from error
    return found


def _trajectory(fields: dict[str, Any]) -> Trajectory:
    sample = fields["sample"]
    if not isinstance(sample["prompt"], str):
        sample["prompt"] = tuple(Message(*message) for message in sample["prompt"])
    return Trajectory(
        sample=Sample(**sample),
        tokens=np.array(fields["tokens"], dtype=np.int32),
        loss_mask=np.array(fields["loss_mask"], dtype=np.uint8),
        logprobs=np.array(fields["logprobs"], dtype=np.float32),
        version=Version(*fields["version"]),
        status=Status(fields["status"]),
        text=fields["text"],
        reward=fields["reward"],
        info=fields["info"],
    )
