"""``fsm-train``: the commands. Heavy parts are imported by the command that needs them."""

from __future__ import annotations

import sys

import typer

from fsm_trainer.cli.proofs import check
from fsm_trainer.cli.questions import explain, trace
from fsm_trainer.cli.replaying import replay_step
from fsm_trainer.cli.runs import doctor, report, run
from fsm_trainer.cli.simulation import simulate
from fsm_trainer.cli.tables import export, graph, plan, validate
from fsm_trainer.cli.watching import monitor

app = typer.Typer(
    name="fsm-train",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for command in (
    run, validate, plan, check, simulate, graph, export, explain, trace, monitor, report,
    replay_step, doctor,
):  # fmt: skip
    app.command()(command)


@app.callback()
def main() -> None:
    """RL post-training in which every actor, critic and rollout worker is a state machine.

    Exit codes: 0 ok; 1 a run or a check failed; 2 a mistake of the user; 130 interrupted.
    """


if __name__ == "__main__":
    sys.exit(app())
