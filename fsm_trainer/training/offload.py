"""Taking tensors off their device and bringing them back, under every view that they have.

What is freed is the *storage*: it is resized to nothing and later back, so parameters, flat
buffers and all slices of them stay the objects that an optimizer or DeepSpeed holds.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from io import BufferedRandom
from pathlib import Path
from typing import Any

import torch

from fsm_trainer.machine.errors import ActionFailed, CapabilityMissing, SelfCheckFailed
from fsm_trainer.sync.checksums import raw_bytes
from fsm_trainer.training.config import Target

# Large enough to saturate a disk or a host link, small enough not to matter beside a model.
_STAGE_BYTES = 64 << 20

Storages = Sequence[torch.UntypedStorage]


class _HostCopy:
    """One buffer in host memory; pinned if the storages live on a GPU, which is paid once.

    It is registered with CUDA, because torch's own pinned memory takes the next power of two and
    is never given back; and asks for huge pages, which are pinned in two thirds of the time (on an
    H200 1.9 s for 16 GiB). The device keeps 2 MiB of tables for each GiB, however it was pinned.
    """

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._pinned = False

    def write(self, storages: Iterator[torch.UntypedStorage]) -> Storages:
        """Copy each as soon as it is found, so that the search hides behind the copies."""
        taken, end = list[torch.UntypedStorage](), 0
        for storage in storages:
            taken.append(storage)
            start, end = end, end + storage.nbytes()
            if end > self._buffer.numel():
                taken.extend(storages)
                self._reserve(taken)
                return self.write(iter(taken))
            self._buffer[start:end].copy_(bytes_of(storage), non_blocking=True)
        _synchronize(taken)
        return taken

    def read(self, storages: Storages) -> None:
        for part, data in self._pairs(storages):
            data.copy_(part, non_blocking=True)
        _synchronize(storages)

    def close(self) -> None:
        if self._pinned:
            _cuda("cudaHostUnregister", self._buffer.data_ptr())
        self._buffer, self._pinned = torch.empty(0, dtype=torch.uint8), False

    def _reserve(self, storages: Storages) -> None:
        _synchronize(storages)  # copies into the old one are in flight
        self.close()
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # what is shared has small pages
        memory = mmap.mmap(-1, sum(s.nbytes() for s in storages), private)
        with suppress(OSError):  # a kernel without huge pages: pinning only takes longer
            memory.madvise(mmap.MADV_HUGEPAGE)
        self._buffer = torch.frombuffer(memory, dtype=torch.uint8)
        if any(s.device.type == "cuda" for s in storages):
            self._buffer.zero_()  # with all threads: registering would fault the pages in with one
            _cuda("cudaHostRegister", self._buffer.data_ptr(), self._buffer.numel(), 0)
            self._pinned = True

    def _pairs(self, storages: Storages) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        sizes = [storage.nbytes() for storage in storages]
        parts = torch.split(self._buffer[: sum(sizes)], sizes)
        return zip(parts, map(bytes_of, storages), strict=True)


class _DiskCopy:
    """One file, written over at each sleep; its pages are the kernel's, not the process's."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def write(self, storages: Iterator[torch.UntypedStorage]) -> Storages:
        taken = list(storages)
        with self._from_the_start() as file:
            for data in _chunks(taken):
                file.write(raw_bytes(data))
        return taken

    def read(self, storages: Storages) -> None:
        with self._from_the_start() as file:
            for data in _chunks(storages):
                host = data if data.device.type == "cpu" else torch.empty_like(data, device="cpu")
                if file.readinto(raw_bytes(host)) < host.numel():
                    raise ActionFailed(
                        f"{self._path} ends at byte {file.tell()}: something else cut the bank's "
                        "file. Restart the worker from its last checkpoint"
                    )
                if host is not data:
                    data.copy_(host)

    def close(self) -> None:
        os.close(self._descriptor)
        self._path.unlink(missing_ok=True)

    def _from_the_start(self) -> BufferedRandom:
        # A new object each time: a buffer that outlives a read would hide what changed on disk.
        file = open(self._descriptor, "r+b", closefd=False)  # noqa: SIM115
        file.seek(0)
        return file


