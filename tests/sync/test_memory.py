"""What may go wrong when memory is mapped from another process, without a device."""

from __future__ import annotations

import os

import pytest
import torch

from fsm_trainer.machine.errors import CapabilityMissing
from fsm_trainer.sync.memory import attach, shared

CPU = torch.device("cpu")


def test_both_ends_see_one_memory_that_has_no_name_and_no_open_file_afterwards() -> None:
    files = len(os.listdir("/proc/self/fd"))
    with shared(4096, CPU) as (memory, offer):
        other = attach(offer, CPU)

    memory[17] = 5

    assert other[17] == 5
    assert len(os.listdir("/proc/self/fd")) == files


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"machine": "another"}, "another machine"),
        ({"name": "fsm-trainer-other"}, "something else"),
        ({"at": "/proc/self/fd/9999"}, "No such file"),
        ({"at": "/proc/self/exe"}, "something else"),
        ({"handle": "00" * 64}, "on a CUDA device there"),
    ],
)
def test_memory_that_is_not_the_senders_is_refused(changes: dict[str, str], said: str) -> None:
    with shared(4096, CPU) as (_, offer), pytest.raises(CapabilityMissing, match=said):
        attach(offer | changes, CPU)


def test_an_offer_is_refused_when_it_has_ended() -> None:
    with shared(4096, CPU) as (_, offer):
        pass

    with pytest.raises(CapabilityMissing, match=r"set link\.kind"):
        attach(offer, CPU)
