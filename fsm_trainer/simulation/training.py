"""One simulated training: the real driver, reconciler, journal and checkpoints, on virtual time."""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

from fsm_trainer.machine.errors import (
    ActionFailed,
    DeadlineExceeded,
    EffectFailed,
    FsmError,
    WorkerLost,
)
from fsm_trainer.machine.names import Role, State
from fsm_trainer.machine.planner import Move, plan, position
from fsm_trainer.machine.spec import Phase, Spec, load
from fsm_trainer.machine.world import System, World
from fsm_trainer.runtime.checkpoints import Checkpoints, Position
from fsm_trainer.runtime.config import Run, RunConfig
from fsm_trainer.runtime.driver import Driver
from fsm_trainer.runtime.journal import Entry, Journal, Kind
from fsm_trainer.runtime.metrics import MetricsWriter
from fsm_trainer.runtime.reconciler import ATTEMPTS, Reconciler, TrainerLost
from fsm_trainer.simulation.faults import Fault, What, draw
from fsm_trainer.simulation.loop import SimulatedLoop, Stuck
from fsm_trainer.simulation.ports import SimulatedData, SimulatedPort
from fsm_trainer.simulation.process import Weights
from fsm_trainer.simulation.properties import exactly_once
from fsm_trainer.simulation.site import Site, Violated
from fsm_trainer.verify.conformance import check_journal, replay
from fsm_trainer.verify.run import counted

MOST_FAULTS = ATTEMPTS
"""Of a run; more could use up the attempts of one phase."""
HANG, STEP = 3700.0, 300.0
"""Virtual seconds that a fault and a step may cost at most; a run that needs more is stuck."""


@dataclass(frozen=True)
class Training:
    """What is simulated."""

    schedule: str
    seed: int
    steps: int = 20
    rollouts: int = 2
    faults: tuple[Fault, ...] | None = None
    """What goes wrong; by default what the seed draws."""
    killed: float = 0.0
    """The virtual second at which the run itself is killed, to be resumed; 0 is never."""


@dataclass(frozen=True)
class Result:
    """What a simulated training came to."""

    training: Training
    fired: tuple[Fault, ...]
    """The faults that came to pass."""
    failure: str
    """Why it is wrong; empty if all is well."""
    end: str
    """``finished``, or the error that ended the run."""
    seconds: float
    """Virtual ones."""
    told: tuple[str, ...]
    """All that happened, in order."""
    story: tuple[str, ...]
    """The journal, a line a record."""


@lru_cache
def tables(schedule: str) -> Spec:
    """The tables of a schedule, read once."""
    return load(schedule)


_plans: dict[object, tuple[Move, ...]] = {}


def planned(system: System, world: World, phase: Phase) -> tuple[Move, ...]:
    """The planner's way; seeds come to the same positions, and planning is most of their time."""
    # No guard calculates with versions, so their order is all that a plan depends on.
    numbers = sorted({w.version.number for w in world.workers if w.version})
    workers = tuple(
        w._replace(version=w.version and w.version._replace(number=numbers.index(w.version.number)))
        for w in world.workers
    )
    here = position(world._replace(workers=workers))
    key = (system.spec.name, tuple(system.names), here, phase.name)
    if key not in _plans:
        _plans[key] = plan(system, world, phase)
    return _plans[key]


def configured(training: Training) -> Run:
    """The configuration of a simulated run: it warms up, evaluates and writes checkpoints."""
    spec = tables(training.schedule)
    settings = {
        "seed": training.seed,
        "steps": training.steps,
        "schedule": training.schedule,
        "model": {"path": "model"},
        "algorithm": {
            "name": "ppo" if Role.CRITIC in spec.roles else "grpo",
            "kl_in": "reward" if spec.schedule.facts["kl_in_reward"] else "loss",
        },
        "warmup": {"steps": 1},
        "rollout": {"workers": training.rollouts, "prompts": 2 * training.rollouts},
        "data": {"train": {"kind": "reasoning_gym", "task": "chain_sum", "size": 8}},
        "reward": {"function": "simulated:reward"},
        "evaluation": {"every": 5},
        "checkpoint": {"every": 2},
    }
    config = RunConfig.model_validate(settings)
    return Run(config, spec, ())


