"""A generate hook that once, in the middle of a step, ends the process that it runs in."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path

from fsm_trainer.data.trajectory import Sample, Trajectory
from fsm_trainer.workers import single_turn
from fsm_trainer.workers.context import Context

FLAG = "DYING_ONCE_FLAG"
"""The environment variable with the path of a file; whoever makes it is the one that dies."""
STEP = 2
"""Counted by the version of the weights: the warm-up's are 1, those of the second step 2."""
AFTER = 6
"""Samples of a process in that step before one more ends it: those of its first part."""

seen: Counter[int] = Counter()


async def generate(context: Context, sample: Sample) -> Trajectory:
    """As the default hook."""
    seen[context.version.number] += 1
    if seen[STEP] > AFTER and made(Path(os.environ[FLAG])):
        os.kill(os.getpid(), signal.SIGKILL)
    return await single_turn.generate(context, sample)


def made(flag: Path) -> bool:
    """Whether the file was made here and now."""
    try:
        flag.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
