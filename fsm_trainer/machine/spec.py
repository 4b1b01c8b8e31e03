"""Load the tables under ``states/`` into one concrete description; every error has a file and line.

``when:`` conditions are resolved here against the schedule's static facts, so that what is drawn,
checked and run is one machine per configuration.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from fsm_trainer.document import Document, Key
from fsm_trainer.machine.errors import SpecError
from fsm_trainer.machine.guards import ALWAYS, Guard, constant, parse
from fsm_trainer.machine.names import LinkState, Role, State, Trigger


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class Resource(_Model):
    """What a worker can hold."""

    size: int = Field(0, ge=0, description="on the device, in the units of `capacity`")
    exclusive: bool = Field(False, description="at most one exclusive resource on a device")
    communicator: bool = Field(False, description="a process group: never held while sleeping")
    requires: tuple[str, ...] = Field((), description="one of these must be held before it")


class LinkSpec(_Model):
    """A link: the hub's role sends what it ``carries`` to the spokes' role."""

    hub: Role
    spokes: Role
    carries: str


class SystemFile(_Model):
    """``system.yaml``"""

    resources: dict[str, Resource]
    capacity: int
    links: dict[str, LinkSpec]
    always: dict[int, str] = {}
    recoverable: str = ""
    sometimes: list[str] = []


class TransitionRow(_Model):
    """A row of a role's ``transitions``."""

    trigger: Trigger
    source: State = Field(alias="from")
    dest: State = Field(alias="to")
    guard: str | None = None
    when: str | None = None
    joint: str | None = None


class ActionRow(_Model):
    """An entry of a role's ``actions``."""

    needs: frozenset[str]
    guard: str | None = None
    joint: str | None = None
    updates: bool = Field(False, description="whether it makes a new version of the weights")


class RoleFile(_Model):
    """``actor.yaml``, ``critic.yaml``, ``rollout.yaml``"""

    role: Role
    states: dict[State, list[str | dict[str, str]]]
    transitions: list[TransitionRow]
    actions: dict[str, ActionRow] = {}


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

    wants: dict[Role, State | list[State]]
    action: str | None = None


class ScheduleFile(_Model):
    """``schedules/*.yaml``"""

    facts: dict[str, bool]
    devices: dict[Role, str]
    phases: dict[str, PhaseRow]
    prologue: tuple[str, ...] = ()
    lanes: dict[str, tuple[str, ...]]
    epilogue: tuple[str, ...] = ()


