from __future__ import annotations

import pytest

from tests.groups.world import World, shared_world


@pytest.fixture
def world() -> World:
    """Processes that all tests of groups and pushes share."""
    return shared_world()
