"""The two sides of a push, each in its own process."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from fsm_trainer.machine.version import Version
from fsm_trainer.sync.checksums import checksums
from fsm_trainer.sync.manifest import Manifest
from fsm_trainer.sync.push import Receiver, Sender

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
    report = sender.send(held["lease"], named.items(), manifest, Version(*version))
    return report.bytes, report.buckets, report.version, checksums(named.items())


def receive(held: Held, named: Weights, bucket: int = BUCKET) -> Any:
    """Receive into zeros of the shapes of ``named``."""
    into = {name: torch.zeros_like(tensor) for name, tensor in named.items()}

    def load(bucket: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in bucket.items():
            into[name].copy_(tensor)

    manifest = manifest_of(named, bucket)
    report = held.setdefault("receiver", Receiver()).receive(held["lease"], manifest, load)
    return report.bytes, report.buckets, report.version, checksums(into.items())


def receive_in_vain(held: Held, named: Weights, at: str) -> Any:
    """Fail to load one tensor."""

    def load(bucket: Mapping[str, torch.Tensor]) -> None:
        if at in bucket:
            raise ValueError(f"no room for {at}")

    held.setdefault("receiver", Receiver()).receive(held["lease"], manifest_of(named), load)


def receive_nothing_expected(held: Held, named: Weights) -> Any:
    """Receive under a manifest; says how many tensors were loaded before the error."""
    loaded: list[str] = []
    try:
        Receiver().receive(held["lease"], manifest_of(named), loaded.extend)
    except Exception as error:
        return type(error).__name__, str(error), loaded
    return "no error", "", loaded


def receive_and_die(held: Held, named: Weights, at: str, bucket: int) -> None:
    def load(bucket: Mapping[str, torch.Tensor]) -> None:
        if at in bucket:
            os.kill(os.getpid(), 9)

    Receiver().receive(held["lease"], manifest_of(named, bucket), load)


def receive_another_bit(held: Held, named: Weights) -> Any:
    """Receive over a network that flips a bit of the first bucket."""
    receiver, lease = Receiver(), held["lease"]
    start, spoilt = lease.start_broadcast, []

    def start_broadcast(tensor: torch.Tensor, source: int = 0) -> Any:
        pending = start(tensor, source)
        if not spoilt and tensor.numel() > 200:
            pending.wait()
            tensor[100] ^= 1
            spoilt.append(True)
            return type("Done", (), {"wait": lambda self: None})()
        return pending

    lease.start_broadcast = start_broadcast
    receiver.receive(lease, manifest_of(named), lambda bucket: None)


def send_and_stumble(held: Held, named: Weights, after: int) -> None:
    """Send from an iterator that breaks off after a few tensors."""

    def some() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(named.items())[:after]
        raise OSError("the bank is gone")

    Sender().send(held["lease"], some(), manifest_of(named), Version(0, 1))


def buffers(held: Held, who: str) -> list[int]:
    pair = held[who]._buffers._pair
    return [] if pair is None else [buffer.data_ptr() for buffer in pair]


def send_reversed(held: Held, named: Weights) -> None:
    Sender().send(held["lease"], reversed(named.items()), manifest_of(named), Version(0, 1))


def send_large(held: Held, count: int, mebibytes: int) -> Any:
    return send(held, large(count, mebibytes), bucket=mebibytes * 2**20)


def receive_large(held: Held, count: int, mebibytes: int) -> Any:
    return receive(held, large(count, mebibytes), mebibytes * 2**20)


def receive_large_and_die(held: Held, count: int, mebibytes: int, at: str) -> None:
    receive_and_die(held, large(count, mebibytes), at, mebibytes * 2**20)
