"""A plugin for SGLang (entry point ``sglang.srt.plugins``): per-request seeds, routes on the CPU.

SGLang ties them to its deterministic mode, whose kernels are Triton's. Here each has an equal in
plain torch; so the sampler is SGLang's own, and only its arithmetic is replaced.
"""

from __future__ import annotations

from typing import Any

import torch

_kept: list[object] = []
_WORD = 0xFFFFFFFF


def apply() -> None:
    """Take torch_native for a deterministic backend, and give it the kernels that it lacks."""
    import sglang.srt.batch_invariant_ops as invariant
    import sglang.srt.mem_cache.pool_host.common as pool
    from sglang.srt.arg_groups import choices

    choices.add_deterministic_attention_backend_choices(["torch_native"])
    choices.add_radix_supported_deterministic_attention_backend_choices(["torch_native"])
    invariant.enable_batch_invariant_mode = _make_products_batch_invariant
    # Routed experts are kept on the host, where a GPU would need the memory to be registered.
    pool.ALLOC_MEMORY_FUNCS["cpu"] = _allocated
    library = torch.library.Library("sgl_kernel", "FRAGMENT")
    library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor columns) -> Tensor")
    library.impl("murmur_hash32_cpu", _murmur, "CPU")
    _kept.append(library)


def _allocated(shape: Any, dtype: Any, *_: object, allocator: Any, **__: object) -> torch.Tensor:
    return allocator.allocate(shape, dtype=dtype, device="cpu")


def _make_products_batch_invariant(*_: object, **__: object) -> None:
    # MKL gives a row of fewer than 4 other bits than the same row among more: pad to 8.
    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        rows = a.shape[0]
        if rows < 8:
            a = torch.nn.functional.pad(a, (0, 0, 0, 8 - rows))
        return torch.mm(a, b, out=a.new_empty((a.shape[0], b.shape[1])))[:rows]

    library = torch.library.Library("aten", "IMPL")
    library.impl("mm", product, "CPU")
    _kept.append(library)


def _murmur(seed: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """MurmurHash3_x86_32 of the 64-bit seed, the position and the column, ``[rows, columns]``."""
    word = seed.view(torch.int64)[:, None]
    position = positions.to(torch.int64)[:, None] & _WORD
    column = columns.to(torch.int64)[None] & _WORD
    hashed: Any = torch.zeros_like(word)
    for part in (word & _WORD, (word >> 32) & _WORD, position, column):
        hashed = _mixed(hashed, part)
    hashed = hashed ^ 16  # bytes hashed
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        hashed = ((hashed ^ (hashed >> shift)) * factor) & _WORD
    return hashed ^ (hashed >> 16)


def _mixed(hashed: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    part = (_rotated((part * 0xCC9E2D51) & _WORD, 15) * 0x1B873593) & _WORD
    return (_rotated(hashed ^ part, 13) * 5 + 0xE6546B64) & _WORD


def _rotated(word: torch.Tensor, bits: int) -> torch.Tensor:
    return ((word << bits) | (word >> (32 - bits))) & _WORD
