"""How fast a trainer gives its device back and takes it again, beside the host link itself.

    python -m benchmarks.sleep_wake --shape 0.6b --result FILE              one rank
    python -m benchmarks.sleep_wake --shape 0.6b --ranks 2 --result FILE    a device each
    python -m benchmarks.sleep_wake --shape 0.6b --beside --result FILE     and both alternatives

Each rank trains one step of a random model in bfloat16 with float32 masters and Adam moments (ZeRO
1) and then sleeps and wakes. ``bank`` is what moves bytes: weights and optimizer; ``groups`` what
its process group costs, by each policy. The link is a pinned gigabyte, copied in the same process.
``left`` is what the device has less than once all tensors and groups of the process were freed.
The alternatives are two other values of ``offload.target``: DeepSpeed's ``offload_states`` and
torch_memory_saver, under the same trainer, one after the other. Seconds are medians, ratios within
a run.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import queue
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.machine import write
from benchmarks.weight_push import SHAPES, write_model
from fsm_trainer.groups.rendezvous import Address, Rendezvous
from fsm_trainer.training.config import Target

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


def one_rank(
    rank: int, ranks: int, target: Target, store: Address, model: Path, cycles: int, answers: Any
) -> None:
    """A trainer that trains one step, and then sleeps and wakes by each policy."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(ranks)))
    os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[rank]
    import torch

    from fsm_trainer.groups.backend import can_suspend
    from fsm_trainer.training.checkpoint import Origin
    from fsm_trainer.training.config import OffloadConfig, TrainerConfig
    from fsm_trainer.training.device import process_bytes
    from fsm_trainer.training.offload import bytes_of, fingerprint
    from fsm_trainer.training.trainer import ModelTrainer
    from fsm_trainer.training.zero import weights_of
    from tests.training.ranks import make_batch

    config = TrainerConfig(dtype="bfloat16", zero_stage=1, offload=OffloadConfig(target=target))
    with tempfile.TemporaryDirectory() as scratch:
        trainer = ModelTrainer(
            "policy", Origin(model), config, rank=rank, world_size=ranks, store=store,
            role=f"actor/{target}", scratch=Path(scratch), seed=0, total_steps=1,
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

        def storages() -> list[torch.UntypedStorage]:  # another way may give it others
            engine = trainer._engine
            return [*weights_of(trainer._module), *(engine.optimizer() if engine else ())]

        size = sum(s.nbytes() for s in storages())
        before = fingerprint(map(bytes_of, storages()))
        print(f"rank {rank}: {size / 1e9:.2f} GB in {len(storages())} storages", file=sys.stderr)

        result: dict[str, Any] = {"bytes": size, "storages": len(storages()), "link": link()}
        torch.cuda.empty_cache() if torch.cuda.is_available() else None
        result["awake"] = used()
        left: dict[str, int] = {}
        able = target == "host" and (trainer.device.type == "cpu" or can_suspend())
        policies = ["destroy", *(["suspend"] if able else [])]
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
        assert before == fingerprint(map(bytes_of, storages())), "the contents changed"
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


def all_ranks(spawn: Any, target: Target, ranks: int, *where: Any) -> list[dict[str, Any]]:
    """What each rank measured, or how it ended."""
    answers = spawn.Queue()
    processes = [
        spawn.Process(target=one_rank, args=(rank, ranks, target, *where, answers), daemon=True)
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    found: dict[int, dict[str, Any]] = {}
    until = time.monotonic() + DEADLINE
    while len(found) < ranks and time.monotonic() < until:
        try:
            found |= dict([answers.get(timeout=1.0)])
        except queue.Empty:
            if not any(process.is_alive() for process in processes):
                break
    for process in processes:
        process.join(60)
        process.kill()
    failed = {"failed": "its process ended early: its error stands above"}
    return [found.get(rank, failed) for rank in range(ranks)]


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
        where = (rendezvous.address, model, chosen.cycles)
        targets: list[Target] = ["host"]
        targets += ["offload_states", "memory_saver"] if chosen.beside else []
        found = {target: all_ranks(spawn, target, chosen.ranks, *where) for target in targets}
    command = f"--shape {chosen.shape} --ranks {chosen.ranks} --cycles {chosen.cycles}"
    write(
        {
            "benchmark": "sleep and wake",
            "command": f"python -m benchmarks.sleep_wake {command}"
            + (" --beside" if chosen.beside else ""),
            "summary": {
                target: [summary(result) if "failed" not in result else result for result in ranks]
                for target, ranks in found.items()
            },
            "ranks": found,
        },
        chosen.result,
    )


if __name__ == "__main__":
    main()
