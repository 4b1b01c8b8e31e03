"""One worker's lifecycle: it runs the effects that :func:`~fsm_trainer.machine.step.step` asks for.

A process that holds one worker makes one `Lifecycle` and gives it that worker's resources. All it
may do goes through here: a trigger or an action that is illegal now raises
:class:`~fsm_trainer.machine.errors.Refused` at once, from any thread, and nothing has moved.

The world is written in one place, under one lock, by ``step`` alone; effects run outside it, in the
thread whose trigger was accepted, between two committed events. Everybody else meanwhile reads a
worker that is moving.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple, Protocol

from fsm_trainer.machine import events as on
from fsm_trainer.machine import legal
from fsm_trainer.machine.dispatch import Dispatch
from fsm_trainer.machine.errors import EffectFailed, LeaseExpired, Refused
from fsm_trainer.machine.events import Effect, Op
from fsm_trainer.machine.names import State, Trigger
from fsm_trainer.machine.planner import plan
from fsm_trainer.machine.spec import Phase
from fsm_trainer.machine.step import advance
from fsm_trainer.machine.version import Version
from fsm_trainer.machine.world import System, Worker, World


class Resource(Protocol):
    """Something that a state holds: weights on a device, a process group, an engine's process."""

    def acquire(self, effect: Effect) -> None:
        """Take it. On an error nothing may be left behind."""

    def release(self, effect: Effect) -> None:
        """Give all of it back. An error here ends the process: nobody knows what it still holds."""


class Report(NamedTuple):
    """What a part of a transition came to."""

    worker: Worker
    done: tuple[Effect, ...] = ()
    failed: Effect | None = None
    error: str = ""


class Record(NamedTuple):
    """A transition or an action that ended; not ``ok``: it failed and was undone."""

    worker: str
    name: str
    before: Worker
    after: Worker
    ok: bool


