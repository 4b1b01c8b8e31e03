"""What routing replay gains: log-probabilities under the engine's routes, and freely.

    fsm-train run examples/moe.yaml --dump-step 60 --set rollout.engine.kind=sglang ...
    python -m benchmarks.route_replay RUN/dump/step-000060 ... --result FILE

For each step that was dumped beside a bfloat16 engine, on the CPU: how far the log-probabilities of
the weights as the engine had them are from the engine's, in nats a token, computed in float32 and
in bfloat16; and the sum of it over the tokens whose log-probability the routes change.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.machine import write
from fsm_trainer.training.routes import Replay
from fsm_trainer.training.stepdump import BEFORE, TABLES, read

# Nats from which on a difference is told: above what float32 rounds.
TOLD = 1e-5


def gaps(dump: Path, dtype: torch.dtype) -> dict[str, Any]:
    """The figures of one dump."""
    batch, told = torch.load(dump / TABLES), read(dump)
    if batch["routes"] is None:
        raise SystemExit(f"{dump} has no routes: give a step of a run with routing_replay")
    tokens, mask = batch["tokens"], batch["loss_mask"][:, 1:] != 0
    # The engine had them in bfloat16.
    model = AutoModelForCausalLM.from_pretrained(dump / BEFORE, dtype=torch.bfloat16).to(dtype)
    replay, apart = Replay(model), {}
    for name, routes in (("replayed", batch["routes"]), ("free", None)):
        with torch.no_grad(), replay.taking(routes):
            logits = model(tokens, attention_mask=batch["attention_mask"]).logits.float()
        logits = logits / told.algorithm["temperature"]
        ours = logits.log_softmax(-1)[:, :-1].gather(2, tokens[:, 1:, None])[..., 0]
        apart[name] = (ours - batch["engine_logprobs"][:, 1:]).abs()[mask]
    changed = (apart["replayed"] - apart["free"]).abs() > TOLD
    return {
        "tokens": int(mask.sum()),
        "changed": int(changed.sum()),
        "nearer": int((apart["replayed"] < apart["free"])[changed].sum()),
    } | {
        name: {
            "mean": float(gap.mean()),
            "max": float(gap.max()),
            "of_changed": float(gap[changed].sum()),
        }
        for name, gap in apart.items()
    }


def main() -> None:
    """Measure, and write the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("dump", nargs="+", type=Path, help="folders that run --dump-step wrote")
    parser.add_argument("--result", type=Path, help="the JSON file to write")
    chosen = parser.parse_args()
    found = {
        f"{dump}": {
            str(dtype).removeprefix("torch."): gaps(dump / "actor", dtype)
            for dtype in (torch.float32, torch.bfloat16)
        }
        for dump in chosen.dump
    }
    write({"dumps": found}, chosen.result)


if __name__ == "__main__":
    main()
