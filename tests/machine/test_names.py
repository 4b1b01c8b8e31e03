"""The enums in the package and the tables name the same things."""

from __future__ import annotations

import pickle

import pytest
import yaml

from fsm_trainer.machine.names import LinkState, Role, State, Trigger
from fsm_trainer.machine.spec import default_states

STATES = default_states()


def table(name: str) -> dict:  # type: ignore[type-arg]
    return yaml.safe_load((STATES / name).read_text())  # type: ignore[no-any-return]


def test_every_role_has_its_table() -> None:
    assert {r for r in Role if (STATES / f"{r}.yaml").is_file()} == set(Role)
    assert all(table(f"{r}.yaml")["role"] == r for r in Role)


def test_a_role_of_ones_own_is_its_name_and_travels() -> None:
    judge = Role("judge")
    assert judge == "judge" and {judge: 1}["judge"] == 1 and judge not in list(Role)
    assert pickle.loads(pickle.dumps(judge)) == judge
    for wrong in ("Judge", "a judge", "", None, 1):
        with pytest.raises(ValueError):
            Role(wrong)


def test_every_state_and_trigger_is_used_and_no_other() -> None:
    tables = [table(f"{role}.yaml") for role in Role]
    assert {s for t in tables for s in t["states"]} == set(State)
    used = {row["trigger"] for t in tables for row in t["transitions"]}
    assert used == set(Trigger) - {Trigger.SEVER, Trigger.FAIL}
    assert table("link.yaml")["states"] == list(LinkState)
