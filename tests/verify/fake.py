"""A run without processes: the planner drives `step`, and every record goes into a journal."""

from __future__ import annotations

from typing import Any

from fsm_trainer.machine import events as on
from fsm_trainer.machine import step as s
from fsm_trainer.machine.legal import actors_of
from fsm_trainer.machine.names import State
from fsm_trainer.machine.planner import Move, plan, settle
from fsm_trainer.machine.spec import load
from fsm_trainer.machine.world import System


class FakeRun:
    def __init__(self, schedule: str, rollouts: int = 2, ranks: dict[str, int] | None = None):
        self.system = System.of(load(schedule), rollouts)
        self.world = self.system.initial()
        self.ranks, self.entries = ranks or {}, list[dict[str, Any]]()

    def state(self, name: str) -> State:
        return self.system.get(self.world, name).state

    def apply(self, event: on.Event) -> None:
        self.world = s.advance(self.system, self.world, event)

    def record(
        self, name: str, kind: str, trigger: str, source: State | None = None, ok: bool = True
    ) -> None:
        worker = self.system.get(self.world, name)
        for rank in range(self.ranks.get(name, 1)):
            n = len(self.entries) + 1
            self.entries.append(
                {
                    "format": 1,
                    "seq": n,
                    "time": 100.0 + n,
                    "worker": name,
                    "role": str(self.system.names[name]),
                    "rank": rank,
                    "kind": kind,
                    "trigger": str(trigger),
                    "source": str(source or worker.state),
                    "dest": str(worker.state),
                    "epoch": max(worker.epochs) or None,
                    "version": str(worker.version) if worker.version else None,
                    "seconds": 0.5,
                    "ok": ok,
                    "error": None if ok else "it broke",
                }
            )

    def move(self, move: Move) -> None:
        sources = {n: self.state(n) for n in move.workers}
        if move.name == "push":
            self.act("push", move.workers)
            return
        self.apply(on.Begin(move.name, move.workers))
        self.world = settle(self.system, self.world)
        for name in move.workers:
            self.record(name, "transition", move.name, sources[name])

    def act(self, action: str, workers: tuple[str, ...], ok: bool = True) -> None:
        self.apply(on.Act(action, workers))
        self.acted(action, workers, ok)

    def acted(self, action: str, workers: tuple[str, ...], ok: bool = True) -> None:
        self.apply(on.Acted(action, workers, ok))
        for name in workers:
            self.record(name, "action", action, ok=ok)

    def fault(self, name: str, trigger: str, event: on.Event) -> None:
        source = self.state(name)
        self.apply(event)
        self.record(name, "fault", trigger, source, ok=False)

    def fallen(self, trigger: str, names: tuple[str, ...]) -> None:
        """The workers that a fault turned back settle, and tell that their move failed."""
        sources = {n: self.state(n) for n in names}
        self.world = settle(self.system, self.world)
        for name in names:
            self.record(name, "transition", trigger, sources[name], ok=False)

    def sever(self, name: str) -> None:
        source = self.state(name)
        self.apply(on.Sever(name, "link"))
        self.world = settle(self.system, self.world)
        self.record(name, "transition", "sever", source)

    def reach(self, phase: str) -> None:
        for move in plan(self.system, self.world, self.system.spec.phases[phase]):
            self.move(move)

    def phase(self, name: str) -> None:
        self.reach(name)
        action = self.system.spec.phases[name].action
        if action is None:
            return
        names = tuple(actors_of(self.system, self.world, action))
        joint = any(self.system.table(n).actions[action].joint for n in names)
        for workers in [names] if joint else [(n,) for n in names]:
            self.act(action, workers)

    def run(self, steps: int = 2) -> FakeRun:
        schedule = self.system.spec.schedule
        lanes = [phase for lane in schedule.lanes.values() for phase in lane]
        for name in [*schedule.prologue, *lanes * steps, *schedule.epilogue]:
            self.phase(name)
        return self
