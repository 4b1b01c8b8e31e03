"""One life of a simulated worker: the real `Lifecycle` over resources that only say they exist."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from fsm_trainer.machine import events as on
from fsm_trainer.machine import legal
from fsm_trainer.machine.errors import ActionFailed, LeaseExpired
from fsm_trainer.machine.events import Effect, Op
from fsm_trainer.machine.lifecycle import Lifecycle, Report, Resource
from fsm_trainer.machine.names import Role
from fsm_trainer.machine.version import Version
from fsm_trainer.machine.world import World
from fsm_trainer.simulation.faults import What
from fsm_trainer.sync.manifest import Transfer

if TYPE_CHECKING:
    from fsm_trainer.simulation.site import Site


class Weights(NamedTuple):
    """Weights, told apart by what they have learned."""

    draws: tuple[int, ...]
    """What they were trained on, in order."""
    stamp: int
    """Two weights are the same only if one update made both."""


class Batch(NamedTuple):
    """Trajectories of one draw, all made by the same weights; a part of them, or all."""

    draw: int
    parts: frozenset[int]
    weights: Weights
    version: Version


class Crashed(BaseException):
    """The process ends here."""


class Hung(BaseException):
    """The process goes nowhere from here."""


class Process(Lifecycle):
    """A process of a worker, until it dies; ``weights`` are what it has learned or was sent."""

    def __init__(self, site: Site, name: str, weights: Weights | None) -> None:
        self.site, self.weights = site, weights
        self.alive, self.stuck = True, False
        self.advantages: int | None = None
        """Of which draw it has advantages: its own, or what it was sent."""
        self.has: dict[str, int] = {}
        """What it truly holds, each with its epoch."""
        self.mailbox = asyncio.Lock()
        self._armed: What | None = None
        known = {r for held in site.system.table(name).holds.values() for r in held}
        resources: dict[str, Resource] = {r: Held(self, r) for r in known}
        super().__init__(site.system, name, resources)
        self.role: Role = site.system.names[name]

    def die(self) -> None:
        """End; a device's memory is free at once."""
        if self.alive:
            self.alive = False
            self.has.clear()
            self.site.died(self)

    def effect(self, effect: Effect) -> None:
        """Run an effect, or what the seed makes of it."""
        what, self._armed = self._armed, None
        if effect.op is Op.RELEASE:
            what = self.site.fault(self.name, str(effect))
        if what is What.FAIL:
            raise ActionFailed(f"{effect}: a fault of the simulation")
        stop_at(what, What.CRASH_BEFORE, What.HANG)
        if effect.op is Op.ACQUIRE:
            if effect.resource in self.site.system.links:
                group = self.site.group(effect.resource, effect.epoch)
                if group.error is not None:
                    raise group.error
            self.has[effect.resource] = effect.epoch
        else:
            self.has.pop(effect.resource, None)
        if effect.resource == "weights" and self.role is Role.ROLLOUT:
            self.weights = None
        self.site.tell(f"{self.name}: {effect}")
        self.site.look()
        stop_at(what, What.CRASH_AFTER)

    async def acquire_in_time(self, deadline: float) -> Report:
        """As :meth:`acquire`, but others go on between its effects and while it waits."""
        done: list[Effect] = []
        while due := [e for e in legal.enabled(self.system, self.world) if e.op is Op.ACQUIRE]:
            effect = due[0]
            await self.site.pause(1.0)
            self._armed = self.site.fault(self.name, str(effect))
            try:
                if self._armed is What.LATE:
                    await self.late(deadline)
                if effect.resource in self.system.links and self._armed is None:
                    members = self.world.links[self.system.links[effect.resource]].members
                    await self.site.group(effect.resource, effect.epoch).arrive(self, members)
                self._resources[effect.resource].acquire(effect)
            except Exception as problem:
                self._failed(effect)
                error = f"{type(problem).__name__}: {problem}"
                return Report(self.worker, tuple(done), effect, error)
            self._apply(on.Done(effect))
            done.append(effect)
        return Report(self.worker, tuple(done))

    async def late(self, deadline: float) -> None:
        """Go on only when nobody waits any more."""
        self.stuck = True
        await asyncio.sleep(deadline + 1)
        await self.site.pause(10.0)

    def peer_died(self, peer: str) -> None:
        """As the hosts do: a lease that the dead was a member of ends here at once."""
        members = [
            link for link, i in self.system.links.items() if peer in self.world.links[i].members
        ]
        super().peer_died(peer)
        for link in members:
            epoch = self.has.get(link, self.world.links[self.system.links[link]].epoch)
            self.site.group(link, epoch).end(LeaseExpired(link, epoch, f"{peer} died"))

    async def act(
        self, action: str, world: World, arguments: tuple[Any, ...], deadline: float
    ) -> tuple[Any, Any]:
        """Run an action; gives its payload and value."""
        with self.action(action, world):
            what = self.site.fault(self.name, action)
            if what is What.FAIL:
                raise ActionFailed(f"{action}: a fault of the simulation")
            if what is What.LATE:
                await self.late(deadline)
            stop_at(what, What.CRASH_BEFORE, What.HANG)
            self.site.tell(f"{self.name}: {action}")
            self.site.look()
            self._lacks(action)
            await self.site.pause(5.0)
            told = await WORK[action](self, arguments)
            self._lacks(action)
            stop_at(what, What.CRASH_AFTER)
        if what is What.LOST:
            await self.late(deadline)
        return told

    def _lacks(self, action: str) -> None:
        needs = self.system.table(self.name).actions[action].needs
        if self.alive and not needs <= self.has.keys():
            self.site.violate(f"7: {self.name} is at {action} and holds only {sorted(self.has)}")


