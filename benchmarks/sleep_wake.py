"""How fast a trainer gives its device back and takes it again, beside the host link itself.

    python -m benchmarks.sleep_wake --shape 0.6b --result FILE              one rank
    python -m benchmarks.sleep_wake --shape 0.6b --ranks 2 --result FILE    a device each
    python -m benchmarks.sleep_wake --shape 0.6b --beside --result FILE     and both alternatives

Each rank trains one step of a random model in bfloat16 with float32 masters and Adam moments (ZeRO
1) and then sleeps and wakes. ``bank`` is what moves bytes: weights and optimizer; ``groups`` what
its process group costs, by each policy. The link is a pinned gigabyte, copied in the same process.
``left`` is what the device has less than once all tensors and groups of the process were freed.
The alternatives: torch_memory_saver with a host copy, over tensors of the same sizes; DeepSpeed's
``offload_states``, over an engine of the same kind. Seconds are medians, ratios within a run.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import write
from benchmarks.weight_push import SHAPES, write_model
from fsm_trainer.groups.rendezvous import Address, Rendezvous

# Seconds; what is late by more than this is broken.
DEADLINE = 540.0
LINK_BYTES = 1 << 30
ON_DEVICE = ("weights", "optimizer", "train_groups")


def fill(folder: Path) -> None:
    """Random weights for a configuration, made on the device if there is one."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    kind: Any = AutoModelForCausalLM
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = kind.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    model.save_pretrained(folder)


def used() -> int:
    """What the device has in use, for all its processes."""
    import torch

    if not torch.cuda.is_available():
        return 0
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return int(total - free)


def timed(work: Callable[[], Any]) -> float:
    """Seconds until the work is done, on the device too."""
    import torch

    synchronize = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    synchronize()
    began = time.perf_counter()
    work()
    synchronize()
    return time.perf_counter() - began


def link() -> dict[str, float]:
    """Gigabytes a second from the device to pinned memory, and back: the best of five."""
    import torch

    on_cuda = torch.cuda.is_available()
    host = torch.ones(LINK_BYTES, dtype=torch.uint8, pin_memory=on_cuda)
    device = torch.ones(LINK_BYTES, dtype=torch.uint8, device="cuda" if on_cuda else "cpu")
    out = min(timed(lambda: host.copy_(device, non_blocking=True)) for _ in range(5))
    back = min(timed(lambda: device.copy_(host, non_blocking=True)) for _ in range(5))
    return {"out": LINK_BYTES / out / 1e9, "in": LINK_BYTES / back / 1e9}


