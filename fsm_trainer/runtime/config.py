"""A run's configuration: one YAML file, validated whole before any process starts.

Each component's settings stand beside the component; here they are composed. What follows from
other values is derived in one place, :func:`load_config`, and is printed; nothing overrides a
value afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, Field

from fsm_trainer.algorithms.config import (
    GRPOConfig,
    PPOConfig,
    ReinforcePPConfig,
    RLOOConfig,
    WarmupConfig,
)
from fsm_trainer.data.models import ModelSpec
from fsm_trainer.data.rewards import RewardConfig
from fsm_trainer.data.sources import DataConfig
from fsm_trainer.document import Document, Key
from fsm_trainer.engines.config import EmbeddedConfig, EngineConfig, SglangConfig
from fsm_trainer.machine.errors import ConfigError
from fsm_trainer.machine.names import Role
from fsm_trainer.machine.spec import Spec
from fsm_trainer.machine.world import System
from fsm_trainer.runtime.checks import Checks, apart
from fsm_trainer.training.config import ChecksConfig, TrainerConfig

AlgorithmConfig = Annotated[
    PPOConfig | GRPOConfig | RLOOConfig | ReinforcePPConfig, Field(discriminator="name")
]


class RoleConfig(TrainerConfig, extra="forbid", frozen=True):
    """A trainer: its settings, and how many processes share it."""

    ranks: int = Field(default=1, ge=1)
    """Processes of the role, one a device."""
    threads: int = Field(default=1, ge=1)
    """CPU threads of each process."""


class RolloutConfig(BaseModel, extra="forbid", frozen=True):
    """How trajectories are made."""

    workers: int = Field(default=2, ge=1)
    """Rollout workers, each with an engine of its own."""
    parts: int = Field(default=1, ge=1)
    """Parts of a step for each worker, at most one for each prompt; whoever is idle takes the next
    one. More parts even out uneven lengths, fewer keep batches large."""
    prompts: int = Field(default=128, ge=1)
    """Prompts of a step."""
    copies: int = Field(default=1, ge=1)
    """Trajectories of each prompt: a group."""
    filter_rounds: int = Field(default=0, ge=0)
    """At 0 every group is trained on. Else groups whose rewards are all equal are dropped, and as
    many prompts drawn in their place, in at most so many rounds with the first (DAPO's dynamic
    sampling); a step that is still short trains on what it has. Of grpo and rloo."""
    max_new_tokens: int = Field(default=64, ge=1)
    """The most tokens that the policy adds in one turn."""
    generate: str = Field(
        default="fsm_trainer.workers.single_turn:generate",
        pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$",
    )
    """``module:function`` of the hook ``async generate(context, sample)``."""
    engine: EngineConfig = EmbeddedConfig()
    """The engine: ``kind: embedded`` or ``sglang``."""

    @property
    def engine_ranks(self) -> int:
        """Processes, and devices, of one engine."""
        return self.engine.tensor_parallel if isinstance(self.engine, SglangConfig) else 1


class EvaluationConfig(BaseModel, extra="forbid", frozen=True):
    """Evaluation on the held-out sets."""

    every: int = Field(default=10, ge=0)
    """Steps between evaluations; 0 evaluates at start, after the warm-up and at the end only."""
    temperature: float = Field(default=0.0, ge=0)
    """0 is greedy."""


class CheckpointConfig(BaseModel, extra="forbid", frozen=True):
    """What a run can be resumed from."""

    every: int = Field(default=0, ge=0)
    """Steps between checkpoints; 0 writes one at the end only."""
    keep: int = Field(default=2, ge=1)
    """How many are kept; with 1 there is none to go back to should it be damaged."""


class MetricsConfig(BaseModel, extra="forbid", frozen=True):
    """Where numbers go besides ``metrics.jsonl``."""

    tensorboard: bool = True
    """Whether to write TensorBoard events into the run's folder."""
    wandb: str | None = None
    """The Weights & Biases project to log to, if any."""


