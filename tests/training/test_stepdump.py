"""A step that was dumped, computed again: equal if nothing was touched, else what was is named."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from fsm_trainer.algorithms.config import PPOConfig
from fsm_trainer.cli.main import app
from fsm_trainer.groups.rendezvous import Rendezvous
from fsm_trainer.machine.errors import ConfigError
from fsm_trainer.training import checkpoint
from fsm_trainer.training.config import OffloadConfig
from fsm_trainer.training.stepdump import (
    BEFORE,
    TABLES,
    TOLD,
    Figure,
    Replayed,
    dumping,
    read,
    replay,
)
from tests.training.dumping import dumped
from tests.training.ranks import Rank, run_ranks
from tests.training.updates import models_in, ragged

WEIGHT = "model.layers.1.mlp.up_proj.weight"


def again(folder: Path) -> Replayed:
    told = read(folder)
    return replay(folder, told, PPOConfig(**told.algorithm))


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dump of a second step: moments are there, and the actor has left its reference."""
    folder = tmp_path_factory.mktemp("dump")
    models = models_in(folder / "models")
    with Rendezvous.bind() as rendezvous:
        rank = Rank(0, 1, rendezvous.address, folder)
        dumped(rank, folder / "step" / "actor", models["policy"], "actor")
        dumped(rank, folder / "step" / "critic", models["value"], "critic", zero_stage=0)
        half = folder / "half" / "actor"
        dumped(rank, half, models["policy"], "actor", dtype="bfloat16")
        dumped(rank, folder / "reward" / "actor", models["policy"], "actor", "reward")
        dumped(rank, folder / "reward" / "critic", models["value"], "critic", "reward")
    return folder / "step"


DUMPS = ["step/actor", "step/critic", "half/actor", "reward/actor", "reward/critic"]


@pytest.mark.parametrize("name", DUMPS)
def test_a_dump_replays_to_the_bit(step: Path, name: str) -> None:
    found = again(step.parent / name)

    assert (found.changed, found.stopped, found.wrong) == ([], None, False)
    assert found.exact == len(found.figures) > 5
    norm = next(figure for figure in found.figures if figure.name.endswith("/grad_norm"))
    assert norm.was > 0


def test_a_tampered_advantage_is_named_with_the_figures_that_it_changes(
    step: Path, tmp_path: Path
) -> None:
    folder = copied(step / "actor", tmp_path)
    tables = torch.load(folder / TABLES)
    tables["advantages"][tables["loss_mask"] != 0] *= -1  # whitened: a factor would say nothing
    torch.save(tables, folder / TABLES)

    found = again(folder)

    assert found.changed == ["advantages"]
    differs = {figure.name for figure in found.figures if figure.differs}
    assert {"actor/loss", "actor/policy_loss", "actor/grad_norm"} <= differs
    assert not differs & {"train/kl", "rollout/length_mean", "actor/entropy"}


def test_a_tampered_weight_is_named_with_the_figures_that_it_changes(
    step: Path, tmp_path: Path
) -> None:
    folder = copied(step / "actor", tmp_path)
    file = folder / BEFORE / "model.safetensors"
    weights = load_file(file)
    weights[WEIGHT][0, 0] += 0.5
    save_file(weights, file, {"format": "pt"})

    found = again(folder)

    assert found.changed == [WEIGHT]
    assert "actor/loss" in {figure.name for figure in found.figures if figure.differs}


def tampered_advantages(folder: Path) -> None:
    tables = torch.load(folder / TABLES)
    tables["advantages"][tables["loss_mask"] != 0] *= -1
    torch.save(tables, folder / TABLES)


def tampered_weight(folder: Path) -> None:
    """A matrix is scaled by two, as by a merge that is done twice."""
    file = folder / BEFORE / "model.safetensors"
    weights = load_file(file)
    weights["lm_head.weight"] *= 2
    save_file(weights, file, {"format": "pt"})


