"""Load the tables under ``states/`` into one concrete description; every error has a file and line.

``when:`` conditions are resolved here against the schedule's static facts, so that what is drawn,
checked and run is one machine per configuration.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema

from fsm_trainer.document import Document, Key
from fsm_trainer.machine.errors import SpecError
from fsm_trainer.machine.guards import Guard, constant, parse
from fsm_trainer.machine.names import LinkState, Role, State, Trigger

T = TypeVar("T")
GuardText = Annotated[Guard, PlainValidator(parse), WithJsonSchema({"type": "string"})]
AnyRole = Annotated[Role, WithJsonSchema({"anyOf": [{"$ref": "#/$defs/Role"}, {"type": "string"}]})]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class Resource(_Model):
    """What a worker can hold."""

    size: int = Field(0, ge=0, description="on the device, in the units of `capacity`")
    exclusive: bool = Field(False, description="at most one exclusive resource on a device")
    communicator: bool = Field(False, description="a process group: never held while sleeping")
    requires: tuple[str, ...] = Field((), description="one of these must be held before it")


class LinkSpec(_Model):
    """A link: the hub's role sends what it ``carries`` to the spokes' role.

    Its ends are all whose tables hold it. A further role has a group of its own with the hub, under
    the same epoch: all groups open and break as one.
    """

    hub: AnyRole
    spokes: AnyRole
    carries: str


class SystemFile(_Model):
    """``system.yaml``"""

    resources: dict[str, Resource]
    capacity: int
    links: dict[str, LinkSpec]
    always: dict[int, str] = {}
    recoverable: str = ""
    sometimes: list[str] = []


class Guarded(_Model):
    """What a guard allows; ``joint`` names the link whose ends do it together."""

    guard: GuardText = Field(default_factory=Guard)
    joint: str | None = None
    when: str | None = None


class Transition(Guarded):
    """An edge of a role's machine."""

    trigger: Trigger
    source: State = Field(alias="from")
    dest: State = Field(alias="to")


class Action(Guarded):
    """Work that a worker may do while it holds ``needs``."""

    needs: frozenset[str]
    updates: bool = Field(False, description="whether it makes a new version of the weights")


class RoleFile(_Model):
    """``actor.yaml``, ``critic.yaml``, ``rollout.yaml``"""

    role: AnyRole
    states: dict[State, list[str | dict[str, str]]]
    when: dict[State, str] = Field({}, description="where a state exists; absent: everywhere")
    transitions: list[Transition]
    actions: dict[str, Action] = {}


class LinkRow(_Model):
    """A row of ``link.yaml``."""

    trigger: str
    source: LinkState | list[LinkState] = Field(alias="from")
    dest: LinkState = Field(alias="to")


class LinkFile(_Model):
    """``link.yaml``"""

    states: list[LinkState]
    transitions: list[LinkRow]


class PhaseRow(_Model):
    """Which states a phase wants of each role (absent: any), and the action that it runs."""

    wants: dict[AnyRole, State | list[State]]
    action: str | None = None


class ScheduleFile(_Model):
    """``schedules/*.yaml``"""

    facts: dict[str, bool]
    devices: dict[AnyRole, str]
    phases: dict[str, PhaseRow]
    prologue: tuple[str, ...] = ()
    lanes: dict[str, tuple[str, ...]]
    epilogue: tuple[str, ...] = ()


@dataclass(frozen=True)
class RoleTable:
    """One role's machine."""

    role: Role
    holds: Mapping[State, tuple[str, ...]]
    transitions: tuple[Transition, ...]
    actions: Mapping[str, Action]
    _first: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def edge(self, trigger: str, source: State) -> Transition | None:
        """The transition that ``trigger`` takes from ``source``."""
        edges = (t for t in self.transitions if t.trigger == trigger and t.source == source)
        return next(edges, None)

    def first(self, held: frozenset[str], dest: State) -> tuple[bool, str] | None:
        """What moves first on the way to a state: whether it goes, and the resource."""
        if (held, dest) not in self._first:
            self._first[held, dest] = self._moves(held, dest)
        found: tuple[bool, str] | None = self._first[held, dest]
        return found

    def _moves(self, held: frozenset[str], dest: State) -> tuple[bool, str] | None:
        surplus = held.difference(self.holds[dest])
        if not surplus:
            return next(((False, r) for r in self.holds[dest] if r not in held), None)
        # What stands last in the states that hold it was acquired last, and goes first.
        last = {r: max(h.index(r) for h in self.holds.values() if r in h) for r in sorted(surplus)}
        return True, max(last, key=last.__getitem__)

    def largest_state(self, held: Set[str]) -> State:
        """The declared state that holds most of ``held`` and nothing else."""
        fitting = [s for s, resources in self.holds.items() if held >= {*resources}]
        return max(fitting, key=lambda s: len(self.holds[s]))


