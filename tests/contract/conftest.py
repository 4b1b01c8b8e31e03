from __future__ import annotations

import dataclasses
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import psutil
import pytest
import torch

from fsm_trainer.data.tiny import TinyModelConfig, make_tiny_model
from fsm_trainer.engines.config import EmbeddedConfig, SglangConfig
from fsm_trainer.engines.contract import PauseMode, Request, Tag
from fsm_trainer.engines.embedded import EmbeddedEngine
from fsm_trainer.engines.engine import Engine
from fsm_trainer.engines.sglang import SglangEngine
from fsm_trainer.groups.membership import Membership
from fsm_trainer.machine.version import Version
from fsm_trainer.testing.processes import Member, Processes
from tests.contract import weights as peer

HERE = find_spec("sglang") is not None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="where the engines live: cpu, or cuda")
    parser.addoption("--rounds", default=12, type=int, help="how many the fuzzed test goes")
    parser.addoption("--result", help="where the fuzzed test writes what faults cost")


@dataclass(frozen=True)
class Site:
    """Where a suite runs, and what follows for it."""

    device: str

    @property
    def cuda(self) -> bool:
        return self.device != "cpu"

    @property
    def sender(self) -> str:
        """The sender's own device where there are several, else the engine's."""
        return f"cuda:{torch.cuda.device_count() - 1}" if self.cuda else "cpu"

    @property
    def backend(self) -> str:
        return "nccl" if self.cuda else "gloo"

    @property
    def dtype(self) -> Literal["float32", "bfloat16"]:
        # SGLang's kernels on a GPU round float32 to TF32 on the way.
        return "bfloat16" if self.cuda else "float32"


@pytest.fixture(scope="session")
def site(request: pytest.FixtureRequest) -> Site:
    return Site(request.config.getoption("--device"))


# For a CPU without SGLang's kernels; sglang_cpu/ holds what else it needs.
ON_CPU = {
    "attention_backend": "torch_native",
    "grammar_backend": "none",
    "cuda_graph_backend_decode": "disabled",
    "cuda_graph_backend_prefill": "disabled",
    "max_total_tokens": 8192,
    "max_running_requests": 16,
}


ON_CUDA = {
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_cuda_graph": True,
    "max_running_requests": 16,
}


def embedded(name: str, model: Path, site: Site, routing_replay: bool = False) -> Engine:
    config = EmbeddedConfig(
        call_timeout=20, dtype=site.dtype, device=site.device, routing_replay=routing_replay
    )
    return EmbeddedEngine(name, model, config)


def sglang(name: str, model: Path, site: Site, routing_replay: bool = False) -> Engine:
    config = SglangConfig(
        kind="sglang",
        call_timeout=20,
        dtype=site.dtype,
        device=site.device,
        memory_fraction=0.1 if site.cuda else None,
        routing_replay=routing_replay,
        arguments=ON_CUDA if site.cuda else ON_CPU,
    )
    return SglangEngine(name, model, config)


#: The suite is one; every engine that we have goes through it.
ENGINES: dict[str, Callable[..., Engine]] = {"embedded": embedded, "sglang": sglang}
KINDS = [
    "embedded",
    pytest.param(
        "sglang",
        marks=pytest.mark.skipif(not HERE, reason="SGLang isn't installed: tox run -e sglang"),
    ),
]
# Seconds for what must happen at once, on a busy machine.
AT_ONCE = 2.0
# New tokens of a request that is still in flight when a test looks.
LONG = 350


def background(function: Callable[..., Any], *args: Any) -> Future[Any]:
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function(*args))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def until(condition: Callable[[], bool], timeout: float = 10.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.005)


def descendants() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


