"""The guard language: parse, evaluate, explain.

A guard is an expression in a small part of Python's grammar: ``and`` / ``or`` / ``not``, one
comparison at a time, ``in [...]``, attributes of workers, ``all(...)`` and ``any(...)`` over the
live workers of a role, ``fits(device)``, states and numbers. Its tree is Python's own, checked when
it is read. One text has several readers: it is evaluated on live workers, explored by the checker,
exported, and explained to people.

>>> guard = parse("self.in_flight == 0 and any(rollout.live)")
>>> guard.text
'self.in_flight == 0 and any(rollout.live)'

``None`` (no version, no epoch) is equal to nothing, not even to itself, and compares as false:
a worker with torn weights never matches another one.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NoReturn, Protocol

from fsm_trainer.machine.errors import SpecError
from fsm_trainer.machine.names import Role, State

ATTRIBUTES = ("state", "version", "lineage", "epoch", "lease", "in_flight", "live", "undead")
PLURAL = (Role.ROLLOUT,)
Value = int | str | bool | None

_COMPARISONS: Mapping[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le,
    ast.Gt: operator.gt, ast.GtE: operator.ge,
}  # fmt: skip


_EACH: Mapping[object, Callable[[Iterable[object]], bool]] = {
    "all": all, "any": any, ast.And: all, ast.Or: any,
}  # fmt: skip


class View(Protocol):
    """What a guard can read of the system."""

    def attribute(self, worker: str, name: str) -> Value:
        """The value of one of :data:`ATTRIBUTES` of a worker."""

    def peers(self, role: str) -> Sequence[str]:
        """The names of the live workers of a role."""

    def fits(self, worker: str) -> bool:
        """Whether every device of the worker can hold it where the move would take it."""


Test = Callable[[View, str, str | None], Value]
"""The value of a tree for a worker, and for the peer that ``all`` or ``any`` looks at."""


@dataclass(frozen=True, slots=True)
class Guard:
    """A parsed guard: its conjuncts as trees of :mod:`ast`."""

    text: str = ""
    parts: tuple[ast.expr, ...] = ()

    @property
    def roles(self) -> set[str]:
        """The roles whose workers it reads."""
        nodes = [node for part in self.parts for node in ast.walk(part)]
        return {ast.unparse(n.value) for n in nodes if isinstance(n, ast.Attribute)} - {"self"}

    def holds(self, view: View, worker: str) -> bool:
        """Whether the guard is true for ``worker``."""
        return all(test(view, worker, None) for test in _tests(self.text))

    def explain(self, view: View, worker: str) -> list[str]:
        """The conjuncts that are false, each with the values it read."""
        tests = zip(self.parts, _tests(self.text), strict=True)
        false = [part for part, test in tests if not test(view, worker, None)]
        return [f"`{ast.unparse(p)}` is false ({_read(p, view, worker)})" for p in false]


def parse(text: str) -> Guard:
    """Parse a guard.

    Raises:
        SpecError: with the column and what is allowed.
    """
    tree = _tree(text)
    _Check(text).expression(tree, None)
    parts = tree.values if isinstance(tree, ast.BoolOp) and type(tree.op) is ast.And else [tree]
    return Guard(text, tuple(parts))


def constant(text: str, facts: Mapping[str, bool]) -> bool:
    """The value of a condition on static facts (``when:``): names, ``and``, ``or``, ``not``.

    Raises:
        SpecError: with the column and what is allowed.
    """
    tree, check = _tree(text), _Check(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id not in facts:
            check.fail(node, f"unknown fact `{node.id}`, one of {', '.join(sorted(facts))}")
        if isinstance(node, ast.expr) and not isinstance(node, ast.Name | ast.BoolOp | ast.UnaryOp):
            check.fail(node, f"`when:` speaks of static facts, not of `{ast.unparse(node)}`")
    return bool(eval(compile(ast.Expression(tree), "when", "eval"), {}, dict(facts)))


def _tree(text: str) -> ast.expr:
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (AttributeError, SyntaxError) as error:
        raise SpecError(f"cannot read the guard `{text}`: {error}") from None


class _Check:
    """Refuses what isn't in the language."""

    def __init__(self, text: str) -> None:
        self.text = text

    def fail(self, node: ast.expr, message: str) -> NoReturn:
        raise SpecError(f"{message} (column {node.col_offset + 1} of `{self.text}`)")

    def expression(self, node: ast.expr, bound: str | None) -> None:
        parts: list[ast.expr] = []
        match node:
            case ast.BoolOp(values=parts):
                pass
            case ast.UnaryOp(op=ast.Not(), operand=one):
                parts = [one]
            case ast.Compare(left=one, ops=[ast.In()], comparators=[ast.List(elts=options)]):
                parts = [one, *options]
            case ast.Compare(left=one, ops=[op], comparators=[other]) if type(op) in _COMPARISONS:
                parts = [one, other]
            case ast.Compare():
                self.fail(node, "one comparison at a time: == != < <= > >=, or `in [...]`")
            case ast.Attribute(value=ast.Name(id=owner)):
                self.attribute(node, owner, bound)
            case ast.Call(func=ast.Name(id="all" | "any" as kind), args=[body], keywords=[]):
                named = {n.id for n in ast.walk(body) if isinstance(n, ast.Name)} & {*PLURAL}
                if bound is not None or len(named) != 1:
                    self.fail(node, f"{kind}(...) speaks of one of {', '.join(PLURAL)}, not nested")
                self.expression(body, named.pop())
            case ast.Name(id=name) if name not in list(State):
                self.fail(node, f"unknown name `{name}`, a state is one of {', '.join(State)}")
            case ast.Constant(value=bool() | int()) | ast.Name():
                pass
            case ast.Call(func=ast.Name(id="fits"), args=[ast.Name(id="device")], keywords=[]):
                pass
            case _:
                self.fail(node, f"`{ast.unparse(node)}` is not in the guard language")
        for part in parts:
            self.expression(part, bound)

    def attribute(self, node: ast.Attribute, owner: str, bound: str | None) -> None:
        if node.attr not in ATTRIBUTES:
            self.fail(node, f"unknown attribute `{node.attr}`, one of {', '.join(ATTRIBUTES)}")
        if owner in PLURAL and bound != owner:
            self.fail(node, f"there are several {owner} workers: use all(...) or any(...)")


