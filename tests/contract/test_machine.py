"""The kit's machine drives the real rollout worker, its engine and a real trainer's process."""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from fsm_trainer.engines.contract import Health, Request, Tag
from fsm_trainer.engines.embedded import EmbeddedEngine
from fsm_trainer.engines.engine import Engine
from fsm_trainer.groups.rendezvous import Rendezvous
from fsm_trainer.machine.errors import EngineFailed, Refused
from fsm_trainer.machine.events import Effect
from fsm_trainer.machine.lifecycle import Resource
from fsm_trainer.machine.spec import load
from fsm_trainer.machine.version import Version
from fsm_trainer.machine.world import System
from fsm_trainer.sync.manifest import Manifest
from fsm_trainer.testing import Faulty, LifecycleMachine, Order, Subject, in_step
from fsm_trainer.testing.processes import ProcessWorker
from fsm_trainer.workers.effects import Effects
from fsm_trainer.workers.host import Host, Place
from fsm_trainer.workers.rollout import RolloutHost
from tests.contract.conftest import ENGINES, KINDS, Site, kill
from tests.testing import lives

pytestmark = pytest.mark.timeout(3600)
SYSTEM = System.of(load("disaggregated"), rollouts=1)
# Seconds of the link: what an end waits for one that failed.
DEADLINE = 4.0


class Hosted(RolloutHost):
    """The worker of real runs, over an engine that outlives it: SGLang takes long to start."""

    def __init__(self, place: Place, engine: Engine) -> None:
        self.engine = engine
        Host.__init__(self, place)

    def resources(self) -> Mapping[str, Resource]:
        held: list[Effect] = []
        self.faulty = {name: Faulty(held, real) for name, real in super().resources().items()}
        return self.faulty | {"engine": Effects(lambda e: started(self.engine), lambda e: None)}


def started(engine: Engine) -> None:
    try:
        engine.health()
    except (EngineFailed, Refused):
        engine.stop()
        engine.start()


class Rollout:
    """It as the kit drives it; what it holds is asked of the engine's process."""

    def __init__(self, host: Hosted, manifest: Manifest) -> None:
        self.host, self.manifest = host, manifest

    def trigger(self, order: Order) -> None:
        in_step(self.host.lifecycle, order)

    def act(self, order: Order) -> None:
        if order.name == "push":
            version = order.world.workers[0].version or Version(0, 0)
            self.host.act("push", order.world, self.manifest, version)
        else:
            with self.host.lifecycle.action(order.name, order.world):
                [answer] = self.host.engine.generate([Request("one", (3, 4, 5), 4, seed=7)])
                assert len(answer.tokens) > 0

    def holds(self) -> Collection[str]:
        """As the engine's process says, which outlives what its machine calls an engine."""
        health = self.health()
        engine = ["engine"] if "engine" in self.host.lifecycle.worker.held else []
        return [*engine, *(str(tag) for tag in health.held), *self.epochs()] if health else engine

    def epochs(self) -> Mapping[str, int]:
        health = self.health()
        return {} if health is None or health.epoch is None else {"link": health.epoch}

    def health(self) -> Health | None:
        try:
            return self.host.engine.health()
        except (EngineFailed, Refused):
            return None  # killed, and nobody has started it again

    def weights(self) -> object:
        torn = self.host.engine.version() is None
        return None if torn else dict(self.host.engine.checksums())

    def fail_next(self, what: str) -> bool:
        can = what in ("weights", "kv", "link")
        if can:
            self.host.faulty[what].fail_next()
        return can

    def stall(self, seconds: float) -> bool:
        return False

    def kill(self) -> None:
        health = self.health()
        if "engine" in self.host.lifecycle.worker.held and health is not None:
            kill(health.pid)
            self.host.engine.stop()


@pytest.fixture(scope="module", params=KINDS)
def engine(request: pytest.FixtureRequest, tiny: Path, site: Site) -> Iterator[Engine]:
    engine = ENGINES[request.param]("rollout-0", tiny, site)
    engine.start()
    yield engine
    engine.stop()


@pytest.mark.parametrize(
    "sequences", [10, pytest.param(200, marks=pytest.mark.nightly)], ids=["few", "many"]
)
def test_the_real_rollout_worker_is_what_the_plain_model_says(
    engine: Engine, sequences: int, site: Site, tmp_path: Path
) -> None:
    if site.cuda:
        pytest.skip("the trainer's process of this test is on the CPU")
    engine.acquire(Tag.WEIGHTS)
    specs = tuple(engine.specs())
    engine.release(Tag.WEIGHTS)
    manifest = Manifest(specs, bucket_bytes=lives.BUCKET_BYTES)
    ended = time.monotonic() + 300 * sequences

    class Real(LifecycleMachine):
        system = SYSTEM
        # An engine of SGLang's starts in half a minute, on a busy CPU.
        between_deaths = 2 if isinstance(engine, EmbeddedEngine) else 20

        def __init__(self) -> None:
            super().__init__()
            self.rendezvous = Rendezvous.bind()  # epochs begin anew

        def make_worker(self, name: str) -> Subject:
            store = self.rendezvous.address
            if name == "actor":
                make = (lives.make, "disaggregated", 1, name, "link", store, DEADLINE, specs)
                return ProcessWorker(*make)
            place = Place(SYSTEM, name, 0, 1, store, DEADLINE, site.backend, tmp_path)
            return Rollout(Hosted(place, engine), manifest)

        def teardown(self) -> None:
            try:
                if sys.exc_info()[0] is None:
                    self.go_to("end")
            finally:
                super().teardown()
                self.rendezvous.close()
                assert time.monotonic() < ended

    some = settings(
        max_examples=sequences, stateful_step_count=20, deadline=None, derandomize=sequences < 200,
        database=None, suppress_health_check=[*HealthCheck], phases=[Phase.generate],
    )  # fmt: skip
    run_state_machine_as_test(Real, settings=some)
