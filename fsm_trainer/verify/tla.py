"""The composed system of one schedule as a TLA+ module, for TLC: an oracle that isn't ours.

The transition relation is written by hand in ``templates/system.tla``; only the tables and the
guards of ``states/`` are filled in here. Nothing of :mod:`fsm_trainer.machine.step` is used, so
that the two can be compared: with the same tables both must reach the same number of states.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping
from importlib.resources import files
from pathlib import Path
from string import Template

from fsm_trainer.machine.errors import SpecError
from fsm_trainer.machine.guards import PLURAL, Guard
from fsm_trainer.machine.names import Role
from fsm_trainer.machine.spec import RoleTable
from fsm_trainer.machine.world import System

INVARIANTS = {
    "1": "NoCommunicatorAsleep",
    "2": "OneEpoch",
    "3": "OneTenant",
    "4": "WithinCapacity",
    "5": "NothingTornIsServed",
    "6": "PushIsWhole",
    "7": "WorkHasWhatItNeeds",
    "8": "HoldsWhatItsStateSays",
    "9": "NobodyHoldsALinkAlone",
    "a due report is refused": "ReportsAreTaken",
    "deadlock": "SomethingGoesOn",
}
"""What is checked: the number of a property in ``system.yaml``, or what else is wrong."""


def export(system: System) -> str:
    """The module of a system; it is named as the schedule, with ``_`` for what is no name there.

    Raises:
        SpecError: the tables have a name that TLA+ can't have.
    """
    source = (files("fsm_trainer.verify") / "templates" / "system.tla").read_text("utf-8")
    moves = [
        (f"{_is(role)} /\\ trigger = {_text(t.trigger)} /\\ from = {_text(t.source)}", t.guard)
        for role, table in system.spec.roles.items()
        for t in table.transitions
    ]
    acts = [
        (f"{_is(role)} /\\ action = {_text(name)}", action.guard)
        for role, table in system.spec.roles.items()
        for name, action in table.actions.items()
    ]
    return Template(source).substitute(
        module=module_name(system),
        schedule=system.spec.name,
        workers=", ".join(map(_name, system.names)),
        tables="\n".join(f"{name} ==\n    {value}" for name, value in _tables(system).items()),
        transition_guards=_cases(moves),
        action_guards=_cases(acts),
    )


def configuration(system: System, *, fine: bool = True, jobs: int = 1) -> str:
    """What TLC needs beside the module.

    Args:
        system: the system whose module it is.
        fine: whether the others may move between any two effects of one worker's own move.
        jobs: how many jobs a worker may have before it is given no other one.
    """
    settings = {"Fine": str(fine).upper(), "Jobs": str(jobs)}
    settings |= {_name(worker): _name(worker) for worker in system.names}
    several = list(system.names.values()).count(Role.ROLLOUT) > 1
    lines = ["SPECIFICATION Spec", "CONSTANTS"]
    lines += [f"    {name} = {value}" for name, value in settings.items()]
    lines += ["SYMMETRY Symmetry"] if several else []
    lines += ["INVARIANTS", *(f"    {name}" for name in INVARIANTS.values())]
    return "\n".join([*lines, ""])


def write(system: System, folder: Path, *, fine: bool = True) -> Path:
    """Write module and configuration into a folder, and give the module's path."""
    folder.mkdir(parents=True, exist_ok=True)
    module = folder / f"{module_name(system)}.tla"
    module.write_text(export(system), encoding="utf-8")
    settings = configuration(system, fine=fine)
    module.with_suffix(".cfg").write_text(settings, encoding="utf-8")
    return module


def module_name(system: System) -> str:
    """The schedule's name as TLA+ can have it."""
    return _name(system.spec.name)


def _tables(system: System) -> Mapping[str, str]:
    """The tables as definitions."""
    spec, resources = system.spec, system.spec.system.resources
    actions = {name for table in spec.roles.values() for name in table.actions}
    moves = [_tuple([s, trigger, d]) for (s, trigger), d in spec.link_moves.items()]
    by_role = spec.roles.items()
    return {
        "Workers": _set(map(_name, system.names)),
        "Role": " @@ ".join(f"{_name(n)} :> {_text(role)}" for n, role in system.names.items()),
        "Placement": _record({r: _text(spec.schedule.devices[r]) for r in spec.roles}),
        "Capacity": str(system.capacity or spec.system.capacity),
        "Resources": _tuple(sorted(resources)),
        "Size": _record({name: str(r.size) for name, r in resources.items()}),
        "Exclusive": _set(_text(name) for name, r in resources.items() if r.exclusive),
        "Communicators": _set(_text(name) for name, r in resources.items() if r.communicator),
        "Links": _set(map(_text, spec.links)),
        "Hub": _record({name: _text(link.hub) for name, link in spec.links.items()}),
        "Spokes": _record({name: _text(link.spokes) for name, link in spec.links.items()}),
        "Carries": _record({name: _text(link.carries) for name, link in spec.links.items()}),
        "LinkMoves": _set(moves, "\n     "),
        "States": _record({role: _tuple(table.holds) for role, table in by_role}),
        "Holds": _record({role: _holds(table) for role, table in by_role}, "\n     "),
        "Transitions": _record({role: _transitions(table) for role, table in by_role}, "\n     "),
        "ActionNames": _set(map(_text, sorted(actions))),
        "Actions": _record({role: _actions(table) for role, table in by_role}, "\n     "),
    }


