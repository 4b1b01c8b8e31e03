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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import ray
import structlog
from ray.exceptions import RayActorError, RaySystemError, RayTaskError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from fsm_trainer.machine import errors
from fsm_trainer.runtime.config import ClusterConfig
from fsm_trainer.runtime.logs import Logs
from fsm_trainer.runtime.port import Outcome

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
    gpus: float = 0.0


class _Process:
    """A host in a Ray actor: its imports come with the process, its making with ``setup``.

    So all processes import side by side, however they are made.
    """

    def __init__(self, name: str, host: str, path: Sequence[str], run_dir: Path) -> None:
        sys.path.extend(entry for entry in path if entry not in sys.path)
        self._logs = Logs(run_dir, worker=name)
        self._class = resolve_name(host)
        self._class.prepare()
        self._host: Any = None

    def where(self) -> tuple[str, int]:
        return ray.get_runtime_context().get_node_id(), os.getpid()

    def setup(self, arguments: Mapping[str, Any]) -> None:
        self._host = self._class(**arguments)

    def call(self, method: str, *arguments: Any) -> Any:
        # Ray resolves references only where they are arguments of their own.
        return attrgetter(method)(self._host)(*arguments)

    def deal(self, method: str, *arguments: Any) -> Any:
        """As `call`, for several payloads; Ray takes a single one as it is, not in a list."""
        parts = self.call(method, *arguments)
        return parts[0] if len(parts) == 1 else parts


@dataclass
class _Handle:
    """A process that was started."""

    actor: Any
    pid: int | None = None
    """Known where it runs on this node, once it has imported; else Ray's word that it is dead must
    do. What only imports holds nothing."""