class Bank:
    """Named copies of storages off their device: a file each, or a buffer in host memory each.

    ``sleep`` / ``wake`` move storages out and in; ``keep`` / ``load`` copy without freeing, for a
    second set of weights that shares the device memory of the first. Contents are bit-equal. A
    ``tight`` one has no copy of what woke: less host memory, and each sleep pins anew.
    """

    def __init__(self, target: Target, scratch: Path, prefix: str, tight: bool = False) -> None:
        self._files, self._scratch, self._prefix = target in ("disk", "exit"), scratch, prefix
        self._tight = tight
        self.hollow = 0
        """Bytes of sleeping storages that still say that they have them."""
        self.engine: Any = None
        """What holds the optimizer."""
        self._copies: dict[str, _HostCopy | _DiskCopy] = {}
        self._sizes: dict[str, list[int]] = {}
        self._asleep: dict[str, Storages] = {}

    def region(self) -> AbstractContextManager[object]:
        """Where what shall sleep is allocated."""
        return nullcontext()

    def sleep(self, name: str, storages: Iterable[torch.UntypedStorage]) -> None:
        """Copy the storages out and free their device memory, returning it to the system."""
        self._asleep[name] = taken = self.keep(name, storages)
        _free(taken)

    def wake(self, name: str) -> None:
        """Give the storages their memory back, and their contents; all of them or none."""
        storages = self._asleep[name]
        try:
            for storage, nbytes in zip(storages, self._sizes[name], strict=True):
                storage.resize_(nbytes)
            self._copies[name].read(storages)
        except BaseException:
            _free(storages)
            raise
        del self._asleep[name]
        if self._tight:
            self._copies.pop(name).close()

    def keep(self, name: str, storages: Iterable[torch.UntypedStorage]) -> Storages:
        """Copy the storages out and leave them where they are; gives them."""
        if name not in self._copies:
            path = self._scratch / f"{self._prefix}.{name}.bank"
            self._copies[name] = _DiskCopy(path) if self._files else _HostCopy()
        taken = self._copies[name].write(iter(storages))
        self._sizes[name] = [storage.nbytes() for storage in taken]
        return taken

    def load(self, name: str, storages: Storages) -> None:
        """Overwrite the storages with a kept copy; raises SelfCheckFailed if layouts differ."""
        if [storage.nbytes() for storage in storages] != self._sizes.get(name):
            raise SelfCheckFailed(
                f"the copy {name!r} of {self._prefix} does not fit the {len(storages)} resident "
                "storages, size by size"
            )
        self._copies[name].read(storages)

    def close(self) -> None:
        """Forget every copy, and delete its file; those of a process that ended too."""
        for copy in self._copies.values():
            copy.close()
        for left in self._scratch.glob(f"{self._prefix}.*.bank"):
            left.unlink(missing_ok=True)
        self._copies.clear()
        self._asleep.clear()
        self._sizes.clear()


class StatesBank(Bank):
    """DeepSpeed moves masters and moments by itself; what it leaves goes as ever."""

    def sleep(self, name: str, storages: Iterable[torch.UntypedStorage]) -> None:
        """Move out; ``storages`` are looked for when DeepSpeed has moved its own."""
        if name == "optimizer":
            self.engine.offload()
        super().sleep(name, storages)

    def wake(self, name: str) -> None:
        """Move back, all of it or nothing."""
        super().wake(name)
        if name == "optimizer":
            try:
                self.engine.reload()
            except BaseException:
                self.sleep(name, self.engine.optimizer())
                raise


