"""Stands in for SGLang's kernels, which have no build for a plain CPU: names, and no code.

SGLang imports them at module level; with torch_native attention a dense model calls none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: object, **__: object) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name} has no build for this CPU")

    return missing
