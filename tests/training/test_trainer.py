"""One trainer rank, in this process, over a real group of one."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from fsm_trainer.algorithms.config import PPOConfig
from fsm_trainer.groups.lease import registered_groups
from fsm_trainer.groups.rendezvous import Address, Rendezvous
from fsm_trainer.machine.errors import ConfigError, PeerLost, Refused, SelfCheckFailed
from fsm_trainer.training.checkpoint import Origin
from fsm_trainer.training.checkpoint import path as shard_path
from fsm_trainer.training.config import OffloadConfig, ScheduleConfig, Verdict
from fsm_trainer.training.port import ModelPort
from fsm_trainer.training.ppo import actor_update
from fsm_trainer.training.trainer import ModelTrainer
from tests.training.ranks import (
    CYCLES,
    STEPS,
    VOCABULARY,
    Rank,
    checksum,
    make_batch,
    make_model,
    policy_loss,
    sleeping_changes_nothing,
    train,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture(scope="module")
def store() -> Iterator[Address]:
    with Rendezvous.bind() as rendezvous:
        yield rendezvous.address


_epochs = iter(range(0, 1_000_000, 1000))


@pytest.fixture
def rank(store: Address, tmp_path: Path) -> Iterator[Rank]:
    here = Rank(0, 1, store, tmp_path)
    here.epoch = next(_epochs)
    made: list[ModelTrainer] = []
    build = here.trainer

    def remembered(*args: Any, **kwargs: Any) -> ModelTrainer:
        made.append(build(*args, **kwargs))
        return made[-1]

    here.trainer = remembered  # type: ignore[method-assign]
    yield here
    for trainer in made:
        if "bank" in trainer.held:
            here.stop(trainer)
    assert registered_groups() == ()


def likelihood(logits: torch.Tensor, tokens: torch.Tensor, temperature: float) -> torch.Tensor:
    """An independent log p(tokens[t] | tokens[<t]): torch's own categorical distribution."""
    return torch.distributions.Categorical(logits=logits / temperature).log_prob(tokens[:, 1:])


def test_a_trainer_is_a_model_port(rank: Rank, model: Path) -> None:
    port: ModelPort = rank.trainer(model)
    assert (port.rank, port.world_size, port.micro_batch) == (0, 1, 64)


def test_logprobs_and_entropy_are_those_of_the_model_in_the_folder(rank: Rank, model: Path) -> None:
    trainer = rank.start(rank.trainer(model))
    batch, plain = make_batch(1), AutoModelForCausalLM.from_pretrained(model)

    with torch.no_grad():
        scores = trainer.logprobs(batch, 0.7, with_entropy=True)
        logits = plain(input_ids=batch.tokens).logits[:, :-1]

    torch.testing.assert_close(scores.logprobs[:, 1:], likelihood(logits, batch.tokens, 0.7))
    expected = torch.distributions.Categorical(logits=logits / 0.7).entropy()
    assert scores.entropy is not None
    torch.testing.assert_close(scores.entropy[:, 1:], expected)
    assert scores.logprobs[:, 0].eq(0).all() and scores.entropy[:, 0].eq(0).all()


def test_padding_on_the_right_changes_no_earlier_token(rank: Rank, model: Path) -> None:
    trainer = rank.start(rank.trainer(model))
    batch = make_batch(1)
    with torch.no_grad():
        whole = trainer.logprobs(batch, 1.0).logprobs
        batch.tokens[:, 6:] = 0
        padded = trainer.logprobs(batch, 1.0).logprobs
    torch.testing.assert_close(padded[:, :6], whole[:, :6])
    assert not torch.equal(padded[:, 6:], whole[:, 6:])


@pytest.mark.parametrize(("stage", "dtype"), [(0, "bfloat16"), (1, "bfloat16")])
def test_neither_sleep_nor_resume_change_losses_or_weights(
    rank: Rank, stage: int, dtype: str
) -> None:
    result = sleeping_changes_nothing(rank, stage, dtype)
    assert result["slept"] == result["awake"]
    assert result["resumed"] == result["returned"] == result["awake"][1]
    assert not result["files"]
    assert result["asleep"] == [[False, 0]] * STEPS * CYCLES


