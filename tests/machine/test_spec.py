"""The loader: whatever is wrong in a table is named with its file and line."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from fsm_trainer.machine.errors import SpecError
from fsm_trainer.machine.names import Role, State
from fsm_trainer.machine.spec import default_states, load, schedules
from fsm_trainer.machine.world import System, WorldView

PLAN = "schedules/disaggregated_critic.yaml"
WAKE = "{trigger: wake, from: sleeping, to: awake, guard: fits(device)}"
STOP = "{trigger: stop, from: sleeping, to: disconnected}"
SLEEP = "{trigger: sleep, from: awake, to: sleeping, guard: self.in_flight == 0}"

MISTAKES = [
    ("actor.yaml", "sleeping: [bank]", "sleeping: [lnik]", "unknown resource 'lnik'"),
    ("actor.yaml", "sleeping: [bank]", "sleeping: [bank, train_groups]", "may not hold"),
    ("actor.yaml", "sleeping: [bank]", "sleeping: [weights]", "without any of"),
    ("actor.yaml", "disconnected: []", "disconnected: [bank]", "holds nothing"),
    ("actor.yaml", "not colocated}", "not collocated}", "unknown fact `collocated`"),
    ("actor.yaml", "[bank, weights, optimizer, train_groups]\n  c",
     "[bank, train_groups, weights, optimizer]\n  c", "comes after a communicator"),
    ("actor.yaml", "trigger: start", "trigger: begin", "trigger"),
    ("actor.yaml", "trigger: start", "trigger: fail", "derived and can't be declared"),
    ("actor.yaml", "from: disconnected", "from: asleep", "from"),
    ("actor.yaml", "fits(device)", "fits(room)", "not in the guard language"),
    ("actor.yaml", "any(rollout.live)", "rollout.live", "Use all(...) or any(...)"),
    ("actor.yaml", "self.in_flight == 0 and self.lease}", "self.flight == 0}",
     "unknown attribute `flight`"),
    ("actor.yaml", "joint: link", "joint: lnik", "unknown link 'lnik'"),
    ("actor.yaml", "needs: [weights, link]", "needs: [weights, link, kv]", "no state holds all of"),
    ("actor.yaml", "needs: [weights, link]", "needs: [weights, lnik]", "unknown resource 'lnik'"),
    ("actor.yaml", "actions:", "acts:", "acts"),
    ("actor.yaml", "role: actor", "role: actress", "actor.yaml is the table of role 'actor'"),
    ("actor.yaml", "role: actor", "role: Actress", "role: is not one of the choices"),
    ("actor.yaml", "any(rollout.live)", "actress.live", "unknown role 'actress', one of actor, "),
    ("actor.yaml", "any(rollout.live)", "link.live", "unknown role 'link'"),
    ("actor.yaml", "role: actor", "role: actor\nrole: actor", "the key 'role' stands"),
    ("actor.yaml", "states:", "states: [", "not YAML"),
    ("actor.yaml", WAKE, f"{WAKE}\n  - {WAKE}", "ambiguous"),
    ("critic.yaml", f"  - {WAKE}\n", "", "can't be reached"),
    ("critic.yaml", f"  - {SLEEP}\n", "", "is a trap"),
    ("critic.yaml", f"  - {STOP}\n", "", "is a trap"),
    ("critic.yaml", "sleeping: [bank]", "sleeping: []", "hold the same"),
    ("critic.yaml", "guard: self.in_flight == 0, when: critic_apart}",
     "guard: self.in_flight == 0}", "unknown state 'connected'"),
    ("critic.yaml", "  connected: [bank, weights, optimizer, train_groups, link]\n", "",
     "unknown state 'connected'"),
    ("critic.yaml", "{connected: critic_apart}", "{connected: apart}", "unknown fact `apart`"),
    ("system.yaml", "capacity: 3 ", "capacity: much ", "capacity"),
    ("system.yaml", "size: 1", "size: -1", "size"),
    ("system.yaml", "hub: actor", "hub: boss", "unknown role 'boss'"),
    (PLAN, "devices: {actor: train", "devices: {boss: train", "boss.yaml:1: the file is missing"),
    ("link.yaml", "from: opening", "from: ajar", "from"),
    (PLAN, "critic: awake}", "critic: alive}", "critic"),
    (PLAN, "critic: awake}", "critic: connected}", "unknown state 'connected'"),
    (PLAN, "action: push", "action: shove", "unknown action 'shove'"),
    (PLAN, "main: [rollout,", "main: [rolout,", "unknown phase 'rolout'"),
    (PLAN, "facts: {colocated: false", "facts: {collocated: false", "unknown fact"),
    ("actor.yaml", "when: kl_in_reward", "when: kl_in_rewards", "unknown fact"),
]  # fmt: skip


@pytest.fixture
def states(tmp_path: Path) -> Path:
    return Path(shutil.copytree(default_states(), tmp_path / "states"))


@pytest.mark.parametrize(("name", "old", "new", "reason"), MISTAKES)
def test_a_mistake_is_named_with_its_file_and_line(
    states: Path, name: str, old: str, new: str, reason: str
) -> None:
    path = states / name
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(SpecError) as error:
        load("disaggregated_critic", states)
    assert reason in str(error.value)
    assert re.search(r"states/\S+\.yaml:\d+: ", str(error.value)), str(error.value)


def test_the_line_is_that_of_the_mistake(states: Path) -> None:
    path = states / "critic.yaml"
    lines = path.read_text().splitlines()
    at = next(i for i, line in enumerate(lines, start=1) if "trigger: wake" in line)
    lines[at - 1] = lines[at - 1].replace("fits(device)", "fit(device)")
    path.write_text("\n".join(lines))
    with pytest.raises(SpecError, match=rf"critic\.yaml:{at}: "):
        load("disaggregated_critic", states)


def test_a_role_of_ones_own_has_its_table_in_the_folder_and_guards_read_it(states: Path) -> None:
    critic = (states / "critic.yaml").read_text()
    (states / "judge.yaml").write_text(critic.replace("role: critic", "role: judge"))
    for name, old, new in (
        (PLAN, "critic: train", "critic: train, judge: own"),
        ("actor.yaml", "any(rollout.live) and", "judge.live and"),
    ):
        path = states / name
        path.write_text(path.read_text().replace(old, new, 1))
    spec = load("disaggregated_critic", states)
    assert [*spec.roles] == ["actor", "critic", "judge", "rollout"]
    assert [*spec.roles[Role("judge")].actions] == ["values", "save"]
    system = System.of(spec, rollouts=2)
    assert [*system.names] == ["actor", "critic", "judge", "rollout-0", "rollout-1"]
    guard = spec.roles[Role.ACTOR].edge("connect", State.AWAKE)
    assert guard is not None and guard.guard.roles == {"judge"}
    assert guard.guard.holds(WorldView(system, system.initial()), "actor")


def test_a_missing_file_and_an_unknown_schedule_are_named(states: Path) -> None:
    (states / "link.yaml").unlink()
    with pytest.raises(SpecError, match=r"link\.yaml:1: the file is missing"):
        load("disaggregated", states)
    with pytest.raises(SpecError, match="no schedule 'fast'; there are: colocated_critic"):
        load("fast", states)


@pytest.mark.parametrize("schedule", schedules())
def test_what_is_held_depends_on_the_facts(schedule: str) -> None:
    spec = load(schedule)
    connected = spec.roles[Role.ROLLOUT].holds[State.CONNECTED]
    assert ("kv" in connected) is not spec.schedule.facts["colocated"]
    assert (Role.CRITIC in spec.roles) is spec.schedule.facts["critic"]
    assert ("score" in spec.roles[Role.ACTOR].actions) is spec.schedule.facts["kl_in_reward"]
