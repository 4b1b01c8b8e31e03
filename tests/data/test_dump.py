"""What is dumped is read back bit by bit, and a damaged line is named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fsm_trainer.data.dump import dump_path, read_dump, write_dump
from fsm_trainer.data.trajectory import Message, Sample, Status, Trajectory
from fsm_trainer.machine.errors import DataError
from fsm_trainer.machine.version import Version

SAMPLE = Sample("sum/7", (Message("user", "1+2="),), "3", "sum/7", {"task": "sum"})
MADE = Trajectory(
    sample=SAMPLE,
    tokens=np.array([7, 8, 1], np.int32),
    loss_mask=np.array([0, 1, 1], np.uint8),
    logprobs=np.array([0, -0.1, -1 / 3], np.float32),
    version=Version(1, 3),
    status=Status.TRUNCATED,
    text="3",
    reward=0.1,
    info={"exact": 0.0},
    routes=np.arange(12, dtype=np.int32).reshape(2, 3, 2),
)


def test_a_trajectory_is_read_back_bit_by_bit(tmp_path: Path) -> None:
    write_dump(dump_path(tmp_path, 4), [MADE, MADE])
    assert (tmp_path / "trajectories" / "step-000004.jsonl").is_file()
    _, read = read_dump(dump_path(tmp_path, 4))
    for name in ("sample", "version", "status", "text", "reward", "info"):
        assert getattr(read, name) == getattr(MADE, name)
    for name in ("tokens", "loss_mask", "logprobs", "routes"):
        assert getattr(read, name).tobytes() == getattr(MADE, name).tobytes()
        assert getattr(read, name).shape == getattr(MADE, name).shape


def test_a_trajectory_without_routes_is_read_back_without(tmp_path: Path) -> None:
    write_dump(dump_path(tmp_path, 4), [replace(MADE, routes=None)])
    assert read_dump(dump_path(tmp_path, 4))[0].routes is None


def test_a_damaged_line_and_a_missing_file_are_named(tmp_path: Path) -> None:
    path = dump_path(tmp_path, 1)
    with pytest.raises(DataError, match=r"step-000001\.jsonl: can't be read"):
        read_dump(path)
    write_dump(path, [MADE, MADE])
    path.write_text(path.read_text().replace('"loss_mask": [0, 1, 1]', '"loss_mask": [1, 1]', 1))
    with pytest.raises(DataError, match=r"step-000001\.jsonl:1: not a trajectory"):
        read_dump(path)
