"""Memory of one process that others on the same machine map: it has no name, so nothing is left.

Where processes are killed, files stay: those that torch shares tensors through do too. Here host
memory is an anonymous file that lives as long as it is mapped, and device memory is the driver's.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from fsm_trainer.machine.errors import CapabilityMissing

Offer = dict[str, Any]
"""What another process needs in order to map it; as JSON at most OFFER bytes."""
OFFER = 512

_MACHINE = Path("/proc/sys/kernel/random/boot_id")


@contextmanager
def shared(size: int, device: torch.device) -> Iterator[tuple[torch.Tensor, Offer]]:
    """Give ``[size]`` bytes on ``device``, and an offer of them that is good inside ``with``."""
    offer: Offer = {"machine": _MACHINE.read_text().strip(), "size": size}
    if device.type == "cuda":
        driver = _Driver(device)
        address = driver.allocate(size)
        yield (
            driver.tensor(address, size, "cuMemFree_v2"),
            {**offer, "handle": driver.export(address)},
        )
        return
    name = f"fsm-trainer-{secrets.token_hex(8)}"
    file = os.memfd_create(name)
    try:
        os.ftruncate(file, size)
        at = f"/proc/{os.getpid()}/fd/{file}"
        yield _map(file, size), {**offer, "name": name, "at": at}
    finally:
        os.close(file)


def attach(offer: Offer, device: torch.device) -> torch.Tensor:
    """Map what another process offers, as ``[size]`` bytes; it is unmapped with its last tensor.

    Raises CapabilityMissing where that can't be done: another machine, container or device.
    """
    if offer["machine"] != _MACHINE.read_text().strip():
        raise _unreachable("this is another machine")
    if "handle" in offer:
        if device.type != "cuda":
            raise _unreachable(f"the weights are on {device} here, and on a CUDA device there")
        driver = _Driver(device)
        address = driver.attach(offer["handle"])
        return driver.tensor(address, offer["size"], "cuIpcCloseMemHandle")
    try:
        # The number may mean another file here: in another container, or of a dead process.
        if os.readlink(offer["at"]) != f"/memfd:{offer['name']} (deleted)":
            raise _unreachable(f"{offer['at']} is something else here")
        file = os.open(offer["at"], os.O_RDWR)
    except OSError as error:
        raise _unreachable(str(error)) from error
    try:
        return _map(file, offer["size"])
    finally:
        os.close(file)


def _map(file: int, size: int) -> torch.Tensor:
    # Not the mmap module: a mapping of its keeps a file open.
    return torch.from_file(f"/proc/self/fd/{file}", shared=True, size=size, dtype=torch.uint8)


def _unreachable(why: str) -> CapabilityMissing:
    return CapabilityMissing(
        f"the sender's memory can't be mapped: {why}. A link of kind 'ipc' needs all its ends on "
        "one machine, in one container and on one device: set link.kind to 'group' or 'disk'"
    )


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_ubyte * 64),)


class _Memory:
    """A device address in the form in which torch takes it; torch keeps it for the tensor."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3,
        }  # fmt: skip


class _Driver:
    """CUDA's interprocess memory. Not torch's: it keeps files, and memory that was let go of."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._library = ctypes.CDLL("libcuda.so.1")

    def allocate(self, size: int) -> int:
        address = ctypes.c_uint64()
        try:
            self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        except CapabilityMissing:
            torch.cuda.empty_cache()  # what torch keeps for itself may be what is missing
            self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        return address.value

    def export(self, address: int) -> str:
        handle = _Handle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
        return bytes(handle.bytes).hex()

    def attach(self, exported: str) -> int:
        address, handle = ctypes.c_uint64(), _Handle.from_buffer_copy(bytes.fromhex(exported))
        lazily_enable_peers = ctypes.c_uint(1)
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), handle, lazily_enable_peers)
        return address.value

    def tensor(self, address: int, size: int, end: str) -> torch.Tensor:
        """Look at the address as bytes; with the last tensor that does so comes the ``end``."""
        memory = _Memory(address, size)
        weakref.finalize(memory, self._call, end, ctypes.c_uint64(address)).atexit = False
        return torch.as_tensor(memory, device=self._device)

    def _call(self, name: str, *arguments: Any) -> None:
        # Queued copies may still read what is let go of. It also makes this thread's context.
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()
            code = getattr(self._library, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(code, ctypes.byref(text))
            raise _unreachable(f"{name}: {(text.value or b'unknown').decode()} ({code})")
