"""Checkpoints of a run: a folder a step, one inside it for each role, whole or not taken.

A checkpoint counts from when its ``position.json`` is there, which comes last: after every rank of
every role has written, and after ``manifest.json``, which says how each file is recognised. What a
kill leaves half-written has no position and is written over.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import structlog

from fsm_trainer.data.durable import Seal, damage, flush, seal_of, write_durably
from fsm_trainer.machine.errors import DataError

FORMAT = 3
POSITION, MANIFEST = "position.json", "manifest.json"

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Position:
    """Where a run stood: all that is not inside a role's own folder."""

    step: int
    """The last step that is in it."""
    lineage: int
    """Of the actor's version; whoever resumes begins a later one."""
    number: int
    """Of the actor's version."""
    data: dict[str, Any]
    """The position in the data."""


class _Damaged(Exception):
    """Says which file, and what is wrong with it."""


class Checkpoints:
    """The checkpoints under ``folder``; the newest ``keep`` complete ones stay."""

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder, self._keep = folder, keep
        self._whole: Position | None = None
        """The newest one, once it was looked at."""

    def folder(self, step: int, role: str) -> Path:
        """Where a role writes its part of a step's checkpoint."""
        path = self._folder / f"step-{step:06d}" / role
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def complete(self, position: Position, saved: Mapping[str, Mapping[str, Seal]]) -> None:
        """Every role has written what ``saved`` lists: the checkpoint counts from now on."""
        path = self._folder / f"step-{position.step:06d}"
        content = json.dumps({"format": FORMAT, **asdict(position)}).encode()
        files = {f"{role}/{name}": seal for role in saved for name, seal in saved[role].items()}
        manifest = {n: s._asdict() for n, s in {**files, POSITION: seal_of(content)}.items()}
        write_durably(path / MANIFEST, json.dumps(manifest, indent=1).encode())
        for above in (self._folder, self._folder.parent):
            flush(above)
        write_durably(path / POSITION, content)
        self._whole = None
        oldest = self._complete()[-self._keep :][0]
        for old in self._folder.glob("step-*"):
            if old.name < oldest.name:
                (old / POSITION).unlink(missing_ok=True)  # first: half of it must not count
                shutil.rmtree(old)

    def latest(self) -> Position | None:
        """The newest whole checkpoint, each of its files looked at once; None where none is.

        Damaged ones that are newer are renamed, with a warning that names the file. Raises
        DataError if there are only damaged ones, or it is of another version of this program.
        """
        if self._whole is None:
            self._whole = self._newest()
        return self._whole

    def _newest(self) -> Position | None:
        damaged: dict[Path, str] = {}
        for path in reversed(self._complete()):
            try:
                position = _read(path)
            except _Damaged as why:
                damaged[path] = str(why)
                continue
            for bad, because in damaged.items():
                aside = bad.with_name(f"damaged-{bad.name}")
                log.warning(
                    "a checkpoint is damaged, the one before it is taken",
                    damage=because, moved_to=str(aside), taken=position.step,
                )  # fmt: skip
                shutil.rmtree(aside, ignore_errors=True)
                bad.rename(aside)
            return position
        if damaged:
            raise DataError(
                f"{self._folder}: no checkpoint is whole: {'; '.join(damaged.values())}. Put back "
                "a copy of one of these folders, or start a new run in another folder"
            )
        return None

    def _complete(self) -> list[Path]:
        return sorted(p.parent for p in self._folder.glob(f"step-*/{POSITION}"))


def _read(folder: Path) -> Position:
    """The position in a checkpoint, after all its files were compared with its manifest."""
    path = folder / MANIFEST
    try:
        told = json.loads(path.read_bytes())
        seals = {name: Seal(**seal) for name, seal in told.items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise _Damaged(f"{path} can't be read ({error})") from error
    if (wrong := damage(folder, seals)) is not None:
        raise _Damaged(wrong)
    content = json.loads((folder / POSITION).read_bytes())
    if content.pop("format") != FORMAT:
        raise DataError(
            f"{folder}: written by another version of this program. Resume with that one, or start "
            "a new run from the model in its folder actor"
        )
    return Position(**content)
