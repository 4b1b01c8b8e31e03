"""Exit 1 unless a run's held-out reward rose from stage `warmup` to `end` by as much as asked.

python examples/check_rewards.py RUN --rise 0.2
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def stage_rewards(metrics: Path) -> dict[str, float]:
    """Give the last held-out reward of each stage."""
    rows = (json.loads(line) for line in metrics.read_text().splitlines())
    return {row["stage"]: row["eval/reward"] for row in rows if "stage" in row}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument("--rise", type=float, default=0.2, help="the least rise that passes")
    options = parser.parse_args()
    rewards = stage_rewards(options.run / "metrics.jsonl")
    missing = {"warmup", "end"} - rewards.keys()
    if missing:
        print(f"{options.run}: no evaluation of stage {', '.join(sorted(missing))}")
        return 1
    rise = rewards["end"] - rewards["warmup"]
    verdict = "learned" if rise >= options.rise else "did NOT learn enough"
    print(
        f"{verdict}: held-out reward {rewards['warmup']:.3f} -> {rewards['end']:.3f}, "
        f"rise {rise:+.3f}, asked {options.rise:+.3f}"
    )
    return 0 if rise >= options.rise else 1


if __name__ == "__main__":
    raise SystemExit(main())
