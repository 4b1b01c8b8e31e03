"""The run's processes in Ray: a local cluster of its own, or one that is joined by its address.

Ray starts processes and carries calls and payloads; what a worker may do is its machine's matter.
Every process has two threads' worth of calls: its work, one at a time, and control calls, which are
answered while the work blocks in a collective.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import ray
import structlog
from ray.exceptions import RayActorError, RaySystemError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from fsm_trainer.machine.errors import (
    ActionFailed,
    CapabilityMissing,
    DeadlineExceeded,
    FsmError,
    WorkerLost,
)
from fsm_trainer.machine.lifecycle import Report
from fsm_trainer.machine.version import Version
from fsm_trainer.machine.world import Worker, World
from fsm_trainer.runtime.config import ClusterConfig, DeadlineConfig
from fsm_trainer.runtime.logs import Logs
from fsm_trainer.runtime.port import Outcome
from fsm_trainer.workers.host import Status

log = structlog.get_logger(__name__)

CONTROL = "control"
CONTROL_THREADS = 4


@dataclass(frozen=True)
class Recipe:
    """How to make a process: the host's class by ``module:class``, and its arguments."""

    name: str
    host: str
    arguments: Mapping[str, Any]
    bundle: int
    cpus: float = 1.0
    gpus: float = 0.0


class _Process:
    """A host in a Ray actor: its imports come with the process, its making with ``setup``."""

    def __init__(self, name: str, host: str, path: Sequence[str], run_dir: Path) -> None:
        sys.path.extend(entry for entry in path if entry not in sys.path)
        self._logs = Logs(run_dir, worker=name)
        self._class = resolve_name(host)
        self._host: Any = None

    def setup(self, arguments: Mapping[str, Any]) -> tuple[str, int]:
        self._host = self._class(**arguments)
        return ray.get_runtime_context().get_node_id(), os.getpid()

    def call(self, method: str, *arguments: Any) -> Any:
        return getattr(self._host, method)(*arguments)

    def act(self, action: str, world: World, *arguments: Any) -> Any:
        # Ray resolves references only where they are arguments of their own.
        return self._host.act(action, world, arguments)


@dataclass
class _Handle:
    """A process that was started."""

    actor: Any
    pid: int | None = None
    """Known where it runs on this node; elsewhere Ray's word that it is dead must do."""