class ClusterConfig(BaseModel, extra="forbid", frozen=True):
    """Where the processes run."""

    address: str | None = None
    """A Ray cluster to join; by default a local one is started and ended with the run."""
    gpus: int = Field(default=0, ge=0)
    """Devices for the run; 0 trains on the CPU."""
    share_devices: bool = False
    """Whether processes may share a device that the schedule gives to one alone; between them
    NCCL 2.30 or newer is needed, with ``NCCL_MULTI_RANK_GPU_ENABLE=1``."""


class LinkConfig(BaseModel, extra="forbid", frozen=True):
    """The link that carries weights to the rollout workers."""

    kind: Literal["group", "ipc", "disk"] = "group"
    """The way of the weights: ``group`` is NCCL between devices and gloo between CPUs; ``ipc`` is
    memory of the actor's that all ends map, on one machine and one device; ``disk`` is files."""
    folder: Path | None = None
    """For ``disk``: a folder that all machines of the run see; by default ``sync`` in the run's."""
    timeout: float = Field(default=60.0, gt=0)
    """Seconds that one operation on the link may take."""
    bucket_bytes: int = Field(default=64 * 2**20, ge=1024)
    """Bytes that travel in one piece."""


class DeadlineConfig(BaseModel, extra="forbid", frozen=True):
    """Seconds that a worker may take; past it the worker is declared dead and its process ended."""

    transition: float = Field(default=300.0, gt=0)
    """For a part of a transition; loading a model is one."""
    action: float = Field(default=3600.0, gt=0)
    """For an action."""
    control: float = Field(default=30.0, gt=0)
    """For a control call, and for a process to end."""


class RunConfig(BaseModel, extra="forbid", frozen=True):
    """A run."""

    seed: int = Field(default=0, ge=0)
    """Every random stream of the run is derived from it."""
    steps: int = Field(ge=0)
    """Steps of reinforcement learning."""
    schedule: str | None = None
    """A file of ``states/schedules/``; by default the disaggregated one that fits the algorithm."""
    train_offload: bool | None = None
    """Whether trainers sleep between their phases; follows from the schedule."""
    model: ModelSpec
    algorithm: AlgorithmConfig = PPOConfig()
    warmup: WarmupConfig = WarmupConfig()
    actor: RoleConfig = RoleConfig()
    critic: RoleConfig | None = None
    """By default the actor's settings."""
    rollout: RolloutConfig = RolloutConfig()
    data: DataConfig
    reward: RewardConfig
    evaluation: EvaluationConfig = EvaluationConfig()
    checks: ChecksConfig = ChecksConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    metrics: MetricsConfig = MetricsConfig()
    cluster: ClusterConfig = ClusterConfig()
    link: LinkConfig = LinkConfig()
    deadlines: DeadlineConfig = DeadlineConfig()


class Only(StrEnum):
    """What a run for debugging is limited to."""

    ROLLOUT = "rollout"
    TRAIN = "train"


