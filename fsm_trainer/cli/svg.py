"""Diagrams of a machine: SVG for a page of its own, Mermaid for Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

Edge = tuple[str, str, str]
"""Source, destination, label."""

_WIDTH, _GAP, _LINE = 150, 90, 17
_STYLE = """
  svg { font: 13px system-ui, sans-serif; color: #1b1f24; background: #fff }
  .state { fill: #eef3f8; stroke: #35607f; stroke-width: 1.5 }
  .name { font-weight: 600 } .holds { font-size: 12px; opacity: .75 }
  text { fill: currentColor; text-anchor: middle }
  .edge { fill: none; stroke: #66707a; stroke-width: 1.5; marker-end: url(#arrow) }
  #arrow path { fill: #66707a }
  .label { paint-order: stroke; stroke: #fff; stroke-width: 5px; stroke-linejoin: round }
  @media (prefers-color-scheme: dark) {
    svg { color: #e3e7eb; background: #15191e }
    .state { fill: #1f2a35; stroke: #7fb0d2 } .edge { stroke: #9aa5af }
    #arrow path { fill: #9aa5af } .label { stroke: #15191e }
  }
"""


def state_diagram_svg(states: Mapping[str, Sequence[str]], edges: Iterable[Edge]) -> str:
    """Draw a machine as one SVG document: states in a row, forward edges above, others below.

    ``states`` maps each state, in order, to what it holds; edges between the same two states
    share one arrow, and a label may have several lines. Raises ``KeyError`` for an edge of an
    unknown state.
    """
    place = {name: index for index, name in enumerate(states)}
    merged = _merged(edges)
    reach = {
        side: max((abs(place[d] - place[s]) for s, d in merged if (place[d] > place[s]) is side),
                  default=0)
        for side in (True, False)
    }  # fmt: skip
    box = _LINE * (2 + max((len(holds) for holds in states.values()), default=0))
    rows = max((len(_rows(labels)) for labels in merged.values()), default=1)
    top = 24 + _rise(reach[True]) + _LINE * (rows - 1)
    bottom = top + box + _rise(reach[False]) + 24 + _LINE * (rows - 1)
    width = len(states) * (_WIDTH + _GAP) - _GAP + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {bottom}" '
        f'width="{width}" height="{bottom}" role="img"><style>{_STYLE}</style>',
        '<marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
        'orient="auto"><path d="M0 0L8 4L0 8z"/></marker>',
    ]
    arrows = [_arrow(place[s], place[d], labels, top, box) for (s, d), labels in merged.items()]
    parts += [line for line, _ in arrows] + [label for _, label in arrows]
    parts += [_box(place[name], name, holds, top, box) for name, holds in states.items()]
    return "\n".join([*parts, "</svg>"]) + "\n"


def state_diagram_mermaid(title: str, edges: Iterable[Edge]) -> str:
    """Write a machine as a Mermaid state diagram that begins where its first edge does."""
    merged = _merged(edges)
    lines = ["---", f"title: {title}", "---", "stateDiagram-v2", "    direction LR"]
    lines += [f"    [*] --> {source}" for source, _ in list(merged)[:1]]
    for (source, dest), labels in merged.items():
        text = (
            ", ".join(labels).replace("#", "#35;").replace(";", "#59;").replace("#35#59;", "#35;")
        )
        lines.append(f"    {source} --> {dest}: {text}")
    return "\n".join(lines) + "\n"


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


def _box(place: int, name: str, holds: Sequence[str], top: int, height: int) -> str:
    left = _left(place)
    middle = left + _WIDTH / 2
    lines = [f'<text class="name" x="{middle}" y="{top + _LINE + 4}">{escape(name)}</text>']
    lines += [
        f'<text class="holds" x="{middle}" y="{top + _LINE * (row + 1) + 6}">{escape(what)}</text>'
        for row, what in enumerate(holds, start=1)
    ]
    return (
        f'<rect class="state" x="{left}" y="{top}" width="{_WIDTH}" height="{height}" rx="10"/>'
        + "".join(lines)
    )


def _arrow(source: int, dest: int, labels: Sequence[str], top: int, box: int) -> tuple[str, str]:
    distance = abs(dest - source) or 1
    start: float
    end: float
    bulge: float
    # Arrows of other lengths leave a box at other places, so that they don't cross there.
    inset = 18 + 22 * (distance - 1)
    if dest > source:
        start, end = _left(source) + _WIDTH - inset, _left(dest) + inset
        edge, bulge, label_y = top, top - _rise(distance) * 4 / 3, top - _rise(distance) - 4
    elif dest < source:
        start, end = _left(source) + inset, _left(dest) + _WIDTH - inset
        edge = top + box
        bulge, label_y = edge + _rise(distance) * 4 / 3, edge + _rise(distance) + 14
    else:
        start, end = _left(source) + _WIDTH / 2 + 20, _left(source) + _WIDTH / 2 - 20
        edge, bulge, label_y = top + box, top + box + 40, top + box + 44
    path = f"M{start} {edge}C{start} {bulge} {end} {bulge} {end} {edge}"
    rows, x = _rows(labels), (start + end) / 2
    first = label_y - _LINE * (len(rows) - 1) if dest > source else label_y
    texts = [
        f'<text class="label" x="{x}" y="{first + _LINE * row}">{escape(text)}</text>'
        for row, text in enumerate(rows)
    ]
    return f'<path class="edge" d="{path}"/>', "".join(texts)
