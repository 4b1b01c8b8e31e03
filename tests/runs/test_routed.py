"""A whole run of a mixture of experts under routing replay, with the embedded engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runs.training import QUICKSTART, SMALL, Trained, running, trace, train

MOE = (
    "model.tiny={hidden: 32, intermediate: 32, layers: 2, heads: 2, kv_heads: 1, experts: 8}",
    "rollout.engine.routing_replay=true",
    "rollout.workers=1",
    "actor.activation_checkpointing=true",
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return train(tmp_path_factory.mktemp("trained") / "run", *MOE, "steps=3")


def test_it_trains_and_conforms(trained: Trained) -> None:
    traced = trace(trained.folder)
    assert traced.returncode == 0, traced.stdout + traced.stderr
    assert [row.step for row in trained.metrics if row.phase_seconds] == [1, 2, 3]


def test_its_checks_pass_under_the_same_routes(trained: Trained) -> None:
    first, *later = [row.__pydantic_extra__ or {} for row in trained.metrics if row.phase_seconds]
    assert (first["check/zero_kl"], first["check/zero_kl_max"]) == (1.0, 0.0)
    assert first["check/free_routing_kl"] == 0.0
    for numbers in (first, *later):
        # Both sides compute in float32, on a CPU, with the same experts.
        assert 0 <= numbers["check/mismatch_max"] < 1e-5
        assert 0 <= numbers["check/route_disagreement"] < 0.01
    for row in (row for row in trained.metrics if row.phase_seconds and row.step > 1):
        assert row.train_kl is not None and row.train_kl > 0, "nothing was learned"


@pytest.mark.nightly
def test_routes_that_a_hook_lost_stop_the_run_before_any_update(tmp_path: Path) -> None:
    lost = "rollout.generate=tests.runs.unrouted:generate"
    sets = [
        part
        for text in (*SMALL, *MOE, lost, "steps=1", "warmup.steps=0")
        for part in ("--set", text)
    ]
    with running(tmp_path / "run", *sets, config=QUICKSTART) as run:
        ended = run.wait()
    assert ended.exit != 0
    assert "its routes are missing" in ended.output and "trajectory of sample" in ended.output
    assert "critic: values failed" in ended.output, "the critic would have been the first to learn"
    assert not [row for row in ended.metrics if row.phase_seconds]
