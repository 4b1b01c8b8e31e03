"""A generate hook that tells, in a file, which sample it makes with which weights."""

from __future__ import annotations

import os
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

import psutil

from fsm_trainer.data.trajectory import Sample, Trajectory
from fsm_trainer.workers import single_turn
from fsm_trainer.workers.context import Context

FILE = "TELLING_FILE"
"""The environment variable with the path of the file; a run's processes are known by it, too."""


async def generate(context: Context, sample: Sample) -> Trajectory:
    """As the default hook."""
    with Path(os.environ[FILE]).open("a") as file:
        file.write(f"{context.version.number} {context.version.lineage} {sample.id}\n")
    return await single_turn.generate(context, sample)


def trained(path: Path) -> dict[int, list[str]]:
    """The samples of each step, by the number of the weights that made them.

    Of a step that was begun again, those of the last time: what was made before was never trained
    on, or what was learned from it is gone.
    """
    made: defaultdict[int, defaultdict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for line in path.read_text().splitlines():
        number, lineage, sample = line.split(" ")
        if sample.startswith("train:"):  # not one of an evaluation
            made[int(number)][int(lineage)].append(sample)
    return {number: sorted(lives[max(lives)]) for number, lives in made.items()}


def processes(path: Path) -> list[int]:
    """The processes that live and were started to tell into this file."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it has ended, or is another user's
            if process.environ().get(FILE) == str(path):
                found.append(process.pid)
    return found
