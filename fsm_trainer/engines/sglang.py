"""SGLang behind the contract: its HTTP server for requests, our own loader for weights.

SGLang's own way of taking weights trusts its sender: it neither checks names and sizes nor bounds
its waits. So the link's end is ours (`sglang_loader`, inside SGLang's scheduler processes), and
HTTP carries what is SGLang's own: generation, pauses, caches and memory. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from fsm_trainer.data.child import PROMPT
from fsm_trainer.data.routing import Routing
from fsm_trainer.engines.config import SglangConfig
from fsm_trainer.engines.contract import Completion, PauseMode, Request, Tag
from fsm_trainer.engines.engine import Engine
from fsm_trainer.engines.process import Caller, EngineProcess, Server, hang_up
from fsm_trainer.engines.sglang_api import Api, command
from fsm_trainer.groups.rendezvous import Address, local_interface
from fsm_trainer.machine.errors import ActionFailed, DeadlineExceeded, EngineFailed
from fsm_trainer.machine.version import Version

if TYPE_CHECKING:
    from fsm_trainer.engines.process import Vitals
    from fsm_trainer.groups.membership import Membership
    from fsm_trainer.sync.manifest import Manifest, TensorSpec

# Seconds between two looks whether a server is up.
_LOOK = 0.2


class SglangEngine(Engine):
    """An `Engine` that is an SGLang server, of the worker's own or at a URL.

    With ``deterministic``, tokens depend on a request and the weights alone as long as no greedy
    request shares the batch: SGLang then draws by rank instead of by token.
    """

    def __init__(self, name: str, model: str | os.PathLike[str], config: SglangConfig) -> None:
        self._config = config
        super().__init__(name, model, config)

    def _launch(self) -> Server:
        return SglangServer(self.name, self._model, self._config)

    def _bring_up(self, server: Server) -> list[TensorSpec]:
        specs: list[TensorSpec]
        specs, longest = server.call("bring_up", timeout=self._config.start_timeout)
        limits = self._limits
        self._limits = dataclasses.replace(limits, positions=min(limits.positions, longest))
        return specs


class SglangServer(Server):
    """One SGLang server: its HTTP side, and an agent of ours in each of its schedulers."""

    def __init__(self, name: str, model: str, config: SglangConfig) -> None:
        self.name, self._model, self._config = name, model, config
        self._secret = secrets.token_hex(16)
        self._door = socket.create_server((_way_to(config.url), 0), backlog=config.tensor_parallel)
        self._agents: list[_Agent] = []
        self._process: EngineProcess | None = None
        self._serving: Future[Any] | None = None
        self._port: socket.socket | None = None
        self._stopped: str | None = None
        self._calls: set[Future[Any]] = set()
        self._generating = 0
        self._lock = threading.Lock()
        self.pid, url, key = 0, config.url, config.api_key
        if url is None:
            self._port, number = _reserved_port()
            url, key = f"http://127.0.0.1:{number}", secrets.token_hex(16)
        routing = Routing.of(Path(model)) if config.routing_replay else None
        self._api = Api(url, key, config, self._gone, routing)
        if self._port is not None:
            words = command(model, url, key or "", config)
            self._process = EngineProcess(name, "fsm_trainer.engines.sglang_server")
            self._serving = self._process.submit("serve", *words)
            self.pid = self._process.pid

    # -- life --------------------------------------------------------------------------------------

    @property
    def ended(self) -> str | None:  # type: ignore[override]
        """How it ended, None while it answers."""
        return (self._process.ended if self._process is not None else None) or self._stopped

    def bring_up(self) -> tuple[list[TensorSpec], int]:
        """Wait until it serves, meet its schedulers, learn its tensors, and put it to sleep.

        Returns the tensors, and the most tokens that a sequence may have.
        """
        while not self._api.up():
            if self._serving is not None and self._serving.done():
                self._serving.result()
            if self.ended is not None:
                raise EngineFailed(f"{self.name}: {self.ended} before it was up; see its output")
            time.sleep(_LOOK)
        self._api.check(self.name)
        self._quiesce()
        self._meet()
        self._quiesce()  # an earlier worker could still ask until then
        for tag in _all_of([agent.submit("asleep") for agent in self._agents])[0]:
            self._api.acquire(Tag(tag))  # an earlier worker left it so
            self._note(Tag(tag), asleep=False)
        specs: list[TensorSpec] = self._on_schedulers("learn", self._model, self._config.dtype)
        for tag in Tag:
            self.release(tag)
        return specs, self._api.longest

    def _quiesce(self) -> None:
        """End what an earlier worker has left in flight, or paused, on a server elsewhere."""
        while self._process is None and self.ended is None:
            self._api.unpause()
            self._api.abort(None)
            try:
                return self._api.flush()
            except ActionFailed:  # requests are in flight still
                time.sleep(_LOOK)

    def _meet(self) -> None:
        """Let each scheduler process connect to us."""
        told = _in_background(self._api.run_loader, self._order(greet=True), False)
        self._door.settimeout(PROMPT)
        while len(self._agents) < self._config.tensor_parallel:
            try:
                wire, _ = self._door.accept()
            except TimeoutError:
                told.result(PROMPT)  # what the server said, if it refused
                count, where = self._config.tensor_parallel, self._door.getsockname()
                raise DeadlineExceeded(
                    f"{self.name}: {len(self._agents)} of {count} SGLang schedulers came to "
                    f"{where}; can they reach it, and import fsm_trainer?"
                ) from None
            wire.settimeout(None)
            wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = Connection(wire.detach())
            try:
                greeting = json.loads(
                    connection.recv_bytes(1024) if connection.poll(PROMPT) else "{}"
                )
            except (ValueError, OSError):
                greeting = {}  # a stranger
            if secrets.compare_digest(str(greeting.get("key")), self._secret):
                rank, pid = int(greeting["rank"]), int(greeting["pid"])
                self._agents.append(_Agent(f"{self.name}/{rank}", connection, self, pid, rank))
            else:
                connection.close()
        self._agents.sort(key=lambda agent: agent.rank)
        self.pid = self.pid or self._agents[0].pid
        told.result(PROMPT)

    def kill(self) -> None:
        """End a server of our own, or let go of one elsewhere; see `Server.kill`."""
        if self._process is not None:
            self._process.kill()  # first, because it knows how it ended
        self._stopped = self._stopped or "it was stopped, or a scheduler closed its connection"
        for agent in self._agents:
            agent.hang_up()
        self._door.close()
        if self._port is not None:
            self._port.close()
        with self._lock:
            calls = list(self._calls)
        for call in calls:  # those at a server elsewhere: nobody ends it
            _settle(call, None, EngineFailed(f"{self.name}: {self.ended}; start it anew"))

    def _gone(self, path: str, error: Exception) -> EngineFailed:
        """A connection breaks a moment before it is known why."""
        until = time.monotonic() + PROMPT
        while self.ended is None and self._process is not None and time.monotonic() < until:
            time.sleep(0.01)
        return EngineFailed(f"{self.name}: {self.ended or f'{path}: {error!r}'}; start it anew")

    # -- calls -------------------------------------------------------------------------------------

    def submit(self, method: str, *arguments: Any) -> Future[Any]:
        """Carry out one of the methods below in a thread; see `Server.submit`."""
        call = _in_background(getattr(self, method), *arguments)
        with self._lock:
            self._calls.add(call)
            ended = self.ended
        call.add_done_callback(self._calls.discard)
        if ended is not None:
            raise EngineFailed(f"{self.name}: {ended}; start it anew")
        return call

    def generate(self, requests: Sequence[Request], version: Version) -> list[Completion]:
        """Continue prompts."""
        with self._lock:
            self._generating += 1
        try:
            return self._api.generate(requests, version)
        finally:
            with self._lock:
                self._generating -= 1

    def abort(self, ids: Collection[str] | None) -> None:
        """End requests between two steps."""
        self._api.abort(ids)

    def pause(self, mode: PauseMode) -> None:
        """Stop drawing tokens; in place excepted, all requests have returned then."""
        self._api.pause(mode)
        while mode is not PauseMode.IN_PLACE and self._generating and self.ended is None:
            # SGLang parks a request that arrives just after the pause, and doesn't abort it.
            until = time.monotonic() + _LOOK
            while self._generating and time.monotonic() < until:
                time.sleep(_LOOK / 100)
            if self._generating:
                self._api.unpause()
                self._api.abort(None)
                self._api.pause(mode)

    def unpause(self) -> None:
        """Go on."""
        self._api.unpause()

    def acquire(self, tag: Tag) -> None:
        """Map memory; SGLang would serve whatever weights lie in it, so they are zeroed."""
        try:
            self._api.acquire(tag)
            self._note(tag, asleep=False)
            if tag is Tag.WEIGHTS:
                self.reset_weights()
        except BaseException:
            self.kill()  # whether it is mapped can't be known, and to map it twice ends SGLang
            raise

    def release(self, tag: Tag) -> None:
        """Unmap memory."""
        try:
            self._api.release(tag)
            self._note(tag, asleep=True)
        except BaseException:
            self.kill()
            raise

    def _note(self, tag: Tag, asleep: bool) -> None:
        """Have it known where the memory is: to release it twice, or touch it then, ends SGLang."""
        _all_of([agent.submit("note", str(tag), asleep) for agent in self._agents])

    def flush(self) -> None:
        """Drop the prefix cache."""
        self._api.flush()

    def reset_weights(self) -> None:
        """Zero the weights."""
        self._on_schedulers("reset_weights")

    def receive(self, manifest: Manifest) -> None:
        """Receive a push on the schedulers' own threads."""
        self._on_schedulers("receive", manifest)

    def checksums(self) -> Mapping[str, str]:
        """Checksum the weights; what the schedulers don't agree on has a checksum like no other."""
        each: list[Mapping[str, str]] = self._on_each_scheduler("checksums")
        return {name: "/".join(sorted({found[name] for found in each})) for name in each[0]}

    def join(self, membership: Membership) -> None:
        """Open the lease in every scheduler: each is a member, one rank after the other."""
        first = membership.rank
        told = [
            agent.submit("join", dataclasses.replace(membership, rank=first + index))
            for index, agent in enumerate(self._agents)
        ]
        try:
            _all_of(told)
        except BaseException:
            wait(told)  # each has the membership's deadline
            self.leave()  # those that opened theirs
            raise

    def leave(self) -> None:
        """Close the lease."""
        _all_of([agent.submit("leave") for agent in self._agents])

    def revoke(self) -> None:
        """Revoke the lease."""
        _all_of([agent.submit("revoke") for agent in self._agents])

    def vitals(self) -> Vitals:
        """What the first scheduler knows of itself."""
        found: Vitals = self._agents[0].submit("vitals").result()
        return found

    def _on_schedulers(self, method: str, *arguments: Any) -> Any:
        """Call every agent on its scheduler's thread; the first one's result."""
        return self._on_each_scheduler(method, *arguments)[0]

    def _on_each_scheduler(self, method: str, *arguments: Any) -> list[Any]:
        told = [agent.submit(method, *arguments) for agent in self._agents]
        try:
            self._api.run_loader(self._order(greet=False))
        except BaseException:
            self.kill()  # the agents hold a call that nobody will start
            raise
        return _all_of(told)

    def _order(self, greet: bool) -> str:
        address = self._door.getsockname()
        return json.dumps({"address": address, "key": self._secret, "greet": greet})


