"""Processes in a real Ray: what is left of those that never come up."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import psutil
import pytest
import ray

from fsm_trainer.runtime import cluster as cluster_module
from fsm_trainer.runtime.cluster import Cluster, Recipe
from fsm_trainer.runtime.config import ClusterConfig


class Never:
    """A host that is never done, and says who it is first."""

    prepare = staticmethod(lambda: None)

    def __init__(self, file: Path) -> None:
        file.write_text(str(psutil.Process().pid))
        time.sleep(600)


def alive(pid: int) -> bool:
    """Whether there is such a process, and not only for Ray to reap."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with closing(Cluster(ClusterConfig(), [{"CPU": 1.0}], tmp_path)) as made:
        yield made


def test_a_process_whose_host_is_never_done_is_seen_dead(cluster: Cluster, tmp_path: Path) -> None:
    file = tmp_path / "pid"
    recipe = Recipe("never", f"{__name__}:Never", {"file": file}, bundle=0)

    async def give_up() -> None:
        await cluster.reserve(60)
        cluster.start(recipe)
        setup = asyncio.create_task(cluster.setup(recipe, 60))
        while not setup.done() and not (file.exists() and file.read_text()):
            await asyncio.sleep(0.05)
        assert setup.cancel(), setup.exception()
        assert alive(int(file.read_text()))
        await cluster.kill("never", 10)

    asyncio.run(give_up())
    assert not alive(int(file.read_text()))


def test_a_ray_that_does_not_start_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**settings: object) -> None:
        assert Path(str(settings["_temp_dir"])).is_dir()
        raise ConnectionError("no Ray today")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(ray, "init", refuse)
    with pytest.raises(ConnectionError):
        Cluster(ClusterConfig(), [{"CPU": 1.0}], tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_ray_that_reserves_nothing_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object, **settings: object) -> None:
        assert ray.is_initialized() and list(folders.iterdir())
        raise ValueError("no bundles today")

    # Ray's sockets lie in there: their paths must be short.
    with tempfile.TemporaryDirectory(prefix="fsm-test-") as short:
        folders = Path(short)
        monkeypatch.setattr(tempfile, "tempdir", short)
        monkeypatch.setattr(cluster_module, "placement_group", refuse)
        with pytest.raises(ValueError, match="no bundles today"):
            Cluster(ClusterConfig(), [{"CPU": 1.0}], tmp_path)
        assert not ray.is_initialized()
        assert list(folders.iterdir()) == []