class Bench:
    """One engine, and a real process that sends it weights."""

    def __init__(self, engine: Engine, world: Processes, site: Site) -> None:
        self.engine, self.world, self.site = engine, world, site
        self.number = 0

    @property
    def sender(self) -> Member:
        return self.world.members(1)[0]

    def memberships(self, timeout: float = 5.0, **way: str) -> list[Membership]:
        """The sender's place, and the engine's."""
        places = self.world.memberships(2, timeout)
        return [dataclasses.replace(each, backend=self.site.backend, **way) for each in places]

    def connect(self, timeout: float = 5.0, **way: str) -> None:
        ours, theirs = self.memberships(timeout, **way)
        answer = self.sender.call(peer.join, ours, self.site.sender)
        self.engine.join(theirs)
        assert answer.get() is None

    def disconnect(self) -> None:
        answer = self.sender.call(peer.leave)
        self.engine.leave()
        answer.get()

    def receive(self) -> None:
        self.engine.begin_update(peer.manifest(self.engine.specs()))
        self.engine.receive()

    def push(self, seed: int) -> Version:
        """Over the link that is there."""
        answer = self.sender.call(peer.push, self.engine.specs(), seed)
        self.receive()
        assert answer.get() > 2, "the push should have several buckets"
        self.number += 1
        self.engine.end_update(Version(1, self.number))
        return Version(1, self.number)

    def serve(self, seed: int = 0) -> None:
        """Bring the engine to hold weights of this seed and KV cache, without a link."""
        held = self.engine.health().held
        for tag in set(Tag) - held:
            self.engine.acquire(tag)
        self.connect()
        self.push(seed)
        self.disconnect()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", TinyModelConfig(), seed=0)


@pytest.fixture(scope="session")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # SGLang's mixtures take heads of 64 and more on a GPU.
    shape = TinyModelConfig(layers=3, heads=1, kv_heads=1, intermediate=48, experts=8)
    return make_tiny_model(tmp_path_factory.mktemp("model") / "moe", shape, seed=0)


@pytest.fixture(scope="module")
def world() -> Iterator[Processes]:
    world = Processes()
    yield world
    world.close()


@pytest.fixture(scope="module", params=KINDS)
def bench(
    request: pytest.FixtureRequest, tiny: Path, world: Processes, site: Site
) -> Iterator[Bench]:
    """An engine for all tests of a module; nothing of it is left behind at the end."""
    world.members(1)
    before = descendants(), len(os.listdir("/proc/self/fd"))
    engine = ENGINES[request.param]("rollout-0", tiny, site)
    engine.start()
    bench = Bench(engine, world, site)
    if site.cuda:
        bench.serve()
        engine.generate(long_requests())  # kernels are compiled at their first use
    yield bench
    engine.stop()
    engine.stop()
    assert descendants() <= before[0] | descendants_of(world)
    until(lambda: len(os.listdir("/proc/self/fd")) <= before[1] + 2)


def descendants_of(world: Processes) -> set[int]:
    """The world's members, which are replaced when a test kills one."""
    return {member._process.pid or 0 for member in world._members}


@pytest.fixture
def awake(bench: Bench) -> Iterator[Bench]:
    """An engine that serves; each test has to leave it without link, pause and requests."""
    health = bench.engine.health()
    if health.held != set(Tag) or health.version is None:
        bench.serve()
    yield bench
    health = bench.engine.health()
    assert (health.in_flight, health.paused, health.updating) == (0, None, False)
    assert (health.epoch, health.groups) == (None, ())


def long_requests(count: int = 4) -> list[Request]:
    """Each takes half a second or more."""
    names = ("long-0", "long-1", "long-10", "long-3")[:count]  # one begins another
    return [Request(name, (5, 6, 7), LONG, seed=seed) for seed, name in enumerate(names)]


@pytest.fixture
def in_flight(awake: Bench) -> Iterator[Future[Any]]:
    """Requests that the engine is working on, held in place; aborted at the end."""
    future = background(awake.engine.generate, long_requests())
    until(lambda: awake.engine.health().in_flight > 0)
    time.sleep(0.1)
    awake.engine.pause(PauseMode.IN_PLACE)
    yield future
    if awake.engine.health().paused:
        awake.engine.unpause()
    awake.engine.abort()
    future.exception(20)
    awake.engine.drain(10)


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
