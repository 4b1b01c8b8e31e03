"""Visit every state of a composed system, in any order of triggers and faults, breadth-first.

The guards alone must protect whoever embeds the machines: nothing is assumed about who fires what.

>>> from fsm_trainer.machine.spec import load
>>> verdict = check(System.of(load("disaggregated"), rollouts=1), fine=False)
>>> verdict.states, verdict.violation
(1099, None)
"""

from __future__ import annotations

import ast
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from fsm_trainer.machine import events as on
from fsm_trainer.machine.errors import Refused, SpecError
from fsm_trainer.machine.names import Role
from fsm_trainer.machine.planner import ready
from fsm_trainer.machine.spec import Phase
from fsm_trainer.machine.version import Version
from fsm_trainer.machine.world import System, World
from fsm_trainer.verify.canon import CURRENT, Canon, Change, Code
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
    happened: set[tuple[object, ...]] = field(default_factory=set)
    """What was seen at all, by roles: transitions, actions and their ends, kinds of faults."""


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
    refuse_counting(system)
    return Search(system, properties or system, relation, canon, most, progress).run()


def refuse_counting(system: System) -> None:
    """Refuse guards that read a number of which a search knows only whether it equals another's.

    Raises:
        SpecError: with the guard and the part of it.
    """
    for table in system.spec.roles.values():
        for row in (*table.transitions, *table.actions.values()):
            for node in (each for part in row.guard.parts for each in ast.walk(part)):
                if not isinstance(node, ast.Compare):
                    continue
                sides = [node.left, *node.comparators]
                read = {side.attr for side in sides if isinstance(side, ast.Attribute)}
                equal = all(isinstance(op, ast.Eq | ast.NotEq) for op in node.ops)
                alike = all(isinstance(side, ast.Attribute) for side in sides)
                if read & {"version", "lineage", "epoch"} and not (equal and alike):
                    raise SpecError(
                        f"{table.role}: `{ast.unparse(node)}` can't be checked: versions, lineages "
                        "and epochs grow without end, so compare them with each other, by == or !="
                    )


