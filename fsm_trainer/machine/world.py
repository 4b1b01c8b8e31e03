"""The composed system: who takes part, what each holds, and what a guard can read of it.

A :class:`World` is an immutable value; only :func:`fsm_trainer.machine.step.step` makes new ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple

from fsm_trainer.machine.errors import SpecError
from fsm_trainer.machine.guards import Value
from fsm_trainer.machine.names import LinkState, Role, State, Trigger
from fsm_trainer.machine.spec import RoleTable, Spec
from fsm_trainer.machine.version import Version

MOVING = "moving"


class Worker(NamedTuple):
    """One worker's part of the world."""

    state: State = State.DISCONNECTED
    """The last state that was committed."""
    held: frozenset[str] = frozenset()
    """The resources it holds now; in a settled worker, exactly what its state says."""
    move: Trigger | None = None
    """The trigger of the transition it is in."""
    dest: State | None = None
    """Where that transition, or its undo, leads."""
    epochs: tuple[int, ...] = ()
    """The epoch it holds of each link, in the system's order; 0 where it holds none."""
    version: Version | None = None
    """Of its weights; None where it has none, or torn ones."""
    jobs: tuple[str, ...] = ()
    """The actions that run now."""
    live: bool = True
    """False once it is given up for lost: then it counts for nothing until it joins again."""
    ghost: frozenset[str] = frozenset()
    """What may be on its devices beside what it holds: what still arrives of a transition that it
    is on the way back from, or all that a process had that isn't seen dead yet."""

    @property
    def undead(self) -> bool:
        """Whether a process that was declared dead may still hold something."""
        return self.move is None and bool(self.ghost)


class Link(NamedTuple):
    """A link's part of the world; its moves are those of ``link.yaml``."""

    state: LinkState = LinkState.DOWN
    epoch: int = 0
    members: frozenset[str] = frozenset()


class World(NamedTuple):
    """The composed state of all workers and links."""

    workers: tuple[Worker, ...]
    links: tuple[Link, ...]
    lineage: int = 0
    """The last lineage that was begun."""


