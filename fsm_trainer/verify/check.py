"""Visit every state of a composed system, in any order of triggers and faults, breadth-first.

The guards alone must protect whoever embeds the machines: nothing is assumed about who fires what.

>>> from fsm_trainer.machine.spec import load
>>> verdict = check(System.of(load("disaggregated"), rollouts=1), fine=False)
>>> verdict.states, verdict.violation
(1099, None)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from fsm_trainer.machine import events as on
from fsm_trainer.machine.errors import Refused
from fsm_trainer.machine.planner import ready
from fsm_trainer.machine.version import Version
from fsm_trainer.machine.world import System
from fsm_trainer.verify.canon import CURRENT, Canon, Code
from fsm_trainer.verify.properties import broken, wrong_step
from fsm_trainer.verify.relation import Edge, Node, Relation

# A decoded world's newest version: its lineage is the second, the ages of all others are negative.
NEWEST = Version(CURRENT, 0)

Progress = Callable[[int, int], None]
"""Told now and then how many states were visited, and how many wait."""


@dataclass(frozen=True, slots=True)
class Step:
    """One event of a trace, and the node after it; None where the event is the violation."""

    edge: Edge
    node: Node | None


@dataclass(frozen=True, slots=True)
class Violation:
    """A property that fails, and the shortest way there from the initial world."""

    because: str
    steps: tuple[Step, ...] = ()

    @property
    def number(self) -> str:
        """Which property: its number in ``system.yaml``, or its name."""
        return self.because.partition(":")[0]


class Unsafe(Exception):
    """Raised when an event itself violates a property."""


@dataclass(slots=True)
class Verdict:
    """What a check found; ``cut`` if it gave up at its limit of states."""

    states: int = 0
    transitions: int = 0
    seconds: float = 0.0
    violation: Violation | None = None
    cut: bool = False
    labels: set[str] = field(default_factory=set)


def check(
    system: System,
    *,
    fine: bool = True,
    jobs: int = 1,
    symmetric: bool = True,
    most: int = 2_000_000,
    properties: System | None = None,
    progress: Progress = lambda visited, waiting: None,
) -> Verdict:
    """Visit every state; stops at the first violation, deadlock, or phase out of reach.

    ``properties`` are asked of another system than the one that is explored: of the tables before
    a change that they shall see.
    """
    relation = Relation(system, fine=fine, jobs=jobs, symmetric=symmetric)
    canon = Canon(system, symmetric=symmetric)
    return _Search(system, properties or system, relation, canon, most, progress).run()


class _Search:
    def __init__(
        self,
        system: System,
        properties: System,
        relation: Relation,
        canon: Canon,
        most: int,
        progress: Progress,
    ) -> None:
        self._system, self._properties, self._most = system, properties, most
        self._relation, self._canon, self._progress = relation, canon, progress
        self._order: list[Code] = []
        self._index: dict[Code, int] = {}
        self._came: list[int] = []
        self._back: list[list[int]] = []
        self._local: dict[object, int] = {}
        self._good = {name: list[int]() for name in system.spec.phases}
        self._verdict = Verdict()

    def run(self) -> Verdict:
        """The verdict."""
        began, verdict = time.perf_counter(), self._verdict
        self._add(self._canon.encode(Node(self._system.initial())), -1)
        at = 0
        while at < len(self._order) and verdict.violation is None:
            if at >= self._most:
                verdict.cut = True
                break
            if at % 5000 == 0:
                self._progress(at, len(self._order) - at)
            self._visit(at)
            at += 1
        if verdict.violation is None and not verdict.cut:
            self._recoverable()
        if verdict.violation is None and not verdict.cut:
            self._sometimes()
        verdict.states, verdict.seconds = len(self._order), time.perf_counter() - began
        return verdict

    def _add(self, code: Code, source: int) -> int:
        there = self._index.setdefault(code, len(self._order))
        if there == len(self._order):
            self._order.append(code)
            self._came.append(source)
            self._back.append([])
        return there

    def _visit(self, at: int) -> None:
        system, relation = self._system, self._relation
        node, alive = self._canon.decode(self._order[at]), False
        if why := broken(self._properties, node):
            return self._fail(why, at)
        if not node.late:
            for name, phase in system.spec.phases.items():
                if ready(system, node.world, phase):
                    self._good[name].append(at)
        for edge in relation.edges(node):
            label, event, fault = edge
            try:
                codes = self._after(self._order[at], node, event)
            except Refused as refused:
                if isinstance(event, (on.Done, on.Failed)):
                    return self._fail(f"refused: a due report, {label}: {refused}", at, edge)
                continue
            except Unsafe as unsafe:
                return self._fail(str(unsafe), at, edge)
            self._verdict.transitions += len(codes)
            self._verdict.labels.add(label)
            for number, code in enumerate(codes):
                there = self._add(code, at)
                if not fault and number == 0:
                    self._back[there].append(at)
                    alive = True
        if not alive:
            self._fail("deadlock: nothing but faults can happen", at)
        return None

    def _after(self, code: Code, node: Node, event: on.Event) -> list[Code]:
        """The codes after an event; what concerns one worker alone is looked up, once known."""
        system, canon = self._system, self._canon
        name = self._relation.alone(node, event)
        place, newest, key = 0, 0, None
        if name and not node.late:
            place = system.index[name]
            newest = sum(w.version == NEWEST for w in node.world.workers)
            key = (event, code[place], code[len(system.names) :], newest > 1)
            part = self._local.get(key)
            if part is not None:
                return [canon.replaced(code, place, part)]
        successors = [*self._relation.after(node, event)]
        if why := wrong_step(self._properties, node.world, event, successors[0].world):
            raise Unsafe(why)
        codes = [canon.encode(successor) for successor in successors]
        if key is not None and len(codes) == 1:
            before, after = node.world, successors[0].world
            was, now = (system.get(world, name).version for world in (before, after))
            # Else the ages of the others' versions may change.
            same = was == now or (now is None and (was != NEWEST or newest > 1))
            if same and before.lineage == after.lineage and before.links == after.links:
                self._local[key] = canon.part_of(successors[0], name)
        return codes

    def _fail(self, why: str, at: int, *last: Edge) -> None:
        codes = list[Code]()
        while at > 0:
            codes.insert(0, self._order[at])
            at = self._came[at]
        self._verdict.violation = Violation(
            why, (*self._walk(codes), *(Step(e, None) for e in last))
        )

    def _walk(self, codes: list[Code]) -> Iterator[Step]:
        """Events of one concrete run through the codes: these forget which twin is which."""
        node = Node(self._system.initial())
        for code in codes:
            ways = (
                (e, n)
                for e in self._relation.edges(node)
                for n in self._relation.after(node, e.event)
            )
            edge, node = next((e, n) for e, n in ways if self._canon.encode(n) == code)
            yield Step(edge, node)

    def _recoverable(self) -> None:
        """From every state in which somebody is left, every phase can be reached again."""
        for name, good in self._good.items():
            reached, walk = bytearray(len(self._order)), list(good)
            for at in walk:
                reached[at] = 1
            while walk:
                for before in self._back[walk.pop()]:
                    if not reached[before]:
                        reached[before] = 1
                        walk.append(before)
            for at, code in enumerate(self._order):
                if not reached[at] and self._somebody(code):
                    return self._fail(f"recoverable: phase {name} is out of reach", at)
        return None

    def _somebody(self, code: Code) -> bool:
        workers = zip(self._system.names, self._canon.decode(code).world.workers, strict=True)
        return any(worker.live for name, worker in workers if name.startswith("rollout"))

    def _sometimes(self) -> None:
        """Nothing is proved of what never happens."""
        missing = [
            label for label in expected(self._properties) if label not in self._verdict.labels
        ]
        if missing:
            self._verdict.violation = Violation(f"sometimes: never {', '.join(missing)}")


def expected(system: System) -> Sequence[str]:
    """What must happen somewhere: every transition, every action that ends well, every fault."""
    labels, seen = list[str](), set[str]()
    for name, role in system.names.items():
        if role in seen:
            continue
        seen.add(role)
        table = system.table(name)
        moves = dict.fromkeys(t.trigger for t in table.transitions if t.joint is None)
        labels += [f"{name}: {trigger}" for trigger in moves]
        works = [action for action, known in table.actions.items() if known.joint is None]
        labels += [f"{name}: {action} ended True" for action in works]
        labels += [f"{name}: sever"] if any(t.joint for t in table.transitions) else []
    return [*labels, "pushed True", "pushed False"] if system.links else labels
