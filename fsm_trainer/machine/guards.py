"""The guard language: parse, evaluate, explain.

A guard is a Python-like expression of nine kinds of node. One text has several readers: it is
evaluated on live workers, explored by the checker, exported, and explained to people.

>>> guard = parse("self.in_flight == 0 and any(rollout.live)", where="example:1")
>>> guard.text
'self.in_flight == 0 and any(rollout.live)'

``None`` (no version, no epoch) is equal to nothing, not even to itself, and compares as false:
a worker with torn weights never matches another one.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from fsm_trainer.machine.errors import SpecError
from fsm_trainer.machine.names import Role, State

ATTRIBUTES = ("state", "version", "lineage", "epoch", "lease", "in_flight", "live", "undead")
PLURAL = (Role.ROLLOUT,)
Value = int | str | bool | None


class View(Protocol):
    """What a guard can read of the system."""

    def attribute(self, worker: str, name: str) -> Value:
        """The value of one of :data:`ATTRIBUTES` of a worker."""

    def peers(self, role: str) -> Iterable[str]:
        """The names of the live workers of a role."""

    def fits(self, worker: str) -> bool:
        """Whether every device of the worker can hold it where the move would take it."""


@dataclass(frozen=True, slots=True)
class Const:
    value: Value


@dataclass(frozen=True, slots=True)
class Attribute:
    owner: str
    name: str


@dataclass(frozen=True, slots=True)
class Compare:
    op: str
    left: Node
    right: Node


@dataclass(frozen=True, slots=True)
class Member:
    item: Node
    options: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class All:
    """``and`` of its parts."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Any:
    """``or`` of its parts."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Not:
    part: Node


@dataclass(frozen=True, slots=True)
class Quantifier:
    """``all(...)`` or ``any(...)`` over the live workers of a plural role."""

    kind: str
    role: str
    body: Node


@dataclass(frozen=True, slots=True)
class Fits:
    """``fits(device)``: the ledger can grant what the move needs."""


Node = Const | Attribute | Compare | Member | All | Any | Not | Quantifier | Fits


@dataclass(frozen=True, slots=True)
class Guard:
    """A parsed guard: its conjuncts, each with its own text, and the line it stands on."""

    text: str
    parts: tuple[tuple[str, Node], ...] = ()
    where: str = ""

    def holds(self, view: View, worker: str) -> bool:
        """Whether the guard is true for ``worker``."""
        return all(evaluate(node, view, worker) for _, node in self.parts)

    def explain(self, view: View, worker: str) -> list[str]:
        """The conjuncts that are false, each with the values it read."""
        return [
            f"`{text}` is false ({_readings(node, view, worker)})"
            for text, node in self.parts
            if not evaluate(node, view, worker)
        ]


ALWAYS = Guard("")

_COMPARISONS: Mapping[type[ast.cmpop], str] = {
    ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=",
}  # fmt: skip


def parse(text: str, where: str, facts: Mapping[str, bool] | None = None) -> Guard:
    """Parse a guard; with ``facts``, names are static facts instead of states.

    Raises:
        SpecError: with ``where``, the column and what is allowed.
    """
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except SyntaxError as error:
        raise SpecError(
            f"{where}: cannot read the guard `{text}`: {error.msg} at column {error.offset}"
        ) from None
    conjuncts = (
        tree.values if isinstance(tree, ast.BoolOp) and isinstance(tree.op, ast.And) else [tree]
    )
    build = _Builder(text, where, facts)
    return Guard(text, tuple((ast.unparse(c), build.node(c, None)) for c in conjuncts), where)


def constant(text: str, where: str, facts: Mapping[str, bool]) -> bool:
    """The value of a condition on static facts (``when:``)."""
    return all(evaluate(node, _Nothing(), "") for _, node in parse(text, where, facts).parts)


class _Nothing:
    """A condition on static facts reads nothing of the system."""

    def attribute(self, worker: str, name: str) -> Value:
        raise SpecError(f"`when:` speaks of static facts, not of `{name}`")

    def peers(self, role: str) -> Iterable[str]:
        raise SpecError(f"`when:` speaks of static facts, not of `{role}`")

    def fits(self, worker: str) -> bool:
        raise SpecError("`when:` speaks of static facts, not of devices")


class _Builder:
    def __init__(self, text: str, where: str, facts: Mapping[str, bool] | None) -> None:
        self.text, self.where, self.facts = text, where, facts

    def fail(self, node: ast.expr, message: str) -> SpecError:
        return SpecError(f"{self.where}: {message} (column {node.col_offset + 1} of `{self.text}`)")

    def node(self, node: ast.expr, bound: str | None) -> Node:
        match node:
            case ast.BoolOp(op=ast.And()):
                return All(tuple(self.node(value, bound) for value in node.values))
            case ast.BoolOp():
                return Any(tuple(self.node(value, bound) for value in node.values))
            case ast.UnaryOp(op=ast.Not()):
                return Not(self.node(node.operand, bound))
            case ast.Compare(ops=[ast.In()], comparators=[ast.List(elts=options)]):
                items = tuple(self.node(option, bound) for option in options)
                return Member(self.node(node.left, bound), items)
            case ast.Compare(ops=[op], comparators=[right]) if type(op) in _COMPARISONS:
                left = self.node(node.left, bound)
                return Compare(_COMPARISONS[type(op)], left, self.node(right, bound))
            case ast.Compare():
                raise self.fail(node, "one comparison at a time: == != < <= > >=, or `in [...]`")
            case ast.Attribute(value=ast.Name(id=owner)):
                return self.attribute(node, owner, bound)
            case ast.Call(func=ast.Name(id="all" | "any" as kind), args=[body], keywords=[]):
                return self.quantifier(node, kind, body, bound)
            case ast.Call(func=ast.Name(id="fits"), args=[ast.Name(id="device")], keywords=[]):
                return Fits()
            case ast.Constant(value=bool() | int() as value):
                return Const(value)
            case ast.Name(id=name):
                return self.name(node, name)
        raise self.fail(node, f"`{ast.unparse(node)}` is not in the guard language")

    def attribute(self, node: ast.Attribute, owner: str, bound: str | None) -> Node:
        if node.attr not in ATTRIBUTES:
            raise self.fail(node, f"unknown attribute `{node.attr}`, one of {list(ATTRIBUTES)}")
        if owner != "self" and owner not in list(Role):
            raise self.fail(node, f"unknown role `{owner}`, one of {['self', *Role]}")
        if owner in PLURAL and bound != owner:
            raise self.fail(node, f"there are several {owner} workers: use all(...) or any(...)")
        return Attribute(owner, node.attr)

    def quantifier(self, node: ast.Call, kind: str, body: ast.expr, bound: str | None) -> Node:
        roles = {
            n.id for n in ast.walk(body) if isinstance(n, ast.Name) and n.id in PLURAL
        }  # fmt: skip
        if bound is not None or len(roles) != 1:
            raise self.fail(node, f"{kind}(...) speaks of one of {list(PLURAL)}, not nested")
        role = roles.pop()
        return Quantifier(kind, role, self.node(body, role))

    def name(self, node: ast.expr, name: str) -> Node:
        if self.facts is not None:
            if name in self.facts:
                return Const(self.facts[name])
            raise self.fail(node, f"unknown fact `{name}`, one of {sorted(self.facts)}")
        if name in list(State):
            return Const(name)
        raise self.fail(node, f"unknown name `{name}`, a state is one of {list(State)}")


def evaluate(node: Node, view: View, worker: str, bound: str | None = None) -> Value:
    """The value of a node for ``worker``; ``bound`` is the peer that a quantifier looks at."""
    match node:
        case Const(value):
            return value
        case Attribute(owner, name):
            return _read(view, worker, bound, owner, name)
        case Compare(op, left, right):
            return _compare(
                op, evaluate(left, view, worker, bound), evaluate(right, view, worker, bound)
            )
        case Member(item, options):
            value = evaluate(item, view, worker, bound)
            return any(value == evaluate(o, view, worker, bound) for o in options)
        case All(parts):
            return all(evaluate(part, view, worker, bound) for part in parts)
        case Any(parts):
            return any(evaluate(part, view, worker, bound) for part in parts)
        case Not(part):
            return not evaluate(part, view, worker, bound)
        case Quantifier(kind, role, body):
            values = (evaluate(body, view, worker, peer) for peer in view.peers(role))
            return all(values) if kind == "all" else any(values)
        case Fits():
            return view.fits(worker)


def _read(view: View, worker: str, bound: str | None, owner: str, name: str) -> Value:
    if owner == "self":
        return view.attribute(worker, name)
    if bound is not None and owner in PLURAL:
        return view.attribute(bound, name)
    found = next(iter(view.peers(owner)), None)
    return None if found is None else view.attribute(found, name)


def _compare(op: str, left: Value, right: Value) -> bool:
    if left is None or right is None:
        return op == "!="
    if op in ("==", "!="):
        return (left == right) is (op == "==")
    if not isinstance(left, int) or not isinstance(right, int):
        raise SpecError(f"cannot order {left!r} {op} {right!r}: only numbers have an order")
    return {"<": left < right, "<=": left <= right, ">": left > right, ">=": left >= right}[op]


def _readings(node: Node, view: View, worker: str) -> str:
    """What the node read, as ``owner.name=value`` pairs."""
    found: dict[str, None] = {}

    def visit(part: Node, role: str | None) -> None:
        match part:
            case Attribute(owner, name) if role is not None and owner == role:
                for peer in view.peers(owner):
                    found[f"{peer}.{name}={view.attribute(peer, name)}"] = None
            case Attribute(owner, name):
                value = _read(view, worker, None, owner, name)
                found[f"{worker if owner == 'self' else owner}.{name}={value}"] = None
            case Compare(_, left, right):
                visit(left, role)
                visit(right, role)
            case Member(item, _):
                visit(item, role)
            case All(parts) | Any(parts):
                for inner in parts:
                    visit(inner, role)
            case Not(inner):
                visit(inner, role)
            case Quantifier(_, over, body):
                found.setdefault(f"live {over} workers: {len(list(view.peers(over)))}")
                visit(body, over)
            case Fits():
                found["the device is full"] = None
            case Const():
                pass

    visit(node, None)
    return ", ".join(found)
