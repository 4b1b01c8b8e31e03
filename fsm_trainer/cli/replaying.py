"""``replay-step``: a dumped step, computed again."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import TypeAdapter
from rich.console import Console

from fsm_trainer.cli import shell
from fsm_trainer.machine.errors import ConfigError

if TYPE_CHECKING:
    from fsm_trainer.training.stepdump import Replayed


@shell.command
def replay_step(
    dump: Annotated[Path, shell.argument("DIR", "A folder that run --dump-step wrote.")],
    as_json: shell.Json = False,
) -> None:
    """Compute the updates of a dumped step again, on the CPU, and say what differs.

    Losses, gradient norms and all other metrics, against what rounding explains. Exits with 1 if
    anything differs, or if the dump itself was changed. See docs/checks.md.
    """
    # Before torch looks: what one device did, another checks.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from fsm_trainer.runtime.config import AlgorithmConfig
    from fsm_trainer.runtime.logs import Logs
    from fsm_trainer.training.stepdump import TOLD, read, replay

    folders = sorted(path.parent for path in dump.glob(f"*/{TOLD}"))
    if not folders:
        raise ConfigError(f"DIR {dump}: no role has dumped a step there. Give RUN/dump/step-N")
    known: TypeAdapter[Any] = TypeAdapter(AlgorithmConfig)
    found: dict[str, Replayed] = {}
    with closing(Logs(console=shell.console(stderr=True))):
        for folder in folders:
            told = read(folder)
            found[told.role] = replay(folder, told, known.validate_python(told.algorithm))
    wrong = any(one.wrong for one in found.values())
    if as_json:
        roles = {role: _json(one) for role, one in found.items()}
        shell.print_json({"ok": not wrong, "roles": roles})
    else:
        for role, one in found.items():
            _print(role, one, shell.console())
    if wrong:
        raise typer.Exit(1)


def _json(found: Replayed) -> dict[str, Any]:
    differs = [figure._asdict() for figure in found.figures if figure.differs]
    told = {"figures": len(found.figures), "exact": found.exact, "changed": found.changed}
    untold = [figure.name for figure in found.figures if figure.untold]
    return {**told, "differs": differs, "untold": untold, "stopped": found.stopped}


def _print(role: str, found: Replayed, out: Console) -> None:
    for name in found.changed:
        out.print(f"{role}: {name} is not what was dumped", style="red")
    if found.stopped is not None:
        how = "stopped again" if found.again else "stopped, which it did not in the run"
        out.print(f"{role}: {how}: {found.stopped}", style="red")
    for figure in (figure for figure in found.figures if figure.differs):
        off = f"{abs(figure.now - figure.was):.3g} apart, {figure.allowed:.3g} is rounding"
        out.print(
            f"{role}: {figure.name} was {figure.was:.9g}, is {figure.now:.9g}: {off}", style="red"
        )
    if not found.figures and found.stopped is None:
        out.print(
            f"{role}: in the run the update ended with an error, here it doesn't", style="red"
        )
    if untold := [figure.name for figure in found.figures if figure.untold]:
        names = ", ".join(untold)
        out.print(f"{role}: nothing is said of {names}: rounding is as large as they are")
    count = len(found.figures)
    same = count - sum(figure.differs or figure.untold for figure in found.figures)
    text = f"{role}: {same} of {count} figures are as they were, {found.exact} of them to the bit"
    out.print(text, style="red" if found.wrong else "yellow" if untold else "green")
