"""The engine process of `EmbeddedEngine`.

Two threads. The *reader* takes the calls, and carries out at once those that must get through
whatever the model does; it exits the process at end of file. The others go to the main thread,
which alone touches the model: between two decoding steps it takes what is queued. Preconditions
are the client's (`admission`).
"""

from __future__ import annotations

import gc
import os
import queue
import threading
import traceback
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from fsm_trainer.engines.contract import Completion, PauseMode, Request, Tag
from fsm_trainer.engines.limits import Limits
from fsm_trainer.engines.process import Answer, Call, portable

if TYPE_CHECKING:
    from fsm_trainer.engines.config import EmbeddedConfig
    from fsm_trainer.engines.decoder import Decoder
    from fsm_trainer.engines.replica import Replica
    from fsm_trainer.machine.version import Version
    from fsm_trainer.sync.manifest import Manifest, TensorSpec

_AT_ONCE = ("abort", "pause", "unpause", "revoke", "vitals")
_OF_THE_LINK = ("join", "leave", "checksums", "revoke", "vitals")


@dataclass
class _Generation:
    """A ``generate`` call that waits for its last request."""

    number: int
    completed: dict[str, Completion | None]


class EmbeddedServer:
    """Serves one client; its public methods are what the client calls, ``start`` first."""

    _replica: Replica
    _decoder: Decoder

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._queue: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._held = False
        self._stepping = threading.Lock()
        self._generations: dict[str, _Generation] = {}

    def read(self) -> None:
        """Take calls for ever; an idle engine waits here for the next, or for end of file."""
        while True:
            call: Call = self._connection.recv()
            if call.method in _AT_ONCE:
                self._carry_out(call)
            else:
                self._queue.put(partial(self._carry_out, call))

    def work(self) -> None:
        """Decode, and between two steps carry out what is queued, for ever.

        With nothing to decode it waits without a deadline: nobody waits for it, and the process
        ends with its client.
        """
        while True:
            if not self._step():
                self._queue.get()()
            while not self._queue.empty():
                self._queue.get()()

    def _carry_out(self, call: Call) -> None:
        try:
            if call.method == "generate":
                self._generate(call.number, *call.arguments)
            else:
                called = self._replica if call.method in _OF_THE_LINK else self
                self._answer(call.number, getattr(called, call.method)(*call.arguments))
        except Exception as error:
            self._answer(call.number, error=portable(call.method, error))

    def _answer(self, number: int, result: object = None, error: Exception | None = None) -> None:
        with self._sending:
            self._connection.send(Answer(number, result, error))

    # Requests: the main thread.

    def _generate(self, number: int, requests: Sequence[Request], version: Version) -> None:
        self._decoder.submit(requests, version)
        generation = _Generation(number, {request.id: None for request in requests})
        self._generations.update(dict.fromkeys(generation.completed, generation))

    def _step(self) -> bool:
        """Draw one token for each request; False when there is none, or they are held."""
        with self._stepping:
            if self._held or not self._generations:
                return False
            try:
                completed = self._decoder.step()
            except Exception as error:
                # What a broken step has left in the cache can't be known.
                self._decoder.clear()
                failed = {each.number for each in self._generations.values()}
                self._generations.clear()
                for number in failed:
                    self._answer(number, error=portable("generate", error))
                return True
        self._deliver(completed)
        return True

    def _deliver(self, completed: Sequence[Completion]) -> None:
        for each in completed:
            generation = self._generations.pop(each.id)
            generation.completed[each.id] = each
            if all(generation.completed.values()):
                self._answer(generation.number, list(generation.completed.values()))

    # What moves resources: the main thread.

    def start(self, folder: str, config: EmbeddedConfig) -> list[TensorSpec]:
        """Import what is heavy, and read the model's configuration."""
        import torch
        import transformers

        from fsm_trainer.engines.decoder import Decoder
        from fsm_trainer.engines.replica import Replica

        torch.set_num_threads(config.threads)
        transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
        self._replica = Replica(folder, config.dtype, config.device)
        ends = Limits.of(folder).ends
        limit, records = config.max_batch_tokens, config.routing_replay
        self._decoder = Decoder(self._replica, limit, ends, records)
        # What the imports made lives as long as the process: no collection need look at it again.
        gc.freeze()
        return self._replica.specs

    def acquire(self, tag: Tag) -> None:
        """Acquire weights; the KV cache grows with the requests, to hold it is the right to."""
        if tag is Tag.WEIGHTS:
            self._replica.acquire()

    def release(self, tag: Tag) -> None:
        """Release weights or the KV cache."""
        self._decoder.clear()
        if tag is Tag.WEIGHTS:
            self._replica.release()
        self._replica.give_back_memory()

    def flush(self) -> None:
        """Drop the KV cache."""
        self._decoder.clear()

    def receive(self, manifest: Manifest) -> None:
        """Receive a push; what was cached under the old weights goes first."""
        self._decoder.clear()
        self._replica.receive(manifest)

    def reset_weights(self) -> None:
        """Zero the weights."""
        self._decoder.clear()
        self._replica.reset()

    # What is carried out at once: the reader.

    def abort(self, ids: Collection[str] | None) -> None:
        """Let the main thread abort requests between two steps."""
        self._queue.put(lambda: self._deliver(self._decoder.abort(ids)))

    def pause(self, mode: PauseMode) -> None:
        """Stop drawing tokens."""
        self._held = True
        if mode is not PauseMode.IN_PLACE:
            self.abort(None)
        with self._stepping:  # after the step that runs, which the client gives a deadline
            pass

    def unpause(self) -> None:
        """Go on, and wake the main thread for it."""
        self._held = False
        self._queue.put(lambda: None)


def _or_exit(serve: Callable[[], None]) -> None:
    """Run what the process can't do without. Not sys.exit: others may be inside a collective."""
    try:
        serve()
    except (EOFError, OSError):
        os._exit(0)  # the client is gone
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def main(connection: Connection) -> None:
    """Serve the client for as long as it lives."""
    server = EmbeddedServer(connection)
    threading.Thread(target=_or_exit, args=(server.read,), daemon=True).start()
    _or_exit(server.work)
