"""What a sleeper still holds: measured, and told by its holder. The device here is the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from fsm_trainer.machine.errors import MemoryHeld
from fsm_trainer.training.device import SLACK, Meter

CONTEXT = 500 << 20


class Forgotten:
    """Something that keeps a tensor."""

    def __init__(self, nbytes: int) -> None:
        self.logits = torch.empty(nbytes // 4, dtype=torch.float32)


@pytest.fixture
def used() -> list[int]:
    """What the driver says that this process has: changed by a test."""
    return [CONTEXT]


@pytest.fixture
def meter(used: list[int]) -> Iterator[Meter]:
    meter = Meter("actor-0", torch.device("cpu"), lambda: used[0])
    assert meter.check(settled=True) == CONTEXT
    yield meter


def test_the_context_may_stay_and_grow_by_its_slack(meter: Meter, used: list[int]) -> None:
    used[0] = CONTEXT + SLACK
    assert meter.check(settled=True) == CONTEXT + SLACK


def test_one_byte_more_is_an_error_that_names_the_holder(meter: Meter, used: list[int]) -> None:
    keeps = Forgotten(SLACK)
    used[0] = CONTEXT + SLACK + 1
    with pytest.raises(MemoryHeld, match=f"actor-0 sleeps with {used[0]:,} bytes") as raised:
        meter.check(settled=True)
    assert f"{SLACK:,} bytes, torch.float32 [{SLACK // 4}] in " in str(raised.value)
    assert keeps.logits.numel()


def test_memory_that_no_tensor_has_is_a_librarys(used: list[int]) -> None:
    meter = Meter("actor-0", torch.device("meta"), lambda: used[0])
    meter.check(settled=True)
    used[0] = 2 * CONTEXT
    with pytest.raises(MemoryHeld, match="no tensor, so a library or a process group"):
        meter.check(settled=True)


def test_slack_does_not_add_up_over_sleeps(meter: Meter, used: list[int]) -> None:
    for used[0] in (CONTEXT + SLACK, CONTEXT + SLACK - 1):
        meter.check(settled=True)
    used[0] = CONTEXT + SLACK + 1
    with pytest.raises(MemoryHeld):
        meter.check(settled=True)


def test_what_is_seen_before_the_first_step_is_no_measure(used: list[int]) -> None:
    meter = Meter("actor-0", torch.device("meta"), lambda: used[0])
    meter.check(settled=False)
    used[0] = 2 * CONTEXT  # kernels were loaded
    assert meter.check(settled=True) == 2 * CONTEXT


def test_a_first_sleep_with_tensors_left_is_an_error_too(used: list[int]) -> None:
    keeps = Forgotten(2 * SLACK)
    used[0] = CONTEXT + 2 * SLACK
    meter = Meter("actor-0", torch.device("cpu"), lambda: used[0])
    with pytest.raises(MemoryHeld, match=f"{2 * SLACK:,} bytes, torch.float32"):
        meter.check(settled=False)
    assert keeps.logits.numel()
