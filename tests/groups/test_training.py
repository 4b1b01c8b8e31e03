"""What all ranks of a trainer do together, or none; whole trainers are in tests/training."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from fsm_trainer.groups.rendezvous import Address
from fsm_trainer.groups.training import TrainingGroups
from fsm_trainer.machine.errors import PeerLost


class Silent:
    """A meeting to which the other rank never says anything."""

    def __init__(self) -> None:
        self.keys: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self.keys[key] = value

    def wait(self, keys: Any, timeout: Any) -> None:
        raise dist.DistStoreError(f"nobody set {keys} in {timeout}")


def test_who_waited_in_vain_for_the_others_has_failed_and_says_so() -> None:
    groups = TrainingGroups(Address("127.0.0.1", 1), "actor", 0, 2, 5.0, "gloo")
    groups._meeting = silent = Silent()

    with pytest.raises(PeerLost, match="lost a peer in start"), groups.together("start"):
        pass

    # A slower one reads it, and doesn't go on alone.
    assert silent.keys == {"start/0": "failed"}
