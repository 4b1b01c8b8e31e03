"""The reconciler: brings the workers to where a phase wants them, by the planner's moves.

It owns the composed world of the run, and writes it by ``step`` alone, between awaits; so a grant
of the ledger is atomic, and whoever reads meanwhile sees a moving worker as moving. Recovery is
the same code: a fault changes the world, and the next plan starts from there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any, TypeVar

import structlog

from fsm_trainer.machine.errors import (
    ActionFailed,
    EffectFailed,
    EngineFailed,
    FsmError,
    Refused,
    SelfCheckFailed,
    WorkerLost,
)
from fsm_trainer.machine.events import (
    Act,
    Acted,
    Begin,
    Commit,
    Confirmed,
    Died,
    Done,
    Effect,
    Event,
    Op,
    Sever,
    Undo,
)
from fsm_trainer.machine.legal import enabled, falling, joint_ends, next_effect
from fsm_trainer.machine.lifecycle import Report
from fsm_trainer.machine.names import LinkState, Role, State, Trigger
from fsm_trainer.machine.planner import Move, plan, ready
from fsm_trainer.machine.spec import Phase
from fsm_trainer.machine.step import step
from fsm_trainer.machine.version import Version
from fsm_trainer.machine.world import System, Worker, World
from fsm_trainer.runtime.journal import Journal, Kind
from fsm_trainer.runtime.port import Outcome, WorkerPort, now, problem_of, told_by

log = structlog.get_logger(__name__)
T = TypeVar("T")

ATTEMPTS, BACK_OFF = 4, 0.5
"""How often a phase is tried before the run ends with the last error, and the seconds before the
second attempt; they double with each further one."""
LOST = (WorkerLost, EngineFailed)
"""What tells that a worker is gone: its own process, or the engine's that it stands for."""


class TrainerLost(WorkerLost):
    """Raised when an actor or critic died: what it had learned since its checkpoint is lost."""


