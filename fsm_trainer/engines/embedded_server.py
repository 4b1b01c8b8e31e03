"""The engine process of `EmbeddedEngine`: ``python -m fsm_trainer.engines.embedded_server``.

Three threads. *control* answers at once, whatever the others do; it exits the process at end of
file. *work* reads the other channel into a queue. The main thread alone touches the model: between
two decoding steps it takes what is queued. Preconditions are the client's (`admission`).
"""

from __future__ import annotations

import ctypes
import gc
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsm_trainer.engines.contract import PauseMode, Request, Tag
from fsm_trainer.engines.messages import Answer, Call, Drawn, Vitals
from fsm_trainer.machine.errors import ActionFailed, DeadlineExceeded, FsmError

if TYPE_CHECKING:
    from fsm_trainer.engines.decoder import Decoder
    from fsm_trainer.engines.replica import Replica
    from fsm_trainer.groups.lease import Lease
    from fsm_trainer.groups.membership import Membership
    from fsm_trainer.sync.manifest import Manifest, TensorSpec

_PR_SET_PDEATHSIG = 1
# Seconds that a pause waits for the step that is running.
_STEP = 60.0


@dataclass
class _Generation:
    """A ``generate`` call that waits for its last request."""

    number: int
    order: list[str]
    drawn: dict[str, Drawn] = field(default_factory=dict)


class _Port:
    """One channel: reads calls, and sends answers from any thread."""

    def __init__(self, file: int) -> None:
        self._connection: Connection[Any, Any] = Connection(file)
        self._sending = threading.Lock()

    def read(self) -> Call:
        """Return the next call; an idle engine waits here until there is one, or end of file."""
        call: Call = self._connection.recv()
        return call

    def answer(self, number: int, result: object = None, error: Exception | None = None) -> None:
        """Send a result, or an error to raise over there."""
        with self._sending:
            self._connection.send(Answer(number, result, error))


