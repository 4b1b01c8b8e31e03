"""``simulate``: trainings with faults, on virtual time."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from fsm_trainer.cli import shell
from fsm_trainer.machine.spec import schedules


@shell.command
def simulate(
    schedule: Annotated[
        str | None, shell.option("--schedule", "NAME", "A shipped schedule; default: all.")
    ] = None,
    seeds: Annotated[int, shell.option("--seeds", "N", "How many seeds, from 0.", min=1)] = 100,
    seed: Annotated[
        int | None, shell.option("--seed", "K", "Only this one, and all that it did.", min=0)
    ] = None,
    steps: Annotated[int, shell.option("--steps", "N", "Steps of each training.", min=1)] = 20,
    rollouts: shell.Rollouts = 2,
    as_json: shell.Json = False,
) -> None:
    """Train with simulated workers and faults, on virtual time.

    Driver, reconciler, journal and machines are the real ones; nothing is learned. A seed decides
    faults, durations and the order of events, and replays exactly. Exits with 1 if a seed fails,
    with the fewest faults that make it fail and the end of its journal.
    """
    from fsm_trainer.simulation.seeds import Campaign, campaign, shrunk, story
    from fsm_trainer.simulation.training import Training

    known = schedules()
    names = known if schedule is None else [shell.chosen("--schedule", schedule, known)]
    numbers = range(seeds) if seed is None else [seed]
    trainings = [Training(name, n, steps, rollouts) for n in numbers for name in names]
    came, began = Campaign(), time.monotonic()
    for result in campaign(trainings):
        came.add(result)
        if seed is not None and not as_json:
            for line in result.told:
                typer.echo(line)
            typer.echo(f"{result.training.schedule}, seed {seed}: {result.end}")
        if result.failure:
            break
    seconds = time.monotonic() - began
    fewest = [shrunk(result) for result in came.failed]
    stories = [story(result) for result in fewest]
    told: dict[str, Any] = {
        "schedules": names,
        "trainings": came.trainings,
        "steps": steps,
        "rollouts": rollouts,
        "seconds": round(seconds, 1),
        "ends": dict(came.ends),
        "faults": came.hit.total(),
        "failed": [
            {
                "schedule": result.training.schedule,
                "seed": result.training.seed,
                "because": result.failure,
                "faults": [str(fault) for fault in result.fired],
                "story": list(result.story),
            }
            for result in fewest
        ],
    }
    if as_json:
        shell.print_json(told)
    else:
        _tell(told, stories)
    if came.failed:
        raise typer.Exit(1)


def _tell(told: dict[str, Any], stories: list[list[str]]) -> None:
    out = shell.console()
    ends = ", ".join(f"{count} {end}" for end, count in told["ends"].items())
    what = f"{told['trainings']} trainings of {told['steps']} steps, {told['faults']} faults"
    out.print(f"{what}, in {told['seconds']:g} s: {ends}", style="red" if stories else "green")
    for lines in stories:
        for line in lines:
            out.print(line)
