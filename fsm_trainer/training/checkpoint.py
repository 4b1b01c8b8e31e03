"""What a trainer resumes from: ``trainer/`` in a model folder, a file for each rank.

Each rank writes what it holds. Resuming needs the ZeRO stage and number of ranks of the writer,
and is bit-equal. No random state is kept: every stream of a step is derived from the run's seed.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypedDict

import torch

from fsm_trainer.machine.errors import ConfigError

# Raise it when the contents change their meaning; an older format is refused, not guessed at.
FORMAT = 3


class Shard(TypedDict):
    """What one rank needs beside the weights to continue as if it had never stopped."""

    format: int
    zero_stage: int
    world_size: int
    steps: int
    optimizer: list[dict[str, torch.Tensor]]
    reference: list[torch.Tensor]
    """The reference's storages as bytes; empty without one."""
    weights: list[torch.Tensor]
    """The weights' storages as bytes; empty where they stand in a model folder."""


def write(directory: Path, rank: int, shard: Shard) -> None:
    """Write one rank's shard into the folder that becomes the checkpoint."""
    path = _path(directory, rank)
    path.parent.mkdir(exist_ok=True)
    torch.save(shard, path)


def read(directory: Path, rank: int, zero_stage: int, world_size: int) -> Shard:
    """One rank's shard; raises ConfigError when it's missing or of another arrangement."""
    path = _path(directory, rank)
    if not path.is_file():
        raise ConfigError(f"{directory} is no checkpoint of rank {rank}: {path} doesn't exist")
    shard: Shard = torch.load(path, map_location="cpu", weights_only=True)
    wanted = {"format": FORMAT, "zero_stage": zero_stage, "world_size": world_size}
    for name, value in wanted.items():
        if shard.get(name) != value:
            raise ConfigError(
                f"{path} was written with {name} {shard.get(name)}, this run has {value}. "
                "Resume with the configuration of the run that wrote it"
            )
    return shard


def _path(directory: Path, rank: int) -> Path:
    return directory / "trainer" / f"rank-{rank}.pt"
