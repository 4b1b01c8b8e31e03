"""Training groups that come and go under a DeepSpeed engine that stays.

DeepSpeed keeps every process group that it made for as long as its engine lives, so a world that
was destroyed and rebuilt leaves it with dead handles. All its communication passes one object, its
communication backend. Ours hands out stand-ins instead of groups and resolves them at each call:
the engine keeps the stand-ins, :meth:`TrainingGroups.open` puts living groups behind them.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import structlog
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from fsm_trainer.groups.backend import can_suspend, resume, suspend
from fsm_trainer.groups.rendezvous import Address, connect, epoch_prefix
from fsm_trainer.machine.errors import CapabilityMissing, LeaseExpired, PeerLost

log = structlog.get_logger(__name__)


class _Group:
    """What DeepSpeed holds in place of a process group; ``ranks`` None is the world."""

    def __init__(self, owner: TrainingGroups, ranks: tuple[int, ...] | None) -> None:
        self.owner, self.ranks = owner, ranks
        self.live: Any = None

    def resolve(self) -> Any:
        """The living process group; raises :class:`LeaseExpired` between two epochs."""
        if self.live is None or not self.owner.is_open:
            raise LeaseExpired(self.owner.link, self.owner.epoch, "the training groups are closed")
        return self.live

    def size(self) -> int:
        """Ranks in the group, asked between two epochs too."""
        return self.owner.world_size if self.ranks is None else len(self.ranks)

    def rank(self) -> int:
        """This process's rank in the group, -1 outside of it; asked between two epochs too."""
        if self.ranks is None:
            return self.owner.rank
        return self.ranks.index(self.owner.rank) if self.owner.rank in self.ranks else -1