def _holds(table: RoleTable) -> str:
    return _record({state: _tuple(held) for state, held in table.holds.items()}, "\n        ")


def _transitions(table: RoleTable) -> str:
    rows = (
        {"trigger": t.trigger, "from": t.source, "to": t.dest, "joint": t.joint or "none"}
        for t in table.transitions
    )
    return _set((_record({k: _text(v) for k, v in row.items()}) for row in rows), "\n        ")


def _actions(table: RoleTable) -> str:
    rows = {
        name: _record(
            {
                "needs": _set(map(_text, sorted(action.needs))),
                "joint": _text(action.joint or "none"),
                "updates": str(action.updates).upper(),
            }
        )
        for name, action in table.actions.items()
    }
    return _record(rows, "\n        ")


def _name(name: str) -> str:
    """A name that TLA+ can have: ``-`` is an operator there."""
    given = name.replace("-", "_")
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", given):
        raise SpecError(f"TLA+ can have no name {name!r}: use letters, digits, - and _")
    return given


def _text(text: str) -> str:
    return f'"{text}"'


def _set(values: Iterable[str], gap: str = " ") -> str:
    return f"{{{f',{gap}'.join(values)}}}"


def _tuple(texts: Iterable[str]) -> str:
    return f"<<{', '.join(map(_text, texts))}>>"


def _record(fields: Mapping[str, str], gap: str = " ") -> str:
    rows = f",{gap}".join(f"{_name(name)} |-> {value}" for name, value in fields.items())
    return f"[{rows}]" if rows else "<<>>"


def _is(role: Role) -> str:
    return f"Role[self] = {_text(role)}"


def _cases(guards: Iterable[tuple[str, Guard]]) -> str:
    """What may be done in which case; where there is no guard, anything may."""
    rows = [(case, guard) for case, guard in guards if guard.parts]
    lines = [f"{case} ->\n            {formula(guard)}" for case, guard in rows]
    return f"    CASE {f'{chr(10)}      [] '.join([*lines, 'OTHER -> TRUE'])}"


def formula(guard: Guard) -> str:
    """A guard as a formula on the world ``S`` for the worker ``self``."""
    return " /\\ ".join(_truth(part) for part in guard.parts)


_ORDERS: Mapping[type[ast.cmpop], str] = {
    ast.Eq: "Equal({0}, {1})", ast.NotEq: "~Equal({0}, {1})", ast.Lt: "Less({0}, {1})",
    ast.LtE: "AtMost({0}, {1})", ast.Gt: "Less({1}, {0})", ast.GtE: "AtMost({1}, {0})",
}  # fmt: skip


def _truth(node: ast.expr) -> str:
    """A guard's tree as a formula."""
    match node:
        case ast.BoolOp(op=op, values=parts):
            both = " /\\ " if isinstance(op, ast.And) else " \\/ "
            return f"({both.join(map(_truth, parts))})"
        case ast.UnaryOp(operand=part):
            return f"~{_truth(part)}"
        case ast.Compare(left=left, comparators=[ast.List(elts=options)]):
            found = " \\/ ".join(f"Equal({_value(left)}, {_value(o)})" for o in options)
            return f"({found or 'FALSE'})"
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            return _ORDERS[type(op)].format(_value(left), _value(right))
        case ast.Call(func=ast.Name(id="fits")):
            return "Fits(S, self, dest)"
        case ast.Call(func=ast.Name(id=kind), args=[body]):
            (role,) = {n.id for n in ast.walk(body) if isinstance(n, ast.Name)} & {*PLURAL}
            some = "\\A" if kind == "all" else "\\E"
            return f"({some} peer \\in Peers(S, {_text(role)}) : {_truth(body)})"
        case ast.Constant(value=bool() as flag):
            return str(flag).upper()
        case ast.Attribute(attr="lease" | "live" | "undead"):
            return f"(TRUE \\in {_value(node)})"
        case ast.Attribute(attr="state") | ast.Name():
            return f"({_value(node)} # {{}})"
    # As in Python, a number counts as false if there is none, or if it is zero.
    return f"({_value(node)} \\ {{0}} # {{}})"


def _value(node: ast.expr) -> str:
    """A guard's tree as the set of its one value; empty where it has none."""
    match node:
        case ast.Attribute(value=ast.Name(id="self"), attr=name):
            return f"Read_{name}(S, self)"
        case ast.Attribute(value=ast.Name(id=role), attr=name) if role in PLURAL:
            return f"Read_{name}(S, peer)"
        case ast.Attribute(value=ast.Name(id=role), attr=name):
            return f"UNION {{Read_{name}(S, n) : n \\in Peers(S, {_text(role)})}}"
        case ast.Constant(value=bool() as flag):
            return f"{{{str(flag).upper()}}}"
        case ast.Constant(value=int() as number):
            return f"{{{number}}}"
        case ast.Name(id=state):
            return f"{{{_text(state)}}}"
    return f"{{{_truth(node)}}}"
