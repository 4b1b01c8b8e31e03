"""What every worker process has: a lifecycle, its resources, and actions that the driver calls.

A host knows nothing of Ray: any process that can be called can be one. Transitions and actions come
one at a time from the driver; ``revoke``, ``died`` and ``status`` may come from another thread
while they run.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from fsm_trainer.engines.process import resident_bytes
from fsm_trainer.groups.membership import Membership
from fsm_trainer.groups.rendezvous import Address
from fsm_trainer.machine.events import Effect
from fsm_trainer.machine.lifecycle import Lifecycle, Report, Resource
from fsm_trainer.machine.names import Role
from fsm_trainer.machine.version import Version
from fsm_trainer.machine.world import System, Worker, World


@dataclass(frozen=True)
class Place:
    """Who a process is in the run, and where it meets the others."""

    system: System
    name: str
    rank: int
    ranks: int
    store: Address
    link_timeout: float
    """Seconds that an operation on a link may take."""
    backend: str
    """Of links: ``gloo`` or ``nccl``."""
    scratch: Path
    """A folder that this process may fill and that nobody else touches."""
    sink_ranks: Mapping[Role, int] = field(default_factory=dict)
    """How many processes of a worker receive; 1 where it isn't told."""
    link_kind: str = "group"
    link_folder: Path | None = None
    """The way of the weights, and the folder of their files; see `Membership`."""

    def memberships(self, world: World, effect: Effect) -> list[Membership]:
        """This process's places, an engine's first ones, in the epoch that ``effect`` opens.

        A link is one group, in which the hub's rank 0 sends to the spokes. A further role makes a
        bundle of it: in a group named after that role its rank 0 sends to all ranks of the hub.
        """
        spec, roles = self.system.spec.links[effect.resource], self.system.names
        ends = {roles[name] for name in self.system.all_ends[effect.resource]}
        more = sorted(ends - {spec.hub, spec.spokes})
        groups = [("", spec.hub, spec.spokes), *((str(role), role, spec.hub) for role in more)]
        mine = roles[self.name]
        return [
            self._membership(world, effect, group, source, sinks)
            for group, source, sinks in groups
            if mine == sinks or (mine == source and self.rank == 0)
        ]

    def _membership(
        self, world: World, effect: Effect, group: str, source: Role, sinks: Role
    ) -> Membership:
        link, roles = world.links[self.system.links[effect.resource]], self.system.names
        workers = [n for n in roles if n in link.members and roles[n] in (source, sinks)]
        workers.sort(key=lambda n: roles[n] != source)  # stable: who sends is rank 0
        members: list[str] = []
        for name in workers:
            if name == self.name:
                rank = len(members) + self.rank
            wide = self.sink_ranks.get(sinks, 1) if roles[name] == sinks else 1
            members += [name] if wide == 1 else [f"{name}/{index}" for index in range(wide)]
        return Membership(
            effect.resource,
            effect.epoch,
            rank,
            len(members),
            tuple(members),
            self.backend,
            self.store,
            self.link_timeout,
            "group" if group else self.link_kind,
            None if self.link_folder is None else str(self.link_folder),
            group,
        )


class Status(NamedTuple):
    """How a process stands, read in the process itself."""

    pid: int
    worker: Worker
    groups: tuple[str, ...]
    """Process groups that torch has registered in it (and in its engine's process)."""
    resident_bytes: int


class Host(ABC):
    """One process of one worker."""

    @staticmethod  # noqa: B027 (most have nothing to import)
    def prepare() -> None:
        """Import what the first transitions would; called once, before any host is made."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.generation = 0
        self.lifecycle = Lifecycle(place.system, place.name, self.resources())

    @abstractmethod
    def resources(self) -> Mapping[str, Resource]:
        """The resources of this worker's role by name."""

    def begin(
        self, trigger: str, epoch: int, version: Version | None, world: World, generation: int
    ) -> Report:
        """See :meth:`Lifecycle.begin`; ``generation`` is new for each transition of the run."""
        self.generation = generation
        return self.lifecycle.begin(trigger, epoch=epoch, version=version, world=world)

    def act(self, action: str, world: World, *arguments: Any) -> tuple[Any, Any]:
        """Run an action; gives a payload for other workers and a small value for the driver."""
        work: Callable[..., tuple[Any, Any]] = getattr(self, f"do_{action}")
        with self.lifecycle.action(action, world):
            return work(*arguments)

    def died(self, peer: str) -> None:
        """Learn that a peer's process is dead; leases that it was a member of end at once."""
        member = any(peer in link.members for link in self.lifecycle.world.links)
        self.lifecycle.peer_died(peer)
        if member:
            self.revoke(f"{peer} died")

    @abstractmethod
    def revoke(self, why: str) -> None:
        """Make every lease worthless at once, so that nothing waits on it; any thread."""

    def status(self) -> Status:
        """How this process stands; any thread, also while an action runs."""
        from fsm_trainer.groups.lease import registered_groups

        return Status(os.getpid(), self.lifecycle.worker, registered_groups(), resident_bytes())