@pytest.mark.parametrize(
    ("tamper", "shows"),
    [
        (tampered_advantages, {"actor/advantage_mean"}),
        (tampered_weight, {"train/kl"}),
    ],
)
def test_in_bfloat16_figures_alone_show_what_was_tampered_with(
    step: Path, tmp_path: Path, tamper: Callable[[Path], None], shows: set[str]
) -> None:
    folder = copied(step.parent / "half" / "actor", tmp_path)
    tamper(folder)

    found = again(folder)

    assert shows <= {figure.name for figure in found.figures if figure.differs}


def test_settings_groups_and_ids_are_named_where_they_were_changed(
    step: Path, tmp_path: Path
) -> None:
    folder = copied(step / "actor", tmp_path)
    tables = torch.load(folder / TABLES)
    tables["groups"] = ("other", *tables["groups"][1:])
    torch.save(tables, folder / TABLES)
    told = json.loads((folder / TOLD).read_text())
    told["seed"] += 1
    told["algorithm"]["clip"] = 0.3
    told["trainer"]["betas"][1] = 0.99
    (folder / TOLD).write_text(json.dumps(told))

    assert set(again(folder).changed) == {"groups", "seed", "algorithm.clip", "trainer.betas"}


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_what_was_scored_before_is_read_from_the_dump(
    step: Path, tmp_path: Path, role: str
) -> None:
    folder = copied(step.parent / "reward" / role, tmp_path)
    tables = torch.load(folder / TABLES)
    tables["old"] -= 1.0
    torch.save(tables, folder / TABLES)

    found = again(folder)

    assert found.changed == ["old"]
    off = {figure.name: figure.now - figure.was for figure in found.figures if figure.differs}
    if role == "actor":
        assert off["train/kl_k1"] == pytest.approx(-1.0)
    else:
        assert off["critic/return_mean"] != 0.0


@pytest.mark.parametrize("target", ["offload_states", "memory_saver"])
def test_a_dump_of_a_run_that_offloads_from_a_gpu_replays_without_one(
    step: Path, tmp_path: Path, target: str
) -> None:
    folder = copied(step / "actor", tmp_path)
    told = read(folder)
    trainer = told.trainer.model_copy(update={"offload": OffloadConfig(target=target)})

    found = replay(
        folder, told.model_copy(update={"trainer": trainer}), PPOConfig(**told.algorithm)
    )

    assert (found.changed, found.stopped) == (["trainer.offload"], None)
    assert found.exact == len(found.figures)


def test_a_replay_that_raises_leaves_no_group_open(
    step: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr("fsm_trainer.training.stepdump.actor_update", broken)
    with pytest.raises(RuntimeError, match="out of memory"):
        again(step / "actor")

    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_looks_at_no_file_but_its_own(step: Path, tmp_path: Path, rank: int) -> None:
    told = read(step / "actor").model_copy(update={"ranks": 2})
    own = checkpoint.path(tmp_path / BEFORE, rank)

    def save(folder: Path) -> None:
        own.parent.mkdir(parents=True)
        own.write_bytes(b"what this rank holds")

    trainer: Any = SimpleNamespace(rank=rank, save=save, named_weights=lambda: iter(()))
    with dumping(tmp_path, trainer, told, ragged(), None, None):
        pass

    assert {file.name for file in own.parent.iterdir()} == {own.name, f"rank-{rank}.print"}


def test_a_tampered_optimizer_and_a_tampered_figure_are_named(step: Path, tmp_path: Path) -> None:
    folder = copied(step / "actor", tmp_path)
    file = folder / BEFORE / "trainer" / "rank-0.pt"
    shard = torch.load(file)
    shard["optimizer"][0]["exp_avg"] *= 1.5
    torch.save(shard, file)
    told = json.loads((folder / TOLD).read_text())
    told["metrics"]["train/kl"] += 1.0
    (folder / TOLD).write_text(json.dumps(told))

    found = again(folder)

    assert found.changed == ["optimizer and reference of rank 0"]
    (kl,) = [figure for figure in found.figures if figure.name == "train/kl"]
    assert kl.differs and kl.was == pytest.approx(kl.now + 1.0)
    # The moments move the second minibatch, not the first.
    assert any(f.differs for f in found.figures if f.name == "actor/ratio_max")


def test_an_update_that_a_check_stopped_is_stopped_again_for_the_same_reason(
    step: Path, tmp_path: Path
) -> None:
    folder = copied(step / "actor", tmp_path)
    told = json.loads((folder / TOLD).read_text())
    # A second step that takes itself for the first: its actor has left its reference.
    told |= {"first": True, "metrics": None}
    (folder / TOLD).write_text(json.dumps(told))

    found = again(folder)

    assert found.stopped is not None and found.wrong and found.again
    assert "the first step's actor is not its reference" in found.stopped


def test_an_update_that_stops_here_alone_is_not_said_to_stop_again(
    step: Path, tmp_path: Path
) -> None:
    folder = copied(step / "actor", tmp_path)
    told = json.loads((folder / TOLD).read_text())
    (folder / TOLD).write_text(json.dumps(told | {"first": True}))

    result = CliRunner().invoke(app, ["replay-step", str(tmp_path)])

    assert result.exit_code == 1
    assert "actor: stopped, which it did not in the run: " in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("was", "now", "allowed", "differs", "untold"),
    [
        (1.0, 1.0, 9.0, False, False),
        (1.0, 0.9, 0.2, False, False),
        (1.0, 0.0, 0.9, True, False),
        (1.0, 0.0, 1.0, False, True),
        (0.0, 1e-3, 1e-2, False, True),
        (math.nan, math.nan, 1.0, False, False),
        (1.0, math.nan, 9.0, True, False),
    ],
)
def test_a_figure_that_rounding_could_make_anything_is_not_called_equal(
    was: float, now: float, allowed: float, differs: bool, untold: bool
) -> None:
    figure = Figure("one", was, now, allowed)

    assert (figure.differs, figure.untold) == (differs, untold)


