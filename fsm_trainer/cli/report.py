"""The report of a run: one HTML file that needs nothing else, from the files in its folder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

from markupsafe import Markup
from pydantic import BaseModel

from fsm_trainer.cli import charts
from fsm_trainer.cli.charts import WIDTH, Lane, Series, Span, line_chart
from fsm_trainer.cli.verdicts import verdicts
from fsm_trainer.machine.errors import DataError
from fsm_trainer.machine.names import Role, State
from fsm_trainer.runtime.journal import Entry, Kind, read_journal
from fsm_trainer.runtime.metrics import MetricsRow, Stage, read_metrics

_ROLES = {role.value: place for place, role in enumerate(Role)}


class Summary(BaseModel, frozen=True):
    """The main numbers of a run, ready for JSON by ``model_dump_json``."""

    run: str
    """The run's folder."""
    steps: int
    """The last step that was written."""
    seconds: float
    """From the first record to the last."""
    step_seconds: float
    """Seconds in steps, added up."""
    tokens: int
    """Tokens that were generated."""
    eval_reward: dict[Stage, float]
    """The last held-out reward of each stage."""
    rise: float | None
    """Held-out reward at the end, less that after the warm-up (or at the start)."""
    counts: dict[str, dict[str, int]]
    """For each kind and trigger, how often each worker did it."""
    faults: int
    """Records of faults."""
    failed: int
    """Transitions and actions that failed or were undone."""
    checks: dict[str, str]
    """What became of each check of the numbers; see docs/checks.md."""
    notices: list[str]
    """What is missing."""


@dataclass(frozen=True, slots=True)
class Run:
    """What a run's folder tells; any part may be missing, and ``notices`` says which."""

    folder: Path
    rows: Sequence[MetricsRow]
    entries: Sequence[Entry]
    config: str | None
    notices: Sequence[str]

    @property
    def steps(self) -> list[MetricsRow]:
        """The rows of training steps: those with phases."""
        return [row for row in self.rows if row.phase_seconds]

    @property
    def zero(self) -> float:
        """When the first record began."""
        return min((entry.time - entry.seconds for entry in self.entries), default=0.0)

    @property
    def end(self) -> float:
        """Seconds from there to the last record."""
        return self.entries[-1].time - self.zero if self.entries else 0.0

    @property
    def times(self) -> list[float]:
        """When each record was written."""
        return [entry.time for entry in self.entries] or [row.time for row in self.rows]

    def last_steps(self) -> tuple[float, float] | None:
        """Give the seconds of the last two steps, or None if that's about the whole run."""
        if not self.entries or len(self.steps) < 3:
            return None
        start, stop = (self.steps[at].time - self.zero for at in (-3, -1))
        return (start, min(stop, self.end)) if 0 <= start < min(stop, self.end) else None

    def summary(self) -> Summary:
        """Give the run's main numbers."""
        rewards = {
            row.stage: row.eval_reward
            for row in self.rows
            if row.stage is not None and row.eval_reward is not None
        }
        first = rewards.get(Stage.WARMUP, rewards.get(Stage.START))
        last = rewards.get(Stage.END)
        return Summary(
            run=str(self.folder),
            steps=max((row.step for row in self.rows), default=0),
            seconds=max(self.times) - min(self.times) if self.times else 0.0,
            step_seconds=sum(row.seconds for row in self.steps),
            tokens=sum(row.tokens for row in self.rows),
            eval_reward=rewards,
            rise=last - first if first is not None and last is not None else None,
            counts=_counts(self.entries),
            faults=sum(entry.kind is Kind.FAULT for entry in self.entries),
            failed=sum(not e.ok and e.kind is not Kind.FAULT for e in self.entries),
            checks=verdicts(self.rows, self.entries),
            notices=list(self.notices),
        )


def load_run(folder: Path) -> Run:
    """Read what a run left in its folder.

    Raises :class:`DataError` if there is no such folder, and what the readers raise for a damaged
    file; a missing file is a notice.
    """
    if not folder.is_dir():
        raise DataError(f"{folder} is no folder of a run: give the --out of fsm-train run")
    metrics, journal = folder / "metrics.jsonl", folder / "journal.jsonl"
    rows = read_metrics(metrics) if metrics.exists() else []
    entries = read_journal(journal) if journal.exists() else []
    notices = []
    if not rows:
        notices.append("metrics.jsonl is missing or empty: no step has ended.")
    if not entries:
        notices.append("journal.jsonl is missing or empty: no worker has moved.")
    if rows and not any(row.stage is Stage.END for row in rows):
        notices.append("The run has not reached its end: it goes on, or was stopped.")
    config = folder / "config.yaml"
    return Run(folder, rows, entries, config.read_text() if config.is_file() else None, notices)


