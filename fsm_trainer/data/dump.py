"""Scored trajectories in a file, to train on again without generating, or to look at."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np

from fsm_trainer.data.trajectory import Message, Sample, Status, Trajectory
from fsm_trainer.machine.errors import DataError
from fsm_trainer.machine.version import Version


def dump_path(folder: Path, step: int) -> Path:
    """The file of a step under a run's folder."""
    return folder / "trajectories" / f"step-{step:06d}.jsonl"


def step_dump(folder: Path, step: int) -> Path:
    """The folder of a step's updates, under a run's."""
    return folder / "dump" / f"step-{step:06d}"


def write_dump(path: Path, trajectories: Sequence[Trajectory]) -> None:
    """Write one JSON object a line; floats keep all their bits, routes are bytes in base64."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for trajectory in trajectories:
            file.write(json.dumps(_fields(trajectory), default=str) + "\n")


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


def _fields(trajectory: Trajectory) -> dict[str, Any]:
    kept = {f.name: getattr(trajectory, f.name) for f in fields(trajectory)}
    arrays = {name: a.tolist() for name, a in kept.items() if isinstance(a, np.ndarray)}
    routes = trajectory.routes
    if routes is not None:  # a hundred numbers a token, as most models have, would be half the file
        told = base64.b64encode(routes.astype("<i4").tobytes()).decode()
        arrays["routes"] = {"shape": routes.shape, "int32": told}
    return kept | arrays | {"sample": asdict(trajectory.sample), "info": dict(trajectory.info)}


def _trajectory(found: dict[str, Any]) -> Trajectory:
    sample = found["sample"]
    if not isinstance(sample["prompt"], str):
        sample["prompt"] = tuple(Message(*message) for message in sample["prompt"])
    version, status = Version(*found["version"]), Status(found["status"])
    routes = found.get("routes")
    if routes is not None:
        flat = np.frombuffer(base64.b64decode(routes["int32"], validate=True), dtype="<i4")
        found["routes"] = flat.reshape(routes["shape"])
    return Trajectory(**found | {"sample": Sample(**sample), "version": version, "status": status})
