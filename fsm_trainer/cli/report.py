"""The report of a run: one HTML file that needs nothing else, from the files in its folder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template

from pydantic import BaseModel, ConfigDict

from fsm_trainer.cli.charts import (
    STATES,
    WIDTH,
    Lane,
    Series,
    Span,
    least_visible,
    line_chart,
    stacked_bars,
)
from fsm_trainer.cli.charts import lanes as draw_lanes
from fsm_trainer.machine.errors import DataError
from fsm_trainer.machine.names import Role
from fsm_trainer.runtime.journal import Entry, Kind, read_journal
from fsm_trainer.runtime.metrics import MetricsRow, Stage, read_metrics

_MOST_FAULTS = 100
_ROLES = {role.value: place for place, role in enumerate(Role)}
_CONFIG_NAMES = ("config.yaml", "config.yml", "config.json")


class Summary(BaseModel):
    """The main numbers of a run, ready for JSON by ``model_dump_json``."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

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
    notices: list[str]
    """What is missing."""


@dataclass(frozen=True, slots=True)
class Run:
    """What a run's folder tells; any part may be missing, and ``notices`` says which."""

    folder: Path
    rows: Sequence[MetricsRow]
    entries: Sequence[Entry]
    config: str | None
    notices: Sequence[str] = field(default=())

    @property
    def steps(self) -> list[MetricsRow]:
        """The rows of training steps: those with phases."""
        return [row for row in self.rows if row.phase_seconds]

    def summary(self) -> Summary:
        """Give the run's main numbers."""
        rewards = {
            row.stage: row.eval_reward
            for row in self.rows
            if row.stage is not None and row.eval_reward is not None
        }
        first = rewards.get(Stage.WARMUP, rewards.get(Stage.START))
        last = rewards.get(Stage.END)
        times = [entry.time for entry in self.entries] or [row.time for row in self.rows]
        return Summary(
            run=str(self.folder),
            steps=max((row.step for row in self.rows), default=0),
            seconds=max(times) - min(times) if times else 0.0,
            step_seconds=sum(row.seconds for row in self.steps),
            tokens=sum(row.tokens for row in self.rows),
            eval_reward=rewards,
            rise=last - first if first is not None and last is not None else None,
            counts=_counts(self.entries),
            faults=sum(entry.kind is Kind.FAULT for entry in self.entries),
            failed=sum(not e.ok and e.kind is not Kind.FAULT for e in self.entries),
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
    configs = [folder / name for name in _CONFIG_NAMES if (folder / name).is_file()]
    return Run(folder, rows, entries, configs[0].read_text() if configs else None, notices)


def write_report(run_dir: Path, out_path: Path) -> Path:
    """Write the report of the run in ``run_dir`` to ``out_path``; raises as :func:`load_run`."""
    run = load_run(run_dir)
    page = Template(files("fsm_trainer.cli").joinpath("templates/report.html").read_text())
    out_path.parent.mkdir(parents=True, exist_ok=True)
    out_path.write_text(
        page.substitute(
            title=escape(f"Run {run_dir.resolve().name}"),
            subtitle=_subtitle(run),
            notices="".join(f'<p class="warn">{escape(text)}</p>' for text in run.notices),
            tiles=_tiles(run),
            sections="\n".join(_sections(run)),
        )
    )
    return out_path


def build_lanes(entries: Sequence[Entry], end: float) -> list[Lane]:
    """Turn a journal into a lane a worker; times are seconds since the first record began."""
    if not entries:
        return []
    zero = _zero(entries)
    by_worker: dict[str, list[Entry]] = {}
    for entry in sorted(entries, key=lambda entry: _ROLES.get(entry.role, len(_ROLES))):
        by_worker.setdefault(entry.worker, []).append(entry)
    return [_lane(worker, own, zero, end) for worker, own in by_worker.items()]


def _zero(entries: Sequence[Entry]) -> float:
    return min(entry.time - entry.seconds for entry in entries)


def _lane(worker: str, entries: Sequence[Entry], zero: float, end: float) -> Lane:
    moves = [entry for entry in entries if entry.kind is not Kind.ACTION]
    bounds = [entry.time - zero for entry in moves] + [end]
    states = [
        Span(start, stop, entry.dest, _state_title(entry, start, stop))
        for entry, start, stop in zip(moves, bounds, bounds[1:], strict=False)
    ]
    if moves:
        source = moves[0].source
        states.insert(
            0, Span(0.0, bounds[0], source, f"{worker}: {source} until {bounds[0]:.2f} s")
        )
    actions = [
        Span(e.time - e.seconds - zero, e.time - zero, e.trigger, _event_title(e, zero))
        for e in entries
        if e.kind is Kind.ACTION
    ]
    faults = [
        Span(e.time - zero, e.time - zero, e.trigger, _event_title(e, zero))
        for e in entries
        if e.kind is Kind.FAULT or not e.ok
    ]
    return Lane(worker, states, actions, faults)


def _state_title(entry: Entry, start: float, stop: float) -> str:
    epoch = "" if entry.epoch is None else f", epoch {entry.epoch}"
    return (
        f"{entry.worker}: {entry.dest} {start:.2f} to {stop:.2f} s ({stop - start:.2f} s), "
        f"after {entry.trigger}, version {entry.version or 'none'}{epoch}"
    )


def _event_title(entry: Entry, zero: float) -> str:
    what = f"{entry.worker}: {entry.trigger} at {entry.time - zero:.2f} s, {entry.seconds:.3g} s"
    return what if entry.ok else f"{what}, failed: {entry.error or 'no reason given'}"


def _counts(entries: Iterable[Entry]) -> dict[str, dict[str, int]]:
    """Count, for each ``kind trigger``, how often each worker did it."""
    counts: dict[str, Counter[str]] = {}
    for entry in entries:
        counts.setdefault(f"{entry.kind.value} {entry.trigger}", Counter())[entry.worker] += 1
    return {name: dict(counter) for name, counter in counts.items()}


def _subtitle(run: Run) -> str:
    times = [entry.time for entry in run.entries] or [row.time for row in run.rows]
    if not times:
        return escape(str(run.folder))
    begun = datetime.fromtimestamp(min(times), UTC)
    return f"{escape(str(run.folder))}, begun {begun:%Y-%m-%d %H:%M:%S} UTC"


def _tiles(run: Run) -> str:
    summary = run.summary()
    tiles = [("steps", f"{summary.steps}", "")]
    for stage, reward in summary.eval_reward.items():
        if stage is not Stage.TRAIN:
            tiles.append((f"held-out reward, {stage.value}", f"{reward:.3f}", ""))
    if summary.rise is not None:
        tiles.append(("rise by reinforcement learning", f"{summary.rise:+.3f}", ""))
    if summary.step_seconds > 0:
        tiles.append(("seconds a step", f"{summary.step_seconds / len(run.steps):.2f}", ""))
        tiles.append(("tokens a second", f"{summary.tokens / summary.step_seconds:,.0f}", ""))
    tiles.append(("faults", f"{summary.faults}", "bad" if summary.faults else ""))
    if summary.failed:
        tiles.append(("failed transitions and actions", f"{summary.failed}", "bad"))
    return "".join(
        f'<div class="{kind}"><b>{escape(value)}</b><span>{escape(name)}</span></div>'
        for name, value, kind in tiles
    )


def _sections(run: Run) -> list[str]:
    end = run.entries[-1].time - _zero(run.entries) if run.entries else 0.0
    lanes = build_lanes(run.entries, end)
    parts = [
        _section("Reward", line_chart(_rewards(run.rows))),
        _section("Other numbers", _small_charts(run.rows)),
        _section(
            "Time by phase (seconds)",
            stacked_bars([(float(row.step), row.phase_seconds) for row in run.steps]),
        ),
        _section("Workers over the whole run", draw_lanes(lanes, 0.0, end) + _lane_legend(end)),
    ]
    window = _last_steps(run, end)
    if window is not None:
        parts.append(_section("Workers in the last steps", draw_lanes(lanes, *window, named=True)))
    parts.append(_section("Transitions, actions and faults", _count_table(run.entries)))
    wrong = [entry for entry in run.entries if entry.kind is Kind.FAULT or not entry.ok]
    if wrong:
        parts.append(_section("What went wrong", _fault_table(wrong, _zero(run.entries))))
    if run.config is not None:
        config = (
            f"<details><summary>Configuration</summary><pre>{escape(run.config)}</pre></details>"
        )
        parts.append(f"<section>{config}</section>")
    return parts


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>"


def _rewards(rows: Sequence[MetricsRow]) -> list[Series]:
    trained = [(float(r.step), r.train_reward) for r in rows if r.train_reward is not None]
    held_out: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        for name, value in row.numbers().items():
            if name.startswith("eval/") and name.endswith("reward"):
                held_out.setdefault(name, []).append((float(row.step), value))
    lines = [Series(name, points, marked=True) for name, points in held_out.items()]
    return [Series("train/reward", trained), *lines]


def _small_charts(rows: Sequence[MetricsRow]) -> str:
    """One small chart a number, each on its own scale: KL and losses first."""
    points: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        for name, value in row.numbers().items():
            if name not in ("step", "seconds", "tokens") and not name.endswith("reward"):
                points.setdefault(name, []).append((float(row.step), value))
    names = sorted(points, key=lambda name: (not name.endswith("kl"), "loss" not in name, name))
    charts = [
        f"<div><h3>{escape(name)}</h3>"
        f"{line_chart([Series(name, points[name])], width=WIDTH * 0.36, height=150)}</div>"
        for name in names
    ]
    if not charts:
        return '<p class="none">no numbers yet</p>'
    return f'<div class="small">{"".join(charts)}</div>'


def _last_steps(run: Run, end: float) -> tuple[float, float] | None:
    """Give the seconds of the last two steps, or None if that's about the whole run."""
    if not run.entries or len(run.steps) < 3:
        return None
    zero = _zero(run.entries)
    start, stop = run.steps[-3].time - zero, run.steps[-1].time - zero
    return (start, min(stop, end)) if 0 <= start < min(stop, end) else None


def _lane_legend(end: float) -> str:
    names = [(f"state-{state}", state) for state in STATES]
    names += [("action", "action (below the state)"), ("fault", "fault or failure")]
    keys = [f'<span><i class="key {kind}"></i>{name}</span>' for kind, name in names]
    short = f"what is shorter than {least_visible(0.0, end):.2g} s is not drawn" if end > 0 else ""
    return f'<p class="legend">{"".join(keys)}{short}</p>'


def _count_table(entries: Sequence[Entry]) -> str:
    counts = _counts(entries)
    workers = list(dict.fromkeys(entry.worker for entry in entries))
    failed = Counter(f"{e.kind.value} {e.trigger}" for e in entries if not e.ok)
    if not workers:
        return '<p class="none">no records yet</p>'
    head = "".join(f'<th class="n">{escape(worker)}</th>' for worker in workers)
    rows = [
        f"<tr><td>{escape(name)}</td>"
        + "".join(f'<td class="n">{counts[name].get(worker, "")}</td>' for worker in workers)
        + f'<td class="n failed">{failed[name] or ""}</td></tr>'
        for name in sorted(counts, key=lambda name: (name.split()[0] != "transition", name))
    ]
    return f'<table><tr><th></th>{head}<th class="n">failed</th></tr>{"".join(rows)}</table>'


def _fault_table(wrong: Sequence[Entry], zero: float) -> str:
    rows = [
        f'<tr><td class="n">{entry.seq}</td><td class="n">{entry.time - zero:.2f} s</td>'
        f"<td>{escape(entry.worker)}</td><td>{escape(f'{entry.kind.value} {entry.trigger}')}</td>"
        f"<td>{escape(entry.source)} → {escape(entry.dest)}</td>"
        f'<td class="failed">{escape(entry.error or "")}</td></tr>'
        for entry in wrong[:_MOST_FAULTS]
    ]
    rest = len(wrong) - _MOST_FAULTS
    more = f'<p class="note">and {rest} more: see journal.jsonl</p>' if rest > 0 else ""
    head = (
        "<tr><th>seq</th><th>time</th><th>worker</th><th>what</th><th>state</th><th>why</th></tr>"
    )
    return f"<table>{head}{''.join(rows)}</table>{more}"
