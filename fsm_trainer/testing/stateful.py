"""A Hypothesis state machine over workers of your own: see the package for a tutorial."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import wait
from contextlib import ExitStack
from functools import partial
from types import MappingProxyType
from typing import ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fsm_trainer.machine.errors import FsmError
from fsm_trainer.machine.names import Trigger
from fsm_trainer.machine.planner import Move, plan
from fsm_trainer.machine.spec import Phase
from fsm_trainer.machine.world import System, World
from fsm_trainer.testing.model import Model, Step
from fsm_trainer.testing.subject import (
    Meeting,
    Order,
    PeerAbsent,
    PropertyViolated,
    Subject,
    started,
)
from fsm_trainer.verify.properties import broken
from fsm_trainer.verify.relation import Node


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
    between_deaths: ClassVar[int] = 2
    """Steps between deaths, at least: where everybody dies at once little is seen."""
    stalls: ClassVar[float] = 0.0
    """Seconds that a worker stands still for while others connect to it; longer than they wait."""
    _plans: ClassVar[dict[tuple[str, World], tuple[Move, ...]]]

    def __init_subclass__(cls) -> None:
        # Sequences repeat each other, and most while they are made shorter.
        super().__init_subclass__()
        cls._plans = {}

    def make_worker(self, name: str) -> Subject:
        """A new worker of that name, disconnected; called again after it was killed."""
        raise NotImplementedError(f"give {type(self).__name__} a make_worker(name)")

    def __init__(self) -> None:
        super().__init__()
        if not hasattr(type(self), "system"):
            raise TypeError(f"give {type(self).__name__} a system: System.of(load(…), rollouts=…)")
        self.model, self.story = Model(self.system), list[str]()
        self.workers: dict[str, Subject] = {}
        self._refused_at = self._late_at = self._died_at = 0

    def begin(self) -> None:
        """Make all workers."""
        for name in self.system.names:
            self.workers[name] = self.make_worker(name)

    @initialize(data=st.data())
    def begin_anywhere(self, data: st.DataObject) -> None:
        """Most of what goes wrong is far from the start: begin where a phase can run, too."""
        self.begin()
        phase = data.draw(st.sampled_from(["", *self.system.spec.phases]), label="begins in")
        if phase:
            self.go_to(phase)

    def teardown(self) -> None:
        """End every worker."""
        with ExitStack() as all_of_them:
            for worker in self.workers.values():
                all_of_them.callback(worker.kill)

    # The rules

    @rule(data=st.data())
    def trigger(self, data: st.DataObject) -> None:
        """A transition that is legal now, and is done."""
        step = self._draw(data, self._legal(self.model.triggers()))
        if step is not None:
            self.run(step)

    @rule(data=st.data())
    def act(self, data: st.DataObject) -> None:
        """Work that is legal now, and is done."""
        step = self._draw(data, self._legal(self.model.actions()))
        if step is not None:
            self.run(step)

    @precondition(lambda self: self._refused_at <= len(self.story))
    @rule()
    def refuse(self) -> None:
        """Every transition and action that is illegal now: refused, and nothing moves."""
        self._refused_at = len(self.story) + 1  # once in a place is enough
        for name in self.system.names:
            self._refuse_all(name)

    def _refuse_all(self, name: str) -> None:
        for step in [*self.model.triggers(), *self.model.actions()]:
            alone = Step(step.name, (name,), step.joint)
            if name in step.workers and self.model.refusals(alone):
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
        """An effect or an action fails: what it left is true, and what it brought doesn't count."""
        legal = self._legal([*self.model.triggers(), *self.model.actions()])
        found = [each for step in legal for each in self._weak(step)]
        if found:
            step, name, what = data.draw(st.sampled_from(found), label="step, worker, what fails")
            if self.workers[name].fail_next(what):
                self.run(step, failed=name)

    def _legal(self, asked: Iterable[Step]) -> list[Step]:
        return [step for step in asked if not self.model.refusals(step)]

    def _weak(self, step: Step) -> Iterator[tuple[Step, str, str]]:
        """Where a step can fail: each acquisition of each end, or the action there."""
        for name in step.workers:
            edge = self.system.table(name).edge(step.name, self.model.state(name))
            if not step.moves:
                yield step, name, step.name
            elif edge is not None:
                gains = {*self.system.table(name).holds[edge.dest]} - {*self.model.holds(name)}
                yield from ((step, name, resource) for resource in sorted(gains))

    @rule(data=st.data())
    def overlap(self, data: st.DataObject) -> None:
        """While a worker is at work, what the work excludes is refused."""
        alone = (s for s in self._legal(self.model.actions()) if s.joint is None)
        step = self._draw(data, alone)
        if step is not None:
            self.story.append(f"{step} begins")
            self.run(step, during=partial(self._refuse_all, step.workers[0]))

    @precondition(lambda self: self.stalls > 0)
    @rule(data=st.data())
    def stand_still(self, data: st.DataObject) -> None:
        """A worker is stopped while others wait for it to connect: they give up, and so does it."""
        legal = self._legal(self.model.triggers())
        step = self._draw(data, (s for s in legal if s.joint and s.name == Trigger.CONNECT))
        if step is not None:
            name = data.draw(st.sampled_from(step.workers), label="stands still")
            if self.workers[name].stall(self.stalls):
                self.run(step, failed=name)

    @precondition(lambda self: len(self.story) >= self._died_at + self.between_deaths)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        """A worker's process ends, and another takes its place."""
        self._died_at = len(self.story)
        name = data.draw(st.sampled_from([*self.system.names]), label="dies")
        self.story.append(f"{name} dies")
        self.workers[name].kill()
        self.model.died(name)
        self.workers[name] = self.make_worker(name)

    @precondition(lambda self: len(self.story) >= self._died_at + self.between_deaths)
    @rule(data=st.data())
    def die_within(self, data: st.DataObject) -> None:
        """A worker's process ends when the ends of its step have released, and wait for it."""
        step = self._draw(data, (s for s in self._legal(self.model.triggers()) if s.joint))
        if step is not None:
            name = data.draw(st.sampled_from(step.workers), label="dies")
            self._died_at = len(self.story)
            self.run(step, dies=name)

    @precondition(lambda self: any(self.model.severable()))
    @rule(data=st.data())
    def sever(self, data: st.DataObject) -> None:
        """A worker whose peer died gives up its lease, and nothing else that it can keep."""
        step = self._draw(data, self.model.severable())
        if step is not None:
            self.run(step)

    @rule(data=st.data())
    def go_back(self, data: st.DataObject) -> None:
        """From wherever it is, the system finds its way to a phase of its schedule."""
        self.go_to(data.draw(st.sampled_from([*self.system.spec.phases]), label="phase"))

    @invariant()
    def properties_hold(self) -> None:
        """The properties of ``system.yaml``, asked of what the workers hold."""
        model, measured = self.model.world, []
        for worker, known in zip(self.workers.values(), model.workers, strict=True):
            told = worker.epochs()
            epochs = tuple(told.get(link, 0) for link in self.system.links)
            measured.append(known._replace(held=frozenset(worker.holds()), epochs=epochs))
        problem = broken(self.system, Node(model._replace(workers=tuple(measured))))
        always = self.system.spec.system.always
        text = always.get(int(problem.partition(":")[0])) if problem else ""
        self._must(not problem, f"{problem}\n  the property: {text}")

    def _way(self, phase: Phase) -> tuple[Move, ...]:
        known = (phase.name, self.model.world)
        if known not in self._plans:
            self._plans[known] = plan(self.system, self.model.world, phase)
        return self._plans[known]

    def go_to(self, phase: str) -> None:
        """Give up what is broken, and go by the shortest way to where a phase can run."""
        while (step := next(self.model.severable(), None)) is not None:
            self.run(step)
        for move in self._way(self.system.spec.phases[phase]):
            joint = [self._joint(name, move.name) for name in move.workers]
            together = [move.workers] if joint[0] else [(name,) for name in move.workers]
            for ends in together:
                self.run(Step(move.name, ends, joint[0]))

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

    def run(
        self,
        step: Step,
        failed: str | None = None,
        dies: str | None = None,
        during: Callable[[], None] | None = None,
    ) -> None:
        """Do a legal step, and compare.

        Args:
            step: whom it concerns, and what it is.
            failed: an end that will not be able to do its part.
            dies: an end of a transition whose process ends when it waits for the others.
            during: what happens while a worker is at its action alone.
        """
        how = f" fails at {failed}" if failed else f", where {dies} dies" if dies else ""
        self.story.append(f"{step}{how}")
        at = {dies: partial(self._dies, dies)} if dies else {}
        if during is not None:
            at[step.workers[0]] = partial(self._while, step, during)
        before = self.workers[dies] if dies else None
        errors = self._asked(step, self._epoch(step), at)
        wrong = {n: e for n, e in errors.items() if e is not None}
        for error in wrong.values():
            if isinstance(error, PropertyViolated):
                raise error  # of what was asked meanwhile
        dead = dies is not None and self.workers[dies] is not before
        lost = dies if dead else failed
        if lost is None:
            self._must(not wrong, f"{step} is legal, and failed: {wrong}")
        else:
            self._must(lost in wrong, f"{step} ended well, though {lost} could not do its part")
        if step.name == Trigger.SEVER:
            self.model.severed(step)
        elif step.moves:
            self.model.moved(step, lost, dies=dead)
        else:
            self.model.acted(step, ok=lost is None)
        if dies is not None and dead:
            self.model.died(dies)
        if step.joint and failed and not step.moves:
            # What was cut off may have ended its group, at some ends at once.
            self._close(step.joint)
            return
        self.properties_hold()
        self._compare(step)

    def _close(self, link: str) -> None:
        """Leave a link, all together."""
        for step in self.model.triggers():
            if step.joint == link and step.name == Trigger.DISCONNECT:
                self.run(step)

    def _dies(self, name: str) -> None:
        """Where it would wait for the others; who waits for nobody doesn't die."""
        self.workers[name].kill()
        self.workers[name] = self.make_worker(name)
        raise PeerAbsent(f"{name} has died")

    def _while(self, step: Step, during: Callable[[], None]) -> None:
        self.model.acting(step)
        during()

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
            epochs, expected_epochs = dict(worker.epochs()), self.model.epochs(name)
            told = f"2: after {step} {name} must hold the epochs {expected_epochs}, it has {epochs}"
            self._must(epochs == expected_epochs, told)
        seen: dict[object, tuple[str, object]] = {}
        for name, worker in self.workers.items():
            if not self.model.carries(name):
                continue
            version, weights = self.model.version(name), worker.weights()
            if version is None:
                self._must(weights is None, f"5: after {step} {name} would serve torn weights")
                continue
            first, others = seen.setdefault(version, (name, weights))
            self._must(weights == others, f"5: {name} and {first} differ in {version}")

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

    def _asked(
        self, step: Step, epoch: int, at: Mapping[str, Callable[[], None]] = MappingProxyType({})
    ) -> dict[str, BaseException | None]:
        """Have all ends do it at once; what each raised. Who is in ``at`` does that, not meet."""
        meeting, futures = Meeting(step.workers, self.deadline), {}
        for name in step.workers:
            meet = at.get(name) or partial(meeting.meet, name)
            order = Order(step.name, step.workers, step.joint, epoch, self.model.world, meet)
            worker = self.workers[name]
            does = worker.trigger if step.moves else worker.act
            futures[name] = started(partial(does, order), partial(meeting.leave, name))
        _, late = wait(futures.values(), self.deadline)
        hangs = [n for n, future in futures.items() if future in late and n not in meeting.waiting]
        self._must(not late, f"{step}: {hangs} did not come back within {self.deadline} s")
        return {name: future.exception() for name, future in futures.items()}
