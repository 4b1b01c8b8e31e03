"""Launch a run: its folder, its processes, its driver; and end all of it, whatever happens."""

from __future__ import annotations

import asyncio
import json
import math
import signal
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import structlog
import yaml
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from fsm_trainer.data.durable import write_durably
from fsm_trainer.document import LineError
from fsm_trainer.groups.rendezvous import Address, Rendezvous
from fsm_trainer.machine.errors import ConfigError
from fsm_trainer.machine.names import Role
from fsm_trainer.machine.world import World
from fsm_trainer.runtime.checkpoints import Checkpoints
from fsm_trainer.runtime.cluster import Cluster, Recipe
from fsm_trainer.runtime.config import Only, RoleConfig, Run
from fsm_trainer.runtime.driver import Driver
from fsm_trainer.runtime.driver import Progress as StepProgress
from fsm_trainer.runtime.journal import Journal, read_journal
from fsm_trainer.runtime.logs import Logs
from fsm_trainer.runtime.metrics import MetricsWriter, Sink, TensorBoard, WeightsAndBiases
from fsm_trainer.runtime.ray_ports import RayData, RayPort
from fsm_trainer.runtime.reconciler import Reconciler
from fsm_trainer.verify.conformance import replay
from fsm_trainer.workers.host import Place

log = structlog.get_logger(__name__)

JOURNAL = "journal.jsonl"
HOSTS = {
    Role.ACTOR: "fsm_trainer.workers.trainer:ActorHost",
    Role.CRITIC: "fsm_trainer.workers.trainer:CriticHost",
    Role.ROLLOUT: "fsm_trainer.workers.rollout:RolloutHost",
}


def launch(run: Run, folder: Path, console: Console, resume: bool = False) -> None:
    """Run to the end; raises what ended it early. Afterwards no process of the run is left."""
    _prepare(run, folder, resume)
    with closing(Logs(folder, console)):
        for note in run.notes:
            console.print(note, style="dim", highlight=False)
        asyncio.run(_Launch(run, folder, console, resume).run())


def _prepare(run: Run, folder: Path, resume: bool) -> None:
    taken = folder / JOURNAL
    if taken.exists() and not resume:
        raise ConfigError(
            f"--out {folder}: a run stands there already. Choose another folder, or go on with "
            f"--resume {folder}"
        )
    folder.mkdir(parents=True, exist_ok=True)
    told = yaml.safe_dump(run.document, sort_keys=False)
    write_durably(folder / "config.yaml", told.encode())  # a kill in here must leave one to resume