class Lifecycle:
    """Runs one worker's machine.

    Args:
        system: the composition; only ``name`` is in its scope.
        name: the worker.
        resources: one for every resource that the worker's role can hold.
        kill: ends what is left when a release failed; without it the claim stays on the ledger.
        observe: is told every transition and action that ended.
    """

    def __init__(
        self,
        system: System,
        name: str,
        resources: Mapping[str, Resource],
        *,
        kill: Callable[[], None] | None = None,
        observe: Callable[[Record], None] = lambda record: None,
    ) -> None:
        table = system.table(name)
        missing = {r for held in table.holds.values() for r in held} - set(resources)
        if missing:
            raise Refused(name, "new", "start", [f"no resource given for {sorted(missing)}"])
        self.name = name
        self.system = replace(system, scope=frozenset({name}))
        self._resources, self._kill, self._observe = dict(resources), kill, observe
        self._lock = threading.RLock()
        self.world = system.initial()
        """The world as this worker knows it; its own part is the truth, the rest it was told."""
        self._dispatch = Dispatch(table)

    @property
    def worker(self) -> Worker:
        """This worker's part of the world."""
        return self.system.get(self.world, self.name)

    @property
    def state(self) -> State:
        """The last committed state."""
        return self.worker.state

    def tell(self, world: World) -> None:
        """Learn how the other workers and the links stand.

        Raises:
            LeaseExpired: the news is older than a link that this worker has seen.
        """
        with self._lock:
            for name, i in self.system.links.items():
                known, told = self.world.links[i].epoch, world.links[i].epoch
                if told < known:
                    raise LeaseExpired(name, told, f"{self.name} has seen epoch {known}")
            self.world = self.system.put(world, self.name, self.worker)

    def trigger(self, name: str, *, epoch: int = 0, version: Version | None = None) -> Worker:
        """Run a whole transition.

        Raises:
            Refused: it is illegal now.
            EffectFailed: an effect failed; the transition was undone.
        """
        report = self.begin(name, epoch=epoch, version=version)
        if report.failed is None:
            report = self.acquire()
        if report.failed is None:
            return self.commit()
        self.undo()
        raise EffectFailed(self.name, name, str(report.failed), report.error, self.state)

    def begin(
        self,
        name: str,
        *,
        epoch: int = 0,
        version: Version | None = None,
        world: World | None = None,
    ) -> Report:
        """Begin a transition and release what its end doesn't hold; see :meth:`acquire`."""
        self._apply(on.Begin(name, (self.name,), epoch, version), world)
        return self._run(Op.RELEASE)

    def acquire(self) -> Report:
        """Acquire what the transition's end holds; of a joint one, once every end has released."""
        return self._run(Op.ACQUIRE)

    def commit(self) -> Worker:
        """Be in the new state.

        Raises:
            Refused: an effect is still due.
        """
        before = self._apply(on.Commit((self.name,)))
        self._settled(before, before.move)
        return self.worker

    def undo(self) -> Worker:
        """Take back the transition; the worker ends in the largest state that is still true."""
        with self._lock:
            if self.worker.move is None:
                return self.worker  # a failed release ended it already
            if not legal.falling(self.system, self.world, self.name):
                self._apply(on.Undo(self.name))
        return self._fallen()

    def sever(self, link: str, world: World | None = None) -> Worker:
        """Give up a lease that is no longer good, and keep all else that can be kept."""
        self._apply(on.Sever(self.name, link), world)
        return self._fallen()

    def _fallen(self) -> Worker:
        return self.worker if self._run(Op.RELEASE).failed else self.commit()

    def peer_died(self, peer: str) -> None:
        """Learn that another worker's process is dead: leases that it was a member of end now."""
        self._apply(on.Died(peer))

    def reach(self, state: State) -> Worker:
        """Go to a state by the shortest legal way; does nothing in the state itself.

        Raises:
            Refused: no sequence of this worker's own triggers leads there.
            EffectFailed: an effect failed; the worker is where the error says.
        """
        role = self.system.names[self.name]
        phase = Phase(f"reach {state}", {role: frozenset({state})}, None)
        here = World((self.worker,), self.world.links, self.world.lineage)
        for move in plan(System(self.system.spec, {self.name: role}), here, phase):
            self.trigger(move.name)
        return self.worker

    @contextmanager
    def action(self, name: str, world: World | None = None) -> Iterator[Worker]:
        """Do work in the body; the worker counts it as in flight until the body ends.

        Raises:
            Refused: the action is illegal now; the body doesn't run.
        """
        self._apply(on.Act(name, (self.name,)), world)
        ok = False
        try:
            yield self.worker
            ok = True
        finally:
            before = self._apply(on.Acted(name, (self.name,), ok))
            self._observe(Record(self.name, name, before, self.worker, ok))

    def _apply(self, event: on.Event, world: World | None = None) -> Worker:
        """Write the world, after news of it if there are any; gives the worker as it was."""
        with self._lock:
            if world is not None:
                self.tell(world)
            before, self.world = self.worker, advance(self.system, self.world, event)
            return before

    def _run(self, op: Op) -> Report:
        done: list[Effect] = []
        while True:
            with self._lock:
                due = [e for e in legal.enabled(self.system, self.world) if e.op is op]
            if not due:
                return Report(self.worker, tuple(done))
            effect, resource = due[0], self._resources[due[0].resource]
            try:
                (resource.acquire if op is Op.ACQUIRE else resource.release)(effect)
            except BaseException as error:
                self._failed(effect)
                if not isinstance(error, Exception):
                    raise
                return Report(self.worker, tuple(done), effect, f"{type(error).__name__}: {error}")
            self._apply(on.Done(effect))
            done.append(effect)

    def _failed(self, effect: Effect) -> None:
        before = self._apply(on.Failed(effect))
        if effect.op is Op.RELEASE:
            self._settled(before, Trigger.FAIL)
            if self._kill is not None:
                self._kill()
                self._apply(on.Confirmed(self.name))

    def _settled(self, before: Worker, trigger: Trigger | None) -> None:
        ok = self._dispatch.follow(str(trigger), self.state) or trigger is Trigger.SEVER
        self._observe(Record(self.name, str(trigger), before, self.worker, ok))
