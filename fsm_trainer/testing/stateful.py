"""A Hypothesis state machine over workers of your own: see the package for a tutorial."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Protocol

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fsm_trainer.machine.errors import FsmError
from fsm_trainer.machine.names import Trigger
from fsm_trainer.machine.planner import Move, plan
from fsm_trainer.machine.spec import Phase
from fsm_trainer.machine.world import System, World
from fsm_trainer.testing.model import Model, Step
from fsm_trainer.verify.properties import broken
from fsm_trainer.verify.relation import Node

# Steps between deaths: where everybody dies at once nothing is seen.
LIVES = 4


class PropertyViolated(AssertionError):
    """A worker is not as the tables say; begins with the property's number in ``system.yaml``."""


class NobodyComes(FsmError):
    """Raised when a worker waits for another end of its step, which has failed."""


@dataclass(frozen=True)
class Order:
    """What a worker is asked to do, and what it is told with it."""

    name: str
    """A trigger, or an action."""
    ends: tuple[str, ...]
    """Who does it at the same time."""
    link: str | None
    """Of a joint one, and of ``sever``."""
    epoch: int
    """Of that link: the one that opens, or the worker's own."""
    world: World
    """How everybody stands; what isn't told by it, a worker can't know."""
    meet: Callable[[], None]
    """Waits until all ends have come here; raises `NobodyComes` if one has failed before."""


class Subject(Protocol):
    """One worker under test. A call that is refused, or fails, raises."""

    def trigger(self, order: Order) -> None:
        """Do a whole transition; of a joint one, this end's part of it."""

    def act(self, order: Order) -> None:
        """Do an action; of a joint one, this end's part of it."""

    def holds(self) -> Collection[str]:
        """The resources that it holds, measured where that is possible."""

    def weights(self) -> object:
        """Something that is equal for equal weights; None if it has none that it would serve."""

    def fail_next(self, resource: str) -> bool:
        """Have the next acquisition of a resource fail; False if that can't be arranged."""

    def stall(self, seconds: float) -> bool:
        """Stand still for so long before its next link opens; False if that can't be arranged."""

    def kill(self) -> None:
        """End at once, as its process might; returns when nothing of it is left."""


