"""What a process holds of a device, measured, and who in it holds what it should not."""

from __future__ import annotations

import functools
import gc
import importlib.util
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fsm_trainer.machine.errors import MemoryHeld

# What one block of the allocator may keep for a few live bytes, and a context may grow by.
SLACK = 64 << 20
# So many of the tensors that are left are told.
_TOLD = 8


class Meter:
    """Measures that a sleeper gave its device back.

    What can't be given back, the context and what libraries keep, is the least that was ever seen
    with all tensors gone. ``used`` gives the bytes that this process has on the device.
    """

    def __init__(self, owner: str, device: torch.device, used: Callable[[], int]) -> None:
        self._owner, self._device, self._used = owner, device, used
        self._least: int | None = None

    def check(self, settled: bool, hollow: int = 0) -> int:
        """The bytes that are left, with the tensors and groups freed.

        Until a first step has loaded kernels and libraries, ``settled``, nothing is learnt from it.
        ``hollow`` are the bytes of tensors that look as before but have no memory now.

        Raises:
            MemoryHeld: more than 64 MiB over what can't be given back.
        """
        left, bound = self._used(), self._bound(hollow)
        if left > bound:
            gc.collect()  # an autograd graph or a traceback that refers to itself
            if self._device.type == "cuda":
                torch.cuda.empty_cache()
            left, bound = self._used(), self._bound(hollow)
        if left > bound:
            told = "; ".join(_holders(self._device)) or "no tensor, so a library or a process group"
            raise MemoryHeld(
                f"{self._owner} sleeps with {left:,} bytes on {self._device}, where {bound:,} were "
                f"expected at most. Still held: {told}. Drop these references at the end of a step"
            )
        if settled:
            self._least = left if self._least is None else min(self._least, left)
        return left

    def _bound(self, hollow: int) -> int:
        if self._least is not None:
            return self._least + SLACK
        tensors = sum(size for size, _ in _tensors(self._device))
        return self._used() - (tensors - hollow) + SLACK


def process_bytes() -> int:
    """What this process has on its device, by the driver.

    Where that can't tell processes apart, what torch's allocator has: neither context nor libraries
    are in it. Which of the two it is doesn't change, or else one would be measured by the other.
    """
    return _own() if _told_apart() else int(torch.cuda.memory_reserved())


@functools.cache
def _told_apart() -> bool:
    return _own() > 0


def _own() -> int:
    if importlib.util.find_spec("pynvml") is None:
        return 0
    import pynvml

    listed = pynvml.nvmlDeviceGetComputeRunningProcesses(_handle())
    return sum(one.usedGpuMemory or 0 for one in listed if one.pid == os.getpid())


@functools.cache
def _handle() -> Any:
    import pynvml

    pynvml.nvmlInit()
    return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties().uuid}")


def _tensors(device: torch.device) -> Iterator[tuple[int, torch.Tensor]]:
    """The bytes of each storage on the device that some tensor of this process refers to."""
    seen = set[int]()
    for found in gc.get_objects():
        if issubclass(type(found), torch.Tensor) and found.device.type == device.type:
            storage = found.untyped_storage()
            if storage.nbytes() and storage._cdata not in seen:
                seen.add(storage._cdata)
                yield storage.nbytes(), found


def _holders(device: torch.device) -> list[str]:
    largest = sorted(_tensors(device), key=lambda one: one[0], reverse=True)
    told = []
    for size, tensor in largest[:_TOLD]:
        owners = sorted({type(owner).__qualname__ for owner in gc.get_referrers(tensor)})
        told.append(f"{size:,} bytes, {tensor.dtype} {list(tensor.shape)} in {', '.join(owners)}")
    return told
