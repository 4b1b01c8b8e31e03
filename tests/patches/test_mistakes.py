"""Each mistake of the runtime's code is seen by the layers that ``caught.yaml`` names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from fsm_trainer.data.tiny import TinyModelConfig, make_tiny_model
from fsm_trainer.engines.config import EmbeddedConfig
from fsm_trainer.engines.contract import Tag
from fsm_trainer.engines.embedded import EmbeddedEngine
from fsm_trainer.machine.errors import ActionFailed, Refused
from fsm_trainer.sync.checksums import checksums
from fsm_trainer.testing.processes import Member, Processes, shared
from tests.contract import weights
from tests.contract.conftest import Bench, Site, background, long_requests, until
from tests.groups import members
from tests.patches import layers
from tests.patches.mistakes import MISTAKES
from tests.sync import pushes

CAUGHT: dict[str, dict[str, Any]] = yaml.safe_load(
    Path(__file__).with_name("caught.yaml").read_text(encoding="utf-8")
)
REAL = "processes"
CHEAP = [name for name in CAUGHT if REAL not in CAUGHT[name]["caught"]]


def seen_by(*names: str) -> list[str]:
    return [name for name in CHEAP if {*names} & {*CAUGHT[name]["caught"]}]


def schedule_of(name: str) -> str:
    return str(CAUGHT[name].get("schedule", "disaggregated"))


def test_every_mistake_is_in_the_table_with_a_layer_that_sees_it() -> None:
    assert CAUGHT.keys() == MISTAKES.keys()
    assert all(row["caught"] for row in CAUGHT.values())


# -- explorer -------------------------------------------------------------------------------------


@cache
def explored_clean(schedule: str) -> str:
    return layers.explored(schedule)


@pytest.mark.parametrize("name", seen_by("explorer"))
def test_the_explorer_sees(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert explored_clean(schedule_of(name)) == ""

    MISTAKES[name](monkeypatch)

    assert layers.explored(schedule_of(name)).startswith(CAUGHT[name]["caught"]["explorer"])


# -- simulation, and the conformance of its journals ----------------------------------------------


def of_seed(seed: int, name: str) -> dict[str, str]:
    row = CAUGHT[name]
    return layers.simulated(schedule_of(name), seed, MISTAKES[name], row.get("killed", 0.0))


def expected(name: str) -> dict[str, str]:
    caught: dict[str, str] = CAUGHT[name]["caught"]
    return {layer: words for layer, words in caught.items() if layer != "explorer"}


@pytest.mark.parametrize("name", seen_by("simulation", "conformance"))
def test_a_seed_shows(name: str) -> None:
    told, seeds = dict[str, str](), set[int]()
    for seed in range(layers.SEEDS):
        new = {layer: words for layer, words in of_seed(seed, name).items() if layer not in told}
        told |= new
        seeds |= {seed} if new else set()
        if told.keys() >= expected(name).keys():
            break

    assert told.keys() == expected(name).keys()
    assert all(words in told[layer] for layer, words in expected(name).items()), told
    # The same trainings are right without the mistake.
    killed = CAUGHT[name].get("killed", 0.0)
    for seed in sorted(seeds):
        assert layers.simulated(schedule_of(name), seed, killed=killed) == {}


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", CHEAP)
def test_no_seed_shows_more(name: str) -> None:
    told = {layer for seed in range(layers.SEEDS) for layer in of_seed(seed, name)}

    assert told == expected(name).keys()


# -- real processes -------------------------------------------------------------------------------


def suffer(held: members.Held, name: str) -> None:
    held["patch"] = pytest.MonkeyPatch()
    MISTAKES[name](held["patch"])


def heal(held: members.Held) -> None:
    held.pop("patch").undo()


def opened(world: Processes, size: int) -> list[Member]:
    processes, places = world.members(size), world.memberships(size, timeout=2.0)
    both = zip(processes, places, strict=True)
    for answer in [process.call(members.open_lease, place) for process, place in both]:
        assert answer.get() == "open"
    return processes


def result_of_an_ended_epoch(world: Processes) -> str:
    [process] = opened(world, 1)
    refused = process.call(members.ends_normally_after_revoke).get()
    return "" if refused else "a result counted after its epoch had ended"


def end_told_by_one_of_three(world: Processes) -> str:
    _, first, second = opened(world, 3)
    waiting = second.call(members.broadcast, 1_000_000)  # the source, rank 0, never comes
    first.call(members.revoke, "it gives up").get()
    _, _, seconds = waiting.get()
    return "" if seconds < 1.5 else "a member waited in an epoch that another had ended"


def bundle_in_opposite_orders(world: Processes) -> str:
    links = [world.memberships(2, timeout=1.0, link=f"bundle/{index}") for index in (1, 2)]
    told = [places[0] for places in links], [places[1] for places in reversed(links)]
    both = zip(world.members(2), told, strict=True)
    answers = [process.call(members.open_bundle, places) for process, places in both]
    found = [answer.get() for answer in answers]
    return "" if found == [["bundle/1", "bundle/2"]] * 2 else str(found)


def receiver_that_cannot_load(world: Processes) -> str:
    sender, receiver = opened(world, 2)
    named = pushes.weights(seed=5)
    sending = sender.call(pushes.send, named)
    receiver.call(pushes.receive_in_vain, named, "proj").get()
    failed = sending.get()[0] == "ActionFailed"
    return "" if failed else "the sender calls a push complete that a receiver could not load"


IN_MEMBERS: dict[str, Callable[[Processes], str]] = {
    "a_result_counts_after_its_epoch_row_3": result_of_an_ended_epoch,
    "a_revocation_stays_at_home_row_20": end_told_by_one_of_three,
    "groups_open_in_the_order_told_row_21": bundle_in_opposite_orders,
    "a_failed_load_is_not_heard_row_35": receiver_that_cannot_load,
}


@pytest.mark.parametrize("name", IN_MEMBERS)
def test_members_of_a_group_show(name: str) -> None:
    world = shared()
    assert IN_MEMBERS[name](world) == ""

    for process in world.members(3):
        process.call(suffer, name).get()
    try:
        assert CAUGHT[name]["caught"][REAL] in IN_MEMBERS[name](world)
    finally:
        for process in world.members(3):
            process.call(heal).get()


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", TinyModelConfig(), seed=0)
    engine = EmbeddedEngine("rollout-0", folder, EmbeddedConfig(call_timeout=20))
    engine.start()
    yield Bench(engine, shared(), Site("cpu"))
    engine.stop()


def second_resume(bench: Bench) -> str:
    try:
        bench.engine.acquire(Tag.WEIGHTS)
    except Refused:
        return ""
    pushed = checksums(weights.weights(bench.engine.specs(), 0).items())
    wrong = bench.engine.version() is not None and bench.engine.checksums() != pushed
    return "the engine serves other weights than were pushed" if wrong else ""


def sleep_at_work(bench: Bench) -> str:
    working = background(bench.engine.generate, long_requests(1))
    until(lambda: bench.engine.health().in_flight > 0)
    try:
        bench.engine.release(Tag.KV)
    except Refused:
        return "" if working.result(20) else "nothing came"
    lost = isinstance(working.exception(20), ActionFailed)
    return "a request in flight was lost at sleep" if lost else "it was answered"


IN_ENGINES: dict[str, Callable[[Bench], str]] = {
    "a_second_resume_is_let_through_row_16": second_resume,
    "sleep_does_not_wait_for_requests_row_23": sleep_at_work,
}


@pytest.mark.parametrize("name", IN_ENGINES)
def test_an_engine_shows(name: str, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.serve()
    assert IN_ENGINES[name](bench) == ""

    MISTAKES[name](monkeypatch)

    assert CAUGHT[name]["caught"][REAL] in IN_ENGINES[name](bench)


def test_every_mistake_has_its_test() -> None:
    tested = [*CHEAP, *IN_MEMBERS, *IN_ENGINES]
    assert sorted(tested) == sorted(MISTAKES)
