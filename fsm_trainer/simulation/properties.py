"""The properties of ``states/system.yaml``, asked of what the simulated processes truly hold.

The numbers are those of the file. ``world`` is what the driver believes; a process that it takes
for dead may still be there, and counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fsm_trainer.machine.names import LinkState, Role, State
from fsm_trainer.machine.version import Version
from fsm_trainer.machine.world import System, World
from fsm_trainer.simulation.process import Process


def violated(system: System, world: World, processes: Mapping[str, Process]) -> str:
    """The first property that does not hold now, or nothing."""
    alive = {name: p for name, p in processes.items() if p.alive}
    for found in (
        *_of_workers(system, world, alive),
        *_of_links(system, world, alive),
        *_of_devices(system, alive),
        *_of_versions(system, world, alive),
    ):
        return found
    return ""


def _of_workers(system: System, world: World, alive: Mapping[str, Process]) -> Iterator[str]:
    resources = system.spec.system.resources
    for name, process in alive.items():
        worker, has, holds = system.get(world, name), process.has.keys(), system.table(name).holds
        own, down = process.worker, (State.SLEEPING, State.DISCONNECTED)
        groups = [r for r in has if resources[r].communicator]
        if own.move is None and not own.ghost and own.state in down and groups:
            yield f"1: {name} is {own.state} and holds {groups}"
        claim = worker.held | worker.ghost | frozenset(holds[worker.dest] if worker.dest else ())
        if unknown := [r for r in has if resources[r].size and r not in claim]:
            yield f"4: {name} holds {unknown}, and the ledger knows of {sorted(claim)}"
        for resource in has:
            needed = resources[resource].requires
            if needed and has.isdisjoint(needed):
                yield f"14: {name} holds {resource} without any of {[*needed]}"
        dead = bool(worker.ghost) and worker.state == State.DISCONNECTED
        if worker.move is None and not dead and has != set(holds[worker.state]):
            yield f"8: {name} is {worker.state} and holds {sorted(has)}"


def _of_links(system: System, world: World, alive: Mapping[str, Process]) -> Iterator[str]:
    for link, i in system.links.items():
        here = world.links[i]
        if here.state != LinkState.UP:
            continue
        members = [n for n in sorted(here.members) if system.get(world, n).epochs[i] == here.epoch]
        for name in members:
            process = alive.get(name)
            if process is not None and process.has.get(link, here.epoch) != here.epoch:
                yield f"2: {name} holds epoch {process.has[link]} of {link}, it is {here.epoch}"
        settled = [n for n in members if system.get(world, n).move is None]
        if settled and len(members) < 2:
            yield f"9: {settled[0]} holds {link} alone"


def _of_devices(system: System, alive: Mapping[str, Process]) -> Iterator[str]:
    resources, held = system.spec.system.resources, dict[str, list[tuple[str, str]]]()
    for name, process in alive.items():
        for device in system.placement[name]:
            held.setdefault(device, []).extend((name, r) for r in process.has)
    for device in sorted(held):
        there = sorted(held[device])
        if sum(resources[r].exclusive for _, r in there) > 1:
            yield f"3: {there} on device {device}"
        if sum(system.size(n, [r]) for n, r in there) > system.spec.system.capacity:
            yield f"4: {there} on device {device}"


def _of_versions(system: System, world: World, alive: Mapping[str, Process]) -> Iterator[str]:
    """Equal versions mean equal weights, wherever nobody moves or works."""
    for link in system.spec.links.values():
        found: dict[Version, tuple[str, Process]] = {}
        for name, process in alive.items():
            worker = system.get(world, name)
            busy = worker.move or worker.jobs or process.worker.move or process.worker.jobs
            if system.names[name] not in (link.hub, link.spokes) or worker.version is None or busy:
                continue
            other, like = found.setdefault(worker.version, (name, process))
            if process.weights != like.weights:
                yield f"6: {name} and {other} are of version {worker.version}, but differ"


def exactly_once(weights: Mapping[Role, tuple[int, ...]], steps: int) -> str:
    """Each step's data was learned once, in order, by each trainer; or what was instead."""
    expected = tuple(range(1, steps + 1))
    wrong = [f"{role} learned {draws}" for role, draws in weights.items() if draws != expected]
    return "; ".join(wrong)
