from __future__ import annotations

import pytest

from fsm_trainer.testing.processes import Processes, shared


@pytest.fixture
def world() -> Processes:
    """Processes that all tests of groups and pushes share."""
    return shared()
