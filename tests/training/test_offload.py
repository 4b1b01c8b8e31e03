"""Storages leave and come back under every view of them; schedules follow their formulas."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fsm_trainer.machine.errors import ActionFailed, SelfCheckFailed
from fsm_trainer.training.config import ScheduleConfig, Target
from fsm_trainer.training.models import replacing
from fsm_trainer.training.offload import Bank, StatesBank, fingerprint, storages_under


@pytest.mark.parametrize("target", ["disk", "host"])
def test_views_and_aliases_survive_with_their_bytes(target: Target, tmp_path: Path) -> None:
    flat = torch.arange(100_003, dtype=torch.float32)
    view, alias = flat[10:30].view(4, 5), flat.detach()
    odd = torch.arange(7, dtype=torch.uint8)
    expected = flat.clone(), odd.clone()
    bank = Bank(target, tmp_path, "actor-0")
    storages = list(storages_under([view, alias, odd]))

    bank.sleep("weights", storages)
    asleep = [storage.nbytes() for storage in storages]
    bank.wake("weights")

    assert asleep == [0, 0]
    assert torch.equal(flat, expected[0]) and torch.equal(odd, expected[1])
    flat[10] = -1.0
    assert view[0, 0] == -1.0 and alias[10] == -1.0
    assert view.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()


def test_each_storage_is_found_once_and_in_order() -> None:
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.AdamW([weight])
    weight.sum().backward()
    optimizer.step()
    moments = optimizer.state[weight]

    held = {"a": [weight.data, weight.data[1:]]}, (optimizer,), torch.empty(0)
    found = list(storages_under(*held))

    expected = [weight, moments["step"], moments["exp_avg"], moments["exp_avg_sq"], weight.grad]
    assert found[0]._cdata == weight.untyped_storage()._cdata
    assert {s._cdata for s in found} == {t.untyped_storage()._cdata for t in expected}
    assert len(found) == 5


def test_a_second_sleep_uses_the_same_file(tmp_path: Path) -> None:
    bank, tensor = Bank("disk", tmp_path, "actor-0"), torch.zeros(1000)
    for value in (1.0, 2.0):
        tensor.fill_(value)
        bank.sleep("weights", storages_under([tensor]))
        bank.wake("weights")
        assert tensor.eq(value).all()
    assert [path.name for path in tmp_path.iterdir()] == ["actor-0.weights.bank"]
    bank.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("target", ["disk", "host"])
def test_a_tight_bank_has_no_copy_of_what_is_awake(tmp_path: Path, target: Target) -> None:
    bank, tensor = Bank(target, tmp_path, "actor-0", tight=True), torch.arange(1000)
    for _ in range(2):
        bank.sleep("weights", storages_under([tensor]))
        assert list(bank._copies) == ["weights"]
        bank.wake("weights")
        assert torch.equal(tensor, torch.arange(1000))
        assert not bank._copies and list(tmp_path.iterdir()) == []


def test_the_files_of_a_process_that_ended_asleep_go_with_the_bank_of_the_next(
    tmp_path: Path,
) -> None:
    Bank("exit", tmp_path, "actor-0").sleep("weights", storages_under([torch.arange(1000)]))
    other = tmp_path / "actor-1.weights.bank"
    other.touch()

    Bank("exit", tmp_path, "actor-0").close()

    assert list(tmp_path.iterdir()) == [other]


def test_a_host_copy_grows_with_what_is_found(tmp_path: Path) -> None:
    bank, tensors = Bank("host", tmp_path, "actor-0"), [torch.arange(1000), torch.arange(9)]
    for some in (tensors[:1], tensors):
        bank.sleep("weights", storages_under(some))
        assert [tensor.untyped_storage().nbytes() for tensor in some] == [0] * len(some)
        bank.wake("weights")
    assert [torch.equal(t, torch.arange(len(t))) for t in tensors] == [True, True]


def test_a_wake_that_fails_takes_no_memory_and_can_be_tried_again(tmp_path: Path) -> None:
    bank, tensor = Bank("disk", tmp_path, "actor-0"), torch.arange(1000)
    storages = list(storages_under([tensor]))
    bank.sleep("weights", storages)
    path = tmp_path / "actor-0.weights.bank"
    content = path.read_bytes()
    path.write_bytes(content[:100])

    with pytest.raises(ActionFailed, match=r"ends at byte 100: .* last checkpoint"):
        bank.wake("weights")
    failed = storages[0].nbytes()
    path.write_bytes(content)
    bank.wake("weights")

    assert failed == 0
    assert torch.equal(tensor, torch.arange(1000))


class States:
    """DeepSpeed's own moves: half of the optimizer goes with them, the rest with the bank."""

    def __init__(self) -> None:
        self.own, self.rest = torch.arange(9.0), torch.arange(5.0)
        self.asleep, self.room = False, False

    def offload(self) -> None:
        self.asleep = True

    def reload(self) -> None:
        if not self.room:
            raise torch.OutOfMemoryError("no room")
        self.asleep = False

    def optimizer(self) -> Iterator[torch.UntypedStorage]:
        return storages_under([self.rest])


