"""Other trainers' streams: the examples, the page that shows them, and what can't be read."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from fsm_trainer.cli.main import app
from fsm_trainer.document import Document
from fsm_trainer.machine.errors import ConfigError
from fsm_trainer.monitor import Map

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "monitor"
PAGE = (ROOT / "docs" / "monitor.md").read_text(encoding="utf-8")
SHOWN = re.findall(r"```console\n\$ fsm-train (monitor .*)\n((?s:.*?))```", PAGE)
MAP = """
schedule: disaggregated
workers:
  trainer: {role: actor, state: awake}
  engine: {role: rollout, state: awake}
fields: {worker: who, version: step}
events:
  - {match: {what: join}, trigger: connect}
  - {match: {what: sync}, worker: all, trigger: push}
  - {match: {what: sample, args: {n: 4}}, trigger: generate}
  - {match: {what: beat}}
"""


OWN = """
schedule: disaggregated
workers:
  actor: {role: actor}
  rollout-0: {role: rollout}
events: [{match: {}}]
"""
"""Of a stream that speaks of the tables' workers in the tables' words."""


def call(*words: str, stdin: str = "") -> Result:
    return CliRunner().invoke(app, ["monitor", *words], input=stdin)


def lines(*records: object) -> str:
    return "".join(f"{json.dumps(record)}\n" for record in records)


@pytest.fixture
def names(tmp_path: Path) -> str:
    path = tmp_path / "map.yaml"
    path.write_text(MAP)
    return str(path)


@pytest.fixture
def own(tmp_path: Path) -> str:
    path = tmp_path / "own.yaml"
    path.write_text(OWN)
    return str(path)


@pytest.mark.parametrize(
    ("stream", "expected"),
    [
        ("openrlhf_like_clean", []),
        # slime #1882: asleep with its group alive, and the next push; its engines do the same.
        ("openrlhf_like_stale_group",
         [("line 23", "sleep", "1"), ("line 28", "sleep", "1"), ("line 29", "sleep", "1"),
          ("line 39", "push", "12")]),
        # vLLM PR#45326: a request arrives at a sleeper.
        ("openrlhf_like_request_to_sleeper", [("line 15", "generate", "5")]),
        ("trl_like_clean", []),
        # TRL #5142: load before wake; then the engine serves what no load has reached.
        ("trl_like_load_before_wake", [("line 11", "push", "12"), ("line 16", "generate", "5")]),
    ],
)  # fmt: skip
def test_an_example_has_the_bug_that_it_is_named_for(
    stream: str, expected: list[tuple[str, str, str]]
) -> None:
    trainer = stream[: stream.index("_like")]
    names = str(EXAMPLES / f"{trainer}_like.yaml")
    result = call(str(EXAMPLES / f"{stream}.jsonl"), "--map", names, "--json")
    document = json.loads(result.stdout)
    found = [
        (each["event"]["where"], each["event"]["trigger"], each["breaks"].partition(":")[0])
        for each in document["violations"]
    ]
    assert found == expected
    assert result.exit_code == bool(expected)
    assert document["unread"] == {}


@pytest.mark.parametrize(("command", "output"), SHOWN)
def test_the_page_shows_what_the_command_prints(
    command: str, output: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert CliRunner().invoke(app, shlex.split(command)).stdout == output


def test_the_page_shows_a_violation_and_a_clean_stream() -> None:
    assert len(SHOWN) == 2


def test_the_pages_map_is_valid_and_part_of_the_example(tmp_path: Path) -> None:
    (text,) = re.findall(r"```yaml\n((?s:.*?))```", PAGE)
    (tmp_path / "map.yaml").write_text(text)
    shown = Document(tmp_path / "map.yaml", ConfigError).parse(Map)
    whole = Document(EXAMPLES / "openrlhf_like.yaml", ConfigError).parse(Map)
    assert shown.fields == whole.fields
    assert shown.workers.items() <= whole.workers.items()
    assert [rule for rule in shown.events if rule not in whole.events] == []


def test_the_pages_python_runs_and_shows_why(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n((?s:.*?))```", PAGE)
    exec(code, {})
    assert "actor is disconnected and refuses 'wake'" in capsys.readouterr().out


def test_a_stream_that_comes_through_a_pipe_is_read(names: str) -> None:
    joined = [{"who": who, "what": "join"} for who in ("trainer", "engine")]
    sample = {"who": "engine", "what": "sample", "args": {"n": 4, "top_p": 1}}
    stdin = lines(*joined, {"what": "sync"}, sample, {"what": "beat"})
    result = call("-", "--map", names, stdin=stdin)
    assert (result.exit_code, result.stdout) == (0, "events: 4, violations: 0, kinds: 0\n")


def test_a_version_that_the_stream_tells_is_compared(names: str) -> None:
    sample = {"who": "engine", "what": "sample", "args": {"n": 4}, "step": 3}
    result = call("-", "--map", names, stdin=lines(sample))
    assert result.exit_code == 1
    assert "`self.version == actor.version` is false (engine.version=3" in result.stdout


def test_what_no_rule_matches_is_told_and_never_lost(names: str) -> None:
    sample = {"who": "engine", "what": "sample", "args": {"n": 4}}
    other = {"who": "engine", "what": "sample", "args": {"n": 8}}
    stdin = "starting up\n" + lines(sample, other, {"what": "halt"}, {"what": "halt"})
    result = call("-", "--map", names, stdin=stdin)
    assert result.exit_code == 0
    assert "not read: 2 × what=halt\n" in result.stdout
    assert "not read: 1 × no object\n" in result.stdout
    assert "not read: 1 × what=sample\n" in result.stdout


def test_a_stream_may_speak_in_the_tables_words(own: str) -> None:
    start = {"worker": "actor", "trigger": "start"}
    assert call("-", "--map", own, stdin=lines(start)).exit_code == 0
    again = call("-", "--map", own, stdin=lines(start, start))
    assert again.exit_code == 1
    assert "line 2: actor is sleeping and refuses 'start'" in again.stdout


def test_the_like_is_printed_once_and_counted(own: str) -> None:
    start = {"worker": "actor", "trigger": "start"}
    result = call("-", "--map", own, stdin=lines(start, start, start))
    assert result.stdout.count("refuses 'start'") == 1
    assert "events: 3, violations: 2, kinds: 1" in result.stdout


def test_a_hang_is_a_violation_when_a_deadline_is_given(own: str) -> None:
    begun = {"worker": "actor", "trigger": "start", "at": "begin", "time": 5}
    later = {"worker": "rollout-0", "trigger": "start", "time": 70}
    result = call("-", "--map", own, "--deadline", "60", stdin=lines(begun, later))
    assert result.exit_code == 1
    assert "line 1: actor start begin, and has not ended 65 s later\n" in result.stdout


MISTAKES = {
    "nothing matches": (lines({"what": "x"}), MAP, 2, "no event was told"),
    "a role": (
        "",
        MAP.replace("rollout,", "engine,"),
        2,
        "map.yaml:5: schedule disaggregated has no such role",
    ),
    "a field of a rule": ("", MAP.replace("match: {what: beat}", "when: {}"), 2, "map.yaml:11"),
    "a schedule": ("", MAP.replace("disaggregated", "together"), 2, "no schedule 'together'"),
    "no worker": (lines({"what": "join"}), MAP, 1, "line 1: worker: "),
    "another worker": (lines({"what": "join", "who": "x"}), MAP, 1, "line 1: x has no 'connect'"),
    "a version": (lines({"what": "sync", "step": "x"}), MAP, 1, "line 1: version"),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_a_mistake_says_where_and_exits_as_the_others_do(what: str, tmp_path: Path) -> None:
    stdin, names, code, text = MISTAKES[what]
    path = tmp_path / "map.yaml"
    path.write_text(names)
    result = call("-", "--map", str(path), stdin=stdin)
    assert result.exit_code == code
    assert text in result.stderr


def test_a_stream_that_is_not_there_is_the_users_mistake(own: str) -> None:
    result = call("absent.jsonl", "--map", own)
    assert result.exit_code == 2
    assert "absent.jsonl: can't be read: No such file or directory" in result.stderr
