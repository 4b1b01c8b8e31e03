"""The driver: runs a schedule's phases, each reached by the reconciler, each with its action.

It moves references, never tensors, and runs no user code. A run is data: the schedule's prologue,
its lanes for each step, and its epilogue; lanes run side by side.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from fsm_trainer.algorithms.config import PPOConfig
from fsm_trainer.data.dump import dump_path, step_dump
from fsm_trainer.data.seeds import derive
from fsm_trainer.machine.errors import (
    ActionFailed,
    DataError,
    EffectFailed,
    SelfCheckFailed,
    WorkerLost,
)
from fsm_trainer.machine.legal import actors_of
from fsm_trainer.machine.names import Role
from fsm_trainer.machine.version import Version
from fsm_trainer.runtime.checkpoints import Checkpoints, Position
from fsm_trainer.runtime.config import Only, Run
from fsm_trainer.runtime.dispatch import Dispatcher
from fsm_trainer.runtime.metrics import MetricsWriter, Stage
from fsm_trainer.runtime.port import DataPort, Outcome, now
from fsm_trainer.runtime.reconciler import ATTEMPTS, Reconciler, TrainerLost
from fsm_trainer.workers.data import Kept

log = structlog.get_logger(__name__)


@dataclass
class Progress:
    """What people and files are told of a step."""

    step: int = 0
    stage: Stage = Stage.START
    tokens: int = 0
    numbers: dict[str, float] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)
    dispatchers: dict[str, Dispatcher] = field(default_factory=dict)
    """What a phase has made so far; one that begins again makes only the rest."""
    rounds: list[Any] = field(default_factory=list)
    """Scored trajectories, where groups are filtered: what is left may take several rounds."""
    groups: int = 0
    """Groups that were left of them."""
    batch: Any = None
    scored: Any = None
    """The actor's log-probabilities, where the critic needs them first."""
    advantages: Any = None
    saved: dict[str, Any] = field(default_factory=dict)
    """The seals of what each role has written into the step's checkpoint."""