def faults_of(training: Training) -> tuple[Fault, ...]:
    """The faults of a training."""
    if training.faults is not None:
        return training.faults
    system = configured(training).system
    return draw(system, training.seed, Random(training.seed), MOST_FAULTS)


def simulate(training: Training) -> Result:
    """Run a training; the same one tells the same story."""
    with tempfile.TemporaryDirectory() as folder:
        return _Simulation(training).run(Path(folder))


class _Watched(Journal):
    """A journal after whose every record the properties are asked."""

    def __init__(self, path: Path, site: Site, loop: SimulatedLoop) -> None:
        super().__init__(path, loop.time)
        self._site, self.entries = site, list[Entry]()

    def record(self, **told: Any) -> Entry:
        entry = super().record(**told)
        self.entries.append(entry)
        self._site.look()
        return entry

    def told(self) -> list[dict[str, Any]]:
        """The records, as they stand in the file."""
        return [entry.model_dump(mode="json") for entry in self.entries]


class _Simulation:
    def __init__(self, training: Training) -> None:
        self.training, self.faults = training, faults_of(training)
        self.setup, random = configured(training), Random(training.seed)
        self.system = self.setup.system
        self.longest = (2 + len(self.faults)) * HANG + training.steps * STEP
        self.site = Site(self.system, random, self.faults)
        self.loop = SimulatedLoop(random, lambda: self.site.violation)  # type: ignore[abstract]
        self.end: FsmError | None = None
        self.ports: list[SimulatedPort] = []

    def run(self, folder: Path) -> Result:
        checkpoints = Checkpoints(folder / "checkpoints", self.setup.config.checkpoint.keep)
        metrics = MetricsWriter(folder / "metrics.jsonl", clock=self.loop.time)
        with metrics, _Watched(folder / "journal.jsonl", self.site, self.loop) as journal:
            failure = ""
            try:
                self.loop.run(self._train(folder, journal, metrics, checkpoints), self.longest)
                failure = self._wrong(journal, checkpoints)
            except (Stuck, Violated) as problem:
                failure = str(problem)
            except Exception as problem:
                failure = f"{type(problem).__name__} is no error of ours: {problem}"
        end = f"{type(self.end).__name__}: {self.end}" if self.end else "finished"
        return Result(
            self.training,
            tuple(self.site.fired),
            failure,
            failure or end,
            self.loop.time(),
            tuple(self.site.told),
            tuple(_line(entry) for entry in journal.entries),
        )

    async def _train(
        self, folder: Path, journal: _Watched, metrics: MetricsWriter, checkpoints: Checkpoints
    ) -> None:
        deadlines, site = self.setup.config.deadlines, self.site
        first: dict[Role, Weights] = {
            role: site.trained() for role in self.system.spec.roles if role != Role.ROLLOUT
        }

        def restored(role: Role) -> Weights | None:
            position = checkpoints.latest()
            if position is None or role is Role.ROLLOUT:
                return first.get(role)
            return site.saved[checkpoints.folder(position.step, role).parent.name, role]

        async def driven(position: Position | None) -> None:
            """One process of the run; a later one goes on from a checkpoint."""
            site.world = self.system.initial
            ports = {n: SimulatedPort(site, n, deadlines, restored) for n in self.system.names}
            self.ports += ports.values()
            self.reconciler = Reconciler(self.system, ports, journal, site.revoke, planned=planned)
            data = SimulatedData(site)
            driver = Driver(self.setup, folder, self.reconciler, data, metrics, checkpoints)
            if position is not None:
                if (left := replay(journal.told(), self.system)) is None:
                    raise Violated("the journal of a killed run does not lead on")
                self.reconciler.take_over(left)
                await driver.restore(position)
            site.world = lambda: self.reconciler.world
            await driver.train()

        try:
            if await self._killed(driven(None)):
                if (position := checkpoints.latest()) is None:
                    raise TrainerLost("the run was killed before its first checkpoint")
                await driven(position)
        except FsmError as error:
            self.end = error
        await asyncio.sleep(1.0)  # what was cancelled ends

    async def _killed(self, run: Coroutine[Any, Any, None]) -> bool:
        """Whether the run was killed, and with it all its processes, before it had ended."""
        task = asyncio.ensure_future(run)
        await asyncio.wait([task], timeout=self.training.killed or None)
        if task.done():
            task.result()
            return False
        task.cancel()
        await asyncio.wait([task])
        self.site.tell("the run is killed")
        for process in self.site.processes.values():
            process.die()
        return True

    def _wrong(self, journal: _Watched, checkpoints: Checkpoints) -> str:
        """What is wrong with a run that came to an end."""
        violation = check_journal(journal.told(), self.system, prefix=self.end is not None)
        if violation is not None:
            return f"the journal does not conform: {violation}"
        if self.loop.problems:
            return self.loop.problems[0]
        ours = {task for port in self.ports for task in port.tasks}
        left = [t for t in asyncio.all_tasks(self.loop) if t not in ours and not t.done()]
        if left:
            return f"the driver left {len(left)} tasks behind: {sorted(map(_name, left))}"
        if self.end is not None:
            return self._unexcused(self.end, checkpoints)
        return self._unclean() or self._unplanned(journal.entries)

    def _unexcused(self, error: FsmError, checkpoints: Checkpoints) -> str:
        """A run may end early only by what recovery can't mend."""
        fired, text = self.site.fired, f"{type(error).__name__}: {error}"
        trainers = [f for f in fired if self.system.names[f.worker] is not Role.ROLLOUT]
        tables = self.system.spec.roles.values()
        actions = {a for t in tables for a, row in t.actions.items() if row.joint is None}
        match error:
            case TrainerLost():
                hopeless = checkpoints.latest() is None or len(trainers) >= ATTEMPTS
                excused = bool(trainers or self.training.killed) and hopeless
            case DeadlineExceeded():
                excused = any(f.where == "call kill" for f in fired)
            case ActionFailed() if any(
                f.what is What.FAIL and f.where in {*actions, "call checksums"} for f in fired
            ):
                excused = True
            case WorkerLost() | EffectFailed() | ActionFailed():
                excused = len(fired) >= ATTEMPTS
            case _:
                excused = False
        return "" if excused else f"nothing excuses this end: {text}"

    def _unclean(self) -> str:
        """What is not as it must be when a run has finished."""
        world, system = self.reconciler.world, self.system
        for name in system.names:
            state, process = system.get(world, name).state, self.site.processes[name]
            if state != State.DISCONNECTED or process.has:
                return f"the run finished, and {name} is {state} and holds {sorted(process.has)}"
        trainers: dict[Role, tuple[int, ...]] = {
            process.role: process.weights.draws if process.weights else ()
            for process in self.site.processes.values()
            if process.role is not Role.ROLLOUT
        }
        wrong = exactly_once(trainers, self.training.steps)
        return f"not every step exactly once: {wrong}" if wrong else ""

    def _unplanned(self, entries: list[Entry]) -> str:
        """A run in which nothing went wrong makes the transitions of its plan, and no other."""
        told = Counter((e.worker, e.trigger) for e in entries if e.kind is Kind.TRANSITION)
        plan = counted(self.system, self.training.steps)
        if told == plan or self.site.fired or self.training.killed:
            return ""
        return f"nothing failed, and beside its plan it did {told - plan}, not {plan - told}"


def _name(task: asyncio.Task[Any]) -> str:
    return str(task.get_coro())


def _line(entry: Entry) -> str:
    moved = entry.source if entry.source == entry.dest else f"{entry.source} -> {entry.dest}"
    text = (
        f"{entry.seq} at {entry.time:.1f} s: {entry.worker} {entry.kind} {entry.trigger}: {moved}"
    )
    outcome = "" if entry.ok else f", failed: {entry.error}"
    return f"{text}, epoch {entry.epoch}, version {entry.version}{outcome}"