class _Agent(Caller):
    """Our agent in one scheduler process; when it ends, so does the engine."""

    def __init__(
        self, name: str, connection: Connection, server: SglangServer, pid: int, rank: int
    ) -> None:
        self._server, self.pid, self.rank = server, pid, rank
        super().__init__(name, connection)

    def hang_up(self) -> None:
        """Close the connection, whoever waits for it."""
        hang_up(self._connection)

    def _end(self) -> None:
        self._server.kill()

    def _how(self) -> str:
        return self._server.ended or "it was stopped"


def _all_of(told: Sequence[Future[Any]]) -> list[Any]:
    """The results of calls whose deadline is their caller's: it ends the server, and so them."""
    return [future.result() for future in told]


def _in_background(work: Callable[..., Any], *arguments: Any) -> Future[Any]:
    future: Future[Any] = Future()

    def run() -> None:
        try:
            _settle(future, work(*arguments), None)
        except BaseException as error:
            _settle(future, None, error)

    threading.Thread(target=run, daemon=True).start()
    return future


def _settle(future: Future[Any], result: Any, error: BaseException | None) -> None:
    """Give a future its end, unless it has one: a call returns, and its server is killed."""
    with suppress(InvalidStateError):
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)


def _reserved_port() -> tuple[socket.socket, int]:
    """A port for a server that binds it itself: held, and not listened on, nobody else gets it."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held, held.getsockname()[1]


def _way_to(url: str | None) -> str:
    """The address of this machine that a server at ``url`` can reach."""
    parts = urlsplit(url or "http://127.0.0.1")
    return local_interface(Address(parts.hostname or "127.0.0.1", parts.port or 80))