class Cluster:
    """The run's Ray; end it with :meth:`close`, which leaves no process behind."""

    def __init__(
        self, config: ClusterConfig, bundles: Sequence[Mapping[str, float]], run_dir: Path
    ) -> None:
        self._run_dir, self._folder = run_dir, ""
        self._handles: dict[str, _Handle] = {}
        self._group: PlacementGroup | None = None
        logging.getLogger("ray").setLevel(logging.ERROR)
        cpus = sum(bundle.get("CPU", 0) for bundle in bundles)
        if config.address is None:
            # Ray's sockets live in there, and a socket's path is limited to 107 bytes.
            self._folder = tempfile.mkdtemp(prefix="fsm-ray-")
            ray.init(
                address="local",
                num_cpus=int(cpus),
                num_gpus=config.gpus,
                include_dashboard=False,
                log_to_driver=False,
                configure_logging=False,
                _temp_dir=self._folder,
                object_store_memory=OBJECT_STORE_BYTES,
            )
        else:
            ray.init(address=config.address, log_to_driver=False, configure_logging=False)
        remote: Any = ray.remote
        self._actor = remote(concurrency_groups={CONTROL: CONTROL_THREADS})(_Process)
        self._bundles = [dict(bundle) for bundle in bundles]

    @property
    def host(self) -> str:
        """The address of this node, as the others reach it."""
        address: Any = ray.util.get_node_ip_address
        return str(address())

    async def reserve(self, seconds: float) -> None:
        """Reserve all devices at once; raises CapabilityMissing where they don't exist."""
        self._group = placement_group(self._bundles, strategy="PACK")
        try:
            await asyncio.wait_for(self._group.ready(), seconds)
        except TimeoutError:
            resources: Any = ray.cluster_resources
            have = resources()
            need = {k: sum(b.get(k, 0) for b in self._bundles) for k in ("CPU", "GPU")}
            raise CapabilityMissing(
                f"the cluster did not grant {need} in {seconds:g} s; it has "
                f"{ {k: have.get(k, 0) for k in need} }. Fewer workers or ranks, or more devices"
            ) from None

    def start(self, recipe: Recipe) -> None:
        """Start a process and its imports; :meth:`setup` makes its host."""
        if self._group is None:
            raise CapabilityMissing("the cluster's devices were not reserved: call reserve() first")
        strategy = PlacementGroupSchedulingStrategy(
            placement_group=self._group, placement_group_bundle_index=recipe.bundle
        )
        actor = self._actor.options(
            num_cpus=recipe.cpus, num_gpus=recipe.gpus, scheduling_strategy=strategy
        ).remote(recipe.name, recipe.host, [p for p in sys.path if p], self._run_dir)
        self._handles[recipe.name] = _Handle(actor)

    async def setup(self, recipe: Recipe, seconds: float) -> None:
        """Make a process's host and wait until it can be called."""
        handle = self._handles[recipe.name]
        made = handle.actor.setup.remote(recipe.arguments)
        node, pid = await self._await(recipe.name, made, seconds)
        handle.pid = pid if node == ray.get_runtime_context().get_node_id() else None
        log.debug("a process is up", worker=recipe.name, pid=pid)

    async def call(
        self, name: str, method: str, *arguments: Any, seconds: float, **how: Any
    ) -> Any:
        """Call a method of a host and wait for its value.

        Raises WorkerLost when the process is gone or does not answer within ``seconds``.
        """
        actor = self._handles[name].actor
        ref = actor.call.options(**how).remote(method, *arguments)
        return await self._await(name, ref, seconds)

    def spread(self, name: str, method: str, *arguments: Any, returns: int) -> list[Any]:
        """Call a method that gives several payloads; references to them come back at once."""
        actor = self._handles[name].actor
        refs = actor.call.options(num_returns=returns).remote(method, *arguments)
        return list(refs) if returns > 1 else [refs]

    async def outcome(self, name: str, method: str, *arguments: Any, seconds: float) -> Outcome:
        """Call a method that gives a payload and a value; the payload stays where it is."""
        actor = self._handles[name].actor
        bound = actor.act if method == "act" else actor.call
        names = arguments if method == "act" else (method, *arguments)
        payload, value = bound.options(num_returns=2).remote(*names)
        return Outcome(payload, await self._await(name, value, seconds))

    async def _await(self, name: str, ref: Any, seconds: float) -> Any:
        try:
            return await asyncio.wait_for(asyncio.wrap_future(ref.future()), seconds)
        except TimeoutError:
            raise WorkerLost(f"{name} did not answer within {seconds:g} s") from None
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, FsmError):
                raise cause from None
            log.debug("a worker raised", worker=name, traceback=str(error))
            raise ActionFailed(
                f"{name} raised {type(cause).__name__}: {cause} (its traceback stands in the log)"
            ) from None
        except RaySystemError as error:
            raise ActionFailed(f"{name}: Ray could not carry the answer: {error}") from None
        except RayActorError as error:
            log.debug("a process is gone", worker=name, story=str(error))
            raise WorkerLost(f"{name}'s process is gone: {_last_line(error)}") from None

    async def kill(self, name: str, seconds: float) -> None:
        """End a process and see it dead; raises DeadlineExceeded if it can't be seen."""
        handle = self._handles.pop(name, None)
        if handle is None:
            return
        ray.kill(handle.actor, no_restart=True)
        deadline = time.monotonic() + seconds
        while handle.pid is not None and _exists(handle.pid):
            _signal(handle.pid)
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"{name} (process {handle.pid}) was killed but is still there after "
                    f"{seconds:g} s; its claim on the device stays"
                )
            await asyncio.sleep(0.02)

    def close(self) -> None:
        """End every process, the placement, and Ray where it was ours."""
        pids = [h.pid for h in self._handles.values() if h.pid is not None]
        for handle in self._handles.values():
            ray.kill(handle.actor, no_restart=True)
        self._handles.clear()
        if self._group is not None:
            remove_placement_group(self._group)
        ray.shutdown()
        deadline = time.monotonic() + CLOSE_SECONDS
        while time.monotonic() < deadline and any(_exists(pid) for pid in pids):
            for pid in pids:
                _signal(pid)
            time.sleep(0.02)
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)


OBJECT_STORE_BYTES = 512 * 2**20
CLOSE_SECONDS = 10.0


