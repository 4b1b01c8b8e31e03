"""The same search without any of its short cuts: every event is tried, `step` alone refuses."""

from __future__ import annotations

from collections.abc import Iterator

from fsm_trainer.machine import events as on
from fsm_trainer.machine import legal
from fsm_trainer.machine.errors import Refused
from fsm_trainer.machine.names import Trigger
from fsm_trainer.machine.world import System
from fsm_trainer.verify.canon import Canon, Code
from fsm_trainer.verify.relation import Edge, Node, Relation


def events(system: System, node: Node, jobs: int) -> Iterator[on.Event]:
    """Whatever anybody could say."""
    world, busy = node.world, {e.worker for e in node.late}
    for effect in [*node.late, *(e for e in legal.enabled(system, world) if e.worker not in busy)]:
        yield on.Done(effect)
        yield on.Failed(effect)
    moving = [n for n in system.names if system.get(world, n).move is not None]
    groups = {(n,) for n in moving if n not in busy}
    for link in system.links:
        together = tuple(legal.movers_of(system, world, link))
        if not busy & set(together):
            groups.add(together)
        for trigger in (Trigger.CONNECT, Trigger.DISCONNECT):
            yield on.Begin(trigger, legal.joint_ends(system, world, link, trigger))
    for action in ("push", "send_values"):
        ends = [n for n in system.names if action in system.table(n).actions]
        ends = [n for n in ends if system.get(world, n).live]
        if ends:
            yield on.Act(action, tuple(ends))
        at_it = tuple(n for n in ends if action in system.get(world, n).jobs)
        yield from (on.Acted(action, at_it, ok) for ok in (True, False) if at_it)
    yield from (on.Commit(group) for group in groups if group)
    for name in system.names:
        worker, table = system.get(world, name), system.table(name)
        # One end of a joint transition alone, too.
        yield from (on.Begin(e.trigger, (name,)) for e in table.transitions)
        for action in (n for n, a in table.actions.items() if a.joint is None):
            if len(worker.jobs) < jobs:
                yield on.Act(action, (name,))
            yield from (
                on.Acted(action, (name,), ok) for ok in (True, False) if action in worker.jobs
            )
        yield from (on.Sever(name, link) for link in system.links)
        if worker.move is not None:
            yield on.Undo(name)
        if worker.live and (worker.held or worker.state != "disconnected" or worker.move):
            yield on.Died(name)
            if name.startswith("rollout"):
                yield on.Died(name, lost=True)
        if worker.undead:
            yield on.Confirmed(name)
        if not worker.live:
            yield on.Joined(name)


class Anybody(Relation):
    """The same for a search that asks the properties: whatever `step` does not refuse may come."""

    def __init__(self, system: System) -> None:
        super().__init__(system, fine=False, symmetric=False)

    def edges(self, node: Node) -> Iterator[Edge]:
        for event in events(self.system, node, jobs=1):
            fault = isinstance(event, (on.Failed, on.Died, on.Joined, on.Undo))
            try:
                [*self.after(node, event)]
            except Refused:
                continue
            failed = isinstance(event, on.Acted) and not event.ok
            yield Edge(str(event), event, fault or failed)


def every(system: System, canon: Canon, *, fine: bool = False, jobs: int = 1) -> set[Code]:
    """Every node that can be reached."""
    relation = Relation(system, fine=fine, jobs=jobs, symmetric=False)
    start = canon.encode(Node(system.initial()))
    seen, todo = {start}, [start]
    while todo:
        node = canon.decode(todo.pop())
        for event in events(system, node, jobs):
            try:
                found = {canon.encode(after) for after in relation.after(node, event)}
            except Refused:
                continue
            todo += found - seen
            seen |= found
    return seen