class Reconciler:
    """Drives the composed system through the worker ports."""

    def __init__(
        self,
        system: System,
        ports: Mapping[str, WorkerPort],
        journal: Journal,
        revoke: Callable[[str, int, str], None],
        push: Callable[[], Awaitable[None]] | None = None,
        planned: Callable[[System, World, Phase], tuple[Move, ...]] = plan,
    ) -> None:
        self.system, self.ports, self.journal = system, ports, journal
        self.world = system.initial()
        self.push, self._planned = push, planned
        self.start_version: Version | None = None
        """What ``start`` restores the hub's weights to, after a checkpoint."""
        self._revoke = revoke
        self._generation = 0
        self._dead: dict[str, str] = {}
        """Why each worker was declared dead that has no new process yet."""

    def take_over(self, world: World) -> None:
        """Go on from the world that an earlier process of the run left: its workers are dead."""
        self.world = world
        for name in self.system.names:
            source, began = self._worker(name).state, now()
            if self._worker(name) != self.system.initial().workers[0]:
                self._apply(Died(name))
                self._record(name, Kind.FAULT, "died", source, began, "the run was resumed")
                self._apply(Confirmed(name))
                self._record(name, Kind.FAULT, "confirmed", State.DISCONNECTED, began, None)

    async def reach(self, phase: Phase) -> None:
        """Go where the phase's wants hold and its action is legal.

        Raises:
            Refused: no legal sequence leads there.
            EffectFailed, ActionFailed, WorkerLost: what failed in each of several attempts.
        """
        failures = 0
        while True:
            try:
                await self._recover()
                if ready(self.system, self.world, phase):
                    return
                await self._move(self._planned(self.system, self.world, phase)[0])
            except TrainerLost:
                raise
            except (EffectFailed, ActionFailed, WorkerLost) as error:
                failures += 1
                if failures >= ATTEMPTS:
                    raise
                log.warning("planning again", phase=phase.name, error=str(error))
                await asyncio.sleep(BACK_OFF * 2 ** (failures - 1))

    async def act(
        self, action: str, arguments: Mapping[str, tuple[Any, ...]]
    ) -> dict[str, Outcome]:
        """Run an action on workers, each with its arguments; a joint one on all its ends.

        Raises:
            Refused: it is illegal now.
            WorkerLost: a worker died in it.
            ActionFailed, SelfCheckFailed: a worker raised; the others have ended theirs.
        """
        names = tuple(arguments)
        link = next((self.system.table(n).actions[action].joint for n in names), None)
        groups = [names] if link else [(name,) for name in names]
        for group in groups:
            self._apply(Act(action, group))
        began = now()
        results = await self._gather(
            {n: self.ports[n].act(action, self.world, arguments[n]) for n in names}
        )
        failed = {n: r for n, r in results.items() if isinstance(r, BaseException)}
        for group in groups:
            ok = not any(n in failed for n in group)
            alive = tuple(n for n in group if action in self._worker(n).jobs)
            self._apply(Acted(action, group, ok and len(alive) == len(group)))
            for name in alive:
                error = None if ok else failed.get(name) or next(iter(failed.values()), None)
                state, told = self._worker(name).state, told_by(results[name])
                self._record(name, Kind.ACTION, action, state, began, error, told)
        if link and failed and not any(isinstance(e, LOST) for e in failed.values()):
            # What its ends may still wait on was revoked: the next attempt has a new epoch.
            ends = joint_ends(self.system, self.world, link, Trigger.DISCONNECT)
            await self._transition(Trigger.DISCONNECT, ends)
        self._raise(action, failed)
        return {n: r for n, r in results.items() if isinstance(r, Outcome)}

    async def call(self, name: str, method: str, *arguments: Any) -> Any:
        """Call one of a worker's own methods; a death in it is noticed as everywhere."""
        told = await self._gather({name: self.ports[name].call(method, *arguments)})
        self._raise(method, {n: r for n, r in told.items() if isinstance(r, BaseException)})
        return told[name]

    async def _move(self, move: Move) -> None:
        if move.name in list(Trigger):
            await self._transition(move.name, move.workers)
        elif self.push is not None:
            await self.push()

    async def _transition(self, trigger: str, names: tuple[str, ...]) -> None:
        """Run a transition on all its workers: releases everywhere, then acquisitions."""
        sources = {n: self._worker(n).state for n in names}
        before, began = self.world, now()
        link = self._joint(names[0], trigger)
        hub = self._is_hub(names[0])
        self._apply(Begin(trigger, names, version=self.start_version if hub else None))
        self._generation += 1
        epoch = self.world.links[self.system.links[link]].epoch if link else 0
        calls = {
            n: self.ports[n].begin(trigger, epoch, self._told(n), before, self._generation)
            for n in names
        }
        failed = await self._absorb(await self._gather(calls))
        if link is None or not failed:
            going = [n for n in names if n not in failed]
            acquired = await self._gather({n: self.ports[n].acquire() for n in going})
            failed |= await self._absorb(acquired)
        movers = [n for n in names if self._worker(n).move is not None]
        undone = [n for n in movers if n in failed or (link is not None and failed)]
        done = tuple(n for n in movers if n not in undone)
        for name in undone:
            await self._undo(name)
        for name in [n for n in undone if n not in self._dead]:
            error = failed.get(name) or next(iter(failed.values()))
            self._record(name, Kind.TRANSITION, trigger, sources[name], began, error)
        if done:
            self._apply(Commit(done))
            for name in done:
                self._record(name, Kind.TRANSITION, trigger, sources[name], began, None)
            told = await self._gather({n: self.ports[n].commit() for n in done})
            failed |= {n: r for n, r in told.items() if isinstance(r, BaseException)}
        self._raise(trigger, failed)

    def _told(self, name: str) -> Version | None:
        """The version that a starting worker is told: of a hub, under a new lineage."""
        worker = self._worker(name)
        if not self._is_hub(name) or worker.move != Trigger.START:
            return None
        return Version(self.world.lineage + 1, worker.version.number if worker.version else 0)

    def _trains(self, name: str) -> bool:
        return self.system.names[name] is not Role.ROLLOUT

    def _is_hub(self, name: str) -> bool:
        role = self.system.names[name]
        return any(link.hub == role for link in self.system.spec.links.values())

    def _joint(self, name: str, trigger: str) -> str | None:
        edge = self.system.table(name).edge(trigger, self._worker(name).state)
        return edge.joint if edge is not None else None

    async def _absorb(
        self, results: Mapping[str, Report | BaseException]
    ) -> dict[str, BaseException]:
        """Apply what the workers report; gives what failed, by worker."""
        failed = {n: r for n, r in results.items() if isinstance(r, BaseException)}
        reports = {n: r for n, r in results.items() if isinstance(r, Report)}
        moving = [n for n in reports if self._worker(n).move is not None]
        self._done({n: list(reports[n].done) for n in moving})
        for name, result in reports.items():
            if result.failed is None or self._worker(name).move is None:
                continue  # all went well, or it was declared dead meanwhile
            story = f"{result.failed} failed: {result.error}"
            if result.failed.op is Op.RELEASE:
                await self._declare_dead(name, story)
                failed[name] = WorkerLost(f"{name}: {story}; nobody knows what it still holds")
            else:
                trigger, state = str(self._worker(name).move), result.worker.state
                if not falling(self.system, self.world, name):
                    self._apply(Undo(name))
                failed[name] = EffectFailed(name, trigger, str(result.failed), result.error, state)
        return failed

    def _done(self, effects: dict[str, list[Effect]]) -> None:
        """Apply what was done in an order that is legal: the link comes last on every end."""
        while waiting := [n for n, done in effects.items() if done]:
            may = enabled(self.system, self.world)
            due = [n for n in waiting if effects[n][0] in may]
            for name in due or waiting[:1]:  # if none is due, the first one's refusal says why
                effect = effects[name].pop(0)
                try:
                    self._apply(Done(effect))
                except Refused:  # acquired before others told that they failed: undo gives it back
                    if effect.op is Op.RELEASE or not falling(self.system, self.world, name):
                        raise

    async def _undo(self, name: str) -> None:
        if not falling(self.system, self.world, name):
            self._apply(Undo(name))
        await self._follow(name, (await self._gather({name: self.ports[name].undo()}))[name])

    async def _follow(self, name: str, told: Worker | BaseException) -> None:
        """Release and commit in the world what a worker released and committed."""
        if name in self._dead:
            return
        dest = self._worker(name).dest
        if not isinstance(told, Worker) or told.state != dest:
            found = told.state if isinstance(told, Worker) else told
            await self._declare_dead(name, f"it did not come back to {dest}: {found}")
            return
        while (effect := next_effect(self.system, self.world, name)) is not None:
            self._apply(Done(effect))
        self._apply(Commit((name,)))

    async def _recover(self) -> None:
        """Sever what holds a broken lease, and start dead processes anew.

        Raises:
            TrainerLost: a trainer died, wherever that was noticed.
        """
        for name in self.system.names:
            for link, i in self.system.links.items():
                if self._worker(name).epochs[i] and not self.system.lease(self.world, name, link):
                    await self._sever(name, link)
        for name, why in sorted(self._dead.items()):
            if self._trains(name):
                raise TrainerLost(f"{name} was lost: {why}")
            await self._bury(name)

    async def _sever(self, name: str, link: str) -> None:
        source, began = self._worker(name).state, now()
        self._apply(Sever(name, link))
        told = await self._gather({name: self.ports[name].sever(link, self.world)})
        await self._follow(name, told[name])
        if name not in self._dead:
            self._record(name, Kind.TRANSITION, Trigger.SEVER, source, began, None)

    async def _bury(self, name: str) -> None:
        """End what is left of a dead worker; only when it is seen dead its claim ends."""
        await self.ports[name].kill()
        self._apply(Confirmed(name))
        self._record(name, Kind.FAULT, "confirmed", State.DISCONNECTED, now(), None)
        del self._dead[name]
        told = (await self._gather({name: self.ports[name].respawn()}))[name]
        if isinstance(told, BaseException):
            await self._declare_dead(name, str(told))
            self._raise("respawn", {name: told})

    async def _gather(self, calls: Mapping[str, Awaitable[T]]) -> dict[str, T | BaseException]:
        """Await all; as soon as one fails, end what the others may wait for."""
        tasks = {name: asyncio.ensure_future(call) for name, call in calls.items()}
        todo = set(tasks.values())
        try:
            while todo:
                done, todo = await asyncio.wait(todo, return_when=asyncio.FIRST_COMPLETED)
                for name, task in tasks.items():
                    problem = problem_of(task) if task in done else None
                    if problem is not None:
                        log.debug("a worker failed", worker=name, error=str(problem))
                        await self._broken(name, problem, todo)
        except asyncio.CancelledError:
            for task in tasks.values():  # not a set's order: a simulation must repeat
                task.cancel()
            raise
        return {n: t.exception() or t.result() for n, t in tasks.items()}

    async def _broken(
        self, name: str, error: BaseException | str, others: Collection[object]
    ) -> None:
        if isinstance(error, LOST):
            await self._declare_dead(name, str(error))
        elif others:
            for link, i in self.system.links.items():
                here = self.world.links[i]
                if name in here.members and here.state != LinkState.DOWN:
                    self._revoke(link, here.epoch, f"{name} failed: {error}")

    async def replace(self, name: str, why: str) -> None:
        """End a worker's processes and start new ones in their place, disconnected."""
        await self._declare_dead(name, why)
        await self._bury(name)

    async def _declare_dead(self, name: str, why: str) -> None:
        """A worker's process is gone or silent: leases end, survivors keep all else."""
        if name in self._dead:
            return
        self._dead[name] = why
        for link, i in self.system.links.items():
            if name in self.world.links[i].members:
                self._revoke(link, self.world.links[i].epoch, f"{name} died")
        source = self._worker(name).state
        self._apply(Died(name))
        self._record(name, Kind.FAULT, "died", source, now(), why)
        peers = [n for n in self.system.names if n != name and self._worker(n).live]
        await asyncio.gather(*(self.ports[n].died(name) for n in peers), return_exceptions=True)

    def _apply(self, event: Event) -> None:
        self.world, _ = step(self.system, self.world, event)

    def _worker(self, name: str) -> Worker:
        return self.system.get(self.world, name)

    def _raise(self, what: str, failed: Mapping[str, BaseException]) -> None:
        lost = [(n, e) for n, e in failed.items() if isinstance(e, LOST)]
        for dead, cause in sorted(lost, key=lambda item: not self._trains(item[0])):
            kind = TrainerLost if self._trains(dead) else WorkerLost
            raise kind(f"{dead} was lost during {what!r}: {cause}") from cause
        for name, error in failed.items():
            kept = Refused | EffectFailed | SelfCheckFailed
            if isinstance(error, FsmError) and not isinstance(error, kept):
                raise ActionFailed(f"{name}: {what} failed: {error}") from error
            raise error

    def _record(
        self,
        name: str,
        kind: Kind,
        trigger: str,
        source: State,
        began: float,
        error: BaseException | str | None,
        told: Mapping[str, Any] | None = None,
    ) -> None:
        worker = self._worker(name)
        if isinstance(error, BaseException):
            error = f"{type(error).__name__}: {error}"
        for rank in range(self.ports[name].ranks):
            self.journal.record(
                worker=name,
                role=str(self.system.names[name]),
                rank=rank,
                kind=kind,
                trigger=str(trigger),
                source=str(source),
                dest=str(worker.state),
                epoch=max(worker.epochs, default=0),
                version=str(worker.version) if worker.version else None,
                seconds=round(now() - began, 6),
                ok=error is None,
                error=error,
                **((rank == 0 and told) or {}),
            )