def test_deepspeeds_states_go_back_out_if_they_do_not_all_fit(tmp_path: Path) -> None:
    bank, engine = StatesBank("offload_states", tmp_path, "actor-0"), States()
    bank.engine = engine
    bank.sleep("optimizer", engine.optimizer())

    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        bank.wake("optimizer")
    assert engine.asleep and engine.rest.untyped_storage().nbytes() == 0
    engine.room = True
    bank.wake("optimizer")

    assert not engine.asleep and engine.rest.tolist() == [0, 1, 2, 3, 4]


def test_a_copy_of_another_layout_is_not_loaded(tmp_path: Path) -> None:
    bank, tensor = Bank("disk", tmp_path, "actor-0"), torch.zeros(10)
    bank.keep("reference", storages_under([tensor]))
    other = torch.ones(11)
    with pytest.raises(SelfCheckFailed, match="does not fit"):
        bank.load("reference", list(storages_under([other])))
    assert other.eq(1).all()


def test_a_fingerprint_tells_order_position_and_the_last_byte() -> None:
    data = torch.arange(100_001, dtype=torch.uint8)
    changed, swapped = data.clone(), data.clone()
    changed[-1] += 1
    swapped[[0, 8]] = swapped[[8, 0]]
    other = torch.ones(8, dtype=torch.uint8)
    prints = [
        fingerprint([data]), fingerprint([changed]), fingerprint([swapped]),
        fingerprint([data, other]), fingerprint([other, data]),
    ]  # fmt: skip
    assert len(set(prints)) == 5
    assert fingerprint([data.clone()]) == prints[0]


def test_learning_rates_follow_their_formulas() -> None:
    constant = ScheduleConfig(warmup_steps=4)
    assert [constant.factor(k, 10) for k in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    linear = ScheduleConfig(shape="linear", warmup_steps=2)
    # Eight steps left after two of warm-up: 1 - k / 8.
    assert [linear.factor(k, 10) for k in (2, 4, 8, 10, 12)] == [1.0, 0.75, 0.25, 0.0, 0.0]
    cosine = ScheduleConfig(shape="cosine")
    # SGDR eq. 5: (1 + cos(pi k / 9)) / 2, by hand at thirds.
    assert [cosine.factor(k, 9) for k in (0, 3, 6, 9)] == pytest.approx([1.0, 0.75, 0.25, 0.0])
    assert math.isclose(cosine.factor(1, 4), (1 + math.sqrt(0.5)) / 2)


@pytest.mark.parametrize("leads", [True, False])
def test_a_folder_is_replaced_whole_or_not_at_all(tmp_path: Path, leads: bool) -> None:
    target, partial, waits = tmp_path / "checkpoint", tmp_path / ".checkpoint.partial", list[int]()
    if not leads:  # what the leading rank makes
        partial.mkdir()
    replace = lambda: replacing(target, leads, lambda: waits.append(1))  # noqa: E731

    with replace() as folder:
        (folder / "a").write_text("old")
    with pytest.raises(RuntimeError), replace() as folder:
        (folder / "a").write_text("half")
        raise RuntimeError

    # Made; filled by all; in its place. The second ends before the first of the last two.
    assert len(waits) == 3 + 1
    if not leads:
        assert (partial / "a").read_text() == "half" and not target.exists()
        return
    assert (target / "a").read_text() == "old"
    with replace() as folder:
        (folder / "b").write_text("new")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["b", "checkpoint"]
