"""A generate hook that forgets what the engine recorded."""

from __future__ import annotations

from dataclasses import replace

from fsm_trainer.data.trajectory import Sample, Trajectory
from fsm_trainer.workers import single_turn
from fsm_trainer.workers.context import Context


async def generate(context: Context, sample: Sample) -> Trajectory:
    """One turn, without its routes."""
    return replace(await single_turn.generate(context, sample), routes=None)
