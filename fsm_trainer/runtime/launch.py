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

from fsm_trainer.groups.rendezvous import Rendezvous
from fsm_trainer.machine.errors import ConfigError
from fsm_trainer.machine.names import Role
from fsm_trainer.machine.world import World
from fsm_trainer.runtime.checkpoints import Checkpoints
from fsm_trainer.runtime.cluster import Cluster, Recipe
from fsm_trainer.runtime.config import RoleConfig, Run
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

JOURNAL, METRICS, CONFIG, CHECKPOINTS = (
    "journal.jsonl",
    "metrics.jsonl",
    "config.yaml",
    "checkpoints",
)
TRAINERS = {Role.ACTOR: "ActorHost", Role.CRITIC: "CriticHost"}


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
    (folder / CONFIG).write_text(yaml.safe_dump(run.document, sort_keys=False))


class _Launch:
    def __init__(self, run: Run, folder: Path, console: Console, resume: bool) -> None:
        self.run_config, self.folder, self.console = run, folder, console
        self.checkpoints = Checkpoints(folder / CHECKPOINTS, run.config.checkpoint.keep)
        self.position = self.checkpoints.latest() if resume else None
        self.left: World | None = None
        if resume and self.position is None:
            raise ConfigError(f"--resume {folder}: there is no complete checkpoint in it")

    async def run(self) -> None:
        task = asyncio.current_task()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            if task is not None:
                loop.add_signal_handler(number, task.cancel)
        path = self.folder / JOURNAL
        self.left = self._left(path) if self.position is not None and path.exists() else None
        with self._metrics() as metrics, Journal(path) as journal:
            await self._with_cluster(metrics, journal)

    def _left(self, path: Path) -> World | None:
        """The world that the run had when it ended; a journal that doesn't say is set aside."""
        entries = [entry.model_dump(mode="json") for entry in read_journal(path)]
        world = replay(entries, self.run_config.system)
        if world is None:
            aside = path.with_name(f"journal-{int(time.time())}.jsonl")
            log.warning("the journal does not lead on, a new one begins", aside=str(aside))
            path.rename(aside)
        return world

    @contextmanager
    def _metrics(self) -> Iterator[MetricsWriter]:
        settings, sinks = self.run_config.config.metrics, list[Sink]()
        if settings.tensorboard:
            sinks.append(TensorBoard(self.folder / "tensorboard"))
        if settings.wandb is not None:
            document = self.run_config.document
            sinks.append(WeightsAndBiases(self.folder, settings.wandb, document))
        with MetricsWriter(self.folder / METRICS, tuple(sinks)) as metrics:
            yield metrics

    async def _with_cluster(self, metrics: MetricsWriter, journal: Journal) -> None:
        run, began = self.run_config, time.monotonic()
        layout = _Layout(run)
        cluster = Cluster(run.config.cluster, layout.bundles, self.folder)
        try:
            await cluster.reserve(run.config.deadlines.transition)
            host = "127.0.0.1" if run.config.cluster.address is None else cluster.host
            with Rendezvous.bind(host) as rendezvous:
                ports, data = await self._processes(cluster, rendezvous, layout)
                log.info("all processes are up", seconds=round(time.monotonic() - began, 1))
                await self._train(ports, data, metrics, journal, rendezvous)
        finally:
            await asyncio.shield(asyncio.to_thread(cluster.close))

    async def _processes(
        self, cluster: Cluster, rendezvous: Rendezvous, layout: _Layout
    ) -> tuple[dict[str, RayPort], RayData]:
        """Start all processes; they import side by side, and wait for the model's folder."""
        config = self.run_config.config
        arguments = {
            "data": config.data,
            "reward": config.reward,
            "model": config.model,
            "cache": self.folder / "model",
            "seed": config.seed,
        }
        data_host = "fsm_trainer.workers.data:DataHost"
        data_recipe = Recipe(RayData.name, data_host, arguments, layout.data_bundle)
        model = Path()

        def recipes(name: str, role: Role) -> list[Recipe]:
            ranks = range(layout.ranks(role))
            return [self._recipe(name, role, r, model, rendezvous, layout) for r in ranks]

        ports = {
            name: RayPort(cluster, name, partial(recipes, name, role), config.deadlines)
            for name, role in self.run_config.system.names.items()
        }
        cluster.start(data_recipe)
        for port in ports.values():
            port.start()
        data = RayData(cluster, config.deadlines)
        await cluster.setup(data_recipe, config.deadlines.transition)
        model = await data.model()
        await asyncio.gather(*(port.setup() for port in ports.values()))
        return ports, data

    def _recipe(
        self,
        name: str,
        role: Role,
        rank: int,
        model: Path,
        rendezvous: Rendezvous,
        layout: _Layout,
    ) -> Recipe:
        run, config = self.run_config, self.run_config.config
        process = f"{name}.{rank}" if layout.ranks(role) > 1 else name
        place = Place(
            system=run.system,
            name=name,
            rank=rank,
            ranks=layout.ranks(role),
            store=rendezvous.address,
            link_timeout=config.link.timeout,
            backend="nccl" if config.cluster.gpus else "gloo",
            scratch=self.folder / "scratch" / process,
        )
        bundle, gpus = layout.place(name, role, rank)
        if role is Role.ROLLOUT:
            arguments: dict[str, Any] = {
                "place": place,
                "config": config.rollout.engine,
                "model": model,
                "hook": config.rollout.generate,
                "max_new_tokens": config.rollout.max_new_tokens,
            }
            host = "fsm_trainer.workers.rollout:RolloutHost"
            return Recipe(process, host, arguments, bundle, gpus=gpus)
        settings = self._trainer_settings(role)
        warmed = role is Role.CRITIC and run.warms_up
        arguments = {
            "place": place,
            "config": settings,
            "model": self.folder / "warmed-up" if warmed else model,
            "tokenizer": model,
            "seed": config.seed,
            "total_steps": run.optimizer_steps(role),
            "threads": settings.threads,
            "checkpoint": self._checkpoint(role),
        }
        host = f"fsm_trainer.workers.trainer:{TRAINERS[role]}"
        return Recipe(process, host, arguments, bundle, gpus=gpus)

    def _checkpoint(self, role: Role) -> Path | None:
        """What a role's process starts from: also one that replaces a dead process."""
        position = self.checkpoints.latest()
        return None if position is None else self.checkpoints.folder(position.step, str(role))

    def _trainer_settings(self, role: Role) -> RoleConfig:
        run = self.run_config
        return run.critic if role is Role.CRITIC and run.critic else run.config.actor

    async def _train(
        self,
        ports: dict[str, RayPort],
        data: RayData,
        metrics: MetricsWriter,
        journal: Journal,
        rendezvous: Rendezvous,
    ) -> None:
        run = self.run_config
        reconciler = Reconciler(run.system, ports, journal, rendezvous.revoke)
        with _bar(self.console, run.config.steps) as told:
            driver = Driver(run, self.folder, reconciler, data, metrics, self.checkpoints, told)
            if self.left is not None:
                reconciler.take_over(self.left)
            if self.position is not None:
                await driver.restore(self.position)
            await driver.train()
        summary = {"finished": True, "steps": run.config.steps}
        (self.folder / "run.json").write_text(json.dumps(summary) + "\n")


