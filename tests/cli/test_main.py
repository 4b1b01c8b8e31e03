"""The commands: what they print for people and for programs, and how they exit."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import typer
from typer.testing import CliRunner, Result

from fsm_trainer.cli.main import app
from fsm_trainer.cli.shell import command
from fsm_trainer.cli.svg import state_diagram_svg
from fsm_trainer.cli.tables import transitions_per_step
from fsm_trainer.machine.errors import ConfigError, WorkerLost
from fsm_trainer.machine.planner import Move
from fsm_trainer.machine.spec import default_states, schedules
from fsm_trainer.runtime.journal import Entry
from tests.verify.fake import FakeRun

ROOT = Path(__file__).parents[2]
QUICKSTART = str(ROOT / "examples" / "quickstart.yaml")
TWO_SHARDED = [
    part
    for value in ("actor.ranks=2", "critic.ranks=2", "actor.zero_stage=3")
    for part in ("--set", value)
]
APART_SHARDED = [
    part
    for value in (
        "schedule=disaggregated_critic_apart",
        "critic.ranks=2",
        "critic.zero_stage=3",
    )
    for part in ("--set", value)
]
BY_HAND = ["actor=awake", "rollout-0=awake", "rollout-1=awake"]
"""A world in which everybody who could connect is awake."""


def call(*words: str) -> Result:
    return CliRunner().invoke(app, words)


def told(*words: str, code: int = 0) -> Any:
    result = call(*words, "--json")
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def standing(workers: Sequence[str]) -> list[str]:
    return [part for worker in workers for part in ("--state", worker)]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run of two steps as the tables have it, in its folder."""
    return written(FakeRun("colocated_critic").run().entries, tmp_path)


def written(entries: Sequence[dict[str, Any]], folder: Path) -> Path:
    lines = [Entry.model_validate(entry).model_dump_json() for entry in entries]
    (folder / "journal.jsonl").write_text("".join(f"{line}\n" for line in lines))
    (folder / "config.yaml").write_text("schedule: colocated_critic\n")
    return folder


# -- validate ------------------------------------------------------------------------------------


def test_validate_tells_what_follows_and_the_schedule() -> None:
    result = call("validate", QUICKSTART)
    assert result.exit_code == 0, result.output
    assert "critic ⇒ train offload: on (target: disk)" in result.stdout
    document = told("validate", QUICKSTART, "--set", "rollout.workers=3")
    assert document["valid"] is True
    assert document["schedule"] == "disaggregated_critic"
    assert document["config"]["rollout"]["workers"] == 3
    assert {"phase": "value", "wants": {"actor": ["sleeping"], "critic": ["awake"]},
            "action": "values"} in document["phases"]  # fmt: skip


def test_validate_tells_programs_every_mistake() -> None:
    document = told("validate", QUICKSTART, "--set", "seed=x", "--set", "sped=1", code=2)
    assert document["valid"] is False
    assert [text.partition(": ")[0] for text in document["mistakes"]] == [
        "--set seed=x",
        "--set sped=1",
    ]


# -- plan ----------------------------------------------------------------------------------------

EVERYBODY = "actor, rollout-0, rollout-1"
STEADY = {
    "disaggregated_critic": {
        "rollout": [f"disconnect({EVERYBODY})", "sleep(actor)"],
        "value": ["wake(critic)"],
        "policy": ["sleep(critic)", "wake(actor)"],
        "sync": [f"connect({EVERYBODY})"],
    },
    "disaggregated_critic_score": {
        "rollout": [f"disconnect({EVERYBODY})", "sleep(actor)"],
        "score": ["wake(actor)"],
        "value": ["sleep(actor)", "wake(critic)"],
        "policy": ["sleep(critic)", "wake(actor)"],
        "sync": [f"connect({EVERYBODY})"],
    },
    "disaggregated": {"rollout": [], "policy": [], "sync": []},
    "disaggregated_critic_apart": {
        "rollout": [],
        "value": [],
        "send": [],
        "policy": [],
        "sync": [],
    },
    "colocated_critic": {
        "rollout": [f"disconnect({EVERYBODY})"],
        "value": ["sleep(rollout-0, rollout-1)", "wake(critic)"],
        "policy": ["sleep(critic)", "wake(actor)"],
        "sync": [f"connect({EVERYBODY})"],
    },
}
"""DESIGN.md's table for the first; read off the wants of the others by hand."""
PER_STEP = {"disaggregated_critic": 3 + 1 + 1 + 1 + 1 + 3, "disaggregated": 0,
            "disaggregated_critic_score": 3 + 1 + 1 + 1 + 1 + 1 + 1 + 3,
            "disaggregated_critic_apart": 0,
            "colocated_critic": 3 + 2 + 1 + 1 + 1 + 3}  # fmt: skip


