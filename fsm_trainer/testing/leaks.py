"""What a process holds that it should give back."""

from __future__ import annotations

import gc
import sys
import time
from typing import NamedTuple

import psutil

# Seconds for what ends by itself once it is let go: threads that were cut off, children.
GRACE = 5.0
# Bytes that a process may grow by, for caches and the allocator's own.
MEMORY = 64 * 2**20


class Footprint(NamedTuple):
    """Counts of one process; ``resident`` in bytes."""

    groups: int
    """Process groups that torch has registered."""
    processes: int
    """Children, and theirs."""
    threads: int
    descriptors: int
    sockets: int
    resident: int


def footprint() -> Footprint:
    """Of this process, now."""
    gc.collect()
    me = psutil.Process()
    return Footprint(
        _groups(),
        sum(_lives(child) for child in me.children(recursive=True)),
        me.num_threads(),
        me.num_fds(),
        len(me.net_connections()),
        me.memory_info().rss,
    )


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _groups() -> int:
    if "torch.distributed" not in sys.modules:
        return 0
    from fsm_trainer.groups.lease import registered_groups

    return len(registered_groups())


def grown(before: Footprint, grace: float = GRACE, memory: int = MEMORY) -> str:
    """What there is more of than before, when ``grace`` seconds have passed; empty if nothing."""
    until = time.monotonic() + grace
    while True:
        now = footprint()
        allowed = before._replace(resident=before.resident + memory)
        more = [
            f"{name} {was} -> {there}"
            for name, was, most, there in zip(now._fields, before, allowed, now, strict=True)
            if there > most
        ]
        if not more or time.monotonic() > until:
            return ", ".join(more)
        time.sleep(0.05)
