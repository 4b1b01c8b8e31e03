"""What a result was measured on, and how it is written."""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import os
import platform
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Seconds that a look at the devices may take.
DEADLINE = 10.0
PACKAGES = ("torch", "deepspeed", "transformers", "ray", "sglang", "transitions")


def write(result: dict[str, Any], path: Path | None) -> None:
    """Print a result with its conditions, and write it if there is a file for it."""
    text = json.dumps(result | {"conditions": conditions()}, indent=1)
    print(text)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


def conditions() -> dict[str, Any]:
    """The hardware and the versions."""
    found: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    import torch

    found["cpus"] = os.cpu_count()
    if torch.cuda.is_available():
        found["device"] = torch.cuda.get_device_name()
        found["nccl"] = _nccl()
    found["environment"] = {k: v for k, v in os.environ.items() if k.startswith("NCCL_")}
    return found


def _nccl() -> int:
    """The version of the library that is loaded, not of the one that torch was built with."""
    version = ctypes.c_int()
    ctypes.CDLL(None).ncclGetVersion(ctypes.byref(version))
    return version.value


class Devices:
    """What each device holds, for all its processes, in bytes."""

    def __init__(self) -> None:
        self._handles: list[Any] = []
        try:
            import pynvml
        except ImportError:
            return
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError:  # no driver, so no devices
            return
        self._ask = pynvml.nvmlDeviceGetMemoryInfo
        count = pynvml.nvmlDeviceGetCount()
        self._handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]

    def used(self) -> list[int]:
        """Now, by device."""
        return [int(self._ask(handle).used) for handle in self._handles]

    @contextmanager
    def watch(self, seen: list[tuple[float, list[int]]], every: float) -> Iterator[None]:
        """Look every so many seconds meanwhile; ``seen`` gets the time of day and what is used."""
        over = threading.Event()

        def look() -> None:
            while not over.wait(every):
                seen.append((time.time(), self.used()))

        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(DEADLINE)

    @contextmanager
    def peak(self, most: list[int]) -> Iterator[None]:
        """Leave in ``most`` how far each device rises meanwhile."""
        before, seen = self.used(), list[tuple[float, list[int]]]()
        with self.watch(seen, 0.001):
            yield
        columns = zip(*(used for _, used in seen), strict=True) if seen else ([b] for b in before)
        most[:] = [max(column) - then for column, then in zip(columns, before, strict=True)]
