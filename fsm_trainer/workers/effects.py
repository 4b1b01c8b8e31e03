"""A resource made of two functions."""

from __future__ import annotations

from collections.abc import Callable

from fsm_trainer.machine.events import Effect


class Effects:
    """Acquires with one function and releases with another."""

    def __init__(
        self, acquire: Callable[[Effect], None], release: Callable[[Effect], None]
    ) -> None:
        self._acquire, self._release = acquire, release

    def acquire(self, effect: Effect) -> None:
        """Take it."""
        self._acquire(effect)

    def release(self, effect: Effect) -> None:
        """Give it back."""
        self._release(effect)