def test_offloading_to_host_memory_changes_nothing_either(rank: Rank, model: Path) -> None:
    trainer = rank.start(rank.trainer(model, offload=OffloadConfig(target="host")))
    train(trainer, 0)
    before = checksum(trainer)
    rank.sleep(trainer)
    rank.wake(trainer)
    assert checksum(trainer) == before


def test_recomputing_activations_changes_nothing_but_memory(rank: Rank, model: Path) -> None:
    outcomes = []
    for recompute in (False, True):
        trainer = rank.start(rank.trainer(model, activation_checkpointing=recompute))
        assert trainer._module.is_gradient_checkpointing == recompute
        losses = train(trainer, 0) + train(trainer, 1)
        outcomes.append((losses, checksum(trainer)))
        rank.stop(trainer)
    assert outcomes[0] == outcomes[1]


def test_the_optimizer_alone_can_leave_while_groups_and_weights_stay(
    rank: Rank, model: Path
) -> None:
    straight = rank.start(rank.trainer(model))
    for step in range(2):
        train(straight, step)
    expected = checksum(straight)
    rank.stop(straight)

    trainer = rank.start(rank.trainer(model))
    train(trainer, 0)
    trainer.release("optimizer")
    pushed = dict(trainer.named_weights())
    with pytest.raises(Refused, match="optimizer is not held"):
        trainer.step()
    rank.sleep(trainer)
    rank.wake(trainer)
    train(trainer, 1)

    assert len(pushed) > 10
    assert checksum(trainer) == expected


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_unfinished_step_leaves_nothing_behind_after_a_sleep(
    rank: Rank, model: Path, stage: int
) -> None:
    straight = rank.start(rank.trainer(model, zero_stage=stage))
    train(straight, 0)
    train(straight, 1)
    expected = checksum(straight)
    rank.stop(straight)

    trainer = rank.start(rank.trainer(model, zero_stage=stage))
    train(trainer, 0)
    trainer.backward(policy_loss(trainer, 7, 0, 0), last=False)
    rank.sleep(trainer)
    rank.wake(trainer)
    train(trainer, 1)

    assert checksum(trainer) == expected


def test_the_reference_stays_what_it_was_while_the_weights_move(rank: Rank, model: Path) -> None:
    trainer = rank.start(rank.trainer(model))
    batch = make_batch(5)
    with torch.no_grad():
        frozen = trainer.logprobs(batch, 1.0).logprobs
    trainer.snapshot_reference()
    train(trainer, 0)
    rank.sleep(trainer)
    rank.wake(trainer)
    before = checksum(trainer)

    with torch.no_grad():
        reference = trainer.logprobs(batch, 1.0, bank="reference").logprobs
        live = trainer.logprobs(batch, 1.0).logprobs

    assert torch.equal(reference, frozen)
    assert not torch.equal(live, frozen)
    assert checksum(trainer) == before


def test_a_reference_in_place_at_sleep_is_swapped_out_first(rank: Rank, model: Path) -> None:
    trainer = rank.start(rank.trainer(model))
    trainer.snapshot_reference()
    train(trainer, 0)
    before = checksum(trainer)
    with torch.no_grad():
        trainer.logprobs(make_batch(5), 1.0, bank="reference")
    rank.sleep(trainer)
    rank.wake(trainer)
    assert checksum(trainer) == before


@pytest.mark.parametrize("name", ["reference", "weights"])
def test_a_bank_whose_bytes_changed_is_found_at_the_swap(
    rank: Rank, model: Path, name: str
) -> None:
    trainer = rank.start(rank.trainer(model))
    trainer.snapshot_reference()
    train(trainer, 0)
    batch, path = make_batch(5), rank.scratch / f"actor-0.{name}.bank"
    with torch.no_grad():
        trainer.logprobs(batch, 1.0, bank="reference")
        trainer.logprobs(batch, 1.0) if name == "reference" else None
        with path.open("r+b") as file:
            file.seek(4096)
            file.write(b"\x01")
        with pytest.raises(SelfCheckFailed, match=r"weights have checksum .* after a swap"):
            trainer.logprobs(batch, 1.0, bank="reference" if name == "reference" else "live")
    # Past repair: what follows a failed self-check is a stop, not a save.
    trainer._reference._resident = "live"


def test_a_reference_that_was_never_frozen_is_refused(rank: Rank, model: Path) -> None:
    trainer = rank.start(rank.trainer(model))
    with pytest.raises(Refused, match=r"snapshot_reference\(\)"):
        trainer.logprobs(make_batch(1), 1.0, bank="reference")