class LifecycleMachine(RuleBasedStateMachine):
    """Drives workers through triggers, actions and faults, in any order, against a plain model.

    Subclass it, name the tables and give :meth:`make_worker`; `run_state_machine_as_test` or the
    class's own ``TestCase`` runs it.
    """

    system: ClassVar[System]
    """The tables composed over the workers under test."""
    refuses: ClassVar[tuple[type[Exception], ...]] = (FsmError,)
    """What a worker raises for a request that is illegal now."""
    deadline: ClassVar[float] = 60.0
    """Seconds that all ends may take for a step; more is a hang."""
    stalls: ClassVar[float] = 0.0
    """Seconds that a worker stands still for while others connect to it; longer than they wait."""
    _plans: ClassVar[dict[tuple[str, World], tuple[Move, ...]]]

    def __init_subclass__(cls) -> None:
        # Sequences repeat each other, and most while they are made shorter.
        super().__init_subclass__()
        cls._plans = {}

    def make_worker(self, name: str) -> Subject:
        """A new worker of that name, disconnected; called again after it was killed."""
        raise NotImplementedError

    @initialize()
    def _begin(self) -> None:
        self.model, self.story = Model(self.system), list[str]()
        self._refused_at = self._late_at = self._died_at = 0
        self.workers = {name: self.make_worker(name) for name in self.system.names}

    def teardown(self) -> None:
        """End every worker."""
        for worker in getattr(self, "workers", {}).values():
            worker.kill()

    # The rules

    @rule(data=st.data())
    def trigger(self, data: st.DataObject) -> None:
        """A transition that is legal now, and is done."""
        step = self._draw(data, (s for s in self.model.triggers() if not self.model.refusals(s)))
        if step is not None:
            self._run(step)

    @rule(data=st.data())
    def act(self, data: st.DataObject) -> None:
        """Work that is legal now, and is done."""
        step = self._draw(data, (s for s in self.model.actions() if not self.model.refusals(s)))
        if step is not None:
            self._run(step)

    @precondition(lambda self: self._refused_at <= len(self.story))
    @rule()
    def refuse(self) -> None:
        """Every transition and action that is illegal now: refused, and nothing moves."""
        self._refused_at = len(self.story) + 1  # once in a place is enough
        for step in [*self.model.triggers(), *self.model.actions()]:
            for name in step.workers:
                alone = Step(step.name, (name,), step.joint)
                if self.model.refusals(alone):
                    self._refused(alone, self._epoch(step))

    @precondition(lambda self: any(map(self.model.epoch, self.system.links)))
    @precondition(lambda self: self._late_at <= len(self.story))
    @rule(data=st.data())
    def late(self, data: st.DataObject) -> None:
        """A message of an epoch that is over."""
        self._late_at = len(self.story) + 1
        known = (s for s in self.model.triggers() if s.joint and s.name == Trigger.CONNECT)
        step = self._draw(data, (s for s in known if self.model.epoch(str(s.joint))))
        if step is not None:
            name = data.draw(st.sampled_from(step.workers), label="worker")
            self._refused(Step(step.name, (name,), step.joint), self.model.epoch(str(step.joint)))

    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        """An effect of a transition fails: it is undone, and what it left is true."""
        step = self._draw(data, (s for s in self.model.triggers() if not self.model.refusals(s)))
        if step is None:
            return
        name = data.draw(st.sampled_from(step.workers), label="worker")
        table, before = self.system.table(name), self.model.holds(name)
        edge = table.edge(step.name, self.model.state(name))
        gains = [r for r in table.holds[edge.dest] if r not in before] if edge else []
        resource = data.draw(st.sampled_from(gains), label="fails") if gains else ""
        if resource and self.workers[name].fail_next(resource):
            self._run(step, failed=name)

    @precondition(lambda self: self.stalls > 0)
    @rule(data=st.data())
    def stand_still(self, data: st.DataObject) -> None:
        """A worker is stopped while others wait for it to connect: they give up, and so does it."""
        opens = (s for s in self.model.triggers() if s.joint and s.name == Trigger.CONNECT)
        step = self._draw(data, (s for s in opens if not self.model.refusals(s)))
        if step is not None:
            name = data.draw(st.sampled_from(step.workers), label="stands still")
            if self.workers[name].stall(self.stalls):
                self._run(step, failed=name)

    @precondition(lambda self: len(self.story) >= self._died_at + LIVES)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        """A worker's process ends, and another takes its place."""
        self._died_at = len(self.story)
        name = data.draw(st.sampled_from([*self.system.names]), label="dies")
        self.story.append(f"{name} dies")
        self.workers[name].kill()
        self.model.died(name)
        self.workers[name] = self.make_worker(name)

    @precondition(lambda self: any(self.model.severable()))
    @rule(data=st.data())
    def sever(self, data: st.DataObject) -> None:
        """A worker whose peer died gives up its lease, and nothing else that it can keep."""
        step = self._draw(data, self.model.severable())
        if step is not None:
            self._run(step)

    @rule(data=st.data())
    def go_back(self, data: st.DataObject) -> None:
        """From wherever it is, the system finds its way to a phase of its schedule."""
        self.go_to(data.draw(st.sampled_from([*self.system.spec.phases]), label="phase"))

    @invariant()
    def properties_hold(self) -> None:
        """The properties of ``system.yaml``, asked of what the workers hold."""
        model = self.model.world
        measured = [
            known._replace(held=frozenset(self.workers[name].holds()))
            for name, known in zip(self.system.names, model.workers, strict=True)
        ]
        problem = broken(self.system, Node(model._replace(workers=tuple(measured))))
        number = problem.partition(":")[0]
        told = dict(self.system.spec.system.always)
        self._must(not problem, f"{problem}\n  property {number}: {told.get(int(number or 0))}")

    def _way(self, phase: Phase) -> tuple[Move, ...]:
        known = (phase.name, self.model.world)
        if known not in self._plans:
            self._plans[known] = plan(self.system, self.model.world, phase)
        return self._plans[known]

    def go_to(self, phase: str) -> None:
        """Give up what is broken, and go by the shortest way to where a phase can run."""
        while (step := next(self.model.severable(), None)) is not None:
            self._run(step)
        for move in self._way(self.system.spec.phases[phase]):
            joint = [self._joint(name, move.name) for name in move.workers]
            together = [move.workers] if joint[0] else [(name,) for name in move.workers]
            for ends in together:
                self._run(Step(move.name, ends, joint[0]))

    # What a step is

    def _draw(self, data: st.DataObject, steps: Iterable[Step]) -> Step | None:
        found = [*steps]
        return data.draw(st.sampled_from(found), label="step") if found else None

    def _joint(self, name: str, asked: str) -> str | None:
        table = self.system.table(name)
        edge = table.edge(asked, self.model.state(name))
        return edge.joint if edge is not None else table.actions[asked].joint

    def _epoch(self, step: Step) -> int:
        opens = step.name == Trigger.CONNECT
        return self.model.epoch(step.joint) + opens if step.joint is not None else 0

    def _run(self, step: Step, failed: str | None = None) -> None:
        self.story.append(f"{step}{f' fails at {failed}' if failed else ''}")
        errors = self._asked(step, self._epoch(step))
        wrong = {n: e for n, e in errors.items() if e is not None}
        if failed is None:
            self._must(not wrong, f"{step} is legal, and failed: {wrong}")
        else:
            self._must(failed in wrong, f"{step} ended well, though {failed} could not do its part")
        if step.name == Trigger.SEVER:
            self.model.severed(step)
        elif step.name in list(Trigger):
            self.model.moved(step, failed)
        else:
            self.model.acted(step)
        self._compare(step)

    def _must(self, true: bool, otherwise: str) -> None:
        if not true:
            raise PropertyViolated(f"{otherwise}\nthe way there: {', '.join(self.story)}")

    def _compare(self, step: Step) -> None:
        """What everybody holds is what the model says, and equal versions are equal weights."""
        for name, worker in self.workers.items():
            held, expected = sorted(worker.holds()), sorted(self.model.holds(name))
            must_be = f"{self.model.state(name)} and hold {expected}"
            told = f"8: after {step} {name} must be {must_be}, it holds {held}"
            self._must(held == expected, told)
        seen: dict[object, tuple[str, object]] = {}
        for name, worker in self.workers.items():
            version = self.model.version(name)
            if version is None or "weights" not in self.model.holds(name):
                continue
            first, weights = seen.setdefault(version, (name, worker.weights()))
            self._must(worker.weights() == weights, f"5: {name} and {first} differ in {version}")

    def _refused(self, step: Step, epoch: int) -> None:
        [name] = step.workers
        before = sorted(self.workers[name].holds())
        [error] = self._asked(step, epoch).values()
        because = self.model.refusals(step) or [f"epoch {epoch} is over"]
        self._must(error is not None, f"{step} was done, though {'; '.join(because)}")
        self._must(
            isinstance(error, self.refuses), f"{step} must be refused, but failed: {error!r}"
        )
        same = before == sorted(self.workers[name].holds())
        self._must(same, f"8: {step} was refused, and moved {name}")

    def _asked(self, step: Step, epoch: int) -> dict[str, BaseException | None]:
        """Have all ends do it at once; what each raised."""
        meeting, futures = _Meeting(step.workers, self.deadline), {}
        for name in step.workers:
            meet = partial(meeting.meet, name)
            order = Order(step.name, step.workers, step.joint, epoch, self.model.world, meet)
            worker = self.workers[name]
            does = worker.trigger if step.name in list(Trigger) else worker.act
            futures[name] = _thread(partial(does, order), partial(meeting.leave, name))
        _, late = wait(futures.values(), self.deadline)
        hangs = [name for name, future in futures.items() if future in late]
        self._must(not hangs, f"{step}: {hangs} did not come back within {self.deadline} s")
        return {name: future.exception() for name, future in futures.items()}


class _Meeting:
    """Where the ends of one step wait for each other, as often as they like."""

    def __init__(self, names: Iterable[str], deadline: float) -> None:
        self._visits, self._deadline = dict.fromkeys(names, 0), deadline
        self._left = set[str]()
        self._changed = threading.Condition()

    def meet(self, name: str) -> None:
        with self._changed:
            self._visits[name] += 1
            turn = self._visits[name]
            self._changed.notify_all()
            here = lambda n: self._visits[n] >= turn or n in self._left  # noqa: E731
            self._changed.wait_for(lambda: all(map(here, self._visits)), self._deadline)
            absent = [n for n, visits in self._visits.items() if visits < turn]
        if absent:
            raise NobodyComes(f"{name} waited for {', '.join(absent)}, which failed or hangs")

    def leave(self, name: str) -> None:
        with self._changed:
            self._left.add(name)
            self._changed.notify_all()


def _thread(does: Callable[[], None], then: Callable[[], None]) -> Future[None]:
    future: Future[None] = Future()

    def run() -> None:
        try:
            does()
        except Exception as error:
            future.set_exception(error)
        else:
            future.set_result(None)
        finally:
            then()

    threading.Thread(target=run, daemon=True).start()
    return future
