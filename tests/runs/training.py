"""Real runs of ``fsm-train`` for the tests: small, cached, and watched for what they leave."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from fsm_trainer.runtime.journal import Entry, read_journal
from fsm_trainer.runtime.metrics import MetricsRow, read_metrics

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "examples" / "quickstart.yaml"
SMALL = (
    "warmup.steps=10",
    "rollout.prompts=32",
    "data.train.size=600",
    "data.evaluation_limit=16",
    "evaluation.every=0",
    "metrics.tensorboard=false",
    # A model that knows nothing gets 0 from the quickstart's: all gradients would be 0.
    "reward.function=tests.runs.scoring:reward",
)
DEADLINE = 240.0
LEFTOVERS = ("ray::", "raylet", "gcs_server", "fsm_trainer.engines", "reward_process", "sglang")


@dataclass(frozen=True)
class Trained:
    """A run's folder after it has ended."""

    folder: Path
    exit: int
    output: str

    @property
    def journal(self) -> list[Entry]:
        """Its journal."""
        return read_journal(self.folder / "journal.jsonl")

    @property
    def metrics(self) -> list[MetricsRow]:
        """Its metrics."""
        return read_metrics(self.folder / "metrics.jsonl")

    def weights(self, step: int, role: str = "actor") -> bytes:
        """The bytes of the weights in a checkpoint."""
        checkpoint = self.folder / "checkpoints" / f"step-{step:06d}"
        return (checkpoint / role / "model.safetensors").read_bytes()


def command(*arguments: str) -> list[str]:
    """The command line of ``fsm-train``."""
    return [sys.executable, "-m", "fsm_trainer.cli.main", *arguments]


def environment() -> dict[str, str]:
    """As the tests', with the package importable from anywhere and one thread a process."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@contextmanager
def running(folder: Path, *arguments: str, config: Path = QUICKSTART) -> Iterator[RunningRun]:
    """Start a run; whatever the test does, nothing of it is left."""
    log = folder.with_suffix(".out")
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output:
        process = subprocess.Popen(
            command("run", str(config), "--out", str(folder), *arguments),
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment(),
            cwd=ROOT,
        )
    try:
        yield RunningRun(folder, process, log)
    finally:
        family = _family(process.pid)
        for member in family:
            if member.is_running():
                member.kill()
        psutil.wait_procs(family, timeout=20)


@dataclass(frozen=True)
class RunningRun:
    """A run that goes on."""

    folder: Path
    process: subprocess.Popen[bytes]
    log: Path

    def wait(self, seconds: float = DEADLINE) -> Trained:
        """Wait for its end."""
        code = self.process.wait(seconds)
        return Trained(self.folder, code, self.log.read_text())

    def after_step(self, step: int, seconds: float = DEADLINE) -> None:
        """Wait until a step has been written."""

        def done() -> bool:
            path = self.folder / "metrics.jsonl"
            return path.exists() and any(
                r.phase_seconds and r.step >= step for r in read_metrics(path)
            )

        self._until(done, f"step {step}", seconds)

    def pid(self, worker: str) -> int:
        """The newest process of a worker."""
        events = map(json.loads, (self.folder / "run.log.jsonl").read_text().splitlines())
        found = [
            e["pid"] for e in events if e["event"] == "a process is up" and e["worker"] == worker
        ]
        return int(found[-1])

    def kill(self, worker: str) -> None:
        """Kill a worker's process."""
        os.kill(self.pid(worker), signal.SIGKILL)

    def kill_all(self) -> None:
        """Kill every process of the run at once, and remove Ray's temporary folder."""
        family = _family(self.process.pid)
        told = " ".join(" ".join(member.cmdline()) for member in family if member.is_running())
        for member in family:
            with suppress(psutil.NoSuchProcess):
                member.kill()
        psutil.wait_procs(family, timeout=20)
        for folder in set(re.findall(r"--temp_dir=(\S*/fsm-ray-\w+)", told)):
            shutil.rmtree(folder, ignore_errors=True)

    def _until(self, done: Callable[[], bool], what: str, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not done():
            assert self.process.poll() is None, f"ended before {what}: {self.log.read_text()}"
            assert time.monotonic() < until, f"no {what} in {seconds} s: {self.log.read_text()}"
            time.sleep(0.05)


def train(folder: Path, *overrides: str, more: Sequence[str] = (), **how: Path) -> Trained:
    """Run to the end; it must end well."""
    sets = [part for text in (*SMALL, *overrides) for part in ("--set", text)]
    with running(folder, *sets, *more, **how) as run:
        trained = run.wait()
    assert trained.exit == 0, trained.output
    return trained


def resume(folder: Path, *overrides: str) -> Trained:
    """Go on with a run in its folder; it must end well."""
    sets = [part for text in overrides for part in ("--set", text)]
    done = subprocess.run(
        command("run", "--resume", str(folder), *sets),
        capture_output=True,
        text=True,
        env=environment(),
        timeout=DEADLINE,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return Trained(folder, done.returncode, done.stdout)


def trace(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """``fsm-train trace``."""
    return subprocess.run(
        command("trace", str(folder), *arguments),
        capture_output=True,
        text=True,
        env=environment(),
        timeout=120,
        check=False,
    )


def _family(pid: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def leftovers(before: set[int]) -> list[str]:
    """The command lines of processes of a run that are there and were not before."""
    found = []
    for process in psutil.process_iter(["pid", "cmdline", "status"]):
        line = " ".join(process.info["cmdline"] or [])
        stale = process.info["status"] == psutil.STATUS_ZOMBIE or process.info["pid"] in before
        if not stale and any(word in line for word in LEFTOVERS):
            found.append(line.strip())
    return found
