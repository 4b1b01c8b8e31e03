"""Python imports this first where its folder is on the path: two ends of a link are killed.

The critic in the middle of the second step's values, and the actor in the middle of the third's.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

FLAGS = "KILLED_ONCE_FLAGS"
"""The environment variable with the path of a folder; a file in it says who was killed already."""


def _once(who: str) -> None:
    flag = Path(os.environ[FLAGS]) / who
    try:
        flag.touch(exist_ok=False)
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


def _patch() -> None:
    import torch

    from fsm_trainer.groups.lease import Lease

    broadcast = Lease.broadcast

    def broken_off(lease: Lease, tensor: torch.Tensor, source: int = 0) -> None:
        broadcast(lease, tensor, source)
        if lease.membership.group == "critic" and tensor.dtype == torch.int64:
            who = {(2, 0): "critic", (3, 1): "actor"}.get((int(tensor[0]), lease.rank))
            if who is not None:
                _once(who)

    Lease.broadcast = broken_off  # type: ignore[method-assign]


# Of Ray's processes only: these are the workers.
if FLAGS in os.environ and b"default_worker.py" in Path("/proc/self/cmdline").read_bytes():
    _patch()
