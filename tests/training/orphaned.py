"""A rank that ends as if killed: ``python -m tests.training.orphaned RANK WORLD ... WHEN``."""

from __future__ import annotations

import json
import os
import time
from typing import Any

from fsm_trainer.groups.lease import registered_groups
from fsm_trainer.machine.errors import PeerLost
from tests.training.ranks import Rank, finish, make_model, train

TIMEOUT = 10.0


def scenario(rank: Rank, when: str) -> dict[str, Any]:
    """Rank 1 ends, its groups suspended where it is ``asleep``; rank 0 wakes, or trains.

    Gives what rank 0 was told, and the seconds until it was free. Over NCCL it does not survive to
    tell where it trains.
    """
    model = make_model(rank.folder / f"model-{rank.rank}")
    suspends: dict[str, Any] = {"offload": {"groups": "suspend"}, "timeout": TIMEOUT}
    trainer, told = rank.start(rank.trainer(model, **suspends)), ""
    train(trainer, 0)
    if when == "asleep":
        rank.sleep(trainer)
    kept = trainer._groups.world.live is not None
    gone = rank.folder / "gone"
    if rank.rank == 1:
        print(json.dumps(None), flush=True)
        gone.touch()
        os._exit(0)
    while not gone.exists():
        time.sleep(0.05)
    began = time.monotonic()
    try:
        rank.wake(trainer) if when == "asleep" else train(trainer, 1)
    except PeerLost as error:
        told = str(error)
    seconds, left = time.monotonic() - began, len(registered_groups())
    rank.stop(trainer)

    alone = Rank(0, 1, rank.store, rank.folder / "alone")
    alone.epoch = 1000
    trainer = alone.start(alone.trainer(model))
    train(trainer, 0)
    alone.stop(trainer)
    return {"kept": kept, "told": told, "seconds": seconds, "left": left}


if __name__ == "__main__":
    finish(scenario)
