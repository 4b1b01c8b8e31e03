"""What a ``module:function`` of a configuration names, found without importing anybody's code."""

from __future__ import annotations

import ast
import importlib.util
import os
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder


def find_module(name: str) -> ModuleSpec | None:
    """Find a module without importing its packages, which would run a user's code here."""
    first, *rest = name.split(".")
    try:
        found = importlib.util.find_spec(first)
    except ValueError:
        return None
    whole, folders = first, list(found.submodule_search_locations or ()) if found else []
    for part in rest:
        whole = f"{whole}.{part}"
        try:
            found = PathFinder.find_spec(whole, folders)
        except KeyError:  # a folder without __init__.py: Python asks its parent, not imported here
            found = ModuleSpec(whole, None, is_package=True)
        folders = [folder for f in folders if os.path.isdir(folder := os.path.join(f, part))]
        if found is None:
            return None
    return found


def defined(body: Sequence[ast.AST]) -> dict[str, ast.AST]:
    """The names that statements at the top of a module bind, also inside ``if`` and ``try``."""
    names: dict[str, ast.AST] = {}
    for node in body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names[node.name] = node
            case ast.Name(id=name, ctx=ast.Store()):
                names[name] = node
            case ast.alias(name=name, asname=other):
                names[(other or name).partition(".")[0]] = node
            case _:
                names |= defined(list(ast.iter_child_nodes(node)))
    return names