@pytest.mark.parametrize("stage", [0, 1])
def test_a_resumed_trainer_has_its_schedule_and_its_reference(
    rank: Rank, model: Path, stage: int, tmp_path: Path
) -> None:
    def make(origin: Origin) -> ModelTrainer:
        return rank.trainer(origin, zero_stage=stage, schedule=ScheduleConfig(shape="cosine"))

    trainer = rank.start(make(Origin(model)))
    trainer.snapshot_reference()
    train(trainer, 0)
    trainer.save(tmp_path / "checkpoint")
    torch.rand(1)
    train(trainer, 1)
    with torch.no_grad():
        frozen = trainer.logprobs(make_batch(5), 1.0, bank="reference").logprobs
    straight = checksum(trainer)
    rank.stop(trainer)

    resumed = make(Origin(model, checkpoint=tmp_path / "checkpoint"))
    rank.start(resumed)
    steps = resumed.steps
    train(resumed, 1)
    rank.sleep(resumed)
    rank.wake(resumed)
    with torch.no_grad():
        again = resumed.logprobs(make_batch(5), 1.0, bank="reference").logprobs

    assert (steps, checksum(resumed)) == (1, straight)
    assert torch.equal(again, frozen)


def test_a_trainer_whose_process_ended_asleep_has_its_reference(rank: Rank, model: Path) -> None:
    trainer = rank.start(rank.trainer(model, offload=OffloadConfig(target="exit")))
    trainer.snapshot_reference()
    train(trainer, 0)
    batch = make_batch(7)
    reference = trainer.logprobs(batch, 1.0, bank="reference").logprobs.detach()
    assert not torch.equal(reference, trainer.logprobs(batch, 1.0).logprobs)
    rank.sleep(trainer)
    left = rank.scratch / "left"
    kept = left.rename(left.with_name("kept"))  # a process that ends as it should deletes it
    trainer.release("bank")
    kept.rename(left)

    returned = Origin(model, returned=True)
    trainer = rank.trainer(returned, offload=OffloadConfig(target="exit"))
    rank.start(trainer)

    torch.testing.assert_close(
        trainer.logprobs(batch, 1.0, bank="reference").logprobs, reference, rtol=0, atol=0
    )


@pytest.mark.parametrize("part", ["weights", "reference", "optimizer", "end", "names"])
def test_what_a_process_left_is_recognised_when_another_one_takes_it_up(
    rank: Rank, model: Path, part: str
) -> None:
    trainer = rank.start(rank.trainer(model, offload=OffloadConfig(target="exit")))
    trainer.snapshot_reference()
    train(trainer, 0)
    rank.sleep(trainer)
    file = shard_path(rank.scratch / "left", 0)
    shard = torch.load(file, weights_only=True)
    decoded = part not in ("end", "names")
    if decoded:
        found = shard[part][0]["exp_avg"] if part == "optimizer" else shard[part][0]
        found.view(torch.uint8).view(-1)[5] ^= 1

    trainer.release("bank")
    file.parent.mkdir(parents=True)
    torch.save(shard, file)
    if part == "end":
        file.write_bytes(file.read_bytes()[:-100])
    if part == "names":  # no longer UTF-8, which torch's decoder says with an error of its own
        file.write_bytes(file.read_bytes().replace(b"optimizer", b"\xffptimizer", 1))
    returned = Origin(model, returned=True)
    trainer = rank.trainer(returned, offload=OffloadConfig(target="exit"))
    told = "actor-0 came back with checksum" if decoded else "can't be read, it is damaged"
    with pytest.raises(SelfCheckFailed, match=told):
        rank.start(trainer)


def test_a_checkpoint_is_a_folder_that_transformers_loads(rank: Rank, tmp_path: Path) -> None:
    source = make_model(tmp_path / "tied", tied=True)
    (source / "tokenizer.json").write_text("{}")
    trainer = rank.start(rank.trainer(source))
    train(trainer, 0)
    trainer.save(tmp_path / "checkpoint")
    trainer.export(tmp_path / "model")
    ours = {name: tensor.clone() for name, tensor in trainer.named_weights()}

    for folder in ("checkpoint", "model"):
        loaded = dict(AutoModelForCausalLM.from_pretrained(tmp_path / folder).named_parameters())
        assert loaded.keys() == ours.keys()
        assert all(torch.equal(loaded[name], ours[name]) for name in ours)
        assert (tmp_path / folder / "tokenizer.json").read_text() == "{}"
    assert "lm_head.weight" not in ours


