"""A run's configuration: one YAML file, validated whole before any process starts.

Each component's settings stand beside the component; here they are composed. What follows from
other values is derived in one place, :func:`load_config`, and is printed; nothing overrides a
value afterwards.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, Field

from fsm_trainer.algorithms.config import GRPOConfig, PPOConfig, WarmupConfig
from fsm_trainer.data.models import ModelSpec
from fsm_trainer.data.rewards import RewardConfig
from fsm_trainer.data.sources import DataConfig
from fsm_trainer.document import Document
from fsm_trainer.engines.embedded import EngineConfig
from fsm_trainer.machine.errors import ConfigError, SpecError
from fsm_trainer.machine.names import Role
from fsm_trainer.machine.spec import Spec, load, schedules
from fsm_trainer.machine.world import System
from fsm_trainer.training.config import TrainerConfig

AlgorithmConfig = Annotated[PPOConfig | GRPOConfig, Field(discriminator="name")]


class RoleConfig(TrainerConfig, extra="forbid", frozen=True):
    """A trainer: its settings, and how many processes share it."""

    ranks: int = Field(1, ge=1)
    """Processes of the role, one a device."""
    threads: int = Field(1, ge=1)
    """CPU threads of each process."""


class RolloutConfig(BaseModel, extra="forbid", frozen=True):
    """How trajectories are made."""

    workers: int = Field(2, ge=1)
    """Rollout workers, each with an engine of its own."""
    prompts: int = Field(128, ge=1)
    """Prompts of a step."""
    copies: int = Field(1, ge=1)
    """Trajectories of each prompt: a group."""
    max_new_tokens: int = Field(64, ge=1)
    """The most tokens that the policy adds in one turn."""
    generate: str = Field(
        "fsm_trainer.workers.single_turn:generate", pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"
    )
    """``module:function`` of the hook ``async generate(context, sample)``."""
    engine: EngineConfig = EngineConfig()
    """The engine."""


class EvaluationConfig(BaseModel, extra="forbid", frozen=True):
    """Evaluation on the held-out sets."""

    every: int = Field(10, ge=0)
    """Steps between evaluations; 0 evaluates at start, after the warm-up and at the end only."""
    temperature: float = Field(0.0, ge=0)
    """0 is greedy."""


class CheckpointConfig(BaseModel, extra="forbid", frozen=True):
    """What a run can be resumed from."""

    every: int = Field(0, ge=0)
    """Steps between checkpoints; 0 writes one at the end only."""
    keep: int = Field(2, ge=1)
    """How many are kept."""


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
    gpus: int = Field(0, ge=0)
    """Devices for the run; 0 trains on the CPU."""


class LinkConfig(BaseModel, extra="forbid", frozen=True):
    """The link that carries weights to the rollout workers."""

    timeout: float = Field(60.0, gt=0)
    """Seconds that one operation on the link may take."""
    bucket_bytes: int = Field(64 * 2**20, ge=1024)
    """Bytes that travel in one piece."""


class DeadlineConfig(BaseModel, extra="forbid", frozen=True):
    """Seconds that a worker may take; past it the worker is declared dead and its process ended."""

    transition: float = Field(300.0, gt=0)
    """For a part of a transition; loading a model is one."""
    action: float = Field(3600.0, gt=0)
    """For an action."""
    control: float = Field(30.0, gt=0)
    """For a control call, and for a process to end."""


class RunConfig(BaseModel, extra="forbid", frozen=True):
    """A run."""

    seed: int = Field(0, ge=0)
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
    checkpoint: CheckpointConfig = CheckpointConfig()
    metrics: MetricsConfig = MetricsConfig()
    cluster: ClusterConfig = ClusterConfig()
    link: LinkConfig = LinkConfig()
    deadlines: DeadlineConfig = DeadlineConfig()


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

    @property
    def critic(self) -> RoleConfig | None:
        """The critic's settings, if the schedule has one."""
        has = Role.CRITIC in self.spec.roles
        return (self.config.critic or self.config.actor) if has else None

    @property
    def system(self) -> System:
        """The machines of the run, composed."""
        return System.of(self.spec, self.config.rollout.workers)

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
        raise document.error("the file must be a mapping of settings, such as `steps: 10`")
    origins = dict(_override(document, text) for text in overrides)
    _resolve_paths(document, path.parent)
    config = document.parse(RunConfig, origins)
    checks = _Checks(document, config, states, origins)
    spec, notes = checks.schedule()
    checks.contradictions(spec)
    checks.installed()
    return Run(config, spec, tuple(notes), states, path, document.data)


def _override(document: Document, text: str) -> tuple[tuple[str | int, ...], str]:
    key, sign, value = text.partition("=")
    origin = f"--set {text}"
    if not sign or not key:
        raise ConfigError(f"{origin}: write --set key.path=value, such as --set actor.ranks=2")
    at = tuple(key.split("."))
    here = document.data
    for part in at[:-1]:
        here = here.setdefault(part, {})
        if not isinstance(here, dict):
            raise ConfigError(f"{origin}: {part!r} is a value and has no fields of its own")
    try:
        here[at[-1]] = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"{origin}: {value!r} is not YAML: {error}") from None
    return at, origin


def _resolve_paths(document: Document, folder: Path) -> None:
    """Paths in the file are relative to the file."""

    def absolute(entry: Any, key: str) -> None:
        if isinstance(entry, dict) and isinstance(entry.get(key), str):
            entry[key] = str((folder / entry[key]).resolve())

    data = document.data.get("data")
    absolute(document.data.get("model"), "path")
    if isinstance(data, dict):
        further = data.get("evaluation")
        for entry in [data.get("train"), *(further.values() if isinstance(further, dict) else ())]:
            absolute(entry, "path")


