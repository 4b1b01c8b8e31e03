"""The journal: what every worker did, one JSON object a line, in the order it was committed.

``journal.jsonl`` is what :command:`fsm-train trace` replays against ``states/`` and what the
report draws. A record is a line that ends: what a killed run left half-written is no record.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from fsm_trainer.document import LineError, LineFile, read_lines

FORMAT: Literal[1] = 1
_UNSAID = {"epoch": None, "version": None, "seconds": 0.0, "ok": True, "error": None}


class Kind(StrEnum):
    """What a record tells of: an edge of the machine, work inside a state, or a fault."""

    TRANSITION = "transition"
    ACTION = "action"
    FAULT = "fault"


class Entry(BaseModel):
    """One record of a journal."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    format: Literal[1]
    """Version of this format."""
    seq: int = Field(ge=1)
    """1, 2, 3, ... over all workers: a gap is a lost record."""
    time: float
    """When it was committed: seconds since the epoch of Unix."""
    worker: str = Field(min_length=1)
    """Name of the worker, unique in the run: rollout-0."""
    role: str = Field(min_length=1)
    """actor, critic or rollout."""
    rank: int = Field(ge=0)
    """Rank of the process within its role."""
    kind: Kind = Field(strict=False)
    """transition, action or fault."""
    trigger: str = Field(min_length=1)
    """The trigger of a transition, or the name of an action or a fault."""
    source: str
    """State before."""
    dest: str
    """State after; as `source` for an action and for a transition that was undone."""
    epoch: int | None = Field(ge=0)
    """Epoch of the link that the worker holds or that this is about; null without one."""
    version: str | None = Field(pattern=r"^\d+\.\d+$")
    """`lineage.number` of the worker's weights afterwards; null if it has none or they are torn."""
    seconds: float = Field(ge=0)
    """How long it took."""
    ok: bool
    """False when it failed or was undone."""
    error: str | None
    """Why not ok; null when ok."""
    bytes: int | None = Field(default=None, ge=0)
    """Of a push, or of values sent, at its sender: how many bytes went out; else absent."""
    gigabytes_per_second: float | None = Field(default=None, ge=0)
    """At the same: those bytes over the seconds from header to acknowledgement."""
    zero_kl: Literal["passed", "failed", "off"] | None = None
    """Of the actor's first training: whether its KL to the reference was 0; else absent. A check
    that failed in a run that went on was only to warn."""


class Journal(LineFile):
    """Appends records to a journal; any thread may call it.

    An existing journal is continued: its last, unfinished line is cut and ``seq`` goes on.
    Raises :class:`LineError` if what exists isn't a journal.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        entries = read_journal(path) if path.exists() else []
        super().__init__(path)
        self._clock, self._seq = clock, entries[-1].seq if entries else 0

    def record(self, **told: Any) -> Entry:
        """Append one record, and flush it.

        Args:
            told: the fields of an :class:`Entry` but format, seq and time; without ``epoch``,
                ``version``, ``seconds``, ``ok`` and ``error`` it went well, at once, and had none.
        """
        with self.lock:
            seq, now = self._seq + 1, self._clock()
            entry = Entry(format=FORMAT, seq=seq, time=now, **{**_UNSAID, **told})
            self.file.write(entry.model_dump_json(exclude_unset=True) + "\n")
            self._seq = seq
            return entry


def read_journal(path: Path) -> list[Entry]:
    """Read all records of a journal.

    Raises :class:`LineError`, with file and line, for a line that isn't a record and for a
    ``seq`` that doesn't follow the one before.
    """
    entries = read_lines(path, Entry)
    for number, entry in enumerate(entries, start=1):
        if entry.seq != number:
            because = f"seq is {entry.seq}, must be {number}: a record is missing or moved"
            raise LineError(path, number, because)
    return entries
