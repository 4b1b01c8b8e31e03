"""A policy-gradient loop in plain torch: trainer and sampler are processes, each behind a machine.

The trainer pushes its weights over a process group that exists only while both are connected, and
sleeps while the sampler draws actions. The sampler asks too early every time, and is refused: its
weights are torn in the first round, and stale in the others.

    python examples/embed_torch_loop.py
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch.distributions import Categorical
from torch.nn.functional import one_hot

from fsm_trainer import Effect, Lifecycle, Refused, State, System, load
from fsm_trainer.link import Address, Lease, Manifest, Membership, Receiver, Rendezvous, Sender

SYSTEM = System.of(load("disaggregated"), rollouts=1)
MEMBERS = ("actor", "rollout-0")  # by rank: who sends comes first
MANIFEST = Manifest.of(torch.nn.Linear(4, 4).state_dict().items())


class Worker:
    """The resources of one worker; each state of its machine holds some of them."""

    def __init__(self, name: str, store: Address) -> None:
        self.store, self.bank = store, dict[str, Any]()
        self.machine = Lifecycle(SYSTEM, name, dict.fromkeys(SYSTEM.spec.system.resources, self))

    def acquire(self, effect: Effect) -> None:
        if effect.resource == "weights":
            self.policy = torch.nn.Linear(4, 4)  # a sampler's are torn until they are pushed
            self.policy.load_state_dict(self.bank.get("weights", self.policy.state_dict()))
        elif effect.resource == "optimizer":
            self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=1.0)
            self.optimizer.load_state_dict(self.bank.get("optimizer", self.optimizer.state_dict()))
        elif effect.resource == "link":
            rank = MEMBERS.index(effect.worker)
            place = Membership("link", effect.epoch, rank, 2, MEMBERS, "gloo", self.store, 30.0)
            self.lease = Lease.open(place)  # waits for the other end

    def release(self, effect: Effect) -> None:
        if effect.resource == "weights":
            self.bank["weights"] = self.policy.state_dict()
            del self.policy
        elif effect.resource == "optimizer":
            self.bank["optimizer"] = self.optimizer.state_dict()
            del self.optimizer
        elif effect.resource == "link":
            self.lease.close()

    def sample(self) -> tuple[torch.Tensor, torch.Tensor]:
        seen = torch.randint(4, (512,))
        return seen, Categorical(logits=self.policy(one_hot(seen, 4).float())).sample()

    def train(self, seen: torch.Tensor, actions: torch.Tensor) -> float:
        rewards = (actions == 3 - seen).float()
        chosen = Categorical(logits=self.policy(one_hot(seen, 4).float())).log_prob(actions)
        self.optimizer.zero_grad()
        (-chosen * (rewards - rewards.mean())).mean().backward()
        self.optimizer.step()
        return rewards.mean().item()


def sampler(pipe: Connection, store: Address) -> None:
    """The second process: it serves the trainer's newest weights, or nothing."""
    torch.manual_seed(1)
    worker, receiver = Worker("rollout-0", store), Receiver()
    worker.machine.reach(State.AWAKE)
    while (world := pipe.recv()) is not None:
        try:
            with worker.machine.action("generate", world):
                pipe.send(worker.sample())
        except Refused as refused:  # the mistake: it has not got these weights yet
            print(refused, flush=True)
        worker.machine.trigger("connect")
        with worker.machine.action("push"):
            receiver.receive(
                worker.lease, MANIFEST, lambda views: lambda: worker.policy.load_state_dict(views)
            )
        worker.machine.trigger("disconnect")
        with worker.machine.action("generate"):
            pipe.send(worker.sample())
    worker.machine.reach(State.DISCONNECTED)


def trainer(pipe: Connection, store: Address) -> None:
    """The training loop; the device is free while the sampler works."""
    worker, sender = Worker("actor", store), Sender()
    actor = worker.machine
    for _ in range(6):
        actor.reach(State.AWAKE)
        pipe.send(actor.world)  # how the trainer stands: the sampler's guards read its version
        actor.trigger("connect")
        with actor.action("push") as pushed:
            weights = worker.policy.state_dict().items()
            sent = sender.send(worker.lease, weights, MANIFEST, pushed.version)
        actor.trigger("disconnect")
        actor.reach(State.SLEEPING)
        seen, actions = pipe.recv()
        actor.reach(State.AWAKE)
        with actor.action("train"):
            reward = worker.train(seen, actions)
        print(f"{sent.bytes} bytes of {pushed.version} pushed, reward {reward:.2f}", flush=True)
    actor.reach(State.SLEEPING)
    try:
        with actor.action("train"):
            worker.train(seen, actions)
    except Refused as refused:  # the mistake: nothing that it needs is on the device
        print(refused)
    pipe.send(None)


def main() -> None:
    torch.manual_seed(0)
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    with Rendezvous.bind() as rendezvous:
        process = spawn.Process(target=sampler, args=(there, rendezvous.address), daemon=True)
        process.start()
        there.close()  # so that the end of the other process is seen here
        trainer(here, rendezvous.address)
        process.join(30)


if __name__ == "__main__":
    main()
