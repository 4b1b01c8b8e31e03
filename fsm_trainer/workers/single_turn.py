"""The default generate hook: one prompt, one answer."""

from __future__ import annotations

from fsm_trainer.data.trajectory import Sample, Trajectory
from fsm_trainer.workers.context import Context


async def generate(context: Context, sample: Sample) -> Trajectory:
    """Continue the prompt once."""
    prompt = context.encode(sample.prompt)
    completion = await context.complete(prompt)
    return context.trajectory(sample, prompt, completion)
