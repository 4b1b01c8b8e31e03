"""Packing loses nothing, whatever is packed."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsm_trainer.machine.errors import ManifestMismatch
from fsm_trainer.sync.manifest import ITEM_SIZE, Manifest, TensorSpec

SPECS = st.lists(
    st.builds(
        TensorSpec,
        name=st.uuids().map(str),
        dtype=st.sampled_from(sorted(ITEM_SIZE)),
        shape=st.lists(st.integers(0, 5), max_size=3).map(tuple),
    ),
    max_size=12,
    unique_by=lambda spec: spec.name,
)


def manifest_of(*specs: tuple[str, str, tuple[int, ...]], bucket_bytes: int = 64) -> Manifest:
    return Manifest(tuple(TensorSpec(*spec) for spec in specs), (), bucket_bytes)


@settings(max_examples=200, deadline=None)
@given(specs=SPECS, bucket_bytes=st.integers(1, 300))
def test_every_tensor_has_its_bytes_once_aligned_and_without_gaps(
    specs: list[TensorSpec], bucket_bytes: int
) -> None:
    manifest = Manifest(tuple(specs), (), bucket_bytes)

    slots = [slot for bucket in manifest.buckets for slot in bucket.slots]

    assert sorted(slot.spec.name for slot in slots) == sorted(spec.name for spec in specs)
    for bucket in manifest.buckets:
        covered = 0
        for slot in bucket.slots:
            # torch is the independent source of item sizes.
            item = torch.empty(0, dtype=getattr(torch, slot.spec.dtype)).element_size()
            assert slot.offset == covered
            assert slot.offset % item == 0
            covered += torch.Size(slot.spec.shape).numel() * item
        assert covered == bucket.bytes
        assert bucket.bytes <= bucket_bytes or len(bucket.slots) == 1


@settings(max_examples=100, deadline=None)
@given(specs=SPECS, bucket_bytes=st.integers(1, 300))
def test_buckets_take_contiguous_runs_of_the_senders_order(
    specs: list[TensorSpec], bucket_bytes: int
) -> None:
    manifest = Manifest(tuple(specs), (), bucket_bytes)
    rank = {spec.name: index for index, spec in enumerate(specs)}

    runs = [sorted(rank[slot.spec.name] for slot in bucket.slots) for bucket in manifest.buckets]

    assert [index for run in runs for index in run] == list(range(len(specs)))


@settings(max_examples=100, deadline=None)
@given(specs=SPECS, bucket_bytes=st.integers(1, 300))
def test_pickle_gives_the_same_manifest_back(specs: list[TensorSpec], bucket_bytes: int) -> None:
    manifest = Manifest(tuple(specs), (("tied", specs[0].name),) if specs else (), bucket_bytes)

    copy = pickle.loads(pickle.dumps(manifest))

    assert copy == manifest
    assert copy.digest == manifest.digest
    assert copy.buckets == manifest.buckets


def test_every_change_changes_the_digest() -> None:
    base = manifest_of(("a", "float32", (2, 3)), ("b", "bfloat16", (4,)))
    changed = [
        replace(base, bucket_bytes=65),
        replace(base, aliases=(("c", "a"),)),
        replace(base, tensors=base.tensors[::-1]),
        manifest_of(("a", "float32", (3, 2)), ("b", "bfloat16", (4,))),
        manifest_of(("a", "float32", (2, 3)), ("b", "float16", (4,))),
    ]

    assert len({manifest.digest for manifest in [base, *changed]}) == 1 + len(changed)


def test_wide_dtypes_come_first_inside_a_bucket() -> None:
    manifest = manifest_of(("a", "bfloat16", (3,)), ("b", "uint8", (1,)), ("c", "float32", (2,)))

    # 2·4 bytes of c, then 3·2 of a, then b: 15 in all.
    assert [(s.spec.name, s.offset) for s in manifest.buckets[0].slots] == [
        ("c", 0), ("a", 8), ("b", 14),
    ]  # fmt: skip
    assert manifest.buckets[0].bytes == manifest.bytes == 15


def test_a_tensor_bigger_than_a_bucket_has_its_own() -> None:
    manifest = manifest_of(
        ("a", "uint8", (10,)), ("big", "uint8", (100,)), ("b", "uint8", (10,)), bucket_bytes=64
    )

    assert [bucket.bytes for bucket in manifest.buckets] == [10, 100, 10]


def test_tied_weights_travel_once_and_views_of_one_storage_do_not_count_as_tied() -> None:
    embedding = torch.zeros(4, 2)
    fused = torch.zeros(6)
    named = [
        ("embed", embedding), ("head", embedding), ("q", fused[:3]), ("k", fused[3:]),
        ("turned", embedding.T), ("empty", torch.zeros(0)), ("other empty", torch.zeros(0)),
    ]  # fmt: skip

    manifest = Manifest.of(named)

    assert manifest.aliases == (("head", "embed"),)
    assert [spec.name for spec in manifest.tensors] == [
        "embed", "q", "k", "turned", "empty", "other empty",
    ]  # fmt: skip


def test_tensors_on_the_meta_device_are_not_taken_for_one() -> None:
    named = [(name, torch.zeros(2, device="meta")) for name in "ab"]

    assert Manifest.of(named).aliases == ()


def test_check_lists_every_kind_of_difference() -> None:
    manifest = manifest_of(
        ("same", "float32", (2,)), ("gone", "float32", (2,)),
        ("shape", "float32", (2, 3)), ("dtype", "float32", (2,)),
    )  # fmt: skip
    theirs = manifest_of(
        ("same", "float32", (2,)), ("new", "float32", (2,)),
        ("shape", "float32", (3, 2)), ("dtype", "bfloat16", (2,)),
    )  # fmt: skip

    with pytest.raises(ManifestMismatch) as raised:
        manifest.check(theirs.tensors)

    text = str(raised.value)
    assert "the receiver lacks: gone;" in text
    assert "the sender lacks: new;" in text
    assert "shape float32[2, 3] against float32[3, 2]" in text
    assert "dtype float32[2] against bfloat16[2]" in text
    assert "same" not in text.replace("Load the same model", "")


@pytest.mark.parametrize("theirs", [["a"], ["a", "tied"]])
def test_a_tied_name_may_be_absent_at_the_receiver(theirs: list[str]) -> None:
    manifest = Manifest((TensorSpec("a", "float32", (2,)),), (("tied", "a"),))

    manifest.check([TensorSpec(name, "float32", (2,)) for name in theirs])


def test_a_tied_name_of_another_shape_is_refused() -> None:
    manifest = Manifest((TensorSpec("a", "float32", (2,)),), (("tied", "a"),))

    with pytest.raises(ManifestMismatch, match="tied"):
        manifest.check([TensorSpec("a", "float32", (2,)), TensorSpec("tied", "float32", (3,))])


def test_a_name_that_comes_twice_is_refused() -> None:
    with pytest.raises(ManifestMismatch, match="twice: a"):
        manifest_of(("a", "float32", ()), ("a", "float32", ()))


def test_a_dtype_that_cannot_be_pushed_is_refused_by_name() -> None:
    with pytest.raises(ManifestMismatch, match="'w' has dtype 'qint8'"):
        TensorSpec("w", "qint8", (2,))


def test_tensors_that_stand_at_one_address_in_turn_are_not_tied() -> None:
    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        for i in range(8):
            yield f"layer.{i}", torch.full((64,), float(i))

    manifest = Manifest.of(gathered())

    assert [spec.name for spec in manifest.tensors] == [f"layer.{i}" for i in range(8)]
    assert manifest.aliases == ()