class Held:
    """A resource of a simulated process."""

    def __init__(self, process: Process, name: str) -> None:
        self._process, self._name = process, name

    def acquire(self, effect: Effect) -> None:
        """Take it."""
        self._process.effect(effect)

    def release(self, effect: Effect) -> None:
        """Give it back."""
        self._process.effect(effect)


def stop_at(what: What | None, *kinds: What) -> None:
    """End or hang here, if that is what goes wrong."""
    if what in kinds:
        raise Hung if what is What.HANG else Crashed


async def _generate(me: Process, arguments: tuple[Any, ...]) -> tuple[Any, Any]:
    (draw, part), *_ = arguments
    if me.weights is None or me.worker.version is None:
        me.site.violate(f"5: {me.name} serves torn weights")
        return None, 0
    return Batch(draw, frozenset({part}), me.weights, me.worker.version), 10


async def _warm_up(me: Process, arguments: tuple[Any, ...]) -> tuple[Any, Any]:
    me.weights = me.site.trained()
    return None, {}


async def _score(me: Process, arguments: tuple[Any, ...]) -> tuple[Any, Any]:
    batch: Batch = arguments[0]
    return batch.draw, {}


async def _values(me: Process, arguments: tuple[Any, ...]) -> tuple[Any, Any]:
    batch, _, _, scored, *_ = arguments
    if "score" in me.system.table("actor").actions:
        _of_the_same(me, "scores", scored, batch)
    me.advantages = batch.draw
    if "train" not in me.system.table(me.name).actions:
        _learn(me, batch)
    return batch.draw, {}


async def _train(me: Process, arguments: tuple[Any, ...]) -> tuple[Any, Any]:
    batch, advantages, _, _, scored, *_ = arguments
    if me.role is Role.ACTOR and batch.weights != me.weights:
        me.site.violate(f"5: the actor trains on what {batch.weights} made, it is {me.weights}")
    sent = "send_values" in me.system.table(me.name).actions
    advantages = me.advantages if sent else advantages
    if Role.CRITIC in me.system.spec.roles:
        _of_the_same(me, "advantages", advantages, batch)
    if "score" in me.system.table("actor").actions:
        _of_the_same(me, "scores", scored, batch)
    _learn(me, batch)
    return None, {}


def _learn(me: Process, batch: Batch) -> None:
    before = me.weights.draws if me.weights else ()
    me.weights = me.site.trained(*before, batch.draw)


def _of_the_same(me: Process, what: str, draw: int | None, batch: Batch) -> None:
    if draw != batch.draw:
        me.site.violate(f"the {what} are of draw {draw}, the batch of {batch.draw}")


async def _save(me: Process, arguments: tuple[Any, ...]) -> tuple[Any, Any]:
    (folder,) = arguments
    if me.weights is not None:
        me.site.saved[folder.parent.name, folder.name] = me.weights
    return None, {}


async def _push(me: Process, arguments: tuple[Any, ...]) -> tuple[Any, Any]:
    if me.role is Role.ROLLOUT:
        me.weights = None
    sender = await _sender(me, "push", Role.ACTOR)
    if sender is me:
        return None, Transfer(1, 1.0)
    me.weights = sender.weights
    return None, None


async def _send_values(me: Process, arguments: tuple[Any, ...]) -> tuple[Any, Any]:
    me.advantages = (await _sender(me, "send_values", Role.CRITIC)).advantages
    return None, None


async def _sender(me: Process, action: str, role: Role) -> Process:
    """All who have the action meet, the bytes travel, and each has them at a time of its own."""
    link, i = next(iter(me.system.links.items()))
    epoch, group = me.worker.epochs[i], me.site.group(link, me.worker.epochs[i])
    joined = me.world.links[i].members
    members = frozenset(m for m in joined if action in me.system.table(m).actions)
    turn = group.begun[action, me.name] = group.begun.get((action, me.name), 0) + 1
    group.changed()

    def met() -> bool:
        return all(group.begun.get((action, m), 0) >= turn for m in members)

    await group.until(me, met, members)
    await me.site.pause(2.0)
    if me.role is role:
        return me
    if group.error is not None:
        raise group.error
    senders = [p for n, p in group.arrived.items() if me.system.names[n] is role]
    if not senders[0].alive:
        raise LeaseExpired(link, epoch, "the sender is gone")
    return senders[0]


WORK: dict[str, Callable[[Process, tuple[Any, ...]], Awaitable[tuple[Any, Any]]]] = {
    "generate": _generate, "evaluate": _generate, "warm_up": _warm_up, "score": _score,
    "values": _values, "send_values": _send_values, "train": _train, "save": _save, "push": _push,
}  # fmt: skip