class TrainingGroups:
    """All process groups of one trainer rank: back at each :meth:`open`, in creation order.

    ``role`` and the epoch prefix the keys on the run's one store. ``timeout`` (seconds) bounds the
    rendezvous and every collective; over NCCL torch ends the process that waits longer. One
    instance a process has open groups at a time, because torch has one world. Groups that were
    closed are built anew, or with ``suspends`` only resumed if every rank kept the same ones;
    either way nobody can use them in between.
    """

    def __init__(
        self,
        store: Address,
        role: str,
        rank: int,
        world_size: int,
        timeout: float,
        backend: str,
        suspends: bool = False,
    ) -> None:
        self.link = f"train/{role}"
        self.epoch = -1
        self.is_open, self.suspends = False, suspends
        self._built: int | None = None  # the epoch that the groups which are good come from
        self._kept: int | None = None  # the same, while they are suspended
        self.rank, self.world_size = rank, world_size
        self._address = store
        self._timeout, self._backend = timedelta(seconds=timeout), backend
        self.world = _Group(self, None)
        self._made: list[_Group] = []
        self._meeting: Any = None  # the ranks' keys under the epoch

    def open(self, epoch: int) -> None:
        """Meet the other ranks under ``epoch``; raises :class:`PeerLost` when one doesn't come."""
        if dist.is_initialized() and self._kept is None:
            raise CapabilityMissing(
                f"{self.link} cannot open epoch {epoch}: torch.distributed is already initialized "
                "in this process, which can hold one trainer at a time. Close the other first"
            )
        install()
        self.epoch = epoch
        try:
            self._open()
        except (RuntimeError, ValueError) as error:
            self._destroy()
            raise PeerLost(
                f"rank {self.rank} of {self.link} waited {self._timeout.total_seconds():g} s for "
                f"{self.world_size} ranks at {self._address} under epoch {epoch}: {error}"
            ) from error

    @contextmanager
    def guard(self, doing: str) -> Iterator[None]:
        """Tell a lost peer from other errors: what torch raises for one becomes PeerLost."""
        try:
            yield
        except RuntimeError as error:
            # gloo has no exception of its own; its messages name its source files.
            if isinstance(error, dist.DistError) or "gloo" in str(error):
                self._built = None
                raise PeerLost(
                    f"rank {self.rank} of {self.link} lost a peer in {doing} (epoch "
                    f"{self.epoch}, deadline {self._timeout.total_seconds():g} s): {error}"
                ) from error
            raise

    @contextmanager
    def together(self, doing: str) -> Iterator[None]:
        """Something that all ranks do once, or none: PeerLost where it failed on another rank."""
        with self.guard(doing):
            try:
                yield
                told = self._exchange(doing, "done")
            except BaseException:
                with suppress(RuntimeError):  # of a store that is gone: the others wait in vain
                    self._meeting.set(f"{doing}/{self.rank}", "failed")
                raise
        if told != {b"done"}:
            raise PeerLost(
                f"rank {self.rank} of {self.link}: another rank failed in {doing} (epoch "
                f"{self.epoch}); its own error says why. All of them do it again"
            )

    def close(self) -> None:
        """Let nobody use the groups, and destroy or suspend them; those of a lost peer are no good.

        After destroying torch has none registered.
        """
        if not self.suspends or self._built is None:
            return self._destroy()
        self.is_open, self._kept = False, self._built
        for group in (self.world, *self._made):
            suspend(group.live)

    def _destroy(self) -> None:
        self.is_open, self._kept, self._built = False, None, None
        for group in (self.world, *self._made):
            group.live = None
        if dist.is_initialized():
            dist.destroy_process_group()

    def forget(self) -> None:
        """Destroy, and drop what DeepSpeed still keeps of these groups; the engine is dead then."""
        self._destroy()
        self._meeting = None
        self._made.clear()
        if _backend is not None and _backend.groups is self:
            _forget_references()
            _backend.groups = None

    def new(self, ranks: tuple[int, ...]) -> _Group:
        """A stand-in for a new group of these ranks; called by DeepSpeed, on all ranks alike."""
        group = _Group(self, ranks)
        self._attach(group)
        self._made.append(group)
        return group

    def _open(self) -> None:
        store = connect(self._address, self._timeout.total_seconds(), self.link)
        self._meeting = PrefixStore(epoch_prefix(self.link, self.epoch), store)
        if self.suspends and self._all_kept():
            for group in (self.world, *self._made):
                resume(group.live)
            self.is_open, self._kept = True, None
            return
        self._destroy()
        if self._backend == "nccl":
            # torch ends a process whose collective is late, but four times this many milliseconds
            # later: by default a minute.
            os.environ.setdefault("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "1000")
        hook = sys.excepthook
        dist.init_process_group(
            self._backend,
            store=self._meeting,
            rank=self.rank,
            world_size=self.world_size,
            timeout=self._timeout,
        )
        sys.excepthook = hook  # torch wraps it once more at each start, and never unwraps it
        self.is_open, self._built = True, self.epoch
        self.world.live = dist.group.WORLD
        _use(self)
        for group in self._made:
            self._attach(group)

    def _all_kept(self) -> bool:
        """Whether all ranks are here and kept the groups of one epoch: a new process has none."""
        return len(self._exchange("kept", self._kept)) == 1 and self._kept is not None

    def _exchange(self, what: str, told: object) -> set[bytes]:
        """What the ranks say of it under this epoch; all of them must, within the timeout."""
        keys = [f"{what}/{rank}" for rank in range(self.world_size)]
        self._meeting.set(keys[self.rank], str(told))
        self._meeting.wait(keys, self._timeout)
        return {self._meeting.get(key) for key in keys}

    def _attach(self, group: _Group) -> None:
        ranks = list(group.ranks or ())
        group.live = dist.new_group(ranks, timeout=self._timeout, backend=self._backend)


def suspended(policy: str, backend: str, ranks: int, owner: str) -> bool:
    """Whether a role's groups are suspended rather than destroyed: ``offload.groups``.

    Raises CapabilityMissing where that is asked for and NCCL is too old.
    """
    able = backend != "nccl" or can_suspend()
    if policy == "suspend" and not able:
        raise CapabilityMissing(
            f"{owner}: offload.groups: suspend needs NCCL 2.29.7 or newer, and an older one is "
            "loaded. Preload a newer libnccl.so.2, or write offload.groups: destroy"
        )
    if policy != "auto":
        return policy == "suspend"
    # Measured on H200s, sleep, wake and the first collective: one rank 0.52 s destroyed and
    # 0.33 s suspended; two 0.83 and 0.66 s, too little to keep what a peer's death breaks.
    chosen = backend == "nccl" and able and ranks == 1
    why = {"backend": backend, "nccl_can": able, "ranks": ranks}
    log.info("groups of a sleeper", worker=owner, suspended=chosen, **why)
    return chosen


_backend: Any = None
"""DeepSpeed's communication backend is one a process, hence a module's variable."""


@functools.cache
def install() -> None:
    """Import DeepSpeed such that it neither builds C++ at run time nor talks to a missing device.

    Must be the process's first import of DeepSpeed, which decides both while it is imported.
    """
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # DeepSpeed's launcher sets it; under Ray each process sees its own device as number 0.
    os.environ.setdefault("LOCAL_RANK", "0")
    import deepspeed
    from deepspeed.utils import logger

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    logger.setLevel(logging.WARNING)
    # DeepSpeed's names for collectives are the older of two that torch has.
    warnings.filterwarnings("ignore", "`torch.distributed.", FutureWarning)


def _use(groups: TrainingGroups) -> None:
    """Make ``groups`` what DeepSpeed communicates through."""
    global _backend
    from deepspeed.comm import comm

    if _backend is None:
        _backend = _backend_class()("gloo", groups._timeout, None)
    if _backend.groups is not groups:
        _forget_references()
    _backend.groups = groups
    comm.cdb = _backend


def _forget_references() -> None:
    from deepspeed.utils import groups as deepspeed_groups

    deepspeed_groups._release_process_group_references()


def _resolving(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        args = tuple(a.resolve() if isinstance(a, _Group) else a for a in args)
        kwargs = {k: v.resolve() if isinstance(v, _Group) else v for k, v in kwargs.items()}
        return method(self, *args, **kwargs)

    return call


def _backend_class() -> Callable[..., Any]:
    """DeepSpeed's torch backend with every call resolving stand-ins first."""
    from deepspeed.comm.torch import TorchBackend

    class Reloadable(TorchBackend):  # type: ignore[misc]
        groups: TrainingGroups | None = None

        def init_process_group(self, *_: Any) -> None:
            self.using_mpi = False  # the world is ours to open, and it is open

        def new_group(self, ranks: Any) -> _Group:
            if self.groups is None:
                raise LeaseExpired("train", -1, "no training groups are open in this process")
            return self.groups.new(tuple(ranks))

        # Asked while closed too: when DeepSpeed prints, moves its states, and cleans up.
        def is_initialized(self) -> bool:
            return self.groups is not None

        def get_rank(self, group: _Group | None = None) -> int:
            if group is None and self.groups is not None:
                return self.groups.rank
            return group.rank() if isinstance(group, _Group) else int(dist.get_rank(group))

        def get_world_size(self, group: _Group | None = None) -> int:
            if group is None and self.groups is not None:
                return self.groups.world_size
            return group.size() if isinstance(group, _Group) else int(dist.get_world_size(group))

        def get_world_group(self) -> _Group | None:
            return None if self.groups is None else self.groups.world

    for name, method in inspect.getmembers(TorchBackend, inspect.isfunction):
        if not name.startswith("_") and name not in vars(Reloadable):
            setattr(Reloadable, name, _resolving(method))
    return Reloadable
