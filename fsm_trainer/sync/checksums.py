"""Checksums of tensors, to compare weights across processes without moving them."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterable

import torch


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of ``tensor`` (any dtype, device, layout) in row-major order."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    if not flat.numel():
        return memoryview(b"")
    # Not flat.numpy(): that forbids resizing the storage for good, and a sleeping trainer resizes.
    array = (ctypes.c_ubyte * flat.numel()).from_address(flat.data_ptr())
    array.keeps = flat  # type: ignore[attr-defined]
    return memoryview(array)


def checksums(named_tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """Return the first 8 bytes of SHA-256 of each tensor's bytes, in hex, by name."""
    return {
        name: hashlib.sha256(raw_bytes(tensor)).hexdigest()[:16] for name, tensor in named_tensors
    }
