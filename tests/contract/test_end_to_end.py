"""A whole run with real SGLang engines: PPO with a critic, two engines, their weights pushed."""

from __future__ import annotations

import json

import psutil
import pytest

from tests.contract.conftest import HERE, ON_CPU
from tests.runs.training import ROOT, SMALL, Trained, leftovers, running, trace

pytestmark = [
    pytest.mark.skipif(not HERE, reason="SGLang isn't installed: tox run -e sglang"),
    pytest.mark.timeout(600),
]


@pytest.fixture(scope="module")
def before() -> set[int]:
    return {process.pid for process in psutil.process_iter()}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, before: set[int]) -> Trained:
    settings = [
        *SMALL,
        "steps=2",
        "cluster.gpus=0",
        "rollout.engine.device=cpu",
        "rollout.engine.memory_fraction=null",
        f"rollout.engine.arguments={json.dumps(ON_CPU)}",
    ]
    sets = [part for text in settings for part in ("--set", text)]
    folder = tmp_path_factory.mktemp("trained") / "run"
    with running(folder, *sets, config=ROOT / "examples" / "sglang.yaml") as run:
        return run.wait(500)


def test_it_trains_and_conforms(trained: Trained) -> None:
    assert trained.exit == 0, trained.output
    traced = trace(trained.folder)
    assert traced.returncode == 0, traced.stdout + traced.stderr
    assert [row.step for row in trained.metrics if row.phase_seconds] == [1, 2]


def test_every_sample_was_drawn_from_the_weights_that_train(trained: Trained) -> None:
    for row in trained.metrics:
        if row.phase_seconds:
            # Both sides compute in float32: see test_log_probs_are_those_of_transformers.
            gap = (row.__pydantic_extra__ or {})["check/mismatch_max"]
            assert gap is not None and 0 < gap < 1e-4


def test_nothing_of_it_is_left(trained: Trained, before: set[int]) -> None:
    assert leftovers(before) == []
