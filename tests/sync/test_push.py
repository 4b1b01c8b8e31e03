"""A push is bit-exact or raises, on every member."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsm_trainer.machine.version import Version
from fsm_trainer.sync.buckets import AHEAD, CHUNK, TRAILER, Checksum, Parcel, travelling_bytes
from fsm_trainer.sync.checksums import checksums
from fsm_trainer.sync.manifest import ITEM_SIZE, Bucket, Manifest, TensorSpec
from fsm_trainer.sync.transports import GroupTransport
from fsm_trainer.testing.processes import Answer, Processes
from tests.groups import members
from tests.sync import pushes
from tests.sync.conftest import Link

# Seconds beyond a lease's timeout: the roll call, and a busy machine.
SLACK = 2.5


def results(answers: list[Answer]) -> list[Any]:
    return [answer.get() for answer in answers]


def total(named: pushes.Weights) -> int:
    """Bytes by hand: every tensor but the tied head."""
    return sum(t.numel() * t.element_size() for name, t in named.items() if name != "head")


def test_pushes_are_bit_exact_over_three_reconnects(link: Link) -> None:
    files = []
    for epoch in range(3):
        processes = link.open(3)
        named = pushes.weights(seed=epoch)

        sent, *received = results(
            [
                processes[0].call(pushes.send, named, (7, epoch)),
                processes[1].call(pushes.receive, named),
                processes[2].call(pushes.receive, named),
            ]
        )

        assert received == [sent, sent]
        assert sent[0] == total(named)
        # embed (1,708 bytes) | norm | proj (364) | bias, scale, empty, steps, mask | big (2,310)
        assert sent[1] == 5
        assert sent[2] == Version(7, epoch)
        link.close()
        files.append([process.call(pushes.open_files).get() for process in processes])

    assert files[1:] == files[:-1]


def test_both_sides_keep_their_two_buckets_over_pushes(link: Link) -> None:
    sender, receiver = link.open(2)
    named = pushes.weights(seed=1)

    kept = []
    for _ in range(2):
        results([sender.call(pushes.send, named), receiver.call(pushes.receive, named)])
        kept.append(
            [
                sender.call(pushes.buffers, "sender").get(),
                receiver.call(pushes.buffers, "receiver").get(),
            ]
        )

    assert kept[0] == kept[1]
    # Both together: twice the largest bucket, big, which travels as one chunk.
    assert [numel for _, numel in kept[0]] == [2 * CHUNK] * 2


def test_another_manifest_is_refused_before_any_tensor_and_the_lease_stays_good(
    link: Link,
) -> None:
    sender, receiver, other = link.open(3)
    named = pushes.weights(seed=3)
    fewer = {name: tensor for name, tensor in named.items() if name != "bias"}

    sent, fine, refused = results(
        [
            sender.call(pushes.send, named),
            receiver.call(pushes.receive_nothing_expected, named),
            other.call(pushes.receive_nothing_expected, fewer),
        ]
    )

    assert sent[0] == fine[0] == refused[0] == "ManifestMismatch"
    assert "member-2 refused" in sent[1]
    assert "member-2 refused" in fine[1]
    assert "member-2 expects" in refused[1]
    assert fine[2] == refused[2] == []
    again = results([p.call(members.sum_of_ones) for p in (sender, receiver, other)])
    assert again == [3.0] * 3


def test_tensors_in_another_order_are_refused_and_end_the_lease(link: Link) -> None:
    sender = link.open(1)[0]

    name, text, _ = sender.call(pushes.send_reversed, pushes.weights(seed=4)).get()

    assert name == "ManifestMismatch"
    assert "in its order" in text
    assert sender.call(members.usable).get() is False


def test_a_push_like_the_last_one_finds_its_buckets_made(world: Processes, tmp_path: Path) -> None:
    link, named = Link(world, "group", tmp_path), pushes.weights(seed=5)
    for expected in (False, True):
        processes = link.open(2)
        sides = list(zip(processes, ("sender", "receiver"), strict=True))
        if expected:
            made = results([process.call(pushes.ready, side) for process, side in sides])
            assert all(count > 2 for count, _ in made)
        sent, got = results(
            [processes[0].call(pushes.send, named), processes[1].call(pushes.receive, named)]
        )
        assert sent == got
        if expected:
            assert results([p.call(pushes.memory_of, side) for p, side in sides]) == made
        link.close()
    assert link.left() == []


def test_a_receiver_that_cannot_load_fails_the_push_everywhere_and_blocks_nobody_row_4(
    link: Link,
) -> None:
    processes = link.open(3)
    named = pushes.weights(seed=5)

    began = time.monotonic()
    sent, other, failed = results(
        [
            processes[0].call(pushes.send, named),
            processes[1].call(pushes.receive, named),
            processes[2].call(pushes.receive_in_vain, named, "proj"),
        ]
    )

    assert time.monotonic() - began < 3.0
    assert failed[0] == "ValueError"
    assert sent[0] == other[0] == "ActionFailed"
    assert "member-2 could not load" in sent[1]
    assert results([p.call(members.sum_of_ones) for p in processes]) == [3.0] * 3


def test_a_flipped_bit_is_seen_by_all(link: Link) -> None:
    processes = link.open(3)
    named = pushes.weights(seed=6)

    sent, other, spoilt = results(
        [
            processes[0].call(pushes.send, named),
            processes[1].call(pushes.receive, named),
            processes[2].call(pushes.receive_another_bit, named),
        ]
    )

    assert sent[0] == other[0] == spoilt[0] == "SelfCheckFailed"
    assert "received: " in sent[1]
    assert "member-2 " in sent[1]


def test_a_sender_that_breaks_off_frees_its_receivers_at_once_row_20(link: Link) -> None:
    sender, receiver = link.open(2)
    named = pushes.weights(seed=7)

    waiting = receiver.call(pushes.receive, named)
    failed = sender.call(pushes.send_and_stumble, named, 3).get()
    name, text, seconds = waiting.get()

    assert failed[0] == "OSError"
    assert name == "LeaseExpired"
    assert "the bank is gone" in text
    assert seconds < 3.0
    assert sender.call(members.usable).get() is False
    assert receiver.call(pushes.buffers, "receiver").get() == []


def test_a_peer_killed_in_mid_push_is_named_and_survivors_push_again(link: Link) -> None:
    processes = link.open(3)

    began = time.monotonic()
    answers = [
        processes[0].call(pushes.send_large, 12, 8),
        processes[1].call(pushes.receive_large, 12, 8),
        processes[2].call(pushes.receive_large_and_die, 12, 8, "layer.3"),
    ]
    lost = results(answers[:2])
    took = time.monotonic() - began
    survivors = link.open(2)
    named = pushes.weights(seed=8)
    sent, received = results(
        [survivors[0].call(pushes.send, named), survivors[1].call(pushes.receive, named)]
    )

    assert {name for name, _, _ in lost} <= {"PeerLost", "LeaseExpired"}
    for _, text, _ in lost:
        assert "no word from member-2;" in text
    assert took < 5.0 + SLACK
    assert received == sent


def test_a_killed_sender_is_named_and_leaves_nothing(link: Link) -> None:
    processes = link.open(3)

    began = time.monotonic()
    answers = [p.call(pushes.receive_large, 12, 8) for p in processes[1:]]
    processes[0].call(pushes.send_and_die, 12, 8, 5)
    lost = results(answers)

    assert time.monotonic() - began < 5.0 + SLACK
    assert {name for name, _, _ in lost} <= {"PeerLost", "LeaseExpired"}
    for _, text, _ in lost:
        assert "no word from member-0;" in text


def test_shards_are_gathered_bucket_by_bucket(link: Link) -> None:
    sender, receiver = link.open(2)
    # Two tensors of 4,000 bytes in each bucket.
    size = 20, 1000, 8192

    most, got = results(
        [sender.call(pushes.send_gathered, *size), receiver.call(pushes.receive_gathered, *size)]
    )

    assert got == [float(i) for i in range(20)]
    assert most <= 2 * 8192


def test_a_bucket_is_packed_while_the_one_before_is_loaded(link: Link) -> None:
    sender, receiver = link.open(2)
    named = {f"layer.{i}": torch.ones(4) for i in range(6)}

    seconds, _ = results(
        [
            sender.call(pushes.send_slowly, named, 0.15),
            receiver.call(pushes.receive_slowly, named, 0.15),
        ]
    )

    # One after the other: 12 pauses, 1.8 s. Overlapped: 6, and one more at the end, 1.05 s.
    assert 1.05 <= seconds < 1.5


def test_a_receiver_that_begins_anew_in_the_same_epoch_finds_the_sender(link: Link) -> None:
    sender, receiver = link.open(2)
    named = pushes.weights(seed=9)
    receiver.call(pushes.forget, "receiver").get()

    for _ in range(2):
        sent, received = results(
            [sender.call(pushes.send, named), receiver.call(pushes.receive, named)]
        )
        receiver.call(pushes.forget, "receiver").get()

        assert received == sent


ARRAYS = st.lists(
    st.tuples(
        st.sampled_from(sorted(ITEM_SIZE)),
        st.lists(st.integers(0, 4), max_size=3),
        st.integers(0, 2**32),
    ),
    max_size=8,
)


@settings(max_examples=150, deadline=None)
@given(arrays=ARRAYS, bucket_bytes=st.integers(1, 200))
def test_any_mix_of_dtypes_and_shapes_leaves_its_buckets_as_it_entered_them(
    arrays: list[tuple[str, list[int], int]], bucket_bytes: int
) -> None:
    named = {}
    for index, (dtype, shape, seed) in enumerate(arrays):
        spec = TensorSpec(f"t{index}", dtype, tuple(shape))
        # Random bytes, not random numbers: NaNs and their payloads travel too.
        raw = torch.randint(
            0, 2 if dtype == "bool" else 256, (spec.bytes,), dtype=torch.uint8,
            generator=torch.Generator().manual_seed(seed),
        )  # fmt: skip
        named[spec.name] = raw.view(getattr(torch, dtype)).view(shape)
    manifest = Manifest.of(named.items(), bucket_bytes)

    left, pairs = {}, iter(named.items())
    for index, bucket in enumerate(manifest.buckets):
        flat = torch.empty(travelling_bytes(bucket), dtype=torch.uint8)
        parcel = Parcel(index, bucket, flat)
        parcel.fill(pairs)
        left.update(parcel.views)

    assert {name: tensor.shape for name, tensor in left.items()} == {
        name: tensor.shape for name, tensor in named.items()
    }
    assert checksums(left.items()).items() == checksums(named.items()).items()


def test_a_checksum_sees_every_byte_and_where_its_chunk_is() -> None:
    flat = torch.randint(0, 256, (4 * CHUNK,), dtype=torch.uint8)
    parcel = Parcel(0, Bucket((), flat.numel() - TRAILER), flat)
    flat[-TRAILER:] = parcel.trailer

    def value() -> bytes:
        checksum = Checksum()
        checksum.add(parcel)
        return checksum.value()

    before = value()
    for place in range(0, flat.numel() - TRAILER, 997):
        flat[place] ^= 1
        assert value() != before
        flat[place] ^= 1
    assert value() == before
    flat[: 2 * CHUNK] = torch.cat([flat[CHUNK : 2 * CHUNK], flat[:CHUNK]])
    assert value() != before


# -- ahead of the host -----------------------------------------------------------------------------


class Queue:
    """A device's queue, as a lease that only writes down what it is asked."""

    def __init__(self) -> None:
        self.device, self.asked, self._started = "cpu", list[str](), 0
        self.membership = SimpleNamespace(kind="group")

    def start_broadcast(self, tensor: torch.Tensor) -> Any:
        number, self._started = self._started, self._started + 1
        self.asked.append(f"start {number}")
        return SimpleNamespace(
            before_next=lambda: self.asked.append(f"order {number}"),
            wait=lambda: self.asked.append(f"wait {number}"),
        )


def test_a_bucket_is_waited_for_with_the_deadline_before_its_sum_is() -> None:
    """`Checksum` waits for sums without one: by then their broadcasts have to be over."""
    manifest = Manifest.of(((f"t{i}", torch.zeros(CHUNK)) for i in range(9)), CHUNK)
    queue = Queue()
    way = GroupTransport(queue)  # type: ignore[arg-type]
    way.prepare(manifest)
    for parcel in way.incoming(manifest):
        queue.asked.append(f"sum {parcel.index}")
    assert len(manifest.buckets) == 9
    for later in range(AHEAD, 9):
        # Adding this bucket looks at the sum of the one that is AHEAD before it.
        before = queue.asked[: queue.asked.index(f"sum {later}")]
        assert f"wait {later - AHEAD}" in before
    # And each bucket's memory is written only after what is queued for the one before in it.
    for number in range(2, 9):
        before = queue.asked[: queue.asked.index(f"start {number}")]
        assert f"sum {number - 2}" in before
    assert sorted(queue.asked[-AHEAD:]) == [f"wait {number}" for number in (6, 7, 8)]