class EmbeddedServer:
    """Serves one client; `run` ends only with the process."""

    def __init__(self, work: int, control: int) -> None:
        self._work, self._control = _Port(work), _Port(control)
        self._queue: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._held = threading.Event()
        self._stepping = threading.Lock()
        self._generations: dict[str, _Generation] = {}
        self._replica: Replica | None = None
        self._decoder: Decoder | None = None
        self._max_tokens = 0
        self._lease: Lease | None = None
        self._revoked: str | None = None

    def run(self) -> None:
        """Serve until the client is gone."""
        for serve in (self._serve_control, self._read_work):
            threading.Thread(target=_until_end_of_file, args=(serve,), daemon=True).start()
        while True:
            self._take(block=not self._busy())
            self._step()

    def _busy(self) -> bool:
        # Not inline: a local of `run` would keep a decoder, and its weights, over their release.
        decoder = self._decoder
        return decoder is not None and decoder.active and not self._held.is_set()

    # The main thread.

    def _take(self, block: bool) -> None:
        """Carry out what is queued; with ``block`` wait for something.

        An idle engine waits here without a deadline: nobody waits for it, and the process ends
        with its client.
        """
        try:
            call = self._queue.get(block)
            while True:
                if call is not None:
                    self._carry_out(call)
                call = self._queue.get(False)
        except queue.Empty:
            return

    def _carry_out(self, call: Call) -> None:
        methods: dict[str, Callable[..., object]] = {
            "start": self._start,
            "acquire": self._acquire,
            "release": self._release,
            "join": self._join,
            "leave": self._leave,
            "receive": self._receive,
            "flush": self._flush,
            "reset_weights": self._reset_weights,
            "checksums": self._checksums,
        }
        try:
            if call.method == "generate":
                self._generate(call)
            elif call.method == "abort":
                self._abort(*call.arguments)
            else:
                self._work.answer(call.number, methods[call.method](*call.arguments))
        except Exception as error:
            self._work.answer(call.number, error=_portable(call.method, error))

    def _step(self) -> None:
        decoder = self._decoder
        if decoder is None or not decoder.active or self._held.is_set():
            return
        try:
            with self._stepping:
                # A pause may have come since the loop looked.
                drawn = [] if self._held.is_set() else decoder.step()
            self._deliver(drawn)
        except Exception as error:
            self._fail_all(decoder, error)

    def _fail_all(self, decoder: Decoder, error: Exception) -> None:
        """Fail every request: what a broken step has left in the cache can't be known."""
        decoder.clear()
        failed = {each.number for each in self._generations.values()}
        self._generations.clear()
        for number in failed:
            self._work.answer(number, error=_portable("generate", error))

    def _deliver(self, drawn: Sequence[Drawn]) -> None:
        for each in drawn:
            generation = self._generations.pop(each.id)
            generation.drawn[each.id] = each
            if len(generation.drawn) == len(generation.order):
                results = [generation.drawn[id_] for id_ in generation.order]
                self._work.answer(generation.number, results)

    def _start(
        self, folder: str, dtype: str, device: str, threads: int, max_tokens: int
    ) -> list[TensorSpec]:
        import torch
        import transformers

        from fsm_trainer.engines.replica import Replica

        torch.set_num_threads(threads)
        transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
        self._max_tokens = max_tokens
        self._replica = Replica(folder, dtype, device)
        # What the imports made lives as long as the process: no collection need look at it again.
        gc.freeze()
        return self._replica.specs

    def _acquire(self, tag: Tag) -> None:
        # The KV cache grows with the requests; to hold it is the right to.
        if tag is Tag.WEIGHTS:
            from fsm_trainer.engines.decoder import Decoder

            self._started.acquire()
            self._decoder = Decoder(self._started.model, self._max_tokens)

    def _release(self, tag: Tag) -> None:
        self._flush()
        if tag is Tag.WEIGHTS:
            self._decoder = None
            self._started.release()
        else:
            self._started.give_back_memory()

    def _flush(self) -> None:
        if self._decoder is not None:
            self._decoder.clear()

    def _join(self, membership: Membership) -> None:
        from fsm_trainer.groups.lease import Lease

        self._revoked = None
        lease = Lease.open(membership, self._started.device)
        self._lease = lease
        if self._revoked is not None:
            lease.revoke(self._revoked)

    def _leave(self) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.close()

    def _receive(self, manifest: Manifest) -> None:
        if self._lease is None or self._decoder is None:
            raise ActionFailed("receive: this engine process holds no link or no weights")
        # What was cached under the old weights must not be read under the new ones.
        self._decoder.clear()
        self._started.receive(self._lease, manifest)

    def _reset_weights(self) -> None:
        self._flush()
        self._started.reset()

    def _checksums(self) -> dict[str, str]:
        return self._started.checksums()

    def _generate(self, call: Call) -> None:
        requests: Sequence[Request] = call.arguments[0]
        if self._decoder is None:
            raise ActionFailed("generate: this engine process holds no weights")
        self._decoder.submit(requests)
        generation = _Generation(call.number, [request.id for request in requests])
        self._generations.update(dict.fromkeys(generation.order, generation))

    def _abort(self, ids: Collection[str] | None) -> None:
        decoder = self._decoder
        if decoder is None:
            return
        try:
            self._deliver(decoder.abort(ids))
        except Exception as error:
            self._fail_all(decoder, error)

    @property
    def _started(self) -> Replica:
        if self._replica is None:
            raise ActionFailed("this engine process has not started")
        return self._replica

    # The other threads.

    def _read_work(self) -> None:
        while True:
            self._queue.put(self._work.read())

    def _serve_control(self) -> None:
        methods: dict[str, Callable[..., object]] = {
            "abort": self._queue_abort,
            "pause": self._pause,
            "unpause": self._unpause,
            "revoke": self._revoke,
            "vitals": self._vitals,
        }
        while True:
            call = self._control.read()
            if call.method == "stop":
                self._control.answer(call.number)
                os._exit(0)
            try:
                self._control.answer(call.number, methods[call.method](*call.arguments))
            except Exception as error:
                self._control.answer(call.number, error=_portable(call.method, error))

    def _queue_abort(self, ids: Collection[str] | None) -> None:
        self._queue.put(Call(-1, "abort", (ids,)))

    def _pause(self, mode: PauseMode) -> None:
        self._held.set()
        if mode is not PauseMode.IN_PLACE:
            self._queue_abort(None)
        if not self._stepping.acquire(timeout=_STEP):
            self._unpause()
            raise DeadlineExceeded(f"a decoding step did not end within {_STEP:g} s; not paused")
        self._stepping.release()

    def _unpause(self) -> None:
        self._held.clear()
        self._queue.put(None)

    def _revoke(self) -> None:
        self._revoked = "the worker revoked it"
        lease = self._lease
        if lease is not None:
            lease.revoke(self._revoked)

    def _vitals(self) -> Vitals:
        if self._replica is None:
            return Vitals(None, (), _resident_bytes(), 0)
        from fsm_trainer.groups.lease import registered_groups

        lease = self._lease
        epoch = lease.epoch if lease is not None and lease.usable else None
        return Vitals(epoch, registered_groups(), _resident_bytes(), self._replica.device_bytes)


def _until_end_of_file(serve: Callable[[], None]) -> None:
    """Run a thread that the process can't do without."""
    try:
        serve()
    except (EOFError, OSError):
        # The client is gone. Not sys.exit: the main thread may be inside a collective.
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def _portable(method: str, error: Exception) -> Exception:
    """Return an error that the client's process can read: our own, or ActionFailed."""
    if isinstance(error, FsmError):
        return error
    last = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{Path(last.filename).name}:{last.lineno}"
    return ActionFailed(f"the engine could not {method}: {type(error).__name__}: {error} ({where})")


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    """Serve on the file descriptors given, for as long as the parent lives."""
    work, control, parent = map(int, sys.argv[1:])
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # Ctrl-C goes to the whole group; the worker decides when its engine ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if os.getppid() == parent:
        EmbeddedServer(work, control).run()


if __name__ == "__main__":
    main()
