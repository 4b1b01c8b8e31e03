"""A trainer's checkpoint: a model folder that others load, with ``trainer/`` beside for resuming.

Each rank writes what it holds. Resuming needs the ZeRO stage and number of ranks of the writer,
and is bit-equal.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from fsm_trainer.machine.errors import ConfigError
from fsm_trainer.training.models import replacing

# Raise it when the contents change their meaning; an older format is refused, not guessed at.
FORMAT = 1


@dataclass(frozen=True, slots=True)
class Shard:
    """What one rank needs beside the weights to continue as if it had never stopped."""

    format: int
    zero_stage: int
    world_size: int
    steps: int
    optimizer: list[dict[str, torch.Tensor]]
    random: dict[str, torch.Tensor]
    reference: list[torch.Tensor]
    """The reference's storages as bytes; empty without one."""


def random_state() -> dict[str, torch.Tensor]:
    """torch's generators: the CPU's, and the device's where there is one."""
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_random_state(state: dict[str, torch.Tensor]) -> None:
    """The inverse of :func:`random_state`."""
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def write(
    directory: Path,
    rank: int,
    shard: Shard,
    write_model: Callable[[Path], None],
    barrier: Callable[[], None],
) -> None:
    """Write a checkpoint with all ranks together; ``directory`` is the old or the new one, whole.

    Rank 0 also calls ``write_model`` with the folder. ``barrier`` has a deadline and raises.
    """
    with contextlib.ExitStack() as stack:
        if rank == 0:
            folder = stack.enter_context(replacing(directory))
            write_model(folder)
            (folder / "trainer").mkdir()
        else:
            folder = directory.with_name(f".{directory.name}.partial")
        barrier()
        torch.save(asdict(shard), _shard_path(folder, rank))
        barrier()
    barrier()


def read(directory: Path, rank: int, zero_stage: int, world_size: int) -> Shard:
    """One rank's shard; raises ConfigError when it's missing or of another arrangement."""
    path = _shard_path(directory, rank)
    if not path.is_file():
        raise ConfigError(f"{directory} is no checkpoint of rank {rank}: {path} doesn't exist")
    content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    wanted = {"format": FORMAT, "zero_stage": zero_stage, "world_size": world_size}
    for name, value in wanted.items():
        if content.get(name) != value:
            raise ConfigError(
                f"{path} was written with {name} {content.get(name)}, this run has {value}. "
                "Resume with the configuration of the run that wrote it"
            )
    return Shard(**content)


def _shard_path(directory: Path, rank: int) -> Path:
    return directory / "trainer" / f"rank-{rank}.pt"
