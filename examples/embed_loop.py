"""A loop in torch whose model and optimizer exist only while a machine says so.

python examples/embed_loop.py
"""

from __future__ import annotations

from typing import Any

import torch

from fsm_trainer import Effect, Lifecycle, State, System, load


class Trainer:
    """Fits y = 3x + 1; asleep, all that it knows is in its bank."""

    def __init__(self) -> None:
        self.bank: dict[str, Any] = {}

    def acquire(self, effect: Effect) -> None:
        if effect.resource == "weights":
            self.model = torch.nn.Linear(1, 1)
            self.model.load_state_dict(self.bank.get("weights", self.model.state_dict()))
        elif effect.resource == "optimizer":
            self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
            self.optimizer.load_state_dict(self.bank.get("optimizer", self.optimizer.state_dict()))

    def release(self, effect: Effect) -> None:
        if effect.resource == "weights":
            self.bank["weights"] = self.model.state_dict()
            del self.model
        elif effect.resource == "optimizer":
            self.bank["optimizer"] = self.optimizer.state_dict()
            del self.optimizer

    def step(self) -> float:
        x = torch.linspace(-1, 1, 32)[:, None]
        loss = torch.nn.functional.mse_loss(self.model(x), 3 * x + 1)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()


def main() -> list[float]:
    """Train in three bursts with sleep between; give the loss at the end of each."""
    trainer, losses = Trainer(), []
    system = System.of(load("disaggregated"), rollouts=1)
    actor = Lifecycle(system, "actor", dict.fromkeys(system.spec.system.resources, trainer))
    for _ in range(3):
        actor.reach(State.AWAKE)
        for _ in range(50):
            with actor.action("train"):
                loss = trainer.step()
        actor.reach(State.SLEEPING)
        losses.append(loss)
        print(f"{actor.state} at version {actor.worker.version}, loss {loss:.6f}")
    actor.reach(State.DISCONNECTED)
    return losses


if __name__ == "__main__":
    main()
