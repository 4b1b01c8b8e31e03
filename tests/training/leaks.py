"""What a hundred cycles of sleep and wake leave behind in a rank's process.

``python -m tests.training.leaks RANK WORLD HOST PORT FOLDER STAGE``; see :mod:`.ranks`.
"""

from __future__ import annotations

import sys
from typing import Any

import psutil

from fsm_trainer.groups.lease import registered_groups
from tests.training.ranks import Rank, checksum, finish, make_model, train

WARM, LAST = 20, 100


def cycles(rank: Rank, stage: str) -> dict[str, Any]:
    """Sleep and wake :data:`LAST` times; figures after :data:`WARM` of them, and at the end."""
    trainer = rank.start(
        rank.trainer(make_model(rank.folder / f"model-{rank.rank}"), zero_stage=int(stage))
    )
    train(trainer, 0)
    before, process, seen = checksum(trainer), psutil.Process(), {}
    for cycle in range(1, LAST + 1):
        rank.sleep(trainer)
        rank.wake(trainer)
        if cycle in (WARM, LAST):
            seen[cycle] = [process.num_threads(), process.num_fds(), len(registered_groups())]
            seen[-cycle] = process.memory_info().rss
    return {
        "then": seen[WARM], "now": seen[LAST], "grown": seen[-LAST] - seen[-WARM],
        "hook": sys.excepthook is sys.__excepthook__, "equal": checksum(trainer) == before,
    }  # fmt: skip


if __name__ == "__main__":
    finish(cycles)
