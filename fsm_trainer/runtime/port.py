"""The worker port: all that the driver asks of a worker, however its processes are reached.

The driver awaits each call with a deadline. A payload that an action gives for other workers is a
reference: the driver passes it on and never looks inside.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from fsm_trainer.machine.lifecycle import Report
from fsm_trainer.machine.version import Version
from fsm_trainer.machine.world import Worker, World
from fsm_trainer.workers.host import Status


class Outcome(NamedTuple):
    """What an action gave: a reference to its payload, and the small value that it reports."""

    payload: Any
    value: Any


class WorkerPort(Protocol):
    """One worker, all its ranks together; calls are answered for the whole worker.

    Every method raises WorkerLost when a process of the worker is gone or does not answer in time,
    and what the worker itself raised.
    """

    @property
    def ranks(self) -> int:
        """Processes of the worker."""
        ...

    async def begin(
        self, trigger: str, epoch: int, version: Version | None, world: World, generation: int
    ) -> Report:
        """Begin a transition and release."""
        ...

    async def acquire(self) -> Report:
        """Acquire what the transition's end holds."""
        ...

    async def commit(self) -> Worker:
        """Be in the new state."""
        ...

    async def undo(self) -> Worker:
        """Take back the transition."""
        ...

    async def sever(self, link: str, world: World) -> Worker:
        """Give up a lease that is no longer good."""
        ...

    async def act(self, action: str, world: World, arguments: tuple[Any, ...]) -> Outcome:
        """Run an action; rank 0's outcome counts."""
        ...

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call one of the hosts' own methods on all ranks; rank 0's value counts."""
        ...

    async def died(self, peer: str) -> None:
        """Tell it that a peer's process is dead."""
        ...

    async def status(self) -> list[Status]:
        """How each process stands."""
        ...

    async def kill(self) -> None:
        """End its processes and see them dead.

        Raises DeadlineExceeded if one can't be confirmed dead: its claim on the devices stays.
        """
        ...

    async def respawn(self) -> None:
        """Start new processes in the place of dead ones."""
        ...
