from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.groups.world import World


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """Processes that are shared by a module's tests."""
    world = World()
    yield world
    world.close()