@pytest.mark.parametrize("schedule", STEADY)
def test_plan_shows_the_transitions_of_a_steady_step(schedule: str) -> None:
    document = told("plan", "--schedule", schedule)
    steady = {
        row["phase"]: [f"{m['trigger']}({', '.join(m['workers'])})" for m in row["moves"]]
        for row in document["sections"]["steady step"]
    }
    assert steady == STEADY[schedule]
    counts = document["transitions_per_step"]
    assert sum(n for workers in counts.values() for n in workers.values()) == PER_STEP[schedule]
    text = call("plan", "--schedule", schedule).stdout
    assert f"A steady step takes {PER_STEP[schedule]} transitions" in text


def test_a_critic_makes_the_actor_wake_once_a_step() -> None:
    counts = told("plan")["transitions_per_step"]
    assert counts["wake"] == {"critic": 1, "actor": 1}


def test_plan_has_all_sections_and_takes_workers_from_a_configuration() -> None:
    document = told("plan", QUICKSTART, "--set", "rollout.workers=1")
    assert list(document["sections"]) == ["prologue", "first step", "steady step", "epilogue"]
    assert document["workers"] == ["actor", "critic", "rollout-0"]
    first = document["sections"]["prologue"][0]
    assert first["phase"] == "evaluate"
    assert [m["trigger"] for m in first["moves"]][:2] == ["start", "start"]
    assert told("plan", QUICKSTART, "--rollouts", "3")["workers"][-1] == "rollout-2"


def test_a_push_that_is_planned_is_no_transition() -> None:
    moves = (Move("push", ("actor",)), Move("wake", ("actor",)))
    assert transitions_per_step({"steady step": [("rollout", moves)]}) == {"wake": {"actor": 1}}


# -- graph ---------------------------------------------------------------------------------------


def test_graph_labels_edges_with_trigger_and_guard_and_states_with_what_they_hold() -> None:
    text = call("graph", "--role", "rollout").stdout
    assert "    disconnected --> sleeping: start [not self.undead]" in text
    assert "    awake: engine, weights, kv\n" in text
    resolved = call("graph", "--role", "rollout", "--schedule", "colocated_critic").stdout
    assert "    sleeping --> connected: connect" in resolved
    assert "    connected: engine, weights, link\n" in resolved  # no KV cache beside the trainer


def test_graph_draws_every_machine_the_link_too(tmp_path: Path) -> None:
    text = call("graph").stdout
    assert text.count("stateDiagram-v2") == 4
    assert "    opening --> up: opened" in text
    path = tmp_path / "new" / "actor.svg"
    assert call("graph", "--role", "actor", "--format", "svg", "--out", str(path)).exit_code == 0
    image = path.read_text()
    assert image.startswith("<svg")
    assert ">connect</text>" in image  # the parts of its guard stand in lines of their own
    assert ">[any(rollout.live)</text>" in image
    assert ">and self.in_flight == 0]</text>" in image
    machines = told("graph")
    assert list(machines) == ["actor", "critic", "rollout", "link"]
    assert machines["rollout"]["states"]["sleeping"] == ["engine"]
    sleep = {"trigger": "sleep", "from": "awake", "to": "sleeping"}
    guarded = {**sleep, "guard": "self.in_flight == 0", "joint": None}
    assert guarded in machines["critic"]["transitions"]