def test_a_start_that_was_undone_continues_from_the_checkpoint_when_it_is_made_again(
    rank: Rank, model: Path, tmp_path: Path
) -> None:
    trainer = rank.start(rank.trainer(model))
    train(trainer, 0)
    trainer.save(tmp_path / "checkpoint")
    weights = checksum(trainer)
    rank.stop(trainer)

    again = rank.trainer(Origin(model, checkpoint=tmp_path / "checkpoint"))
    again.acquire("bank")
    again.release("bank")
    rank.start(again)
    found, steps = checksum(again), again.steps
    rank.stop(again)

    assert (found, steps) == (weights, 1)


def test_a_barrier_waits_also_for_what_a_gpu_only_queues(
    rank: Rank, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, waited = rank.trainer(model), list[bool]()
    queued = SimpleNamespace(item=lambda: waited.append(True))
    monkeypatch.setattr(trainer, "all_reduce", lambda _: queued)

    trainer._barrier()

    assert waited


def test_a_checkpoint_of_another_stage_is_refused(rank: Rank, model: Path, tmp_path: Path) -> None:
    trainer = rank.start(rank.trainer(model, zero_stage=1))
    trainer.save(tmp_path / "checkpoint")
    rank.stop(trainer)
    other = rank.trainer(Origin(model, checkpoint=tmp_path / "checkpoint"), zero_stage=2)
    with pytest.raises(ConfigError, match="written with zero_stage 1, this run has 2"):
        rank.start(other)
    assert registered_groups() == ()


def test_the_first_ppo_update_meets_its_own_policy_at_ratio_one_and_kl_zero(
    rank: Rank, model: Path
) -> None:
    trainer = rank.start(rank.trainer(model, micro_batch=3))
    trainer.snapshot_reference()
    batch, before = make_batch(1, rows=8), checksum(trainer)
    config = PPOConfig(minibatches=2)
    advantages = torch.randn(batch.tokens.shape, generator=torch.Generator().manual_seed(0))

    first, second = (
        actor_update(
            trainer, batch, advantages, config, torch.Generator().manual_seed(0), first=first
        )
        for first in (True, False)
    )

    assert first["check/ratio_drift"] == 0.0
    assert first["train/kl"] == first["check/zero_kl_max"] == 0.0
    assert first["check/zero_kl"] == Verdict.PASSED
    assert "check/zero_kl" not in second
    assert second["check/ratio_drift"] == 0.0
    assert second["train/kl"] != 0.0
    assert (trainer.steps, checksum(trainer) != before) == (4, True)


def test_a_value_model_starts_at_zero_learns_and_keeps_its_head(
    rank: Rank, model: Path, tmp_path: Path
) -> None:
    critic = rank.start(rank.trainer(model, head="value"))
    batch = make_batch(1)
    first = critic.values(batch)
    for _ in range(8):
        loss = (critic.values(batch)[:, 1:] - 1.0).square().mean()
        critic.backward(loss, last=True)
        critic.step()
    with torch.no_grad():
        learned = critic.values(batch)
    critic.export(tmp_path / "critic")
    rank.stop(critic)

    again = rank.start(rank.trainer(tmp_path / "critic", head="value"))
    with torch.no_grad():
        reloaded = again.values(batch)

    assert first.shape == (4, 9) and first.eq(0).all()
    assert loss.item() < 0.5
    assert learned[:, 0].eq(0).all()
    assert torch.equal(reloaded, learned)


def test_a_value_sees_only_the_tokens_before_its_own(rank: Rank, model: Path) -> None:
    critic = rank.start(rank.trainer(model, head="value"))
    batch = make_batch(1)
    critic.backward((critic.values(batch) - 1.0).square().mean(), last=True)
    critic.step()
    with torch.no_grad():
        before = critic.values(batch)
        batch.tokens[:, 5] = (batch.tokens[:, 5] + 1) % VOCABULARY
        after = critic.values(batch)
    torch.testing.assert_close(after[:, :6], before[:, :6])
    assert not torch.equal(after[:, 6], before[:, 6])


def test_a_gradient_that_is_not_finite_updates_nothing(rank: Rank, model: Path) -> None:
    for stage in (0, 1):
        trainer = rank.start(rank.trainer(model, zero_stage=stage))
        train(trainer, 0)
        before = checksum(trainer)
        trainer.backward(policy_loss(trainer, 1, 0, 0) * float("nan"), last=True)
        with pytest.raises(SelfCheckFailed, match="gradient norm is"):
            trainer.step()
        assert checksum(trainer) == before
        assert train(trainer, 1)
        rank.stop(trainer)


def test_step_reports_the_norm_before_clipping_and_the_scheduled_rate(
    rank: Rank, model: Path
) -> None:
    for stage in (0, 1):
        schedule = ScheduleConfig(shape="linear", warmup_steps=2)
        trainer = rank.start(
            rank.trainer(
                model, zero_stage=stage, schedule=schedule, total_steps=6, gradient_clip=1e-3
            )
        )
        plain = AutoModelForCausalLM.from_pretrained(model)
        tokens = make_batch(0).tokens
        logits = plain(input_ids=tokens[:, :-1]).logits
        (-torch.nn.functional.pad(likelihood(logits, tokens, 1.0), (1, 0)).mean()).backward()
        expected = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()])
        rates = []
        for step in range(6):
            trainer.backward(policy_loss(trainer, step, 0, 0), last=True)
            report = trainer.step()
            rates.append(report["learning_rate"])
            if step == 0:
                assert math.isclose(report["grad_norm"], expected.item(), rel_tol=1e-4)
        # The peak is 1e-2: half, whole, then 1, 3/4, 2/4, 1/4 over the four steps left.
        assert rates == pytest.approx([5e-3, 1e-2, 1e-2, 7.5e-3, 5e-3, 2.5e-3])
        rank.stop(trainer)