@cache
def _tests(text: str) -> tuple[Test, ...]:
    return tuple(map(_compiled, parse(text).parts)) if text else ()


def _compiled(node: ast.expr) -> Test:
    match node:
        case ast.Attribute(value=ast.Name(id="self"), attr=name):
            return lambda view, worker, peer: view.attribute(worker, name)
        case ast.Attribute(value=ast.Name(id=owner), attr=name) if owner in PLURAL:
            return lambda view, worker, peer: view.attribute(peer or worker, name)
        case ast.Attribute(value=ast.Name(id=owner), attr=name):
            return lambda view, *_: next((view.attribute(n, name) for n in view.peers(owner)), None)
        case ast.Constant(value=int() as value) | ast.Name(id=value):
            return lambda view, worker, peer: value
        case ast.Compare(left=left, comparators=[ast.List(elts=options)]):
            one, others = _compiled(left), [_compiled(option) for option in options]
            return lambda *of: any(_compare(ast.Eq(), one(*of), other(*of)) for other in others)
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            one, two = _compiled(left), _compiled(right)
            return lambda *of: _compare(op, one(*of), two(*of))
        case ast.BoolOp(op=kind, values=parts):
            each, tests = _EACH[type(kind)], [_compiled(part) for part in parts]
            return lambda *of: each(test(*of) for test in tests)
        case ast.UnaryOp(operand=part):
            one = _compiled(part)
            return lambda *of: not one(*of)
        case ast.Call(func=ast.Name(id="fits")):
            return lambda view, worker, peer: view.fits(worker)
        case ast.Call(func=ast.Name(id=name), args=[body]):
            (role,) = {n.id for n in ast.walk(body) if isinstance(n, ast.Name)} & {*PLURAL}
            one, each = _compiled(body), _EACH[name]
            return lambda view, worker, peer: each(one(view, worker, p) for p in view.peers(role))
    raise SpecError(f"`{ast.unparse(node)}` is not in the guard language")


def _compare(op: ast.cmpop, left: Value, right: Value) -> bool:
    if left is None or right is None:
        return isinstance(op, ast.NotEq)
    ordered = not isinstance(op, ast.Eq | ast.NotEq)
    if ordered and not (isinstance(left, int) and isinstance(right, int)):
        raise SpecError(f"cannot order {left!r} and {right!r}: only numbers have an order")
    return _COMPARISONS[type(op)](left, right)


def _read(part: ast.expr, view: View, worker: str) -> str:
    """What a part reads of the system, for people."""
    found: list[str] = []
    for node in ast.walk(part):
        match node:
            case ast.Name(id="device"):
                found.append("the device is full")
            case ast.Attribute(value=ast.Name(id=owner), attr=name):
                names = [worker] if owner == "self" else view.peers(owner)
                read = [f"{who}.{name}={view.attribute(who, name)}" for who in names]
                found += read or [f"no live {owner} worker"]
    return ", ".join(dict.fromkeys(found))
