"""A plain model of a composed system, beside which others are tested.

It knows whole transitions and whole actions, and nothing of effects, moves or reports: a second
opinion on what these must add up to, which shares only the tables and their guards with `step`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from fsm_trainer.machine import legal
from fsm_trainer.machine.names import LinkState, State, Trigger
from fsm_trainer.machine.version import Version
from fsm_trainer.machine.world import Link, System, Worker, World


@dataclass(frozen=True, slots=True)
class Step:
    """A trigger or an action, and whom it concerns: all ends of a joint one."""

    name: str
    workers: tuple[str, ...]
    joint: str | None = None

    @property
    def moves(self) -> bool:
        """Whether it is a transition, and no action."""
        return self.name in list(Trigger)

    def __str__(self) -> str:
        return f"{self.name}({', '.join(self.workers)})"


@dataclass(slots=True)
class _Known:
    state: State = State.DISCONNECTED
    version: Version | None = None
    epochs: dict[str, int] = field(default_factory=dict)
    jobs: tuple[str, ...] = ()


@dataclass(slots=True)
class _Line:
    epoch: int = 0
    members: frozenset[str] = frozenset()
    whole: bool = False
    """Whether all members of its epoch have it or have left it in good order."""


class Model:
    """What each worker of a system must be, after whole steps and faults."""

    def __init__(self, system: System) -> None:
        self.system = system
        self._known = {name: _Known() for name in system.names}
        self._lines = {name: _Line() for name in system.links}
        self._lineage = 0
        self._world: World | None = None

    @property
    def world(self) -> World:
        """As guards read it."""
        if self._world is None:
            self._world = self._composed()
        return self._world

    def _composed(self) -> World:
        workers = []
        for name, known in self._known.items():
            epochs = tuple(known.epochs.get(link, 0) for link in self._lines)
            held = frozenset(self.holds(name))
            part = Worker(known.state, held, epochs=epochs, version=known.version)
            workers.append(part._replace(jobs=known.jobs))
        return World(tuple(workers), tuple(map(self._link, self._lines)), self._lineage)

    def _link(self, name: str) -> Link:
        line = self._lines[name]
        if not any(name in known.epochs for known in self._known.values()):
            return Link(LinkState.DOWN, line.epoch)
        return Link(LinkState.UP if line.whole else LinkState.BROKEN, line.epoch, line.members)

    def state(self, name: str) -> State:
        """Where a worker is."""
        return self._known[name].state

    def version(self, name: str) -> Version | None:
        """Of a worker's weights; None where it has none, or torn ones."""
        return self._known[name].version

    def holds(self, name: str) -> tuple[str, ...]:
        """The resources that a worker holds."""
        return self.system.table(name).holds[self.state(name)]

    def epoch(self, link: str) -> int:
        """The last one that was opened, or tried."""
        return self._lines[link].epoch

    def epochs(self, name: str) -> dict[str, int]:
        """The links that a worker holds, with the epoch of each."""
        return dict(self._known[name].epochs)

    def carries(self, name: str) -> bool:
        """Whether a worker holds what a link carries to it, or from it."""
        role, held = self._role(name), self.holds(name)
        links = self.system.spec.links.values()
        return any(k.carries in held and role in (k.hub, k.spokes) for k in links)

    # What may be asked

    def triggers(self) -> list[Step]:
        """Each trigger of each worker, legal now or not."""
        found = dict[Step, None]()
        for name in self.system.names:
            for edge in self.system.table(name).transitions:
                here = edge.joint if edge.source == self.state(name) else None
                ends = self._ends(here, edge.trigger) if here else (name,)
                if name in ends:
                    found[Step(str(edge.trigger), ends, here)] = None
        return [*found]

    def actions(self) -> list[Step]:
        """Each action of each worker, legal now or not."""
        found = dict[Step, None]()
        for name in self.system.names:
            for action, known in self.system.table(name).actions.items():
                ends = legal.actors_of(self.system, self.world, action) if known.joint else [name]
                found[Step(action, tuple(ends), known.joint)] = None
        return [*found]

    def _ends(self, link: str, name: str) -> tuple[str, ...]:
        return legal.joint_ends(self.system, self.world, link, name)

    def severable(self) -> Iterator[Step]:
        """Who holds a lease that is no longer good."""
        for name, known in self._known.items():
            for link, epoch in known.epochs.items():
                line = self._lines[link]
                if not line.whole or line.epoch != epoch:
                    yield Step(Trigger.SEVER, (name,), link)

    def refusals(self, step: Step) -> list[str]:
        """Why a step is illegal now; empty if it is legal."""
        ask = legal.refusals if step.moves else legal.action_refusals
        return [r for n in step.workers for r in ask(self.system, self.world, step.name, n)]

    # What it comes to

    def moved(self, step: Step, failed: str | None = None, *, dies: bool = False) -> None:
        """A transition ended at all of its ends; ``failed`` names the one that could not do it.

        Who could not keeps what both of its states hold. A link opens at all ends, or at none; and
        where the one ``dies``, nobody goes on.
        """
        opens = step.joint if step.name == Trigger.CONNECT else None
        if opens is not None:
            epoch = self._lines[opens].epoch + 1
            self._lines[opens] = _Line(epoch, frozenset(step.workers), whole=failed is None)
        for name in step.workers:
            table, before = self.system.table(name), self.state(name)
            edge = table.edge(step.name, before)
            if edge is None:
                raise KeyError(f"{name} is {before} and has no {step.name}")
            dest = edge.dest
            if failed == name or (failed is not None and (dies or opens is not None)):
                dest = table.largest_state({*table.holds[before]} & {*table.holds[dest]})
            self._settle(name, dest)
            if step.name == Trigger.START and failed is None and self._sends(name):
                self._lineage += 1
                self._known[name].version, self._world = Version(self._lineage, 0), None

    def severed(self, step: Step) -> None:
        """A worker gave up its bad leases; it keeps all else that a state of it can hold."""
        [name] = step.workers
        bad = {other.joint for other in self.severable() if other.workers == step.workers}
        self._settle(name, self.system.table(name).largest_state({*self.holds(name)} - bad))

    def acting(self, step: Step) -> None:
        """An action has begun."""
        self._world = None
        for name in step.workers:
            self._known[name].jobs = (step.name,)

    def acted(self, step: Step, ok: bool = True) -> None:
        """An action ended; ``ok`` at all of its ends, or it brought nothing."""
        self._world = None
        for name in step.workers:
            known = self._known[name]
            known.jobs = ()
            link = self.system.spec.links[step.joint] if step.joint else None
            if link is not None and link.spokes == self._role(name):
                roles = self.system.names.items()
                [sent] = [self.version(n) for n, role in roles if role == link.hub]
                known.version = sent if ok else None
            elif known.version and ok and self.system.table(name).actions[step.name].updates:
                known.version = known.version._replace(number=known.version.number + 1)

    def died(self, name: str) -> None:
        """A worker's process is gone, and with it whatever it held."""
        for line in self._lines.values():
            if name in line.members:
                line.whole = False
        self._known[name], self._world = _Known(), None

    def _settle(self, name: str, dest: State) -> None:
        known, before = self._known[name], self.holds(name)
        known.state, self._world = dest, None
        carried = {
            k.carries for k in self.system.spec.links.values() if k.spokes == self._role(name)
        }
        if dest == State.DISCONNECTED or carried - {*before} | carried - {*self.holds(name)}:
            known.version = None
        held = [link for link in self._lines if link in self.holds(name)]
        known.epochs = {link: known.epochs.get(link, self._lines[link].epoch) for link in held}

    def _role(self, name: str) -> str:
        return self.system.names[name]

    def _sends(self, name: str) -> bool:
        return any(link.hub == self._role(name) for link in self.system.spec.links.values())
