"""An SGLang server that runs already: attached to, left as it is, and attached to again."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from fsm_trainer.data.tiny import TinyModelConfig, make_tiny_model
from fsm_trainer.engines.config import SglangConfig
from fsm_trainer.engines.contract import PauseMode, Request, Tag
from fsm_trainer.engines.process import EngineProcess
from fsm_trainer.engines.sglang import SglangEngine, _reserved_port
from fsm_trainer.engines.sglang_api import command
from fsm_trainer.machine.errors import CapabilityMissing, EngineFailed
from fsm_trainer.sync.checksums import checksums
from fsm_trainer.testing.processes import Processes
from tests.contract import weights as peer
from tests.contract.conftest import HERE, ON_CPU, Bench, Site, background, long_requests, until

httpx = pytest.importorskip("httpx", reason="it comes with SGLang: tox run -e sglang")

pytestmark = [
    pytest.mark.skipif(not HERE, reason="SGLang isn't installed: tox run -e sglang"),
    pytest.mark.timeout(300),
]


@dataclass
class Elsewhere:
    """A server that nobody of ours has started."""

    process: EngineProcess
    url: str
    key: str

    def engine(self, tiny: Path, **settings: object) -> SglangEngine:
        config = {"kind": "sglang", "url": self.url, "api_key": self.key, **settings}
        return SglangEngine("rollout-0", tiny, SglangConfig.model_validate(config))

    def answers(self) -> bool:
        headers = {"Authorization": f"Bearer {self.key}"}
        try:
            return httpx.get(f"{self.url}/model_info", headers=headers, timeout=5).is_success
        except httpx.TransportError:
            return False


@pytest.fixture(scope="module")
def elsewhere(tiny: Path) -> Iterator[Elsewhere]:
    held, port = _reserved_port()
    url, key = f"http://127.0.0.1:{port}", "a key"
    process = EngineProcess("elsewhere", "fsm_trainer.engines.sglang_server")
    settings = SglangConfig(kind="sglang", arguments=dict(ON_CPU))
    process.submit("serve", *command(str(tiny), url, key, settings))
    server = Elsewhere(process, url, key)
    until(server.answers, 180)
    yield server
    process.kill()
    held.close()


def test_what_a_server_lacks_is_named(elsewhere: Elsewhere, tiny: Path, moe: Path) -> None:
    with pytest.raises(CapabilityMissing, match="lacks --tp-size 2"):
        elsewhere.engine(tiny, tensor_parallel=2).start()
    with pytest.raises(CapabilityMissing, match="lacks --dtype bfloat16"):
        elsewhere.engine(tiny, dtype="bfloat16").start()
    with pytest.raises(CapabilityMissing, match="lacks --enable-return-routed-experts"):
        elsewhere.engine(moe, routing_replay=True).start()
    assert elsewhere.answers()


def test_a_worker_that_goes_leaves_the_server_and_the_next_one_goes_on(
    elsewhere: Elsewhere, tiny: Path, world: Processes
) -> None:
    first = elsewhere.engine(tiny)
    first.start()
    bench = Bench(first, world, Site("cpu"))
    bench.serve(seed=91)
    assert first.checksums() == checksums(peer.weights(first.specs(), 91).items())
    bench.connect()
    # It goes as a crash would have it: with requests in flight, paused, linked, half asleep.
    lost = background(first.generate, long_requests())
    until(lambda: first.health().in_flight > 0)
    first.pause(PauseMode.IN_PLACE)
    first.stop()
    assert isinstance(lost.exception(2), EngineFailed)
    assert elsewhere.answers()

    second = elsewhere.engine(tiny)
    second.start()
    assert (second.health().held, second.version()) == (frozenset(), None)
    assert second.health().groups == (), "the link of the first one is gone"
    bench = Bench(second, world, Site("cpu"))
    bench.serve(seed=92)
    assert second.checksums() == checksums(peer.weights(second.specs(), 92).items())
    assert len(second.generate([Request("one", (3, 4, 5), 4)])[0].tokens) == 4
    second.release(Tag.KV)
    second.stop()


def test_a_newer_worker_takes_over(elsewhere: Elsewhere, tiny: Path) -> None:
    first, second = elsewhere.engine(tiny), elsewhere.engine(tiny)
    first.start()
    second.start()
    deadline = time.monotonic() + 10
    with pytest.raises(EngineFailed, match="closed its connection"):
        while time.monotonic() < deadline:
            first.health()
            time.sleep(0.05)
    second.acquire(Tag.WEIGHTS)
    second.stop()
    first.stop()


def test_a_worker_that_can_not_use_it_leaves_the_server_as_it_was(
    elsewhere: Elsewhere, tiny: Path, tmp_path: Path
) -> None:
    other = make_tiny_model(tmp_path / "other", TinyModelConfig(layers=3), seed=0)
    for _ in range(2):
        with pytest.raises(CapabilityMissing, match="does not copy these tensors"):
            elsewhere.engine(other).start()
    assert elsewhere.answers()
    engine = elsewhere.engine(tiny)
    engine.start()
    engine.stop()


def test_a_server_that_dies_fails_its_worker_at_once(elsewhere: Elsewhere, tiny: Path) -> None:
    engine = elsewhere.engine(tiny)
    engine.start()
    elsewhere.process.kill()
    until(lambda: engine._server is not None and engine._server.ended is not None, 5)
    with pytest.raises(EngineFailed, match="closed its connection"):
        engine.acquire(Tag.WEIGHTS)
    engine.stop()
