"""Imports point down only, and what must stay light names nothing heavy."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import fsm_trainer

PACKAGE = Path(fsm_trainer.__file__).parent

ROWS = (
    ("machine", "document"),
    ("verify",),
    ("groups", "monitor"),
    ("testing",),
    ("training", "engines", "sync", "algorithms", "data", "checks"),
    ("workers", "link"),
    ("runtime",),
    ("simulation",),
    ("cli", "pytest_plugin"),
)
"""From the bottom up; what stands in one row may import only what SIBLINGS says."""

SIBLINGS = {
    "machine": {"document"},
    "document": {"machine"},
    "engines": {"sync", "data"},
    "training": {"algorithms", "data", "sync"},
}

TORCH = {"torch", "transformers", "deepspeed", "sglang"}
"""torch and what imports it."""
HEAVY = TORCH | {"ray"}
NEVER = {"machine": HEAVY | {"asyncio"}, "document": HEAVY | {"asyncio"}}
"""What a part may not import at all, not even inside a function."""

LIGHT = (
    "data",
    "engines/contract.py",
    "engines/engine.py",
    "engines/embedded.py",
    "runtime",
    "simulation",
    "cli",
    "__init__.py",
)
"""What may import TORCH only inside functions."""


def modules(part: str = "") -> list[Path]:
    path = PACKAGE / part
    return [path] if path.suffix == ".py" else sorted(path.rglob("*.py"))


def imported(tree: ast.AST, package: str) -> Iterator[tuple[str, int]]:
    """Give the dotted name and the line of each import within a node, relative ones resolved."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*above, node.module or ""] if node.level else [node.module or ""])
            yield from ((f"{base}.{alias.name}", node.lineno) for alias in node.names)


def at_import(tree: ast.Module) -> list[ast.stmt]:
    """Give the statements that run when the module is imported: not types, not functions."""
    found: list[ast.stmt] = []
    queue: list[ast.stmt] = list(tree.body)
    while queue:
        node = queue.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            queue += node.orelse
            continue
        inner = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
        handlers = [s for h in getattr(node, "handlers", []) for s in h.body]
        queue += inner + handlers
        if isinstance(node, ast.Import | ast.ImportFrom):
            found.append(node)
    return found


def broken_rule(importer: str, imported_part: str) -> str | None:
    """Say which rule forbids one part to import another, or None if it may."""
    height = {part: row for row, parts in enumerate(ROWS) for part in parts}
    if importer == imported_part or imported_part in SIBLINGS.get(importer, set()):
        return None
    if imported_part not in height:
        return f"{imported_part} has no place in the layers"
    if height[imported_part] >= height[importer]:
        return f"{importer} must not import {imported_part}: imports point down only"
    return None


def part_of(dotted: str) -> str | None:
    """Give the part of fsm_trainer that a dotted name lies in; None for other packages."""
    names = dotted.split(".")
    known = {part for row in ROWS for part in row}
    if names[0] != "fsm_trainer" or len(names) < 2:
        return None
    return names[1] if names[1] in known or (PACKAGE / names[1]).is_dir() else None


def violations(path: Path, source: str) -> Iterator[str]:
    relative = path.relative_to(PACKAGE)
    importer = relative.parts[0].removesuffix(".py")
    package = ".".join(("fsm_trainer", *relative.parts[:-1]))
    for name, line in imported(ast.parse(source), package):
        part = part_of(name)
        rule = broken_rule(importer, part) if part else None
        if rule:
            yield f"{path}:{line}: {rule}"
        if name.split(".")[0] in NEVER.get(importer, set()):
            yield f"{path}:{line}: {importer} must not import {name}"


def test_every_part_of_the_package_has_a_place_in_the_layers() -> None:
    known = {part for row in ROWS for part in row} | {"__init__"}
    parts = {p.stem for p in PACKAGE.glob("*.py")} | {p.parent.name for p in PACKAGE.glob("*/*.py")}
    assert parts - {PACKAGE.name, "states"} <= known


def test_imports_point_down_only() -> None:
    paths = [path for path in modules() if path.parent != PACKAGE or path.stem != "__init__"]
    assert len(paths) > 20
    assert [wrong for path in paths for wrong in violations(path, path.read_text())] == []


@pytest.mark.parametrize("part", LIGHT)
def test_light_modules_import_torch_only_inside_functions(part: str) -> None:
    wrong = [
        f"{path}:{line}: {name}"
        for path in modules(part)
        for statement in at_import(ast.parse(path.read_text()))
        for name, line in imported(statement, "")
        if name.split(".")[0] in TORCH
    ]
    assert modules(part)
    assert wrong == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("machine/x.py", "import asyncio"),
        ("machine/x.py", "def f():\n    import torch.nn"),
        ("machine/x.py", "from fsm_trainer.groups.lease import Lease"),
        ("machine/x.py", "from ..groups import lease"),
        ("machine/x.py", "from fsm_trainer import verify"),
        ("algorithms/x.py", "from fsm_trainer.data.trajectory import Trajectory"),
        ("data/x.py", "import fsm_trainer.engines.contract"),
        ("engines/x.py", "from fsm_trainer.training.batch import Batch"),
        ("workers/x.py", "def f():\n    from fsm_trainer.runtime import journal"),
        ("runtime/x.py", "from fsm_trainer.cli import main"),
    ],
)
def test_the_rule_sees_a_forbidden_import(module: str, source: str) -> None:
    assert list(violations(PACKAGE / module, source))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("cli/x.py", "from fsm_trainer.runtime.journal import Journal"),
        ("training/x.py", "from fsm_trainer.data.trajectory import Trajectory"),
        ("machine/x.py", "from fsm_trainer.machine.errors import Refused\nimport enum"),
        ("groups/x.py", "import torch, asyncio"),
    ],
)
def test_the_rule_lets_a_legal_import_pass(module: str, source: str) -> None:
    assert not list(violations(PACKAGE / module, source))


def test_what_runs_at_import_is_told_from_what_does_not() -> None:
    source = """
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    import torch
else:
    import json
try:
    import yaml
except ImportError:
    import csv
class C:
    import enum
    def f(self):
        import ray
"""
    names = {name for s in at_import(ast.parse(source)) for name, _ in imported(s, "")}
    assert names == {"typing.TYPE_CHECKING", "json", "yaml", "csv", "enum"}
