"""What may happen next to a composed system: every event of the one ``step``, and every fault.

A node is a world, and the effects that were under way in a process when its worker began to fall:
their reports come late. The relation is finite: epochs count only by equality, versions by lineage
and clipped age (see `canon`).
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from typing import NamedTuple

from fsm_trainer.machine import events as on
from fsm_trainer.machine import legal
from fsm_trainer.machine.guards import Guard
from fsm_trainer.machine.names import Role, State, Trigger
from fsm_trainer.machine.spec import Transition
from fsm_trainer.machine.step import advance
from fsm_trainer.machine.world import System, Worker, World, WorldView

Late = frozenset[on.Effect]


class Node(NamedTuple):
    """A world, and the effects that are still under way in who is falling already."""

    world: World
    late: Late = frozenset()


class Edge(NamedTuple):
    """An event that may come; a fault is not what the system does to recover."""

    label: str
    event: on.Event
    fault: bool = False


class _Choice(NamedTuple):
    """An edge of one worker that its own part of the world allows; its guard may not."""

    edge: Edge
    guard: Guard = Guard()
    dest: State | None = None


class Relation:
    """The edges of a system, and where they lead.

    ``fine`` lets other things happen between any two effects of a worker's own move; otherwise it
    runs to its end at once. ``jobs`` bounds the actions that a worker has in flight. When
    ``symmetric``, the first of several workers in equal positions stands for all in what each does
    alone: the others lead to the same positions. Without ``begins`` nobody begins anything: for a
    driver, who does.
    """

    def __init__(
        self,
        system: System,
        *,
        fine: bool,
        jobs: int = 1,
        symmetric: bool = True,
        begins: bool = True,
    ) -> None:
        self._begins = begins
        self.system, self.fine, self._jobs, self._symmetric = system, fine, jobs, symmetric
        rows = [(a, row.joint) for t in system.spec.roles.values() for a, row in t.actions.items()]
        self._shared = {link: sorted({a for a, k in rows if k == link}) for link in system.links}
        self._choices: dict[tuple[str, Worker], list[_Choice]] = {}

    def edges(self, node: Node, without: Set[str] = frozenset()) -> Iterator[Edge]:
        """Every event that `step` accepts, ``without`` those that speak of some workers."""
        system, world = self.system, node.world
        due = legal.enabled(system, world)
        twins = {*without, *(self._twins(node) if self._symmetric else ())}
        busy = {effect.worker for effect in node.late}
        for effect in [*node.late, *(e for e in due if e.worker not in busy)]:
            if effect.worker not in twins:
                yield Edge(f"{effect.worker}: {effect}", on.Done(effect))
                yield Edge(f"{effect.worker}: fail {effect}", on.Failed(effect), fault=True)
        moving = [n for n in system.names if system.get(world, n).move is not None]
        groups: set[tuple[str, ...]] = {(n,) for n in moving if n not in busy | twins}
        for link in system.links:
            together = tuple(legal.movers_of(system, world, link))
            if not busy.intersection(together):
                groups.add(together)
            yield from self._joint(world, link)
        for group in groups:
            if group and without.isdisjoint(group) and self._may_commit(world, group):
                yield Edge(f"commit({', '.join(group)})", on.Commit(group))
        for name in system.names:
            if name not in twins:
                yield from self._alone(world, name)

    def after(self, node: Node, event: on.Event) -> Iterator[Node]:
        """The nodes after an event: what was under way in who begins to fall may report late."""
        system = self.system
        world = advance(system, node.world, event)
        if not self.fine and isinstance(event, on.Begin) and len(event.workers) == 1:
            world = self._run(world, event)
        late = node.late
        if late:
            reported = event.effect if isinstance(event, (on.Done, on.Failed)) else None
            dead = {n for n in system.names if system.get(world, n).move is None}
            late = frozenset(e for e in late if e != reported and e.worker not in dead)
        yield Node(world, late)
        moving = any(worker.move is not None for worker in node.world.workers)
        if moving and isinstance(event, (on.Died, on.Undo, on.Failed)):
            under_way = self._under_way(node.world, event, world)
            for effect in sorted(under_way, key=str):
                yield Node(world, late | {effect})
            if len(under_way) > 1:
                yield Node(world, late | under_way)

    def subject(self, node: Node, event: on.Event) -> tuple[str, bool]:
        """Whom an event is about, if that is one worker, and whether it concerns nobody else.

        Then what comes of it depends on that worker and on the links. Else it depends on all who
        move, too, and may change them; of who stands still it reads epochs and memberships only.
        """
        system = self.system
        match event:
            case on.Begin(trigger=trigger, workers=(name,)):
                edge = system.table(name).edge(trigger, system.get(node.world, name).state)
                return ("", False) if edge is None or edge.joint is not None else (name, True)
            case on.Acted(action=action, workers=(name,)):
                joint = system.table(name).actions[action].joint is not None
                return ("", False) if joint else (name, True)
            case on.Done(effect=effect):
                return effect.worker, effect.resource not in system.links
            case on.Failed(effect=effect):
                name, linked = effect.worker, effect.resource in system.links
            case on.Undo(worker=name) | on.Commit(workers=(name,)):
                linked = False
            case on.Confirmed(worker=name) | on.Joined(worker=name) | on.Sever(worker=name):
                return name, True
            case on.Died(worker=name):
                linked = any(name in link.members for link in node.world.links)
            case _:
                return "", False
        return name, not linked and legal.joint_of(system, node.world, name) is None

    def _run(self, world: World, event: on.Begin) -> World:
        [name] = event.workers
        edge = self.system.table(name).edge(event.trigger, self.system.get(world, name).state)
        if edge is None or edge.joint is not None:
            return world
        while (effect := legal.due(self.system, world, name, {})) is not None:
            world = advance(self.system, world, on.Done(effect))
        return advance(self.system, world, on.Commit(event.workers))

    def _under_way(self, before: World, event: on.Event, world: World) -> set[on.Effect]:
        system = self.system
        reported = event.effect if isinstance(event, on.Failed) else None
        return {
            effect
            for effect in legal.enabled(system, before)
            if effect != reported
            and not legal.falling(system, before, effect.worker)
            and legal.falling(system, world, effect.worker)
        }

    def _twins(self, node: Node) -> set[str]:
        """Who is as another one before it: what it does alone leads to the same positions."""
        system, seen, twins = self.system, set[object](), set[str]()
        late: dict[str, set[tuple[on.Op, str, int]]] = {}
        for effect in node.late:
            place = (effect.op, effect.resource, effect.epoch)
            late.setdefault(effect.worker, set()).add(place)
        for name, role in system.names.items():
            if role is Role.ROLLOUT:
                member = tuple(name in link.members for link in node.world.links)
                here = system.get(node.world, name), member, frozenset(late.get(name, ()))
                if here in seen:
                    twins.add(name)
                seen.add(here)
        return twins

    def _joint(self, world: World, link: str) -> Iterator[Edge]:
        system = self.system
        for trigger in (Trigger.CONNECT, Trigger.DISCONNECT) if self._begins else ():
            ends = legal.joint_ends(system, world, link, trigger)
            if ends and all(self._may_begin(world, trigger, name) for name in ends):
                yield Edge(f"{trigger}({', '.join(ends)})", on.Begin(trigger, ends))
        for action in self._shared[link]:
            ends = tuple(legal.actors_of(system, world, action))
            if self._begins and ends and all(self._may_act(world, action, n) for n in ends):
                yield Edge(action, on.Act(action, ends))
            at_it = tuple(name for name in ends if action in system.get(world, name).jobs)
            for ok in (True, False) if at_it else ():
                yield Edge(f"{action} ended {ok}", on.Acted(action, at_it, ok), fault=not ok)

    def _may_begin(self, world: World, trigger: str, name: str) -> bool:
        worker = self.system.get(world, name)
        edge = self.system.table(name).edge(trigger, worker.state)
        if edge is None or worker.move is not None:
            return False
        return edge.guard.holds(WorldView(self.system, world, edge.dest), name)

    def _may_act(self, world: World, action: str, name: str) -> bool:
        worker, known = self.system.get(world, name), self.system.table(name).actions[action]
        if worker.move is not None or not known.needs <= worker.held:
            return False
        return known.guard.holds(WorldView(self.system, world), name)

    def _may_commit(self, world: World, group: tuple[str, ...]) -> bool:
        system, opening = self.system, set[str]()
        for name in group:
            worker = system.get(world, name)
            if legal.next_effect(system, world, name) is not None:
                return False
            link = legal.joint_of(system, world, name)
            if link is not None and worker.dest == State.CONNECTED != worker.state:
                opening.update(legal.movers_of(system, world, link))
        return not opening or opening == set(group)

    def _alone(self, world: World, name: str) -> Iterator[Edge]:
        worker = self.system.get(world, name)
        place = (name, worker)
        choices = self._choices.get(place)
        if choices is None:
            choices = self._choices[place] = [*self._own(name, worker)]
        for edge, guard, dest in choices:
            if not guard.text or guard.holds(WorldView(self.system, world, dest), name):
                yield edge
        if worker.move is None and not worker.jobs and any(worker.epochs):
            for link, i in self.system.links.items():
                if worker.epochs[i] and not self.system.lease(world, name, link):
                    yield Edge(f"{name}: sever", on.Sever(name, link))

    def _own(self, name: str, worker: Worker) -> Iterator[_Choice]:
        table = self.system.table(name)
        still = self._begins and worker.live and worker.move is None
        moves: list[Transition] = [e for e in table.transitions if e.source == worker.state]
        for move in moves if still else ():
            if move.joint is None:
                edge = Edge(f"{name}: {move.trigger}", on.Begin(move.trigger, (name,)))
                yield _Choice(edge, move.guard, move.dest)
        for action, known in table.actions.items():
            if known.joint is not None:
                continue
            if still and len(worker.jobs) < self._jobs and known.needs <= worker.held:
                yield _Choice(Edge(f"{name}: {action}", on.Act(action, (name,))), known.guard)
            for ok in (True, False) if action in worker.jobs else ():
                event = on.Acted(action, (name,), ok)
                yield _Choice(Edge(f"{name}: {action} ended {ok}", event, fault=not ok))
        if worker.move is not None:
            yield _Choice(Edge(f"{name}: undo", on.Undo(name), fault=True))
        if worker.live and (worker.state != State.DISCONNECTED or worker.move is not None):
            yield _Choice(Edge(f"{name}: died", on.Died(name), fault=True))
            if self.system.names[name] is Role.ROLLOUT:
                yield _Choice(Edge(f"{name}: lost", on.Died(name, lost=True), fault=True))
        if worker.undead:
            yield _Choice(Edge(f"{name}: confirmed dead", on.Confirmed(name)))
        if not worker.live:
            yield _Choice(Edge(f"{name}: joined", on.Joined(name), fault=True))
