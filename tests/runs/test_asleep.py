"""What sleeping workers hold, looked at in the living processes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from rich.console import Console

from fsm_trainer.machine.names import State
from fsm_trainer.runtime import launch as launching
from fsm_trainer.runtime.config import load_config
from fsm_trainer.runtime.launch import launch
from fsm_trainer.runtime.reconciler import Reconciler
from fsm_trainer.workers.host import Status
from tests.runs.training import QUICKSTART, SMALL

Seen = dict[str, dict[str, tuple[State, list[Status]]]]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """The status of every process of a live run, in each phase of one step."""
    found: Seen = {}

    class Watched(launching.Driver):
        async def _phase(self, name: str) -> None:
            await super()._phase(name)
            found[name] = await statuses(self.reconciler)

    async def statuses(reconciler: Reconciler) -> dict[str, tuple[State, list[Status]]]:
        results: Any = await asyncio.gather(*(p.status() for p in reconciler.ports.values()))
        return {
            name: (reconciler.system.get(reconciler.world, name).state, status)
            for name, status in zip(reconciler.ports, results, strict=True)
        }

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launching, "Driver", Watched)
        run = load_config(QUICKSTART, [*SMALL, "steps=1"])
        launch(run, tmp_path_factory.mktemp("asleep") / "run", Console(quiet=True))
    return found


def test_every_worker_is_seen_in_each_of_its_states(seen: Seen) -> None:
    states = {
        name: {phase[name][0] for phase in seen.values()}
        for name in ("actor", "critic", "rollout-0")
    }

    assert states["actor"] == set(State)
    assert states["critic"] == {State.DISCONNECTED, State.SLEEPING, State.AWAKE}
    assert states["rollout-0"] == {State.DISCONNECTED, State.AWAKE, State.CONNECTED}


def test_a_sleeping_worker_has_no_lease_and_no_registered_group(seen: Seen) -> None:
    asleep = [
        status
        for phase in seen.values()
        for state, ranks in phase.values()
        if state in (State.SLEEPING, State.DISCONNECTED)
        for status in ranks
    ]

    assert asleep
    for status in asleep:
        assert status.groups == ()
        assert set(status.worker.epochs) <= {0}
        assert not {"link", "train_groups"} & status.worker.held


def test_an_awake_trainer_has_a_registered_group(seen: Seen) -> None:
    """Or else the test above could not fail."""
    state, ranks = seen["policy"]["actor"]

    assert state == State.AWAKE
    assert ranks[0].groups != ()


def test_both_ends_of_the_link_hold_the_same_epoch(seen: Seen) -> None:
    epochs = {
        status.worker.epochs
        for name, (_, ranks) in seen["sync"].items()
        if name != "critic"
        for status in ranks
    }

    assert len(epochs) == 1
    assert epochs.pop()[0] > 0
