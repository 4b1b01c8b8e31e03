"""Breadth-first exploration of `step` over a composed system, in any order, with every fault.

A node is a world and the effects that were under way in a process when its worker began to fall:
their reports come late. Epochs count only by equality and versions by lineage and clipped age, so
the space is finite; rollout workers are symmetric.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from fsm_trainer.machine import events as on
from fsm_trainer.machine import legal
from fsm_trainer.machine import step as s
from fsm_trainer.machine.errors import Refused
from fsm_trainer.machine.legal import movers_of
from fsm_trainer.machine.names import LinkState, Role, State
from fsm_trainer.machine.planner import unmet
from fsm_trainer.machine.world import System, Worker, World

SERVES = ("generate", "evaluate")
Late = frozenset[on.Effect]


class Edge(NamedTuple):
    label: str
    event: on.Event
    fault: bool  # not what the system does to recover


class Node(NamedTuple):
    world: World
    late: Late = frozenset()


@dataclass
class Result:
    nodes: list[Node] = field(default_factory=list)
    labels: set[str] = field(default_factory=set)
    violation: str = ""
    trace: list[str] = field(default_factory=list)


def edges(system: System, node: Node, jobs: int) -> Iterator[Edge]:
    """Every event that may come; those that `step` refuses are no edges."""
    world, busy = node.world, {e.worker for e in node.late}
    for effect in [*node.late, *(e for e in legal.enabled(system, world) if e.worker not in busy)]:
        yield Edge(f"{effect.worker}: {effect}", on.Done(effect), False)
        yield Edge(f"{effect.worker}: fail {effect}", on.Failed(effect), True)
    moving = [n for n in system.names if system.get(world, n).move is not None]
    groups = {(n,) for n in moving if n not in busy}
    for link in system.links:
        together = tuple(movers_of(system, world, link))
        if not busy & set(together):
            groups.add(together)
        for trigger in ("connect", "disconnect"):
            ends = legal.joint_ends(system, world, link, trigger)
            yield Edge(f"{trigger}({', '.join(ends)})", on.Begin(trigger, ends), False)
        ends = tuple(system.ends(world, system.spec.links[link]))
        yield Edge("push", on.Act("push", ends), False)
        pushing = tuple(n for n in ends if "push" in system.get(world, n).jobs)
        for ok in (True, False) if pushing else ():
            yield Edge(f"pushed {ok}", on.Acted("push", pushing, ok), not ok)
    yield from (Edge(f"commit({', '.join(g)})", on.Commit(g), False) for g in groups if g)
    for name in system.names:
        worker, table = system.get(world, name), system.table(name)
        for edge in table.transitions:
            if edge.source == worker.state and edge.joint is None:
                yield Edge(f"{name}: {edge.trigger}", on.Begin(edge.trigger, (name,)), False)
        for action in (n for n, a in table.actions.items() if a.joint is None):
            if len(worker.jobs) < jobs:
                yield Edge(f"{name}: {action}", on.Act(action, (name,)), False)
            for ok in (True, False) if action in worker.jobs else ():
                event = on.Acted(action, (name,), ok)
                yield Edge(f"{name}: {action} ended {ok}", event, not ok)
        yield from (Edge(f"{name}: sever", on.Sever(name, k), False) for k in system.links)
        if worker.move is not None:
            yield Edge(f"{name}: undo", on.Undo(name), True)
        if worker.live and (worker.state != State.DISCONNECTED or worker.move is not None):
            yield Edge(f"{name}: died", on.Died(name), True)
            if system.names[name] is Role.ROLLOUT:
                yield Edge(f"{name}: lost", on.Died(name, lost=True), True)
        if worker.undead:
            yield Edge(f"{name}: confirmed dead", on.Confirmed(name), False)
        if not worker.live:
            yield Edge(f"{name}: joined", on.Joined(name), True)


def after(system: System, node: Node, event: on.Event, fine: bool) -> Iterator[Node]:
    """The nodes after an event: what was under way in who begins to fall may report late.

    Unless ``fine``, one worker's own move runs to its end at once.
    """
    world = s.advance(system, node.world, event)
    if not fine and isinstance(event, on.Begin) and event.trigger not in ("connect", "disconnect"):
        while due := [e for e in legal.enabled(system, world) if e.worker in event.workers]:
            world = s.advance(system, world, on.Done(due[0]))
        world = s.advance(system, world, on.Commit(event.workers))
    reported = event.effect if isinstance(event, (on.Done, on.Failed)) else None
    dead = {n for n in system.names if system.get(world, n).move is None}
    late = frozenset(e for e in node.late if e != reported and e.worker not in dead)
    yield Node(world, late)
    if not isinstance(event, (on.Died, on.Undo, on.Failed)):
        return
    under_way = {
        e
        for e in legal.enabled(system, node.world)
        if e != reported
        and not legal.falling(system, node.world, e.worker)
        and legal.falling(system, world, e.worker)
    }
    for effect in sorted(under_way, key=str):
        yield Node(world, late | {effect})
    if len(under_way) > 1:
        yield Node(world, late | under_way)


def canonical(system: System, node: Node) -> Node:
    world = node.world
    now = [k.epoch for k in world.links]
    newest = max(
        (w.version.number for w in world.workers if w.version and w.version[0] == world.lineage),
        default=0,
    )

    def epoch(value: int, current: int) -> int:
        return 0 if not value else 2 if value == current else 1

    parts = []
    for name, w in zip(system.names, world.workers, strict=True):
        version = w.version
        if version is not None:
            same = version.lineage == world.lineage
            age = max(version.number - newest, -2) if same else 0
            version = type(version)(1 + same, age)
        epochs = tuple(epoch(e, c) for e, c in zip(w.epochs, now, strict=True))
        jobs = tuple(sorted(w.jobs))
        late = tuple(
            replace(e, worker="", epoch=epoch(e.epoch, now[system.links[e.resource]]))
            if e.resource in system.links
            else replace(e, worker="")
            for e in node.late
            if e.worker == name
        )
        member = tuple(name in k.members for k in world.links)
        parts.append((w._replace(version=version, epochs=epochs, jobs=jobs), member, late))
    names = list(system.names)
    first = next(i for i, n in enumerate(names) if system.names[n] is Role.ROLLOUT)
    parts[first:] = sorted(parts[first:], key=repr)
    links = tuple(
        k._replace(
            epoch=2 if k.epoch else 0,
            members=frozenset(n for n, p in zip(names, parts, strict=True) if p[1][i]),
        )
        for i, k in enumerate(world.links)
    )
    effects = frozenset(
        replace(e, worker=n) for n, p in zip(names, parts, strict=True) for e in p[2]
    )
    return Node(World(tuple(p[0] for p in parts), links, 2 if world.lineage else 0), effects)


def broken(system: System, node: Node) -> str:
    """The first of the properties of `states/system.yaml` that a node violates."""
    world, resources = node.world, system.spec.system.resources
    late = {e.worker: e.resource for e in node.late if e.op is on.Op.ACQUIRE}
    for name in system.names:
        w, table = system.get(world, name), system.table(name)
        holds = frozenset(table.holds[w.state])
        communicators = {r for r in w.held if resources[r].communicator}
        down = w.state in (State.SLEEPING, State.DISCONNECTED)
        if w.move is None and down and (communicators or any(w.epochs)):
            return f"1: {name} is {w.state} with {communicators}"
        if set(w.jobs) & set(SERVES) and w.version is None:
            return f"5: {name} serves without a version"
        if "push" in w.jobs and system.names[name] is Role.ROLLOUT and w.version is not None:
            return f"6: {name} has a version during a push"
        for job in w.jobs:
            if not table.actions[job].needs <= w.held:
                return f"7: {name} works at {job} without what it needs"
        if w.move is None and w.held != holds:
            return f"8: {name} is {w.state} with {sorted(w.held)}"
        for link, i in system.links.items():
            here = world.links[i]
            if (link in w.held) != (w.epochs[i] != 0):
                return f"8: {name} holds epoch {w.epochs[i]} of {link} beside {sorted(w.held)}"
            if here.state == LinkState.UP and w.epochs[i] not in (0, here.epoch):
                return f"2: {name} holds epoch {w.epochs[i]} of {link}, it is {here.epoch}"
            holders = [o for o in world.workers if o.epochs[i] == w.epochs[i]]
            if w.move is None and system.lease(world, name, link) and len(holders) < 2:
                return f"9: {name} holds {link} alone"
    for device in sorted(frozenset().union(*system.placement.values())):
        held = [
            (n, r)
            for n in system.names
            if device in system.placement[n]
            for w in [system.get(world, n)]
            for r in w.held | (w.ghost if w.undead else set()) | ({late[n]} if n in late else set())
        ]
        if len([r for _, r in held if resources[r].exclusive]) > 1:
            return f"3: {held} on {device}"
        if sum(resources[r].size for _, r in held) > system.spec.system.capacity:
            return f"4: {held} on {device}"
    return ""


def half_pushed(system: System, before: World, event: on.Event, world: World) -> str:
    """Property 6 where a push ends: a version only if every member was in it to the end."""
    if not isinstance(event, on.Acted) or event.action != "push":
        return ""
    i = system.links["link"]
    whole = all("push" in system.get(before, n).jobs for n in before.links[i].members)
    spokes = [n for n in event.workers if system.names[n] is Role.ROLLOUT]
    versions = {system.get(world, n).version for n in spokes}
    if len(versions) > 1 or (not (whole and event.ok) and versions - {None}):
        return f"6: {event} ends with versions {versions}"
    return ""


def explore(system: System, *, fine: bool = True, jobs: int = 1, limit: int = 400_000) -> Result:
    """Visit every node; stop at the first violation, deadlock, or phase out of reach."""
    start = canonical(system, Node(system.initial()))
    index, result = {start: 0}, Result([start])
    seen: dict[Node, Node] = {}
    came: list[tuple[int, str]] = [(-1, "")]
    back: list[list[int]] = [[]]

    def failed(at: int, why: str, *last: str) -> Result:
        while at > 0:
            last = (came[at][1], *last)
            at = came[at][0]
        result.violation, result.trace = why, list(last)
        return result

    todo = deque([0])
    while todo:
        at = todo.popleft()
        node, alive = result.nodes[at], False
        for label, event, fault in edges(system, node, jobs):
            try:
                successors = list(after(system, node, event, fine))
            except Refused as refused:
                if isinstance(event, (on.Done, on.Failed)):
                    return failed(at, f"a due report is refused: {refused}", label)
                continue
            result.labels.add(label)
            why = half_pushed(system, node.world, event, successors[0].world)
            if why:
                return failed(at, why, label)
            for successor in successors:
                key = seen.get(successor) or seen.setdefault(
                    successor, canonical(system, successor)
                )
                there = index.setdefault(key, len(result.nodes))
                if there == len(result.nodes):
                    result.nodes.append(key)
                    came.append((at, label))
                    back.append([])
                    todo.append(there)
                    if why := broken(system, key):
                        return failed(there, why)
                if not fault and successor is successors[0]:
                    back[there].append(at)
                    alive = True
        if not alive:
            return failed(at, "deadlock")
        if len(result.nodes) > limit:
            return failed(at, "too many states")
    for name, phase in system.spec.phases.items():
        good = {
            i
            for i, n in enumerate(result.nodes)
            if not n.late and not unmet(system, n.world, phase)
        }
        walk = list(good)
        while walk:
            new = set(back[walk.pop()]) - good
            good |= new
            walk += new
        for i, node in enumerate(result.nodes):
            left = any(w.live for n, w in named(system, node.world) if "rollout" in n)
            if i not in good and left:
                return failed(i, f"phase {name} is out of reach")
    return result


def named(system: System, world: World) -> list[tuple[str, Worker]]:
    return list(zip(system.names, world.workers, strict=True))