@pytest.mark.parametrize(
    "stage", ["1", *(pytest.param(n, marks=pytest.mark.nightly) for n in ("0", "2"))]
)
def test_what_two_ranks_computed_one_computes_again(stage: str, tmp_path: Path) -> None:
    run_ranks(2, tmp_path, "tests.training.dumping", stage)
    folder = tmp_path / f"stage-{stage}" / "actor"

    found = again(folder)
    checkpoint.path(folder / BEFORE, 1).with_suffix(".print").write_text("another")
    other = again(folder)

    assert other.changed == ["optimizer and reference of rank 1"]
    assert (found.changed, found.stopped) == ([], None)
    assert [figure for figure in found.figures if figure.differs] == []
    # Sums are taken in another order: some of it can't be equal to the bit.
    assert 0 < found.exact < len(found.figures)


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # the command sets it: put it back afterwards
    return lambda *words: CliRunner().invoke(app, ["replay-step", *map(str, words)])


def test_the_command_says_what_differs_and_exits_by_it(
    step: Path, tmp_path: Path, call: Callable[..., Any]
) -> None:
    well = call(step)
    broken = tmp_path / "step"
    shutil.copytree(step, broken)
    told = json.loads((broken / "critic" / TOLD).read_text())
    told["metrics"]["critic/loss"] *= 2
    (broken / "critic" / TOLD).write_text(json.dumps(told))
    wrong, for_programs = call(broken), call(broken, "--json")

    assert (well.exit_code, wrong.exit_code, for_programs.exit_code) == (0, 1, 1)
    assert "critic: critic/loss was " in wrong.stdout
    found = json.loads(for_programs.stdout)
    assert found["ok"] is False
    assert [one["name"] for one in found["roles"]["critic"]["differs"]] == ["critic/loss"]
    assert found["roles"]["actor"]["differs"] == found["roles"]["actor"]["changed"] == []


def test_a_folder_that_is_no_dump_is_the_users_mistake(
    tmp_path: Path, call: Callable[..., Any]
) -> None:
    assert call(tmp_path).exit_code == 2
    with pytest.raises(ConfigError, match=r"is no role's dump"):
        read(tmp_path)


def test_tables_that_were_cut_are_named(step: Path, tmp_path: Path) -> None:
    folder = copied(step / "actor", tmp_path)
    content = (folder / TABLES).read_bytes()
    (folder / TABLES).write_bytes(content[: len(content) // 2])

    with pytest.raises(ConfigError, match=r"tables\.pt can't be read"):
        again(folder)


def copied(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / folder.name))