class Cluster:
    """The run's Ray; end it with :meth:`close`, which leaves no process behind."""

    def __init__(
        self, config: ClusterConfig, bundles: Sequence[Mapping[str, float]], run_dir: Path
    ) -> None:
        self._run_dir, self._folder = run_dir, ""
        self._handles: dict[str, _Handle] = {}
        logging.getLogger("ray").setLevel(logging.ERROR)
        cpus = sum(bundle.get("CPU", 0) for bundle in bundles)
        remote: Any = ray.remote
        self._actor = remote(concurrency_groups={CONTROL: CONTROL_THREADS})(_Process)
        self._bundles = [dict(bundle) for bundle in bundles]
        ours: dict[str, Any] = {}
        if config.address is None:
            # Ray's sockets live in there, and a socket's path is limited to 107 bytes.
            self._folder = tempfile.mkdtemp(prefix="fsm-ray-")
            ours = {
                "num_cpus": int(cpus),
                "num_gpus": config.gpus,
                "include_dashboard": False,
                "_temp_dir": self._folder,
                "object_store_memory": OBJECT_STORE_BYTES,
            }
        address = config.address or "local"
        try:
            ray.init(address=address, log_to_driver=False, configure_logging=False, **ours)
            self._node = ray.get_runtime_context().get_node_id()
            self._group = placement_group(self._bundles, strategy="PACK")
        except BaseException:  # a Ctrl-C too must leave nothing
            ray.shutdown()
            self._delete_folder()
            raise

    @property
    def host(self) -> str:
        """The address of this node, as the others reach it."""
        address: Any = ray.util.get_node_ip_address
        return str(address())

    async def reserve(self, seconds: float) -> None:
        """Reserve all devices at once; raises CapabilityMissing where they don't exist."""
        try:
            await asyncio.wait_for(self._group.ready(), seconds)
        except TimeoutError:
            resources: Any = ray.cluster_resources
            have = resources()
            need = {k: sum(b.get(k, 0) for b in self._bundles) for k in ("CPU", "GPU")}
            raise errors.CapabilityMissing(
                f"the cluster did not grant {need} in {seconds:g} s; it has "
                f"{ {k: have.get(k, 0) for k in need} }. Fewer workers or ranks, or more devices"
            ) from None

    def start(self, recipe: Recipe) -> None:
        """Start a process and its imports; :meth:`setup` makes its host."""
        strategy = PlacementGroupSchedulingStrategy(
            placement_group=self._group, placement_group_bundle_index=recipe.bundle
        )
        actor = self._actor.options(
            num_cpus=1.0, num_gpus=recipe.gpus, scheduling_strategy=strategy
        ).remote(recipe.name, recipe.host, [p for p in sys.path if p], self._run_dir)
        self._handles[recipe.name] = _Handle(actor)

    async def setup(self, recipe: Recipe, seconds: float) -> None:
        """Make a process's host and wait until it can be called; its imports have ``seconds`` too.

        Its pid is asked for first: a host that is never done must still be seen dead.
        """
        handle = self._handles[recipe.name]
        node, pid = await self._await(recipe.name, handle.actor.where.remote(), seconds)
        handle.pid = pid if node == self._node else None
        made = handle.actor.setup.remote(recipe.arguments)
        await self._await(recipe.name, made, seconds)
        log.debug("a process is up", worker=recipe.name, pid=pid)

    async def call(
        self, name: str, method: str, *arguments: Any, seconds: float, **how: Any
    ) -> Any:
        """Call a method of a host, or of a part of it (``lifecycle.undo``), and wait for its value.

        Raises WorkerLost when the process is gone or does not answer within ``seconds``.
        """
        actor = self._handles[name].actor
        ref = actor.call.options(**how).remote(method, *arguments)
        return await self._await(name, ref, seconds)

    def spread(self, name: str, method: str, *arguments: Any, returns: int) -> list[Any]:
        """Call a method that gives several payloads; references to them come back at once."""
        actor = self._handles[name].actor
        refs = actor.deal.options(num_returns=returns).remote(method, *arguments)
        return list(refs) if returns > 1 else [refs]

    def payload(self, name: str, method: str, *arguments: Any) -> Any:
        """Call a method that gives one payload; the reference to it comes back at once."""
        return self._handles[name].actor.call.remote(method, *arguments)

    async def outcome(self, name: str, method: str, *arguments: Any, seconds: float) -> Outcome:
        """Call a method that gives a payload and a value; the payload stays where it is."""
        actor = self._handles[name].actor
        payload, value = actor.call.options(num_returns=2).remote(method, *arguments)
        return Outcome(payload, await self._await(name, value, seconds))

    async def _await(self, name: str, ref: Any, seconds: float) -> Any:
        try:
            return await asyncio.wait_for(asyncio.wrap_future(ref.future()), seconds)
        except TimeoutError:
            raise errors.WorkerLost(f"{name} did not answer within {seconds:g} s") from None
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, errors.FsmError):
                raise cause from None
            log.debug("a worker raised", worker=name, traceback=str(error))
            raise errors.ActionFailed(
                f"{name} raised {type(cause).__name__}: {cause} (its traceback stands in the log)"
            ) from None
        except RaySystemError as error:
            raise errors.ActionFailed(f"{name}: Ray could not carry the answer: {error}") from None
        except RayActorError as error:
            log.debug("a process is gone", worker=name, story=str(error))
            raise errors.WorkerLost(f"{name}'s process is gone: {_last_line(error)}") from None

    async def end(self, name: str, seconds: float) -> None:
        """Let a process end by itself, at once, and see it dead; as :meth:`kill` it where it won't.

        Ray tells people of a process that is killed, as of one that crashed.
        """
        with suppress(RayActorError, TimeoutError):
            ended = self._handles[name].actor.__ray_terminate__.remote()
            await asyncio.wait_for(asyncio.wrap_future(ended.future()), seconds)
        await self.kill(name, seconds)

    async def kill(self, name: str, seconds: float) -> None:
        """End a process and see it dead; raises DeadlineExceeded if it can't be seen."""
        handle = self._handles.get(name)
        if handle is None:
            return
        ray.kill(handle.actor, no_restart=True)
        deadline = time.monotonic() + seconds
        while handle.pid is not None and not _gone(handle.pid):
            if time.monotonic() > deadline:
                raise errors.DeadlineExceeded(
                    f"{name} (process {handle.pid}) was killed but is still there after "
                    f"{seconds:g} s; its claim on the device stays"
                )
            await asyncio.sleep(0.02)
        del self._handles[name]

    def close(self) -> None:
        """End every process, the placement, and Ray where it was ours."""
        pids = [h.pid for h in self._handles.values() if h.pid is not None]
        for handle in self._handles.values():
            ray.kill(handle.actor, no_restart=True)
        self._handles.clear()
        remove_placement_group(self._group)
        ray.shutdown()
        deadline = time.monotonic() + CLOSE_SECONDS
        while pids and time.monotonic() < deadline:
            pids = [pid for pid in pids if not _gone(pid)]
            time.sleep(0.02)
        if pids:
            log.warning("processes of the run were killed and are still there", pids=pids)
        self._delete_folder()

    def _delete_folder(self) -> None:
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)


OBJECT_STORE_BYTES = 512 * 2**20
CLOSE_SECONDS = 10.0


def _gone(pid: int) -> bool:
    """Whether a process has ended, zombies too; kills it again if it hasn't."""
    try:
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("Z", "X"):
            return True
        os.kill(pid, signal.SIGKILL)
    except (FileNotFoundError, ProcessLookupError):
        return True
    return False


def _last_line(error: Exception) -> str:
    """Ray ends its story with the cause."""
    lines = str(error).partition("Some common causes")[0].strip().splitlines()
    return lines[-1].strip() if lines else type(error).__name__
