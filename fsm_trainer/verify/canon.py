"""Nodes as tuples of small integers: finitely many, equal where nothing can tell them apart.

Epochs are read by equality only: none, an old one, the link's own. Versions are read by lineage,
the hub's or an older one, and by how far behind the newest they are, two or more being alike.
Rollout workers are named by their places only, so their order doesn't count.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from fsm_trainer.machine.events import Effect
from fsm_trainer.machine.names import Role
from fsm_trainer.machine.version import Version
from fsm_trainer.machine.world import Link, System, Worker, World
from fsm_trainer.verify.relation import Node

Code = tuple[int, ...]
Change = tuple[tuple[int, int], ...]
"""Places of a code, and what stands there afterwards."""
OLD, CURRENT = 1, 2
# Of two numbers that are further apart nobody can tell how far.
AGE = 2


class Part(NamedTuple):
    """One worker's share of a node: its part of the world, its links, what reports late."""

    worker: Worker
    member: tuple[bool, ...]
    late: tuple[Effect, ...] = ()


class Canon:
    """Encodes the nodes of one system; codes are good within one canon."""

    def __init__(self, system: System, *, symmetric: bool = True) -> None:
        self._system = system
        self.parts: list[Part] = []
        self._ids: dict[Part, int] = {}
        self._known: dict[object, int] = {}
        self._ties: list[int] = []
        self._tie_ids: dict[object, int] = {}
        self._links: list[Link] = []
        self._link_ids: dict[Link, int] = {}
        roles = [*system.names.values()]
        # Rollout workers stand side by side in every system.
        several = roles.count(Role.ROLLOUT) if symmetric else 0
        first = roles.index(Role.ROLLOUT) if several else 0
        self._several, self._size = slice(first, first + several), len(roles)

    def encode(self, node: Node) -> Code:
        """The code of a node."""
        return self._sorted([*self.places(node)])

    def places(self, node: Node) -> Code:
        """Like its code, the workers in the system's order."""
        newest = self._newest(node.world)
        codes = [self._part_of(node, name, newest) for name in self._system.names]
        links = [self._link(link) for link in node.world.links]
        return (*codes, *links, 1 if node.world.lineage else 0)

    def _sorted(self, codes: list[int]) -> Code:
        codes[self._several] = sorted(codes[self._several])
        return tuple(codes)

    def part_of(self, node: Node, name: str) -> int:
        """The code of one worker's share."""
        return self._part_of(node, name, self._newest(node.world))

    def seen(self, code: Code) -> Code:
        """What an event of one worker sees of all: who moves as a whole, else only its ties.

        A tie is the epochs that a worker holds and the links that it is a member of.
        """
        ties = self._ties
        return tuple([ties[part] for part in code[: self._size]])

    def moving(self, code: Code) -> list[int]:
        """The places of whom `seen` tells all."""
        return [i for i, part in enumerate(code[: self._size]) if self._ties[part] < 0]

    def change(self, code: Code, places: Code) -> Change:
        """What is different in a node of that code afterwards."""
        both = enumerate(zip(code, places, strict=True))
        return tuple([(i, now) for i, (was, now) in both if was != now])

    def _newest(self, world: World) -> int:
        versions = [w.version for w in world.workers if w.version is not None]
        return max([v.number for v in versions if v.lineage == world.lineage], default=0)

    def _part_of(self, node: Node, name: str, newest: int) -> int:
        world, late = node
        worker = self._system.get(world, name)
        now = tuple([link.epoch for link in world.links])
        member = tuple([name in link.members for link in world.links])
        own = frozenset(e for e in late if e.worker == name) if late else late
        key = (worker, member, own, now, newest, world.lineage)
        code = self._known.get(key)
        if code is None:
            code = self._known[key] = self._part(worker, member, own, now, newest, world)
        return code

    def replaced(self, code: Code, change: Change) -> Code:
        """The code with other parts of some workers, and other links."""
        codes = [*code]
        for place, part in change:
            codes[place] = part
        return self._sorted(codes)

    def decode(self, code: Code) -> Node:
        """A node of that code."""
        parts = [self.parts[i] for i in code[: self._size]]
        names = [*self._system.names]
        links = tuple(
            self._links[place]._replace(
                members=frozenset(n for n, p in zip(names, parts, strict=True) if p.member[i])
            )
            for i, place in enumerate(code[self._size : -1])
        )
        world = World(tuple(part.worker for part in parts), links, CURRENT * code[-1])
        late = frozenset(
            replace(e, worker=n) for n, p in zip(names, parts, strict=True) for e in p.late
        )
        return Node(world, late)

    def _part(
        self,
        worker: Worker,
        member: tuple[bool, ...],
        late: frozenset[Effect],
        now: tuple[int, ...],
        newest: int,
        world: World,
    ) -> int:
        version = worker.version
        if version is not None:
            same = version.lineage == world.lineage
            version = Version(1 + same, max(version.number - newest, -AGE) if same else 0)
        epochs = tuple(_epoch(e, current) for e, current in zip(worker.epochs, now, strict=True))
        links = self._system.links
        effects = [
            replace(e, worker="", epoch=_epoch(e.epoch, now[links[e.resource]]))
            if e.resource in links
            else replace(e, worker="")
            for e in late
        ]
        settled = worker._replace(version=version, epochs=epochs, jobs=tuple(sorted(worker.jobs)))
        part = Part(settled, member, tuple(sorted(effects, key=str)))
        if part not in self._ids:
            self._ids[part] = len(self.parts)
            self._ties.append(self._tie(part, ~len(self.parts)))
            self.parts.append(part)
        return self._ids[part]

    def _tie(self, part: Part, whole: int) -> int:
        worker = part.worker
        if worker.move is not None:
            return whole
        return self._tie_ids.setdefault((worker.epochs, part.member), len(self._tie_ids))

    def _link(self, link: Link) -> int:
        here = Link(link.state, CURRENT if link.epoch else 0)
        if here not in self._link_ids:
            self._link_ids[here] = len(self._links)
            self._links.append(here)
        return self._link_ids[here]


def _epoch(value: int, current: int) -> int:
    return 0 if not value else CURRENT if value == current else OLD
