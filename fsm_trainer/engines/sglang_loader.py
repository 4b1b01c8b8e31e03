"""What runs inside SGLang's scheduler processes: our end of the link, and the loading of weights.

SGLang calls :func:`carry_out`, its *custom weight loader*, on the scheduler's own thread, between
two steps; so no forward pass sees half a push, and a push is as bounded, fenced and acknowledged
here as in an engine of our own: SGLang's own receiver would wait for a missing peer for half an
hour, and take what it gets for what was asked.

The first call makes an :class:`Agent`, which is called over a connection from then on.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fsm_trainer.engines.link_end import LinkEnd
from fsm_trainer.engines.process import Answer, Call, hang_up, portable
from fsm_trainer.engines.replica import layout
from fsm_trainer.machine.errors import CapabilityMissing
from fsm_trainer.sync.buckets import Parcel, copier
from fsm_trainer.sync.checksums import checksums
from fsm_trainer.sync.manifest import Bucket, Manifest, TensorSpec

ON_SCHEDULER = ("learn", "reset_weights", "receive", "checksums")
CALLS = (*ON_SCHEDULER, "join", "leave", "revoke", "note", "asleep", "vitals")
# Seconds to reach the worker that called, and for its call to follow.
GREETING = 10.0

log = logging.getLogger(__name__)

_agents: dict[str, Agent] = {}
"""The one agent of this process, by the key of the worker that it serves."""
_asleep: set[str] = set()
"""What of this process's memory is released; a worker that attaches later can't ask SGLang."""


def carry_out(model: torch.nn.Module, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Carry out the call that the worker has sent ahead; never raises: that would end SGLang.

    ``named_tensors`` holds one name, a JSON object: ``address`` (host and port) and ``key`` of the
    worker, whether to ``greet`` it, else the call follows on the agent's connection.
    """
    try:
        [(text, _)] = named_tensors
        order = json.loads(text)
        if order["greet"]:
            agent = Agent(model, tuple(order["address"]), order["key"])
            for other in _agents.values():
                other.end()
            _agents.clear()
            _agents[order["key"]] = agent
        elif order["key"] in _agents:  # else its worker was replaced meanwhile
            _agents[order["key"]].work()
    except Exception:
        # Whoever called waits for its connection or its answer, and has a deadline.
        log.exception("fsm-trainer's loader could not do what it was called for")


