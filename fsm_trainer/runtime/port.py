"""The ports: all that the driver asks of workers and data, however their processes are reached.

The driver awaits each call with a deadline. A payload that an action gives for other workers is a
reference: the driver passes it on and never looks inside.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from fsm_trainer.machine.lifecycle import Report
from fsm_trainer.machine.version import Version
from fsm_trainer.machine.world import Worker, World
from fsm_trainer.sync.manifest import Transfer
from fsm_trainer.training.config import Verdict
from fsm_trainer.workers.data import Summary
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


class DataPort(Protocol):
    """The data worker, however it is reached; payloads are references."""

    async def draw(self, prompts: int, copies: int, parts: int) -> list[Any]:
        """References to the next step's samples, one for each part; a group stays in one."""
        ...

    async def evaluation(self, parts: int) -> Mapping[str, list[Any]]:
        """References to the held-out sets by name, each in parts."""
        ...

    async def summary(self, payload: Any) -> Summary:
        """What became of the trajectories of one part."""
        ...

    async def score(self, payloads: list[Any]) -> Outcome:
        """All trajectories with rewards, and means over them."""
        ...

    async def informative(self, rounds: list[Any]) -> Outcome:
        """What :meth:`score` gave, less groups of equal rewards; the value is a ``Kept``."""
        ...

    async def warmup_pairs(self) -> Any:
        """A reference to what the warm-up learns."""
        ...

    async def dump(self, path: Path, payload: Any) -> None:
        """Write scored trajectories into a file."""
        ...

    async def undump(self, path: Path) -> Outcome:
        """Scored trajectories from a file, as :meth:`score` gives them."""
        ...

    async def state(self) -> dict[str, Any]:
        """The position in the data."""
        ...

    async def restore(self, state: Mapping[str, Any]) -> None:
        """Go back to a position."""
        ...


def now() -> float:
    """Seconds by the running loop's clock: of a simulation, virtual ones."""
    return asyncio.get_running_loop().time()


def problem_of(task: asyncio.Future[Any]) -> BaseException | str | None:
    """What a call ended with, if not well: an error, or a report of an effect that failed."""
    error = task.exception()
    if error is not None:
        return error
    result = task.result()
    return result.error if isinstance(result, Report) and result.failed is not None else None


def told_by(result: object) -> Mapping[str, Any]:
    """What an action's record says beside its seconds: a push at the end that sent, and zero-KL."""
    match result:
        case Outcome(value=Transfer() as sent):
            return sent.record
        case Outcome(value={"check/zero_kl": verdict}):
            return {"zero_kl": Verdict(int(verdict)).name.lower()}
    return {}
