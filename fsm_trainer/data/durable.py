"""Files that outlive a kill and a power cut, and how to see later that nothing happened to them."""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

_PIECE = 4 << 20
_THREADS = 8


class Seal(NamedTuple):
    """What a file is recognised by.

    CRC-32 is twice as fast as SHA-256 or BLAKE2b. It finds every change within four bytes in a
    row, and any other damage but for one case in 2^32; it is no defence against malice.
    """

    size: int
    """Bytes."""
    crc32: int


def seal_of(content: bytes) -> Seal:
    """The seal of a file with this content."""
    return Seal(len(content), zlib.crc32(content))


def write_durably(path: Path, content: bytes) -> None:
    """Put a file in its place, whole or not at all, and on the disk when this returns."""
    temporary = path.with_name(f".{path.name}")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    flush(path.parent)


def flush(folder: Path) -> None:
    """Have the disk keep which names a folder holds."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def seal(folder: Path) -> dict[str, Seal]:
    """Have the disk keep a folder and all files in it; gives their seals, by relative path."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    with ThreadPoolExecutor(_THREADS) as pool:
        seals = list(pool.map(_flushed, paths))
    for inside in {folder.parent, folder, *(path.parent for path in paths)}:
        flush(inside)
    return {str(p.relative_to(folder)): s for p, s in zip(paths, seals, strict=True)}


def damage(folder: Path, seals: Mapping[str, Seal]) -> str | None:
    """What is wrong with the first file that isn't as it was sealed; sizes are looked at first."""
    paths = {folder / name: seal for name, seal in seals.items()}
    try:
        for path, expected in paths.items():
            if (size := path.stat().st_size) != expected.size:
                return f"{path} has {size} bytes, {expected.size} were written"
        with ThreadPoolExecutor(_THREADS) as pool:
            for path, found in zip(paths, pool.map(_read, paths), strict=True):
                if found != paths[path]:
                    return f"{path} holds other bytes than were written"
    except OSError as error:
        return f"{error.filename or folder} can't be read ({error.strerror})"
    return None


def _flushed(path: Path) -> Seal:
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return _read(path)


def _read(path: Path) -> Seal:
    size = checksum = 0
    with path.open("rb", buffering=0) as file:
        while piece := file.read(_PIECE):
            size, checksum = size + len(piece), zlib.crc32(piece, checksum)
    return Seal(size, checksum)
