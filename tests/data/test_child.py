"""What a child process starts ends with it, whoever dies first, and in whatever way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from multiprocessing.connection import Connection

import psutil
import pytest

from fsm_trainer.data.child import Child


def main(connection: Connection) -> None:
    """A child that starts a program in a session of its own, which starts another, and waits."""
    script = "import subprocess, sys, time; subprocess.Popen(['sleep', '60']); time.sleep(60)"
    subprocess.Popen([sys.executable, "-c", script], start_new_session=True)
    connection.send(os.getpid())
    try:
        connection.recv()
    except EOFError:
        os._exit(3)
    os._exit(4)


def family(child: Child) -> list[psutil.Process]:
    """Guard, process, the program, and the program's own."""
    assert child.connection.poll(30)
    child.connection.recv()
    guard = psutil.Process(child.pid)
    deadline = time.monotonic() + 30
    while len(found := guard.children(recursive=True)) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return [guard, *found]


def left(processes: list[psutil.Process], within: float = 5.0) -> list[psutil.Process]:
    """Those that still run; not by waiting for them, which would take the guard from its owner."""
    deadline = time.monotonic() + within
    while alive := [p for p in processes if p.is_running() and p.status() != "zombie"]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    return alive


def test_kill_leaves_nothing_of_it() -> None:
    child = Child(__name__)
    processes = family(child)
    child.kill()
    child.kill()
    assert left(processes, within=0.1) == []
    assert child.end == "ended by signal 9"
    child.connection.close()


def test_a_process_that_ends_takes_along_what_it_started() -> None:
    child = Child(__name__)
    processes = family(child)
    child.connection.send("end")
    assert left(processes) == []
    child.kill()
    assert child.end == "ended with code 4"
    child.connection.close()


@pytest.mark.parametrize("stopped", [0, 1])
def test_one_that_is_stopped_is_killed_too(stopped: int) -> None:
    child = Child(__name__)
    processes = family(child)
    os.kill(processes[stopped].pid, signal.SIGSTOP)
    child.kill()
    assert left(processes, within=0.1) == []
    child.connection.close()


def test_a_killed_parent_leaves_nothing_of_it() -> None:
    script = f"""
import time
from fsm_trainer.data.child import Child
from {__name__} import family
child = Child({__name__!r})
print(*[p.pid for p in family(child)], flush=True)
time.sleep(60)
"""
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        processes = [psutil.Process(int(word)) for word in parent.stdout.readline().split()]
        assert len(processes) == 4
        parent.kill()
        assert left(processes) == []
    finally:
        parent.kill()
        parent.communicate(timeout=10)


def test_a_killed_guard_takes_the_process_along() -> None:
    child = Child(__name__)
    processes = family(child)
    processes[0].kill()
    assert left(processes[:2]) == []
    child.kill()
    assert child.end == "ended by signal 9"
    for process in left(processes, within=0.1):  # two faults at once are not covered
        process.kill()
    child.connection.close()
