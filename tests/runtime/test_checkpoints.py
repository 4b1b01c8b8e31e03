"""Checkpoints: damage is found wherever it is, and a kill at any moment leaves a whole one."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from fsm_trainer.data import durable
from fsm_trainer.data.durable import seal
from fsm_trainer.machine.errors import DataError
from fsm_trainer.runtime.checkpoints import MANIFEST, POSITION, Checkpoints, Position

ROLES = ("actor", "critic")
FILES = [MANIFEST, POSITION] + [
    f"{role}/{name}" for role in ROLES for name in ("config.json", "trainer/rank-0.pt")
]


def position(step: int) -> Position:
    return Position(step, 1, step + 1, {"streams": {"train": 32 * step}})


def save(checkpoints: Checkpoints, step: int) -> None:
    """What driver and workers do for a step."""
    saved = {}
    for role in ROLES:
        folder = checkpoints.folder(step, role)
        (folder / "trainer").mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        (folder / "trainer" / "rank-0.pt").write_bytes(bytes(range(step, 200 + step)))
        saved[role] = seal(folder)
    checkpoints.complete(position(step), saved)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With the checkpoints of steps 1 and 2."""
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    save(checkpoints, 1)
    save(checkpoints, 2)
    return tmp_path / "checkpoints"


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\n")


DAMAGES: dict[str, Callable[[Path], None]] = {
    "cut": cut, "empty": lambda path: os.truncate(path, 0), "longer": lengthen,
    "gone": Path.unlink, "a folder": lambda path: (path.unlink(), path.mkdir())[0],
}  # fmt: skip


HARMLESS = {(POSITION, "gone"), (MANIFEST, "longer")}
"""Without a position it never counted; a blank line more says nothing else."""


@pytest.mark.parametrize(
    ("name", "kind"), [(n, k) for n in FILES for k in DAMAGES if (n, k) not in HARMLESS]
)
def test_a_damaged_checkpoint_is_found_and_the_one_before_it_taken(
    folder: Path, name: str, kind: str
) -> None:
    DAMAGES[kind](folder / "step-000002" / name)

    with capture_logs() as logs:
        found = Checkpoints(folder, keep=2).latest()

    assert found == position(1)
    (told,) = [entry for entry in logs if entry["log_level"] == "warning"]
    assert f"step-000002/{name}" in told["damage"]
    assert sorted(p.name for p in folder.iterdir()) == ["damaged-step-000002", "step-000001"]


@pytest.mark.parametrize("name", FILES)
def test_every_flipped_byte_is_found_unless_it_says_the_same(folder: Path, name: str) -> None:
    path, copy = folder / "step-000002" / name, folder / "copy"
    content = path.read_bytes()
    shutil.copytree(folder / "step-000002", copy)
    missed = []
    for place in range(len(content)):
        for flip in (0x01, 0x20, 0xFF):
            flipped = bytearray(content)
            flipped[place] ^= flip
            path.write_bytes(flipped)
            found = Checkpoints(folder, keep=2).latest()
            if found == position(2):
                missed.append((place, flip))
            else:
                assert found == position(1)
                shutil.rmtree(folder / "damaged-step-000002")
                shutil.copytree(copy, folder / "step-000002")

    # Of the manifest alone: a blank that became another one, of its indentation.
    assert [m for m in missed if name != MANIFEST or content[m[0]] not in b" \n"] == []


def test_without_a_whole_checkpoint_an_error_says_what_to_do_and_nothing_is_moved(
    folder: Path,
) -> None:
    for step in (1, 2):
        cut(folder / f"step-{step:06d}" / "actor" / "config.json")

    for _ in range(2):
        with pytest.raises(DataError, match=r"no checkpoint is whole: .*Put back a copy") as told:
            Checkpoints(folder, keep=2).latest()
        for step in (1, 2):
            assert f"step-{step:06d}/actor/config.json has 1 bytes, 2 were written" in str(
                told.value
            )
    assert sorted(p.name for p in folder.iterdir()) == ["step-000001", "step-000002"]


