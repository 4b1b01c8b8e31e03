"""Reward functions for the tests; the reward processes import them by name."""

from __future__ import annotations

import asyncio
import ctypes
import os
import subprocess
import sys
import time
from pathlib import Path

from fsm_trainer.data.trajectory import Trajectory

constant = 3


def number(trajectory: Trajectory) -> float:
    """Score the number that the answer holds; act as its words ask."""
    word, _, argument = trajectory.text.partition(" ")
    if word == "sleep":
        time.sleep(float(argument))
    elif word == "raise":
        raise ValueError(f"no reward for {argument}")
    elif word == "exit":
        os._exit(int(argument))
    elif word == "give":
        return {"nan": float("nan"), "text": "one", "none": None}[argument]  # type: ignore
    elif word == "note":
        with Path(argument).open("a") as notes:
            notes.write("scored\n")
    elif word == "freeze":
        ctypes.PyDLL(None).sleep(int(argument))  # keeps the interpreter's lock
    elif word == "child":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path(argument).write_text(str(child.pid))
        time.sleep(600)
    return float(word) if word.isdigit() else 0.5


def by_name(trajectory: Trajectory) -> dict[str, float]:
    return {"reward": 1.0, "length": len(trajectory.text)}


async def soon(trajectory: Trajectory) -> float:
    word, _, argument = trajectory.text.partition(" ")
    if word == "sleep":
        await asyncio.sleep(float(argument))
    elif word == "block":
        time.sleep(float(argument))
    return float(word) if word.isdigit() else 0.5


def pid_and_torch(trajectory: Trajectory) -> dict[str, float]:
    return {"reward": 0.0, "pid": os.getpid(), "torch": float("torch" in sys.modules)}