class _Launch:
    def __init__(self, run: Run, folder: Path, console: Console, resume: bool) -> None:
        self.run_config, self.config, self.folder, self.console = run, run.config, folder, console
        self.layout, self.model = _Layout(run), Path()
        self.checkpoints = Checkpoints(folder / "checkpoints", run.config.checkpoint.keep)
        self.resume, self.position = resume, self.checkpoints.latest() if resume else None
        if resume and self.position is None:
            if run.only is Only.ROLLOUT:
                problem = "a run that only generates has no checkpoints"
                raise ConfigError(f"--resume {folder}: {problem}. Start it again in another folder")
            log.warning("no checkpoint is complete, the run begins again with step 1")
        if self.position is not None and run.dump_step in range(1, self.position.step + 1):
            raise ConfigError(
                f"--dump-step {run.dump_step}: the run goes on after step {self.position.step}. "
                "Give a later one, or start again in another folder"
            )

    async def run(self) -> None:
        task = asyncio.current_task()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            if task is not None:
                loop.add_signal_handler(number, task.cancel)
        path, began = self.folder / JOURNAL, time.monotonic()
        left = self._left(path) if self.resume else None
        metrics = MetricsWriter(self.folder / "metrics.jsonl", tuple(self._sinks()))
        with metrics, Journal(path) as journal:
            cluster = Cluster(self.config.cluster, self.layout.bundles, self.folder)
            try:
                await cluster.reserve(self.config.deadlines.transition)
                host = "127.0.0.1" if self.config.cluster.address is None else cluster.host
                with Rendezvous.bind(host) as rendezvous:
                    ports, data = await self._processes(cluster, rendezvous.address)
                    log.info("all processes are up", seconds=round(time.monotonic() - began, 1))
                    system = self.run_config.system
                    reconciler = Reconciler(system, ports, journal, rendezvous.revoke)
                    if left is not None:
                        reconciler.take_over(left)
                    await self._train(reconciler, data, metrics)
            finally:
                await asyncio.shield(asyncio.to_thread(cluster.close))

    def _left(self, path: Path) -> World:
        """The world that the run had when it ended; a journal that doesn't say is set aside."""
        system, world = self.run_config.system, None
        if path.exists():
            try:
                entries = [entry.model_dump(mode="json") for entry in read_journal(path)]
                world = replay(entries, system)
            except LineError as error:
                log.warning("the journal can't be read", error=str(error))
            if world is None:
                aside = path.with_name(f"journal-{int(time.time())}.jsonl")
                log.warning("the journal does not lead on, a new one begins", aside=str(aside))
                path.rename(aside)
        # Without a journal nobody is left, and links begin at epoch 1, under a store of this run.
        lineage = self.position.lineage if self.position is not None else 0
        return world or system.initial()._replace(lineage=lineage)

    def _sinks(self) -> Iterator[Sink]:
        settings = self.config.metrics
        if settings.tensorboard:
            yield TensorBoard(self.folder / "tensorboard")
        if settings.wandb is not None:
            yield WeightsAndBiases(self.folder, settings.wandb, self.run_config.document)

    async def _processes(
        self, cluster: Cluster, store: Address
    ) -> tuple[dict[str, RayPort], RayData]:
        """Start all processes; they import side by side, and wait for the model's folder."""
        config = self.config
        arguments = {
            "data": config.data,
            "reward": config.reward,
            "model": config.model,
            "cache": self.folder / "model",
            "seed": config.seed,
        }
        data_host = "fsm_trainer.workers.data:DataHost"
        data_recipe = Recipe(RayData.name, data_host, arguments, self.layout.data_bundle)
        cluster.start(data_recipe)
        ports = {}
        for name, role in self.run_config.system.names.items():
            recipes = partial(self._recipes, name, role, store)
            exits = role is not Role.ROLLOUT and self._settings(role).offload.target == "exit"
            ports[name] = RayPort(cluster, name, recipes, config.deadlines, exits)
            ports[name].start()
        data = RayData(cluster, config.deadlines)
        await cluster.setup(data_recipe, config.deadlines.transition)
        self.model = await data.model()
        await asyncio.gather(*(port.setup() for port in ports.values()))
        return ports, data

    def _recipes(self, name: str, role: Role, store: Address) -> list[Recipe]:
        """A worker's processes, as they start now: from the newest checkpoint."""
        config, ranks = self.config, self.layout.ranks(role)
        arguments = self._engine() if role is Role.ROLLOUT else self._trainer(role)
        recipes = []
        for rank in range(ranks):
            process = f"{name}.{rank}" if ranks > 1 else name
            place = Place(
                system=self.run_config.system,
                name=name,
                rank=rank,
                ranks=ranks,
                store=store,
                link_timeout=config.link.timeout,
                backend="nccl" if config.cluster.gpus else "gloo",
                scratch=self.folder / "scratch" / process,
                sink_ranks={Role.ROLLOUT: self.layout.sink_ranks, Role.ACTOR: config.actor.ranks},
                link_kind=config.link.kind,
                link_folder=config.link.folder or self.folder / "sync",
            )
            bundle = self.layout.bundle(name, role, rank)
            told = {"place": place, **arguments}
            recipes.append(Recipe(process, HOSTS[role], told, bundle, gpus=self.layout.share(role)))
        return recipes

    def _engine(self) -> dict[str, Any]:
        rollout = self.config.rollout
        return {
            "config": rollout.engine,
            "model": self.model,
            "hook": rollout.generate,
            "max_new_tokens": rollout.max_new_tokens,
        }

    def _settings(self, role: Role) -> RoleConfig:
        critic = self.run_config.critic if role is Role.CRITIC else None
        return critic or self.config.actor

    def _trainer(self, role: Role) -> dict[str, Any]:
        run, position, settings = self.run_config, self.checkpoints.latest(), self._settings(role)
        learned = role is Role.CRITIC and run.warms_up
        return {
            "config": settings,
            "model": self.model,
            "warmed_up": self.folder / "warmed-up" if learned else None,
            "tokenizer": self.model,
            "seed": run.config.seed,
            "total_steps": run.optimizer_steps(role),
            "threads": settings.threads,
            "checkpoint": position and self.checkpoints.folder(position.step, str(role)),
            "routing_replay": run.config.rollout.engine.routing_replay,
        }

    async def _train(self, reconciler: Reconciler, data: RayData, metrics: MetricsWriter) -> None:
        run, steps = self.run_config, self.config.steps
        with _bar(self.console, steps) as told:
            driver = Driver(run, self.folder, reconciler, data, metrics, self.checkpoints, told)
            if self.position is not None:
                await driver.restore(self.position)
            await driver.train()
        summary = {"finished": True, "steps": steps}
        write_durably(self.folder / "run.json", json.dumps(summary).encode() + b"\n")


