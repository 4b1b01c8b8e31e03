"""Checkpoints of a run: a folder a step, one inside it for each role, complete or ignored."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fsm_trainer.machine.errors import DataError

FORMAT = 2
POSITION = "position.json"


@dataclass(frozen=True)
class Position:
    """Where a run stood: all that is not inside a role's own folder."""

    step: int
    """The last step that is in it."""
    number: int
    """Of the actor's version."""
    data: dict[str, Any]
    """The position in the data."""


class Checkpoints:
    """The checkpoints under ``folder``; the newest ``keep`` complete ones stay."""

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder, self._keep = folder, keep

    def folder(self, step: int, role: str) -> Path:
        """Where a role writes its part of a step's checkpoint."""
        path = self._folder / f"step-{step:06d}" / role
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def complete(self, position: Position) -> None:
        """Every role has written: the checkpoint counts from now on."""
        path = self._folder / f"step-{position.step:06d}"
        temporary = path / f".{POSITION}"
        with temporary.open("w", encoding="utf-8") as file:
            json.dump({"format": FORMAT, **asdict(position)}, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path / POSITION)
        for old in self._complete()[: -self._keep]:
            shutil.rmtree(old)

    def latest(self) -> Position | None:
        """The newest complete checkpoint; None where there is none.

        Raises DataError for one that can't be read.
        """
        complete = self._complete()
        if not complete:
            return None
        path = complete[-1] / POSITION
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content.pop("format") != FORMAT:
                raise DataError(f"{path}: written by another version of this program")
            return Position(**content)
        except (ValueError, TypeError, KeyError) as error:
            raise DataError(f"{path}: damaged ({error}); remove its folder") from error

    def _complete(self) -> list[Path]:
        return sorted(p.parent for p in self._folder.glob(f"step-*/{POSITION}"))