@dataclass(frozen=True)
class Run:
    """A validated configuration with all that follows from it."""

    config: RunConfig
    spec: Spec
    notes: tuple[str, ...]
    """What was derived, a line each, for people."""
    states: Path | None = None
    path: Path | None = None
    document: dict[str, Any] = field(default_factory=dict)
    """What the file and ``--set`` gave, to be kept in the run's folder."""
    only: Only | None = None
    """Generate and score only, into files; or train only, from such files."""
    dump: Path | None = None
    """The folder of the run that wrote the files."""
    dump_step: int | None = None
    """The step whose updates are written into a folder, to be computed again."""

    @property
    def engines(self) -> int:
        """Rollout workers of the run."""
        return 0 if self.only is Only.TRAIN else self.config.rollout.workers

    @property
    def warms_up(self) -> bool:
        """Whether the run begins with supervised steps."""
        return self.config.warmup.steps > 0 and self.only is None

    def phases(self, names: Sequence[str]) -> list[str]:
        """Those of a sequence's phases that the run has."""
        skipped = {
            None: set() if self.warms_up else {"warm_up"},
            Only.ROLLOUT: {
                "warm_up",
                "evaluate",
                "score",
                "values",
                "send_values",
                "train",
                "push",
            },
            Only.TRAIN: {"warm_up", "evaluate", "generate", "push"},
        }[self.only]
        return [name for name in names if self.spec.phases[name].action not in skipped]

    @property
    def critic(self) -> RoleConfig | None:
        """The critic's settings, if the schedule has one."""
        has = Role.CRITIC in self.spec.roles
        return (self.config.critic or self.config.actor) if has else None

    @property
    def critic_apart(self) -> bool:
        """Whether the critic has devices of its own, and trains beside the actor."""
        return apart(self.spec)

    @property
    def system(self) -> System:
        """The machines of the run, composed."""
        return System.of(self.spec, self.engines)

    def optimizer_steps(self, role: Role) -> int:
        """Optimizer steps of the whole run, for the learning-rate schedule."""
        algorithm, steps = self.config.algorithm, self.config.steps
        epochs = algorithm.epochs
        if isinstance(algorithm, PPOConfig):
            if role is Role.CRITIC:
                epochs = algorithm.critic_epochs
            else:
                steps = max(steps - algorithm.critic_warmup_steps, 0)
        return max(steps * epochs * algorithm.minibatches, 1)


def load_config(path: Path, overrides: Sequence[str] = (), states: Path | None = None) -> Run:
    """Read, validate and derive; raises :class:`ConfigError` before any process starts."""
    document = Document(path, ConfigError)
    if not isinstance(document.data, dict):
        raise document.error("the file is not a mapping. Write settings, such as `steps: 10`")
    _resolve_paths(document, path.parent)
    origins: dict[Key, str] = {}
    for text in overrides:
        at, origin = _override(document, text)
        origins.pop(at, None)  # the last one counts, in the order of the command line
        origins[at] = origin
    _resolve_paths(document, Path.cwd())
    config = document.parse(RunConfig, origins)
    checks = Checks(document, config, states, origins)
    checks.numbers()
    spec, notes = checks.schedule()
    checks.contradictions(spec)
    checks.installed(spec)
    return Run(config, spec, tuple(notes), states, path, document.data)


def _override(document: Document, text: str) -> tuple[Key, str]:
    key, sign, value = text.partition("=")
    origin = f"--set {text}"
    if not sign or not key:
        raise ConfigError(
            f"{origin}: there is no value. Write --set key.path=value, such as --set actor.ranks=2"
        )
    at = tuple(key.split("."))
    here = document.data
    for part in at[:-1]:
        if here.get(part) is None:
            here[part] = {}
        here = here[part]
        if not isinstance(here, dict):
            problem = f"{part!r} is a value and has no fields of its own (given: {here!r})"
            raise ConfigError(f"{origin}: {key}: {problem}. Set {part} itself")
    try:
        here[at[-1]] = yaml.safe_load(value)
    except (yaml.YAMLError, ValueError):
        problem = f"the value is not YAML (given: {value!r})"
        raise ConfigError(f"{origin}: {key}: {problem}. Close brackets and quotes") from None
    return at, origin


def _resolve_paths(document: Document, folder: Path) -> None:
    """Paths in the file are relative to it, those of ``--set`` to the working folder."""

    def absolute(entry: Any, key: str) -> None:
        if isinstance(entry, dict) and isinstance(entry.get(key), str):
            entry[key] = str((folder / entry[key]).resolve())

    data = document.data.get("data")
    absolute(document.data.get("model"), "path")
    absolute(document.data.get("link"), "folder")
    if isinstance(data, dict):
        further = data.get("evaluation")
        for entry in [data.get("train"), *(further.values() if isinstance(further, dict) else ())]:
            absolute(entry, "path")
