"""The journal: what is written can be read, and what is damaged is named by file and line."""

from __future__ import annotations

import json
import threading
from itertools import count
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from fsm_trainer.document import LineError
from fsm_trainer.runtime import journal as module
from fsm_trainer.runtime.journal import Entry, Journal, Kind, read_journal

SCHEMA = Path(module.__file__).parent / "schemas" / "journal.schema.json"

WAKE: dict[str, Any] = {
    "worker": "actor",
    "role": "actor",
    "rank": 0,
    "kind": Kind.TRANSITION,
    "trigger": "wake",
    "source": "sleeping",
    "dest": "awake",
    "epoch": None,
    "version": "0.3",
    "seconds": 0.25,
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.jsonl"


def write(path: Path, records: int) -> None:
    with Journal(path) as journal:
        for _ in range(records):
            journal.record(**WAKE)


def test_a_record_is_read_back_with_its_place_and_time(path: Path) -> None:
    ticks = count(100)
    with Journal(path, clock=lambda: float(next(ticks))) as journal:
        journal.record(**WAKE)
        journal.record(**WAKE | {"kind": Kind.FAULT, "ok": False, "error": "no room\non device"})
    first, second = read_journal(path)
    assert (first.seq, first.time, first.ok, first.error) == (1, 100.0, True, None)
    assert (first.worker, first.source, first.dest, first.version) == (
        "actor",
        "sleeping",
        "awake",
        "0.3",
    )
    assert (second.seq, second.time, second.kind) == (2, 101.0, Kind.FAULT)
    assert second.error == "no room\non device"


def test_a_line_has_exactly_the_documented_fields(path: Path) -> None:
    write(path, 1)
    documented = """
        format seq time worker role rank kind trigger source dest epoch version seconds ok error
    """
    assert set(json.loads(path.read_text())) == set(documented.split())


def test_every_line_meets_the_schema_and_a_wrong_one_does_not(path: Path) -> None:
    write(path, 2)
    schema = json.loads(SCHEMA.read_text())
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        jsonschema.validate(line, schema)
    for damage in ({"kind": "rumour"}, {"version": "3"}, {"format": 2}, {"seq": 0}, {"more": 1}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(lines[0] | damage, schema)


def test_a_push_says_how_fast_it_was_and_other_records_do_not(path: Path) -> None:
    with Journal(path) as journal:
        journal.record(**WAKE)
        journal.record(**WAKE | {"bytes": 3 * 10**9, "gigabytes_per_second": 1.5})

    first, second = read_journal(path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]

    assert first.bytes is None
    assert (second.bytes, second.gigabytes_per_second) == (3 * 10**9, 1.5)
    assert lines[1].keys() - lines[0].keys() == {"bytes", "gigabytes_per_second"}
    for line in lines:
        jsonschema.validate(line, json.loads(SCHEMA.read_text()))


def test_the_schema_in_the_package_is_that_of_the_code() -> None:
    assert json.loads(SCHEMA.read_text()) == Entry.model_json_schema()


def test_a_record_is_on_disk_before_the_journal_closes(path: Path) -> None:
    journal = Journal(path)
    journal.record(**WAKE)
    assert len(read_journal(path)) == 1
    journal.close()
    journal.close()


def test_records_of_many_threads_are_whole_and_counted_without_gaps(path: Path) -> None:
    with Journal(path) as journal:

        def work(rank: int) -> None:
            for _ in range(50):
                journal.record(**WAKE | {"rank": rank})

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=30)
    entries = read_journal(path)
    assert [entry.seq for entry in entries] == list(range(1, 201))
    assert all(sum(e.rank == rank for e in entries) == 50 for rank in range(4))


def test_a_continued_journal_counts_on_and_drops_what_was_half_written(path: Path) -> None:
    write(path, 2)
    with path.open("a") as file:
        file.write('{"format":1,"seq":3,"wor')
    assert len(read_journal(path)) == 2
    write(path, 1)
    assert [entry.seq for entry in read_journal(path)] == [1, 2, 3]


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ('"seq":2', '"seq":3', "seq is 3, must be 2"),
        ('"rank":0', '"rank":"0"', "rank: "),
        ('"kind":"transition"', '"kind":"rumour"', "kind: "),
        ('"ok":true,', "", "ok: Field required"),
        ('"format":1', '"format":2', "format: "),
        ('"seconds":0.25', '"seconds":NaN', "seconds: "),
        ('{"format"', '"format"', "Invalid JSON"),
    ],
)
def test_a_damaged_line_is_named_with_its_reason(
    path: Path, old: str, new: str, reason: str
) -> None:
    write(path, 3)
    lines = path.read_text().splitlines(keepends=True)
    assert old in lines[1]
    lines[1] = lines[1].replace(old, new)
    path.write_text("".join(lines))
    with pytest.raises(LineError) as caught:
        read_journal(path)
    assert str(caught.value).startswith(f"{path}:2: ")
    assert reason in str(caught.value)
    assert caught.value.line == 2


def test_a_removed_a_doubled_and_a_swapped_line_are_seen(path: Path) -> None:
    write(path, 4)
    one, two, three, four = path.read_text().splitlines(keepends=True)
    for lines, wrong in (
        ([one, three, four], 2),
        ([one, two, two, three, four], 3),
        ([one, three, two, four], 2),
    ):
        path.write_text("".join(lines))
        with pytest.raises(LineError) as caught:
            read_journal(path)
        assert caught.value.line == wrong


def test_a_missing_journal_is_a_typed_error(path: Path) -> None:
    with pytest.raises(LineError, match=r"can't be read \(No such file"):
        read_journal(path)


def test_a_wrong_record_is_refused_before_it_is_written(path: Path) -> None:
    with Journal(path) as journal:
        with pytest.raises(ValueError, match="version"):
            journal.record(**WAKE | {"version": "three"})
        journal.record(**WAKE)
    assert [entry.seq for entry in read_journal(path)] == [1]
