"""Visit every state that a schedule's own driver can come to, whatever fails on the way.

The driver is told here as the tables see it: it severs what is broken, buries the dead, plans the
next move to what the phase wants, runs the phase's action, and goes back to the first phase of a
step when a trainer dies. Each phase must be passed again and again, so that nothing is stuck and
nothing goes in circles.

Where several workers are busy and none of them needs another, one goes first and the others wait
for their turn: rollout workers before trainers, and while one of them goes, all others of them
wait, with what may fail in them. The order makes no difference to what comes of it. An effect of a
worker's own move, and the end of its own action, change that worker alone. Who falls from a joint
move releases and acquires nothing; its link is broken already, so that to fall again changes
nothing, and the last one to release the link closes it, whichever that is. A death breaks a link,
or resets the phase, as well afterwards as before. The driver decides nothing while anybody is busy.
So what was put off can still happen, and leads to the same: the driver comes to decide in the same
states, which the tests compare with those of every order. Only that two of them are half-way at
once is not visited here; `check` does, in any order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from fsm_trainer.machine import events as on
from fsm_trainer.machine import legal
from fsm_trainer.machine.errors import Refused
from fsm_trainer.machine.names import Role, Trigger
from fsm_trainer.machine.planner import Move, apply, plan, ready
from fsm_trainer.machine.spec import Phase
from fsm_trainer.machine.world import System, World
from fsm_trainer.verify.canon import Canon, Code
from fsm_trainer.verify.check import (
    Progress,
    Search,
    Step,
    Unsafe,
    Verdict,
    refuse_counting,
    somebody,
)
from fsm_trainer.verify.properties import broken
from fsm_trainer.verify.relation import Edge, Node, Relation

# What the driver decides by itself, telling nobody: no event of the system.
THOUGHT = on.Act("", ())
# What the driver waits for: nothing, the phase's action, or the end of one that counts for nothing.
IDLE, ACTS, FAILED = range(3)

_Position = tuple[Role, int]
"""Where a worker stands, whatever its name: its role, and the code of its part."""


class _State(NamedTuple):
    """A node, which phase the driver is at, and what it waits for."""

    node: Node
    place: int
    waits: int = IDLE


class _Turn(NamedTuple):
    """One thing that may happen next, and where the driver is then, or may be."""

    edge: Edge
    drivers: tuple[tuple[int, int], ...]
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
    relation = Relation(system, fine=fine, begins=False)
    return _Driven(system, system, relation, Canon(system), most, progress).run()


class _Driven(Search):
    def _start(self) -> Code:
        schedule, phases = self._system.spec.schedule, self._system.spec.phases
        steps = [name for lane in schedule.lanes.values() for name in lane]
        names = [*schedule.prologue, *steps, *schedule.epilogue]
        self._phases: list[Phase] = [phases[name] for name in names]
        self._first, self._last = len(schedule.prologue), len(schedule.prologue) + len(steps) - 1
        self._plans: dict[object, tuple[str, set[_Position]] | None] = {}
        self._tried: dict[object, World | Refused] = {}
        self._passed, self._sound = set[int](), set[Code]()
        return self._code(_State(Node(self._system.initial()), 0))

    def _code(self, state: _State) -> Code:
        return (*self._canon.encode(state.node), state.place, state.waits)

    def _state(self, code: Code) -> _State:
        return _State(self._canon.decode(code[:-2]), *code[-2:])

    def _visit(self, at: int) -> None:
        code, state, alive = self._order[at], self._state(self._order[at]), False
        if code[:-2] not in self._sound:
            if why := broken(self._properties, state.node):
                return self._fail(why, at)
            self._sound.add(code[:-2])
        for turn in self._turns(state):
            edge, drivers, passes = turn
            try:
                thought = edge.event is THOUGHT
                codes = [code[:-2]] if thought else self._after(code[:-2], state.node, edge.event)
            except Unsafe as unsafe:
                return self._fail(str(unsafe), at, edge)
            if passes:
                self._passed.add(at)
                self._verdict.happened.add(("passes", self._phases[state.place].name))
            successors = [(*after, *driver) for after in codes for driver in drivers]
            self._verdict.transitions += len(successors)
            for number, successor in enumerate(successors):
                there = self._add(successor, at)
                if not edge.fault and (number == 0 or passes):
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
            ways = (
                (turn.edge, each) for turn in self._turns(state) for each in self._led(state, turn)
            )
            edge, state = next((edge, each) for edge, each in ways if self._code(each) == code)
            yield Step(edge, state.node)

    def _led(self, state: _State, turn: _Turn) -> Iterator[_State]:
        event, nodes = turn.edge.event, [state.node]
        if event is not THOUGHT:
            nodes = [*self._relation.after(state.node, event)]
        return (_State(node, *driver) for node in nodes for driver in turn.drivers)

    def _judge(self) -> None:
        self._recoverable(self._passed.__contains__, "livelock: the phase is never passed again")
        names = dict.fromkeys(phase.name for phase in self._phases)
        self._sometimes(("passes", name) for name in names)

    # -- what may happen --------------------------------------------------------------------------

    def _turns(self, state: _State) -> Iterator[_Turn]:
        if not self._running(state):
            return
        edges = [*self._relation.edges(state.node, self._waiting(state.node))]
        yield from self._faults(state, edges)
        moving = any(worker.move is not None for worker in state.node.world.workers)
        if moving or state.node.late:
            yield from self._moving(state, edges)
        elif any(worker.jobs for worker in state.node.world.workers):
            ends = [e for e in edges if isinstance(e.event, on.Acted) and e.event.ok]
            yield from (_turn(state, edge) for edge in ends)
        elif state.waits == ACTS:
            yield self._passing(state)
        elif state.waits == FAILED:
            yield _turn(state, Edge("the phase begins again", THOUGHT), waits=IDLE)
        else:
            yield from self._deciding(state, edges)

    def _waiting(self, node: Node) -> set[str]:
        """Who waits for its turn, where several are busy and none needs another: see the module."""
        system, world = self._system, node.world
        moving = [n for n in system.names if system.get(world, n).move is not None]
        busy = moving or [n for n in system.names if system.get(world, n).jobs]
        shared = system.spec.schedule.devices[Role.ROLLOUT] != "own"
        if shared or not busy or any(self._together(world, name) for name in busy):
            return set()
        first = min(busy, key=lambda name: self._position(node, name))
        rollouts = {n for n, role in system.names.items() if role is Role.ROLLOUT}
        return {*busy, *(rollouts if first in rollouts else ())} - {first}

    def _position(self, node: Node, name: str) -> tuple[bool, int]:
        """Who is asked first: rollout workers, and by position, since names are places only."""
        return self._system.names[name] is not Role.ROLLOUT, self._canon.part_of(node, name)

    def _together(self, world: World, name: str) -> bool:
        """Whether a worker moves or works with others, none of whom has failed."""
        system, worker = self._system, self._system.get(world, name)
        joint = any(system.table(name).actions[job].joint for job in worker.jobs)
        moves = legal.joint_of(system, world, name) is not None
        return joint or (moves and not legal.falling(system, world, name))

    def _faults(self, state: _State, edges: list[Edge]) -> Iterator[_Turn]:
        failed = FAILED if state.waits else IDLE
        for edge in edges:
            match edge.event:
                case on.Died(worker=name) if self._system.names[name] is Role.ROLLOUT:
                    yield _turn(state, edge, waits=failed)
                case on.Died():
                    # What it had learned since its checkpoint is lost: the step begins again.
                    place = self._first if state.place >= self._first else 0
                    yield _turn(state, edge, waits=failed, place=place)
                case on.Acted(ok=False):
                    yield _turn(state, edge, waits=FAILED)
                case on.Failed() | on.Joined():
                    yield _turn(state, edge)

    def _moving(self, state: _State, edges: list[Edge]) -> Iterator[_Turn]:
        due = [e for e in edges if isinstance(e.event, (on.Done, on.Commit))]
        # Whose peers have failed waits for nothing: it is told to come back.
        due = due or [e for e in edges if isinstance(e.event, on.Undo)]
        yield from (_turn(state, edge._replace(fault=False)) for edge in due)

    def _deciding(self, state: _State, edges: list[Edge]) -> Iterator[_Turn]:
        wrong = [e for e in edges if isinstance(e.event, (on.Sever, on.Confirmed))]
        world, phase = state.node.world, self._phases[state.place]
        if wrong:
            yield _turn(
                state, min(wrong, key=lambda e: self._position(state.node, *_about(e.event)))
            )
        elif ready(self._system, world, phase):
            yield self._acting(state, phase) if phase.action else self._passing(state)
        elif (move := self._planned(state)) is not None:
            event: on.Event = on.Begin(move.name, move.workers)
            waits = IDLE
            if move.name not in list(Trigger):
                event, waits = on.Act(move.name, move.workers), FAILED
            yield _turn(state, Edge(str(move), event), waits=waits)

    def _planned(self, state: _State) -> Move | None:
        """The next move; equal workers move together, so their number doesn't count."""
        system, phase = self._system, self._phases[state.place]
        code = self._canon.places(state.node)
        stands = {name: (role, code[system.index[name]]) for name, role in system.names.items()}
        key = (frozenset(stands.values()), code[len(stands) :], state.place)
        if key not in self._plans:
            try:
                move = plan(system, state.node.world, phase, self._applied)[0]
            except Refused:
                self._plans[key] = None
            else:
                self._plans[key] = move.name, {stands[name] for name in move.workers}
        if (planned := self._plans[key]) is None:
            return None
        return Move(planned[0], tuple(n for n in system.names if stands[n] in planned[1]))

    def _applied(self, system: System, world: World, move: Move) -> World:
        """As `apply`: what one plan has tried, the next ones try again."""
        key = (*system.names,), world, move
        if key not in self._tried:
            try:
                self._tried[key] = apply(system, world, move)
            except Refused as refused:
                self._tried[key] = refused
        found = self._tried[key]
        if isinstance(found, Refused):
            raise found
        return found

    def _acting(self, state: _State, phase: Phase) -> _Turn:
        action = phase.action or ""
        event = on.Act(action, tuple(legal.actors_of(self._system, state.node.world, action)))
        return _turn(state, Edge(f"{phase.name}: {action}", event), waits=ACTS)

    def _passing(self, state: _State) -> _Turn:
        """The phase is over: the next one comes, or after a step's last, a step or the end."""
        places = [state.place + 1]
        if state.place == self._last:
            places.insert(0, self._first)
        edge = Edge(f"passes {self._phases[state.place].name}", THOUGHT)
        return _Turn(edge, tuple((place, IDLE) for place in places), passes=True)


def _turn(
    state: _State, edge: Edge, *, place: int | None = None, waits: int | None = None
) -> _Turn:
    here = state.place if place is None else place
    return _Turn(edge, ((here, state.waits if waits is None else waits),))


def _about(event: on.Event) -> tuple[str, ...]:
    """Whom an event speaks of."""
    match event:
        case on.Done(effect=effect) | on.Failed(effect=effect):
            return (effect.worker,)
        case on.Begin() | on.Commit() | on.Act() | on.Acted():
            return event.workers
    return (event.worker,)
