"""``check``: what is proved of the tables, before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from fsm_trainer.cli import shell
from fsm_trainer.machine.spec import Spec, load, schedules
from fsm_trainer.machine.world import System
from fsm_trainer.verify.check import Verdict
from fsm_trainer.verify.check import check as explore
from fsm_trainer.verify.driven import check_driven
from fsm_trainer.verify.mutate import Fate, fates
from fsm_trainer.verify.story import for_programs, sequence_diagram, write_test


@shell.command
def check(
    schedule: shell.Schedule = None,
    rollouts: Annotated[
        int | None, shell.option("--rollouts", "N", "Up to how many rollout workers.", min=1)
    ] = None,
    driven: Annotated[
        int | None,
        shell.option("--driven", "N", "Up to how many, as the schedule drives them.", min=0),
    ] = None,
    fine: Annotated[
        bool, shell.option("--fine", None, "Let other things happen between any two effects.")
    ] = False,
    most: Annotated[
        int, shell.option("--max-states", "N", "Give up after so many states.", min=1)
    ] = 2_000_000,
    mutate: Annotated[
        bool, shell.option("--mutate", None, "Break each part in turn: a property must fail.")
    ] = False,
    test: Annotated[Path | None, shell.option("--test", "FILE", "Tell it as a test, too.")] = None,
    states: shell.States = None,
    as_json: shell.Json = False,
) -> None:
    """Visit every state that the tables allow; start nothing.

    With a fault between any two events: triggers in any order, for one rollout worker up to
    --rollouts (2), and as the schedule drives them, up to --driven (3); by default one fewer each
    where a critic is at the link, too. A violation is told by the shortest way there, as a Mermaid
    sequence diagram, and the first one by --test as a pytest file that replays it on the real
    lifecycles. Exits with 1 if a property fails, a mutant survives, or the states are too many.
    """
    names = schedules(states)
    if schedule is not None:
        names = [shell.chosen("--schedule", schedule, names)]
    specs = [load(name, states) for name in names]
    if mutate:
        ok = _mutate(specs, as_json)
    else:
        found = _check(specs, rollouts, driven, fine, most)
        _print(found, as_json)
        if test is not None:
            write_test(test, [(f.system, f.verdict) for f in found], fine=fine, states=states)
        ok = all(each.verdict.violation is None and not each.verdict.cut for each in found)
    if not ok:
        raise typer.Exit(1)


class _Found(NamedTuple):
    schedule: str
    mode: str
    rollouts: int
    system: System
    verdict: Verdict


def _check(
    specs: list[Spec], rollouts: int | None, driven: int | None, fine: bool, most: int
) -> list[_Found]:
    found: list[_Found] = []
    modes = {"any order": (explore, rollouts, 2), "driven": (check_driven, driven, 3)}
    with _progress() as bar:
        for spec in specs:
            # A third end of a link makes as many states as one rollout worker more.
            more = any(len(ends) > 2 for ends in System.of(spec, 1).all_ends.values())
            for mode, (search, workers, usual) in modes.items():
                for count in range(1, 1 + (usual - more if workers is None else workers)):
                    system = System.of(spec, count)
                    task = bar.add_task(f"{spec.name}, {mode}, {count} rollout workers", details="")

                    def tell(visited: int, waiting: int, task: Any = task) -> None:
                        bar.update(task, details=f"{visited:,} states, {waiting:,} to go")

                    verdict = search(system, fine=fine, most=most, progress=tell)
                    bar.remove_task(task)
                    found.append(_Found(spec.name, mode, count, system, verdict))
    return found


def _row(found: _Found) -> dict[str, Any]:
    about = {"schedule": found.schedule, "mode": found.mode, "rollouts": found.rollouts}
    return {**about, **for_programs(found.verdict)}


def _print(found: list[_Found], as_json: bool) -> None:
    if as_json:
        return shell.print_json([_row(each) for each in found])
    table = Table("schedule", "mode", "workers", "states", "transitions", "seconds", "verdict")
    for name, mode, count, _, verdict in found:
        because = verdict.violation.because if verdict.violation else ""
        told = because or ("given up: too many states" if verdict.cut else "holds")
        numbers = [f"{verdict.states:,}", f"{verdict.transitions:,}", f"{verdict.seconds:.1f}"]
        table.add_row(name, mode, str(count), *numbers, told)
    out = shell.console()
    out.print(table)
    for each in found:
        if each.verdict.violation is not None:
            return out.print(sequence_diagram(each.system, each.verdict.violation))
    return None


def _mutate(specs: list[Spec], as_json: bool) -> bool:
    told = list[Fate]()
    with _progress() as bar:
        task = bar.add_task("mutants", details="")
        for fate in fates(specs):
            told.append(fate)
            bar.update(task, details=f"{len(told)}: {fate.mutant}")
    survivors = [fate.mutant for fate in told if not fate.killed_by]
    if as_json:
        mutants = [
            {"mutant": f.mutant, "schedule": f.schedule, "killed_by": f.killed_by} for f in told
        ]
        shell.print_json({"mutants": mutants, "survivors": survivors})
        return not survivors
    table = Table("mutant", "killed by", "in", "states")
    for fate in told:
        table.add_row(fate.mutant, fate.killed_by or "nothing", fate.schedule, f"{fate.states:,}")
    out = shell.console()
    out.print(table)
    out.print(f"{len(told)} mutants, {len(survivors)} survive", style="red" if survivors else "")
    return not survivors


def _progress() -> Progress:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    details = TextColumn("{task.fields[details]}")
    return Progress(*columns, details, console=Console(stderr=True), transient=True)
