"""One step's update in a folder, to be computed again elsewhere: what it read, and what came out.

``dump/step-N/ROLE/`` holds ``before``, a checkpoint of the role as the update found it,
``tables.pt``, the batch, the actor's advantages and what the critic was told, and ``step.json``:
settings, random stream, fingerprints of all that was read, and the metrics.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from fsm_trainer.algorithms.config import PolicyConfig, PPOConfig
from fsm_trainer.data.durable import write_durably
from fsm_trainer.groups.rendezvous import Rendezvous
from fsm_trainer.machine.errors import ConfigError, SelfCheckFailed
from fsm_trainer.training import checkpoint, selfcheck
from fsm_trainer.training.batch import Batch
from fsm_trainer.training.config import ChecksConfig, OffloadConfig, TrainerConfig
from fsm_trainer.training.offload import fingerprint
from fsm_trainer.training.ppo import Scored, actor_update, critic_update
from fsm_trainer.training.trainer import RESOURCES, ModelTrainer

TOLD, TABLES, BEFORE = "step.json", "tables.pt", "before"
SCORED = ("old", "entropy", "reference", "rerouted")


class Told(BaseModel):
    """What ``step.json`` says."""

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="constants")

    format: Literal[1] = 1
    step: int
    role: Literal["actor", "critic"]
    ranks: int
    threads: int
    seed: int
    """Of the update's generator."""
    total_steps: int
    """Optimizer steps of the run."""
    first: bool
    """Whether the actor was its reference still."""
    trainer: TrainerConfig
    algorithm: dict[str, Any]
    checks: ChecksConfig
    prints: dict[str, str] = {}
    """Fingerprints of what was read, by name; those of the ranks' files stand beside these."""
    metrics: dict[str, float] | None = None
    """What came out; null if the update raised."""


class Figure(NamedTuple):
    """A number that was computed again."""

    name: str
    was: float
    now: float
    allowed: float
    """What rounding on another device explains."""

    @property
    def differs(self) -> bool:
        """Whether it is further off than that; NaN is like NaN alone."""
        alike = math.isnan(self.was) and math.isnan(self.now)
        return not alike and not abs(self.now - self.was) <= self.allowed

    @property
    def untold(self) -> bool:
        """Whether it isn't equal, and may be rounding whatever it is: so nothing is known."""
        size = max(abs(self.was), abs(self.now))
        return self.was != self.now and not self.differs and self.allowed >= size


class Replayed(NamedTuple):
    """What a step came to when it was computed again."""

    changed: list[str]
    """What was read has other bytes than when it was dumped: names."""
    figures: list[Figure]
    stopped: str | None
    """The self check that ended it."""
    again: bool
    """Whether it had ended in the run too, by whatever."""

    @property
    def wrong(self) -> bool:
        """Whether it isn't what it was; an update that has no metrics is computed to no end."""
        differs = any(figure.differs for figure in self.figures)
        return bool(self.changed) or differs or self.stopped is not None or not self.figures

    @property
    def exact(self) -> int:
        """How many figures are equal to the bit."""
        return sum(figure.was == figure.now for figure in self.figures)


@contextmanager
def dumping(
    folder: Path | None,
    trainer: ModelTrainer,
    told: Told,
    batch: Batch,
    gain: torch.Tensor | None,
    scored: Scored | None,
) -> Iterator[None]:
    """Write what the update in the body is about to read; all ranks together, if there is a folder.

    Each rank fingerprints its own file, so none waits for more than that of another. The body sets
    ``told.metrics``; where it raises, the dump has none.
    """
    if folder is None:
        yield
        return
    trainer.save(folder / BEFORE)
    prints = dict(_prints(trainer.named_weights()))
    file = _shard(folder, trainer.rank)
    write_durably(_print(file), fingerprint([_bytes(file)]).encode())
    leads = trainer.rank == 0
    if leads:
        tables = {each.name: getattr(batch, each.name) for each in fields(batch)}
        needed = {name: scored and getattr(scored, name) for name in SCORED}
        torch.save(tables | needed | {"advantages": gain}, folder / TABLES)
        told.prints = prints | dict(_prints(_read(folder, told)))
        _write(folder, told)
    yield
    if leads:
        _write(folder, told)


def read(folder: Path) -> Told:
    """What a role's dump says; raises ConfigError if that is none."""
    try:
        return Told.model_validate_json((folder / TOLD).read_text())
    except (OSError, ValidationError) as error:
        raise ConfigError(
            f"{folder} is no role's dump: {folder / TOLD} can't be read ({error}). Give a folder "
            "that run --dump-step wrote, such as RUN/dump/step-000003"
        ) from error


