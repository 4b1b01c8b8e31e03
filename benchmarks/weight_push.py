"""How fast weights travel to an engine, over each kind of link, beside a raw broadcast of them.

    python -m benchmarks.weight_push --engine sglang --shape 0.6b --result FILE

A process with weights of the shape on the last device pushes them to one engine on the first one
(on one device between two processes NCCL 2.30 is needed, with ``NCCL_MULTI_RANK_GPU_ENABLE=1``).
``transfer`` is the sender's time from all verdicts to all checksums; ``end_to_end`` is what the
engine's worker waits: pause, flush, push (with its loading), continue. Seconds are medians, ratios
within a run.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.machine import Devices, write
from fsm_trainer.engines.config import EmbeddedConfig, SglangConfig
from fsm_trainer.engines.contract import PauseMode, Tag
from fsm_trainer.engines.embedded import EmbeddedEngine
from fsm_trainer.engines.engine import Engine
from fsm_trainer.engines.sglang import SglangEngine
from fsm_trainer.groups.membership import Membership
from fsm_trainer.groups.rendezvous import Rendezvous
from fsm_trainer.machine.version import Version
from fsm_trainer.sync.manifest import Manifest, TensorSpec

# Seconds; what is late by more than this is broken.
DEADLINE = 300.0
# Qwen3's, by their names there.
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "vocab_size": 512,
    },
    "0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28},
    "4b": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36},
}
ON_CUDA = {
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_cuda_graph": True,
}
ON_CPU = {
    "attention_backend": "torch_native",
    "grammar_backend": "none",
    "cuda_graph_backend_decode": "disabled",
    "cuda_graph_backend_prefill": "disabled",
    "max_total_tokens": 4096,
}


def write_model(folder: Path, shape: str) -> Path:
    """A folder with a configuration and no weights: they are pushed."""
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
    small = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151936,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        **(small if shape == "tiny" else heads),
        **SHAPES[shape],
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def serve(pipe: Connection, device: str) -> None:
    """A process with weights, or with a buffer, and a lease."""
    import torch

    from fsm_trainer.groups.lease import Lease
    from fsm_trainer.sync.push import Sender

    torch.set_num_threads(1)
    held: dict[str, Any] = {"sender": Sender()}

    def synchronize() -> None:
        if device != "cpu":
            torch.cuda.synchronize(device)

    def weights(specs: list[TensorSpec]) -> None:
        held["weights"] = [
            (s.name, torch.randn(s.shape, dtype=getattr(torch, s.dtype), device=device) * 0.02)
            for s in specs
        ]

    def join(membership: Membership) -> float:
        began = time.perf_counter()
        held["lease"] = Lease.open(membership, device)
        held["sender"].ready(held["lease"])
        return time.perf_counter() - began

    def leave(abort: bool = False) -> float:
        began = time.perf_counter()
        lease = held.pop("lease")
        if abort:
            lease.revoke("the benchmark aborts it")
        lease.close()
        return time.perf_counter() - began

    def push(manifest: Manifest, version: Version) -> float:
        sent = held["sender"].send(held["lease"], held["weights"], manifest, version)
        return float(sent.seconds)

    def raw(size: int, times: int) -> list[float]:
        flat = torch.zeros(size, dtype=torch.uint8, device=device)
        seconds = []
        for _ in range(times + 1):
            held["lease"].barrier()
            synchronize()
            began = time.perf_counter()
            held["lease"].broadcast(flat)
            synchronize()
            seconds.append(time.perf_counter() - began)
        return seconds[1:]

    methods: dict[str, Callable[..., Any]] = {
        f.__name__: f for f in (weights, join, leave, push, raw)
    }
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((methods[method](*arguments), None))
        except Exception as error:
            pipe.send((None, f"{type(error).__name__}: {error}"))


class Peer:
    """A process that serves, seen from here."""

    def __init__(self, device: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, device), daemon=True)
        self._process.start()
        theirs.close()

    def start(self, method: str, *arguments: Any) -> None:
        """Call."""
        self._pipe.send((method, arguments))

    def end(self) -> Any:
        """What the call came to."""
        if not self._pipe.poll(DEADLINE):
            raise TimeoutError("the sender does not answer")
        value, error = self._pipe.recv()
        if error is not None:
            raise RuntimeError(error)
        return value

    def call(self, method: str, *arguments: Any) -> Any:
        """Call, and wait."""
        self.start(method, *arguments)
        return self.end()

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.join(DEADLINE)


class Bench:
    """One engine, one sender, and links between them."""

    def __init__(self, engine: Engine, sender: Peer, rendezvous: Rendezvous, backend: str) -> None:
        self.engine, self.sender, self.rendezvous = engine, sender, rendezvous
        self.backend, self.epoch, self.version = backend, 0, 0
        self.folder = tempfile.mkdtemp()

    def places(self, kind: str) -> tuple[Membership, Membership]:
        """A new epoch."""
        self.epoch += 1
        names, store = ("sender", "engine"), self.rendezvous.address
        link = f"bench-{kind}"
        ours, theirs = (
            Membership(link, self.epoch, r, 2, names, self.backend, store, 60.0, kind, self.folder)
            for r in range(2)
        )
        return ours, theirs

    def connect(self, kind: str) -> float:
        """Both ends; seconds until both are there."""
        ours, theirs = self.places(kind)
        began = time.perf_counter()
        self.sender.start("join", ours)
        self.engine.join(theirs)
        self.sender.end()
        return time.perf_counter() - began

    def disconnect(self, abort: bool = False) -> float:
        """Both ends."""
        began = time.perf_counter()
        self.sender.start("leave", abort)
        if abort:
            self.engine.revoke()
        self.engine.leave()
        self.sender.end()
        return time.perf_counter() - began

    def push(self, manifest: Manifest) -> dict[str, float]:
        """One push; seconds of its transfer, end to end, and of the parts of that."""
        self.version += 1
        version = Version(0, self.version)

        def push() -> None:
            self.sender.start("push", manifest, version)
            self.engine.begin_update(manifest)
            self.engine.receive()
            self.engine.end_update(version)

        parts: dict[str, Callable[[], None]] = {
            "pause": lambda: self.engine.pause(PauseMode.ABORT),
            "flush": self.engine.flush,
            "push": push,
            "continue": self.engine.unpause,
        }
        spent = {}
        for name, part in parts.items():
            began = time.perf_counter()
            part()
            spent[name] = time.perf_counter() - began
        return {"transfer": self.sender.end(), "end_to_end": sum(spent.values()), **spent}


def median(values: Iterable[float]) -> float:
    """In seconds, to the microsecond."""
    return round(statistics.median(values), 6)


def medians(pushes: list[dict[str, float]]) -> dict[str, float]:
    """Of several pushes, part by part."""
    return {name: median(push[name] for push in pushes) for name in pushes[0]}


def measure(bench: Bench, kind: str, manifest: Manifest, pushes: int) -> dict[str, Any]:
    """One kind of link."""
    devices, peak = Devices(), list[int]()
    with devices.peak(peak):
        found: dict[str, Any] = {"connect": round(bench.connect(kind), 4)}
    found["connect_device_bytes"] = list(peak)
    with devices.peak(peak):
        first = bench.push(manifest)
    found["first_push_device_bytes"] = list(peak)
    with devices.peak(peak):
        steady = [bench.push(manifest) for _ in range(pushes)]
    found["steady_push_device_bytes"] = list(peak)
    found |= {"first_push": medians([first]), "steady_push": medians(steady)}
    again: dict[str, list[float]] = {"disconnect": [], "reconnect": [], "first_push_again": []}
    for _ in range(5):
        again["disconnect"].append(bench.disconnect())
        again["reconnect"].append(bench.connect(kind))
        again["first_push_again"].append(bench.push(manifest)["transfer"])
    aborted = bench.disconnect(abort=True)
    found["reconnect_after_abort"] = round(bench.connect(kind), 4)
    found |= {name: median(values) for name, values in again.items()} | {"abort": round(aborted, 4)}
    bench.disconnect()
    found["GB/s"] = round(manifest.bytes / found["steady_push"]["transfer"] / 1e9, 2)
    return found


def raw_broadcast(bench: Bench, peer: Peer, size: int, times: int) -> dict[str, float]:
    """One flat tensor of as many bytes, between the sender and a bare process beside the engine."""
    ours, theirs = bench.places("group")
    peer.start("join", theirs)
    bench.sender.call("join", ours)
    peer.end()
    peer.start("raw", size, times)
    seconds = median(bench.sender.call("raw", size, times))
    peer.end()
    for one in (peer, bench.sender):
        one.call("leave")
    return {"seconds": seconds, "GB/s": round(size / seconds / 1e9, 2)}


def main() -> None:
    """Measure, print, and write the result."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--engine", choices=("sglang", "embedded"), default="sglang")
    options.add_argument("--shape", choices=SHAPES, default="0.6b")
    options.add_argument("--kinds", nargs="+", default=["group", "ipc", "disk"])
    options.add_argument("--pushes", type=int, default=7)
    options.add_argument("--bucket-mib", type=int, default=256)
    options.add_argument("--memory-fraction", type=float, default=0.3)
    options.add_argument("--cpu", action="store_true", help="gloo, between CPUs")
    options.add_argument("--result", type=Path)
    chosen = options.parse_args()
    devices = 0
    if not chosen.cpu:
        import torch

        devices = torch.cuda.device_count()
    here, there = ("cpu", "cpu") if chosen.cpu else ("cuda:0", f"cuda:{devices - 1}")
    dtype: Any = "float32" if chosen.cpu else "bfloat16"
    with tempfile.TemporaryDirectory() as scratch, Rendezvous.bind() as rendezvous:
        model = write_model(Path(scratch), chosen.shape)
        engine: Engine = EmbeddedEngine(
            "engine", model, EmbeddedConfig(dtype=dtype, device=here, start_timeout=DEADLINE)
        )
        if chosen.engine == "sglang":
            config = SglangConfig(
                kind="sglang",
                dtype=dtype,
                device=here.partition(":")[0],
                memory_fraction=None if chosen.cpu else chosen.memory_fraction,
                start_timeout=DEADLINE,
                arguments=ON_CPU if chosen.cpu else ON_CUDA,
            )
            engine = SglangEngine("engine", model, config)
        sender, peer = Peer(there), Peer(here)
        bench = Bench(engine, sender, rendezvous, "gloo" if chosen.cpu else "nccl")
        try:
            began = time.perf_counter()
            engine.start()
            result: dict[str, Any] = {
                "benchmark": "weight_push",
                "command": f"--engine {chosen.engine} --shape {chosen.shape} "
                f"--bucket-mib {chosen.bucket_mib}" + (" --cpu" if chosen.cpu else ""),
                "devices": {"engine": here, "sender": there},
                "engine_start": round(time.perf_counter() - began, 1),
            }
            for tag in Tag:
                began = time.perf_counter()
                engine.acquire(tag)
                result[f"acquire_{tag}"] = round(time.perf_counter() - began, 4)
            specs = engine.specs()
            sender.call("weights", specs)
            manifest = Manifest(tuple(specs), bucket_bytes=chosen.bucket_mib * 2**20)
            result |= {"bytes": manifest.bytes, "tensors": len(specs)}
            result["raw_broadcast"] = raw_broadcast(bench, peer, manifest.bytes, chosen.pushes)
            peer.close()
            for kind in chosen.kinds:
                try:
                    result[kind] = measure(bench, kind, manifest, chosen.pushes)
                except Exception as error:  # the other kinds are still worth knowing
                    result[kind] = {"error": f"{type(error).__name__}: {error}"}
                print(kind, json.dumps(result[kind]), flush=True)
            raw = result["raw_broadcast"]["seconds"]
            if "error" not in result.get("group", {"error": ""}):
                steady = result["group"]["steady_push"]
                ratios = {"transfer_of_raw": raw / steady["transfer"]}
                if "error" not in result.get("ipc", {"error": ""}):
                    ratios["end_to_end_of_ipc"] = (
                        steady["end_to_end"] / result["ipc"]["steady_push"]["end_to_end"]
                    )
                group = result["group"]
                ratios["first_of_steady"] = group["first_push"]["transfer"] / steady["transfer"]
                ratios["first_again_of_steady"] = group["first_push_again"] / steady["transfer"]
                result["ratios"] = {name: round(value, 3) for name, value in ratios.items()}
        finally:
            engine.stop()
            sender.close()
            peer.close()
    write(result, chosen.result)


if __name__ == "__main__":
    main()
