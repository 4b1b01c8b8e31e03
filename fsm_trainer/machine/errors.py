"""Every error of the package that a caller may want to tell from the others.

An error carries its story: who, in which state, what was asked, and what would make it legal.
All derive from :class:`FsmError`; none is an ``AssertionError``.
"""

from __future__ import annotations

import copyreg
from collections.abc import Sequence
from typing import Any


class FsmError(Exception):
    """Base of all errors that the package raises on purpose; they travel between processes."""

    def __reduce__(self) -> tuple[Any, ...]:
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class SpecError(FsmError, ValueError):
    """Raised when a table under ``states/`` is wrong; the text begins with ``file:line:``."""


class ConfigError(FsmError):
    """Raised when a run's configuration is wrong: field, value, ``file:line`` and remedy."""


class Refused(FsmError):
    """Raised when a trigger or an action is illegal now; nothing has moved.

    ``because`` lists the parts of the guard that were false (or the missing edge or resource),
    ``needs`` says what would make it legal.
    """

    def __init__(
        self, worker: str, state: str, asked: str, because: Sequence[str], needs: str = ""
    ) -> None:
        self.worker, self.state, self.asked = worker, state, asked
        self.because, self.needs = tuple(because), needs
        text = f"{worker} is {state} and refuses {asked!r}: {'; '.join(because)}"
        super().__init__(f"{text}. Needs: {needs}" if needs else text)


class EffectFailed(FsmError):
    """Raised when acquiring or releasing a resource failed; the transition was undone.

    ``state`` is where the worker stands after the undo.
    """

    def __init__(self, worker: str, trigger: str, effect: str, cause: str, state: str) -> None:
        self.worker, self.trigger, self.effect = worker, trigger, effect
        self.cause, self.state = cause, state
        text = f"{worker}: {effect} failed during {trigger!r} ({cause})"
        super().__init__(f"{text}; the transition was undone and {worker} is {state}")


class ActionFailed(FsmError):
    """Raised when an action that was legal ended with an error; the state is unchanged."""


class LeaseExpired(FsmError):
    """Raised when a group handle is used after its epoch ended or a member of it died."""

    def __init__(self, link: str, epoch: int, why: str) -> None:
        self.link, self.epoch, self.why = link, epoch, why
        super().__init__(
            f"the lease on {link} epoch {epoch} is no longer good: {why}. "
            "Reconnect under a new epoch; a result of this operation must not be used"
        )


class PeerLost(FsmError):
    """Raised when a peer did not arrive, or did not answer, before the deadline."""


class DeadlineExceeded(FsmError):
    """Raised when an operation of our own did not end in its time; says who waited for whom."""


class ManifestMismatch(FsmError):
    """Raised before any byte moves when sender and receiver disagree on names, shapes, dtypes."""


class CapabilityMissing(FsmError):
    """Raised at start when a library or device lacks what the configuration asks for."""


class MemoryHeld(FsmError):
    """Raised when a sleeper's device memory was not given back: how much, and who holds it."""


class EngineFailed(FsmError):
    """Raised when an engine process died or answered outside its contract."""


class RewardFailed(FsmError):
    """Raised when a reward function raised, timed out, or returned what isn't a finite number."""


class DataError(FsmError):
    """Raised when a data source or a trajectory is malformed: source, item and reason."""


class SelfCheckFailed(FsmError):
    """Raised when a number that must hold does not: the figures and the likely causes."""


class WorkerLost(FsmError):
    """Raised when a worker's process is gone or does not answer, and could not be replaced."""