class _Layout:
    """Which process runs in which of the cluster's bundles."""

    def __init__(self, run: Run) -> None:
        config, self._run = run.config, run
        trainers, engines = config.actor.ranks, run.engines
        self._colocated = bool(run.spec.schedule.facts.get("colocated"))
        slots = max(trainers, engines) if self._colocated else trainers + engines
        gpus = config.cluster.gpus
        self.gpus = _floor(1 / math.ceil(slots / gpus)) if gpus else 0.0
        tenants = len(run.spec.roles)
        bundle = {"CPU": float(tenants), **({"GPU": self.gpus} if self.gpus else {})}
        self.bundles = [dict(bundle) for _ in range(slots)] + [{"CPU": 1.0}]
        self.data_bundle = slots
        self._share = _floor(self.gpus / tenants)

    def ranks(self, role: Role) -> int:
        """Processes of a worker of this role."""
        return 1 if role is Role.ROLLOUT else self._run.config.actor.ranks

    def place(self, name: str, role: Role, rank: int) -> tuple[int, float]:
        """The bundle of a process, and its share of the device there."""
        if role is not Role.ROLLOUT:
            return rank, self._share
        index = int(name.rpartition("-")[2])
        first = 0 if self._colocated else self._run.config.actor.ranks
        return first + index, self._share


def _floor(share: float) -> float:
    """Ray counts shares of a device in ten-thousandths."""
    return math.floor(share * 10_000) / 10_000


@contextmanager
def _bar(console: Console, steps: int) -> Iterator[Any]:
    """A progress bar that shows the phase and the latest rewards."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[figures]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=False) as bar:
        task = bar.add_task("starting", total=steps, figures="")
        figures: dict[str, float] = {}

        def told(progress: StepProgress, phase: str) -> None:
            names = {"train/reward": "reward", "eval/reward": "held-out", "train/kl": "KL"}
            figures.update(
                {short: progress.numbers[n] for n, short in names.items() if n in progress.numbers}
            )
            text = "  ".join(f"{name} {value:.3f}" for name, value in figures.items())
            bar.update(task, completed=progress.step, description=phase, figures=text)

        yield told
