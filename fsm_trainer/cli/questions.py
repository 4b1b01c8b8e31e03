"""``explain`` and ``trace``: would a worker do this, and did a run do what the tables say?"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from fsm_trainer.cli import shell
from fsm_trainer.cli.tables import DEFAULT_SCHEDULE
from fsm_trainer.document import Document, LineError
from fsm_trainer.machine.errors import ConfigError, Refused
from fsm_trainer.machine.events import Act, Begin, Done
from fsm_trainer.machine.legal import action_refusals, enabled, refusals
from fsm_trainer.machine.names import Role, State, Trigger
from fsm_trainer.machine.spec import Spec, load
from fsm_trainer.machine.step import advance
from fsm_trainer.machine.version import Version
from fsm_trainer.machine.world import System, World
from fsm_trainer.runtime.journal import Entry, read_journal
from fsm_trainer.verify.conformance import check_journal, replay
from fsm_trainer.verify.remedy import stand, together, way

JOURNAL = "journal.jsonl"


class Answer(NamedTuple):
    """What a worker would say."""

    workers: tuple[str, ...]
    """Who would move or act together."""
    because: dict[str, list[str]]
    """Why not, for each of them that refuses; empty: they would do it."""
    effects: list[str]
    needs: str
    after: list[str] | None
    """The moves after which it would be legal, if there are any."""


@shell.command
def explain(
    worker: Annotated[str, shell.argument("WORKER", "Such as actor, critic, rollout-0.")],
    asked: Annotated[
        str, shell.argument("TRIGGER_OR_ACTION", "Such as connect, sleep, generate, push.")
    ],
    schedule: shell.Schedule = None,
    rollouts: shell.Rollouts = 2,
    state: Annotated[
        list[str] | None,
        shell.option(
            "--state",
            "WORKER=STATE[@LINEAGE.NUMBER]",
            "Where a worker stands, and the version of its weights; may be repeated.",
        ),
    ] = None,
    journal: Annotated[
        Path | None, shell.option("--journal", "FILE", "Stand where the workers of a run stood.")
    ] = None,
    at: Annotated[
        int | None, shell.option("--at", "SEQ", "After this seq; default: at the end.", min=1)
    ] = None,
    states: shell.States = None,
    as_json: shell.Json = False,
) -> None:
    """Say if a worker would do it, and why not.

    Says which parts of the guard are false and which moves would make it legal. The workers stand
    at the beginning of a run, unless --state or --journal say otherwise.
    """
    if journal is not None:
        path, entries = _journal(journal)
        spec = load(schedule or _schedule_of(path, {e.role for e in entries}), states)
        system, world = _stood(path, entries, spec, at)
    elif at is not None:
        raise ConfigError("--at: of which journal? Add --journal FILE")
    else:
        spec = load(schedule or DEFAULT_SCHEDULE, states)
        system = System.of(spec, rollouts)
        world = system.initial()
    shell.chosen("WORKER", worker, list(system.names))
    world = placed(system, world, state or ())
    triggers = [str(t) for t in Trigger]
    actions = {name for table in spec.roles.values() for name in table.actions}
    shell.chosen("TRIGGER_OR_ACTION", asked, [*triggers, *sorted(actions)])
    answer = answer_for(system, world, worker, asked)
    here = system.get(world, worker).state
    if as_json:
        told = {"worker": worker, "state": str(here), "asked": asked}
        shell.print_json({**told, "accepted": not answer.because, **answer._asdict()})
        return
    _tell(worker, str(here), asked, answer)


def _tell(worker: str, state: str, asked: str, answer: Answer) -> None:
    out = shell.console()
    if not answer.because:
        out.print(f"{worker} is {state} and would accept {asked!r}.", style="green")
        if len(answer.workers) > 1:
            out.print(f"together: {', '.join(answer.workers)}")
        for effect in answer.effects:
            out.print(f"  {effect}")
        return
    out.print(f"{worker} is {state} and would refuse {asked!r}:", style="yellow")
    for name, because in answer.because.items():
        for reason in because:
            out.print(f"  {name}: {reason}")
    if answer.needs:
        out.print(f"needs: {answer.needs}")
    if answer.after:
        out.print(f"it would after: {', '.join(answer.after)}")


def answer_for(system: System, world: World, worker: str, asked: str) -> Answer:
    """Ask the tables; nothing moves."""
    trigger = asked in list(Trigger)
    ends = together(system, world, worker, asked)
    refuse = refusals if trigger else action_refusals
    because = {name: found for name in ends if (found := refuse(system, world, asked, name))}
    needs = ""
    try:
        world_after = advance(system, world, Begin(asked, ends) if trigger else Act(asked, ends))
    except Refused as refused:
        because.setdefault(refused.worker, list(refused.because))
        needs = f"{refused.worker} {refused.needs}" if refused.needs else ""
        return Answer(ends, because, [], needs, way(system, world, worker, asked, ends))
    effects = []
    while due := enabled(system, world_after):
        effects.append(f"{due[0].worker}: {due[0]}")
        world_after = advance(system, world_after, Done(due[0]))
    return Answer(ends, {}, effects, "", None)


def placed(system: System, world: World, places: Iterable[str]) -> World:
    """The world in which workers are settled where ``--state`` says."""
    return stand(system, world, dict(_placed(system, text) for text in places))


def _placed(system: System, text: str) -> tuple[str, tuple[State, Version | None]]:
    parsed = re.fullmatch(r"([^=@]+)=([^=@]+)(?:@(\d+)\.(\d+))?", text)
    if parsed is None:
        form = "Write WORKER=STATE, or WORKER=STATE@LINEAGE.NUMBER for its weights"
        raise ConfigError(f"--state {text}: has another form. {form}")
    name, given, lineage, number = parsed.groups()
    shell.chosen(f"--state {text}: worker", name, list(system.names))
    known = [str(s) for s in system.table(name).holds]
    shell.chosen(f"--state {text}: state", given, known)
    return name, (State(given), Version(int(lineage), int(number)) if lineage else None)


def _stood(
    path: Path, entries: Sequence[Entry], spec: Spec, at: int | None
) -> tuple[System, World]:
    """Where the records up to a seq leave the workers of a run."""
    if at is not None and at > len(entries):
        raise ConfigError(f"--at {at}: {path} has {len(entries)} records. Choose one of them")
    records = [entry.model_dump() for entry in entries]
    system = System(spec, {e.worker: Role(e.role) for e in entries})
    wrong = check_journal(records[:at], system, prefix=True)
    if wrong is not None:
        because = f"line {wrong.line} doesn't conform to schedule {spec.name}: {wrong.because}"
        raise ConfigError(f"{path}: {because}. Give the run's --schedule and --states, or trace it")
    world = replay(records[:at], system)
    if world is None:
        remedy = "Choose the seq before or after them"
        raise ConfigError(
            f"--at {at or len(entries)}: inside the records of a joint step. {remedy}"
        )
    return system, world


def _journal(given: Path) -> tuple[Path, list[Entry]]:
    path = given / JOURNAL if given.is_dir() else given
    if not path.is_file():
        raise ConfigError(f"{path}: there is no journal. Give a run's folder or its {JOURNAL}")
    return path, read_journal(path)


def _schedule_of(journal: Path, roles: Any) -> str:
    """The schedule of the run beside a journal; else the likeliest for the roles."""
    from fsm_trainer.runtime.checks import default_schedule

    config = journal.parent / "config.yaml"
    if config.is_file():
        data = Document(config, ConfigError).data
        named = data.get("schedule") if isinstance(data, dict) else None
        algorithm = data.get("algorithm") if isinstance(data, dict) else None
        told = algorithm if isinstance(algorithm, dict) else {}
        likely = default_schedule(told.get("name", "ppo"), told.get("kl_in", "loss"))
        return str(named or likely)
    return default_schedule("ppo" if Role.CRITIC in list(roles) else "grpo")


@shell.command
def trace(
    run: Annotated[Path, shell.argument("RUN", "A run's folder, or a journal.")],
    schedule: shell.Schedule = None,
    prefix: Annotated[
        bool, shell.option("--prefix", None, "The run was killed: its journal may end anywhere.")
    ] = False,
    states: shell.States = None,
    as_json: shell.Json = False,
) -> None:
    """Replay a run's journal against the tables.

    Exits with 1 and the first line that doesn't conform, with what led there. The schedule is that
    of the run's config.yaml; the workers are those of the journal.
    """
    out = shell.console()
    try:
        path, entries = _journal(run)
    except LineError as error:
        if as_json:
            told = {"conforms": False, "line": error.line, "because": error.reason}
            shell.print_json({**told, "worker": None, "story": []})
            raise typer.Exit(1) from None
        raise
    spec: Spec = load(schedule or _schedule_of(path, {e.role for e in entries}), states)
    violation = check_journal([e.model_dump() for e in entries], spec, prefix=prefix)
    if as_json:
        told = {"conforms": violation is None, "records": len(entries), "schedule": spec.name}
        shell.print_json(told | (asdict(violation) if violation else {}))
    elif violation is None:
        out.print(f"conforms: {len(entries)} records, schedule {spec.name}", style="green")
    else:
        out.print(f"{path}: doesn't conform to schedule {spec.name}", style="red")
        out.print(str(violation))
        if "the journal ends" in violation.because:
            out.print("If the run was killed, its journal may end anywhere: add --prefix.")
    if violation is not None:
        raise typer.Exit(1)
