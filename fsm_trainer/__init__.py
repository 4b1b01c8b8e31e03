"""fsm-trainer: RL post-training in which every worker is a finite-state machine.

What stands here is what others embed: the machines, without torch, Ray or an event loop.
"""

from fsm_trainer.machine.errors import (
    ConfigError,
    EffectFailed,
    FsmError,
    LeaseExpired,
    Refused,
    SpecError,
)
from fsm_trainer.machine.events import Effect
from fsm_trainer.machine.lifecycle import Lifecycle, Record, Resource
from fsm_trainer.machine.names import Role, State, Trigger
from fsm_trainer.machine.spec import Spec, load
from fsm_trainer.machine.version import Version
from fsm_trainer.machine.world import System, World

__version__ = "0.1.0"

__all__ = [
    "ConfigError",
    "Effect",
    "EffectFailed",
    "FsmError",
    "LeaseExpired",
    "Lifecycle",
    "Record",
    "Refused",
    "Resource",
    "Role",
    "Spec",
    "SpecError",
    "State",
    "System",
    "Trigger",
    "Version",
    "World",
    "__version__",
    "load",
]