@dataclass(frozen=True)
class System:
    """The tables composed over named workers.

    Args:
        spec: the tables of one schedule.
        names: each worker's name and role, in a fixed order.
        scope: the workers whose part of the world is decided here. A process that runs one worker
            has only that one in scope; the others are what it was told of them.
        sizes: bytes of a role's resources, where they are known; else the units of the tables.
        capacity: of a device, in the same unit.
    """

    spec: Spec
    names: Mapping[str, Role]
    scope: frozenset[str] | None = None
    sizes: Mapping[tuple[Role, str], int] | None = None
    capacity: int | None = None

    def __post_init__(self) -> None:
        for name, role in self.names.items():
            if role not in self.spec.roles:
                known = ", ".join(self.spec.roles)
                raise SpecError(f"{name}: schedule {self.spec.name} has no {role}, only {known}")

    @classmethod
    def of(cls, spec: Spec, rollouts: int) -> System:
        """One worker for each role of the schedule, and several rollout workers."""
        several = {Role.ROLLOUT: [f"rollout-{i}" for i in range(rollouts)]}
        return cls(spec, {name: r for r in spec.roles for name in several.get(r, [str(r)])})

    def initial(self) -> World:
        """Everybody disconnected, every link down."""
        nobody = Worker(epochs=(0,) * len(self.links))
        return World((nobody,) * len(self.names), (Link(),) * len(self.links))

    @cached_property
    def index(self) -> dict[str, int]:
        """The place of each worker in :attr:`World.workers`."""
        return {name: i for i, name in enumerate(self.names)}

    @cached_property
    def links(self) -> dict[str, int]:
        """The place of each link in :attr:`World.links`."""
        return {name: i for i, name in enumerate(self.spec.links)}

    @cached_property
    def placement(self) -> dict[str, frozenset[str]]:
        """The devices of each worker: ``own`` is one of its own, ``all`` is everybody's own."""
        devices = {n: self.spec.schedule.devices[r] for n, r in self.names.items()}
        own = [n for n, device in devices.items() if device == "own"]
        return {n: frozenset({"own": [n], "all": own}.get(d, [d])) for n, d in devices.items()}

    def within(self, name: str) -> bool:
        """Whether the worker's part of the world is decided here."""
        return self.scope is None or name in self.scope

    def table(self, name: str) -> RoleTable:
        """The machine of a worker's role."""
        return self.spec.roles[self.names[name]]

    def get(self, world: World, name: str) -> Worker:
        """A worker's part of the world."""
        return world.workers[self.index[name]]

    def put(self, world: World, name: str, worker: Worker) -> World:
        """The world with another part for one worker."""
        i = self.index[name]
        workers = world.workers
        return world._replace(workers=(*workers[:i], worker, *workers[i + 1 :]))

    @cached_property
    def all_ends(self) -> dict[str, list[str]]:
        """Who may be an end of each link: all whose machine holds it somewhere."""
        held = {name: {*chain(*self.table(name).holds.values())} for name in self.names}
        return {link: [name for name in held if link in held[name]] for link in self.links}

    def ends(self, world: World, link: str) -> list[str]:
        """The live workers that a link joins."""
        return [name for name in self.all_ends[link] if self.get(world, name).live]

    def lease(self, world: World, name: str, link: str) -> bool:
        """Whether a worker's lease on a link is good: every member of its epoch lives."""
        i = self.links[link]
        epoch = self.get(world, name).epochs[i]
        return epoch > 0 and world.links[i].epoch == epoch and world.links[i].state == LinkState.UP

    def leases(self, world: World, name: str) -> frozenset[str]:
        """The links on which a worker's lease is good."""
        return frozenset(link for link in self.links if self.lease(world, name, link))

    def size(self, name: str, resources: Iterable[str]) -> int:
        """What resources take on a device of the worker."""
        role, sizes = self.names[name], self.sizes or {}
        table = self.spec.system.resources
        return sum(sizes.get((role, r), table[r].size) for r in resources)

    def claims_fit(self, world: World, name: str) -> bool:
        """The ledger: whether every device of the worker can grant all that is claimed on it.

        A worker claims what it may hold at some moment of its move, its ghost included.
        """
        for device in self.placement[name]:
            used = tokens = 0
            for tenant in (n for n in self.names if device in self.placement[n]):
                worker = self.get(world, tenant)
                bound = frozenset(self.table(tenant).holds[worker.dest] if worker.dest else ())
                # Releases come before acquisitions, so a move needs the larger of its two ends.
                used += max(self.size(tenant, worker.held), self.size(tenant, bound))
                used += self.size(tenant, worker.ghost)
                claim = worker.held | worker.ghost | bound
                tokens += sum(self.spec.system.resources[r].exclusive for r in claim)
            if used > (self.capacity or self.spec.system.capacity) or tokens > 1:
                return False
        return True


@dataclass(frozen=True, slots=True)
class WorldView:
    """What guards read; ``dest`` is where the worker that asks would go."""

    system: System
    world: World
    dest: State | None = None

    def attribute(self, worker: str, name: str) -> Value:
        """See :data:`fsm_trainer.machine.guards.ATTRIBUTES`."""
        return _READ[name](self, worker, self.system.get(self.world, worker))

    def peers(self, role: str) -> list[str]:
        """The live workers of a role."""
        named = self.system.names.items()
        return [n for n, r in named if r == role and self.system.get(self.world, n).live]

    def fits(self, worker: str) -> bool:
        """Whether the ledger can grant the move."""
        part = self.system.get(self.world, worker)
        moved = self.system.put(self.world, worker, part._replace(dest=self.dest))
        return self.system.claims_fit(moved, worker)


_READ: Mapping[str, Callable[[WorldView, str, Worker], Value]] = {
    "state": lambda view, name, part: MOVING if part.move is not None else part.state,
    "version": lambda view, name, part: part.version and part.version.number,
    "lineage": lambda view, name, part: part.version and part.version.lineage,
    "epoch": lambda view, name, part: max(part.epochs, default=0) or None,
    "lease": lambda view, name, part: any(view.system.leases(view.world, name)),
    "in_flight": lambda view, name, part: len(part.jobs),
    "live": lambda view, name, part: part.live,
    "undead": lambda view, name, part: part.undead,
}
