"""The report's charts: geometry here, SVG in ``templates/``, colours in the page's style sheet."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, ClassVar, TypeVar

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from fsm_trainer.machine.names import State

WIDTH = 1100
"""Width of a full chart in the SVG's own units."""

_MOST_POINTS, _FEW_POINTS, _MOST_BARS, _LEAST_SLOTS = 300, 20, 120, 16
_TEMPLATES = Environment(
    loader=PackageLoader("fsm_trainer.cli"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)

Point = tuple[float, float]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a chart; ``marked`` draws its points as dots, as is done where they are few."""

    name: str
    points: Sequence[Point]
    marked: bool = False
    mean_of: int = 1
    """How many steps each point is the mean of."""


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

    x: Point
    y: Point
    width: float
    height: float
    left: ClassVar[int] = 64
    top: ClassVar[int] = 10

    @property
    def right(self) -> float:
        return self.width - 14

    @property
    def bottom(self) -> float:
        return self.height - 34

    def at_x(self, value: float) -> float:
        part = (value - self.x[0]) / (self.x[1] - self.x[0])
        return round(self.left + part * (self.right - self.left), 2)

    def at_y(self, value: float) -> float:
        part = (value - self.y[0]) / (self.y[1] - self.y[0])
        return round(self.bottom - part * (self.bottom - self.top), 2)

    def x_ticks(self, least: float = 0.0) -> list[Point]:
        ticks = _ticks(*self.x, max(2, int(self.width // 110)), least)
        return list(zip(ticks, ticks, strict=True))

    def y_ticks(self) -> list[float]:
        return _ticks(*self.y, 4)


def render(template: str, **values: Any) -> Markup:
    """Fill in one of the templates; what isn't markup already is escaped."""
    return Markup(_TEMPLATES.get_template(template).render(values))


def line_chart(series: Sequence[Series], *, width: float = WIDTH, height: float = 260) -> Markup:
    """Draw series over the step; long ones are averaged to at most 300 points."""
    lines = [_thinned(one) for one in series if one.points]
    if not lines:
        return render("none.html", what="numbers")
    x = _padded([x for line in lines for x, _ in line.points], 0)
    y = _padded([y for line in lines for _, y in line.points], 0.06)
    frame = _Frame(x, y, width, height)
    return render("lines.svg", frame=frame, lines=lines, ticks=frame.x_ticks(1.0))


def stacked_bars(rows: Sequence[tuple[float, Mapping[str, float]]]) -> Markup:
    """Draw the seconds by phase of each step as stacked bars; many steps share a bar's mean."""
    names = list(dict.fromkeys(name for _, parts in rows for name in parts))
    if not names:
        return render("none.html", what="phases")
    bars = [
        (group[0][0], group[-1][0], {n: fmean(bar.get(n, 0.0) for _, bar in group) for n in names})
        for group in _grouped(rows, _MOST_BARS)
    ]
    top = _padded([0, max(sum(bar.values()) for _, _, bar in bars)], 0.04)[1]
    frame = _Frame((0, max(len(bars), _LEAST_SLOTS)), (0, top), WIDTH, 260)
    ticks = [(i + 0.5, bars[i][0]) for i in range(0, len(bars), -(-len(bars) // 12))]
    return render("bars.svg", frame=frame, bars=bars, names=names, ticks=ticks)


def lanes(rows: Sequence[Lane], start: float, end: float, *, named: bool = False) -> Markup:
    """Draw a lane for each worker between two times (seconds): taller and other colour by state.

    ``named`` writes states and actions beside their bars, where there is room.

    What is narrower than half a unit is left out, so that the page of a long run stays small.
    """
    if not rows or end <= start:
        return render("none.html", what="records")
    tall = 58 if named else 44
    frame = _Frame((start, end), (0, 1), WIDTH, _Frame.top + len(rows) * tall + 34)
    shown = [
        replace(
            lane,
            states=_visible(lane.states, frame, fill=True),
            actions=_visible(lane.actions, frame, fill=False),
            faults=[fault for fault in lane.faults if start <= fault.start <= end],
        )
        for lane in rows
    ]
    look = {"tall": tall, "named": named, "levels": list(map(str, State))}
    return render("lanes.svg", frame=frame, rows=shown, ticks=frame.x_ticks(), **look)


def least_visible(start: float, end: float) -> float:
    """Give the shortest time (seconds) that :func:`lanes` still draws between two times."""
    return (end - start) / WIDTH / 2


def _ticks(low: float, high: float, about: int, least: float = 0.0) -> list[float]:
    """Round numbers within the range, in steps of 1, 2 or 5 times a power of ten."""
    rough = max((high - low) / about, least)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    count = math.floor(high / step + 1e-9) - first + 1
    return [round((first + index) * step, 12) for index in range(count)]


def _padded(values: Sequence[float], part: float) -> Point:
    low, high = min(values), max(values)
    if high - low <= 1e-12 * max(1.0, abs(high)):
        pad = (abs(high) or 1.0) * 0.1
    else:
        pad = (high - low) * part
    return low - pad, high + pad


def _grouped(rows: Sequence[T], most: int) -> list[Sequence[T]]:
    """Neighbours together, so that there are at most ``most`` groups of equal size."""
    size = -(-len(rows) // most)
    return [rows[at : at + size] for at in range(0, len(rows), size)]


def _thinned(series: Series) -> Series:
    groups = _grouped(series.points, _MOST_POINTS)
    means = [(group[-1][0], fmean(y for _, y in group)) for group in groups]
    marked = series.marked or len(means) <= _FEW_POINTS
    return replace(series, points=means, marked=marked, mean_of=len(groups[0]))


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
