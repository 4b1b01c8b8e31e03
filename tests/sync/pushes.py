"""The two sides of a push, each in its own process."""

from __future__ import annotations

import os
import tempfile
import time
import unittest.mock
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from fsm_trainer.machine.version import Version
from fsm_trainer.sync.buckets import Parcel
from fsm_trainer.sync.checksums import checksums
from fsm_trainer.sync.manifest import Manifest, TensorSpec
from fsm_trainer.sync.push import Bind, Receiver, Sender
from fsm_trainer.sync.transports import DiskTransport, IpcTransport

# Small enough for several buckets, and for tensors that don't fit into one.
BUCKET = 256

Held = dict[str, Any]
Weights = dict[str, torch.Tensor]


def weights(seed: int) -> Weights:
    """Mixed dtypes, odd shapes, a tied pair, a transposed view, an empty one and a scalar."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random)

    embedding = normal(61, 7)
    return {
        "embed": embedding,
        "norm": normal(7).to(torch.bfloat16),
        "proj": normal(7, 13).T,
        "bias": normal(3).to(torch.float16),
        "scale": normal(),
        "empty": normal(0, 4),
        "steps": torch.arange(5) + seed,
        "mask": normal(9) > 0,
        "head": embedding,
        "big": normal(33, 35).to(torch.bfloat16),
    }


def large(count: int, mebibytes: int) -> Weights:
    return {f"layer.{i}": torch.full((mebibytes * 2**18,), float(i)) for i in range(count)}


def manifest_of(named: Weights, bucket_bytes: int = BUCKET) -> Manifest:
    return Manifest.of(named.items(), bucket_bytes)


def send(
    held: Held, named: Weights, version: tuple[int, int] = (0, 1), bucket: int = BUCKET
) -> Any:
    sender, manifest = held.setdefault("sender", Sender()), manifest_of(named, bucket)
    sent = sender.send(held["lease"], named.items(), manifest, Version(*version))
    return sent.bytes, len(manifest.buckets), version, checksums(named.items())


def receive(held: Held, named: Weights, bucket: int = BUCKET) -> Any:
    """Receive into zeros of the shapes of ``named``, the same ones as long as these fit."""
    into = held.setdefault("into", {})
    if {n: (t.shape, t.dtype) for n, t in into.items()} != {
        n: (t.shape, t.dtype) for n, t in named.items()
    }:
        into = held["into"] = {name: torch.zeros_like(tensor) for name, tensor in named.items()}
    for tensor in into.values():
        tensor.zero_()

    def load(bucket: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in bucket.items():
            into[name].copy_(tensor)

    manifest = manifest_of(named, bucket)
    version = held.setdefault("receiver", Receiver()).receive(held["lease"], manifest, each(load))
    return manifest.bytes, len(manifest.buckets), version, checksums(into.items())


def memory_of(held: Held, side: str) -> tuple[int, int]:
    """How many buckets an end has made, and where the first one lies."""
    made = held[side]._transport._made
    return (len(made[1]), made[1][0].flat.data_ptr()) if made else (0, 0)


def ready(held: Held, side: str) -> tuple[int, int]:
    """Make an end ready for a push, over a lease that has just opened; see `memory_of`."""
    bind = [each(lambda bucket: [held["into"][name].copy_(t) for name, t in bucket.items()])]
    held[side].ready(held["lease"], *(bind if side == "receiver" else []))
    return memory_of(held, side)


def each(load: Callable[[Mapping[str, torch.Tensor]], object]) -> Bind:
    """Call ``load`` with the tensors of each bucket."""
    return lambda views: lambda: load(views) and None


def receive_in_vain(held: Held, named: Weights, at: str) -> Any:
    """Fail to load one tensor."""

    def load(bucket: Mapping[str, torch.Tensor]) -> None:
        if at in bucket:
            raise ValueError(f"no room for {at}")

    held.setdefault("receiver", Receiver()).receive(held["lease"], manifest_of(named), each(load))


def receive_nothing_expected(held: Held, named: Weights) -> Any:
    """Receive under a manifest; says how many tensors were loaded before the error."""
    loaded: list[str] = []
    try:
        Receiver().receive(held["lease"], manifest_of(named), each(loaded.extend))
    except Exception as error:
        return type(error).__name__, str(error), loaded
    return "no error", "", loaded


def receive_and_die(held: Held, named: Weights, at: str, bucket: int) -> None:
    def load(bucket: Mapping[str, torch.Tensor]) -> None:
        if at in bucket:
            os.kill(os.getpid(), 9)

    Receiver().receive(held["lease"], manifest_of(named, bucket), each(load))


def receive_another_bit(held: Held, named: Weights) -> Any:
    """Receive a first bucket in which a bit was flipped since it left the sender."""
    receiver, lease = Receiver(), held["lease"]
    if lease.membership.kind == "group":
        spoil_network(lease)
        receiver.receive(lease, manifest_of(named), each(lambda bucket: None))
    kind = {"ipc": IpcTransport, "disk": DiskTransport}[lease.membership.kind]
    with unittest.mock.patch.object(kind, "_get", spoilt_get(kind._get)):
        receiver.receive(lease, manifest_of(named), each(lambda bucket: None))


def spoilt_get(get: Any) -> Any:
    def spoilt(transport: Any, parcel: Parcel, word: torch.Tensor) -> Any:
        if parcel.index > 0:
            return get(transport, parcel, word)
        if isinstance(transport, IpcTransport):
            parcel.flat[100] ^= 1
            return get(transport, parcel, word)
        # A file of its own: the other receiver reads the sender's at this moment.
        written = transport._path(0)
        with tempfile.TemporaryDirectory() as folder:
            here = Path(folder)
            (here / written.name).write_bytes(written.read_bytes()[:-1] + b"\x7e")
            with unittest.mock.patch.object(transport, "_folder", here):
                return get(transport, parcel, word)

    return spoilt


def spoil_network(lease: Any) -> None:
    start, spoilt = lease.start_broadcast, []

    def start_broadcast(tensor: torch.Tensor, source: int = 0) -> Any:
        pending = start(tensor, source)
        if not spoilt and tensor.numel() > 200:
            pending.wait()
            tensor[100] ^= 1
            spoilt.append(True)
            return pending
        return pending

    lease.start_broadcast = start_broadcast


def send_and_stumble(held: Held, named: Weights, after: int) -> None:
    """Send from an iterator that breaks off after a few tensors."""

    def some() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(named.items())[:after]
        raise OSError("the bank is gone")

    Sender().send(held["lease"], some(), manifest_of(named), Version(0, 1))


def buffers(held: Held, who: str) -> list[int]:
    """Where its two buckets are, and how many bytes they have together."""
    both = held[who]._transport._both
    return [] if both is None else [both.data_ptr(), both.numel()]


def forget(held: Held, who: str) -> None:
    held.pop(who, None)


def left(held: Held) -> list[str]:
    """Mappings and buffers of pushes that this process still has."""
    with open("/proc/self/maps") as maps:
        mapped = [line.strip() for line in maps if "memfd:fsm" in line]
    return mapped + [who for who in ("sender", "receiver") if who in held and buffers(held, who)]


def open_files(held: Held) -> int:
    return len(os.listdir("/proc/self/fd"))


def send_and_die(held: Held, count: int, mebibytes: int, after: int) -> None:
    """Send, and be killed after a few tensors."""
    named = large(count, mebibytes)

    def some() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(named.items())[:after]
        os.kill(os.getpid(), 9)

    manifest = manifest_of(named, mebibytes * 2**20)
    Sender().send(held["lease"], some(), manifest, Version(0, 1))


def send_gathered(held: Held, count: int, elements: int, bucket: int) -> int:
    """Send tensors that exist only while they are referred to; says how many bytes at most."""
    most, alive = 0, weakref.WeakSet[torch.Tensor]()

    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal most
        for i in range(count):
            tensor = torch.full((elements,), float(i))
            alive.add(tensor)
            most = max(most, 4 * elements * len(alive))
            yield f"layer.{i}", tensor
            del tensor

    manifest = Manifest.of(gathered(), bucket)
    most = 0
    Sender().send(held["lease"], gathered(), manifest, Version(0, 1))
    return most


def receive_gathered(held: Held, count: int, elements: int, bucket: int) -> list[float]:
    specs = tuple(TensorSpec(f"layer.{i}", "float32", (elements,)) for i in range(count))
    got: list[float] = []

    def load(views: Mapping[str, torch.Tensor]) -> None:
        got.extend(float(tensor.mean()) for tensor in views.values())

    Receiver().receive(held["lease"], Manifest(specs, bucket_bytes=bucket), each(load))
    return got


def send_slowly(held: Held, named: Weights, pause: float) -> float:
    """Take ``pause`` seconds to get at each tensor."""

    def slowly() -> Iterator[tuple[str, torch.Tensor]]:
        for pair in named.items():
            time.sleep(pause)
            yield pair

    manifest = manifest_of(named, 1)
    return Sender().send(held["lease"], slowly(), manifest, Version(0, 1)).seconds


def receive_slowly(held: Held, named: Weights, pause: float) -> None:
    """Take ``pause`` seconds to load each bucket."""
    manifest = manifest_of(named, 1)
    Receiver().receive(held["lease"], manifest, each(lambda views: time.sleep(pause)))


def send_reversed(held: Held, named: Weights) -> None:
    Sender().send(held["lease"], reversed(named.items()), manifest_of(named), Version(0, 1))


def send_large(held: Held, count: int, mebibytes: int) -> Any:
    return send(held, large(count, mebibytes), bucket=mebibytes * 2**20)


def receive_large(held: Held, count: int, mebibytes: int) -> Any:
    return receive(held, large(count, mebibytes), mebibytes * 2**20)


def receive_large_and_die(held: Held, count: int, mebibytes: int, at: str) -> None:
    receive_and_die(held, large(count, mebibytes), at, mebibytes * 2**20)
