"""Collation, blanks and the dealing of rows to ranks and micro-batches."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsm_trainer.algorithms.config import Aggregation
from fsm_trainer.data.trajectory import Sample, Status, Trajectory
from fsm_trainer.machine.errors import DataError
from fsm_trainer.machine.version import Version
from fsm_trainer.training.batch import Batch, Minibatch, collate, deal, draw_epochs, parts
from fsm_trainer.training.packing import Layout

PAD = 99


def trajectory(
    tokens: list[int],
    mask: list[int],
    reward: float | None = 1.0,
    group: str = "g",
    status: Status = Status.FINISHED,
) -> Trajectory:
    return Trajectory(
        sample=Sample(id="s1", prompt="p", answer=None, group=group),
        tokens=np.array(tokens, dtype=np.int32),
        loss_mask=np.array(mask, dtype=np.uint8),
        logprobs=np.array([-0.5 * on for on in mask], dtype=np.float32),
        version=Version(0, 0),
        status=status,
        text="",
        reward=reward,
    )


def three() -> Batch:
    return collate(
        [
            trajectory([5, 6, 7], [0, 1, 1], 0.5, "a"),
            trajectory([5, 6, 7, 8, 9], [0, 0, 1, 0, 1], 1.0, "b", Status.TRUNCATED),
            trajectory([1, 2], [0, 1], 0.0, "a"),
        ],
        PAD,
    )


def test_collate_pads_on_the_right_and_keeps_everything_in_its_place() -> None:
    batch = three()

    assert batch.tokens.tolist() == [[5, 6, 7, PAD, PAD], [5, 6, 7, 8, 9], [1, 2, PAD, PAD, PAD]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 0, 0], [1] * 5, [1, 1, 0, 0, 0]]
    assert batch.loss_mask.tolist() == [[0, 1, 1, 0, 0], [0, 0, 1, 0, 1], [0, 1, 0, 0, 0]]
    assert torch.equal(batch.engine_logprobs, -0.5 * batch.loss_mask)
    assert batch.rewards.tolist() == [0.5, 1.0, 0.0]
    assert batch.truncated.tolist() == [0.0, 1.0, 0.0]
    assert batch.groups == ("a", "b", "a")
    assert len(batch) == 3
    assert (batch.tokens.dtype, batch.loss_mask.dtype) == (torch.int64, torch.float32)


def test_a_trajectory_without_reward_is_refused_by_the_samples_name() -> None:
    with pytest.raises(DataError, match=r"'s1'.*no reward"):
        collate([trajectory([1, 2], [0, 1], reward=None)], PAD)


def test_nothing_to_collate_is_refused() -> None:
    with pytest.raises(DataError, match="no trajectory"):
        collate([], PAD)


def test_select_takes_rows_in_the_order_asked_for() -> None:
    chosen = three().select([2, 0])

    assert chosen.tokens[0].tolist() == [1, 2, PAD, PAD, PAD]
    assert chosen.rewards.tolist() == [0.0, 0.5]
    assert chosen.groups == ("a", "a")


def test_a_blank_row_can_be_computed_on_but_counts_for_nothing() -> None:
    batch = three()

    chosen = batch.select([1, -1])

    assert torch.equal(chosen.tokens[1], batch.tokens[0])
    assert not chosen.loss_mask[1].any()
    assert batch.loss_mask[0].any(), "the batch itself is left alone"


def test_trim_drops_columns_of_padding_only() -> None:
    trimmed = three().select([0, 2]).trim()

    assert trimmed.tokens.tolist() == [[5, 6, 7], [1, 2, PAD]]
    assert trimmed.loss_mask.tolist() == [[0, 1, 1], [0, 1, 0]]


class Place(NamedTuple):
    rank: int
    world_size: int
    micro_batch: int
    micro_batch_tokens: int | None = None
    packing: bool = False


def epoch_of(lengths: list[int], minibatches: int, seed: int, place: Place) -> list[Minibatch]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.tensor(lengths)
    (epoch,) = draw_epochs(1, minibatches, tokens, generator, cast(Any, place))
    return epoch


LONGEST = 9


@given(
    lengths=st.lists(st.integers(1, LONGEST), min_size=1, max_size=40),
    minibatches=st.integers(1, 6),
    world=st.integers(1, 5),
    micro=st.integers(1, 9),
    limit=st.none() | st.integers(LONGEST, 5 * LONGEST),
    packing=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_an_epoch_visits_each_row_once_whatever_the_number_of_ranks(
    lengths: list[int],
    minibatches: int,
    world: int,
    micro: int,
    limit: int | None,
    packing: bool,
    seed: int,
) -> None:
    def walk(rank: int, world_size: int) -> list[tuple[list[int], list[list[int]]]]:
        place = Place(rank, world_size, micro, limit, packing)
        epoch = epoch_of(lengths, minibatches, seed, place)
        return [(m.rows.tolist(), [rows.tolist() for rows in m.micro_batches]) for m in epoch]

    def fits(rows: list[int]) -> bool:
        if limit is None:
            return len(rows) <= micro
        tokens = [lengths[row] for row in rows if row >= 0]
        padded = sum(tokens) if packing else len(tokens) * max(tokens, default=0)
        return padded <= limit

    alone, count = walk(0, 1), len(lengths)
    ranks = [walk(rank, world) for rank in range(world)]

    assert len(alone) == min(minibatches, count)
    assert sorted(row for rows, _ in alone for row in rows) == list(range(count))
    for number, (rows, _) in enumerate(alone):
        own = [rank[number] for rank in ranks]
        assert all(minibatch == rows for minibatch, _ in own)
        assert len({len(micros) for _, micros in own}) == 1
        assert all(fits(m) for _, micros in own for m in micros)
        dealt = [row for _, micros in own for m in micros for row in m]
        assert sorted(row for row in dealt if row >= 0) == sorted(rows)
        assert dealt.count(-1) < world


@given(
    lengths=st.lists(st.integers(2, 30), min_size=1, max_size=40),
    world=st.integers(1, 5),
    room=st.integers(0, 90),
    packing=st.booleans(),
)
def test_micro_batches_by_tokens_hold_their_limit_and_are_as_many_on_every_rank(
    lengths: list[int], world: int, room: int, packing: bool
) -> None:
    sizes, limit = torch.tensor(lengths), max(lengths) + room
    tokens = torch.ones(len(lengths), max(lengths), dtype=torch.int64)

    dealt = [
        deal(torch.arange(len(lengths)), sizes, cast(Any, Place(rank, world, 1, limit, packing)))
        for rank in range(world)
    ]

    assert len({len(minibatch.micro_batches) for minibatch in dealt}) == 1
    walked = [rows for minibatch in dealt for rows in minibatch.micro_batches]
    assert sorted(row for rows in walked for row in rows.tolist() if row >= 0) == [
        *range(len(lengths))
    ]
    for rows in walked:
        here = sizes[rows.clamp(min=0)]
        layout = Layout(tokens[rows.clamp(min=0), : int(here.max())], here, packing)
        # The model reads all but a row's last token, and so many tokens fewer.
        assert layout.inputs.numel() + len(layout.inputs) <= limit


def test_a_micro_batch_takes_what_fits_the_longest_first() -> None:
    sizes = torch.tensor([2, 8, 3, 8, 5])
    rows = torch.arange(5)

    plain = deal(rows, sizes, cast(Any, Place(0, 1, 1, 16)))
    packed = deal(rows, sizes, cast(Any, Place(0, 1, 1, 16, True)))
    halves = [deal(rows, sizes, cast(Any, Place(rank, 2, 1, 32, True))) for rank in (0, 1)]

    # Two rows of 8 fit, then three of 5; packed, 3 and 2 share one of these.
    assert [m.tolist() for m in plain.micro_batches] == [[1, 3], [4, 2, 0]]
    assert [m.tolist() for m in packed.micro_batches] == [[1, 3], [4, 2, 0]]
    # Rows [8], [8], [5, 3] and [2] are one micro-batch, of which each rank takes half.
    assert [[m.tolist() for m in half.micro_batches] for half in halves] == [[[1, 3]], [[4, 2, 0]]]


def test_a_sequence_that_no_micro_batch_holds_is_refused_with_its_length() -> None:
    with pytest.raises(DataError, match="has 9 tokens, but micro_batch_tokens allows 8"):
        deal(torch.arange(2), torch.tensor([3, 9]), cast(Any, Place(0, 1, 1, 8)))


def test_epochs_differ_in_their_order() -> None:
    place = cast(Any, Place(0, 1, 40))

    one, two = draw_epochs(2, 1, torch.ones(40), torch.Generator().manual_seed(0), place)

    assert one[0].rows.tolist() != two[0].rows.tolist()


@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=12),
    world=st.integers(1, 4),
    micro=st.integers(1, 5),
    aggregation=st.sampled_from(["token", "sequence"]),
)
def test_parts_of_all_ranks_sum_to_the_mean_over_the_minibatch(
    lengths: list[int], world: int, micro: int, aggregation: Aggregation
) -> None:
    batch = collate([trajectory([1] * (n + 1), [0] + [1] * n) for n in lengths], PAD)
    table = torch.rand(batch.tokens.shape, dtype=torch.float64)
    rows = [table[i, 1 : n + 1] for i, n in enumerate(lengths)]
    means = torch.stack([row.mean() for row in rows])
    expected = torch.cat(rows).mean() if aggregation == "token" else means.mean()

    total = 0.0
    for rank in range(world):
        (minibatch,) = epoch_of([n + 1 for n in lengths], 1, 3, Place(rank, world, micro))
        walked = list(parts(batch, minibatch, aggregation, torch.device("cpu"), table))
        assert [part.last for part in walked] == [False] * (len(walked) - 1) + [True]
        for part in walked:
            total += float((part.weights * part.tables[0]).sum())

    assert total == pytest.approx(float(expected), abs=1e-6)
