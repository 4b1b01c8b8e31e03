"""What happens to a system, and what has to be done for it: the events and effects of `step`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from fsm_trainer.machine.version import Version


class Op(StrEnum):
    """What an effect does."""

    ACQUIRE = "acquire"
    RELEASE = "release"
    KILL = "kill"


@dataclass(frozen=True, slots=True)
class Effect:
    """Something to do outside: acquire or release a resource, or end a process for good.

    ``epoch`` is the link's where the resource is a link, else 0: a handle, and the report that the
    effect is done, are good only under it.
    """

    worker: str
    op: Op
    resource: str = ""
    epoch: int = 0

    def __str__(self) -> str:
        return f"{self.op} {self.resource}".strip()


@dataclass(frozen=True, slots=True)
class Begin:
    """A trigger for one worker, or for all ends of a joint transition together.

    ``epoch`` (of the link that opens) and ``number`` (of the weights that ``start`` restores) are
    told to a process by whoever composes the whole system; 0 means: the next one.
    """

    trigger: str
    workers: tuple[str, ...]
    epoch: int = 0
    version: Version | None = None


@dataclass(frozen=True, slots=True)
class Done:
    """An effect succeeded."""

    effect: Effect


@dataclass(frozen=True, slots=True)
class Failed:
    """An effect failed: what it would have acquired is not held."""

    effect: Effect


@dataclass(frozen=True, slots=True)
class Undo:
    """Take back a transition whose own effects succeeded but another rank's did not."""

    worker: str


@dataclass(frozen=True, slots=True)
class Commit:
    """All effects are done: the workers are in their new state."""

    workers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Act:
    """An action begins, on all ends of a joint one together."""

    action: str
    workers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Acted:
    """An action ended; a joint one is complete only if ``ok`` on all ends."""

    action: str
    workers: tuple[str, ...]
    ok: bool = True


@dataclass(frozen=True, slots=True)
class Sever:
    """A worker gives up a lease that is no longer good; it keeps all else that it can."""

    worker: str
    link: str


@dataclass(frozen=True, slots=True)
class Died:
    """A worker's process is declared dead; ``lost``: nobody will start it again."""

    worker: str
    lost: bool = False


@dataclass(frozen=True, slots=True)
class Confirmed:
    """A process that was declared dead is seen dead: its claim on the devices ends."""

    worker: str


@dataclass(frozen=True, slots=True)
class Joined:
    """A lost worker's place is taken again."""

    worker: str


Event = Begin | Done | Failed | Undo | Commit | Act | Acted | Sever | Died | Confirmed | Joined