def one_rank(rank: int, ranks: int, store: Address, model: Path, cycles: int, answers: Any) -> None:
    """A trainer that trains one step, and then sleeps and wakes by each policy."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(ranks)))
    os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[rank]
    import torch

    from fsm_trainer.groups.backend import can_suspend
    from fsm_trainer.training.config import TrainerConfig
    from fsm_trainer.training.device import process_bytes
    from fsm_trainer.training.offload import bytes_of, fingerprint
    from fsm_trainer.training.trainer import ModelTrainer
    from fsm_trainer.training.zero import weights_of
    from tests.training.ranks import make_batch

    config = TrainerConfig(dtype="bfloat16", zero_stage=1, offload={"target": "host"})  # type: ignore[arg-type]
    with tempfile.TemporaryDirectory() as scratch:
        trainer = ModelTrainer(
            "policy", model, config, rank=rank, world_size=ranks, store=store, role="actor",
            scratch=Path(scratch), seed=0, total_steps=1,
        )  # fmt: skip
        epochs = iter(range(1, 1000))

        def wake(resource: Any) -> None:
            trainer.acquire(resource, epoch=epoch)

        epoch = next(epochs)
        for resource in ("bank", *ON_DEVICE):
            wake(resource)
        scores = trainer.logprobs(make_batch(rank).to(trainer.device), 1.0)
        trainer.backward(-scores.logprobs.mean(), last=True)
        trainer.step()
        del scores
        engine = trainer._engine
        assert engine is not None
        storages = [*weights_of(trainer._module), *engine.optimizer()]
        size = sum(s.nbytes() for s in storages)
        before = fingerprint(map(bytes_of, storages))
        print(f"rank {rank}: {size / 1e9:.2f} GB in {len(storages)} storages", file=sys.stderr)

        result: dict[str, Any] = {"bytes": size, "storages": len(storages), "link": link()}
        torch.cuda.empty_cache() if torch.cuda.is_available() else None
        result["awake"] = used()
        left: dict[str, int] = {}
        policies = [
            "destroy",
            *(["suspend"] if trainer.device.type == "cpu" or can_suspend() else []),
        ]
        for policy in policies:
            trainer._groups.suspends = policy == "suspend"
            seconds: dict[str, list[float]] = {}
            for _ in range(cycles):
                epoch = next(epochs)
                for resource in reversed(ON_DEVICE):
                    took = timed(lambda: trainer.release(resource))  # noqa: B023
                    seconds.setdefault(f"sleep {resource}", []).append(took)
                left[policy] = used()
                result.setdefault("by_process", {})[policy] = process_bytes() if used() else 0
                for resource in ON_DEVICE:
                    took = timed(lambda: wake(resource))  # noqa: B023
                    seconds.setdefault(f"wake {resource}", []).append(took)
                # What NCCL puts off: after a rebuild it connects in the first collective.
                seconds.setdefault("first collective", []).append(timed(trainer._barrier))
            result[policy] = {name: [round(s, 4) for s in each] for name, each in seconds.items()}
        assert before == fingerprint(map(bytes_of, storages)), "the contents changed"
        del storages, engine
        for resource in (*reversed(ON_DEVICE), "bank"):
            trainer.release(resource)  # type: ignore[arg-type]
        bare = used()
        result["left"] = {policy: each - bare for policy, each in left.items()}
        result["bare"] = bare
    answers.put((rank, result))


def summary(result: dict[str, Any]) -> dict[str, Any]:
    """Medians without the first cycle, which pins; and what share of the link that is."""
    size, at = result["bytes"], result["link"]
    found: dict[str, Any] = {"first_sleep_pins": {}}
    for policy in ("destroy", "suspend"):
        each = {k: statistics.median(v[1:]) for k, v in result.get(policy, {}).items()}
        if each:
            bank = {w: each[f"{w} weights"] + each[f"{w} optimizer"] for w in ("sleep", "wake")}
            found[policy] = {
                "sleep_seconds": sum(v for k, v in each.items() if k.startswith("sleep")),
                "wake_seconds": sum(v for k, v in each.items() if k.startswith("wake")),
                "groups_seconds": {
                    "sleep": each["sleep train_groups"],
                    "wake": each["wake train_groups"],
                    "first_collective": each["first collective"],
                },
                "bank_gb_per_second": {w: size / s / 1e9 for w, s in bank.items()},
                "bank_of_link": {
                    w: size / bank[w] / 1e9 / at[way]
                    for w, way in (("sleep", "out"), ("wake", "in"))
                },
                "left_bytes": result["left"][policy],
            }
    first = result["destroy"]
    found["first_sleep_pins"] = first["sleep weights"][0] + first["sleep optimizer"][0]
    return found


def saver(shape: Sequence[int]) -> dict[str, Any]:
    """torch_memory_saver with a host copy, over tensors of these bytes."""
    import torch
    from torch_memory_saver import torch_memory_saver

    torch_memory_saver.hook_mode = "torch"
    bare = used()
    with torch_memory_saver.region(enable_cpu_backup=True):
        tensors = [torch.ones(size, dtype=torch.uint8, device="cuda") for size in shape]
    torch.cuda.empty_cache()
    out, left, back = [], 0, []
    for _ in range(3):
        out.append(timed(torch_memory_saver.pause))
        left = used() - bare
        back.append(timed(torch_memory_saver.resume))
    assert all(bool(t[:64].eq(1).all()) for t in tensors), "the contents changed"
    return {"bytes": sum(shape), "sleep": out, "wake": back, "left": left}


def offload_states(model: Path) -> dict[str, Any]:
    """DeepSpeed's own, over an engine at ZeRO 1 that has trained a step."""
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29633")
    from fsm_trainer.groups.training import install

    install()
    import deepspeed
    import torch
    from transformers import AutoModelForCausalLM

    kind: Any = AutoModelForCausalLM
    module = kind.from_pretrained(model, dtype=torch.bfloat16).cuda()
    bare = used() - torch.cuda.memory_reserved()
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-5, fused=True)
    engine: Any = deepspeed.initialize(model=module, config=settings, optimizer=optimizer)[0]
    tokens = torch.randint(0, 1000, (4, 9), device="cuda")
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()
    out, left, back = [], 0, []
    size = torch.cuda.memory_allocated()
    for _ in range(3):
        out.append(timed(lambda: engine.offload_states(pin_memory=True, non_blocking=True)))
        torch.cuda.empty_cache()
        left = used() - bare
        back.append(timed(lambda: engine.reload_states(non_blocking=True)))
    return {"bytes": size, "sleep": out, "wake": back, "left": left}


def alone(name: str, argument: str) -> Any:
    """One of the alternatives in a process of its own; what it said if it failed."""
    code = (
        "import json, sys; from pathlib import Path; from benchmarks import sleep_wake as b\n"
        f"print('RESULT ' + json.dumps(b.{name}({argument})))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE, check=False
    )
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            return json.loads(line.removeprefix("RESULT "))
    return {"failed": done.stderr.strip().splitlines()[-1:]}


def main() -> None:
    """See the module."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--shape", choices=SHAPES, default="0.6b")
    options.add_argument("--ranks", type=int, default=1)
    options.add_argument("--cycles", type=int, default=4, help="by each policy; the first one pins")
    options.add_argument("--beside", action="store_true", help="measure the alternatives too")
    options.add_argument("--result", type=Path)
    chosen = options.parse_args()
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, Rendezvous.bind() as rendezvous:
        model = write_model(Path(folder), chosen.shape)
        filling = spawn.Process(target=fill, args=(model,))
        filling.start()
        filling.join(DEADLINE)
        answers = spawn.Queue()
        where = (rendezvous.address, model, chosen.cycles, answers)
        ranks = [
            spawn.Process(target=one_rank, args=(rank, chosen.ranks, *where), daemon=True)
            for rank in range(chosen.ranks)
        ]
        for process in ranks:
            process.start()
        results = dict(answers.get(timeout=DEADLINE) for _ in ranks)
        for process in ranks:
            process.join(60)
        beside: dict[str, Any] = {}
        if chosen.beside:
            size = results[0]["bytes"]
            pieces = [size // 300] * 300
            beside["torch_memory_saver"] = alone("saver", repr(pieces))
            beside["deepspeed"] = alone("offload_states", f"Path({str(model)!r})")
    command = f"--shape {chosen.shape} --ranks {chosen.ranks} --cycles {chosen.cycles}"
    write(
        {
            "benchmark": "sleep and wake",
            "command": f"python -m benchmarks.sleep_wake {command}"
            + (" --beside" if chosen.beside else ""),
            "summary": [summary(results[rank]) for rank in sorted(results)],
            "ranks": [results[rank] for rank in sorted(results)],
            "beside": beside,
        },
        chosen.result,
    )


if __name__ == "__main__":
    main()
