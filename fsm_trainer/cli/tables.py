"""``validate``, ``plan``, ``graph`` and ``export``: what a configuration and its tables come to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from fsm_trainer.cli import shell
from fsm_trainer.cli.svg import Edge, state_diagram_mermaid, state_diagram_svg
from fsm_trainer.machine.errors import ConfigError, SpecError
from fsm_trainer.machine.names import Role, Trigger
from fsm_trainer.machine.planner import Move
from fsm_trainer.machine.spec import Phase, Spec, load
from fsm_trainer.machine.world import System
from fsm_trainer.verify import tla
from fsm_trainer.verify.run import STEADY, plan_run

DEFAULT_SCHEDULE = "disaggregated_critic"
LINK = "link"

Plan = dict[str, list[tuple[str, tuple[Move, ...]]]]


class Format(StrEnum):
    """How a diagram is written."""

    MERMAID = "mermaid"
    SVG = "svg"


class Language(StrEnum):
    """What the tables are exported to."""

    TLA = "tla"


@shell.command
def validate(
    config: shell.Config,
    overrides: shell.Overrides = None,
    states: shell.States = None,
    as_json: shell.Json = False,
) -> None:
    """Check a configuration; start nothing.

    Says what follows from it, and the schedule that it runs.
    """
    from fsm_trainer.runtime.config import load_config

    try:
        run = load_config(config, overrides or (), states)
    except (ConfigError, SpecError) as error:
        if not as_json:
            raise
        shell.print_json({"valid": False, "mistakes": str(error).splitlines()})
        raise typer.Exit(2) from None
    phases = [_phase(run.spec, run.spec.phases[name]) for name in _sequence(run.spec)]
    if as_json:
        settings = run.config.model_dump(mode="json")
        told = {"valid": True, "schedule": run.spec.name, "notes": list(run.notes)}
        shell.print_json({**told, "phases": phases, "config": settings})
        return
    out = shell.console()
    out.print(f"{config}: valid", style="green")
    for note in run.notes:
        out.print(note)
    table = Table("phase", *map(str, run.spec.roles), "action", title=f"schedule {run.spec.name}")
    for row in phases:
        wants = [" or ".join(row["wants"].get(role, ["–"])) for role in run.spec.roles]
        table.add_row(row["phase"], *wants, row["action"] or "–")
    out.print(table)


def _sequence(spec: Spec) -> list[str]:
    schedule = spec.schedule
    lanes = (phase for lane in schedule.lanes.values() for phase in lane)
    return list(dict.fromkeys([*schedule.prologue, *lanes, *schedule.epilogue]))


def _phase(spec: Spec, phase: Phase) -> dict[str, Any]:
    wants = {str(role): sorted(map(str, states)) for role, states in phase.wants.items()}
    return {"phase": phase.name, "wants": wants, "action": phase.action}


@shell.command
def plan(
    config: Annotated[
        Path | None, shell.argument("CONFIG", "A configuration; default: see --schedule.")
    ] = None,
    overrides: shell.Overrides = None,
    schedule: shell.Schedule = None,
    rollouts: Annotated[
        int | None, shell.option("--rollouts", "N", "Rollout workers; default: 2.", min=1)
    ] = None,
    states: shell.States = None,
    as_json: shell.Json = False,
) -> None:
    """Show the transitions of each phase.

    In the prologue, the first step, a steady step and the epilogue. A run leaves out the warm-up
    where it has none, and evaluates between steps where its configuration says so.
    """
    if config is not None:
        from fsm_trainer.runtime.config import load_config

        settings = [*(overrides or ()), *([f"schedule={schedule}"] if schedule else [])]
        settings += [f"rollout.workers={rollouts}"] if rollouts else []
        system = load_config(config, settings, states).system
    else:
        system = System.of(load(schedule or DEFAULT_SCHEDULE, states), rollouts or 2)
    planned = plan_run(system)
    if as_json:
        shell.print_json(_plan_document(system, planned))
        return
    table = Table("section", "phase", "transitions", "action", title=f"schedule {system.spec.name}")
    for section, phases in planned.items():
        for place, (name, moves) in enumerate(phases):
            action = system.spec.phases[name].action or "–"
            text = ", ".join(map(str, moves)) or "–"
            table.add_row(section if not place else "", name, text, action)
        table.add_section()
    out = shell.console()
    out.print(table)
    counts = transitions_per_step(planned)
    total = sum(sum(workers.values()) for workers in counts.values())
    out.print(f"A steady step takes {total} transitions:")
    for trigger, workers in counts.items():
        out.print(f"  {trigger}: {', '.join(f'{w} {n}×' for w, n in workers.items())}")


def transitions_per_step(planned: Plan) -> dict[str, dict[str, int]]:
    """How often each worker takes each trigger in a steady step."""
    counts: dict[str, Counter[str]] = {}
    for _, moves in planned.get(STEADY, []):
        for move in moves:
            if move.name in list(Trigger):
                counts.setdefault(move.name, Counter()).update(move.workers)
    return {trigger: dict(workers) for trigger, workers in counts.items()}


def _plan_document(system: System, planned: Plan) -> dict[str, Any]:
    sections = {
        section: [
            {
                "phase": name,
                "moves": [{"trigger": str(m.name), "workers": list(m.workers)} for m in moves],
                "action": system.spec.phases[name].action,
            }
            for name, moves in phases
        ]
        for section, phases in planned.items()
    }
    told = {"schedule": system.spec.name, "workers": list(system.names)}
    return {**told, "sections": sections, "transitions_per_step": transitions_per_step(planned)}


@shell.command
def graph(
    schedule: shell.Schedule = None,
    role: Annotated[
        str | None, shell.option("--role", "ROLE", "actor, critic, rollout or link; default: all.")
    ] = None,
    form: Annotated[
        Format,
        shell.option("--format", "mermaid|svg", "Mermaid for Markdown, or one SVG document."),
    ] = Format.MERMAID,
    out: Annotated[Path | None, shell.option("--out", "FILE", "A file; default: print it.")] = None,
    states: shell.States = None,
    as_json: shell.Json = False,
) -> None:
    """Draw the machines, as a schedule has them.

    Labels are `trigger [guard]`; each state says what it holds.
    """
    spec = load(schedule or DEFAULT_SCHEDULE, states)
    known = [*map(str, spec.roles), LINK]
    names = known if role is None else [shell.chosen("--role", role, known)]
    if as_json:
        shell.print_json({name: machine(spec, name) for name in names})
        return
    if form is Format.MERMAID:
        text = "\n".join(mermaid(spec, name) for name in names)
    elif len(names) > 1:
        raise ConfigError(f"--format svg: one drawing a file. Add --role, of {known}")
    else:
        holds, edges = drawn(spec, names[0])
        text = state_diagram_svg(holds, [(s, d, _broken(label)) for s, d, label in edges])
    if out is None:
        typer.echo(text, nl=False)
    else:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8")


def machine(spec: Spec, name: str) -> dict[str, Any]:
    """A role's machine, or the link's: states and what they hold, transitions and actions."""
    if name == LINK:
        moves = [(t, str(s), str(d)) for (s, t), d in spec.link_moves.items()]
        rows = [dict(zip(("trigger", "from", "to"), move, strict=True)) for move in moves]
        states = dict.fromkeys(state for _, *ends in moves for state in ends)
        return {"states": list(states), "transitions": rows}
    table = spec.roles[Role(name)]
    return {
        "states": {str(state): list(held) for state, held in table.holds.items()},
        "transitions": [
            {
                "trigger": str(t.trigger),
                "from": str(t.source),
                "to": str(t.dest),
                "guard": t.guard.text or None,
                "joint": t.joint,
            }
            for t in table.transitions
        ],
        "actions": {
            name: {"needs": sorted(a.needs), "guard": a.guard.text or None, "joint": a.joint}
            for name, a in table.actions.items()
        },
    }


def drawn(spec: Spec, name: str) -> tuple[dict[str, Sequence[str]], list[Edge]]:
    """What each state of a machine holds, and its edges, labelled ``trigger [guard]``."""
    found = machine(spec, name)
    holds = dict.fromkeys(found["states"], ()) if name == LINK else found["states"]
    guards = [f" [{t['guard']}]" if t.get("guard") else "" for t in found["transitions"]]
    moves = zip(found["transitions"], guards, strict=True)
    return holds, [(t["from"], t["to"], f"{t['trigger']}{guard}") for t, guard in moves]


def _broken(label: str) -> str:
    """A label whose guard stands below its trigger, a part a line: guards are wider than gaps."""
    return label.replace(" [", "\n[", 1).replace(" and ", "\nand ")


def mermaid(spec: Spec, name: str) -> str:
    """The Mermaid diagram of a role, or of the link; each state says what it holds."""
    return state_diagram_mermaid(name, *drawn(spec, name))


@shell.command
def export(
    out: Annotated[Path, shell.option("--out", "DIR", "Where to write; made if it isn't there.")],
    to: Annotated[
        Language, shell.option("--to", "tla", "The language: TLA+, for the model checker TLC.")
    ] = Language.TLA,
    schedule: shell.Schedule = None,
    rollouts: shell.Rollouts = 1,
    coarse: Annotated[
        bool, shell.option("--coarse", None, "A worker's own move is one step: fewer states.")
    ] = False,
    states: shell.States = None,
) -> None:
    """Write the composed system for a checker that isn't ours.

    A module with the tables of a schedule, and what TLC needs beside it; see docs/proof.md.
    """
    system = System.of(load(schedule or DEFAULT_SCHEDULE, states), rollouts)
    module = {Language.TLA: tla.write}[to](system, out, fine=not coarse)
    told = shell.console()
    told.print(f"{module}, {module.with_suffix('.cfg').name}")
    told.print(f"Check it there: java -cp tla2tools.jar tlc2.TLC {module.name}")
