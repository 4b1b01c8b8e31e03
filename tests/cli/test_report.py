"""The report: whole in one file, right in its numbers, and there for broken-off runs too."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from itertools import count, pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from fsm_trainer.cli.charts import Lane, Series, Span, lanes, line_chart, stacked_bars
from fsm_trainer.cli.report import build_lanes, load_run, write_report
from fsm_trainer.cli.svg import state_diagram_mermaid, state_diagram_svg
from fsm_trainer.document import LineError
from fsm_trainer.machine.errors import DataError
from fsm_trainer.runtime.journal import Journal, Kind, read_journal
from fsm_trainer.runtime.metrics import MetricsWriter, Stage

HOLDS: dict[str, list[str]] = {
    "disconnected": [],
    "sleeping": ["bank"],
    "awake": ["bank", "weights"],
    "connected": ["bank", "weights", "link"],
}
EDGES = [
    ("disconnected", "sleeping", "start"),
    ("sleeping", "awake", "wake"),
    ("awake", "connected", "connect"),
    ("connected", "awake", "disconnect"),
    ("connected", "awake", "sever"),
    ("connected", "sleeping", "disconnect"),
]


class Page(HTMLParser):
    """Checks that tags nest, and gathers titles, links and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in {"meta", "br"}:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def move(worker: str, trigger: str, source: str, dest: str, **more: Any) -> dict[str, Any]:
    role = worker.split("-")[0]
    known = {"worker": worker, "role": role, "rank": 0, "kind": Kind.TRANSITION, "seconds": 1.0}
    return known | {"trigger": trigger, "source": source, "dest": dest} | more


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of four steps; one record a second, from second 1000 on."""
    seconds = count(1000)
    with Journal(tmp_path / "journal.jsonl", clock=lambda: float(next(seconds))) as journal:
        journal.record(**move("rollout-0", "start", "disconnected", "sleeping"))
        journal.record(**move("actor", "start", "disconnected", "sleeping"))
        journal.record(**move("rollout-0", "wake", "sleeping", "awake", version="0.1"))
        journal.record(**move("rollout-0", "generate", "awake", "awake", kind=Kind.ACTION))
        journal.record(
            **move("actor", "wake", "sleeping", "sleeping", ok=False, error="no <room> & more")
        )
        fault = {"kind": Kind.FAULT, "ok": False, "error": "killed", "seconds": 0.0}
        journal.record(**move("rollout-0", "fail", "awake", "disconnected", **fault))
    with MetricsWriter(tmp_path / "metrics.jsonl") as metrics:
        metrics.write(0, {"eval/reward": 0.125}, stage=Stage.WARMUP)
        for step in range(1, 5):
            metrics.write(
                step,
                {"train/reward": 0.1 * step, "train/kl": 0.01, "train/policy_loss": 0.5},
                seconds=2.0,
                tokens=100,
                phase_seconds={"rollout": 1.5, "policy": 0.5},
            )
        metrics.write(4, {"eval/reward": 0.5}, stage=Stage.END)
    (tmp_path / "config.yaml").write_text("seed: 7 # <b>\n")
    return tmp_path


def test_the_page_is_well_formed_and_needs_nothing_from_elsewhere(run: Path) -> None:
    text = write_report(run, run / "out" / "report.html").read_text()
    page = Page(text)
    assert page.open == []
    assert not {tag for tag, _ in page.tags} & {"script", "link", "img", "iframe", "object"}
    assert not [a for _, attrs in page.tags for a in attrs if a in ("src", "href", "data")]
    assert "http" not in text and "url(" not in text and "$" not in text


def test_the_page_shows_the_numbers_of_the_run(run: Path) -> None:
    text = " ".join(Page(write_report(run, run / "report.html").read_text()).text)
    # 0.5 - 0.125 = 0.375; 4 steps of 2 s and 100 tokens: 2 s a step, 50 tokens a second.
    for shown in ("0.125", "0.500", "+0.375", "2.00", "50", "seed: 7 # <b>", "no <room> & more"):
        assert shown in text
    assert "train/kl" in text and "train/policy_loss" in text


def test_the_summary_adds_up(run: Path) -> None:
    summary = load_run(run).summary()
    assert (summary.steps, summary.tokens, summary.step_seconds) == (4, 400, 8.0)
    assert summary.rise == pytest.approx(0.375)
    assert (summary.faults, summary.failed) == (1, 1)
    assert summary.counts["transition start"] == {"rollout-0": 1, "actor": 1}
    assert summary.counts["action generate"] == {"rollout-0": 1}
    assert summary.seconds == 5.0


def test_a_lane_follows_the_states_and_a_refused_transition_changes_none(run: Path) -> None:
    # Records end at 1000, 1001 ... and last 1 s: the first began at 999, which is second 0.
    actor, rollout = build_lanes(read_journal(run / "journal.jsonl"), end=10.0)
    assert [(s.name, s.start, s.end) for s in rollout.states] == [
        ("disconnected", 0, 1),
        ("sleeping", 1, 3),
        ("awake", 3, 6),
        ("disconnected", 6, 10),
    ]
    assert [(a.name, a.start, a.end) for a in rollout.actions] == [("generate", 3, 4)]
    assert [fault.start for fault in rollout.faults] == [6]
    assert [s.name for s in actor.states] == ["disconnected", "sleeping", "sleeping"]
    assert "no <room> & more" in actor.faults[0].title


@pytest.mark.parametrize("kept", [[], ["metrics.jsonl"], ["journal.jsonl"]])
def test_a_partial_run_has_a_report_that_says_what_is_missing(run: Path, kept: list[str]) -> None:
    for name in ("metrics.jsonl", "journal.jsonl", "config.yaml"):
        if name not in kept:
            (run / name).unlink()
    text = write_report(run, run / "report.html").read_text()
    assert Page(text).open == []
    for name in ("metrics.jsonl", "journal.jsonl"):
        assert (f"{name} is missing or empty" in text) == (name not in kept)


def test_a_run_that_has_not_ended_says_so(run: Path) -> None:
    whole = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    assert not load_run(run).notices
    (run / "metrics.jsonl").write_text("".join(whole[:-1]) + whole[-1][:20])
    assert "not reached its end" in load_run(run).notices[0]


def test_a_wrong_folder_and_a_damaged_journal_are_typed_errors(run: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no folder of a run"):
        write_report(tmp_path / "nowhere", tmp_path / "report.html")
    (run / "journal.jsonl").write_text("{}\n")
    with pytest.raises(LineError, match=r"journal\.jsonl:1: "):
        write_report(run, run / "report.html")


def svg(text: str) -> ElementTree.Element:
    return ElementTree.fromstring(text[: text.index("</svg>") + len("</svg>")])


def test_stacked_bars_are_as_tall_as_their_seconds() -> None:
    image = svg(stacked_bars([(1, {"a": 1.0, "b": 3.0, "c": 2.0})]))
    bars = [(float(r.get("y", "")), float(r.get("height", ""))) for r in image.iter("rect")]
    (top_a, a), (top_b, b), (top_c, c) = bars
    assert (b / a, c / a) == pytest.approx((3, 2), abs=0.01)
    assert (top_b + b, top_c + c) == pytest.approx((top_a, top_b), abs=0.01)


def test_a_long_line_is_averaged_and_keeps_its_mean() -> None:
    image = svg(line_chart([Series("x", [(float(s), float(s % 2)) for s in range(3000)])]))
    titles = [title.text or "" for title in image.iter("title")]
    # 3,000 points in groups of 10: 300 points, each the mean of five zeros and five ones.
    assert len(titles) == 300
    assert titles[0] == "x 0.5 at step 9, mean of 10 steps"


@pytest.mark.parametrize("values", [[0.0], [5.0, 5.0], [-1e-9, 1e-9], [1e9, 2e9], [0.1, 0.2]])
def test_ticks_are_few_round_and_inside_the_plot(values: list[float]) -> None:
    image = svg(line_chart([Series("x", list(enumerate(values)))]))
    ticks = [float(t.text or "") for t in image.iter("text") if t.get("class") == "y"]
    heights = [float(t.get("y", "")) for t in image.iter("text") if t.get("class") == "y"]
    assert 1 <= len(ticks) <= 6
    assert all(0 <= height <= 260 for height in heights)
    # Some 10 % beyond the values on each side, or 0.1 where the only value is 0.
    room = 0.11 * max(abs(value) for value in values) or 0.1
    assert min(values) - room <= min(ticks) and max(ticks) <= max(values) + room


def test_lanes_of_a_long_run_stay_small() -> None:
    flips = [Span(i / 100, (i + 1) / 100, ("awake", "sleeping")[i % 2], "") for i in range(100_000)]
    text = lanes([Lane("actor", flips, [], [])], 0.0, 1000.0)
    assert 500 < text.count("<rect") <= 2200


def test_a_lane_fills_its_window_without_a_gap() -> None:
    states = [Span(0, 2, "sleeping", ""), Span(2, 7, "awake", ""), Span(7, 9, "connected", "")]
    image = svg(lanes([Lane("actor", states, [], [])], 1.0, 8.0))
    spans = [(float(r.get("x", "")), float(r.get("width", ""))) for r in image.iter("rect")]
    assert len(spans) == 3
    for (x, width), (following, _) in pairwise(spans):
        assert x + width == pytest.approx(following, abs=0.02)


def test_actions_are_drawn_where_they_were_and_gaps_stay_gaps() -> None:
    actions = [Span(1, 2, "train", ""), Span(8, 9, "train", "")]
    image = svg(lanes([Lane("actor", [], actions, [])], 0.0, 10.0))
    first, second = (float(r.get("x", "")) for r in image.iter("rect"))
    width = next(float(r.get("width", "")) for r in image.iter("rect"))
    # Both take 1 s, and there are 7 s from begin to begin.
    assert second - first == pytest.approx(7 * width, rel=1e-3)


def test_the_diagram_has_each_state_once_and_one_arrow_a_pair() -> None:
    image = ElementTree.fromstring(state_diagram_svg(HOLDS, EDGES))
    space = "{http://www.w3.org/2000/svg}"
    texts = [text.text for text in image.iter(f"{space}text")]
    assert all(texts.count(state) == 1 for state in HOLDS)
    assert "disconnect, sever" in texts
    arrows = [path for path in image.iter(f"{space}path") if path.get("class") == "edge"]
    assert len(arrows) == len({(source, dest) for source, dest, _ in EDGES}) == 5


def test_an_edge_of_an_unknown_state_is_refused() -> None:
    with pytest.raises(KeyError):
        state_diagram_svg(HOLDS, [("awake", "nowhere", "lose")])


def test_the_mermaid_text_lists_the_edges_in_order() -> None:
    text = state_diagram_mermaid("actor", {}, [*EDGES, ("awake", "awake", "a;b#c")])
    assert text.splitlines() == [
        "---",
        "title: actor",
        "---",
        "stateDiagram-v2",
        "    direction LR",
        "    [*] --> disconnected",
        "    disconnected --> sleeping: start",
        "    sleeping --> awake: wake",
        "    awake --> connected: connect",
        "    connected --> awake: disconnect, sever",
        "    connected --> sleeping: disconnect",
        "    awake --> awake: a#59;b#35;c",
    ]


def test_every_colour_that_is_used_is_defined(run: Path) -> None:
    text = write_report(run, run / "report.html").read_text()
    assert set(re.findall(r"var\((--[\w-]+)\)", text)) <= set(re.findall(r"(--[\w-]+):", text))


def checked(folder: Path, verdict: str | None, error: str | None = None, **numbers: float) -> str:
    """What the page of a run says of its checks: two steps, and the records of their training."""
    train = move("actor", "train", "awake", "awake", kind=Kind.ACTION)
    with Journal(folder / "journal.jsonl") as journal:
        journal.record(**train, ok=error is None, error=error, zero_kl=verdict)
        journal.record(**train)
    with MetricsWriter(folder / "metrics.jsonl") as metrics:
        for step, part in ((1, 1.0), (2, 0.5)):
            told = {
                k: v * part
                for k, v in numbers.items()
                if step == 1 or not k.startswith(("check/zero", "check/unit"))
            }
            metrics.write(step, told, phase_seconds={"policy": 1.0})
    return " ".join(Page(write_report(folder, folder / "report.html").read_text()).text)


def test_the_page_tells_the_verdicts_with_their_numbers(tmp_path: Path) -> None:
    zero = {"check/zero_kl": 1.0, "check/zero_kl_mean": 0.0, "check/zero_kl_k3": 3e-17}
    zero |= {"check/zero_kl_max": 2e-9}
    engine = {"check/mismatch_mean": 3e-7, "check/mismatch_max": 2e-6}
    ranks = {"check/replicas_actor": 25.0, "check/replicas_critic": 0.0}

    text = checked(tmp_path, "passed", **zero, **engine, **ranks)

    for told in (
        "passed in step 1: log-ratio 2e-09 at most, 0 in the mean, k3 3e-17",
        "3e-07 nats a token at most (step 1), 2e-06 for a single one, in 2 steps",
        "25 tensors equal on all ranks, looked at in 2 steps",
        "no rank holds a copy of another's weights",
    ):
        assert told in text
    assert set(load_run(tmp_path).summary().checks) == {
        "zero KL at the first step", "trainer against engine",
        "replicas of the actor", "replicas of the critic",
    }  # fmt: skip


def test_a_check_that_is_off_or_stopped_the_run_says_so(tmp_path: Path) -> None:
    for name in ("off", "stopped"):
        (tmp_path / name).mkdir()

    assert "off (checks.zero_kl)" in checked(tmp_path / "off", "off")
    stopped = checked(tmp_path / "stopped", None, error="SelfCheckFailed: the first step's actor")
    assert "stopped the run: SelfCheckFailed: the first step's actor" in stopped


@pytest.mark.parametrize(
    ("error", "check"),
    [
        ("the first minibatch's ratio is not 1: log-ratio 1", "zero KL at the first step"),
        ("trainer and engine differ by 0.2 nats a token", "trainer against engine"),
        ("lm_head.weight differs between ranks: [0] against [1]", "replicas of the actor"),
        ("actor-0: the gradient norm is nan at optimizer step 0", "other"),
    ],
)
def test_what_stopped_the_run_is_told_of_the_check_that_did(
    tmp_path: Path, error: str, check: str
) -> None:
    checked(tmp_path, None, error=f"SelfCheckFailed: {error}")

    told = load_run(tmp_path).summary().checks

    assert told == {check: f"stopped the run: SelfCheckFailed: {error}"}


def test_a_first_ratio_that_failed_is_told_with_its_own_gap(tmp_path: Path) -> None:
    zero = {f"check/zero_kl_{name}": 0.0 for name in ("mean", "max", "k3")}
    unit = {"check/unit_ratio_mean": -1e-3, "check/unit_ratio_max": 2e-3}

    text = checked(tmp_path, "failed", **zero, **unit, **{"check/unit_ratio_k3": 5e-7})

    assert (
        "failed in step 1: log-ratio 0 at most, 0 in the mean, k3 0; "
        "of the first minibatch 0.002 at most, -0.001 in the mean, k3 5e-07"
    ) in text


def test_a_run_that_checked_nothing_tells_of_no_check(run: Path) -> None:
    assert "Checks of the numbers" not in write_report(run, run / "report.html").read_text()
    assert load_run(run).summary().checks == {}