@dataclass(frozen=True, slots=True)
class Phase:
    """Which states a phase wants of each role (absent: any), and the action that it runs."""

    name: str
    wants: Mapping[Role, frozenset[State]]
    action: str | None


@dataclass(frozen=True, slots=True)
class Spec:
    """Everything that ``states/`` says for one schedule."""

    name: str
    system: SystemFile
    schedule: ScheduleFile
    roles: Mapping[Role, RoleTable]
    links: Mapping[str, LinkSpec]
    link_moves: Mapping[tuple[LinkState, str], LinkState]
    phases: Mapping[str, Phase]


def default_states() -> Path:
    """The folder of the shipped tables: the installed package data, or the sibling ``states/``."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "states", package.parent / "states"):
        if (folder / "system.yaml").is_file():
            return folder
    raise SpecError(f"{package / 'states'}: no tables installed; name a folder of tables")


def schedules(states: Path | None = None) -> list[str]:
    """The names of the schedules in a folder of tables."""
    return sorted(p.stem for p in ((states or default_states()) / "schedules").glob("*.yaml"))


def load(schedule: str, states: Path | str | None = None) -> Spec:
    """Load the tables for a schedule.

    Raises:
        SpecError: an unknown name, an unreachable state, no way back, two states that hold the
            same, a missing file; the text begins with ``file:line:``.
    """
    root = Path(states) if states is not None else default_states()
    if schedule not in schedules(root):
        known = ", ".join(schedules(root)) or "none"
        raise SpecError(f"{root / 'schedules'}: no schedule {schedule!r}; there are: {known}")
    plan_doc = Document(root / "schedules" / f"{schedule}.yaml", SpecError)
    plan = plan_doc.parse(ScheduleFile)
    system_doc = Document(root / "system.yaml", SpecError)
    system = system_doc.parse(SystemFile)
    written = {*Role, *(path.stem for path in root.glob("*.yaml"))} - {"link", "system"}
    for name, link in system.links.items():
        _refuse(system_doc, _unknown("role", {link.hub, link.spokes}, written, ("links", name)))
    links = {n: k for n, k in system.links.items() if {k.hub, k.spokes} <= plan.devices.keys()}
    roles = {}
    for role in plan.devices:
        document = Document(root / f"{role}.yaml", SpecError)
        roles[role] = _Role(document, system.resources, plan.facts, links, written).table()
    link_file = Document(root / "link.yaml", SpecError).parse(LinkFile)
    moves = {(s, row.trigger): row.dest for row in link_file.transitions for s in _all(row.source)}
    _refuse(plan_doc, _problems(plan, roles))
    phases = {
        name: Phase(name, {r: frozenset(_all(s)) for r, s in row.wants.items()}, row.action)
        for name, row in plan.phases.items()
    }
    return Spec(schedule, system, plan, roles, links, moves, phases)


def _all(one_or_more: T | list[T]) -> list[T]:
    return one_or_more if isinstance(one_or_more, list) else [one_or_more]


Problems = Iterator[tuple[object, str, Key]]
"""Whether something is wrong, what, and where it stands."""


def _refuse(document: Document, problems: Problems) -> None:
    for wrong, what, at in problems:
        if wrong:
            raise document.error(what, *at)


def _unknown(what: str, names: Iterable[Any], known: Iterable[str], at: Key) -> Problems:
    known = sorted(map(str, known))
    for name in sorted({*map(str, names)} - {*known}):
        yield True, f"unknown {what} {name!r}, one of {', '.join(known)}", at


@dataclass(frozen=True, slots=True)
class _Role:
    """Resolves one role's file against the facts, and checks what is left."""

    document: Document
    resources: Mapping[str, Resource]
    facts: Mapping[str, bool]
    links: Mapping[str, LinkSpec]
    roles: Iterable[str]

    def table(self) -> RoleTable:
        file = self.document.parse(RoleFile)
        edges: dict[Key, Transition] = {
            ("transitions", i): edge
            for i, edge in enumerate(file.transitions)
            if self.true(edge.when, "transitions", i, "when")
        }
        _refuse(self.document, _unknown("state", file.when, file.states, ("when",)))
        states = [s for s in file.states if self.true(file.when.get(s), "when", s)]
        holds = {state: self.holds(file, state) for state in states}
        rows = file.actions.items()
        actions = {n: row for n, row in rows if self.true(row.when, "actions", n, "when")}
        table = RoleTable(file.role, holds, tuple(edges.values()), actions)
        _refuse(self.document, self.problems(table, edges))
        return table

    def true(self, condition: str | None, *at: str | int) -> bool:
        try:
            return condition is None or constant(condition, self.facts)
        except SpecError as error:
            raise self.document.error(str(error), *at) from None

    def holds(self, file: RoleFile, state: State) -> tuple[str, ...]:
        whens = [i if isinstance(i, dict) else {i: None} for i in file.states[state]]
        rows = [(i, name, when) for i, row in enumerate(whens) for name, when in row.items()]
        return tuple(name for i, name, when in rows if self.true(when, "states", state, i))

    def problems(self, table: RoleTable, edges: Mapping[Key, Transition]) -> Problems:
        """Every state can be reached and left for good, and nothing speaks of the unknown."""
        holds, name = table.holds, self.document.path.stem
        yield table.role != name, f"{name}.yaml is the table of role {name!r}", ("role",)
        rows: dict[Key, Action] = {("actions", n): a for n, a in table.actions.items()}
        needs: dict[Key, frozenset[str]] = {("states", s): frozenset(h) for s, h in holds.items()}
        needs |= {at: action.needs for at, action in rows.items()}
        for at, names in needs.items():
            yield from _unknown("resource", names, self.resources, at)
            homeless = not any(names <= {*held} for held in holds.values())
            yield homeless, f"no state holds all of {sorted(names)}", at
        for at, row in [*edges.items(), *rows.items()]:
            yield from _unknown("link", {row.joint} - {None}, self.links, at)
            yield from _unknown("role", row.guard.roles, self.roles, (*at, "guard"))
        empty = holds.get(State.DISCONNECTED) == ()
        yield not empty, "there must be a `disconnected` that holds nothing", ("states",)
        for state, held in holds.items():
            at, kinds = ("states", state), [self.resources[name].communicator for name in held]
            low = state in (State.SLEEPING, State.DISCONNECTED)
            yield low and any(kinds), f"{state} may not hold a communicator", at
            late = f"{state}: memory comes after a communicator, but must go first"
            yield kinds != sorted(kinds), late, at
            for i, name in enumerate(held):
                needed = self.resources[name].requires
                lacks = needed and not {*needed} & {*held[:i]}
                yield lacks, f"{state} holds {name} without any of {[*needed]}", at
            twins = [other for other in holds if {*holds[other]} == {*held}]
            yield len(twins) > 1, f"{' and '.join(twins)} hold the same", at
        for at, edge in edges.items():
            derived = edge.trigger in (Trigger.SEVER, Trigger.FAIL)
            yield derived, f"{edge.trigger!r} is derived and can't be declared", at
            yield from _unknown("state", {edge.source, edge.dest}, holds, at)
            double = table.edge(edge.trigger, edge.source) is not edge
            yield double, f"{edge.trigger} from {edge.source} is ambiguous", at
        ways = [(edge.source, edge.dest) for edge in edges.values()]
        for problem, way in (("can't be reached", ways), ("is a trap", [w[::-1] for w in ways])):
            for state in sorted({*holds} - _reach(State.DISCONNECTED, way)):
                yield True, f"{state} {problem} when {self.facts}", ("states", state)


def _reach(start: State, edges: list[tuple[State, State]]) -> set[State]:
    found, new = set[State](), {start}
    while new:
        found |= new
        new = {dest for source, dest in edges if source in found} - found
    return found


def _problems(plan: ScheduleFile, roles: Mapping[Role, RoleTable]) -> Problems:
    """What is wrong with a schedule."""
    actions = {action for table in roles.values() for action in table.actions}
    for name, row in plan.phases.items():
        at = ("phases", name)
        yield from _unknown("role", row.wants, roles, at)
        for role, states in row.wants.items():
            yield from _unknown("state", _all(states), roles[role].holds, at)
        yield from _unknown("action", {row.action} - {None}, actions, (*at, "action"))
    for lane, sequence in plan.lanes.items():
        yield from _unknown("phase", sequence, plan.phases, ("lanes", lane))
    yield from _unknown("phase", plan.prologue, plan.phases, ("prologue",))
    yield from _unknown("phase", plan.epilogue, plan.phases, ("epilogue",))
