"""Rollout engines: one contract (`contract`), and the engines that keep it."""

from __future__ import annotations

from fsm_trainer.engines.contract import (
    Completion,
    Engine,
    Finish,
    Health,
    PauseMode,
    Request,
    Tag,
)
from fsm_trainer.engines.embedded import EmbeddedEngine, EngineConfig

__all__ = [
    "Completion",
    "EmbeddedEngine",
    "Engine",
    "EngineConfig",
    "Finish",
    "Health",
    "PauseMode",
    "Request",
    "Tag",
]
