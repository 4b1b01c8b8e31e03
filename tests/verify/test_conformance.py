"""A journal conforms only if it is what `step` says: nothing missing, doubled, moved or changed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest

from fsm_trainer.machine import events as on
from fsm_trainer.machine import legal
from fsm_trainer.machine.names import Trigger
from fsm_trainer.machine.planner import Move, settle
from fsm_trainer.machine.spec import load, schedules
from fsm_trainer.verify.conformance import check_journal
from tests.verify.fake import FakeRun

Journal = list[dict[str, Any]]


@cache
def whole(schedule: str) -> FakeRun:
    return FakeRun(schedule).run()


def journal_of(schedule: str) -> Journal:
    return copy.deepcopy(whole(schedule).entries)


def renumbered(entries: Journal) -> Journal:
    return [entry | {"seq": i} for i, entry in enumerate(entries, start=1)]


def transitions(entries: Journal) -> Iterator[int]:
    yield from (i for i, entry in enumerate(entries) if entry["kind"] == "transition")


def removed(entries: Journal, i: int) -> Journal:
    return entries[:i] + entries[i + 1 :]


def doubled(entries: Journal, i: int) -> Journal:
    return entries[: i + 1] + entries[i:]


def swapped(entries: Journal, i: int) -> Journal:
    return entries[:i] + entries[i : i + 2][::-1] + entries[i + 2 :]


@pytest.mark.parametrize("schedule", schedules())
def test_a_run_conforms(schedule: str) -> None:
    assert check_journal(journal_of(schedule), load(schedule)) is None


@pytest.mark.parametrize("renumber", [False, True])
@pytest.mark.parametrize("damage", [removed, doubled, swapped])
@pytest.mark.parametrize("schedule", schedules())
def test_a_transition_can_be_neither_missing_nor_doubled_nor_moved(
    schedule: str, damage: Callable[[Journal, int], Journal], renumber: bool
) -> None:
    entries, spec = journal_of(schedule), load(schedule)
    last = len(entries) - 1
    for i in transitions(entries):
        if damage is swapped and i == last:
            continue
        damaged = damage(entries, i)
        damaged = renumbered(damaged) if renumber else damaged
        if damage is removed and i == last and not renumber:
            continue  # the last line cut off: the numbers have no gap, the model must tell
        assert check_journal(damaged, spec) is not None, entries[i]


@pytest.mark.parametrize("schedule", schedules())
def test_a_cut_off_last_line_is_missed(schedule: str) -> None:
    entries = journal_of(schedule)[:-1]
    found = check_journal(entries, load(schedule))
    assert found is not None and "journal ends here" in found.because
    assert check_journal(entries, load(schedule), prefix=True) is None


@pytest.mark.parametrize("schedule", schedules())
def test_a_changed_state_epoch_or_version_does_not_conform(schedule: str) -> None:
    entries, spec = FakeRun(schedule).run(1).entries, load(schedule)
    states = ["disconnected", "sleeping", "awake", "connected"]
    workers = [*FakeRun(schedule).system.names, "other"]
    for i, entry in enumerate(entries):
        epoch, version = entry["epoch"], entry["version"]
        wrong: dict[str, list[Any]] = {
            "source": [x for x in states if x != entry["source"]],
            "dest": [x for x in states if x != entry["dest"]],
            "epoch": [None, epoch - 1 or None, epoch + 1] if epoch else [1],
            "version": [None, "9.0", f"{version}1"] if version else ["1.0"],
        }
        if entry["kind"] == "transition":
            wrong["trigger"] = [x for x in Trigger if x != entry["trigger"]]
            wrong["worker"] = [x for x in workers if x != entry["worker"]]
        for field, values in wrong.items():
            for value in values:
                changed = [*entries[:i], entry | {field: value}, *entries[i + 1 :]]
                assert check_journal(changed, spec) is not None, (entry, field, value)


@pytest.mark.parametrize("schedule", schedules())
def test_only_what_is_independent_may_change_places_when_no_clock_tells(schedule: str) -> None:
    entries = [entry | {"time": 0.0} for entry in FakeRun(schedule).run(1).entries]
    spec = load(schedule)
    for i in range(len(entries) - 1):
        first, second = entries[i], entries[i + 1]
        if check_journal(renumbered(swapped(entries, i)), spec) is None:
            assert first["worker"] != second["worker"]


def test_the_first_wrong_line_is_named_with_what_was_expected_and_the_story() -> None:
    entries = journal_of("disaggregated_critic")
    i = next(j for j, e in enumerate(entries) if e["trigger"] == "train")
    entries[i]["version"] = "1.7"
    found = check_journal(entries, load("disaggregated_critic"))
    assert found is not None
    assert (found.line, found.worker) == (i + 1, "actor")
    assert "must be awake, epoch 0, version 1.2; the record says" in found.because
    assert len(found.story) == 3 and all("actor" in line for line in found.story)
    assert str(found).startswith(f"line {i + 1}: ")


def test_the_ranks_of_a_worker_stand_together_and_are_complete() -> None:
    run = FakeRun("disaggregated_critic", ranks={"actor": 2, "critic": 3}).run(1)
    spec = load("disaggregated_critic")
    assert check_journal(run.entries, spec) is None
    for i, entry in enumerate(run.entries):
        if entry["worker"] in ("actor", "critic"):
            assert check_journal(renumbered(removed(run.entries, i)), spec) is not None
            changed = [*run.entries[:i], entry | {"ok": False}, *run.entries[i + 1 :]]
            assert check_journal(changed, spec) is not None


def test_a_killed_run_is_a_prefix_wherever_it_ends() -> None:
    entries, spec = journal_of("colocated_critic"), load("colocated_critic")
    for n in range(len(entries)):
        assert check_journal(entries[:n], spec, prefix=True) is None


def test_a_record_without_a_field_or_with_an_unknown_role_is_named() -> None:
    spec = load("disaggregated")
    entries = journal_of("disaggregated")
    del entries[2]["dest"]
    assert "lacks 'dest'" in str(check_journal(entries, spec))
    entries = journal_of("disaggregated")
    entries[1]["role"] = "critic"
    assert "critic" in str(check_journal(entries, spec))


def test_an_action_where_it_is_illegal_does_not_conform() -> None:
    run = FakeRun("disaggregated")
    run.reach("policy")
    run.record("rollout-0", "action", "generate")
    found = check_journal(run.entries, load("disaggregated"), prefix=True)
    assert found is not None and "does not hold" in found.because


def recovered(run: FakeRun, *dead: str) -> FakeRun:
    """What is left of a run after a fault: the dead are confirmed, and it goes on to its end."""
    for name in dead:
        run.fault(name, "confirmed", on.Confirmed(name))
    for name in run.system.names:
        worker = run.system.get(run.world, name)
        if any(worker.epochs) and not run.system.lease(run.world, name, "link"):
            run.sever(name)
    for phase in ("rollout", "policy", "sync", "end"):
        run.phase(phase)
    return run


def died_in_a_push() -> FakeRun:
    run = FakeRun("disaggregated")
    run.reach("sync")
    run.apply(on.Act("push", ("actor", "rollout-0", "rollout-1")))
    run.fault("rollout-1", "died", on.Died("rollout-1"))
    run.acted("push", ("actor", "rollout-0"), ok=False)
    return recovered(run, "rollout-1")


def failed_push_then_death() -> FakeRun:
    run = FakeRun("disaggregated")
    run.reach("sync")
    run.act("push", ("actor", "rollout-0", "rollout-1"), ok=False)
    run.fault("rollout-1", "lost", on.Died("rollout-1", lost=True))
    return recovered(run, "rollout-1")


def died_in_a_connect(*, released: bool = False) -> FakeRun:
    run = FakeRun("colocated_critic" if released else "disaggregated")
    run.reach("sync")
    ends = ("actor", "rollout-0", "rollout-1")
    for move in ("disconnect", "connect"):
        if move == "connect" and released:
            run.reach("policy")
        sources = {n: run.state(n) for n in ends}
        run.apply(on.Begin(move, ends))
        if move == "connect":
            break
        run.world = settle(run.system, run.world)
        for name in ends:
            run.record(name, "transition", move, sources[name])
    if released:
        due = [e for e in legal.enabled(run.system, run.world) if e.worker == "actor"]
        run.apply(on.Done(due[0]))
    run.fault("rollout-0", "died", on.Died("rollout-0"))
    run.fallen("connect", ("actor", "rollout-1"))
    return recovered(run, "rollout-0")


def died_in_a_disconnect(schedule: str) -> FakeRun:
    run = FakeRun(schedule)
    run.reach("sync")
    run.apply(on.Begin("disconnect", ("actor", "rollout-0", "rollout-1")))
    run.apply(on.Done(legal.enabled(run.system, run.world)[0]))
    run.fault("rollout-0", "died", on.Died("rollout-0"))
    run.fallen("disconnect", ("actor", "rollout-1"))
    return recovered(run, "rollout-0")


def failed_connect() -> FakeRun:
    run = FakeRun("disaggregated")
    run.reach("sync")
    ends = ("actor", "rollout-0", "rollout-1")
    run.move(Move("disconnect", ends))
    run.apply(on.Begin("connect", ends))
    due = next(e for e in legal.enabled(run.system, run.world) if e.worker == "rollout-1")
    run.apply(on.Failed(due))
    run.fallen("connect", ends)
    return recovered(run)


def failed_wake() -> FakeRun:
    run = FakeRun("disaggregated_critic")
    run.move(Move("start", ("actor",)))
    run.apply(on.Begin("wake", ("actor",)))
    run.apply(on.Done(legal.enabled(run.system, run.world)[0]))
    run.apply(on.Failed(legal.enabled(run.system, run.world)[0]))
    run.fallen("wake", ("actor",))
    return recovered(run)


def actor_died_while_they_generate() -> FakeRun:
    run = FakeRun("disaggregated_critic")
    run.reach("rollout")
    for name in ("rollout-0", "rollout-1"):
        run.apply(on.Act("generate", (name,)))
    run.fault("actor", "died", on.Died("actor"))
    run.acted("generate", ("rollout-0",))
    run.acted("generate", ("rollout-1",), ok=False)
    return recovered(run, "actor")


def lost_and_joined() -> FakeRun:
    run = FakeRun("disaggregated_critic")
    run.reach("rollout")
    run.fault("rollout-1", "lost", on.Died("rollout-1", lost=True))
    run.fault("rollout-1", "confirmed", on.Confirmed("rollout-1"))
    run.phase("rollout")
    run.fault("rollout-1", "joined", on.Joined("rollout-1"))
    return recovered(run)


FAULTS: dict[str, Callable[[], FakeRun]] = {
    "died in a push": died_in_a_push,
    "failed push, then a death": failed_push_then_death,
    "died in a connect": died_in_a_connect,
    "died in a connect that had released": lambda: died_in_a_connect(released=True),
    "died in a disconnect": lambda: died_in_a_disconnect("disaggregated"),
    "died in a colocated disconnect": lambda: died_in_a_disconnect("colocated_critic"),
    "failed connect": failed_connect,
    "failed wake": failed_wake,
    "actor died while they generate": actor_died_while_they_generate,
    "lost and joined": lost_and_joined,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_run_with_a_fault_conforms_and_without_its_record_does_not(fault: str) -> None:
    run = FAULTS[fault]()
    spec = run.system.spec
    assert check_journal(run.entries, spec) is None
    for i, entry in enumerate(run.entries):
        # Twice confirmed is confirmed, and a wake that was undone to where it began has changed
        # nothing: of these `seq` alone knows.
        alone = entry["trigger"] == "confirmed" or (not entry["ok"] and entry["trigger"] == "wake")
        if entry["kind"] != "action" and not alone:
            assert check_journal(renumbered(removed(run.entries, i)), spec) is not None, entry
            assert check_journal(renumbered(doubled(run.entries, i)), spec) is not None, entry