class Driver:
    """Trains.

    ``told`` hears after each phase what a step has come to so far.
    """

    def __init__(
        self,
        run: Run,
        folder: Path,
        reconciler: Reconciler,
        data: DataPort,
        metrics: MetricsWriter,
        checkpoints: Checkpoints,
        told: Callable[[Progress, str], None] = lambda progress, phase: None,
    ) -> None:
        self.run, self.folder, self.reconciler, self.data = run, folder, reconciler, data
        self.metrics, self.checkpoints, self.told = metrics, checkpoints, told
        self.config, self.spec = run.config, run.spec
        self.progress = Progress()
        self.first_step = 1
        self._manifest: Any = None
        self._verified = False
        self._evaluated: set[Stage] = set()
        reconciler.push = self.push
        self._actions: Mapping[str, Callable[[], Awaitable[None]]] = {
            "generate": self._generate,
            "evaluate": self._evaluate,
            "warm_up": self._warm_up,
            "score": self._score,
            "values": self._values,
            "send_values": self._send_values,
            "train": self._train,
            "push": self.push,
        }

    async def train(self) -> None:
        """Run the whole schedule.

        Raises:
            TrainerLost: an actor or critic died and there is no checkpoint to go back to.
        """
        step, reached, losses = self.first_step, 0, 0
        lost: TrainerLost | None = None
        if step == 1:
            await self._sequence(self.spec.schedule.prologue)
        while True:
            try:
                if lost is not None:
                    step, lost = await self._rewind(lost), None
                while step <= self.config.steps:
                    await self._step(step)
                    step += 1
                self.progress = Progress(self.config.steps, Stage.END)
                return await self._sequence(self.spec.schedule.epilogue)
            except TrainerLost as error:
                losses = losses + 1 if step <= reached else 1
                reached, lost = max(reached, step), error
                if losses >= ATTEMPTS or self.checkpoints.latest() is None:
                    raise

    async def _rewind(self, error: TrainerLost) -> int:
        """Go back to the last checkpoint; gives the step to go on with."""
        position = self.checkpoints.latest()
        if position is None:
            raise error
        log.warning("a trainer was lost, going back", step=position.step, error=str(error))
        for name, role in self.reconciler.system.names.items():
            if role is not Role.ROLLOUT:
                await self.reconciler.replace(name, str(error))
        await self.restore(position)
        return position.step + 1

    async def restore(self, position: Position) -> None:
        """Stand where a checkpoint was taken."""
        await self.data.restore(position.data)
        self.reconciler.start_version = Version(0, position.number)
        self.first_step = position.step + 1
        self._manifest = None

    async def _sequence(self, phases: tuple[str, ...]) -> None:
        for phase in self.run.phases(phases):
            action = self.spec.phases[phase].action
            if action == "warm_up":
                self.progress.stage = Stage.WARMUP
            elif action == "evaluate" and self.progress.stage in self._evaluated:
                continue
            await self._phase(phase)

    async def _step(self, step: int) -> None:
        began = now()
        self.progress = Progress(step, Stage.TRAIN)
        every = self.config.evaluation.every
        if every and step > 1 and (step - 1) % every == 0 and self.run.only is None:
            self.progress.step = step - 1
            await self._phase("evaluate")
            self.progress.step = step
            self.progress.phases.clear()
        try:
            async with asyncio.TaskGroup() as group:
                for lane in self.spec.schedule.lanes.values():
                    group.create_task(self._lane(lane, step))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None  # one lane's error has cancelled the others
        self.metrics.write(
            step,
            self.progress.numbers,
            seconds=now() - began,
            tokens=self.progress.tokens,
            phase_seconds=self.progress.phases,
        )
        await self._finish_checkpoint(step)

    async def _lane(self, phases: tuple[str, ...], step: int) -> None:
        if self.run.only is Only.TRAIN:
            await self._undump(step)
        of_the_actor = {"send_values", "push", *(() if self.run.critic_apart else ("train",))}
        for phase in self.run.phases(phases):
            if self._critic_warms(step) and self.spec.phases[phase].action in of_the_actor:
                continue
            await self._phase(phase)

    def _critic_warms(self, step: int) -> bool:
        algorithm = self.config.algorithm
        return isinstance(algorithm, PPOConfig) and step <= algorithm.critic_warmup_steps

    async def _phase(self, name: str) -> None:
        phase, began = self.spec.phases[name], now()
        for attempt in range(1, ATTEMPTS + 1):
            await self.reconciler.reach(phase)
            try:
                if phase.action is not None:
                    await self._actions[phase.action]()
                break
            except TrainerLost:
                raise
            except (WorkerLost, ActionFailed, EffectFailed) as error:
                joint = phase.action in ("push", "send_values")
                repeatable = isinstance(error, WorkerLost) or joint
                if not repeatable or attempt == ATTEMPTS:
                    raise
                log.warning("the phase begins again", phase=name, error=str(error))
        spent = self.progress.phases
        spent[name] = spent.get(name, 0.0) + now() - began
        self.told(self.progress, name)

    @property
    def _parts(self) -> int:
        return self.run.engines * self.config.rollout.parts

    def _names(self, action: str) -> list[str]:
        return actors_of(self.reconciler.system, self.reconciler.world, action)

    def _dispatcher(
        self, action: str, parts: Sequence[Any], temperature: float, seed: int
    ) -> Dispatcher:
        async def give(name: str, part: Any) -> Outcome:
            return (await self.reconciler.act(action, {name: (part, temperature, seed)}))[name]

        return Dispatcher(parts, give, self.data.summary)

    async def _generate(self) -> None:
        rollout, progress = self.config.rollout, self.progress
        while True:
            scored = await self._round(rollout.prompts - progress.groups)
            if not rollout.filter_rounds:
                break
            found = await self.data.informative([*progress.rounds, scored.payload])
            progress.rounds.append(scored.payload)
            kept: Kept = found.value
            scored, progress.groups = Outcome(found.payload, kept.means), kept.groups
            rounds = len(progress.rounds)
            if kept.groups == rollout.prompts or rounds >= rollout.filter_rounds:
                figures = {"groups": kept.groups, "dropped": kept.dropped, "rounds": rounds}
                progress.numbers |= {f"rollout/{name}": float(n) for name, n in figures.items()}
                progress.rounds, progress.groups = [], 0
                break
        self._take(scored)
        if self.run.only is Only.ROLLOUT:
            await self.data.dump(dump_path(self.folder, progress.step), scored.payload)

    async def _round(self, prompts: int) -> Outcome:
        """Trajectories of the next prompts, scored."""
        rollout, dispatchers = self.config.rollout, self.progress.dispatchers
        if "generate" not in dispatchers:
            count = min(self._parts, prompts)
            parts = await self.data.draw(prompts, rollout.copies, count)
            seed = derive(self.config.seed, "rollout", self.progress.step)
            temperature = self.config.algorithm.temperature
            dispatchers["generate"] = self._dispatcher("generate", parts, temperature, seed)
        made = await dispatchers["generate"].run(self._names("generate"))
        scored = await self.data.score([one.payload for one in made])
        del dispatchers["generate"]
        self.progress.tokens += sum(one.value for one in made)
        return scored

    async def _undump(self, step: int) -> None:
        self._take(await self.data.undump(dump_path(self.run.dump or self.folder, step)))

    def _take(self, scored: Outcome) -> None:
        """The step trains on these trajectories."""
        if not scored.value["count"]:
            equal = "all rewards of each group are equal. Raise rollout.filter_rounds or .copies"
            why = equal if self.config.rollout.filter_rounds else "no trajectory came back whole"
            raise DataError(f"step {self.progress.step}: {why}")
        self.progress.batch = scored.payload
        means = {f"reward/{k}": v for k, v in scored.value.items() if k != "count"}
        self.progress.numbers |= {**means, "train/reward": scored.value["reward"]}

    async def _evaluate(self) -> None:
        numbers, dispatchers = dict[str, float](), self.progress.dispatchers
        seed = derive(self.config.seed, "evaluation")
        temperature = self.config.evaluation.temperature
        sets = await self.data.evaluation(self._parts)
        for kind, parts in sets.items():
            if kind not in dispatchers:
                dispatchers[kind] = self._dispatcher("evaluate", parts, temperature, seed)
            made = await dispatchers[kind].run(self._names("evaluate"))
            scored = await self.data.score([one.payload for one in made])
            numbers |= {f"eval/{kind}/{k}": v for k, v in scored.value.items() if k != "count"}
            numbers.setdefault("eval/reward", scored.value["reward"])
        dispatchers.clear()
        if not numbers:
            return
        stage = self.progress.stage
        if stage is not Stage.TRAIN:
            self._evaluated.add(stage)
        self.metrics.write(self.progress.step, numbers, stage=stage)
        self.progress.numbers |= {"eval/reward": numbers["eval/reward"]}
        log.info("evaluated", stage=str(stage), step=self.progress.step, **numbers)
        self.told(self.progress, "evaluate")
        self.progress.numbers.pop("eval/reward")

    async def _warm_up(self) -> None:
        pairs = await self.data.warmup_pairs()
        folder = self.folder / "warmed-up"
        arguments = {"actor": (pairs, self.config.warmup, folder)}
        results = await self.reconciler.act("warm_up", arguments)
        log.info("warmed up", **results["actor"].value)

    async def _score(self) -> None:
        config = self.config
        arguments = (self.progress.batch, config.algorithm, self.progress.step, config.checks)
        results = await self.reconciler.act("score", {"actor": arguments})
        self.progress.scored = results["actor"].payload

    async def _values(self) -> None:
        progress, config = self.progress, self.config
        arguments = (progress.batch, config.algorithm, progress.step, progress.scored)
        told = (*arguments, config.checks, self._step_dump("critic"))
        results = await self.reconciler.act("values", {"critic": told})
        self.progress.advantages = results["critic"].payload
        self.progress.numbers |= results["critic"].value
        if not self.run.critic_apart:
            await self._save("critic")

    async def _send_values(self) -> None:
        names = self._names("send_values")
        await self.reconciler.act("send_values", dict.fromkeys(names, (self.progress.step,)))

    async def _train(self) -> None:
        """Train the actor; beside it the critic, where that has devices of its own."""
        progress, config = self.progress, self.config
        arguments = (progress.batch, progress.advantages, config.algorithm, progress.step)
        told = (*arguments, progress.scored, config.checks)
        names = ["critic"] if self._critic_warms(progress.step) else self._names("train")
        each = {name: (*told, self._step_dump(name)) for name in names}
        results = await self.reconciler.act("train", each)
        for name in names:
            progress.numbers |= results[name].value
        for name in names:
            await self._save(name)

    def _step_dump(self, role: str) -> Path | None:
        """Where a role dumps this step's update, if it is to."""
        step = self.progress.step
        return step_dump(self.folder, step) / role if step == self.run.dump_step else None

    async def push(self) -> None:
        """Push the actor's weights to all rollout workers; the first is verified bit by bit."""
        if self._manifest is None:
            size = self.config.link.bucket_bytes
            self._manifest = await self.reconciler.call("actor", "manifest", size)
        version = self.reconciler.system.get(self.reconciler.world, "actor").version
        sinks = [n for n in self._names("push") if n != "actor"]
        arguments: dict[str, tuple[Any, ...]] = {"actor": (self._manifest, version)}
        arguments |= dict.fromkeys(sinks, (self._manifest, version, not self._verified))
        results = await self.reconciler.act("push", arguments)
        size, seconds = results["actor"].value
        self.progress.numbers |= {"push/bytes": float(size), "push/seconds": seconds}
        if not self._verified:
            await self._verify(sinks)
            self._verified = True

    async def _verify(self, sinks: list[str]) -> None:
        """The engines began from zeros; what they hold now must be the actor's bytes."""
        expected = await self.reconciler.call("actor", "checksums")
        for name in sinks:
            found = await self.reconciler.call(name, "checksums")
            wrong = [tensor for tensor in found if found[tensor] != expected.get(tensor)]
            if wrong or not found:
                raise SelfCheckFailed(
                    f"{name} holds other bytes than the actor after a push: {wrong[:5]}. Likely "
                    "causes: a dtype conversion, a tensor that the push left out, faulty memory"
                )
        log.info("the push is bit-exact", tensors=len(expected), engines=len(sinks))

    def _due(self) -> bool:
        if self.run.only is Only.ROLLOUT or self._critic_warms(self.progress.step):
            return False  # no actor was trained that one could go back to
        every, step = self.config.checkpoint.every, self.progress.step
        return step == self.config.steps or bool(every and step % every == 0)

    async def _save(self, name: str) -> None:
        if self._due():
            folder = self.checkpoints.folder(self.progress.step, name)
            results = await self.reconciler.act("save", {name: (folder,)})
            self.progress.saved[name] = results[name].value

    async def _finish_checkpoint(self, step: int) -> None:
        if not self._due():
            return
        version = self.reconciler.system.get(self.reconciler.world, "actor").version
        lineage, number = version or Version(self.reconciler.world.lineage, 0)
        position = Position(step, lineage, number, await self.data.state())
        for file in (self.reconciler.journal, self.metrics):
            file.sync()  # nobody does these steps again
        self.checkpoints.complete(position, self.progress.saved)
