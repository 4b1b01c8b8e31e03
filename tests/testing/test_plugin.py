"""The pytest plugin's fixtures fail the tests that they must fail."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from fsm_trainer.testing.processes import START, Member, Processes
from tests.verify.fake import FakeRun

ROOT = Path(__file__).parents[2]
LEAKS = {
    "threads": "threading.Thread(target=wait.wait, args=(30,), daemon=True).start()",
    "descriptors": "kept.append(open('/dev/null'))",
    "sockets": "import socket; kept.append(socket.create_server(('127.0.0.1', 0)))",
    "processes": "import subprocess; kept.append(subprocess.Popen(['sleep', '30']))",
    "resident": "kept.append(bytearray(100 * 2**20))",
    "groups": (
        "import torch.distributed as d; d.init_process_group("
        "'gloo', store=d.HashStore(), rank=0, world_size=1)"
    ),
}


def run(folder: Path, body: str, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_it.py").write_text(body)
    command = [sys.executable, "-m", "pytest", "-p", "fsm_trainer.pytest_plugin", "-q", *options]
    return subprocess.run(
        [*command, "-c", "/dev/null", f"--rootdir={folder}", str(folder)],
        capture_output=True, text=True, timeout=120, check=False,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
    )  # fmt: skip


def test_what_a_test_leaves_behind_fails_it_by_name(tmp_path: Path) -> None:
    tests = "\n".join(f"def test_{name}(no_leaks): {code}" for name, code in LEAKS.items())
    quick = "import fsm_trainer.testing.leaks as leaks\nleaks.grown.__defaults__ = (0.2, 2**26)\n"
    head = f"{quick}import threading\nkept, wait = [], threading.Event()\n"
    done = run(tmp_path, f"{head}{tests}\ndef test_nothing(no_leaks): kept.append(1)\n")
    assert f"{len(LEAKS) + 1} passed, {len(LEAKS)} errors" in done.stdout
    told = [line for line in done.stdout.splitlines() if line.startswith("E   ")]
    assert [name for name, line in zip(LEAKS, told, strict=True) if f"{name} " not in line] == []


def test_a_journal_that_does_not_conform_fails_its_test(tmp_path: Path) -> None:
    good = FakeRun("disaggregated").run().entries
    for name, entries in (("good", good), ("bad", good[:4] + good[5:])):
        text = "".join(f"{json.dumps(entry)}\n" for entry in entries)
        (tmp_path / f"{name}.jsonl").write_text(text)
    body = "\n".join(
        f"def test_{name}(conforms):\n"
        f"    conforms(__import__('pathlib').Path({str(tmp_path / name)!r} + '.jsonl'),"
        " 'disaggregated')"
        for name in ("good", "bad")
    )
    done = run(tmp_path, body)
    assert "1 failed, 1 passed" in done.stdout
    assert "bad.jsonl:5" in done.stdout


def test_a_process_that_ended_leaves_nothing(gloo_processes: Processes, no_leaks: None) -> None:
    member = Member()
    assert member.call(dict).get(START) == {}
    member.kill()
    assert not member.alive