def write_report(run_dir: Path, out_path: Path) -> Path:
    """Write the report of the run in ``run_dir`` to ``out_path``; raises as :func:`load_run`."""
    run = load_run(run_dir)
    lanes, window = build_lanes(run.entries, run.end), run.last_steps()
    points = _numbers(run.rows)
    page = charts.render(
        "report.html",
        title=f"Run {run_dir.resolve().name}",
        run=run,
        begun=datetime.fromtimestamp(min(run.times), UTC) if run.times else None,
        summary=run.summary(),
        rewards=_rewards(points),
        others=_others(points),
        phases=charts.stacked_bars([(float(row.step), row.phase_seconds) for row in run.steps]),
        lanes=charts.lanes(lanes, 0.0, run.end),
        states=list(State),
        least=charts.least_visible(0.0, run.end),
        last_steps=charts.lanes(lanes, *window, named=True) if window else None,
        workers=list(dict.fromkeys(entry.worker for entry in run.entries)),
        counts=sorted(run.summary().counts.items(), key=_transitions_first),
        failed=Counter(f"{e.kind.value} {e.trigger}" for e in run.entries if not e.ok),
        wrong=[entry for entry in run.entries if entry.kind is Kind.FAULT or not entry.ok],
    )
    out_path.parent.mkdir(parents=True, exist_ok=True)
    out_path.write_text(page)
    return out_path


def build_lanes(entries: Sequence[Entry], end: float) -> list[Lane]:
    """Turn a journal into a lane a worker; times are seconds since the first record began."""
    zero = min((entry.time - entry.seconds for entry in entries), default=0.0)
    by_worker: dict[str, list[Entry]] = {}
    for entry in sorted(entries, key=lambda entry: _ROLES.get(entry.role, len(_ROLES))):
        by_worker.setdefault(entry.worker, []).append(entry)
    return [_lane(worker, own, zero, end) for worker, own in by_worker.items()]


def _lane(worker: str, entries: Sequence[Entry], zero: float, end: float) -> Lane:
    moves = [entry for entry in entries if entry.kind is not Kind.ACTION]
    bounds = [*(entry.time - zero for entry in moves), end]
    states = [
        Span(start, stop, entry.dest, _state_title(entry, start, stop))
        for entry, (start, stop) in zip(moves, pairwise(bounds), strict=True)
    ]
    if moves:
        begun, source = bounds[0], moves[0].source
        states.insert(0, Span(0.0, begun, source, f"{worker}: {source} until {begun:.2f} s"))
    actions = [_event(e, zero, e.seconds) for e in entries if e.kind is Kind.ACTION]
    faults = [_event(e, zero, 0.0) for e in entries if e.kind is Kind.FAULT or not e.ok]
    return Lane(worker, states, actions, faults)


def _state_title(entry: Entry, start: float, stop: float) -> str:
    epoch = "" if entry.epoch is None else f", epoch {entry.epoch}"
    return (
        f"{entry.worker}: {entry.dest} {start:.2f} to {stop:.2f} s ({stop - start:.2f} s), "
        f"after {entry.trigger}, version {entry.version or 'none'}{epoch}"
    )


def _event(entry: Entry, zero: float, seconds: float) -> Span:
    end = entry.time - zero
    title = f"{entry.worker}: {entry.trigger} at {end:.2f} s, {entry.seconds:.3g} s"
    failed = "" if entry.ok else f", failed: {entry.error or 'no reason given'}"
    return Span(end - seconds, end, entry.trigger, title + failed)


def _counts(entries: Iterable[Entry]) -> dict[str, dict[str, int]]:
    """Count, for each ``kind trigger``, how often each worker did it."""
    counts: dict[str, Counter[str]] = {}
    for entry in entries:
        counts.setdefault(f"{entry.kind.value} {entry.trigger}", Counter())[entry.worker] += 1
    return {name: dict(counter) for name, counter in counts.items()}


def _transitions_first(counted: tuple[str, object]) -> tuple[bool, str]:
    return not counted[0].startswith("transition "), counted[0]


def _numbers(rows: Sequence[MetricsRow]) -> dict[str, list[tuple[float, float]]]:
    """Each number over the step, by its name."""
    points: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        for name, value in row.numbers().items():
            points.setdefault(name, []).append((float(row.step), value))
    return points


def _rewards(points: Mapping[str, list[tuple[float, float]]]) -> Markup:
    held_out = [name for name in points if name.startswith("eval/") and name.endswith("reward")]
    lines = [Series(name, points[name], marked=True) for name in held_out]
    return line_chart([Series("train/reward", points.get("train/reward", [])), *lines])


def _others(points: Mapping[str, list[tuple[float, float]]]) -> list[tuple[str, Markup]]:
    """One small chart a number, each on its own scale: KL and losses first."""
    own = {name for name in points if name.endswith("reward")} | {"step", "seconds", "tokens"}
    names = sorted(
        points.keys() - own, key=lambda name: (not name.endswith("kl"), "loss" not in name, name)
    )
    size = {"width": WIDTH * 0.36, "height": 150}
    return [(name, line_chart([Series(name, points[name])], **size)) for name in names]