class SavedBank(Bank):
    """torch_memory_saver instead: all that was allocated in its regions goes with the weights.

    It can't tell weights from optimizer, because ZeRO puts both into buffers of its own, so they
    must sleep together. A wake that finds no room ends the process: the package's way.
    """

    def __init__(self, target: Target, scratch: Path, prefix: str, tight: bool = False) -> None:
        if importlib.util.find_spec("torch_memory_saver") is None:
            raise CapabilityMissing(
                f"{prefix}: offload.target: memory_saver needs the package torch_memory_saver, "
                "which isn't installed. Install it, or write host"
            )
        from torch_memory_saver import torch_memory_saver

        super().__init__(target, scratch, prefix, tight)
        torch_memory_saver.hook_mode = "torch"  # the other way needs a preloaded library
        self._saver = torch_memory_saver

    def region(self) -> AbstractContextManager[object]:
        """Every allocation in it belongs to the saver."""
        region: AbstractContextManager[object] = self._saver.region(enable_cpu_backup=True)
        return region

    def sleep(self, name: str, storages: Iterable[torch.UntypedStorage]) -> None:
        """Move everything out, with the weights."""
        self.hollow += sum(storage.nbytes() for storage in storages)
        if name == "weights":
            with self.region():  # its allocator may free nothing outside of one
                self._saver.pause()
                torch.cuda.empty_cache()

    def wake(self, name: str) -> None:
        """Move everything back, with the weights."""
        self.hollow = 0
        if name == "weights":
            self._saver.resume()


BANKS: Mapping[str, type[Bank]] = {"offload_states": StatesBank, "memory_saver": SavedBank}


def storages_under(*roots: object) -> Iterator[torch.UntypedStorage]:
    """The unique, non-empty storages of all tensors that the roots hold, in a stable order.

    Follows containers, tensors' own attributes, optimizers, and DeepSpeed's objects; not modules.
    """
    found, seen = set[int](), set[int]()
    stack = list(reversed(roots))
    while stack:
        item = stack.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor) and item.layout is torch.strided and not item.is_meta:
            storage = item.untyped_storage()
            if storage.nbytes() and storage._cdata not in found:
                found.add(storage._cdata)
                yield storage
        stack.extend(reversed(_held_by(item)))


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """The storage as a uint8 tensor that shares its memory."""
    empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return empty.set_(storage)


def fingerprint(tensors: Iterable[torch.Tensor]) -> str:
    """16 hex digits over the tensors' bytes and order, computed on their device.

    Two sums modulo 2^64 of the 8-byte words, one of them weighted by position: finds drift and
    swapped pieces, and is no defence against malice.
    """
    digest = hashlib.sha256()
    for tensor in tensors:
        data = tensor.detach().contiguous().view(-1).view(torch.uint8)
        for chunk in torch.split(data, _STAGE_BYTES // 8):
            whole = chunk.numel() // 8 * 8
            words = chunk[:whole].clone().view(torch.int64)
            weights = 1 + 2 * torch.arange(words.numel(), device=words.device)
            sums = (int(words.sum()), int((words * weights).sum()))
            digest.update(repr((sums, chunk[whole:].tolist())).encode())
    return digest.hexdigest()[:16]


def _held_by(item: object) -> list[Any]:
    if isinstance(item, dict):
        return [*item.keys(), *item.values()]
    if isinstance(item, (list, tuple, set, frozenset)):
        return list(item)
    if isinstance(item, torch.Tensor):
        return [*vars(item).values(), *([item.grad] if item.is_leaf else [])]
    followed = isinstance(item, torch.optim.Optimizer) or (
        type(item).__module__.startswith("deepspeed.") and not isinstance(item, torch.nn.Module)
    )
    return list(vars(item).values()) if followed else []


def _chunks(storages: Storages) -> Iterator[torch.Tensor]:
    for storage in storages:
        yield from torch.split(bytes_of(storage), _STAGE_BYTES)


def _synchronize(storages: Storages) -> None:
    if any(storage.device.type == "cuda" for storage in storages):
        torch.cuda.synchronize()


def _free(storages: Storages) -> None:
    """Free the storages, and make the allocator give the memory back to the system."""
    for storage in storages:
        storage.resize_(0)
    if any(storage.device.type == "cuda" for storage in storages):
        torch.cuda.empty_cache()
    else:
        trim()


def _cuda(name: str, *arguments: int) -> None:
    """Call CUDA's runtime; raises torch's error for what it answers."""
    runtime: Any = torch.cuda.cudart
    torch.cuda.check_error(getattr(runtime(), name)(*arguments))


def trim() -> None:
    """Return freed heap to the system, where the C library can (glibc)."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)
