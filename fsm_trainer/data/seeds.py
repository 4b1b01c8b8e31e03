"""Every random stream of a run is derived from its one seed, by name."""

from __future__ import annotations

import hashlib
import json


def derive(seed: int, *parts: str | int) -> int:
    """Return the 63-bit seed of the stream that ``parts`` name under ``seed``.

    SHA-256 of the JSON list, so ``(1, "23")``, ``(12, "3")`` and ``(1, 23)`` are three streams and
    every process, platform and Python version agrees on them.
    """
    text = json.dumps([seed, *parts], ensure_ascii=True, separators=(",", ":"))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
