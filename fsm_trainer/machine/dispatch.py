"""The role's table as a ``transitions.Machine``: it moves a worker between two committed events.

``transitions`` dispatches and no more: guards, effects and roll-backs are
:func:`~fsm_trainer.machine.step.step`'s, because in a callback of ``transitions`` a refusal is a
bare False and an error arrives when the state has moved already.
"""

from __future__ import annotations

from typing import Any

from transitions import Machine

from fsm_trainer.machine.names import State
from fsm_trainer.machine.spec import RoleTable


class Dispatch:
    """One worker's place in its role's table."""

    state: str

    def __init__(self, table: RoleTable) -> None:
        self._table = table
        states = [str(state) for state in table.holds]
        edges = [[str(t.trigger), str(t.source), str(t.dest)] for t in table.transitions]
        self._machine: Any = Machine(
            self, states, str(State.DISCONNECTED), edges, auto_transitions=False, send_event=True
        )

    def follow(self, trigger: str, dest: State) -> bool:
        """Go to ``dest``; gives False where an undo, `sever` or `fail` leads: they have no edge."""
        edge = self._table.edge(trigger, State(self.state))
        if edge is None or edge.dest != dest:
            self._machine.set_state(str(dest), self)
            return False
        return bool(self._machine.events[trigger].trigger(self))