class _Layout:
    """Which process runs in which of the cluster's bundles."""

    def __init__(self, run: Run) -> None:
        config, self._run = run.config, run
        trainers, engines = config.actor.ranks, run.engines
        self.sink_ranks, gpus = config.rollout.engine_ranks, config.cluster.gpus
        self._colocated = bool(run.spec.schedule.facts.get("colocated"))
        own = 0 if self._colocated else engines  # slots that no trainer has
        self._critic_first = trainers if run.critic_apart else 0
        trainers += run.critic.ranks if run.critic and run.critic_apart else 0
        self._engine_first = 0 if self._colocated else trainers
        slots = max(trainers, engines) if self._colocated else trainers
        devices = slots + own * self.sink_ranks
        each = _floor(1 / math.ceil(devices / gpus)) if gpus else 0.0
        tenants = len(run.spec.roles)
        widths = [1] * slots + [self.sink_ranks] * own
        self.bundles = [
            {"CPU": float(tenants), **({"GPU": each * width} if gpus else {})} for width in widths
        ] + [{"CPU": 1.0}]
        self.data_bundle = len(widths)
        self._share = _floor(each / tenants)

    def share(self, role: Role) -> float:
        """The devices, or the part of one, that a process has of its bundle."""
        whole = role is Role.ROLLOUT and self.sink_ranks > 1 and self._share > 0
        return float(self.sink_ranks) if whole else self._share

    def ranks(self, role: Role) -> int:
        """Processes of a worker of this role."""
        critic = self._run.critic if role is Role.CRITIC else None
        return 1 if role is Role.ROLLOUT else (critic or self._run.config.actor).ranks

    def bundle(self, name: str, role: Role, rank: int) -> int:
        """The bundle of a process."""
        if role is Role.ROLLOUT:
            return self._engine_first + int(name.rpartition("-")[2])
        return rank + (self._critic_first if role is Role.CRITIC else 0)


def _floor(share: float) -> float:
    """Ray counts shares of a device in ten-thousandths."""
    return math.floor(share * 10_000) / 10_000


@contextmanager
def _bar(console: Console, steps: int) -> Iterator[Any]:
    """A progress bar that shows the phase and the latest rewards."""
    figures = TextColumn("{task.fields[figures]}")
    columns = (BarColumn(), MofNCompleteColumn(), figures, TimeElapsedColumn())
    with Progress(TextColumn("{task.description}"), *columns, console=console) as bar:
        task = bar.add_task("starting", total=steps, figures="")
        shown: dict[str, float] = {}

        def told(progress: StepProgress, phase: str) -> None:
            names = {"train/reward": "reward", "eval/reward": "held-out", "train/kl": "KL"}
            numbers = progress.numbers
            shown.update({short: numbers[n] for n, short in names.items() if n in numbers})
            text = "  ".join(f"{name} {value:.3f}" for name, value in shown.items())
            bar.update(task, completed=progress.step, description=phase, figures=text)

        yield told
