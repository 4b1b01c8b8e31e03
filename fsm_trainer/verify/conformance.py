"""Does a run do what the tables say? Its journal, replayed through the same ``step``.

A record is written when a transition is committed or an action ends, in the order in which the
driver committed them; the ends of a joint one stand together, and so do the ranks of a worker.
Every record must be legal where it stands and leave state, epoch and version as the model says.

Two neighbouring records of workers that have nothing to do with each other may change places in
the model; ``seq`` and ``time``, which both only grow, are what tells such journals apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fsm_trainer.machine import events as on
from fsm_trainer.machine.errors import FsmError, Refused
from fsm_trainer.machine.legal import actors_of, enabled, falling, joint_ends
from fsm_trainer.machine.names import Role, State, Trigger
from fsm_trainer.machine.spec import Spec
from fsm_trainer.machine.step import advance
from fsm_trainer.machine.version import Version
from fsm_trainer.machine.world import System, Worker, World

Entry = Mapping[str, Any]


class Row(NamedTuple):
    """What the model says something about, of one record; ``line`` counts from 1."""

    line: int
    worker: str
    role: str
    kind: str
    trigger: str
    source: str
    dest: str
    epoch: int
    version: str | None
    ok: bool

    def __str__(self) -> str:
        moved = f"{self.source} -> {self.dest}" if self.source != self.dest else self.source
        what = f"{self.worker} {self.kind} {self.trigger}: {moved}"
        outcome = "ok" if self.ok else "failed"
        return f"line {self.line}: {what}, epoch {self.epoch}, version {self.version}, {outcome}"


@dataclass(frozen=True, slots=True)
class Violation:
    """The first line that doesn't conform.

    ``story`` holds the last records of the same worker, oldest first.
    """

    line: int
    worker: str
    because: str
    story: tuple[str, ...] = ()

    def __str__(self) -> str:
        before = "".join(f"\n  {line}" for line in self.story)
        return f"line {self.line}: {self.because}" + (f"\nbefore it:{before}" if before else "")


class _Wrong(Exception):
    def __init__(self, line: int, worker: str, because: str) -> None:
        self.line, self.worker, self.because = line, worker, because


class _Cut(Exception):
    """The journal ends inside a joint transition or action."""


def check_journal(
    entries: Iterable[Entry], tables: Spec | System, *, prefix: bool = False
) -> Violation | None:
    """The first record that doesn't conform to the tables, or None.

    Args:
        entries: the journal's records, with the fields of ``runtime/schemas/journal.schema.json``.
        tables: of the run's schedule; the workers are those that the journal names.
        prefix: the run was killed, so the journal may end anywhere.
    """
    journal = list(entries)
    rows: list[Row] = []
    try:
        _collect(journal, rows)
        system = tables if isinstance(tables, System) else _compose(tables, rows)
        _Replay(system, rows).run(prefix)
    except _Wrong as wrong:
        before = [r for r in rows if r.line < wrong.line and r.worker == wrong.worker]
        story = tuple(str(r) for r in before[-3:])
        return Violation(wrong.line, wrong.worker, wrong.because, story)
    return None


def replay(entries: Iterable[Entry], system: System) -> World | None:
    """The world that the journal of a run leads to, wherever the run was killed.

    None if it doesn't conform, or ends between the records of a joint transition.
    """
    rows: list[Row] = []
    replayed = _Replay(system, rows)
    try:
        _collect(list(entries), rows)
        replayed.run(prefix=True)
    except _Wrong:
        return None
    return None if replayed.cut else replayed.world


def _collect(journal: Sequence[Entry], rows: list[Row]) -> None:
    """Check numbering, time and ranks, and give one row for the ranks of a worker together."""
    ranks: dict[str, int] = {}
    count, last = 0, float("-inf")
    for line, entry in enumerate(journal, start=1):
        try:
            row = _row(line, entry)
            seq, time, rank = entry["seq"], entry["time"], entry["rank"]
        except KeyError as missing:
            raise _Wrong(line, str(entry.get("worker")), f"the record lacks {missing}") from None
        if seq != line:
            because = f"seq is {seq}, must be {line}: a record is missing or moved"
            raise _Wrong(line, row.worker, because)
        if time < last:
            raise _Wrong(line, row.worker, f"time {time} is before that of the line above, {last}")
        last = time
        if rank == 0:
            if rows:
                _complete(line, rows[-1], count, ranks)
            rows.append(row)
            count = 1
        elif not rows or rank != count or rows[-1] != row._replace(line=rows[-1].line):
            because = f"rank {rank} of {row.worker} has no equal record of rank {rank - 1} above it"
            raise _Wrong(line, row.worker, because)
        else:
            count += 1
    if rows:
        _complete(len(journal), rows[-1], count, ranks)


def _complete(line: int, row: Row, count: int, ranks: dict[str, int]) -> None:
    if count != ranks.setdefault(row.worker, count):
        because = f"{row.worker} has {ranks[row.worker]} ranks, {count} tell of {row.trigger}"
        raise _Wrong(line, row.worker, because)


def _row(line: int, entry: Entry) -> Row:
    fields = {name: entry[name] for name in Row._fields if name != "line"}
    return Row(line=line, **fields | {"kind": str(entry["kind"]), "epoch": entry["epoch"] or 0})


def _compose(spec: Spec, rows: Sequence[Row]) -> System:
    """The system of the workers that a journal names, in the order of the schedule's roles."""
    roles: dict[str, Role] = {}
    for row in rows:
        if row.role not in list(spec.roles) or roles.get(row.worker, row.role) != row.role:
            known = [str(role) for role in spec.roles]
            raise _Wrong(row.line, row.worker, f"{row.worker} is a {row.role}, not one of {known}")
        roles[row.worker] = Role(row.role)
    order = list(spec.roles)
    return System(spec, dict(sorted(roles.items(), key=lambda i: (order.index(i[1]), i[0]))))


