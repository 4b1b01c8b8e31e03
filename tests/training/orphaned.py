"""A rank that ends while its groups are suspended: ``python -m tests.training.orphaned ...``."""

from __future__ import annotations

import json
import os
import time
from typing import Any

from fsm_trainer.groups.lease import registered_groups
from fsm_trainer.machine.errors import PeerLost
from tests.training.ranks import Rank, finish, make_model, train

TIMEOUT = 10.0


def scenario(rank: Rank) -> dict[str, Any]:
    """Rank 1 is gone at once, as killed; what rank 0 was told, and seconds until it was free."""
    model = make_model(rank.folder / f"model-{rank.rank}")
    suspends: dict[str, Any] = {"offload": {"groups": "suspend"}, "timeout": TIMEOUT}
    trainer, told = rank.start(rank.trainer(model, **suspends)), ""
    train(trainer, 0)
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
        rank.wake(trainer)
    except PeerLost as error:
        told = str(error)
    rank.stop(trainer)
    seconds, left = time.monotonic() - began, len(registered_groups())

    alone = Rank(0, 1, rank.store, rank.folder / "alone")
    alone.epoch = 1000
    trainer = alone.start(alone.trainer(model))
    train(trainer, 0)
    alone.stop(trainer)
    return {"kept": kept, "told": told, "seconds": seconds, "left": left}


if __name__ == "__main__":
    finish(scenario)
