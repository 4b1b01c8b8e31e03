"""The report's charts as SVG text; colours and fonts come from the page's style sheet."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape

WIDTH = 1100
"""Width of a full chart in the SVG's own units."""

STATES = ("disconnected", "sleeping", "awake", "connected")
"""From holding nothing to holding all: the order in which lanes grow taller."""

_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 14, 10, 34
_MOST_POINTS, _FEW_POINTS, _MOST_BARS, _LEAST_SLOTS = 300, 20, 120, 16
_LANE, _STEP = 44, 8

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a chart; ``marked`` draws its points as dots, as is done where they are few."""

    name: str
    points: Sequence[Point]
    marked: bool = False


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of time, in seconds, in a lane: a state, or an action under it."""

    start: float
    end: float
    name: str
    title: str


@dataclass(frozen=True, slots=True)
class Lane:
    """One worker's states, actions and faults over time."""

    worker: str
    states: Sequence[Span]
    actions: Sequence[Span]
    faults: Sequence[Span]


@dataclass(frozen=True, slots=True)
class _Frame:
    """Maps data to the plot area of an SVG."""

    x: tuple[float, float]
    y: tuple[float, float]
    width: float
    height: float

    def at_x(self, value: float) -> float:
        part = (value - self.x[0]) / (self.x[1] - self.x[0])
        return round(_LEFT + part * (self.width - _LEFT - _RIGHT), 2)

    def at_y(self, value: float) -> float:
        part = (value - self.y[0]) / (self.y[1] - self.y[0])
        return round(self.height - _BOTTOM - part * (self.height - _TOP - _BOTTOM), 2)


def line_chart(series: Sequence[Series], *, width: float = WIDTH, height: float = 260) -> str:
    """Draw series over the step; long ones are averaged to at most 300 points."""
    thinned = [(one, *_thinned(one.points)) for one in series if one.points]
    shown = [point for _, points, _ in thinned for point in points]
    if not shown:
        return '<p class="none">no numbers yet</p>'
    frame = _Frame(
        _padded([x for x, _ in shown], 0), _padded([y for _, y in shown], 0.06), width, height
    )
    parts = [_axes(frame, "step")]
    for index, (one, points, size) in enumerate(thinned):
        path = " ".join(f"{frame.at_x(x)},{frame.at_y(y)}" for x, y in points)
        parts.append(f'<polyline class="line s{index % 8}" points="{path}"/>')
        mean = f", mean of {size} steps" if size > 1 else ""
        dots = one.marked or len(points) <= _FEW_POINTS
        radius, kind = (4, f"dot s{index % 8}") if dots else (5, "hover")
        parts += [
            f'<circle class="{kind}" cx="{frame.at_x(x)}" cy="{frame.at_y(y)}" r="{radius}">'
            f"<title>{escape(one.name)} {y:.4g} at step {x:g}{mean}</title></circle>"
            for x, y in points
        ]
    names = [one.name for one, _, _ in thinned]
    return _svg(parts, width, height, ", ".join(names)) + (legend(names) if len(names) > 1 else "")


def stacked_bars(rows: Sequence[tuple[float, Mapping[str, float]]], *, height: float = 260) -> str:
    """Draw the seconds by phase of each step as stacked bars; many steps share a bar's mean."""
    names = list(dict.fromkeys(name for _, parts in rows for name in parts))
    if not names:
        return '<p class="none">no phases yet</p>'
    bars = _binned(rows, names)
    top = max(sum(bar.values()) for _, _, bar in bars)
    slots = max(len(bars), _LEAST_SLOTS)
    frame = _Frame((0, slots), _padded([0, top], 0.04, floor=0), WIDTH, height)
    parts = [_axes(frame, "step", x_names=_bar_names(bars))]
    slot = frame.at_x(1) - frame.at_x(0)
    for index, (first, last, bar) in enumerate(bars):
        base = 0.0
        steps = f"step {first:g}" if first == last else f"mean of steps {first:g} to {last:g}"
        for number, name in enumerate(names):
            value = bar.get(name, 0.0)
            y = frame.at_y(base + value)
            parts.append(
                f'<rect class="bar f{number % 8}" x="{frame.at_x(index) + slot * 0.06:.2f}" '
                f'y="{y}" width="{slot * 0.88:.2f}" height="{frame.at_y(base) - y:.2f}">'
                f"<title>{escape(name)} {value:.3g} s, {steps}</title></rect>"
            )
            base += value
    return _svg(parts, WIDTH, height, "seconds by phase") + legend(names, "f")


def lanes(rows: Sequence[Lane], start: float, end: float, *, named: bool = False) -> str:
    """Draw a lane for each worker between two times (seconds): taller and other colour by state.

    ``named`` writes states and actions beside their bars, where there is room.

    What is narrower than half a unit is left out, so that the page of a long run stays small.
    """
    if not rows or end <= start:
        return '<p class="none">no records yet</p>'
    tall = _LANE + (14 if named else 0)
    height = len(rows) * tall + _TOP + _BOTTOM
    frame = _Frame((start, end), (0, 1), WIDTH, height)
    parts = [_axes(frame, "seconds", y_ticks=False)]
    for number, lane in enumerate(rows):
        floor = _TOP + number * tall + 32
        parts.append(
            f'<text class="lane" x="{_LEFT - 6}" y="{floor - 8}">{escape(lane.worker)}</text>'
        )
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{floor}" y2="{floor}"/>'
        )
        for span in _visible(lane.states, frame, fill=True):
            level = STATES.index(span.name) if span.name in STATES else len(STATES) - 1
            up = 5 + level * _STEP
            parts.append(_span(frame, span, f"state-{escape(span.name)}", floor - up, up))
            parts.append(_name(frame, span, "in", floor - 5) if named and level > 1 else "")
        for span in _visible(lane.actions, frame, fill=False):
            parts.append(_span(frame, span, "action", floor + 1, 6))
            parts.append(_name(frame, span, "under", floor + 18) if named else "")
        parts += [
            f'<path class="fault" d="M{frame.at_x(f.start)} {floor - 14}l5 -16h-10z">'
            f"<title>{escape(f.title)}</title></path>"
            for f in lane.faults
            if start <= f.start <= end
        ]
    return _svg(parts, WIDTH, height, "states of each worker over time")


