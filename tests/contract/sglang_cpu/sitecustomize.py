"""Lets SGLang be imported beside a torch for the CPU; Python runs this at start, by its name.

PyPI's torchvision is built for CUDA: beside another torch its operators don't load, and its import
fails on declaring their fakes. Declared here first, the import goes through; none is ever called.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

_kept: list[object] = []


class _BeforeTorchvision(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            library = torch.library.Library("torchvision", "DEF")
            for operator in ("nms", "qnms"):
                library.define(f"{operator}(Tensor dets, Tensor scores, float threshold) -> Tensor")
            _kept.append(library)  # an operator goes with its library
        return None


sys.meta_path.insert(0, _BeforeTorchvision())
