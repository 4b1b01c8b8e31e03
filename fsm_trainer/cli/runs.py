"""``run``, ``report`` and ``doctor``: what starts runs, shows them, and says whether they can."""

from __future__ import annotations

import os
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fsm_trainer.cli import shell
from fsm_trainer.machine.errors import ConfigError

if TYPE_CHECKING:
    from fsm_trainer.runtime.config import Run


@shell.command
def run(
    config: Annotated[
        Path | None, shell.argument("CONFIG", "The run's configuration, a YAML file.")
    ] = None,
    overrides: shell.Overrides = None,
    folder: Annotated[
        Path | None, shell.option("--out", "DIR", "The run's folder; default: under runs/.")
    ] = None,
    resume: Annotated[
        Path | None, shell.option("--resume", "DIR", "Go on with the run in this folder.")
    ] = None,
    rollout_only: Annotated[
        bool, shell.option("--rollout-only", None, "Generate and score only, into trajectories/.")
    ] = False,
    train_only: Annotated[
        Path | None, shell.option("--train-only", "DUMP", "Train on a --rollout-only run's files.")
    ] = None,
    dump_step: Annotated[
        int | None, shell.option("--dump-step", "N", "Write that step's updates for replay-step.")
    ] = None,
    states: shell.States = None,
) -> None:
    """Train; Ctrl-C ends a run cleanly.

    The folder gets config.yaml, metrics.jsonl, journal.jsonl, logs and checkpoints.
    """
    from fsm_trainer.runtime.config import load_config

    if resume is not None:
        if folder is not None:
            raise ConfigError(f"--out {folder}: a resumed run stays in its folder. Remove --out")
        folder, config = resume, config or resume / "config.yaml"
        if not config.is_file():
            raise ConfigError(f"--resume {resume}: there is no config.yaml. Give a run's folder")
    if config is None:
        raise ConfigError("CONFIG: no file is given. Give one, or --resume with a run's folder")
    target = folder or Path("runs") / f"{config.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    loaded = load_config(config, overrides or (), states)
    if rollout_only or train_only is not None:
        loaded = _limited(loaded, rollout_only, train_only)
    if dump_step is not None:
        loaded = _dumping(loaded, dump_step)
    _writable(target)
    from fsm_trainer.runtime.launch import launch

    terminal = Console()
    launch(loaded, target.resolve(), terminal, resume=resume is not None)
    terminal.print(f"run folder: {target}", highlight=False, markup=False)


def _limited(loaded: Run, rollout_only: bool, dump: Path | None) -> Run:
    from fsm_trainer.data.dump import dump_path
    from fsm_trainer.runtime.config import Only

    if dump is None:
        return replace(loaded, only=Only.ROLLOUT)
    if loaded.critic_apart:
        remedy = "Train with --set schedule=disaggregated_critic: it learns the same"
        problem = f"{loaded.spec.name} sends values over a link that opens to rollout workers only"
        raise ConfigError(f"--train-only: {problem}. {remedy}")
    if rollout_only:
        raise ConfigError("--train-only: it contradicts --rollout-only. Remove one of them")
    for step in range(1, loaded.config.steps + 1):
        path = dump_path(dump, step)
        if not path.is_file():
            remedy = f"Give the --out of a --rollout-only run, or --set steps={step - 1}"
            raise ConfigError(f"--train-only {dump}: {path} is missing. {remedy}")
    return replace(loaded, only=Only.TRAIN, dump=dump.resolve())


def _dumping(loaded: Run, step: int) -> Run:
    from fsm_trainer.runtime.config import Only

    given, config = f"--dump-step {step}", loaded.config
    if not 1 <= step <= config.steps or loaded.only is Only.ROLLOUT:
        raise ConfigError(f"{given}: no such step is trained. Give one of 1 to {config.steps}")
    roles = [role for role in (config.actor, loaded.critic) if role is not None]
    if any(role.zero_stage == 3 and role.ranks > 1 for role in roles):
        remedy = "Write zero_stage: 2, or train on one rank"
        raise ConfigError(f"{given}: one rank can't take up what several hold at ZeRO 3. {remedy}")
    return replace(loaded, dump_step=step)


def _writable(target: Path) -> None:
    """A folder that can't be made is found before anything else is."""
    nearest = next(p for p in (target, *target.resolve().parents) if p.exists())
    if not nearest.is_dir():
        raise ConfigError(f"--out {target}: {nearest} is a file. Name a folder")
    if not os.access(nearest, os.W_OK):
        raise ConfigError(f"--out {target}: {nearest} can't be written. Name another folder")


@shell.command
def report(
    run_dir: Annotated[Path, shell.argument("RUN_DIR", "A run's folder; the run may still go on.")],
    out: Annotated[
        Path | None, shell.option("--out", "FILE", "The file; default: report.html in the folder.")
    ] = None,
    as_json: shell.Json = False,
) -> None:
    """Write one HTML file about a run.

    Rewards, KL, losses, time by phase, and each worker's states over time. With --json the main
    numbers are printed, and the file is written only if --out names it.
    """
    from fsm_trainer.cli.report import load_run, write_report

    if not run_dir.is_dir():
        remedy = "Give the --out of fsm-train run"
        raise ConfigError(f"RUN_DIR {run_dir}: there is no such folder. {remedy}")
    path = out or run_dir / "report.html"
    if out is not None or not as_json:
        write_report(run_dir, path)
    if as_json:
        shell.print_json(load_run(run_dir).summary().model_dump(mode="json"))
    else:
        shell.console().print(f"report: {path}")


@shell.command
def doctor(as_json: shell.Json = False) -> None:
    """Say what is installed and can work here.

    With a remedy for what can't; exits with 1 if anything is wrong.
    """
    from fsm_trainer.cli.doctor import Status, diagnose

    checks = diagnose()
    failed = any(check.status is Status.PROBLEM for check in checks)
    if as_json:
        shell.print_json({"ok": not failed, "checks": [asdict(check) for check in checks]})
    else:
        styles = {Status.OK: "green", Status.MISSING: "yellow", Status.PROBLEM: "red"}
        table = Table("", "check", "found", "remedy")
        for check in checks:
            status = Text(check.status, styles[check.status])
            table.add_row(status, check.name, check.detail, check.remedy)
        shell.console().print(table)
    if failed:
        raise typer.Exit(1)