def test_beginning_anew_forgets_moments_steps_and_rate(rank: Rank, model: Path) -> None:
    trainer = rank.start(rank.trainer(model))
    trainer.begin(learning_rate=1e-3, schedule=ScheduleConfig(warmup_steps=4), total_steps=4)
    train(trainer, 0)
    assert trainer.steps == 1
    trainer.export(rank.folder / "warm")
    trainer.begin()
    train(trainer, 1)
    continued = checksum(trainer)
    rank.stop(trainer)

    fresh = rank.start(rank.trainer(rank.folder / "warm"))
    train(fresh, 1)

    assert checksum(fresh) == continued


def test_what_is_not_held_is_refused_with_the_remedy(rank: Rank, model: Path) -> None:
    trainer = rank.trainer(model)
    with pytest.raises(Refused, match=r"refuses 'acquire weights': bank is not held"):
        trainer.acquire("weights")
    rank.start(trainer)
    with pytest.raises(Refused, match="weights is held"):
        trainer.acquire("weights")
    rank.sleep(trainer)
    with pytest.raises(Refused, match="Needs: acquire weights, train_groups"):
        trainer.logprobs(make_batch(1), 1.0)


def test_a_folder_without_a_model_is_refused_before_anything_loads(
    rank: Rank, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        rank.trainer(tmp_path).acquire("bank")


def test_a_rank_that_never_comes_is_an_error_at_the_deadline(
    store: Address, model: Path, tmp_path: Path
) -> None:
    alone = Rank(0, 2, store, tmp_path)
    alone.epoch = next(_epochs)
    trainer = alone.trainer(model, timeout=1.0)
    with pytest.raises(PeerLost, match=r"waited 1 s for 2 ranks"):
        alone.start(trainer)
    assert registered_groups() == ()
    # What it holds stays true: it can go back to sleep, and stop.
    alone.stop(trainer)


def test_releasing_the_bank_deletes_its_files(rank: Rank, model: Path) -> None:
    trainer = rank.start(rank.trainer(model))
    rank.sleep(trainer)
    assert {path.name for path in rank.scratch.iterdir()} == {
        "actor-0.weights.bank",
        "actor-0.optimizer.bank",
    }
    trainer.release("bank")
    assert list(rank.scratch.iterdir()) == []


def test_configurations_are_plain_data() -> None:
    text = json.dumps(ScheduleConfig(shape="cosine").model_dump())
    assert ScheduleConfig.model_validate_json(text).shape == "cosine"
