"""A trace of events, replayed on the real `Lifecycle` of each worker.

`fsm-train check --test FILE` writes such a replay of what it finds. Each `Lifecycle` runs in a
thread of its own, over resources that do nothing, and stops where others may come between: after
each report, and in an effect that reports late. So everything happens in the order of the trace.

>>> from fsm_trainer.machine.events import Begin, Commit, Done, Effect, Op
>>> with Replay("disaggregated", rollouts=1) as replay:
...     replay.event(Begin("start", ("actor",)))
...     replay.event(Done(Effect("actor", Op.ACQUIRE, "bank")))
...     replay.event(Commit(("actor",)))
...     str(replay.lifecycles["actor"].state)
'sleeping'
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from threading import Semaphore
from typing import Any

from fsm_trainer.machine import events as on
from fsm_trainer.machine import legal
from fsm_trainer.machine.errors import ActionFailed, DeadlineExceeded, FsmError, Refused
from fsm_trainer.machine.events import Effect, Op
from fsm_trainer.machine.lifecycle import Lifecycle
from fsm_trainer.machine.planner import ready
from fsm_trainer.machine.spec import load
from fsm_trainer.machine.world import System, Worker, World
from fsm_trainer.testing.subject import PropertyViolated
from fsm_trainer.verify.canon import Canon
from fsm_trainer.verify.properties import broken, wrong_step
from fsm_trainer.verify.relation import Node, Relation

# Seconds that a lifecycle may take to come to a stop, or stand there; more is a hang.
DEADLINE = 60.0


class Replay:
    """The workers of a schedule, each a real `Lifecycle`, beside the driver's world.

    As a context it ends with the threads. A trace that the tables refuse can't happen, so the
    context ends there, and nothing is raised.

    Args:
        schedule: of the tables.
        rollouts: how many rollout workers take part.
        states: a folder of tables; None: the shipped ones.
        fine: False: where a worker begins a move of its own, it runs to its end at once.
    """

    def __init__(
        self, schedule: str, rollouts: int, states: Path | None = None, *, fine: bool = True
    ) -> None:
        self.system = System.of(load(schedule, states), rollouts)
        self.node = Node(self.system.initial())
        self.lifecycles = {name: self._process(name) for name in self.system.names}
        self._relation = Relation(self.system, fine=fine, symmetric=False)

    def __enter__(self) -> Replay:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> bool:
        self.close()
        return isinstance(error, FsmError)

    def close(self) -> None:
        """End every thread."""
        for lifecycle in self.lifecycles.values():
            lifecycle.end()

    def event(self, event: on.Event, late: Collection[Effect] = ()) -> None:
        """Let an event happen; ``late``: what is under way in who begins to fall by it.

        Raises:
            Refused, LeaseExpired: the tables refuse it; nothing has moved.
            PropertyViolated: a property fails now, or a lifecycle is not as the tables say.
        """
        before = self.node
        self.node = self._after(event, late)
        try:
            for effect in late:
                self.lifecycles[effect.worker].start()
            self._tell(before.world, event)
        except FsmError as error:
            told = f"{event}: the tables allow it, the lifecycle doesn't: {error}"
            raise PropertyViolated(told) from error
        for name, lifecycle in self.lifecycles.items():
            must, found = self.system.get(self.node.world, name), lifecycle.worker
            if lifecycle.falls and found.ghost > must.ghost:
                # It doesn't see who else has yet to release, so it claims what can't arrive before.
                found = found._replace(ghost=must.ghost)
            if found != must:
                raise PropertyViolated(f"after {event} {name} is {found}, by the tables {must}")
        # The lifecycles are what the node says, so the node can be asked.
        why = wrong_step(self.system, before.world, event, self.node.world)
        self._must_hold(why or broken(self.system, self.node))

    def reaches(self, phase: str) -> None:
        """From here the phase can be reached by what is no fault, or PropertyViolated is raised."""
        canon, wanted = Canon(self.system), self.system.spec.phases[phase]
        seen, todo = {canon.encode(self.node)}, [self.node]
        while todo:
            node = todo.pop()
            if not node.late and ready(self.system, node.world, wanted):
                return
            for event in (edge.event for edge in self._relation.edges(node) if not edge.fault):
                try:
                    after = next(self._relation.after(node, event))
                except Refused:
                    continue
                if (code := canon.encode(after)) not in seen:
                    seen.add(code)
                    todo.append(after)
        self._must_hold(f"recoverable: phase {phase} is out of reach")

    def _must_hold(self, why: str) -> None:
        number, known = why.partition(":")[0], self.system.spec.system.always
        if why:
            text = known.get(int(number)) if number.isdecimal() else "see docs/proof.md"
            raise PropertyViolated(f"{why}\n  property {number}: {text}")

    def _process(self, name: str) -> _Process:
        return _Process(self.system, name, self.node.world)

    def _after(self, event: on.Event, late: Collection[Effect]) -> Node:
        due = {*legal.enabled(self.system, self.node.world), *self.node.late}
        try:
            nodes = [*self._relation.after(self.node, event)]
        except FsmError as refused:
            if isinstance(event, (on.Done, on.Failed)) and event.effect in due:
                self._must_hold(f"refused: a due report, {event.effect}: {refused}")
            raise
        for node in nodes:
            if node.late == nodes[0].late.union(late):
                return node
        names = ", ".join(map(str, late))
        raise Refused("the trace", "here", type(event).__name__, [f"{names} can't be under way"])

    def _tell(self, world: World, event: on.Event) -> None:
        """Do with the lifecycles what the driver does; each knows the world as it was told it."""
        system, after, dead, own = self.system, self.node.world, "", ""
        match event:
            case on.Begin(workers=names):
                for name in names:
                    process = self.lifecycles[name]
                    told = {"epoch": event.epoch, "version": event.version, "world": world}
                    process.ask(process.begin, event.trigger, **told)
                    if system.get(after, name).move is None:
                        process.finish()
            case on.Done(effect=effect) | on.Failed(effect=effect):
                own = effect.worker
                self.lifecycles[own].report(isinstance(event, on.Done))
                if isinstance(event, on.Failed) and effect.op is Op.RELEASE:
                    dead = own
            case on.Commit(workers=names):
                for name in names:
                    self.lifecycles[name].settle()
            case on.Act(action=action, workers=names):
                for name in names:
                    self.lifecycles[name].work(action, world)
            case on.Acted(action=action, workers=names, ok=ok):
                for name in names:
                    self.lifecycles[name].worked(action, ok)
            case on.Sever(worker=name, link=link):
                self.lifecycles[name].ask(self.lifecycles[name].sever, link, world)
            case on.Died(worker=dead):
                pass
            case on.Confirmed(worker=name) | on.Joined(worker=name):
                self.lifecycles[name]._apply(event)
        if dead:
            self.lifecycles[dead].end()
            self.lifecycles[dead] = self._process(dead)
        for name, process in self.lifecycles.items():
            if dead and name != dead:
                process.tell(world)  # else it may fall from a link that the others have closed
                process.peer_died(dead)
            elif name != own and legal.falling(system, after, name) and not process.falls:
                process._apply(on.Undo(name))


class _Process(Lifecycle):
    """A lifecycle that stops after each report, until it is let on.

    Whoever takes a dead one's place is given the world as it is: its ghost is the driver's to know.
    """

    def __init__(self, system: System, name: str, world: World) -> None:
        known = {r for held in system.table(name).holds.values() for r in held}
        super().__init__(system, name, dict.fromkeys(known, _Gate(self)))
        self.world = world
        self._mailbox = ThreadPoolExecutor(1, f"replay-{name}")
        self._call: Future[Any] | None = None
        self._go, self._stopped = Semaphore(0), Semaphore(0)
        self._over = self._under_way = False
        self._well: bool | None = None
        self._works: dict[str, list[AbstractContextManager[Worker]]] = {}

    @property
    def falls(self) -> bool:
        """Whether it is on the way back."""
        return legal.falling(self.system, self.world, self.name)

    def ask(self, does: Callable[..., object], *arguments: object, **named: object) -> None:
        """Have its thread do something, up to the first stop."""
        self._call = self._mailbox.submit(does, *arguments, **named)
        self._call.add_done_callback(lambda call: self._stopped.release())
        self._wait()

    def start(self) -> None:
        """Be in the effect that comes next."""
        self._until(lambda: self._under_way, self.acquire)

    def report(self, well: bool) -> None:
        """End the effect that it is in, or that comes next."""
        self._well = well
        self._until(lambda: self._well is None, self.acquire)

    def settle(self) -> None:
        """Commit; who falls does it without being told."""
        self._until(lambda: self.worker.move is None, self.commit)

    def finish(self) -> None:
        """Do all that is left of a transition."""
        while legal.next_effect(self.system, self.world, self.name):
            self.report(True)
        self.settle()

    def work(self, action: str, world: World) -> None:
        """Begin an action."""
        self._works.setdefault(action, []).append(self.action(action, world))
        self._works[action][-1].__enter__()

    def worked(self, action: str, ok: bool) -> None:
        """End it, by an error if it isn't ``ok``."""
        error = None if ok else ActionFailed(f"{action}: so the trace says")
        self._works[action].pop().__exit__(None if ok else ActionFailed, error, None)

    def end(self) -> None:
        """End its thread."""
        self._over = True
        self._go.release()
        self._mailbox.shutdown()

    def pass_gate(self, effect: Effect) -> None:
        """Be in an effect until the replay says how it ends."""
        self._under_way = True
        if self._well is None:
            self._stop()
        well, self._well, self._under_way = self._well, None, False
        if not well:
            raise ActionFailed(f"{effect}: so the trace says")

    def _apply(self, event: on.Event, world: World | None = None) -> Worker:
        before = super()._apply(event, world)
        if isinstance(event, (on.Begin, on.Done, on.Sever)):  # its own thread comes from no other
            self._stop()
        return before

    def _stop(self) -> None:
        self._stopped.release()
        if self._over or not self._go.acquire(timeout=DEADLINE) or self._over:
            raise DeadlineExceeded(f"{self.name} is not let on")

    def _until(self, true: Callable[[], bool], then: Callable[[], object]) -> None:
        """Let it on: to the end of what it does, and into what the driver asks for next."""
        for _ in range(3):
            if true():
                return
            if self._call is None:
                self.ask(self.undo if self.falls else then)
            else:
                self._go.release()
                self._wait()
        if not true():
            raise DeadlineExceeded(f"{self.name} does not come to it: {self.worker}")

    def _wait(self) -> None:
        if not self._stopped.acquire(timeout=DEADLINE):
            raise DeadlineExceeded(f"{self.name} hangs: {self.worker}")
        if self._call is not None and self._call.done():
            call, self._call = self._call, None
            call.result()


class _Gate:
    """A resource that exists as long as its process is in no effect of it."""

    def __init__(self, process: _Process) -> None:
        self._process = process

    def acquire(self, effect: Effect) -> None:
        """Wait for the replay."""
        self._process.pass_gate(effect)

    release = acquire
