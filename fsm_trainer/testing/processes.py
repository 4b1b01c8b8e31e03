"""Real processes, driven step by step from a test, with a store where they meet.

They come from a fork server that has imported torch (seconds) and nothing else. Each call runs on a
process's own thread, so that another can reach one that is blocked in a collective.
"""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.connection import Connection
from operator import attrgetter
from typing import Any, NamedTuple

import psutil

from fsm_trainer.groups.membership import Membership
from fsm_trainer.groups.rendezvous import Rendezvous
from fsm_trainer.machine.errors import DeadlineExceeded, FsmError
from fsm_trainer.machine.lifecycle import Report
from fsm_trainer.machine.world import World
from fsm_trainer.testing.fakes import LifecycleWorker, in_step
from fsm_trainer.testing.leaks import Footprint, footprint
from fsm_trainer.testing.subject import Order

# Seconds that a process may take to start (torch is imported) on a busy machine.
START = 60.0
# Seconds until a killed one must be gone.
END = 10.0
PRELOAD = ["fsm_trainer.sync.push", "fsm_trainer.groups.backend"]


class ProcessEnded(RuntimeError):
    """Raised when a worker's process is gone, or fails in a way that no worker may."""


class Failure(NamedTuple):
    """What a call came to that raised."""

    kind: str
    """The error's type."""
    text: str
    """What it said; with the traceback if it isn't an error of ours."""
    seconds: float


class Member:
    """One process; :meth:`call` starts a function of (its own dict, *args) there."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        self._answers: dict[int, Any] = {}

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._process.is_alive()

    @property
    def pid(self) -> int:
        """Its number."""
        return self._process.pid or 0

    def call(self, function: Callable[..., Any], *args: Any, thread: str = "main") -> Answer:
        """Start a function there; both it and its arguments must pickle."""
        key = time.monotonic_ns()
        self._pipe.send((key, thread, function, args))
        return Answer(self, key)

    def receive(self, key: int, timeout: float) -> Any:
        """The answer to a call; raises TimeoutError when it is late, EOFError if it died."""
        until = time.monotonic() + timeout
        while key not in self._answers:
            if not self._pipe.poll(max(until - time.monotonic(), 0)):
                raise TimeoutError(f"no answer within {timeout} s")
            answered, value = self._pipe.recv()
            self._answers[answered] = value
        return self._answers.pop(key)

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal; of SIGKILL, wait for the end."""
        os.kill(self.pid, number)
        if number == signal.SIGKILL:
            self._process.join(END)
            if self._process.is_alive():
                raise DeadlineExceeded(f"process {self.pid} lives {END} s after SIGKILL")
            self._pipe.close()

    def stopped_for(self, seconds: float) -> None:
        """Wait until it has stopped, and let it go on so many seconds later; returns if it ends."""
        until = time.monotonic() + START
        try:
            process = psutil.Process(self.pid)
            while process.status() != psutil.STATUS_STOPPED and time.monotonic() < until:
                time.sleep(0.02)
            time.sleep(seconds)
            process.send_signal(signal.SIGCONT)
        except psutil.NoSuchProcess:
            return


class Answer:
    """What a call will return: its value, or a `Failure`."""

    def __init__(self, member: Member, key: int) -> None:
        self._member, self._key = member, key

    def get(self, timeout: float = 20.0) -> Any:
        """Wait at most ``timeout`` seconds."""
        return self._member.receive(self._key, timeout)


class Processes:
    """A few processes, used again by later tests, and the store of their groups."""

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
        """Return all places of a new epoch (or the one given), over gloo."""
        self._epoch += 1
        names = tuple(f"member-{rank}" for rank in range(size))
        number = self._epoch if epoch is None else epoch
        store = self.rendezvous.address
        return [
            Membership(link, number, rank, size, names, "gloo", store, timeout, kind, folder)
            for rank in range(size)
        ]

    def close(self) -> None:
        """End them all."""
        for member in self._members:
            if member.alive:
                member.kill()
        self.rendezvous.close()


@functools.cache
def shared() -> Processes:
    """The ones of a test run; they end with it."""
    processes = Processes()
    atexit.register(processes.close)
    return processes


