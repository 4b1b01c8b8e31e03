from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fsm_trainer.testing.processes import Member, Processes, shared
from tests.groups import members
from tests.sync import pushes


@pytest.fixture
def world() -> Processes:
    """Processes that all tests of groups and pushes share."""
    return shared()


class Link:
    """A link of one kind between members of the world."""

    def __init__(self, world: Processes, kind: str, folder: Path) -> None:
        self.kind, self.folder, self._world = kind, folder, world
        self.members: list[Member] = []

    def open(self, size: int, timeout: float = 5.0) -> list[Member]:
        """Open a new epoch between the first ``size`` members, those that were killed replaced."""
        self.members = processes = self._world.members(size)
        places = self._world.memberships(size, timeout, kind=self.kind, folder=str(self.folder))
        for answer in [
            process.call(members.open_lease, place)
            for process, place in zip(processes, places, strict=True)
        ]:
            assert answer.get() == "open"
        return processes

    def close(self) -> None:
        for process in self.members:
            if process.alive:
                process.call(members.close_lease).get()

    def left(self) -> list[str]:
        """What there is of a push: files in the folder and in shared memory, mappings, buffers."""
        files = [str(path) for path in self.folder.rglob("*")]
        # What torch shares has the name of its process.
        ours = [f"torch_{process._process.pid}_" for process in self.members]
        files += [name for name in os.listdir("/dev/shm") if name.startswith(tuple(ours))]
        alive = [process for process in self.members if process.alive]
        return files + [one for process in alive for one in process.call(pushes.left).get()]


@pytest.fixture(params=["group", "ipc", "disk"])
def link(request: pytest.FixtureRequest, world: Processes, tmp_path: Path) -> Iterator[Link]:
    """Each kind in turn; when it is closed nothing is left, however the test's pushes ended."""
    made = Link(world, request.param, tmp_path)
    yield made
    made.close()
    until = time.monotonic() + 5.0
    while made.left() and time.monotonic() < until:
        time.sleep(0.05)
    assert made.left() == []
