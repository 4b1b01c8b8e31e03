"""The TLA+ module has the tables and guards as they are; whether it is right only TLC can tell."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from fsm_trainer.cli.main import app
from fsm_trainer.machine.errors import SpecError
from fsm_trainer.machine.guards import parse
from fsm_trainer.machine.spec import load, schedules
from fsm_trainer.machine.world import System
from fsm_trainer.verify import tla


@pytest.mark.parametrize("schedule", schedules())
def test_a_module_has_every_state_and_is_named_as_its_file(schedule: str, tmp_path: Path) -> None:
    system = System.of(load(schedule), 2)
    module = tla.write(system, tmp_path)
    text = module.read_text()
    assert text.splitlines()[0].strip("- ") == f"MODULE {module.stem}"
    for table in system.spec.roles.values():
        for state, held in table.holds.items():
            order = ", ".join(f'"{resource}"' for resource in held)
            assert f"{state} |-> <<{order}>>" in text
    assert "$" not in text


@pytest.mark.parametrize(
    ("guard", "formula"),
    [
        ("not self.undead", r"~(TRUE \in Read_undead(S, self))"),
        ("self.in_flight == 0", "Equal(Read_in_flight(S, self), {0})"),
        ("self.version != 3", "~Equal(Read_version(S, self), {3})"),
        ("self.in_flight > 1", "Less({1}, Read_in_flight(S, self))"),
        ("self.version", r"(Read_version(S, self) \ {0} # {})"),
        ("self.state in [awake, connected]",
         '(Equal(Read_state(S, self), {"awake"}) \\/ Equal(Read_state(S, self), {"connected"}))'),
        ("all(rollout.lease or not rollout.live)",
         '(\\A peer \\in Peers(S, "rollout") : ((TRUE \\in Read_lease(S, peer))'
         " \\/ ~(TRUE \\in Read_live(S, peer))))"),
        ("self.epoch == actor.epoch",
         'Equal(Read_epoch(S, self), UNION {Read_epoch(S, n) : n \\in Peers(S, "actor")})'),
        ("fits(device)", "Fits(S, self, dest)"),
    ],
)  # fmt: skip
def test_a_guard_is_translated_from_its_tree(guard: str, formula: str) -> None:
    assert tla.formula(parse(guard)) == formula


def test_several_rollout_workers_are_alike() -> None:
    spec = load("disaggregated")
    assert "SYMMETRY" not in tla.configuration(System.of(spec, 1))
    assert "SYMMETRY Symmetry" in tla.configuration(System.of(spec, 2))


def test_a_name_that_tla_cannot_have_is_refused() -> None:
    spec = load("disaggregated")
    system = System(spec, {f"the {role}": role for role in spec.roles})
    with pytest.raises(SpecError, match="no name 'the actor'"):
        tla.export(system)


def test_the_command_writes_a_module_and_what_tlc_needs_beside_it(tmp_path: Path) -> None:
    words = ["export", "--to", "tla", "--schedule", "disaggregated", "--out", str(tmp_path / "new")]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [
        "disaggregated.cfg",
        "disaggregated.tla",
    ]
    assert "tlc2.TLC disaggregated.tla" in result.stdout
    assert CliRunner().invoke(app, [*words, "--schedule", "none"]).exit_code == 2
