"""A trainer that ends when it sleeps: its port, over processes that are objects here."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fsm_trainer.machine.errors import ActionFailed, DeadlineExceeded, WorkerLost
from fsm_trainer.machine.events import Effect, Op
from fsm_trainer.machine.lifecycle import Lifecycle, Report
from fsm_trainer.machine.names import State
from fsm_trainer.machine.spec import load
from fsm_trainer.machine.version import Version
from fsm_trainer.machine.world import System
from fsm_trainer.runtime.cluster import Recipe
from fsm_trainer.runtime.config import DeadlineConfig
from fsm_trainer.runtime.ray_ports import RayPort

SYSTEM = System.of(load("disaggregated_critic"), rollouts=1)
NAMES = ("actor.0", "actor.1")


class Held:
    def acquire(self, effect: Any) -> None: ...

    def release(self, effect: Any) -> None: ...


class Processes:
    """Stands for the cluster: each process is a lifecycle, ``fails`` what a call raises."""

    def __init__(self) -> None:
        self.up: dict[str, Lifecycle] = {}
        self.made: list[dict[str, Any]] = []
        self.fails: dict[str, BaseException] = {}

    def start(self, recipe: Recipe) -> None:
        self.up[recipe.name] = Lifecycle(
            SYSTEM, "actor", {r: Held() for r in SYSTEM.spec.system.resources}
        )

    async def setup(self, recipe: Recipe, seconds: float) -> None:
        self._may(f"setup {recipe.name}")
        self.made.append(dict(recipe.arguments))

    async def call(
        self, name: str, method: str, *arguments: Any, seconds: float, **how: Any
    ) -> Any:
        self._may(f"{method} {name}")
        here = self.up[name]
        if method == "begin":
            trigger, epoch, version, world, _ = arguments
            return here.begin(trigger, epoch=epoch, version=version, world=world)
        return getattr(here, method.removeprefix("lifecycle."))(*arguments)

    async def end(self, name: str, seconds: float) -> None:
        await asyncio.sleep(0)
        self._may(f"end {name}")
        del self.up[name]

    async def kill(self, name: str, seconds: float) -> None:
        self.up.pop(name, None)

    def _may(self, what: str) -> None:
        if what in self.fails:
            raise self.fails[what]


def recipes() -> list[Recipe]:
    return [Recipe(name, "", {"checkpoint": "newest"}, bundle=0) for name in NAMES]


async def moved(port: RayPort, trigger: str) -> State:
    world = SYSTEM.initial()
    version = Version(1, 3) if trigger == "start" else None
    await port.begin(trigger, 0, version, world, 1)
    await port.acquire()
    return (await port.commit()).state


async def asleep(fails: dict[str, BaseException] | None = None) -> tuple[RayPort, Processes]:
    processes = Processes()
    port = RayPort(processes, "actor", recipes, DeadlineConfig(), exits=True)  # type: ignore[arg-type]
    port.start()
    await port.setup()
    await moved(port, "start")
    assert set(processes.up) == set(NAMES)  # nothing to leave yet: it has not been awake
    await moved(port, "wake")
    processes.fails = fails or {}
    await moved(port, "sleep")
    return port, processes


async def test_a_sleeper_has_no_process_and_comes_back_as_it_was_before_its_next_move() -> None:
    port, processes = await asleep()
    assert processes.up == {} and await port.status() == []
    await port.died("rollout-0")  # nobody is there to be told

    assert await moved(port, "wake") == State.AWAKE

    assert processes.up["actor.1"].worker.version == Version(1, 3)
    # What it left is newer than the newest checkpoint, which need not be read.
    assert processes.made[2:] == [{"checkpoint": None, "returned": True}] * 2


@pytest.mark.parametrize("name", NAMES)
async def test_a_process_that_does_not_end_makes_a_dead_worker_not_a_sleeper(name: str) -> None:
    with pytest.raises(WorkerLost, match="still there"):
        await asleep({f"end {name}": DeadlineExceeded("still there")})


@pytest.mark.parametrize(
    "where", [f"{call} {NAMES[1]}" for call in ("setup", "begin", "lifecycle.acquire")]
)
async def test_a_rank_that_does_not_come_back_loses_the_worker_who_can_be_started_anew(
    where: str,
) -> None:
    port, processes = await asleep()
    processes.fails = {where: WorkerLost("gone")}

    with pytest.raises(WorkerLost, match="gone"):
        await moved(port, "wake")
    processes.fails = {}
    await port.kill()
    await port.respawn()

    assert processes.made[-2:] == [{"checkpoint": "newest"}] * 2
    assert await moved(port, "start") == State.SLEEPING
    assert set(processes.up) == set(NAMES)


async def test_who_may_wait_for_a_lost_rank_is_not_waited_for() -> None:
    port, processes = await asleep()
    waits = asyncio.Event()

    async def call(name: str, method: str, *arguments: Any, **how: Any) -> Any:
        if name == NAMES[1]:
            raise WorkerLost("gone")
        try:
            await asyncio.Event().wait()
        finally:
            waits.set()

    processes.call = call  # type: ignore[method-assign]

    with pytest.raises(WorkerLost, match="gone"):
        await asyncio.wait_for(port.call("checksums"), 5)
    assert await asyncio.wait_for(waits.wait(), 5), "its call was left behind"


async def test_a_lost_rank_is_told_with_what_failed_before_it_on_another() -> None:
    port, processes = await asleep()

    async def call(name: str, method: str, *arguments: Any, **how: Any) -> Any:
        if name == NAMES[0]:
            raise ActionFailed("out of memory")
        await asyncio.sleep(0.05)
        raise WorkerLost("gone")

    processes.call = call  # type: ignore[method-assign]

    with pytest.raises(WorkerLost, match=r"gone\. Another rank failed: out of memory"):
        await port.call("checksums")


@pytest.mark.parametrize("error", ["SelfCheckFailed: came back with checksum 1", "OSError: busy"])
async def test_damaged_files_lose_the_worker_what_may_pass_does_not(error: str) -> None:
    port, processes = await asleep()
    world = SYSTEM.initial()
    await port.begin("wake", 0, None, world, 1)
    worker, group = processes.up["actor.0"].worker, Effect("actor", Op.ACQUIRE, "train_groups")
    lost = "PeerLost: another rank failed in start; its own error says why"

    async def call(name: str, method: str, *arguments: Any, **how: Any) -> Any:
        return Report(worker, (), group, lost if name == NAMES[0] else error)

    processes.call = call  # type: ignore[method-assign]

    if error.startswith("SelfCheckFailed"):
        with pytest.raises(WorkerLost, match="did not come back from its files: SelfCheckFailed"):
            await port.acquire()
    else:
        assert (await port.acquire()).error == error


async def test_all_ranks_end_before_one_that_failed_is_told() -> None:
    port, processes = await asleep()
    ended = list[str]()

    async def call(name: str, method: str, *arguments: Any, **how: Any) -> Any:
        if name == NAMES[0]:
            raise ActionFailed("only here")
        await asyncio.sleep(0.05)
        ended.append(name)

    processes.call = call  # type: ignore[method-assign]

    with pytest.raises(ActionFailed, match="only here"):
        await port.call("checksums")
    assert ended == [NAMES[1]]


async def test_a_sleeper_that_is_declared_dead_starts_from_the_newest_checkpoint() -> None:
    port, processes = await asleep()

    await port.kill()
    await port.respawn()

    assert processes.made[-1] == {"checkpoint": "newest"}
    assert await moved(port, "start") == State.SLEEPING
