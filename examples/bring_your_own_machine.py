"""A role of one's own: a reward model, from a page of YAML to a worker that sleeps and wakes.

`examples/reward_model/` holds a table of one's own, `reward_model.yaml`, and a schedule that uses
it; the other files are links to the shipped tables. This script checks the whole, draws the new
machine, and runs it: the reward model shares the actor's device, so only one of them is awake.

    python examples/bring_your_own_machine.py
    fsm-train plan --states examples/reward_model --schedule rewarded
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from fsm_trainer import Effect, Lifecycle, Refused, State, System, load

STATES = Path(__file__).with_name("reward_model")


class RewardModel:
    """Likes long answers; asleep, its weights lie in its bank."""

    def acquire(self, effect: Effect) -> None:
        if effect.resource == "bank":  # yours: read a checkpoint
            self.bank = {"weight": torch.tensor([[0.0, 1.0]]), "bias": torch.tensor([-2.0])}
        else:  # yours: .to("cuda")
            self.model = torch.nn.Linear(2, 1)
            self.model.load_state_dict(self.bank)

    def release(self, effect: Effect) -> None:
        delattr(self, "bank" if effect.resource == "bank" else "model")

    def score(self, answer: str) -> float:
        return self.model(torch.tensor([1.0, len(answer)])).item()


class Nothing:
    """Stands for what the actor holds."""

    def acquire(self, effect: Effect) -> None: ...

    def release(self, effect: Effect) -> None: ...


def fsm_train(*words: str | Path) -> str:
    """What a command of fsm-train prints."""
    command = [sys.executable, "-m", "fsm_trainer.cli.main", *map(str, words)]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=300).stdout


def check(states: Path) -> None:
    print(fsm_train("check", "--states", states, "--rollouts", "1", "--driven", "1"))


def run() -> None:
    system = System.of(load("rewarded", STATES), rollouts=1)
    actor = Lifecycle(system, "actor", dict.fromkeys(system.spec.system.resources, Nothing()))
    model = RewardModel()
    reward = Lifecycle(system, "reward_model", {"bank": model, "weights": model})
    actor.reach(State.AWAKE)
    reward.trigger("start")
    reward.tell(actor.world)  # what the others hold; between processes, send it
    try:
        reward.trigger("wake")
    except Refused as refused:
        print(refused)
    actor.reach(State.SLEEPING)
    reward.tell(actor.world)
    reward.trigger("wake")
    with reward.action("score"):
        print(f"reward_model is {reward.state}: 'seven' scores {model.score('seven'):+.1f}")
    reward.trigger("sleep")
    try:
        with reward.action("score"):
            model.score("never")
    except Refused as refused:
        print(refused)


def main() -> None:
    print("-- every state that the tables allow, with a fault between any two events")
    check(STATES)
    print("-- the same without the guard of `wake`: a mistake in the table")
    with tempfile.TemporaryDirectory() as folder:
        wrong = Path(shutil.copytree(STATES, f"{folder}/states"))
        table = wrong / "reward_model.yaml"
        table.write_text(table.read_text().replace(", guard: fits(device)", ""))
        check(wrong)
    print("-- the machine, for Mermaid")
    print(fsm_train("graph", "--states", STATES, "--schedule", "rewarded", "--role", STATES.name))
    print("-- and at work")
    run()


if __name__ == "__main__":
    main()
