"""The monitor: events in, violations out; no clock, no I/O."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import inf
from typing import Literal

from fsm_trainer.machine import events as on
from fsm_trainer.machine import legal
from fsm_trainer.machine.errors import DataError, Refused
from fsm_trainer.machine.names import State, Trigger
from fsm_trainer.machine.step import advance
from fsm_trainer.machine.version import Version
from fsm_trainer.machine.world import Link, System, Worker, World
from fsm_trainer.verify.properties import broken, wrong_step
from fsm_trainer.verify.relation import Node
from fsm_trainer.verify.remedy import stand, together, way

ALL, PHASES = "all", ("begin", "end")
STORY = 6
"""How many of the events before it a violation tells."""
FAULTS: Mapping[str, Callable[[str], on.Event]] = {
    "died": on.Died, "lost": partial(on.Died, lost=True), "confirmed": on.Confirmed,
    "joined": on.Joined,
}  # fmt: skip


@dataclass(frozen=True)
class Event:
    """What a trainer tells of a worker."""

    worker: str
    """Its name; or a role: each worker of it; or ``all``: all ends of a link together."""
    trigger: str
    """A trigger or an action of the tables, or a fault: died, lost, confirmed, joined."""
    at: Literal["begin", "end"] | None = None
    """Whether it begins or ends; None where both are told at once."""
    ok: bool = True
    """False when it failed, or was undone."""
    epoch: int | None = None
    """Of the link, as this worker has it: a number that only grows. None: as the tables say."""
    version: int | Literal["kept"] | None = None
    """Of the weights that it has then, or serves: a number that grows with each update; ``kept``:
    those that it had last. None: as the tables say."""
    time: float | None = None
    """Seconds, on a clock that all events share."""
    where: str = ""
    """Its place in the stream, for people."""


@dataclass(frozen=True)
class Violation:
    """What a trainer did that the tables refuse, or that breaks a property."""

    event: Event
    because: str
    after: tuple[str, ...] = ()
    """The moves after which it would have been legal, if there are any."""
    breaks: str = ""
    """The property of ``states/system.yaml`` that it breaks, with its number."""
    story: tuple[str, ...] = ()
    """The last events before it of all workers that it speaks of."""
    again: int = 0
    """How often the like was found before."""

    def __str__(self) -> str:
        lines = [f"{self.event.where}: {self.because}"]
        lines += [f"  legal after: {', '.join(self.after)}"] if self.after else []
        lines += [f"  breaks property {self.breaks}"] if self.breaks else []
        lines += ["  before it:", *(f"    {told}" for told in self.story)] if self.story else []
        return "\n".join(lines)


class Monitor:
    """Follows a trainer's events through `step`, and goes on after a violation.

    Args:
        system: the tables, and every worker that the events tell of.
        world: where the workers stand at the first event; default: all are disconnected.
        deadline: seconds in which what has begun must end; judged at each event that has a time.
    """

    def __init__(self, system: System, world: World | None = None, deadline: float = inf) -> None:
        self.system, self.world = system, world or system.initial()
        self.count = 0
        """How many events were told."""
        self._deadline = deadline
        self._heard = deque[tuple[tuple[str, ...], str]](maxlen=100 * len(system.names))
        self._seen = Counter[object]()
        self._broken = ""  # the property that the world breaks, and that was told
        # By step, "begin" or "end": who has told it; a joint one waits until all of its ends have.
        self._told: dict[tuple[str, str], dict[str, Event]] = {}
        self._since: dict[tuple[str, str], Event] = {}
        self._kept = {name: self._part(name).version for name in system.names}

    def tell(self, event: Event) -> list[Violation]:
        """Take an event, and give the violations that it shows.

        Raises:
            DataError: no such worker, or it knows no such trigger.
        """
        self.count += 1
        event = event if event.where else replace(event, where=f"event {self.count}")
        found = [*self._overdue(event.time)]
        for names in self._addressed(event):
            known = len(found)
            found += self._take(event, names)
            now = broken(self.system, Node(self.world))
            if now not in ("", self._broken) and len(found) == known:
                found.append(self._violation(names, event, _line(names, event), now))
            self._broken = now
            self._heard.append((names, f"{event.where}: {_line(names, event)}"))
            self._kept |= {n: v for n in self._kept if (v := self._part(n).version)}
        return found

    def _part(self, name: str) -> Worker:
        return self.system.get(self.world, name)

    def _link(self, name: str, trigger: str) -> str | None:
        """The link whose ends do it together."""
        table = self.system.table(name)
        if trigger in table.actions:
            return table.actions[trigger].joint
        return next((edge.joint for edge in table.transitions if edge.trigger == trigger), None)

    def _why(self, name: str, trigger: str) -> list[str]:
        """Why a worker refuses it; empty if it would do it."""
        action = trigger in self.system.table(name).actions
        refuse = legal.action_refusals if action else legal.refusals
        return refuse(self.system, self.world, trigger, name)

    def _ends(self, name: str, trigger: str) -> tuple[str, ...]:
        return together(self.system, self.world, name, trigger)

    def _addressed(self, event: Event) -> list[tuple[str, ...]]:
        """Whom an event concerns: together in a tuple, or one after the other."""
        who, trigger, names = event.worker, event.trigger, self.system.names
        found: list[tuple[str, ...]]
        found = [(name,) for name, role in names.items() if who in (name, role)]
        if who == ALL:
            joint = [self._ends(name, trigger) for name in names if self._link(name, trigger)]
            found = sorted(joint, key=len)[-1:]
        tables = [self.system.table(name) for group in found for name in group]
        known = [{*t.actions, *(edge.trigger for edge in t.transitions), *FAULTS} for t in tables]
        if not known or not all(trigger in each for each in known):
            remedy = f"The workers: {', '.join(names)}; faults: {', '.join(FAULTS)}"
            raise DataError(f"{event.where}: {who} has no {trigger!r} in the tables. {remedy}")
        return found

    def _take(self, event: Event, names: tuple[str, ...]) -> Iterator[Violation]:
        system, trigger = self.system, event.trigger
        still = {name: part for name in names if not (part := self._part(name)).move}
        held = [(n, k) for n, p in still.items() for k, i in system.links.items() if p.epochs[i]]
        if trigger in FAULTS:
            for name in names:
                yield from self._step(FAULTS[trigger](name), event, (name,))
                self._kept[name] = None
            fallen = [n for n in system.names if legal.falling(system, self.world, n)]
            self._forget({*names, *fallen}, {step for step, _ in self._told})
            self._settle(fallen)
        elif (
            trigger == Trigger.DISCONNECT
            and held
            and not any(system.lease(self.world, name, link) for name, link in held)
        ):
            for name, link in held:  # it is broken already: each may leave it alone
                yield from self._step(on.Sever(name, link), event, (name,))
                self._settle([name])
        else:
            for phase in PHASES if event.at is None else (event.at,):
                yield from self._phase(phase, event, names)

    def _phase(self, phase: str, event: Event, names: tuple[str, ...]) -> Iterator[Violation]:
        """The begin or the end of a step; of a joint one, once all of its ends have told it."""
        trigger, link = event.trigger, self._link(names[0], event.trigger)
        if phase == "begin":
            self._since |= {(name, trigger): event for name in names}
            refused = any(self._why(name, trigger) for name in names)  # whatever the others tell
            ends = names if refused else self._ends(names[0], trigger)
        else:
            parts = {name: self._part(name) for name in (self.system.names if link else names)}
            ends = tuple(n for n, part in parts.items() if trigger in (part.move, *part.jobs))
            begun = self._told.get((trigger, "begin"), {})
            if not ends and (not event.ok or begun.keys().isdisjoint(names)):
                self._forget(names, [trigger])  # an end alone tells nothing
                return
        told = self._told.setdefault((trigger, phase), {})
        told |= dict.fromkeys(names, event)
        if ends and told.keys() >= {*ends}:
            last = {name: told.pop(name) for name in ends}
            yield from self._begin(event, last) if phase == "begin" else self._end(trigger, last)

    def _forget(self, names: Iterable[str], triggers: Iterable[str]) -> None:
        for name, trigger in product(names, triggers):
            self._since.pop((name, trigger), None)
            for phase in PHASES:
                self._told.get((trigger, phase), {}).pop(name, None)

    def _begin(self, event: Event, last: Mapping[str, Event]) -> Iterator[Violation]:
        trigger, names = event.trigger, tuple(last)
        begin: on.Event = on.Begin(trigger, names, max(one.epoch or 0 for one in last.values()))
        if trigger in self.system.table(names[0]).actions:
            begin = on.Act(trigger, names)
            for name, one in last.items():
                self._believe(name, one, serves=self._link(name, trigger) is None)
        yield from self._step(begin, event, names)

    def _end(self, trigger: str, last: Mapping[str, Event]) -> Iterator[Violation]:
        names, failed = tuple(last), [name for name, event in last.items() if not event.ok]
        if trigger in self.system.table(names[0]).actions:
            yield from self._step(on.Acted(trigger, names, not failed), last[names[0]], names)
        else:
            for name in failed:
                if not legal.falling(self.system, self.world, name):
                    self._advance(on.Undo(name))
            self._settle(names)
        for name, event in last.items():
            self._since.pop((name, trigger), None)
            self._believe(name, event)

    def _advance(self, event: on.Event) -> None:
        self.world = advance(self.system, self.world, event)

    def _settle(self, names: Iterable[str]) -> None:
        moving = tuple(name for name in names if self._part(name).move)
        while due := [e for e in legal.enabled(self.system, self.world) if e.worker in moving]:
            self._advance(on.Done(due[0]))
        self._advance(on.Commit(moving))

    def _believe(self, name: str, event: Event, *, serves: bool = True) -> None:
        """Take a worker's word for its epoch, and for the version of its weights."""
        part = self._part(name)
        if event.epoch is not None:
            part = part._replace(epochs=tuple(held and event.epoch for held in part.epochs))
        if event.version is not None and serves:
            now = max(self.world.lineage, 1)
            told = self._kept[name] if event.version == "kept" else Version(now, event.version)
            part = part._replace(version=told)
        self.world = self.system.put(self.world, name, part)

    def _step(self, made: on.Event, event: Event, names: tuple[str, ...]) -> Iterator[Violation]:
        """Take a step; one that is refused is told, and taken all the same."""
        system, before, trigger, after = self.system, self.world, event.trigger, None
        try:
            self._advance(made)
            if breaks := wrong_step(system, before, made, self.world):
                yield self._violation(names, event, _line(names, event), breaks)
        except Refused as refused:
            who, others = refused.worker, [n for n in names if n != refused.worker]
            also = [f"{n}: {why}" for n in others for why in self._why(n, trigger)]
            refused = Refused(who, refused.state, trigger, [*refused.because, *also], refused.needs)
            ends, breaks = self._ends(who, trigger), self._force(made, trigger, names)
            found = self._violation(names, event, str(refused), breaks, refused.state)
            if not self._broken and not found.again:
                after = way(system, before, who, trigger, ends)
            yield replace(found, after=tuple(after or ()))

    def _force(self, made: on.Event, trigger: str, names: tuple[str, ...]) -> str:
        """Go where the trainer says that it went; the property that this breaks."""
        system, before, told = self.system, self.world, self.world
        link, places = self._link(names[0], trigger), dict[str, tuple[State, Version | None]]()
        if len(names) < len(self._ends(names[0], trigger)):
            return ""  # one end of a joint step gets nowhere
        for name in names:
            part, table = self._part(name), system.table(name)
            edges = [edge for edge in table.transitions if edge.trigger == trigger]
            if trigger in table.actions:
                torn = link is not None and system.spec.links[link].spokes == system.names[name]
                version = None if torn else part.version
                part = part._replace(jobs=(*part.jobs, trigger), version=version)
            elif edges:
                edge = table.edge(trigger, part.state) or edges[0]
                held = part.held.difference(table.holds[edge.source]).union(table.holds[edge.dest])
                part = part._replace(state=edge.dest, held=held, move=None, dest=None)
                places[name] = edge.dest, part.version
            told = system.put(told, name, part)
        breaks = wrong_step(system, before, made, told)
        if not places or link is None:
            breaks = breaks or broken(system, Node(told))
        if trigger == Trigger.CONNECT:
            anew = (Link(epoch=link.epoch + 1) for link in before.links)
            before = before._replace(links=tuple(anew))
        self.world = stand(system, before, places) if places else told
        return breaks

    def _violation(
        self, names: tuple[str, ...], event: Event, because: str, breaks: str = "", state: str = ""
    ) -> Violation:
        """With the last events of everybody that it speaks of, and the property in full."""
        number, _, seen = breaks.partition(": ")
        concerned = {*names, *(n for n in self.system.names if n in f"{because} {breaks}")}
        story = [line for who, line in self._heard if concerned.intersection(who)][-STORY:]
        like = (names, event.trigger, state, number)
        self._seen[like] += 1
        if number:
            breaks = f"{number}: {self.system.spec.system.always[int(number)]}\n    ({seen})"
        return Violation(event, because, (), breaks, tuple(story), self._seen[like] - 1)

    def _overdue(self, now: float | None) -> Iterator[Violation]:
        for (name, trigger), event in [*self._since.items()]:
            if now is None or event.time is None or now - event.time <= self._deadline:
                continue
            del self._since[name, trigger]
            because = f"{_line([name], event)}, and has not ended {now - event.time:g} s later"
            told = self._told.get((trigger, "begin"), {})
            missing = [n for n in self._ends(name, trigger) if name in told and n not in told]
            waits = f": it waits for {', '.join(missing)}" if missing else ""
            yield self._violation((name,), event, because + waits)


def _line(names: Iterable[str], event: Event) -> str:
    """What happened, for people."""
    failed = "" if event.ok else "failed"
    return " ".join(filter(None, [", ".join(names), event.trigger, event.at, failed]))