class ProcessWorker:
    """A worker under test in a process of its own.

    Args:
        make: gives the `LifecycleWorker`, there; it and ``args`` must pickle.
        member: a process that has nothing else to do; None: a new one.
        deadline: seconds for an answer.
    """

    def __init__(
        self,
        make: Callable[..., LifecycleWorker],
        *args: Any,
        member: Member | None = None,
        deadline: float = 30.0,
    ) -> None:
        self.member, self._deadline = member or Member(), deadline
        try:
            self._answer(_make, make, args, limit=START)
        except BaseException:
            self.member.kill()
            raise

    def trigger(self, order: Order) -> None:
        """See `Subject`, also of those that follow."""
        in_step(_There(self), order)

    def act(self, order: Order) -> None:
        """The ends of a joint action meet in it, so nobody waits here."""
        self.ask("act", replace(order, meet=_alone))

    def holds(self) -> Collection[str]:
        """What it holds."""
        held: Collection[str] = self.ask("holds")
        return held

    def epochs(self) -> Mapping[str, int]:
        """Of the links that it holds."""
        held: Mapping[str, int] = self.ask("epochs")
        return held

    def weights(self) -> object:
        """What tells its weights apart."""
        return self.ask("weights")

    def fail_next(self, what: str) -> bool:
        """The fault is injected there."""
        return bool(self.ask("fail_next", what))

    def stall(self, seconds: float) -> bool:
        """SIGSTOP, and SIGCONT when the time is over."""
        self.ask("stop_at_next_link")
        threading.Thread(target=self.member.stopped_for, args=(seconds,), daemon=True).start()
        return True

    def footprint(self) -> Footprint:
        """What its process holds."""
        found: Footprint = self.member.call(_footprint).get(self._deadline)
        return found

    def kill(self) -> None:
        """SIGKILL."""
        if self.member.alive:
            self.member.kill()

    def ask(self, method: str, *args: Any, **named: Any) -> Any:
        """Call a method of the worker there, or of its ``lifecycle.``; raises as that does."""
        return self._answer(_asked, method, args, named)

    def _answer(self, function: Callable[..., Any], *args: Any, limit: float | None = None) -> Any:
        try:
            told = self.member.call(function, *args).get(limit or self._deadline)
        except (EOFError, OSError) as error:
            raise ProcessEnded(f"process {self.member.pid} has ended") from error
        if isinstance(told, Failure):
            raise ProcessEnded(f"process {self.member.pid} can't do {args}: {told}")
        value, raised = told
        if raised is not None:
            raise raised
        return value


def _make(
    held: dict[str, Any], make: Callable[..., LifecycleWorker], args: tuple[Any, ...]
) -> tuple[None, None]:
    held["worker"] = make(*args)
    return None, None


def _asked(
    held: dict[str, Any], method: str, args: tuple[Any, ...], named: dict[str, Any]
) -> tuple[Any, FsmError | None]:
    try:
        return attrgetter(method)(held["worker"])(*args, **named), None
    except FsmError as error:
        return None, error


class _There:
    """The lifecycle of a worker in another process."""

    def __init__(self, worker: ProcessWorker) -> None:
        self._worker = worker

    def begin(self, name: str, *, epoch: int, world: World) -> Report:
        return self._report("begin", name, epoch=epoch, world=world)

    def acquire(self) -> Report:
        return self._report("acquire")

    def commit(self) -> None:
        self._worker.ask("lifecycle.commit")

    def undo(self) -> None:
        self._worker.ask("lifecycle.undo")

    def sever(self, link: str, world: World) -> None:
        self._worker.ask("lifecycle.sever", link, world)

    def _report(self, method: str, *args: Any, **named: Any) -> Report:
        report: Report = self._worker.ask(f"lifecycle.{method}", *args, **named)
        return report


def _footprint(held: dict[str, Any]) -> Footprint:
    return footprint()


def _alone() -> None:
    return None


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
            value = Failure(type(error).__name__, text, time.monotonic() - began)
        with lock:
            try:
                pipe.send((key, value))
            except (TypeError, AttributeError, pickle.PicklingError) as error:
                text = f"what it returned can't be sent: {error}"
                pipe.send((key, Failure(type(error).__name__, text, time.monotonic() - began)))

    while True:
        try:
            key, thread, function, args = pipe.recv()
        except EOFError:
            return
        pool = threads.setdefault(thread, ThreadPoolExecutor(1))
        pool.submit(run, key, function, args)