class Search:
    """Breadth-first, over codes; what is done at each is for subclasses to replace."""

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
        self._known: dict[object, list[Change]] = {}
        self._verdict = Verdict()

    def run(self) -> Verdict:
        """The verdict."""
        began, verdict = time.perf_counter(), self._verdict
        self._add(self._start(), -1)
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
            self._judge()
        verdict.states, verdict.seconds = len(self._order), time.perf_counter() - began
        return verdict

    def _start(self) -> Code:
        return self._canon.encode(Node(self._system.initial()))

    def _judge(self) -> None:
        """What can be asked only when every state is known."""
        for name, phase in self._system.spec.phases.items():
            good = partial(self._ready, phase)
            self._recoverable(good, f"recoverable: phase {name} is out of reach")
        self._sometimes(expected(self._properties))

    def _add(self, code: Code, source: int) -> int:
        there = self._index.setdefault(code, len(self._order))
        if there == len(self._order):
            self._order.append(code)
            self._came.append(source)
            self._back.append([])
        return there

    def _visit(self, at: int) -> None:
        node, alive = self._canon.decode(self._order[at]), False
        if why := broken(self._properties, node):
            return self._fail(why, at)
        for edge in self._relation.edges(node):
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
            self._note(node, edge)
            for number, code in enumerate(codes):
                there = self._add(code, at)
                if not fault and number == 0:
                    self._back[there].append(at)
                    alive = True
        if not alive:
            self._fail("deadlock: nothing but faults can happen", at)
        return None

    def _note(self, node: Node, edge: Edge) -> None:
        """Remember what happens at all: by roles, because names are places only."""
        system, happened, event = self._system, self._verdict.happened, edge.event
        match event:
            case on.Begin(trigger=trigger, workers=names):
                for name in names:
                    source = system.get(node.world, name).state
                    happened.add((system.names[name], trigger, source))
            case on.Acted(action=action, workers=names, ok=ok):
                happened.update((system.names[name], action, ok) for name in names)
            case on.Done(effect=effect) | on.Failed(effect=effect):
                happened.add((system.names[effect.worker], type(event).__name__))
            case on.Commit() | on.Act():
                pass
            case _:
                happened.add((system.names[event.worker], type(event).__name__))

    def _after(self, code: Code, node: Node, event: on.Event) -> list[Code]:
        """The codes after an event; what it changes is looked up where it was met before.

        Met before is: the same event, part and links, and if others matter, what it sees of them.
        """
        system, canon, key = self._system, self._canon, None
        name, alone = self._relation.subject(node, event)
        if name:
            place, size = system.index[name], len(system.names)
            several = sum(w.version == NEWEST for w in node.world.workers) > 1
            others = () if alone else canon.seen(code)
            key = (event, code[place], code[size:], several, others)
            if (known := self._known.get(key)) is not None:
                return [canon.replaced(code, change) for change in known]
        successors = [*self._relation.after(node, event)]
        if why := wrong_step(self._properties, node.world, event, successors[0].world):
            raise Unsafe(why)
        codes = [canon.places(successor) for successor in successors]
        if key is not None and _ages_stand(node.world, successors[0].world, several):
            changes = [canon.change(code, after) for after in codes]
            told = {place} if alone else {place, *range(size, len(code)), *canon.moving(code)}
            if all(i in told for change in changes for i, _ in change):
                self._known[key] = changes
        return [canon.replaced(after, ()) for after in codes]

    def _fail(self, why: str, at: int, *last: Edge) -> None:
        codes, code = list[Code](), self._order[at]
        while at > 0:
            codes.insert(0, self._order[at])
            at = self._came[at]
        steps = [*self._walk(codes)]
        node = steps[-1].node if steps else None
        names = self._places(code, node or Node(self._system.initial()))
        told = partial(re.sub, r"[\w-]+", lambda word: names.get(word[0], word[0]))
        steps += (Step(Edge(told(e.label), _renamed(e.event, names), e.fault), None) for e in last)
        self._verdict.violation = Violation(told(why), tuple(steps))

    def _places(self, code: Code, node: Node) -> dict[str, str]:
        """Who in a run stands where a code, which forgets which twin is which, has a name."""
        system, places = self._system, dict[str, str]()
        for name, part in zip(system.names, code, strict=False):
            places[name] = next(
                other
                for other in system.names
                if other not in places.values()
                and system.names[other] == system.names[name]
                and self._canon.part_of(node, other) == part
            )
        return places

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

    def _ready(self, phase: Phase, at: int) -> bool:
        node = self._canon.decode(self._order[at])
        return not node.late and ready(self._system, node.world, phase)

    def _recoverable(self, good: Callable[[int], bool], why: str) -> None:
        """From every state in which somebody is left, a good one can be reached again.

        What leads to a good one needn't be asked whether it is one.
        """
        reached = bytearray(len(self._order))
        for at in range(len(self._order)):
            walk = [] if reached[at] or not good(at) else [at]
            while walk:
                here = walk.pop()
                if not reached[here]:
                    reached[here] = 1
                    walk += self._back[here]
        for at, code in enumerate(self._order):
            if not reached[at] and self._verdict.violation is None and self._goes_on(code):
                self._fail(why, at)

    def _goes_on(self, code: Code) -> bool:
        """Whether anybody is left to generate: without them no phase can be reached."""
        return somebody(self._system, self._canon.decode(code).world)

    def _sometimes(self, expected: Iterable[tuple[object, ...]]) -> None:
        """Nothing is proved of what never happens."""
        missing = [
            " ".join(map(str, each)) for each in expected if each not in self._verdict.happened
        ]
        if missing and self._verdict.violation is None:
            self._verdict.violation = Violation(f"sometimes: never {', '.join(missing)}")


def _renamed(event: on.Event, names: Mapping[str, str]) -> on.Event:
    match event:
        case on.Done(effect=effect) | on.Failed(effect=effect):
            return replace(event, effect=replace(effect, worker=names[effect.worker]))
        case on.Begin(workers=workers) | on.Commit(workers=workers):
            return replace(event, workers=tuple(names[name] for name in workers))
        case on.Act(workers=workers) | on.Acted(workers=workers):
            return replace(event, workers=tuple(names[name] for name in workers))
    return replace(event, worker=names[event.worker])


def _ages_stand(before: World, after: World, several: bool) -> bool:
    """Whether the newest version stays the newest, ``several`` having it, and the lineage.

    Else the ages of all versions may change, of workers, too, whom an event doesn't concern.
    """
    both = zip(before.workers, after.workers, strict=True)
    kept = (
        now.version == was.version or (now.version is None and (was.version != NEWEST or several))
        for was, now in both
    )
    return before.lineage == after.lineage and all(kept)


def somebody(system: System, world: World) -> bool:
    """Whether a rollout worker is left."""
    names = system.names.items()
    return any(system.get(world, name).live for name, role in names if role is Role.ROLLOUT)


def expected(system: System) -> list[tuple[object, ...]]:
    """What must happen somewhere: every transition, every action to both ends, every death."""
    found: list[tuple[object, ...]] = []
    for role, table in system.spec.roles.items():
        found += [(role, t.trigger, t.source) for t in table.transitions]
        found += [(role, action, ok) for action in table.actions for ok in (True, False)]
        found += [(role, "Died"), (role, "Confirmed")]
        found += [(role, "Sever")] if any(t.joint for t in table.transitions) else []
    return found
