"""The package's tour runs."""

from __future__ import annotations

import doctest

import fsm_trainer.verify
from fsm_trainer.verify import check


def test_the_package_s_tour_runs() -> None:
    assert [doctest.testmod(module).failed for module in (fsm_trainer.verify, check)] == [0, 0]
