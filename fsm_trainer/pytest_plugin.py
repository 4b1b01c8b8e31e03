"""A pytest plugin, there wherever fsm-trainer is installed: fixtures for lifecycle code.

Nothing else is loaded before a fixture is asked for; ``fsm_trainer.testing`` has the kit itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from fsm_trainer.testing.processes import Processes


@pytest.fixture(scope="session")
def gloo_processes() -> Processes:
    """Real processes with a store where their groups meet; all tests of a run share them."""
    from fsm_trainer.testing.processes import shared

    processes = shared()
    processes.members(1)  # the fork server starts with the first
    return processes


@pytest.fixture
def no_leaks() -> Iterator[None]:
    """Fails a test that leaves groups, processes, threads, descriptors, sockets or memory behind.

    What other fixtures of the test start and keep must be asked for before this one.
    """
    from fsm_trainer.testing.leaks import footprint, grown

    before = footprint()
    yield
    if left := grown(before):
        pytest.fail(f"the test left behind: {left}")


@pytest.fixture
def conforms() -> Callable[..., None]:
    """Given a journal, its schedule and where the tables are, fails where it doesn't conform."""

    def check(journal: Path, schedule: str, states: Path | None = None) -> None:
        from fsm_trainer.machine.spec import load
        from fsm_trainer.runtime.journal import read_journal
        from fsm_trainer.verify.conformance import check_journal

        entries = [entry.model_dump() for entry in read_journal(journal)]
        if not entries:
            pytest.fail(f"{journal}: the journal is empty")
        if violation := check_journal(entries, load(schedule, states)):
            pytest.fail(f"{journal}: {violation}")

    return check
