"""What is installed and can work here, with a remedy for what can't; imports nothing heavy."""

from __future__ import annotations

import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

GIB = 1024**3
LEAST_CORES = 2
LEAST_MEMORY = 6 * GIB
LEAST_DISK = 5 * GIB
LEAST_SHARED_MEMORY = GIB // 2
STALE_LOCK_SECONDS = 600.0

TRAIN = "DS_BUILD_OPS=0 python -m pip install -c constraints.txt '.[train]' (in a clone)"
PACKAGES = {
    "torch": TRAIN,
    "deepspeed": TRAIN,
    "ray": TRAIN,
    "transformers": TRAIN,
    "safetensors": TRAIN,
    "reasoning-gym": f"{TRAIN}; only for its data",
    "tensorboard": f"{TRAIN}; only for its logs",
    "sglang": "python -m pip install '.[sglang]' (in a clone); without it use the embedded engine",
}

_RENDEZVOUS = """
from torch.distributed import TCPStore
from datetime import timedelta
store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=5), wait_for_workers=False)
TCPStore("127.0.0.1", store.port, None, False, timedelta(seconds=5)).set("key", "value")
print(store.port, store.get("key").decode())
"""


class Status(StrEnum):
    """How a check ended: ``missing`` is an optional or installable part that isn't there."""

    OK = "ok"
    MISSING = "missing"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at; ``remedy`` is empty where it is ok."""

    name: str
    status: Status
    detail: str
    remedy: str = ""


def diagnose(timeout: float = 20.0) -> list[Check]:
    """Look at everything; the rendezvous, which needs torch, gets ``timeout`` seconds."""
    temporary, shared = tempfile.gettempdir(), Path("/dev/shm")
    sizes = [
        ("memory", _memory(), LEAST_MEMORY, "free memory, or use a smaller model"),
        (
            "disk",
            shutil.disk_usage(temporary).free,
            LEAST_DISK,
            f"free space under {temporary}, or set TMPDIR to a larger disk",
        ),
        (
            "shared memory",
            shutil.disk_usage(shared).total if shared.is_dir() else 0,
            LEAST_SHARED_MEMORY,
            "in a container: start it with --shm-size=2g; else mount a larger /dev/shm",
        ),
    ]
    return [
        Check("python", Status.OK, platform.python_version()),
        *(check_package(name, remedy) for name, remedy in PACKAGES.items()),
        check_accelerator(_torch_cuda(), _gpus()),
        check_least("cores", len(os.sched_getaffinity(0)), LEAST_CORES, "ask for more cores"),
        *(check_least(*size, show=_gib) for size in sizes),
        check_extension_locks(_extensions_folder(), time.time()),
        check_host_name(socket.gethostname()),
        check_rendezvous(_RENDEZVOUS, timeout),
    ]


def check_package(name: str, remedy: str) -> Check:
    """A distribution must be installed; it isn't imported."""
    try:
        return Check(name, Status.OK, version(name))
    except PackageNotFoundError:
        return Check(name, Status.MISSING, "not installed", remedy)


def check_accelerator(cuda: str | None, gpus: int) -> Check:
    """Where there are GPUs, torch must be built for CUDA (``cuda``: its version, or None)."""
    built = f"torch built for CUDA {cuda}" if cuda else "but torch is missing or built for the CPU"
    found = f"{gpus} GPUs, {built}" if gpus else "none: runs on the CPU with gloo"
    remedy = "install a CUDA build of torch, as its site says"
    return _judged("accelerator", not gpus or cuda is not None, found, remedy)


def check_least(
    name: str, found: int, least: int, remedy: str, show: Callable[[int], str] = str
) -> Check:
    """A count, or a number of bytes, must reach a least value."""
    lacks = f", at least {show(least)} are needed" if found < least else ""
    return _judged(name, found >= least, show(found) + lacks, remedy)


def check_extension_locks(folder: Path, now: float) -> Check:
    """No killed build may have left its lock: every later build would wait for it forever."""
    locks = sorted(folder.glob("**/lock")) if folder.is_dir() else []
    stale = [str(lock) for lock in locks if now - lock.stat().st_mtime > STALE_LOCK_SECONDS]
    found = f"stale lock: {', '.join(stale)}" if stale else "no stale lock"
    return _judged("torch extensions", not stale, found, "delete it")


def check_host_name(name: str) -> Check:
    """The host's name must resolve, as gloo picks its interface by it."""
    try:
        found = f"{name} is {socket.getaddrinfo(name, None, family=socket.AF_INET)[0][4][0]}"
        return Check("host name", Status.OK, found)
    except OSError as error:
        remedy = f"add '127.0.0.1 {name}' to /etc/hosts, or set GLOO_SOCKET_IFNAME=lo"
        return Check("host name", Status.PROBLEM, f"{name} doesn't resolve ({error})", remedy)


def check_rendezvous(script: str, timeout: float) -> Check:
    """A TCPStore of torch must answer on 127.0.0.1 within ``timeout`` seconds."""
    if find_spec("torch") is None:
        return Check("rendezvous", Status.MISSING, "not tried: torch isn't installed", TRAIN)
    command = [sys.executable, "-c", script]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        problem = f"a TCPStore on 127.0.0.1 failed: {last}" if done.returncode else ""
    except subprocess.TimeoutExpired:
        problem = f"no answer within {timeout:g} s"
    remedy = "let processes of this machine connect to 127.0.0.1 (firewall, network namespace)"
    found = problem or f"a TCPStore answered on port {done.stdout.split()[0]}"
    return _judged("rendezvous", not problem, found, remedy)


def _judged(name: str, ok: bool, found: str, remedy: str) -> Check:
    return Check(name, Status.OK, found) if ok else Check(name, Status.PROBLEM, found, remedy)


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"


def _torch_cuda() -> str | None:
    """Read torch's CUDA version from its files, as the import takes seconds."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = Path(spec.origin).with_name("version.py").read_text()
    found = re.search(r"^cuda\b[^=\n]*= '([^']+)'", text, re.MULTILINE)
    return found[1] if found else None


def _gpus() -> int:
    return len([p for p in Path("/dev").glob("nvidia[0-9]*") if p.name[6:].isdigit()])


def _memory() -> int:
    """Give the bytes that can still be used: the machine's, or less if a container has a limit."""
    meminfo = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(meminfo["MemAvailable"].split()[0]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and (most := limit.read_text().strip()).isdigit():
        return min(available, int(most) - int(used.read_text()))
    return available


def _extensions_folder() -> Path:
    chosen = os.environ.get("TORCH_EXTENSIONS_DIR")
    return Path(chosen) if chosen else Path.home() / ".cache" / "torch_extensions"