class _Replay:
    def __init__(self, system: System, rows: Sequence[Row]) -> None:
        self.system, self.rows, self.world = system, rows, system.initial()
        self.cut = False

    def run(self, prefix: bool) -> None:
        at = 0
        try:
            while at < len(self.rows):
                at += self.record(at)
        except _Cut:
            self.cut = True
            if prefix:
                return
            row = self.rows[-1]
            because = f"the journal ends inside a joint {row.trigger}"
            raise _Wrong(row.line, row.worker, because) from None
        for name in () if prefix else self.system.names:
            part = self.part(name)
            if part.state != State.DISCONNECTED or part.move is not None:
                because = f"the journal ends here, and {name} is still {part.state}"
                raise _Wrong(self.rows[-1].line, name, because)

    def part(self, name: str) -> Worker:
        return self.system.get(self.world, name)

    def source(self, row: Row) -> None:
        state = self.part(row.worker).state
        if row.source != state:
            because = f"{row.worker} is {state}, not {row.source}, when it comes to {row.trigger}"
            raise _Wrong(row.line, row.worker, because)

    def record(self, at: int) -> int:
        """Replay what begins at a row; how many rows that took."""
        row = self.rows[at]
        if row.worker not in self.system.names:
            raise _Wrong(row.line, row.worker, f"no worker {row.worker} takes part")
        self.source(row)
        try:
            match row.kind:
                case "transition":
                    group = self.transition(at, row)
                case "action":
                    group = self.action(at, row)
                case "fault":
                    group = self.fault(at, row)
                case _:
                    raise _Wrong(row.line, row.worker, f"unknown kind {row.kind!r}")
        except FsmError as refused:
            raise _Wrong(row.line, row.worker, str(refused)) from None
        for one in group:
            self.compare(one)
        return len(group)

    def compare(self, row: Row) -> None:
        part = self.part(row.worker)
        epoch, version = max(part.epochs, default=0), str(part.version) if part.version else None
        if (row.dest, row.epoch, row.version) != (part.state, epoch, version):
            expected = f"{part.state}, epoch {epoch}, version {version}"
            told = f"{row.dest}, epoch {row.epoch}, version {row.version}"
            because = f"after {row.trigger} {row.worker} must be {expected}; the record says {told}"
            raise _Wrong(row.line, row.worker, because)

    def apply(self, event: on.Event) -> None:
        self.world = advance(self.system, self.world, event)

    def together(self, at: int, ends: Sequence[str]) -> Sequence[Row]:
        """The rows of all ends, which must follow each other."""
        first, missing = self.rows[at], list(ends)
        group = self.rows[at : at + len(ends)]
        for row in group:
            if (row.kind, row.trigger) != (first.kind, first.trigger) or row.worker not in missing:
                because = f"{first.trigger} of {' and '.join(missing)} must stand here"
                raise _Wrong(row.line, row.worker, f"{because}: its ends move together")
            missing.remove(row.worker)
            self.source(row)
        if missing:
            raise _Cut
        return group

    def transition(self, at: int, row: Row) -> Sequence[Row]:
        part = self.part(row.worker)
        if row.trigger == Trigger.FAIL and not row.ok:
            self.apply(on.Died(row.worker))
            return [row]
        if row.trigger == Trigger.SEVER:
            held = [k for k, i in self.system.links.items() if part.epochs[i]]
            self.apply(on.Sever(row.worker, held[0] if held else next(iter(self.system.links))))
            self.settle([row.worker])
            return [row]
        if part.move is not None and falling(self.system, self.world, row.worker):
            self.settle([row.worker])  # a fault ended it
            if row.ok or row.trigger != part.move:
                because = f"{row.worker} must tell that its move failed here"
                raise _Wrong(row.line, row.worker, because)
            return [row]
        ends = self.movers(row)
        group = self.together(at, ends)
        if part.move is None:
            self.apply(on.Begin(row.trigger, ends, version=self.restored(row)))
        undone = [r for r in group if not r.ok]
        if row.trigger == Trigger.CONNECT and undone:
            self.fall(on.Undo(row.worker), group)
        else:
            for one in undone:
                self.fall(on.Undo(one.worker), [one])
        self.settle(ends)
        return group

    def restored(self, row: Row) -> Version | None:
        """A start says which weights were restored; their lineage follows the last one."""
        if row.trigger != Trigger.START or row.version is None:
            return None
        lineage, number = (int(part) for part in row.version.split("."))
        return Version(self.world.lineage + 1 if self.world.lineage else lineage, number)

    def settle(self, names: Sequence[str]) -> None:
        while due := [e for e in enabled(self.system, self.world) if e.worker in names]:
            self.apply(on.Done(due[0]))
        self.apply(on.Commit(tuple(names)))

    def fall(self, event: on.Event, group: Sequence[Row]) -> None:
        """Let effects succeed until the fault leads everybody where the records say."""
        while True:
            fallen = advance(self.system, self.world, event)
            off = [r for r in group if self.system.get(fallen, r.worker).dest != r.dest]
            if not off:
                self.world = fallen
                return
            names = {r.worker for r in off}
            due = [e for e in enabled(self.system, self.world) if e.worker in names]
            if not due:
                row = off[0]
                because = f"no effect of {row.trigger} that failed leads {row.worker} to {row.dest}"
                raise _Wrong(row.line, row.worker, because)
            self.apply(on.Done(due[0]))

    def action(self, at: int, row: Row) -> Sequence[Row]:
        under_way = row.trigger in self.part(row.worker).jobs
        ends = self.actors(row)
        if under_way:
            ends = tuple(n for n in ends if row.trigger in self.part(n).jobs)
        group = self.together(at, ends)
        if not under_way:
            self.apply(on.Act(row.trigger, ends))
        self.apply(on.Acted(row.trigger, ends, all(r.ok for r in group)))
        return group

    def fault(self, at: int, row: Row) -> Sequence[Row]:
        match row.trigger:
            case "died" | "lost":
                event = on.Died(row.worker, lost=row.trigger == "lost")
                self.fall(event, self.under_way(at))
            case "confirmed":
                self.apply(on.Confirmed(row.worker))
            case "joined":
                self.apply(on.Joined(row.worker))
            case _:
                known = "died, lost, confirmed, joined"
                raise _Wrong(row.line, row.worker, f"no fault {row.trigger!r}, one of {known}")
        return [row]

    def under_way(self, at: int) -> list[Row]:
        """Begin what the others tell of after a death, for it may have begun before.

        Gives the rows of a joint transition that the death undoes.
        """
        dying = self.rows[at].worker
        following: dict[str, int] = {}
        for i, later in enumerate(self.rows[at + 1 :], start=at + 1):
            if later.worker in self.system.names:
                following.setdefault(later.worker, i)
            if len(following) == len(self.system.names):
                break
        undone = []
        for i in following.values():
            row = self.rows[i]
            if any(r.worker == dying for r in self.beside(i)):
                continue  # it began when the dead worker was back
            try:
                if row.kind == "action":
                    self.act(row)
                elif row.kind == "transition" and not row.ok:
                    self.begin(row)
                    undone.append(row)
            except Refused:
                continue
        return undone

    def beside(self, at: int) -> list[Row]:
        """The rows around one that tell of the same joint step."""
        here = self.rows[at]
        near = self.rows[max(0, at - len(self.system.names)) : at + len(self.system.names)]
        return [r for r in near if (r.kind, r.trigger) == (here.kind, here.trigger)]

    def act(self, row: Row) -> None:
        if row.trigger not in self.part(row.worker).jobs:
            self.apply(on.Act(row.trigger, self.actors(row)))

    def begin(self, row: Row) -> None:
        if self.part(row.worker).move is None:
            edge = self.system.table(row.worker).edge(row.trigger, self.part(row.worker).state)
            if edge is None or edge.joint is None:
                raise Refused(row.worker, row.source, row.trigger, ["it began after the death"])
            self.apply(on.Begin(row.trigger, self.movers(row)))

    def actors(self, row: Row) -> tuple[str, ...]:
        """Who acts together with a row's worker."""
        action = self.system.table(row.worker).actions.get(row.trigger)
        if action is None or action.joint is None:
            return (row.worker,)
        return tuple(actors_of(self.system, self.world, row.trigger))

    def movers(self, row: Row) -> tuple[str, ...]:
        """Who moves together with a row's worker, or would."""
        part = self.part(row.worker)
        if part.move is not None:
            return tuple(n for n in self.system.names if self.part(n).move == part.move)
        edge = self.system.table(row.worker).edge(row.trigger, part.state)
        if edge is None or edge.joint is None:
            return (row.worker,)
        return joint_ends(self.system, self.world, edge.joint, row.trigger)