class Place(NamedTuple):
    """Where a part of a tensor lies: a view of it, in elements, and the engine's own memory."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    memory: torch.Tensor

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        """The part of the whole tensor that lies here."""
        return whole.as_strided(self.size, self.stride, whole.storage_offset() + self.offset)


class Agent(LinkEnd):
    """One scheduler process, called by one worker; ends with the connection."""

    def __init__(self, model: torch.nn.Module, address: tuple[str, int], key: str) -> None:
        super().__init__(next(model.parameters()).device)
        self._load_weights: Callable[[list[tuple[str, torch.Tensor]]], object] = model.load_weights  # type: ignore[assignment]
        self._model = model
        self._places: dict[str, list[Place]] = {}
        self._specs: list[TensorSpec] = []
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        wire = socket.create_connection(address, timeout=GREETING)
        wire.settimeout(None)
        wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = Connection(wire.detach())
        self._connection.send_bytes(
            json.dumps({"key": key, "rank": rank, "pid": os.getpid()}).encode()
        )
        self._sending = threading.Lock()
        self._orders: queue.SimpleQueue[Call] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name="fsm-trainer", daemon=True)
        self._reader.start()

    def work(self) -> None:
        """Carry out the next call that is meant for the scheduler's thread."""
        try:
            call = self._orders.get(timeout=GREETING)
        except queue.Empty:
            return  # the worker died, or gave up, between its two messages
        self._carry_out(call)

    def end(self) -> None:
        """Let go of the link, and of who calls us."""
        self.revoke()
        self.leave()
        hang_up(self._connection)

    def _read(self) -> None:
        try:
            while True:
                call: Call = self._connection.recv()
                if call.method in ON_SCHEDULER:
                    self._orders.put(call)
                else:
                    threading.Thread(target=self._carry_out, args=(call,), daemon=True).start()
        except Exception:  # the connection ended, or says what can't be understood
            self.end()

    def _carry_out(self, call: Call) -> None:
        try:
            if call.method not in CALLS:
                raise CapabilityMissing(f"there is no call {call.method!r}; are versions equal?")
            result = getattr(self, call.method)(*call.arguments)
            answer = Answer(call.number, result, None)
        except Exception as error:
            answer = Answer(call.number, None, portable(call.method, error))
        try:
            with self._sending:
                self._connection.send(answer)
        except OSError:
            self.end()

    # What the worker calls.

    def note(self, tag: str, asleep: bool) -> None:
        """Memory was released, or mapped again."""
        (_asleep.add if asleep else _asleep.discard)(tag)

    def asleep(self) -> list[str]:
        """What is released."""
        return sorted(_asleep)

    @torch.no_grad()
    def learn(self, folder: str, dtype: str) -> list[TensorSpec]:
        """Load zeros under every name of the model, and see where SGLang puts them.

        SGLang fuses, pads and shards tensors, each model in its own way, and passes over names
        that it doesn't know. Seen once, the way is known: pushes copy straight there, and
        checksums read back from there. Raises CapabilityMissing for tensors that can't be followed.
        """
        if callable(getattr(type(self._model), "post_load_weights", None)):
            raise CapabilityMissing(
                f"SGLang derives further weights of {type(self._model).__name__} from loaded ones, "
                "which a push would leave as they were; use rollout.engine.kind: embedded"
            )
        self._places.clear()
        self._specs = layout(folder, dtype)
        for bucket in Manifest(tuple(self._specs)).buckets:
            self._learn(bucket)
        lost = [spec.name for spec in self._specs if not self._whole(spec)]
        if lost:
            raise CapabilityMissing(
                f"SGLang does not copy these tensors of {folder} one to one: {', '.join(lost[:5])}"
                f"{' …' if len(lost) > 5 else ''}. Pushes of this model can't be verified; "
                "use rollout.engine.kind: embedded, or another quantization"
            )
        self.reset_weights()
        return self._specs

    def _learn(self, bucket: Bucket) -> None:
        flat = torch.zeros(bucket.bytes, dtype=torch.uint8, device=self.device)
        views = Parcel(0, bucket, flat).views
        starts = {view.data_ptr(): (name, view) for name, view in views.items() if view.numel()}
        with _Copies(flat) as seen:
            self._load_weights(list(_as_in_a_checkpoint(views)))
        order = sorted(starts)
        for source, memory in seen.copies:
            at = max(start for start in order if start <= source.data_ptr())
            name, view = starts[at]
            offset = source.storage_offset() - view.storage_offset()
            place = Place(tuple(source.shape), source.stride(), offset, memory.detach())
            self._places.setdefault(name, []).append(place)

    def _whole(self, spec: TensorSpec) -> bool:
        places = self._places.get(spec.name, [])
        alike = all(place.memory.dtype is getattr(torch, spec.dtype) for place in places)
        elements = sum(place.memory.numel() for place in places)
        count = torch.tensor([elements if alike else -(2**62)])
        if _parallel_size() > 1:
            torch.distributed.all_reduce(count, group=_parallel_group())
        return bool(places) and int(count) >= spec.bytes // spec.item_size

    @torch.no_grad()
    def reset_weights(self) -> None:
        """Zero every parameter, padding too."""
        with torch.inference_mode():
            for parameter in self._model.parameters():
                parameter.data.zero_()

    def _bind(self, tensors: Mapping[str, torch.Tensor]) -> Callable[[], None]:
        # A tied name has no place of its own.
        return copier(
            (place.memory, place.part(tensor))
            for name, tensor in tensors.items()
            for place in self._places.get(name, ())
        )

    def checksums(self) -> dict[str, str]:
        """Return a checksum for each tensor, read from where the engine reads it."""
        return checksums((spec.name, self._read_back(spec)) for spec in self._specs)

    def _read_back(self, spec: TensorSpec) -> torch.Tensor:
        whole = torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype))
        for place in self._places[spec.name]:
            place.part(whole).copy_(place.memory)
        if _parallel_size() == 1:
            return whole
        # Each process has a part and zeros elsewhere, or a copy of the whole, which is its own.
        joined = whole.clone()
        raw = joined.view(-1).view(torch.uint8)
        torch.distributed.all_reduce(raw, torch.distributed.ReduceOp.BOR, group=_parallel_group())
        own = sum(place.memory.numel() for place in self._places[spec.name])
        return whole if own == whole.numel() else joined


def _as_in_a_checkpoint(
    views: Mapping[str, torch.Tensor],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Each expert under a name of its own, which SGLang expects and transformers has fused."""
    for name, view in views.items():
        stem, kind = name.rpartition(".")[::2]
        if not stem.endswith(".experts") or view.dim() != 3:
            yield name, view
            continue
        parts = {"gate_up_proj": ("gate_proj", "up_proj")}.get(kind, (kind,))
        for index, expert in enumerate(view):
            for part, matrix in zip(parts, expert.chunk(len(parts)), strict=True):
                yield f"{stem}.{index}.{part}.weight", matrix


class _Copies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes every copy out of a flat buffer: what part of it went where."""

    def __init__(self, flat: torch.Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._flat = flat.untyped_storage().data_ptr()
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            target, source = args[:2]
            if source.untyped_storage().data_ptr() == self._flat:
                self.copies.append((source, target))
        return func(*args, **(kwargs or {}))


def _parallel_group() -> Any:
    from sglang.srt.distributed import get_tp_group

    return get_tp_group().cpu_group


def _parallel_size() -> int:
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