def test_the_lines_of_a_label_stand_outside_its_arrow() -> None:
    image = ElementTree.fromstring(
        state_diagram_svg({"a": (), "b": ()}, [("a", "b", "up\n[x]"), ("b", "a", "down\n[y]")])
    )
    space = "{http://www.w3.org/2000/svg}"
    rows = {text.text: float(text.get("y", "")) for text in image.iter(f"{space}text")}
    edges = [e.get("d", "") for e in image.iter(f"{space}path") if e.get("class") == "edge"]
    # The path is M<x> <end>C<x> <control> ...; such a cubic curve reaches 3/4 of its controls.
    heights = [[float(y) for y in re.findall(r" (\d+\.?\d*)", edge)][:2] for edge in edges]
    highest, lowest = (end + 0.75 * (control - end) for end, control in heights)
    assert 0 < rows["up"] < rows["[x]"] < highest
    assert lowest < rows["down"] < rows["[y]"] < float(image.get("height", ""))


# -- explain -------------------------------------------------------------------------------------


def test_explain_says_what_is_false_what_it_needs_and_which_moves_lead_there() -> None:
    result = call("explain", "rollout-0", "connect")
    assert result.exit_code == 0, result.output
    assert "rollout-0 is disconnected and would refuse 'connect'" in result.stdout
    assert "rollout-0: disconnected has no 'connect', only ['start']" in result.stdout
    assert "it would after: start(actor), start(rollout-0, rollout-1), wake(actor)" in result.stdout


def test_explain_accepts_what_is_legal_and_shows_its_effects() -> None:
    document = told("explain", "rollout-0", "connect", *standing(BY_HAND))
    assert document["accepted"] is True
    assert document["workers"] == ["actor", "rollout-0", "rollout-1"]
    assert document["effects"] == [f"{name}: acquire link" for name in document["workers"]]


def test_explain_reads_a_full_device_and_knows_who_must_leave_it() -> None:
    document = told("explain", "critic", "wake", *standing(["actor=awake", "critic=sleeping"]))
    assert document["because"] == {"critic": ["`fits(device)` is false (the device is full)"]}
    assert document["after"] == ["sleep(actor)"]


def test_explain_compares_the_versions_that_it_is_given() -> None:
    workers = ["actor=sleeping@1.3", "rollout-0=awake@1.2"]
    document = told("explain", "rollout-0", "generate", *standing(workers))
    (reason,) = document["because"]["rollout-0"]
    assert "rollout-0.version=2, actor.version=3" in reason
    workers = ["actor=sleeping@1.3", "rollout-0=awake@1.3"]
    assert told("explain", "rollout-0", "generate", *standing(workers))["accepted"] is True


def test_explain_stands_where_a_journal_says(run_dir: Path) -> None:
    path = run_dir / "journal.jsonl"
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    connected = [e for e in entries if e["trigger"] == "connect"][2]["seq"]  # all three ends
    at = ("--journal", str(path), "--at")
    assert told("explain", "actor", "push", *at, str(connected))["accepted"] is True
    before = told("explain", "actor", "push", *at, str(connected - 3))
    assert before["state"] == "awake"
    assert before["accepted"] is False
    assert told("explain", "actor", "start", "--journal", str(run_dir))["state"] == "disconnected"
    within = call("explain", "actor", "push", *at, str(connected - 1))
    assert within.exit_code == 2
    assert "inside the records of a joint step. Choose the seq before or after" in within.stderr
    other = call("explain", "actor", "push", *at, str(connected), "--schedule", "disaggregated")
    assert other.exit_code == 2


def test_explain_knows_that_a_death_ends_the_lease_of_the_others(tmp_path: Path) -> None:
    run = FakeRun("disaggregated_critic")
    for phase in ("rollout", "value", "policy", "sync"):
        run.phase(phase)
    run.record("rollout-1", "fault", "died", ok=False)
    run.entries[-1] |= {"dest": "disconnected", "epoch": 0, "version": None}
    written(run.entries, tmp_path)
    (tmp_path / "config.yaml").unlink()  # the schedule then follows from the roles
    document = told("explain", "actor", "push", "--journal", str(tmp_path))
    assert document["because"]["actor"] == ["`self.lease` is false (actor.lease=False)"]


