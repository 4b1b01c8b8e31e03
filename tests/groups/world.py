"""Real processes that keep a lease each, driven step by step from a test.

Processes come from a fork server that has imported torch (seconds) and nothing else, and are
reused by later tests; one that a test killed is replaced. Each call runs on the member's own
thread, so that ``revoke`` can reach one that is blocked in a collective.
"""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

from fsm_trainer.groups.membership import Membership
from fsm_trainer.groups.rendezvous import Rendezvous

# Seconds that a member's process may take to start (torch is imported) on a busy machine.
START = 60.0


class Member:
    """One process; ``call`` starts a function of (its own dict, *args) there."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["fsm_trainer.sync.push", "fsm_trainer.groups.backend"])
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        self._answers: dict[int, Any] = {}

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    def call(self, function: Callable[..., Any], *args: Any, thread: str = "main") -> Answer:
        key = time.monotonic_ns()
        self._pipe.send((key, thread, function, args))
        return Answer(self, key)

    def receive(self, key: int, timeout: float) -> Any:
        until = time.monotonic() + timeout
        while key not in self._answers:
            if not self._pipe.poll(max(until - time.monotonic(), 0)):
                raise TimeoutError(f"no answer within {timeout} s")
            answered, value = self._pipe.recv()
            self._answers[answered] = value
        return self._answers.pop(key)

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self._process.pid or 0, number)
        if number == signal.SIGKILL:
            self._process.join(10)


class Answer:
    """What a call will return; ``(type name, text, seconds)`` if it raised."""

    def __init__(self, member: Member, key: int) -> None:
        self._member, self._key = member, key

    def get(self, timeout: float = 20.0) -> Any:
        return self._member.receive(self._key, timeout)


class World:
    """A few members and the rendezvous where they meet."""

    def __init__(self) -> None:
        self.rendezvous = Rendezvous.bind()
        self._members: list[Member] = []
        self._epoch = 0

    def members(self, size: int) -> list[Member]:
        """Return ``size`` living members; those that an earlier test killed are replaced."""
        self._members = [member if member.alive else Member() for member in self._members]
        while len(self._members) < size:
            self._members.append(Member())
        chosen = self._members[:size]
        for answer in [member.call(_nothing) for member in chosen]:
            answer.get(START)
        return chosen

    def memberships(
        self,
        size: int,
        timeout: float = 5.0,
        link: str = "weights",
        epoch: int | None = None,
        kind: str = "group",
        folder: str | None = None,
    ) -> list[Membership]:
        """Return all places of a new epoch (or the one given)."""
        self._epoch += 1
        names = tuple(f"member-{rank}" for rank in range(size))
        number = self._epoch if epoch is None else epoch
        store = self.rendezvous.address
        return [
            Membership(link, number, rank, size, names, "gloo", store, timeout, kind, folder)
            for rank in range(size)
        ]

    def close(self) -> None:
        for member in self._members:
            if member.alive:
                member.kill()
        self.rendezvous.close()


@functools.cache
def shared_world() -> World:
    """The one world of a test run; its processes end with it."""
    world = World()
    atexit.register(world.close)
    return world


def _nothing(held: dict[str, Any]) -> None:
    return None


def _serve(pipe: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    held: dict[str, Any] = {}
    threads: dict[str, ThreadPoolExecutor] = {}
    lock = threading.Lock()

    def run(key: int, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        began = time.monotonic()
        try:
            value = function(held, *args)
        except Exception as error:
            text = str(error)
            if type(error).__module__ != "fsm_trainer.machine.errors":
                text = traceback.format_exc()
            value = (type(error).__name__, text, time.monotonic() - began)
        with lock:
            pipe.send((key, value))

    while True:
        try:
            key, thread, function, args = pipe.recv()
        except EOFError:
            return
        pool = threads.setdefault(thread, ThreadPoolExecutor(1))
        pool.submit(run, key, function, args)
