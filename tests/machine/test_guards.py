"""Guards: what is read, what is refused with its column, what is explained."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from fsm_trainer.machine.errors import SpecError
from fsm_trainer.machine.guards import Value, constant, parse


class Fixed:
    """A view over given values."""

    def __init__(self, full: bool = False, **values: Value) -> None:
        self.values, self.full = values, full

    def attribute(self, worker: str, name: str) -> Value:
        return self.values.get(f"{worker}_{name}".replace("-", ""))

    def peers(self, role: str) -> Iterable[str]:
        return {"rollout": ["rollout-0", "rollout-1"], "actor": ["actor"]}.get(role, [])

    def fits(self, worker: str) -> bool:
        return not self.full


@pytest.mark.parametrize(
    ("text", "column", "reason"),
    [
        ("self.colour == 1", 1, "unknown attribute `colour`"),
        ("1 < self.epoch < 3", 1, "one comparison at a time"),
        ("rollout.live", 1, "use all(...) or any(...)"),
        ("any(self.live)", 1, "speaks of one of"),
        ("all(any(rollout.live))", 5, "not nested"),
        ("self.state == asleep", 15, "unknown name `asleep`"),
        ("self.epoch == 'x'", 15, "not in the guard language"),
        ("open(device)", 1, "not in the guard language"),
        ("self.epoch + 1 == 2", 1, "not in the guard language"),
    ],
)
def test_what_is_not_in_the_language_is_refused_with_its_column(
    text: str, column: int, reason: str
) -> None:
    with pytest.raises(SpecError) as error:
        parse(text)
    assert reason in str(error.value)
    assert f"(column {column} of `{text}`)" in str(error.value)


def test_what_is_not_an_expression_is_refused() -> None:
    with pytest.raises(SpecError, match=r"^cannot read the guard `self.live ==`"):
        parse("self.live ==")


@pytest.mark.parametrize("op", ["==", "<", "<=", ">", ">="])
def test_no_version_is_equal_to_nothing_not_even_to_none(op: str) -> None:
    assert not parse(f"self.version {op} actor.version").holds(Fixed(), "rollout-0")


def test_no_version_differs_from_everything() -> None:
    assert parse("self.version != actor.version").holds(Fixed(), "rollout-0")


@pytest.mark.parametrize(
    ("text", "true"),
    [
        ("self.in_flight == 0 and not self.live", False),
        ("self.in_flight != 0 or self.live", True),
        ("self.state in [awake, connected]", True),
        ("self.state in [sleeping]", False),
        ("all(rollout.live)", False),
        ("any(rollout.live)", True),
        ("all(rollout.epoch == self.epoch)", True),
        ("self.epoch > 2 and self.epoch <= 3", True),
        ("critic.live", False),
        ("fits(device)", True),
    ],
)
def test_a_guard_has_the_value_of_what_it_reads(text: str, true: bool) -> None:
    view = Fixed(
        actor_state="awake", actor_in_flight=0, actor_live=True, actor_epoch=3,
        rollout0_live=True, rollout1_live=False, rollout0_epoch=3, rollout1_epoch=3,
    )  # fmt: skip
    assert parse(text).holds(view, "actor") is true


def test_only_the_false_parts_are_explained_with_what_they_read() -> None:
    guard = parse("self.in_flight == 0 and all(rollout.live) and fits(device)")
    view = Fixed(full=True, actor_in_flight=0, rollout0_live=True, rollout1_live=False)
    assert guard.explain(view, "actor") == [
        "`all(rollout.live)` is false (rollout-0.live=True, rollout-1.live=False)",
        "`fits(device)` is false (the device is full)",
    ]


def test_a_condition_reads_facts_alone() -> None:
    facts = {"colocated": True, "critic": False}
    assert constant("colocated and not critic", facts)
    for text in ("offloaded", "self.live", "fits(device)", "colocated == 1"):
        with pytest.raises(SpecError, match="column"):
            constant(text, facts)


def test_only_numbers_have_an_order() -> None:
    with pytest.raises(SpecError, match="only numbers have an order"):
        parse("self.state < awake").holds(Fixed(actor_state="awake"), "actor")
