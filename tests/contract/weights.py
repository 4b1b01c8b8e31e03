"""Weights by seed, the same in every process, and what the sending process does with them.

``held`` is what a `fsm_trainer.testing.processes.Member` keeps between calls.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from fsm_trainer.groups.lease import Lease
from fsm_trainer.groups.membership import Membership
from fsm_trainer.machine.version import Version
from fsm_trainer.sync.manifest import Manifest, TensorSpec, Transfer
from fsm_trainer.sync.push import Sender

# Several buckets even for the tiny model.
BUCKET_BYTES = 64 * 1024


def weights(specs: Sequence[TensorSpec], seed: int) -> dict[str, torch.Tensor]:
    """Large enough that no two tokens are alike likely."""
    generator = torch.Generator().manual_seed(seed)
    return {
        spec.name: torch.randn(spec.shape, generator=generator)
        .mul_(0.3)
        .to(getattr(torch, spec.dtype))
        for spec in specs
    }


def manifest(specs: Sequence[TensorSpec]) -> Manifest:
    return Manifest(tuple(specs), bucket_bytes=BUCKET_BYTES)


def join(held: dict[str, Any], membership: Membership, device: str) -> None:
    held["lease"] = Lease.open(membership, device)
    held["device"] = device


def leave(held: dict[str, Any]) -> None:
    held.pop("lease").close()


def revoke(held: dict[str, Any]) -> None:
    held["lease"].revoke("the test revokes it")


def send(
    held: dict[str, Any], specs: Sequence[TensorSpec], named: Iterable[tuple[str, torch.Tensor]]
) -> Transfer:
    there = ((name, tensor.to(held["device"])) for name, tensor in named)
    return Sender().send(held["lease"], there, manifest(specs), Version(0, 1))


def push(held: dict[str, Any], specs: Sequence[TensorSpec], seed: int) -> int:
    send(held, specs, weights(specs, seed).items())
    return len(manifest(specs).buckets)


def die_within_a_push(held: dict[str, Any], specs: Sequence[TensorSpec], seed: int) -> None:
    def until_the_middle() -> Iterator[tuple[str, torch.Tensor]]:
        named = list(weights(specs, seed).items())
        yield from named[: len(named) // 2]
        os.kill(os.getpid(), signal.SIGKILL)

    send(held, specs, until_the_middle())


def push_and_wait(held: dict[str, Any], specs: Sequence[TensorSpec]) -> None:
    """Send the first bucket, and no more before the lease is over."""

    def until_it_is_over() -> Iterator[tuple[str, torch.Tensor]]:
        named = list(weights(specs, 0).items())
        yield from named[: len(named) // 2]
        while held["lease"].usable:
            time.sleep(0.01)
        yield from named[len(named) // 2 :]

    send(held, specs, until_it_is_over())


def push_nan(held: dict[str, Any], specs: Sequence[TensorSpec]) -> None:
    named = {name: tensor * float("nan") for name, tensor in weights(specs, 0).items()}
    send(held, specs, named.items())
