"""An engine that spans two processes: each is a member of the link, and holds its part."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from fsm_trainer.engines.config import SglangConfig
from fsm_trainer.engines.contract import Finish, Request, Tag
from fsm_trainer.engines.sglang import SglangEngine, SglangServer
from fsm_trainer.machine.errors import PeerLost
from fsm_trainer.machine.version import Version
from fsm_trainer.sync.checksums import checksums
from fsm_trainer.testing.processes import Processes
from tests.contract import weights as peer
from tests.contract.conftest import HERE, ON_CPU, gone

pytestmark = [
    pytest.mark.skipif(not HERE, reason="SGLang isn't installed: tox run -e sglang"),
    pytest.mark.timeout(400),
]


@pytest.fixture
def engine(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SglangEngine]:
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")
    config = SglangConfig(
        kind="sglang", tensor_parallel=2, start_timeout=300, arguments=dict(ON_CPU)
    )
    engine = SglangEngine("rollout-0", tiny, config)
    engine.start()
    family = psutil.Process(engine.health().pid).children(recursive=True)
    assert len(family) >= 4, "the server, two schedulers, a detokenizer"
    yield engine
    engine.stop()
    assert all(gone(process.pid) for process in family)


def test_both_parts_take_a_push_and_give_back_the_senders_bytes(engine: SglangEngine) -> None:
    world = Processes()
    try:
        [sender] = world.members(1)
        for tag in Tag:
            engine.acquire(tag)
        specs = engine.specs()
        ours, first, _ = world.memberships(3, 10.0)
        joining = sender.call(peer.join, ours, "cpu")
        engine.join(first)
        joining.get()
        sending = sender.call(peer.push, specs, 81)
        engine.begin_update(peer.manifest(specs))
        engine.receive()
        engine.end_update(Version(0, 1))
        assert sending.get() > 2
        assert engine.checksums() == checksums(peer.weights(specs, 81).items())
        [whole] = engine.generate([Request("one", (3, 4, 5), 4, seed=7)])
        assert (len(whole.tokens), whole.finish) == (4, Finish.LENGTH)
        engine.leave()
        assert engine.health().groups == ()
        # One that does not come is named, and the other part holds no link then.
        lost = dataclasses.replace(world.memberships(3, 1.0)[1])
        with pytest.raises(PeerLost, match="member-0"):
            engine.join(lost)
        assert isinstance(engine._server, SglangServer)
        for agent in engine._server._agents:
            assert agent.call("vitals", timeout=10).epoch is None
    finally:
        world.close()