FILES: Mapping[str, type[_Model]] = {
    "role": RoleFile, "link": LinkFile, "system": SystemFile, "schedule": ScheduleFile,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Transition:
    """An edge of a role's machine; ``joint`` names the link whose ends move together."""

    trigger: Trigger
    source: State
    dest: State
    guard: Guard
    joint: str | None


@dataclass(frozen=True, slots=True)
class Action:
    """Work that a worker may do while it holds ``needs``."""

    name: str
    needs: frozenset[str]
    guard: Guard
    joint: str | None
    updates: bool


@dataclass(frozen=True, slots=True)
class RoleTable:
    """One role's machine."""

    role: Role
    holds: Mapping[State, tuple[str, ...]]
    transitions: tuple[Transition, ...]
    actions: Mapping[str, Action]

    def edge(self, trigger: str, source: State) -> Transition | None:
        """The transition that ``trigger`` takes from ``source``."""
        return next(
            (t for t in self.transitions if (t.trigger, t.source) == (trigger, source)), None
        )

    def largest_state(self, held: Iterable[str]) -> State:
        """The declared state that holds most of ``held`` and nothing else."""
        keep = frozenset(held)
        fitting = [s for s, resources in self.holds.items() if keep.issuperset(resources)]
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
    system = Document(root / "system.yaml", SpecError).parse(SystemFile)
    links = {
        n: link
        for n, link in system.links.items()
        if link.hub in plan.devices and link.spokes in plan.devices
    }
    roles = {
        role: _Role(Document(root / f"{role}.yaml", SpecError), system, plan.facts, links).table()
        for role in plan.devices
    }
    link_file = Document(root / "link.yaml", SpecError).parse(LinkFile)
    moves = {
        (source, row.trigger): row.dest
        for row in link_file.transitions
        for source in (row.source if isinstance(row.source, list) else [row.source])
    }
    return Spec(schedule, system, plan, roles, links, moves, _phases(plan_doc, plan, roles))


class _Role:
    """Resolves and checks one role's file."""

    def __init__(
        self,
        doc: Document,
        system: SystemFile,
        facts: Mapping[str, bool],
        links: Mapping[str, LinkSpec],
    ) -> None:
        self.doc, self.resources, self.facts, self.links = doc, system.resources, facts, links
        self.file = doc.parse(RoleFile)

    def table(self) -> RoleTable:
        holds = {state: self.holds(state) for state in self.file.states}
        transitions = tuple(
            Transition(
                row.trigger, row.source, row.dest, self.guard(row.guard, *at), self.joint(row, *at)
            )
            for i, row in enumerate(self.file.transitions)
            if self.edge(row, *(at := ("transitions", i)))
        )
        actions = {}
        for name, row in self.file.actions.items():
            here = ("actions", name)
            self.known(row.needs, *here)
            if not any(row.needs <= set(held) for held in holds.values()):
                raise self.doc.error(f"no state holds all of {sorted(row.needs)}", *here)
            guard, joint = self.guard(row.guard, *here), self.joint(row, *here)
            actions[name] = Action(name, row.needs, guard, joint, row.updates)
        table = RoleTable(self.file.role, holds, transitions, actions)
        self.check_shape(table)
        return table

    def known(self, names: Iterable[str], *at: str | int) -> None:
        for name in sorted(set(names) - set(self.resources)):
            known = sorted(self.resources)
            raise self.doc.error(f"unknown resource {name!r}, one of {known}", *at)

    def true(self, condition: str | None, *at: str | int) -> bool:
        return condition is None or constant(condition, self.doc.where(*at), self.facts)

    def guard(self, text: str | None, *at: str | int) -> Guard:
        return parse(text, self.doc.where(*at, "guard")) if text is not None else ALWAYS

    def joint(self, row: TransitionRow | ActionRow, *at: str | int) -> str | None:
        if row.joint is not None and row.joint not in self.links:
            raise self.doc.error(f"unknown link {row.joint!r}, one of {sorted(self.links)}", *at)
        return row.joint

    def edge(self, row: TransitionRow, *at: str | int) -> bool:
        if row.trigger in (Trigger.SEVER, Trigger.FAIL):
            raise self.doc.error(f"{row.trigger!r} is derived and can't be declared", *at)
        for state in (row.source, row.dest):
            if state not in self.file.states:
                raise self.doc.error(f"{state} is not one of this role's states", *at)
        return self.true(row.when, *at, "when")

    def holds(self, state: State) -> tuple[str, ...]:
        held: list[str] = []
        for i, item in enumerate(self.file.states[state]):
            at: Key = ("states", state, i)
            name, when = next(iter(item.items())) if isinstance(item, dict) else (item, None)
            self.known([name], *at)
            if not self.true(when, *at):
                continue
            resource = self.resources[name]
            if resource.requires and not set(resource.requires) & set(held):
                needed = list(resource.requires)
                raise self.doc.error(f"{state} holds {name} without any of {needed}", *at)
            if resource.communicator and state in (State.SLEEPING, State.DISCONNECTED):
                raise self.doc.error(f"{state} may not hold the communicator {name}", *at)
            if held and self.resources[held[-1]].communicator and not resource.communicator:
                raise self.doc.error(f"{name} comes after a communicator: memory goes first", *at)
            held.append(name)
        return tuple(held)

    def check_shape(self, table: RoleTable) -> None:
        """Every state can be reached and left for good, no two hold the same, no edge is double."""
        if table.holds.get(State.DISCONNECTED) != ():
            raise self.doc.error("there must be a `disconnected` that holds nothing", "states")
        names: dict[frozenset[str], State] = {}
        for state, held in table.holds.items():
            other = names.setdefault(frozenset(held), state)
            if other is not state:
                raise self.doc.error(f"{state} and {other} hold the same", "states", state)
        sources = [(t.trigger, t.source) for t in table.transitions]
        for trigger, source in sources:
            if sources.count((trigger, source)) > 1:
                raise self.doc.error(f"{trigger} from {source} is ambiguous", "transitions")
        edges = [(t.source, t.dest) for t in table.transitions]
        ways = {"can't be reached": edges, "is a trap": [(b, a) for a, b in edges]}
        for problem, way in ways.items():
            for state in sorted(set(table.holds) - _reach(State.DISCONNECTED, way)):
                raise self.doc.error(f"{state} {problem} when {self.facts}", "states", state)


def _reach(start: State, edges: list[tuple[State, State]]) -> set[State]:
    found, todo = {start}, [start]
    while todo:
        here = todo.pop()
        new = {dest for source, dest in edges if source == here} - found
        found |= new
        todo += new
    return found


def _phases(doc: Document, plan: ScheduleFile, roles: Mapping[Role, RoleTable]) -> dict[str, Phase]:
    phases = {}
    for name, row in plan.phases.items():
        wants = {}
        for role, states in row.wants.items():
            wants[role] = frozenset(states if isinstance(states, list) else [states])
            if role not in roles or not wants[role] <= set(roles[role].holds):
                known = {str(r): [str(s) for s in t.holds] for r, t in roles.items()}
                raise doc.error(f"unknown role or state; there are: {known}", "phases", name)
        if row.action is not None and not any(row.action in t.actions for t in roles.values()):
            raise doc.error(f"no role has an action {row.action!r}", "phases", name, "action")
        phases[name] = Phase(name, wants, row.action)
    sequences: dict[Key, tuple[str, ...]] = {("lanes", k): v for k, v in plan.lanes.items()}
    sequences |= {("prologue",): plan.prologue, ("epilogue",): plan.epilogue}
    for at, sequence in sequences.items():
        for phase in sequence:
            if phase not in phases:
                raise doc.error(f"unknown phase {phase!r}, one of {sorted(phases)}", *at)
    return phases
