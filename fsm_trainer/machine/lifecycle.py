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
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple, Protocol

from fsm_trainer.machine import events as on
from fsm_trainer.machine.dispatch import Dispatch
from fsm_trainer.machine.errors import EffectFailed, LeaseExpired, Refused
from fsm_trainer.machine.events import Effect, Op
from fsm_trainer.machine.names import State, Trigger
from fsm_trainer.machine.planner import Planner
from fsm_trainer.machine.spec import Phase
from fsm_trainer.machine.step import advance, enabled
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
    """A line of the journal: a transition or an action that ended, or a fault."""

    worker: str
    kind: str
    trigger: str
    source: State
    dest: State
    epoch: int
    version: Version | None
    seconds: float
    ok: bool
    error: str = ""


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
        observe: Callable[[Record], None] | None = None,
    ) -> None:
        table = system.table(name)
        missing = {r for held in table.holds.values() for r in held} - set(resources)
        if missing:
            raise Refused(name, "new", "start", [f"no resource given for {sorted(missing)}"])
        self.name = name
        self.system = System(system.spec, system.names, frozenset({name}), system.sizes)
        self._resources, self._kill, self._observe = dict(resources), kill, observe
        self._lock = threading.RLock()
        self._world = system.initial()
        self._dispatch = Dispatch(table)
        self._began = 0.0

    @property
    def world(self) -> World:
        """The world as this worker knows it; its own part is the truth, the rest it was told."""
        return self._world

    @property
    def worker(self) -> Worker:
        """This worker's part of the world."""
        return self.system.get(self._world, self.name)

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
                known, told = self._world.links[i].epoch, world.links[i].epoch
                if told < known:
                    raise LeaseExpired(name, told, f"{self.name} has seen epoch {known}")
            self._world = self.system.put(world, self.name, self.worker)

    def trigger(
        self,
        name: str,
        *,
        epoch: int = 0,
        version: Version | None = None,
        world: World | None = None,
    ) -> Worker:
        """Run a whole transition.

        Raises:
            Refused: it is illegal now.
            EffectFailed: an effect failed; the transition was undone.
        """
        report = self.begin(name, epoch=epoch, version=version, world=world)
        if report.failed is None:
            report = self.acquire()
        if report.failed is not None:
            self.undo()
            failed, error = str(report.failed), report.error
            raise EffectFailed(self.name, name, failed, error, self.state)
        return self.commit()

    def begin(
        self,
        name: str,
        *,
        epoch: int = 0,
        version: Version | None = None,
        world: World | None = None,
    ) -> Report:
        """Begin a transition and release what its end doesn't hold; see :meth:`acquire`."""
        with self._lock:
            if world is not None:
                self.tell(world)
            self._apply(on.Begin(name, (self.name,), epoch, version))
            self._began = time.monotonic()
        return self._run(Op.RELEASE)

    def acquire(self) -> Report:
        """Acquire what the transition's end holds; of a joint one, once every end has released."""
        return self._run(Op.ACQUIRE)

    def commit(self) -> Worker:
        """Be in the new state.

        Raises:
            Refused: an effect is still due.
        """
        with self._lock:
            before = self.worker
            self._apply(on.Commit((self.name,)))
            self._settled(before)
            return self.worker

    def undo(self) -> Worker:
        """Take back the transition; the worker ends in the largest state that is still true."""
        with self._lock:
            worker = self.worker
            if worker.move is None:
                return worker  # a failed release ended it already
            edge = self.system.table(self.name).edge(worker.move, worker.state)
            if edge is not None and worker.dest == edge.dest:
                self._apply(on.Undo(self.name))
        report = self._run(Op.RELEASE)
        return self.worker if report.failed is not None else self.commit()

    def sever(self, link: str, world: World | None = None) -> Worker:
        """Give up a lease that is no longer good, and keep all else that can be kept."""
        with self._lock:
            if world is not None:
                self.tell(world)
            self._apply(on.Sever(self.name, link))
            self._began = time.monotonic()
        report = self._run(Op.RELEASE)
        return self.worker if report.failed is not None else self.commit()

    def peer_died(self, peer: str) -> None:
        """Learn that another worker's process is dead: leases that it was a member of end now."""
        with self._lock:
            self._apply(on.Died(peer))

    def reach(self, state: State) -> Worker:
        """Go to a state by the shortest legal way; does nothing in the state itself.

        Raises:
            Refused: no sequence of this worker's own triggers leads there.
            EffectFailed: an effect failed; the worker is where the error says.
        """
        phase = Phase(f"reach {state}", {self.system.names[self.name]: frozenset({state})}, None)
        alone = System(self.system.spec, {self.name: self.system.names[self.name]})
        while self.state != state:
            here = World((self.worker,), self._world.links, self._world.lineage)
            for move in Planner(alone).plan(here, phase):
                self.trigger(move.name)
        return self.worker

    @contextmanager
    def action(self, name: str, world: World | None = None) -> Iterator[Worker]:
        """Do work in the body; the worker counts it as in flight until the body ends.

        Raises:
            Refused: the action is illegal now; the body doesn't run.
        """
        with self._lock:
            if world is not None:
                self.tell(world)
            self._apply(on.Act(name, (self.name,)))
        began, error, ok = time.monotonic(), "", False
        try:
            yield self.worker
            ok = True
        except BaseException as problem:
            error = f"{type(problem).__name__}: {problem}"
            raise
        finally:
            with self._lock:
                self._apply(on.Acted(name, (self.name,), ok))
            self._note("action", name, self.state, time.monotonic() - began, ok, error)

    def _apply(self, event: on.Event) -> None:
        with self._lock:
            self._world = advance(self.system, self._world, event)

    def _run(self, op: Op) -> Report:
        done: list[Effect] = []
        while True:
            with self._lock:
                due = [e for e in enabled(self.system, self._world) if e.op is op]
            if not due:
                return Report(self.worker, tuple(done))
            effect = due[0]
            try:
                self._perform(effect)
            except Exception as problem:
                self._fail(effect)
                error = f"{type(problem).__name__}: {problem}"
                return Report(self.worker, tuple(done), effect, error)
            except BaseException:
                self._fail(effect)
                raise
            self._apply(on.Done(effect))
            done.append(effect)

    def _perform(self, effect: Effect) -> None:
        resource = self._resources[effect.resource]
        if effect.op is Op.ACQUIRE:
            resource.acquire(effect)
        else:
            resource.release(effect)

    def _fail(self, effect: Effect) -> None:
        before = self.worker
        self._apply(on.Failed(effect))
        if effect.op is Op.RELEASE:
            self._settled(before, f"{effect} failed")
            if self._kill is not None:
                self._kill()
                self._apply(on.Done(Effect(self.name, Op.KILL)))

    def _settled(self, before: Worker, error: str = "") -> None:
        trigger = str(before.move) if not error else str(Trigger.FAIL)
        edge = self.system.table(self.name).edge(trigger, before.state)
        if edge is not None and edge.dest == self.state:
            self._dispatch.move(trigger, self.state)
        else:
            self._dispatch.fall(self.state)
        ok = not error and (edge is None or edge.dest == self.state)
        seconds = time.monotonic() - self._began
        self._note("transition", trigger, before.state, seconds, ok, error)

    def _note(
        self, kind: str, trigger: str, source: State, seconds: float, ok: bool, error: str
    ) -> None:
        if self._observe is not None:
            state, epoch, version = self.state, max(self.worker.epochs), self.worker.version
            told = (kind, trigger, source, state, epoch, version, seconds, ok, error)
            self._observe(Record(self.name, *told))