class RayPort:
    """A worker port over the processes of a :class:`Cluster`, one for each rank."""

    def __init__(
        self,
        cluster: Cluster,
        name: str,
        recipes: Callable[[], list[Recipe]],
        deadlines: DeadlineConfig,
    ) -> None:
        self._cluster, self._name, self._deadlines = cluster, name, deadlines
        self._make, self.recipes = recipes, recipes()

    @property
    def ranks(self) -> int:
        """Processes of the worker."""
        return len(self.recipes)

    def start(self) -> None:
        """Start the processes; :meth:`setup` waits for them."""
        for recipe in self.recipes:
            self._cluster.start(recipe)

    async def setup(self) -> None:
        """Make the hosts, from the newest checkpoint, and wait until they can be called."""
        self.recipes = self._make()
        seconds = self._deadlines.transition
        await asyncio.gather(*(self._cluster.setup(r, seconds) for r in self.recipes))

    async def _all(self, method: str, *arguments: Any, seconds: float, **how: Any) -> list[Any]:
        calls = (
            self._cluster.call(r.name, method, *arguments, seconds=seconds, **how)
            for r in self.recipes
        )
        results = await asyncio.gather(*calls, return_exceptions=True)
        errors = [r for r in results if isinstance(r, BaseException)]
        lost = [e for e in errors if isinstance(e, WorkerLost)]
        for error in (*lost, *errors):
            raise error
        return results

    async def _report(self, method: str, *arguments: Any) -> Report:
        """All ranks' reports as one: what failed on any has failed, what all did is done."""
        reports: list[Report] = await self._all(
            method, *arguments, seconds=self._deadlines.transition
        )
        failed = [report for report in reports if report.failed is not None]
        return min(failed or reports, key=lambda report: len(report.done))

    async def begin(
        self, trigger: str, epoch: int, version: Version | None, world: World, generation: int
    ) -> Report:
        """See :class:`~fsm_trainer.runtime.port.WorkerPort`, here and below."""
        return await self._report("begin", trigger, epoch, version, world, generation)

    async def acquire(self) -> Report:
        """All ranks together."""
        return await self._report("acquire")

    async def commit(self) -> Worker:
        """All ranks together."""
        return await self._worker("commit")

    async def undo(self) -> Worker:
        """All ranks together."""
        return await self._worker("undo")

    async def sever(self, link: str, world: World) -> Worker:
        """All ranks together."""
        return await self._worker("sever", link, world)

    async def _worker(self, method: str, *arguments: Any) -> Worker:
        workers = await self._all(method, *arguments, seconds=self._deadlines.transition)
        first: Worker = workers[0]
        if any(w.state != first.state for w in workers):
            states = [str(w.state) for w in workers]
            raise WorkerLost(f"the ranks of {self._name} disagree after {method}: {states}")
        return first

    async def act(self, action: str, world: World, arguments: tuple[Any, ...]) -> Outcome:
        """All ranks together; rank 0's outcome counts."""
        seconds = self._deadlines.action
        calls = (
            self._cluster.outcome(r.name, "act", action, world, *arguments, seconds=seconds)
            for r in self.recipes
        )
        results = await asyncio.gather(*calls, return_exceptions=True)
        errors = [r for r in results if isinstance(r, BaseException)]
        lost = [e for e in errors if isinstance(e, WorkerLost)]
        for error in (*lost, *errors):
            raise error
        first: Any = results[0]
        return Outcome(*first)

    async def call(self, method: str, *arguments: Any) -> Any:
        """All ranks together (they may communicate); rank 0's value counts."""
        return (await self._all(method, *arguments, seconds=self._deadlines.transition))[0]

    async def died(self, peer: str) -> None:
        """Told at once, also while a collective blocks."""
        await self._all("died", peer, seconds=self._deadlines.control, concurrency_group=CONTROL)

    async def status(self) -> list[Status]:
        """Answered also while an action runs."""
        seconds = self._deadlines.control
        return await self._all("status", seconds=seconds, concurrency_group=CONTROL)

    async def kill(self) -> None:
        """End all ranks."""
        seconds = self._deadlines.control
        await asyncio.gather(*(self._cluster.kill(r.name, seconds) for r in self.recipes))

    async def respawn(self) -> None:
        """Start all ranks anew."""
        self.start()
        await self.setup()


class RayData:
    """The data worker in a :class:`Cluster`."""

    name = "data"

    def __init__(self, cluster: Cluster, deadlines: DeadlineConfig) -> None:
        self._cluster, self._deadlines = cluster, deadlines
        self._evaluation: dict[int, dict[str, list[Any]]] = {}

    async def _call(self, method: str, *arguments: Any) -> Any:
        seconds = self._deadlines.action
        return await self._cluster.call(self.name, method, *arguments, seconds=seconds)

    async def draw(self, prompts: int, copies: int, shards: int) -> list[Any]:
        """References to the step's samples."""
        return self._cluster.spread(self.name, "draw", prompts, copies, shards, returns=shards)

    async def evaluation(self, shards: int) -> Mapping[str, list[Any]]:
        """References to the held-out sets; they never change, so they are asked for once."""
        if shards not in self._evaluation:
            names: list[str] = await self._call("evaluation_sets")
            self._evaluation[shards] = {
                n: self._cluster.spread(self.name, "evaluation", n, shards, returns=shards)
                for n in names
            }
        return self._evaluation[shards]

    async def score(self, payloads: list[Any]) -> Outcome:
        """A reference to the scored trajectories, and means."""
        seconds = self._deadlines.action
        return await self._cluster.outcome(self.name, "score", *payloads, seconds=seconds)

    async def warmup_pairs(self) -> Any:
        """A reference to prompts and answers in tokens."""
        return self._cluster.spread(self.name, "warmup_pairs", returns=1)[0]

    async def model(self) -> Path:
        """The folder of the run's model."""
        return Path(await self._call("model"))

    async def state(self) -> dict[str, Any]:
        """The position in the data."""
        return dict(await self._call("state"))

    async def restore(self, state: Mapping[str, Any]) -> None:
        """Go back to a position."""
        await self._call("restore", state)


def _exists(pid: int) -> bool:
    """Whether a process runs; a zombie does not, and one on another node can't be seen."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return fields[0] not in ("Z", "X")


def _signal(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _last_line(error: Exception) -> str:
    """Ray ends its story with the cause."""
    lines = str(error).partition("Some common causes")[0].strip().splitlines()
    return lines[-1].strip() if lines else type(error).__name__
