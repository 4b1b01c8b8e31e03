"""The configuration of a trainer; imports no torch, so that a run can be validated without it."""

from __future__ import annotations

import math
from enum import IntEnum
from typing import Any, Literal

from pydantic import BaseModel, Field, field_validator

Dtype = Literal["float32", "bfloat16"]
Stage = Literal[0, 1, 2, 3]
Target = Literal["disk", "host", "exit", "offload_states", "memory_saver"]
GroupPolicy = Literal["auto", "destroy", "suspend"]


class ScheduleConfig(BaseModel, extra="forbid", frozen=True):
    """How the learning rate moves from its peak."""

    shape: Literal["constant", "linear", "cosine"] = "constant"
    """What follows the warm-up: the peak, a line to zero, or a half cosine to zero."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps over which the rate rises linearly; step k has (k + 1) / warmup_steps."""

    def factor(self, step: int, total_steps: int) -> float:
        """The share of the peak at optimizer step ``step`` (from 0) of ``total_steps``.

        Decay begins at 1 when the warm-up ends and would reach 0 at ``total_steps``. Cosine:
        Loshchilov and Hutter 2017 (SGDR), eq. 5 with one period.
        """
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.shape == "constant":
            return 1.0
        length = max(1, total_steps - self.warmup_steps)
        progress = min(1.0, (step - self.warmup_steps) / length)
        if self.shape == "linear":
            return 1.0 - progress
        return 0.5 * (1.0 + math.cos(math.pi * progress))


class OffloadConfig(BaseModel, extra="forbid", frozen=True):
    """Where a sleeping trainer's bytes go."""

    target: Target | None = None
    """``disk``: files in the role's scratch folder; ``host``: memory, pinned on a GPU; ``exit``:
    files, and the process ends, so that nothing at all is left of it: it wakes as slowly as it
    starts. Null: ``host`` on a GPU, else ``disk``. Two ways of others to host memory, on a GPU:
    ``offload_states``, DeepSpeed's, at ZeRO 1 and 2; ``memory_saver``, that of the package
    torch_memory_saver, not colocated."""
    tight: bool = False
    """Free the copies when the trainer wakes: less memory, and each sleep pins it anew. (The actor
    keeps one of its reference, and once it has looked at that one of its weights.)"""
    groups: GroupPolicy = "auto"
    """What a sleeper's process groups become: ``destroy`` ends them, ``suspend`` has NCCL (2.29.7
    or newer) keep them without their memory, ``auto`` suspends those of one rank, if NCCL can."""

    def on(self, device: str) -> Target:
        """Where they go from ``cuda`` or ``cpu``: from a GPU to disk a sleep takes minutes."""
        return self.target or ("host" if device == "cuda" else "disk")


class TrainerConfig(BaseModel, extra="forbid", frozen=True):
    """How one role trains."""

    learning_rate: float = Field(default=1e-5, ge=0)
    """AdamW's peak learning rate; 0 trains nothing and is allowed as a control."""
    schedule: ScheduleConfig = ScheduleConfig()
    """How the learning rate moves from its peak."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's decay rates of the first and second moments."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's decoupled weight decay."""
    gradient_clip: float = Field(default=1.0, ge=0)
    """Largest gradient norm over all ranks; 0 clips nothing."""
    zero_stage: Stage = 1
    """What DeepSpeed shards: 0 nothing, 1 the optimizer, 2 gradients too, 3 parameters too."""
    dtype: Dtype = "float32"
    """Of the weights that compute; with ``bfloat16`` the optimizer keeps float32 masters."""
    micro_batch: int = Field(default=64, ge=1)
    """Sequences in one forward pass, at most; says nothing where ``micro_batch_tokens`` is set."""
    micro_batch_tokens: int | None = Field(default=None, ge=1)
    """Tokens in one forward pass, at most, padding included: many short sequences or few long ones.
    A sequence that is longer is an error."""
    packing: bool = False
    """Put several sequences into a row in the place of padding, attention kept apart. A model that
    doesn't keep them apart is refused at start."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    offload: OffloadConfig = OffloadConfig()
    """Where a sleeping trainer's bytes go."""
    timeout: float = Field(default=120.0, gt=0)
    """Deadline of each collective and of each meeting of the ranks, in seconds."""

    def bank_bytes(self, parameters: int, ranks: int, sets: int) -> int:
        """What one rank's bank takes: ``sets`` of the weights, Adam's moments, and masters.

        Rajbhandari et al. 2020 (ZeRO), section 5: stages 1, 2 shard the optimizer, 3 weights too.
        """
        half = self.dtype == "bfloat16"
        weights = parameters * (2 if half else 4) * sets // (ranks if self.zero_stage == 3 else 1)
        return weights + parameters * (12 if half else 8) // (ranks if self.zero_stage else 1)


# How the errors of checks begin, or what is in them: by it a report tells which check it was.
ZERO_KL = "the first step's actor is not its reference"
UNIT_RATIO = "the first minibatch's ratio is not 1"
MISMATCH = "trainer and engine differ by"
REPLICAS = "differs between ranks"


class Verdict(IntEnum):
    """What ``check/zero_kl`` says; a check that failed in a run that goes on was only to warn."""

    PASSED = 1
    FAILED = 0
    OFF = -1


class MismatchConfig(BaseModel, extra="forbid", frozen=True):
    """How far trainer and engine may differ: the mean of |log p - log q| over a step's tokens."""

    warn: float | None = Field(default=None, gt=0)
    """Nats a token beyond which each step is warned of. Null: 1e-4 in float32, 0.05 in bfloat16;
    docs/checks.md says which measurements these stand on."""
    stop: float | None = Field(default=None, gt=0)
    """Nats a token beyond which the run stops before the update; null: it never does."""

    def warning(self, *, exact: bool) -> float:
        """The limit of ``warn``; by default that of float32, ``exact``, or of bfloat16."""
        return self.warn or (1e-4 if exact else 0.05)


class ChecksConfig(BaseModel, extra="forbid", frozen=True):
    """What a run checks of its numbers while it goes."""

    zero_kl: Literal["stop", "warn", "off"] = "stop"
    """What becomes of a run whose actor isn't its reference at the first step. ``off`` is told in
    journal and report."""
    mismatch: MismatchConfig = MismatchConfig()
    """How far trainer and engine may differ."""
    replicas_every: int = Field(default=10, ge=0)
    """Steps between comparisons of the weights that all ranks of a trainer hold; 0: never."""

    free_routing_every: int = Field(default=10, ge=0)
    """Steps between measurements of the KL with free routing, where routes are replayed; 0: never.
    Each costs two forward passes over the step, so every tenth step a few percent."""

    @field_validator("zero_kl", mode="before")
    @classmethod
    def _off(cls, value: Any) -> Any:
        """YAML reads a bare ``off`` as false."""
        return "off" if value is False else value
