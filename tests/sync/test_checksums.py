from __future__ import annotations

import hashlib
import struct

import torch

from fsm_trainer.sync.checksums import checksums


def test_a_checksum_is_the_first_8_bytes_of_sha256_of_the_little_endian_bytes() -> None:
    # 1.5 = 1.1b · 2^0: bfloat16 is the upper half of float32's 0x3FC00000.
    named = {"fp32": torch.tensor([1.5, -2.0]), "bf16": torch.tensor(1.5, dtype=torch.bfloat16)}

    got = checksums(named.items())

    assert got == {
        "fp32": hashlib.sha256(struct.pack("<2f", 1.5, -2.0)).digest()[:8].hex(),
        "bf16": hashlib.sha256(b"\xc0\x3f").digest()[:8].hex(),
    }


def test_the_layout_in_memory_does_not_matter() -> None:
    tensor = torch.arange(6.0).reshape(2, 3)

    assert checksums([("a", tensor.T)]) == checksums([("a", tensor.T.contiguous())])


def test_one_bit_changes_it() -> None:
    one = torch.zeros(1000)
    other = one.clone()
    other.view(torch.int32)[777] = 1

    assert checksums([("a", one)]) != checksums([("a", other)])
