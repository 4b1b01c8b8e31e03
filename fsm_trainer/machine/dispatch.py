"""The role's table as a ``transitions.Machine``: it moves a worker between two committed events.

``transitions`` dispatches and no more: guards, effects and roll-backs are
:func:`~fsm_trainer.machine.step.step`'s, because in a callback of ``transitions`` a refusal is a
bare False and an error arrives when the state has moved already. That its table and ``step`` agree
on every destination is checked at each move.
"""

from __future__ import annotations

from typing import Any

from transitions import Machine

from fsm_trainer.machine.errors import SpecError
from fsm_trainer.machine.names import State
from fsm_trainer.machine.spec import RoleTable


class Dispatch:
    """One worker's place in its role's table."""

    state: str

    def __init__(self, table: RoleTable) -> None:
        self._machine: Any = Machine(
            model=self,
            states=[str(state) for state in table.holds],
            transitions=[[str(t.trigger), str(t.source), str(t.dest)] for t in table.transitions],
            initial=str(State.DISCONNECTED),
            auto_transitions=False,
            send_event=True,
        )

    def move(self, trigger: str, dest: State) -> None:
        """Take the table's edge; it must lead to ``dest``.

        Raises:
            SpecError: the table and ``step`` disagree.
        """
        source = self.state
        self._machine.events[trigger].trigger(self)
        if self.state != dest:
            raise SpecError(f"{trigger} from {source} leads to {self.state}, step says {dest}")

    def fall(self, dest: State) -> None:
        """Go where an undo, a `sever` or a `fail` leads: no table has an edge for it."""
        self._machine.set_state(str(dest), self)