# -- trace ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", STEADY)
def test_trace_conforms_to_the_schedule_that_ran(schedule: str, tmp_path: Path) -> None:
    run = FakeRun(schedule).run()
    path = written(run.entries, tmp_path) / "journal.jsonl"
    document = told("trace", str(path), "--schedule", schedule)
    assert document == {"conforms": True, "records": len(run.entries), "schedule": schedule}


def test_trace_takes_the_schedule_from_the_runs_configuration(run_dir: Path) -> None:
    result = call("trace", str(run_dir))
    assert result.exit_code == 0, result.output
    assert "schedule colocated_critic" in result.stdout
    assert call("trace", str(run_dir), "--schedule", "disaggregated_critic").exit_code == 1


def test_trace_tells_the_first_line_that_does_not_conform_and_its_story(run_dir: Path) -> None:
    path = run_dir / "journal.jsonl"
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    wake = next(i for i, e in enumerate(entries) if e["trigger"] == "wake")
    entries[wake]["dest"] = "sleeping"
    path.write_text("".join(json.dumps(e) + "\n" for e in entries))
    result = call("trace", str(run_dir))
    assert result.exit_code == 1
    assert f"line {wake + 1}: after wake actor must be awake" in result.stdout
    assert "before it:\n  line 1: actor transition start" in result.stdout
    document = told("trace", str(run_dir), code=1)
    assert (document["line"], document["worker"]) == (wake + 1, "actor")


def test_trace_of_a_killed_run_needs_prefix(run_dir: Path) -> None:
    path = run_dir / "journal.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-2]))
    result = call("trace", str(run_dir))
    assert result.exit_code == 1
    assert "add --prefix" in result.stdout
    assert call("trace", str(run_dir), "--prefix").exit_code == 0


def test_trace_of_a_damaged_journal_is_a_line_too(run_dir: Path) -> None:
    path = run_dir / "journal.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:3], "{}\n", *lines[4:]]))
    assert "journal.jsonl:4: " in call("trace", str(run_dir)).stderr
    assert told("trace", str(run_dir), code=1)["line"] == 4


# -- report and doctor ---------------------------------------------------------------------------


def test_report_writes_a_page_and_tells_programs_the_numbers(run_dir: Path) -> None:
    summary = told("report", str(run_dir))
    assert summary["counts"]["transition start"]["actor"] == 1
    assert not (run_dir / "report.html").exists()
    assert call("report", str(run_dir)).exit_code == 0
    assert "<svg" in (run_dir / "report.html").read_text()


def test_doctor_exits_with_1_only_for_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    from fsm_trainer.cli.doctor import Check, Status

    missing = Check("sglang", Status.MISSING, "not installed", "pip install '.[sglang]'")
    broken = Check("cores", Status.PROBLEM, "1", "ask for more")
    monkeypatch.setattr("fsm_trainer.cli.doctor.diagnose", lambda: [missing])
    assert "'.[sglang]'" in call("doctor").stdout
    assert told("doctor")["ok"] is True
    monkeypatch.setattr("fsm_trainer.cli.doctor.diagnose", lambda: [missing, broken])
    document = told("doctor", code=1)
    assert [check["status"] for check in document["checks"]] == ["missing", "problem"]


# -- mistakes, exit codes, weight ----------------------------------------------------------------

