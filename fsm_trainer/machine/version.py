"""The version of a set of weights."""

from __future__ import annotations

from typing import NamedTuple


class Version(NamedTuple):
    """Weights are named by ``(lineage, number)``.

    ``number`` counts the updates; a restart from a checkpoint begins a new ``lineage``, so that
    older weights with an equal number can't be mistaken for the trainer's.
    """

    lineage: int
    number: int

    def __str__(self) -> str:
        return f"{self.lineage}.{self.number}"
