"""What every engine must do, at one engine each, with a real process that sends weights."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fsm_trainer.engines.contract import Completion, Finish, PauseMode, Request, Tag
from fsm_trainer.engines.embedded import EmbeddedEngine
from fsm_trainer.engines.engine import Engine
from fsm_trainer.machine.errors import (
    ActionFailed,
    ConfigError,
    DataError,
    DeadlineExceeded,
    EngineFailed,
    LeaseExpired,
    ManifestMismatch,
    PeerLost,
    Refused,
)
from fsm_trainer.machine.version import Version
from fsm_trainer.sync.checksums import checksums
from fsm_trainer.sync.manifest import Manifest
from tests.contract import weights as peer
from tests.contract.conftest import (
    AT_ONCE,
    ENGINES,
    KINDS,
    LONG,
    Bench,
    Site,
    background,
    descendants,
    gone,
    kill,
    long_requests,
    until,
)

ONE = [Request("one", (3, 4, 5), 4, seed=7)]


def refused(engine: Engine, reason: str, method: str, *arguments: Any) -> None:
    """The call is refused at once, says why, and the engine stays as it was."""
    before = dataclasses.replace(engine.health(), resident_bytes=0)
    began = time.monotonic()
    with pytest.raises(Refused, match=reason):
        getattr(engine, method)(*arguments)
    assert time.monotonic() - began < AT_ONCE
    assert dataclasses.replace(engine.health(), resident_bytes=0) == before


# -- resources -------------------------------------------------------------------------------------


def test_a_sleeper_refuses_requests_at_once_row_23(bench: Bench) -> None:
    for tag in bench.engine.health().held:
        bench.engine.release(tag)
    refused(bench.engine, "weights not held; kv not held", "generate", ONE)
    refused(bench.engine, "weights not held", "checksums")
    refused(bench.engine, "weights not held", "join", bench.memberships()[1])


def test_serving_requires_every_resource_and_a_version_row_24(bench: Bench) -> None:
    for tag in bench.engine.health().held:
        bench.engine.release(tag)
    bench.engine.acquire(Tag.WEIGHTS)
    refused(bench.engine, "kv not held; the weights are torn", "generate", ONE)
    bench.engine.acquire(Tag.KV)
    refused(bench.engine, "the weights are torn", "generate", ONE)
    bench.engine.release(Tag.WEIGHTS)
    refused(bench.engine, "weights not held", "generate", ONE)


def test_a_second_resume_is_refused(awake: Bench) -> None:
    for tag in Tag:
        refused(awake.engine, f"{tag} already held", "acquire", tag)
    awake.engine.release(Tag.KV)
    refused(awake.engine, "kv not held", "release", Tag.KV)
    awake.engine.acquire(Tag.KV)
    refused(awake.engine, "already started", "start")


def test_weights_that_were_released_come_back_torn(awake: Bench) -> None:
    awake.engine.release(Tag.WEIGHTS)
    awake.engine.acquire(Tag.WEIGHTS)
    assert awake.engine.version() is None


# -- updates ---------------------------------------------------------------------------------------


def test_a_push_is_bit_exact_after_each_of_three_reconnects(awake: Bench) -> None:
    engine = awake.engine
    for seed in (11, 12, 13):
        awake.connect()
        assert engine.health().epoch is not None
        engine.reset_weights()
        assert engine.version() is None
        version = awake.push(seed)
        awake.disconnect()
        assert engine.version() == version
        assert engine.checksums() == checksums(peer.weights(engine.specs(), seed).items())
        assert engine.health().groups == ()
        assert [each.version for each in engine.generate(ONE)] == [version]


@pytest.mark.parametrize("kind", ["ipc", "disk"])
def test_weights_may_come_another_way(awake: Bench, kind: str, tmp_path: Path) -> None:
    if kind == "ipc" and awake.site.sender not in ("cpu", "cuda:0"):
        pytest.skip("the sender has a device of its own: nothing to map")
    awake.connect(kind=kind, **({"folder": str(tmp_path)} if kind == "disk" else {}))
    for seed in (14, 15):
        awake.engine.reset_weights()
        awake.push(seed)
        expected = checksums(peer.weights(awake.engine.specs(), seed).items())
        assert awake.engine.checksums() == expected
    awake.disconnect()
    assert list(tmp_path.iterdir()) == []


def test_one_link_carries_many_pushes(awake: Bench) -> None:
    awake.connect()
    for seed in (21, 22):
        awake.push(seed)
        expected = checksums(peer.weights(awake.engine.specs(), seed).items())
        assert awake.engine.checksums() == expected
    awake.disconnect()


def test_an_update_is_bracketed_and_never_nested(awake: Bench) -> None:
    engine = awake.engine
    manifest = peer.manifest(engine.specs())
    refused(engine, "link not held", "begin_update", manifest)
    awake.connect()
    refused(engine, "update not held", "receive")
    refused(engine, "update not held", "end_update", Version(9, 9))
    before = engine.version()
    engine.begin_update(manifest)
    refused(engine, "update already held", "begin_update", manifest)
    refused(engine, "the update's tensors not held", "end_update", Version(9, 9))
    refused(engine, "an update is open", "generate", ONE)
    refused(engine, "link already held", "release", Tag.WEIGHTS)
    refused(engine, "link already held", "join", awake.memberships()[1])
    engine.end_update(None)
    assert engine.version() == before, "no byte has moved"
    engine.begin_update(manifest)
    answer = awake.sender.call(peer.push, engine.specs(), 0)
    engine.receive()
    answer.get()
    refused(engine, "the update's tensors already held", "receive")
    engine.end_update(None)
    assert engine.version() is None, "received, but given up"
    awake.push(0)
    awake.disconnect()


@pytest.mark.parametrize("change", ["name", "shape", "dtype", "missing"])
def test_what_does_not_fit_is_refused_before_a_byte_moves(awake: Bench, change: str) -> None:
    specs = awake.engine.specs()
    first = specs[0]
    other = {
        "name": [dataclasses.replace(first, name="model.elsewhere")],
        "shape": [dataclasses.replace(first, shape=(first.shape[0] + 1, *first.shape[1:]))],
        "dtype": [dataclasses.replace(first, dtype="float16")],
        "missing": [],
    }[change]
    before, sums = awake.engine.version(), awake.engine.checksums()
    awake.connect()
    with pytest.raises(ManifestMismatch, match="different tensors"):
        awake.engine.begin_update(Manifest((*other, *specs[1:])))
    assert (awake.engine.version(), awake.engine.checksums()) == (before, sums)
    assert not awake.engine.health().updating
    awake.push(31)  # the link has nothing queued on it
    awake.disconnect()


def test_a_sender_with_another_manifest_is_refused_before_a_bucket_moves(awake: Bench) -> None:
    engine = awake.engine
    before, sums = engine.version(), engine.checksums()
    awake.connect()
    answer = awake.sender.call(peer.push, list(reversed(engine.specs())), 0)
    with pytest.raises(ManifestMismatch):
        awake.receive()
    assert answer.get()[0] == "ManifestMismatch"
    assert (engine.version(), engine.checksums()) == (before, sums)
    assert engine.generate(ONE)[0].version == before
    awake.disconnect()


def test_a_push_cut_in_the_middle_is_torn_until_a_complete_one(awake: Bench) -> None:
    engine = awake.engine
    awake.connect(timeout=3.0)
    awake.sender.call(peer.die_within_a_push, engine.specs(), 41)
    began = time.monotonic()
    with pytest.raises((PeerLost, LeaseExpired)):
        awake.receive()
    assert time.monotonic() - began < 3.0 + 3 * AT_ONCE
    assert engine.version() is None
    assert not engine.health().updating
    refused(engine, "the weights are torn", "generate", ONE)
    engine.leave()
    awake.connect()
    version = awake.push(42)
    awake.disconnect()
    assert engine.checksums() == checksums(peer.weights(engine.specs(), 42).items())
    assert engine.generate(ONE)[0].version == version


def test_a_sender_killed_while_the_engine_waits_costs_bounded_time(awake: Bench) -> None:
    awake.connect(timeout=3.0)
    waiting = background(awake.receive)
    time.sleep(0.2)
    awake.sender.kill()
    began = time.monotonic()
    error = waiting.exception(3.0 + 3 * AT_ONCE)
    assert isinstance(error, (PeerLost, LeaseExpired))
    assert time.monotonic() - began < 3.0 + 3 * AT_ONCE
    awake.engine.leave()


def test_revoke_ends_a_receive_from_a_silent_sender(awake: Bench) -> None:
    awake.connect(timeout=10.0)
    waiting = background(awake.receive)
    time.sleep(0.2)
    refused(awake.engine, "'receive' is running", "leave")
    began = time.monotonic()
    awake.engine.revoke()
    assert isinstance(waiting.exception(5), (LeaseExpired, PeerLost))
    assert time.monotonic() - began < 2 * AT_ONCE
    assert awake.engine.version() is None
    awake.disconnect()


def test_join_names_who_did_not_come(awake: Bench) -> None:
    with pytest.raises(PeerLost, match="member-0"):
        awake.engine.join(awake.memberships(timeout=1.0)[1])
    refused(awake.engine, "link not held", "leave")
    awake.connect()
    awake.disconnect()


# -- requests in flight ----------------------------------------------------------------------------


def test_what_would_pull_the_rug_is_refused_with_requests_in_flight(
    awake: Bench, in_flight: Future[Any]
) -> None:
    for method, *arguments in (
        ("release", Tag.KV),
        ("release", Tag.WEIGHTS),
        ("flush",),
        ("reset_weights",),
        ("join", awake.memberships()[1]),
    ):
        refused(awake.engine, "4 requests in flight", method, *arguments)
    refused(awake.engine, "4 requests held in place", "drain", 5.0)
    refused(awake.engine, "already paused", "pause", PauseMode.ABORT)
    refused(awake.engine, "paused", "generate", ONE)
    assert not in_flight.done()


def test_an_update_is_refused_with_requests_in_flight_row_25(awake: Bench) -> None:
    awake.connect()
    future = background(awake.engine.generate, long_requests())
    until(lambda: awake.engine.health().in_flight > 0)
    refused(awake.engine, "requests in flight", "begin_update", peer.manifest(awake.engine.specs()))
    awake.engine.abort()
    future.result(10)
    awake.disconnect()


def test_held_in_place_nothing_moves_and_the_tokens_are_those_of_a_free_run(awake: Bench) -> None:
    began = time.monotonic()
    free = awake.engine.generate(long_requests())
    seconds = time.monotonic() - began
    future = background(awake.engine.generate, long_requests())
    until(lambda: awake.engine.health().in_flight > 0)
    awake.engine.pause(PauseMode.IN_PLACE)
    time.sleep(1.5 * seconds)
    assert not future.done()
    awake.engine.unpause()
    assert future.result(30) == free
    assert {each.finish for each in free} == {Finish.LENGTH}


@pytest.mark.parametrize("mode", [PauseMode.ABORT, PauseMode.RETRACT])
def test_a_pause_returns_the_tokens_so_far(awake: Bench, mode: PauseMode) -> None:
    whole = awake.engine.generate(long_requests())
    future = background(awake.engine.generate, long_requests())
    until(lambda: awake.engine.health().in_flight > 0)
    time.sleep(0.2)
    awake.engine.pause(mode)
    cut = future.result(5)
    assert {each.finish for each in cut} == {Finish.ABORT}
    for part, all_ in zip(cut, whole, strict=True):
        length = len(part.tokens)
        assert 0 < length < LONG
        assert (part.tokens, part.logprobs) == (all_.tokens[:length], all_.logprobs[:length])
    refused(awake.engine, rf"paused \({mode}\)", "generate", ONE)
    awake.engine.unpause()
    refused(awake.engine, "not paused", "unpause")
    assert awake.engine.generate(ONE)[0].finish is Finish.LENGTH


def test_abort_ends_the_named_requests_only(awake: Bench, in_flight: Future[Any]) -> None:
    awake.engine.abort({"long-1", "long-3", "nobody"})
    awake.engine.unpause()
    finishes = [each.finish for each in in_flight.result(30)]
    assert finishes == [Finish.LENGTH, Finish.ABORT, Finish.LENGTH, Finish.ABORT]


def test_drain_waits_and_refuses_newcomers(awake: Bench) -> None:
    future = background(awake.engine.generate, long_requests())
    until(lambda: awake.engine.health().in_flight > 0)
    with pytest.raises(DeadlineExceeded, match="4 requests still in flight"):
        awake.engine.drain(0.05)
    draining = background(awake.engine.drain, 30.0)
    time.sleep(0.05)
    refused(awake.engine, "draining", "generate", ONE)
    draining.result(30)
    assert future.done() or future.result(1)
    awake.engine.release(Tag.KV)
    awake.engine.acquire(Tag.KV)


def test_a_generation_that_takes_too_long_is_aborted(awake: Bench) -> None:
    with pytest.raises(DeadlineExceeded, match="were not done within"):
        awake.engine.generate(long_requests(), timeout=0.1)
    assert awake.engine.health().in_flight == 0
    assert len(awake.engine.generate(ONE)[0].tokens) == 4


def test_control_answers_while_a_generation_runs(awake: Bench) -> None:
    future = background(awake.engine.generate, long_requests())
    until(lambda: awake.engine.health().in_flight > 0)
    began = time.monotonic()
    for _ in range(5):
        awake.engine.health()
    assert time.monotonic() - began < AT_ONCE
    awake.engine.abort()
    future.result(10)


def test_a_prompt_that_the_model_cannot_take_harms_nobody_else(
    awake: Bench, in_flight: Future[Any]
) -> None:
    awake.engine.unpause()
    for request, reason in (
        (Request("bad", (1, 258), 4), "not in the vocabulary"),
        (Request("bad", (-1,), 4), "not in the vocabulary"),
        (Request("bad", (1, 2), 511), "positions"),
    ):
        with pytest.raises(DataError, match=reason):
            awake.engine.generate([*ONE, request])
    assert {each.finish for each in in_flight.result(30)} == {Finish.LENGTH}


def test_ids_in_flight_are_unique(awake: Bench) -> None:
    refused(awake.engine, r"ids are not unique: \['one'", "generate", [*ONE, *ONE])


def test_weights_that_are_not_numbers_fail_the_request_and_a_push_repairs(awake: Bench) -> None:
    awake.connect()
    answer = awake.sender.call(peer.push_nan, awake.engine.specs())
    awake.receive()
    answer.get()
    awake.engine.end_update(Version(1, 999))
    with pytest.raises(ActionFailed, match="not finite"):
        awake.engine.generate(ONE)
    awake.push(51)
    awake.disconnect()
    assert awake.engine.generate(ONE)[0].finish is Finish.LENGTH


# -- what is generated -----------------------------------------------------------------------------


def mixed(count: int, tag: str = "") -> list[Request]:
    """Prompts of 1 to 90 tokens, each with a seed, a limit and a temperature of its own."""
    source = random.Random(5)
    return [
        Request(
            f"mixed{tag}-{index}",
            tuple(
                source.randrange(258) for _ in range(source.choice((1, 2, 6, 15, 16, 17, 33, 90)))
            ),
            source.randrange(1, 20),
            source.choice((0.0, 0.7, 1.0)),
            source.getrandbits(63),
            stop=(1, 2, 3),
        )
        for index in range(count)
    ]


def drawn(completions: list[Completion]) -> list[tuple[Any, ...]]:
    """All of a completion that must not depend on its company; log-probs bit by bit."""
    return [(each.tokens, each.logprobs, each.finish) for each in completions]


def test_a_request_gets_the_same_bits_alone_in_a_batch_and_in_traffic(awake: Bench) -> None:
    # SGLang draws by rank, not by token, where a greedy request shares the batch.
    greedy = isinstance(awake.engine, EmbeddedEngine)
    requests = [each for each in mixed(130) if greedy or each.temperature][:100]
    together = drawn(awake.engine.generate(requests))
    assert drawn(awake.engine.generate(requests)) == together
    for index in range(0, len(requests), 7):
        assert drawn(awake.engine.generate(requests[index : index + 1])) == [together[index]]
    calls = []
    for start in range(0, len(requests), 10):
        calls.append(background(awake.engine.generate, requests[start : start + 10]))
        time.sleep(0.003)
    assert [each for call in calls for each in drawn(call.result(20))] == together


def test_another_seed_draws_other_tokens(awake: Bench) -> None:
    requests = [Request(f"seed-{seed}", (9, 8, 7), 8, seed=seed) for seed in range(50)]
    assert len({each.tokens for each in awake.engine.generate(requests)}) == 50


def test_log_probs_are_those_of_transformers(awake: Bench, tiny: Path) -> None:
    if awake.site.cuda:
        pytest.skip("the bound is float32's; on a GPU the engines compute in bfloat16 here")
    awake.serve(71)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(tiny), attn_implementation="eager"
    )
    model.load_state_dict(peer.weights(awake.engine.specs(), 71))
    requests = mixed(60)
    found = differs = 0
    for request, completion in zip(requests, awake.engine.generate(requests), strict=True):
        tokens = torch.tensor([[*request.tokens, *completion.tokens]])
        with torch.no_grad():
            logits = model(tokens).logits[0, len(request.tokens) - 1 : -1]
        # Standard model of rounding (Higham 2002, 3.5): a dot product of n terms is off by at most
        # n u times the sum of magnitudes, u = 2^-24. On the way of a logit lie, in each of the 2
        # layers, sums over 64 (qkv, out, up) thrice and 128 (down) once, in the end 64 for the
        # logit: 704 u, relative to the logits' size, in either of the two computations.
        temperature = request.temperature or 1.0
        bound = 2 * 704 * 2.0**-24 * float(logits.abs().max()) / temperature
        expected = (logits / temperature).log_softmax(-1)
        ours = torch.tensor(completion.logprobs)
        chosen = expected.gather(1, torch.tensor(completion.tokens)[:, None])[:, 0]
        assert float((ours - chosen).abs().max()) < bound
        # The bound can tell: another temperature, or another position, is beyond it.
        wrong = (logits / (temperature + 0.1)).log_softmax(-1)
        differs += bool(
            (wrong.gather(1, torch.tensor(completion.tokens)[:, None])[:, 0] - chosen).abs().max()
            > bound
        )
        if request.temperature == 0:
            found += 1
            top = expected.max(-1).values
            assert float((top - chosen).max()) < bound, "greedy is the likeliest token"
    assert found > 5 and differs > 50
    awake.serve(0)


def test_a_stop_token_ends_a_completion_and_is_part_of_it(awake: Bench) -> None:
    free = awake.engine.generate([Request("free", (4, 5, 6), 20, seed=3)])[0]
    third = free.tokens[2]
    cut = awake.engine.generate([Request("cut", (4, 5, 6), 20, seed=3, stop=(third,))])[0]
    end = free.tokens.index(third) + 1
    assert (cut.tokens, cut.finish) == (free.tokens[:end], Finish.STOP)
    short = awake.engine.generate([Request("short", (4, 5, 6), 2, seed=3)])[0]
    assert (short.tokens, short.finish) == (free.tokens[:2], Finish.LENGTH)


# -- life and death --------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_an_engine_that_was_not_started_refuses(kind: str, tiny: Path, site: Site) -> None:
    engine = ENGINES[kind]("rollout-7", tiny, site)
    with pytest.raises(Refused, match="not started"):
        engine.acquire(Tag.WEIGHTS)
    engine.stop()


def test_an_engine_that_is_killed_in_a_push_fails_at_once_and_starts_anew(awake: Bench) -> None:
    engine = awake.engine
    awake.connect(timeout=3.0)
    waiting = background(awake.receive)
    time.sleep(0.2)
    first = engine.health().pid
    kill(first)
    assert isinstance(waiting.exception(AT_ONCE), EngineFailed)
    for method in ("health", "version", "specs", "unpause", "flush"):
        with pytest.raises(EngineFailed, match="signal 9"):
            getattr(engine, method)()
    assert awake.sender.call(peer.push, [], 0).get()[0] in ("PeerLost", "LeaseExpired")
    engine.stop()
    assert gone(first)
    engine.start()
    assert engine.health().pid != first
    assert (engine.health().held, engine.version()) == (frozenset(), None)
    awake.serve(61)
    assert engine.generate(ONE)[0].finish is Finish.LENGTH


def test_a_process_that_does_not_answer_is_ended_at_once(kind: str, tiny: Path, site: Site) -> None:
    before = descendants()
    engine = ENGINES[kind]("rollout-7", tiny, site)
    starting = background(engine.start)

    def up() -> list[int]:
        """The process and its guard, once they are programs of their own: a fork is awaited."""
        lines = {p: Path(f"/proc/{p}/cmdline").read_bytes() for p in descendants() - before}
        return [p for p, line in lines.items() if b"_server" in line]

    until(lambda: len(up()) >= 2)
    pids = up()
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    engine.stop()
    assert time.monotonic() - began < AT_ONCE
    assert all(map(gone, pids))
    assert isinstance(starting.exception(5), EngineFailed)


def test_an_engine_ends_with_its_worker_and_not_with_the_thread_that_started_it() -> None:
    worker = subprocess.Popen(
        [sys.executable, "-m", "tests.contract.worker"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert worker.stdout is not None
        has_torch, pid = worker.stdout.readline().split()
        assert has_torch == "False"
        assert not gone(int(pid))
        worker.kill()
        until(lambda: gone(int(pid)), 5.0)
    finally:
        worker.kill()
        worker.communicate(timeout=10)


def test_a_folder_without_a_model_is_refused_and_leaves_no_process(
    kind: str, tmp_path: Path, site: Site
) -> None:
    before = descendants()
    with pytest.raises(ConfigError, match=r"config\.json"):
        ENGINES[kind]("rollout-8", tmp_path, site).start()
    assert descendants() <= before