def least_visible(start: float, end: float) -> float:
    """Give the shortest time (seconds) that :func:`lanes` still draws between two times."""
    return (end - start) / WIDTH / 2


def legend(names: Sequence[str], kind: str = "s") -> str:
    """Write the legend of a chart, in the order of its colours."""
    keys = [
        f'<span><i class="key {kind}{index % 8}"></i>{escape(name)}</span>'
        for index, name in enumerate(names)
    ]
    return f'<p class="legend">{"".join(keys)}</p>'


def _svg(parts: Sequence[str], width: float, height: float, label: str) -> str:
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}">'
        + "".join(parts)
        + "</svg>"
    )


def _axes(
    frame: _Frame, x_label: str, *, y_ticks: bool = True, x_names: Sequence[Point] | None = None
) -> str:
    least_x = 1.0 if x_label == "step" else 0.0
    floor = frame.height - _BOTTOM
    parts = []
    for value in _ticks(*frame.y, 4) if y_ticks else []:
        y = frame.at_y(value)
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{frame.width - _RIGHT}" y1="{y}" y2="{y}"/>'
            f'<text class="y" x="{_LEFT - 8}" y="{y + 4}">{value:.6g}</text>'
        )
    few = max(2, int(frame.width // 110))
    for value, name in x_names or [(tick, tick) for tick in _ticks(*frame.x, few, least_x)]:
        parts.append(f'<text class="x" x="{frame.at_x(value)}" y="{floor + 16}">{name:.6g}</text>')
    middle = (_LEFT + frame.width - _RIGHT) / 2
    return "".join(parts) + f'<text class="x dim" x="{middle}" y="{floor + 31}">{x_label}</text>'


def _ticks(low: float, high: float, about: int, least: float = 0.0) -> list[float]:
    """Round numbers within the range, in steps of 1, 2 or 5 times a power of ten."""
    rough = max((high - low) / about, least)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    count = math.floor(high / step + 1e-9) - first + 1
    return [round((first + index) * step, 12) for index in range(count)]


def _padded(values: Sequence[float], part: float, floor: float | None = None) -> Point:
    low, high = min(values), max(values)
    if high - low <= 1e-12 * max(1.0, abs(high)):
        pad = (abs(high) or 1.0) * 0.1
    else:
        pad = (high - low) * part
    return (low - pad if floor is None else floor), high + pad


def _thinned(points: Sequence[Point]) -> tuple[list[Point], int]:
    size = -(-len(points) // _MOST_POINTS)
    groups = [points[at : at + size] for at in range(0, len(points), size)]
    means = [(g[-1][0], sum(y for _, y in g) / len(g)) for g in groups]
    return means, size


def _binned(
    rows: Sequence[tuple[float, Mapping[str, float]]], names: Sequence[str]
) -> list[tuple[float, float, dict[str, float]]]:
    size = -(-len(rows) // _MOST_BARS)
    groups = [rows[at : at + size] for at in range(0, len(rows), size)]
    return [
        (g[0][0], g[-1][0], {n: sum(bar.get(n, 0.0) for _, bar in g) / len(g) for n in names})
        for g in groups
    ]


def _bar_names(bars: Sequence[tuple[float, float, object]]) -> list[Point]:
    every = -(-len(bars) // 12)
    return [(i + 0.5, first) for i, (first, _, _) in enumerate(bars) if i % every == 0]


def _visible(spans: Sequence[Span], frame: _Frame, *, fill: bool) -> list[Span]:
    """Clip to the frame and skip slivers; with ``fill``, who comes next takes their place."""
    start, end = frame.x
    least = least_visible(start, end)
    shown: list[Span] = []
    at = start
    for span in spans:
        stop = min(span.end, end)
        if stop - at < least or span.start >= end:
            continue
        begin = at if fill and shown else max(span.start, start)
        shown.append(replace(span, start=begin, end=stop))
        at = stop
    return shown


def _span(frame: _Frame, span: Span, kind: str, top: float, height: float) -> str:
    x = frame.at_x(span.start)
    width = max(frame.at_x(span.end) - x, 0.5)
    return (
        f'<rect class="{kind}" x="{x}" y="{top}" width="{width:.2f}" height="{height}">'
        f"<title>{escape(span.title)}</title></rect>"
    )


def _name(frame: _Frame, span: Span, kind: str, y: float) -> str:
    left, right = frame.at_x(span.start), frame.at_x(span.end)
    if right - left < 7 * len(span.name):
        return ""
    return f'<text class="{kind}" x="{left + 4:.2f}" y="{y}">{escape(span.name)}</text>'
