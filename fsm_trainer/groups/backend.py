"""The one place that calls torch's communication backends.

The groups are built directly and never registered with ``torch.distributed``: no default group
is needed, none can be mistaken for it, and nothing is left behind under a name.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed
from torch.distributed.distributed_c10d import PrefixStore

from fsm_trainer.machine.errors import CapabilityMissing

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store, Work

    from fsm_trainer.groups.membership import Membership


class Group:
    """A communicator over all members, ranks 0 to ``size`` - 1: gloo's, over TCP between CPUs.

    Operations are started only: each returns the work in flight, and :meth:`poll` waits for it.
    """

    def __init__(self, backend: Any) -> None:
        self.backend = backend

    def broadcast(self, tensor: torch.Tensor, source: int) -> Work:
        """Start overwriting ``tensor`` everywhere with that of rank ``source``."""
        options = distributed.BroadcastOptions()
        options.rootRank, options.rootTensor = source, 0
        work: Work = self.backend.broadcast([tensor], options)
        return work

    def all_reduce(self, tensor: torch.Tensor) -> Work:
        """Start summing ``tensor`` over all members, in place."""
        work: Work = self.backend.allreduce([tensor], distributed.AllreduceOptions())
        return work

    def barrier(self) -> Work:
        """Start waiting for all members."""
        return self.all_reduce(torch.ones(1))

    def first(self) -> Work:
        """Start the first operation, with which backends pay for what they do lazily."""
        return self.barrier()

    @staticmethod
    def poll(work: Work, seconds: float) -> bool:
        """Wait at most ``seconds``; whether the work is done. Raises the backend's error."""
        try:
            work.wait(timedelta(seconds=seconds))
        except RuntimeError:
            if not work.is_completed():
                return False
            # It may have ended just after the wait did: this returns at once, or raises its error.
            work.wait()
        return True

    def orders(self, work: Work) -> bool:
        """Whether what is queued from now on comes after the work, without waiting for it here."""
        return False

    def abort(self) -> None:
        """End what is in flight, where the backend can; callable from any thread.

        Gloo's own abort returns and unblocks nothing: an operation in flight ends when its peer
        answers, or with the group's timeout, on gloo's thread.
        """


class NcclGroup(Group):
    """Between CUDA devices; what lies on the CPU goes over gloo.

    So a word takes no kernel: where two processes share a device, each would wait for a time slice.
    """

    def __init__(self, backend: Any, words: Group, device: torch.device) -> None:
        super().__init__(backend)
        self._words, self._device = words, device

    def broadcast(self, tensor: torch.Tensor, source: int) -> Work:
        if tensor.is_cuda:
            return super().broadcast(tensor, source)
        return self._words.broadcast(tensor, source)

    def all_reduce(self, tensor: torch.Tensor) -> Work:
        return super().all_reduce(tensor) if tensor.is_cuda else self._words.all_reduce(tensor)

    def first(self) -> Work:
        # What buckets take; a megabyte, because NCCL has another way for less.
        return self.broadcast(torch.zeros(2**20, dtype=torch.uint8, device=self._device), 0)

    @staticmethod
    def poll(work: Work, seconds: float) -> bool:
        # Not work.wait(timeout): on time-out it aborts the communicator and may end the process.
        began = time.monotonic()
        while not work.is_completed():
            waited = time.monotonic() - began
            if waited > seconds:
                return False
            # A bucket takes a millisecond over NVLink: a nap of a fifth would show.
            time.sleep(0 if waited < 0.005 else 0.0002)
        work.wait()
        return True

    def orders(self, work: Work) -> bool:
        # Not wait(): with TORCH_NCCL_BLOCKING_WAIT that one blocks, without our deadline.
        work.synchronize()
        return True

    def abort(self) -> None:
        self.backend.abort()


def build(member: Membership, store: Store, device: str, interface: str) -> Group:
    """Build the group whose members meet in ``store``; blocks until all are connected.

    ``interface`` is the IP address that gloo binds. Raises RuntimeError (torch's) when a member
    doesn't come, CapabilityMissing when torch lacks the backend.
    """
    target = torch.device(device)
    if member.backend == "gloo":
        return Group(_gloo(member, store, interface))
    if not distributed.is_nccl_available() or target.type != "cuda":
        raise CapabilityMissing(
            f"backend 'nccl' on device {device!r}: it needs a CUDA device and a torch that was "
            "built with NCCL; set the link's backend to 'gloo'"
        )
    words = Group(_gloo(member, PrefixStore("words", store), interface))
    return NcclGroup(_nccl(member, store, target), words, target)


def can_suspend() -> bool:
    """Whether the NCCL that is loaded gives memory back and keeps its communicators."""
    version = ctypes.c_int()
    library: Any = ctypes.CDLL(None)
    try:
        library.ncclGetVersion(ctypes.byref(version))
    except AttributeError:  # torch has none, or keeps it to itself
        return False
    return version.value >= _NCCL_SUSPENDS


def suspend(group: Any) -> None:
    """Have a registered group's communicator give its memory back; gloo has none on a device."""
    _nccl_call("ncclCommSuspend", group, _SUSPEND_MEMORY)


def resume(group: Any) -> None:
    """Take the memory again; all members together."""
    _nccl_call("ncclCommResume", group)


# 2.29.7, as ncclGetVersion writes it; the flag is NCCL_SUSPEND_MEM.
_NCCL_SUSPENDS, _SUSPEND_MEMORY = 22907, 1


def _nccl_call(name: str, group: Any, *arguments: int) -> None:
    """Call NCCL itself: torch 2.13 is the first to have these."""
    if distributed.get_backend(group) != "nccl":
        return
    backend = group._get_backend(torch.device("cuda"))
    if not backend._is_initialized():  # NCCL makes a communicator for the first collective
        return
    torch.cuda.synchronize()
    communicator = ctypes.c_void_p(backend._comm_ptr())
    code = getattr(ctypes.CDLL(None), name)(communicator, *arguments)
    if code:
        raise RuntimeError(f"{name} answers {code}")


@cache
def _gloo_device(interface: str) -> Any:
    # One listener and one event loop for the process: making and ending them costs 10 ms of every
    # reconnect, with the interpreter's lock held.
    gloo: Any = distributed.ProcessGroupGloo
    return gloo.create_device(hostname=interface)


def _gloo(member: Membership, store: Store, interface: str) -> Any:
    gloo: Any = distributed.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [_gloo_device(interface)]
    options._timeout = timedelta(seconds=member.timeout)
    options._threads = 1
    return gloo(store, member.rank, member.size, options)


# NCCL's watchdog ends the whole process when an operation is late. The lease's deadline and abort
# come long before this one.
_WATCHDOG_SLACK = 600.0


def _nccl(member: Membership, store: Store, device: torch.device) -> Any:
    nccl: Any = distributed.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timedelta(seconds=member.timeout + _WATCHDOG_SLACK)
    if device.index is not None:
        torch.cuda.set_device(device)
    with _errors_left_to_the_lease():
        return nccl(store, member.rank, member.size, options)


_environment_lock = threading.Lock()


@contextmanager
def _errors_left_to_the_lease() -> Iterator[None]:
    # torch reads this when the group is built, and has no option for it: 0 is "don't end the
    # process on a communication error". It is put back, because training groups read it too.
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    with _environment_lock:
        before = os.environ.get(name)
        os.environ[name] = "0"
        try:
            yield
        finally:
            if before is None:
                del os.environ[name]
            else:
                os.environ[name] = before
