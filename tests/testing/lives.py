"""Workers with real weights, in processes of their own, that push over a real lease."""

from __future__ import annotations

import functools

import torch

from fsm_trainer.groups.lease import Lease
from fsm_trainer.groups.membership import Membership
from fsm_trainer.groups.rendezvous import Address
from fsm_trainer.machine.events import Effect
from fsm_trainer.machine.lifecycle import Resource
from fsm_trainer.machine.spec import load
from fsm_trainer.machine.world import System
from fsm_trainer.sync.buckets import copier
from fsm_trainer.sync.checksums import checksums
from fsm_trainer.sync.manifest import Manifest, TensorSpec
from fsm_trainer.sync.push import Receiver, Sender
from fsm_trainer.testing import LifecycleWorker, Order
from fsm_trainer.testing.leaks import MEMORY, Footprint
from fsm_trainer.workers.effects import Effects

SPECS = tuple(TensorSpec(f"layer.{i}", "float32", (64, 64)) for i in range(8))
# Groups, children, threads, descriptors, sockets and bytes that a process keeps of its first group:
# gloo's device (a thread, three descriptors), two clients of the store; the allocator's own.
KEEPS = Footprint(0, 0, 2, 7, 3, MEMORY)
BUCKET_BYTES = 64 * 1024


@functools.cache
def system(schedule: str, rollouts: int) -> System:
    return System.of(load(schedule), rollouts)


class Life:
    """What one worker holds: tensors, and a lease on the link."""

    def __init__(
        self,
        system: System,
        name: str,
        link: str,
        store: Address,
        timeout: float,
        specs: tuple[TensorSpec, ...],
    ) -> None:
        self.system, self.name, self.place = system, name, (link, store, timeout)
        self.manifest = Manifest(specs, bucket_bytes=BUCKET_BYTES)
        self.bank = {spec.name: torch.zeros(spec.shape) for spec in specs}
        self.tensors: dict[str, torch.Tensor] = {}
        self.sender, self.receiver = Sender(), Receiver()

    def resources(self) -> dict[str, Resource]:
        return {
            "weights": Effects(self.load, self.unload),
            "link": Effects(self.join, lambda effect: self.lease.close()),
        }

    def load(self, effect: Effect) -> None:
        if self.name == "actor":
            self.tensors = {name: tensor.clone() for name, tensor in self.bank.items()}
        else:
            self.tensors = {
                spec.name: torch.full(spec.shape, torch.nan) for spec in self.manifest.tensors
            }

    def unload(self, effect: Effect) -> None:
        if self.name == "actor":
            self.bank = self.tensors
        self.tensors = {}

    def join(self, effect: Effect) -> None:
        link, store, timeout = self.place
        members = tuple(n for n in self.system.names if n != "critic")
        rank = members.index(self.name)
        self.lease = Lease.open(
            Membership(link, effect.epoch, rank, len(members), members, "gloo", store, timeout)
        )

    def train(self, order: Order) -> None:
        for tensor in self.tensors.values():
            tensor.add_(torch.rand(tensor.shape))

    def push(self, order: Order) -> None:
        if self.name == "actor":
            version = order.world.workers[0].version
            assert version is not None
            self.sender.send(self.lease, self.tensors.items(), self.manifest, version)
        else:
            self.receiver.receive(
                self.lease,
                self.manifest,
                lambda views: copier((self.tensors[name], view) for name, view in views.items()),
            )

    def seen(self) -> object:
        return dict(checksums(self.tensors.items()))


def make(
    schedule: str,
    rollouts: int,
    name: str,
    link: str,
    store: Address,
    timeout: float,
    specs: tuple[TensorSpec, ...] = SPECS,
) -> LifecycleWorker:
    tables = system(schedule, rollouts)
    life = Life(tables, name, link, store, timeout, specs)
    work = {"train": life.train, "warm_up": life.train, "push": life.push}
    return LifecycleWorker(tables, name, life.resources(), work=work, weights=life.seen)