def test_a_checkpoint_of_another_format_is_whole_but_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    monkeypatch.setattr("fsm_trainer.runtime.checkpoints.FORMAT", 2)
    save(checkpoints, 1)
    monkeypatch.undo()

    with pytest.raises(DataError, match="another version of this program"):
        checkpoints.latest()


def test_each_file_is_read_once_until_there_is_a_newer_checkpoint(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, read = Counter[str](), durable._read

    def counted(path: Path) -> durable.Seal:
        reads[path.name] += 1
        return read(path)

    monkeypatch.setattr(durable, "_read", counted)
    checkpoints = Checkpoints(folder, keep=2)

    for _ in range(3):
        assert checkpoints.latest() == position(2)

    assert reads == {"config.json": 2, "rank-0.pt": 2, POSITION: 1}
    save(checkpoints, 3)
    assert checkpoints.latest() == position(3)


def test_the_newest_are_kept_and_nothing_older_not_even_what_was_never_complete(
    folder: Path,
) -> None:
    checkpoints = Checkpoints(folder, keep=2)
    checkpoints.folder(3, "actor").mkdir()  # a kill left it

    save(checkpoints, 4)
    assert sorted(p.name for p in folder.iterdir()) == [f"step-{n:06d}" for n in (2, 3, 4)]
    save(checkpoints, 5)

    assert sorted(p.name for p in folder.iterdir()) == ["step-000004", "step-000005"]


class Killed(BaseException):
    """Stands for a SIGKILL."""


def dying(monkeypatch: pytest.MonkeyPatch, at: int) -> list[str]:
    """Be killed before the n-th change of the disk; gives the changes that were made."""
    made: list[str] = []

    def before(owner: Any, name: str) -> None:
        change = getattr(owner, name)

        def changed(*arguments: Any, **more: Any) -> Any:
            if len(made) == at:
                if name.startswith("write"):
                    change(arguments[0], arguments[1][: len(arguments[1]) // 2])
                raise Killed
            made.append(name)
            return change(*arguments, **more)

        monkeypatch.setattr(owner, name, changed)

    for name in ("fsync", "unlink", "rmdir"):
        before(os, name)
    for name in ("replace", "unlink", "mkdir", "write_bytes", "write_text"):
        before(Path, name)
    return made


def test_a_kill_at_any_moment_of_a_save_leaves_the_old_or_the_new_one_whole(
    tmp_path: Path,
) -> None:
    found, at = list[int](), 0
    while True:
        checkpoints = Checkpoints(tmp_path / f"killed-{at}", keep=1)
        save(checkpoints, 1)
        with pytest.MonkeyPatch.context() as patch:
            dying(patch, at)
            try:
                save(checkpoints, 2)
                break
            except Killed:
                at += 1
        with capture_logs() as logs:
            latest = Checkpoints(tmp_path / f"killed-{at - 1}", keep=1).latest()
            shutil.rmtree(tmp_path / f"killed-{at - 1}" / "step-000002", ignore_errors=True)
            before = Checkpoints(tmp_path / f"killed-{at - 1}", keep=1).latest()
        assert latest in (position(1), position(2))
        assert before in (position(1), None)
        assert logs == []  # nothing half-written or half-removed passes for damaged
        found.append(latest.step)

    assert at > 20
    assert found == sorted(found)  # from one moment on it is the new one
    assert {1, 2} == set(found)


def test_all_is_on_the_disk_before_the_checkpoint_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed, sync = list[str](), os.fsync

    def fsync(descriptor: int) -> None:
        flushed.append(os.path.relpath(os.readlink(f"/proc/self/fd/{descriptor}"), tmp_path))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    save(Checkpoints(tmp_path / "all", keep=1), 1)

    step, counts = "all/step-000001", flushed.index("all/step-000001/.position.json")
    needed = {f"{step}/{name}" for name in FILES if "/" in name} | {f"{step}/.manifest.json"}
    folders = {
        ".",
        "all",
        step,
        *(f"{step}/{r}{inside}" for r in ROLES for inside in ("", "/trainer")),
    }
    assert needed | folders <= set(flushed[:counts])
    assert flushed[counts + 1 :] == [step]
