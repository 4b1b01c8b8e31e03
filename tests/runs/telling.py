"""A generate hook that tells, in a file, which sample it makes with which weights."""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path

from fsm_trainer.data.trajectory import Sample, Trajectory
from fsm_trainer.workers import single_turn
from fsm_trainer.workers.context import Context

FILE = "TELLING_FILE"
"""The environment variable with the path of the file; it marks every process of the run, too."""


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
