"""SGLang is several processes: whichever dies, and whenever, the engine fails and none is left."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest

from fsm_trainer.engines.contract import Tag
from fsm_trainer.machine.errors import EngineFailed
from tests.contract.conftest import AT_ONCE, HERE, Site, background, gone, sglang, until

pytestmark = [
    pytest.mark.skipif(not HERE, reason="SGLang isn't installed: tox run -e sglang"),
    pytest.mark.timeout(300),
]


def family(pid: int) -> list[psutil.Process]:
    """The guard and all that it guards."""
    guard = psutil.Process(pid)
    return [guard, *guard.children(recursive=True)]


def test_a_scheduler_that_is_killed_fails_the_engine_at_once(tiny: Path, site: Site) -> None:
    engine = sglang("rollout-0", tiny, site)
    engine.start()
    try:
        processes = family(engine.health().pid)
        [scheduler] = [p for p in processes if "scheduler" in " ".join(p.cmdline())]
        scheduler.kill()
        began = time.monotonic()
        with pytest.raises(EngineFailed, match="signal 9"):
            while time.monotonic() - began < AT_ONCE:
                engine.health()
                time.sleep(0.02)
        assert all(gone(process.pid) for process in processes)
        with pytest.raises(EngineFailed):
            engine.acquire(Tag.WEIGHTS)
    finally:
        engine.stop()


def test_one_that_is_killed_while_it_starts_leaves_nothing(tiny: Path, site: Site) -> None:
    engine = sglang("rollout-0", tiny, site)
    starting = background(engine.start)
    until(lambda: engine._server is not None)  # type: ignore[attr-defined]
    pid = engine._server.pid  # type: ignore[attr-defined]
    # SGLang's own processes look after themselves only once they are up.
    until(lambda: len(family(pid)) >= 5, 120)
    processes = family(pid)
    processes[1].kill()
    assert isinstance(starting.exception(10), EngineFailed)
    until(lambda: all(gone(process.pid) for process in processes), 5)