def replay(folder: Path, told: Told, algorithm: PolicyConfig) -> Replayed:
    """Compute a dumped update again, in this process alone."""
    torch.set_num_threads(told.threads)
    tables = dict(_tables(folder))
    gain, stopped = tables.pop("advantages"), None
    needed = [tables.pop(name) for name in SCORED]
    scored = None if needed[0] is None else Scored(*needed)
    batch, generator = Batch(**tables), torch.Generator().manual_seed(told.seed)
    with _trainer(folder, told) as trainer:
        found = dict(_prints(trainer.named_weights())) | dict(_prints(_read(folder, told)))
        begun = trainer.steps
        changed = [name for name, one in told.prints.items() if found.get(name) != one]
        changed += _changed_shards(folder, told.ranks)
        metrics: Mapping[str, float] = {}
        try:
            if isinstance(algorithm, PPOConfig) and told.role == "critic":
                _, metrics = critic_update(trainer, batch, algorithm, generator, scored)
            else:
                metrics = actor_update(
                    trainer, batch, gain, algorithm, generator, told.checks, told.first, scored
                )
        except SelfCheckFailed as error:
            stopped = str(error)
        steps, traits = max(trainer.steps - begun, 1), trainer.traits
    was = told.metrics if told.metrics and not stopped else {}
    allowed = selfcheck.spread(
        traits, batch, was, algorithm, steps, scored is not None, gain is not None
    )
    figures = [
        Figure(name, one, metrics.get(name, math.nan), allowed[name]) for name, one in was.items()
    ]
    return Replayed(changed, figures, stopped, again=told.metrics is None)


@contextmanager
def _trainer(folder: Path, told: Told) -> Iterator[ModelTrainer]:
    """One rank that stands where all stood, and never sleeps: its offload may need a GPU."""
    with TemporaryDirectory() as scratch, Rendezvous.bind() as rendezvous, ExitStack() as held:
        before = folder / BEFORE
        if told.ranks > 1:
            stage, joined = told.trainer.zero_stage, Path(scratch) / BEFORE
            before = checkpoint.joined(before, stage, told.ranks, joined)
        trainer = ModelTrainer(
            "policy" if told.role == "actor" else "value",
            checkpoint.Origin(before, checkpoint=before),
            told.trainer.model_copy(update={"offload": OffloadConfig()}),
            rank=0,
            world_size=1,
            store=rendezvous.address,
            role=told.role,
            scratch=Path(scratch) / "bank",
            seed=0,
            total_steps=told.total_steps,
        )
        for resource in RESOURCES:
            trainer.acquire(resource, epoch=1)
            held.callback(trainer.release, resource)
        yield trainer


def _tables(folder: Path) -> dict[str, Any]:
    try:
        tables: dict[str, Any] = torch.load(folder / TABLES, weights_only=True)
    except Exception as error:  # of what a flipped bit raises there is no end
        raise ConfigError(f"{folder / TABLES} can't be read ({error!r}). Dump it again") from error
    return tables


def _read(folder: Path, told: Told) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and content of what is read beside models and optimizers: tables, and settings."""
    said = told.model_dump(mode="json", exclude={"prints", "metrics"})
    for name, value in (_tables(folder) | said).items():
        if isinstance(value, torch.Tensor):
            yield name, value
            continue
        for key, one in value.items() if isinstance(value, dict) else [("", value)]:
            text = bytearray(repr(one).encode())
            yield f"{name}.{key}".rstrip("."), torch.frombuffer(text, dtype=torch.uint8)


def _changed_shards(folder: Path, ranks: int) -> Iterator[str]:
    """Name the ranks' files that aren't what their writers left, or said that they left."""
    for rank in range(ranks):
        file = _shard(folder, rank)
        said = _print(file).read_text() if _print(file).is_file() else None
        if fingerprint([_bytes(file)]) != said:
            yield f"optimizer and reference of rank {rank}"


def _shard(folder: Path, rank: int) -> Path:
    return checkpoint.path(folder / BEFORE, rank)


def _print(shard: Path) -> Path:
    return shard.with_suffix(".print")


def _bytes(file: Path) -> torch.Tensor:
    """A file as it is mapped: no more of it is in memory than is looked at."""
    return torch.from_file(str(file), size=file.stat().st_size, dtype=torch.uint8)


def _prints(tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, str]]:
    return ((name, fingerprint([tensor])) for name, tensor in tensors)


def _write(folder: Path, told: Told) -> None:
    write_durably(folder / TOLD, told.model_dump_json(indent=1).encode())
