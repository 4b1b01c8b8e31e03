"""What a trainer resumes from: ``trainer/`` in a model folder, a file for each rank.

Each rank writes what it holds. Resuming needs the ZeRO stage and number of ranks of the writer,
and is bit-equal. No random state is kept: every stream of a step is derived from the run's seed.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypedDict

import torch
from safetensors.torch import load_file

from fsm_trainer.machine.errors import ConfigError, SelfCheckFailed
from fsm_trainer.training.models import check_folder

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
    fingerprint: str
    """Of weights, masters, moments and the reference, where the weights stand here."""


@dataclass(frozen=True)
class Origin:
    """What a rank begins from."""

    model: Path
    """A Hugging Face folder; its tokenizer goes into every folder that is written."""
    warmed_up: Path | None = None
    """Once this folder is there, it is the model."""
    checkpoint: Path | None = None
    """Where to go on from, instead of beginning with the model."""
    returned: bool = False
    """Whether an earlier process of this rank left something newer than all of these."""

    @property
    def weights(self) -> Path:
        """The model folder to load."""
        return self.checkpoint or self.model

    def settled(self) -> Origin:
        """As it stands now; raises ConfigError where there is no model."""
        warm = self.warmed_up if self.warmed_up is not None and self.warmed_up.is_dir() else None
        now = replace(self, model=warm or self.model)
        check_folder(now.weights)
        return now


def write(directory: Path, rank: int, shard: Shard) -> None:
    """Write one rank's shard into the folder that becomes the checkpoint."""
    file = path(directory, rank)
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save(shard, file)


def read(directory: Path, rank: int, zero_stage: int, world_size: int) -> Shard:
    """One rank's shard; raises ConfigError when it's missing or of another arrangement.

    SelfCheckFailed when it can't be read.
    """
    file = path(directory, rank)
    if not file.is_file():
        raise ConfigError(f"{directory} is no checkpoint of rank {rank}: {file} doesn't exist")
    try:
        shard: Shard = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # a flipped bit gives any of ten types, KeyError and Unicode's too
        raise SelfCheckFailed(f"{file} can't be read, it is damaged ({error!r})") from error
    wanted = {"format": FORMAT, "zero_stage": zero_stage, "world_size": world_size}
    for name, value in wanted.items():
        if shard.get(name) != value:
            raise ConfigError(
                f"{file} was written with {name} {shard.get(name)}, this run has {value}. "
                "Resume with the configuration of the run that wrote it"
            )
    return shard


def joined(directory: Path, stage: int, ranks: int, target: Path) -> Path:
    """Write a checkpoint of one rank that stands where ``ranks`` stood; up to ZeRO 2.

    At stages 1 and 2 DeepSpeed flattens all weights, pads them to a multiple of twice the ranks,
    and gives each rank a run of masters and moments: in a row they are those of one rank, but for
    the padding. Where each rank has all, the first one's are those.
    """
    shards = [read(directory, rank, stage, ranks) for rank in range(ranks)]
    first = shards[0]
    weights = list(load_file(directory / "model.safetensors").values())
    count = sum(weight.numel() for weight in weights)
    if sum(part["master"].numel() for part in first["optimizer"]) < count:
        count += count % 2
        size = count * weights[0].itemsize
        first["reference"] = [storage[:size] for storage in first["reference"]]
        groups = zip(*(shard["optimizer"] for shard in shards), strict=True)
        first["optimizer"] = [
            {
                name: torch.cat([part[name] for part in parts])[:count] if whole.dim() else whole
                for name, whole in parts[0].items()
            }
            for parts in groups
        ]
    shutil.copytree(directory, target, ignore=shutil.ignore_patterns("trainer"))
    first["world_size"] = 1
    write(target, 0, first)
    return target


def path(directory: Path, rank: int) -> Path:
    """The file of a rank's shard."""
    return directory / "trainer" / f"rank-{rank}.pt"
