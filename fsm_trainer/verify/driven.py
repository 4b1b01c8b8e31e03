"""Visit every state that a schedule's own driver can come to, whatever fails on the way.

The driver is told here as the tables see it: it severs what is broken, buries the dead, plans the
next move to what the phase wants, runs the phase's action, and goes back to the first phase of a
step when a trainer dies. Each phase must be passed again and again, so that nothing is stuck and
nothing goes in circles.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from fsm_trainer.machine import events as on
from fsm_trainer.machine.errors import Refused
from fsm_trainer.machine.names import Role, Trigger
from fsm_trainer.machine.planner import Move, actors_of, plan, ready
from fsm_trainer.machine.spec import Phase
from fsm_trainer.machine.step import advance
from fsm_trainer.machine.world import System, World
from fsm_trainer.verify.canon import Canon, Code
from fsm_trainer.verify.check import Progress, Search, Step, Verdict, refuse_counting, somebody
from fsm_trainer.verify.properties import broken, wrong_step
from fsm_trainer.verify.relation import Edge, Node, Relation

# What the driver decides by itself, telling nobody: no event of the system.
THOUGHT = on.Act("", ())
# What the driver waits for: nothing, the phase's action, or the end of one that counts for nothing.
IDLE, ACTS, FAILED = range(3)


class _State(NamedTuple):
    """A node, which phase the driver is at, and what it waits for."""

    node: Node
    place: int
    waits: int = IDLE


class _Turn(NamedTuple):
    """One thing that may happen next, and where it leads."""

    edge: Edge
    states: list[_State]
    passes: bool = False
    """Whether a phase is over with it."""


def check_driven(
    system: System,
    *,
    fine: bool = False,
    most: int = 2_000_000,
    progress: Progress = lambda visited, waiting: None,
) -> Verdict:
    """Visit every state; stops at the first violation, and where the driver would be stuck."""
    refuse_counting(system)
    relation = Relation(system, fine=fine)
    return _Driven(system, system, relation, Canon(system), most, progress).run()


class _Driven(Search):
    def _start(self) -> Code:
        schedule, phases = self._system.spec.schedule, self._system.spec.phases
        steps = [name for lane in schedule.lanes.values() for name in lane]
        names = [*schedule.prologue, *steps, *schedule.epilogue]
        self._phases: list[Phase] = [phases[name] for name in names]
        self._first, self._last = len(schedule.prologue), len(schedule.prologue) + len(steps) - 1
        self._plans: dict[Code, Move | None] = {}
        self._passed = list[int]()
        return self._code(_State(Node(self._system.initial()), 0))

    def _code(self, state: _State) -> Code:
        return (*self._canon.encode(state.node), state.place, state.waits)

    def _state(self, code: Code) -> _State:
        return _State(self._canon.decode(code[:-2]), *code[-2:])

    def _visit(self, at: int) -> None:
        state, alive = self._state(self._order[at]), False
        node = state.node
        if why := broken(self._properties, node):
            return self._fail(why, at)
        for turn in self._turns(state):
            _, event, fault = turn.edge
            world = turn.states[0].node.world
            if event is not THOUGHT and (
                why := wrong_step(self._properties, node.world, event, world)
            ):
                return self._fail(why, at, turn.edge)
            self._verdict.transitions += len(turn.states)
            if turn.passes:
                self._passed.append(at)
                self._verdict.happened.add(("passes", self._phases[state.place].name))
            for number, successor in enumerate(turn.states):
                there = self._add(self._code(successor), at)
                if not fault and (number == 0 or turn.passes):
                    self._back[there].append(at)
                    alive = True
        if not alive and self._running(state):
            self._fail(f"stuck: no way to {self._phases[state.place].name}", at)
        return None

    def _goes_on(self, code: Code) -> bool:
        return self._running(self._state(code))

    def _running(self, state: _State) -> bool:
        """Whether the run is neither over nor lost."""
        return state.place < len(self._phases) and somebody(self._system, state.node.world)

    def _walk(self, codes: list[Code]) -> Iterator[Step]:
        state = _State(Node(self._system.initial()), 0)
        for code in codes:
            self._plans.clear()  # they name the twins of a decoded node, here these may stand apart
            ways = ((turn.edge, s) for turn in self._turns(state) for s in turn.states)
            edge, state = next((edge, s) for edge, s in ways if self._code(s) == code)
            yield Step(edge, state.node)

    def _judge(self) -> None:
        self._recoverable(self._passed, "livelock: the phase is never passed again")
        names = dict.fromkeys(phase.name for phase in self._phases)
        self._sometimes(("passes", name) for name in names)

    # -- what may happen --------------------------------------------------------------------------

    def _turns(self, state: _State) -> Iterator[_Turn]:
        if not self._running(state):
            return
        edges = [*self._relation.edges(state.node)]
        yield from self._faults(state, edges)
        moving = any(worker.move is not None for worker in state.node.world.workers)
        if moving or state.node.late:
            yield from self._moving(state, edges)
        elif any(worker.jobs for worker in state.node.world.workers):
            ends = [e for e in edges if isinstance(e.event, on.Acted) and e.event.ok]
            yield from (self._turn(state, edge) for edge in ends)
        elif state.waits == ACTS:
            yield self._passing(state)
        elif state.waits == FAILED:
            again = Edge("the phase begins again", THOUGHT)
            yield _Turn(again, [state._replace(waits=IDLE)])
        else:
            yield from self._deciding(state, edges)

    def _turn(self, state: _State, edge: Edge, **change: int) -> _Turn:
        nodes = self._relation.after(state.node, edge.event)
        return _Turn(edge, [state._replace(node=node, **change) for node in nodes])

    def _faults(self, state: _State, edges: list[Edge]) -> Iterator[_Turn]:
        failed = FAILED if state.waits else IDLE
        for edge in edges:
            match edge.event:
                case on.Died(worker=name) if self._system.names[name] is Role.ROLLOUT:
                    yield self._turn(state, edge, waits=failed)
                case on.Died():
                    # What it had learned since its checkpoint is lost: the step begins again.
                    place = self._first if state.place >= self._first else 0
                    yield self._turn(state, edge, waits=failed, place=place)
                case on.Acted(ok=False):
                    yield self._turn(state, edge, waits=FAILED)
                case on.Failed() | on.Joined():
                    yield self._turn(state, edge)

    def _moving(self, state: _State, edges: list[Edge]) -> Iterator[_Turn]:
        due = [e for e in edges if isinstance(e.event, (on.Done, on.Commit))]
        # Whose peers have failed waits for nothing: it is told to come back.
        due = due or [e for e in edges if isinstance(e.event, on.Undo)]
        yield from (self._turn(state, edge._replace(fault=False)) for edge in due)

    def _deciding(self, state: _State, edges: list[Edge]) -> Iterator[_Turn]:
        first = [e for e in edges if isinstance(e.event, (on.Sever, on.Confirmed))][:1]
        world, phase = state.node.world, self._phases[state.place]
        if first:
            yield self._turn(state, first[0])
        elif ready(self._system, world, phase):
            yield self._acting(state, phase) if phase.action else self._passing(state)
        elif (move := self._planned(state)) is not None:
            event: on.Event = on.Begin(move.name, move.workers)
            waits = IDLE
            if move.name not in list(Trigger):
                event, waits = on.Act(move.name, move.workers), FAILED
            yield self._turn(state, Edge(str(move), event), waits=waits)

    def _planned(self, state: _State) -> Move | None:
        code = (*self._canon.encode(state.node), state.place)
        if code not in self._plans:
            try:
                self._plans[code] = plan(self._system, state.node.world, self._phases[state.place])[
                    0
                ]
            except Refused:
                self._plans[code] = None
        return self._plans[code]

    def _acting(self, state: _State, phase: Phase) -> _Turn:
        action, world = phase.action or "", state.node.world
        names = tuple(actors_of(self._system, world, action))
        joint = any(self._system.table(name).actions[action].joint for name in names)
        for group in [names] if joint else [(name,) for name in names]:
            world = self._act(world, action, group)
        event = on.Act(action, names)
        return _Turn(
            Edge(f"{phase.name}: {action}", event), [_State(Node(world), state.place, ACTS)]
        )

    def _act(self, world: World, action: str, group: tuple[str, ...]) -> World:
        return advance(self._system, world, on.Act(action, group))

    def _passing(self, state: _State) -> _Turn:
        """The phase is over: the next one comes, or after a step's last, a step or the end."""
        places = [state.place + 1]
        if state.place == self._last:
            places.insert(0, self._first)
        edge = Edge(f"passes {self._phases[state.place].name}", THOUGHT)
        return _Turn(edge, [_State(state.node, place) for place in places], passes=True)