WRONG = {
    "a worker": (["explain", "rollut-0", "wake"], "Did you mean rollout-0?"),
    "a trigger": (["explain", "actor", "wakeup"], "Did you mean wake?"),
    "a state": (["explain", "actor", "wake", "--state", "actor=awoke"], "Did you mean awake?"),
    "a state's form": (["explain", "actor", "wake", "--state", "actor"], "Write WORKER=STATE"),
    "at without journal": (["explain", "actor", "wake", "--at", "3"], "Add --journal FILE"),
    "no journal": (["trace", "no_such"], "there is no journal. Give a run's folder"),
    "a schedule": (["plan", "--schedule", "colocated"], "there are: colocated_critic"),
    "a role": (["graph", "--role", "acter"], "Did you mean actor?"),
    "svg of all": (["graph", "--format", "svg"], "Add --role"),
    "no run": (["report", "no_such"], "there is no such folder"),
    "no tables": (["plan", "--states", "no_such"], "no_such/schedules: no schedule"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_users_mistake_exits_with_2_and_a_remedy(name: str) -> None:
    words, remedy = WRONG[name]
    result = call(*words)
    assert result.exit_code == 2, result.output
    assert remedy in result.stderr
    assert isinstance(result.exception, SystemExit)


def test_a_wrong_table_is_named_with_file_and_line(tmp_path: Path) -> None:
    states = tmp_path / "states"
    shutil.copytree(default_states(), states)
    actor = states / "actor.yaml"
    lines = actor.read_text().splitlines()
    (number,) = (n for n, line in enumerate(lines, start=1) if "trigger: wake" in line)
    lines[number - 1] = lines[number - 1].replace("trigger: wake", "trigger: awake")
    actor.write_text("\n".join(lines))
    for words in (["plan"], ["graph"], ["explain", "actor", "wake"], ["validate", QUICKSTART]):
        result = call(*words, "--states", str(states))
        assert result.exit_code == 2, result.output
        assert f"{actor}:{number}: transitions." in result.stderr
        assert "'wake'" in result.stderr


ENDS: dict[str, tuple[BaseException, int]] = {
    "a mistake": (ConfigError("x"), 2),
    "a failure": (WorkerLost("x"), 1),
    "Ctrl-C": (KeyboardInterrupt(), 130),
}


@pytest.mark.parametrize("name", ENDS)
def test_errors_end_in_an_exit_code_and_one_line(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    error, code = ENDS[name]

    @command
    def fail() -> None:
        raise error

    with pytest.raises(typer.Exit) as ended:
        fail()
    assert ended.value.exit_code == code
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_defect_of_ours_keeps_its_traceback() -> None:
    @command
    def fail() -> None:
        raise ValueError("a defect")

    with pytest.raises(ValueError, match="a defect"):
        fail()


def test_no_command_but_run_imports_anything_heavy(run_dir: Path) -> None:
    commands = [
        ["--help"],
        ["validate", QUICKSTART],
        ["plan", QUICKSTART],
        ["graph"],
        ["explain", "actor", "wake"],
        ["trace", str(run_dir)],
        ["report", str(run_dir)],
    ]
    code = (
        "import sys\nfrom fsm_trainer.cli.main import app\n"
        f"for words in {commands!r}:\n"
        "    try: app(words)\n"
        "    except SystemExit as exit: assert not exit.code, words\n"
        "sys.exit(str({'torch', 'ray', 'transformers', 'deepspeed'} & sys.modules.keys() or ''))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    assert done.stderr.strip() == ""


def test_every_schedule_is_planned_here() -> None:
    assert sorted(STEADY) == schedules()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--dump-step", "0"], "no such step is trained"),
        (["--dump-step", "3", "--set", "steps=2"], "Give one of 1 to 2"),
        (["--dump-step", "1", "--rollout-only"], "no such step is trained"),
        (
            ["--dump-step", "1", *TWO_SHARDED],
            "Write zero_stage: 2",
        ),
        (["--dump-step", "1", *APART_SHARDED], "Write zero_stage: 2"),
    ],
)
def test_a_step_that_could_not_be_replayed_is_refused_before_the_run(
    words: list[str], told: str, tmp_path: Path
) -> None:
    result = call("run", QUICKSTART, "--out", str(tmp_path / "run"), *words)

    assert result.exit_code == 2
    assert told in result.output
    assert not (tmp_path / "run").exists()
