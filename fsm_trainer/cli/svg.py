"""Diagrams of a machine: SVG for a page of its own, Mermaid for Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from fsm_trainer.cli.charts import render

Edge = tuple[str, str, str]
"""Source, destination, label."""

_WIDTH, _GAP, _LINE = 150, 90, 17


class _Arrow(NamedTuple):
    """A curve from ``(start, edge)`` by the height ``bulge`` to ``(end, edge)``, and its label."""

    start: float
    end: float
    edge: float
    bulge: float
    label: float
    rows: Sequence[str]


def state_diagram_svg(states: Mapping[str, Sequence[str]], edges: Iterable[Edge]) -> str:
    """Draw a machine as one SVG document: states in a row, forward edges above, others below.

    ``states`` maps each state, in order, to what it holds; edges between the same two states
    share one arrow, and a label may have several lines. Raises ``KeyError`` for an edge of an
    unknown state.
    """
    place = {name: index for index, name in enumerate(states)}
    merged = [(place[s], place[d], _rows(labels)) for (s, d), labels in _merged(edges).items()]
    above = max(0, *(dest - source for source, dest, _ in merged))
    below = max(0, *(source - dest for source, dest, _ in merged))
    box = _LINE * (2 + max((len(holds) for holds in states.values()), default=0))
    labels = _LINE * (max((len(rows) for _, _, rows in merged), default=1) - 1)
    top = 24 + _rise(above) + labels
    return render(
        "diagram.svg",
        width=len(states) * (_WIDTH + _GAP) - _GAP + 40,
        bottom=top + box + _rise(below) + 24 + labels,
        arrows=[_arrow(source, dest, rows, top, box) for source, dest, rows in merged],
        boxes=[(_left(place[name]), name, holds) for name, holds in states.items()],
        top=top,
        box_width=_WIDTH,
        box_height=box,
        line=_LINE,
    )


def state_diagram_mermaid(
    title: str, states: Mapping[str, Sequence[str]], edges: Iterable[Edge]
) -> str:
    """Write a machine as a Mermaid state diagram that begins where its first edge does.

    Each state of ``states`` says what it holds.
    """
    lines = [(source, dest, ", ".join(labels)) for (source, dest), labels in _merged(edges).items()]
    return render("diagram.mmd", title=title, edges=lines, holds=states)


def _merged(edges: Iterable[Edge]) -> dict[tuple[str, str], list[str]]:
    merged: dict[tuple[str, str], list[str]] = {}
    for source, dest, label in edges:
        labels = merged.setdefault((source, dest), [])
        if label not in labels:
            labels.append(label)
    return merged


def _rows(labels: Sequence[str]) -> list[str]:
    """The lines of an arrow's labels: one, unless one of them has several."""
    several = any("\n" in label for label in labels)
    return "\n".join(labels).split("\n") if several else [", ".join(labels)]


def _rise(distance: int) -> int:
    """How far an arrow over ``distance`` states bulges out of the row."""
    return 34 + 40 * (distance - 1) if distance else 0


def _left(place: int) -> int:
    return 20 + place * (_WIDTH + _GAP)


def _arrow(source: int, dest: int, rows: Sequence[str], top: int, box: int) -> _Arrow:
    distance = abs(dest - source) or 1
    left, right = _left(source), _left(dest)
    # Arrows of other lengths leave a box at other places, so that they don't cross there.
    inset = 18 + 22 * (distance - 1)
    rise, bottom = _rise(distance), top + box
    if dest > source:
        first = top - rise - 4 - _LINE * (len(rows) - 1)
        return _Arrow(left + _WIDTH - inset, right + inset, top, top - rise * 4 / 3, first, rows)
    if dest < source:
        start, end, bulge = left + inset, right + _WIDTH - inset, bottom + rise * 4 / 3
        return _Arrow(start, end, bottom, bulge, bottom + rise + 14, rows)
    middle = left + _WIDTH / 2
    return _Arrow(middle + 20, middle - 20, bottom, bottom + 40, bottom + 44, rows)