class _Checks:
    """What no single field can know."""

    def __init__(
        self,
        document: Document,
        config: RunConfig,
        states: Path | None,
        origins: dict[tuple[str | int, ...], str],
    ) -> None:
        self.document, self.config, self.states, self.origins = document, config, states, origins

    def fail(self, at: str, value: object, problem: str, remedy: str) -> ConfigError:
        keys = tuple(at.split("."))
        where = self.origins.get(keys) or self.document.where(*keys)
        return ConfigError(f"{where}: {at}: {problem} (given: {value!r}). {remedy}")

    def schedule(self) -> tuple[Spec, list[str]]:
        config, notes = self.config, []
        ppo = isinstance(config.algorithm, PPOConfig)
        name = config.schedule
        if name is None:
            name = "disaggregated_critic" if ppo else "disaggregated"
            notes.append(f"schedule: {name} (algorithm: {config.algorithm.name})")
        known = schedules(self.states)
        if name not in known:
            remedy = f"Choose one of {', '.join(known)}."
            raise self.fail("schedule", name, "there is no such schedule", remedy)
        try:
            spec = load(name, self.states)
        except SpecError as error:
            raise ConfigError(str(error)) from None
        critic = Role.CRITIC in spec.roles
        if ppo != critic:
            has = "has a critic" if critic else "has no critic"
            remedy = "Use algorithm.name: ppo with a critic's schedule, grpo with one without."
            problem = f"schedule {name} {has}"
            raise self.fail("algorithm.name", config.algorithm.name, problem, remedy)
        if config.train_offload is not None and config.train_offload is not critic:
            word = "sleep in turn, because they share devices" if critic else "never sleep"
            problem = f"contradicts schedule {name}, in which the trainers {word}"
            remedy = "Remove the line, or choose another schedule."
            raise self.fail("train_offload", config.train_offload, problem, remedy)
        notes.append(
            f"critic ⇒ train offload: {'on' if critic else 'off'}"
            + (f" (target: {config.actor.offload.target})" if critic else " (no critic)")
        )
        return spec, notes

    def contradictions(self, spec: Spec) -> None:
        config = self.config
        rollout, algorithm = config.rollout, config.algorithm
        if Role.CRITIC not in spec.roles and config.critic is not None:
            remedy = "Remove it, or use algorithm.name: ppo."
            raise self.fail("critic", "…", f"schedule {spec.name} has no critic", remedy)
        if isinstance(algorithm, GRPOConfig) and rollout.copies < 2:
            problem = "GRPO compares the trajectories of a prompt, so it needs at least 2"
            raise self.fail("rollout.copies", rollout.copies, problem, "Set rollout.copies: 8.")
        total = rollout.prompts * rollout.copies
        if total < algorithm.minibatches:
            problem = f"a step has only {total} trajectories (prompts × copies)"
            remedy = f"At most {total} minibatches, or more prompts."
            raise self.fail("algorithm.minibatches", algorithm.minibatches, problem, remedy)
        if total < rollout.workers:
            problem = f"a step has only {total} trajectories (prompts × copies)"
            remedy = "Fewer workers, or more prompts."
            raise self.fail("rollout.workers", rollout.workers, problem, remedy)
        if rollout.engine.dtype != config.actor.dtype:
            problem = f"the actor pushes {config.actor.dtype}"
            remedy = "Give actor.dtype and rollout.engine.dtype the same value."
            raise self.fail("rollout.engine.dtype", rollout.engine.dtype, problem, remedy)
        if isinstance(algorithm, PPOConfig) and algorithm.critic_warmup_steps >= config.steps > 0:
            problem = f"with steps: {config.steps} the actor would never train"
            value = algorithm.critic_warmup_steps
            raise self.fail(
                "algorithm.critic_warmup_steps", value, problem, "Fewer of them, or more steps."
            )
        self.devices(spec)

    def devices(self, spec: Spec) -> None:
        """Too few devices are found before any process starts."""
        config = self.config
        gpus, colocated = config.cluster.gpus, spec.schedule.facts.get("colocated", False)
        trainers, engines = config.actor.ranks, config.rollout.workers
        needed = max(trainers, engines) if colocated else trainers + engines
        if 0 < gpus < needed:
            how = "the larger of both, colocated" if colocated else "their sum, disaggregated"
            problem = f"{trainers} actor ranks and {engines} rollout workers need {needed} devices ({how})"
            remedy = "More devices, fewer workers, or gpus: 0 for the CPU."
            raise self.fail("cluster.gpus", gpus, problem, remedy)

    def installed(self) -> None:
        for at, name in (
            ("reward.function", self.config.reward.function),
            ("rollout.generate", self.config.rollout.generate),
        ):
            module = name.partition(":")[0]
            try:
                found = importlib.util.find_spec(module)
            except (ImportError, ValueError):
                found = None
            if found is None:
                remedy = "Is its folder on PYTHONPATH, and the name spelled as it is imported?"
                raise self.fail(at, name, f"there is no module {module!r}", remedy)
        for kind, entry in {"train": self.config.data.train, **self.config.data.evaluation}.items():
            path = getattr(entry, "path", None)
            at = "data.train.path" if kind == "train" else f"data.evaluation.{kind}.path"
            if path is not None and not Path(path).is_file():
                raise self.fail(
                    at, str(path), "there is no such file", "Paths are relative to this file."
                )
        model = self.config.model.path
        if model is not None and not model.is_dir():
            raise self.fail(
                "model.path",
                str(model),
                "there is no such folder",
                "Paths are relative to this file.",
            )
