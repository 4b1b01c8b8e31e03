"""Who belongs to a group of one epoch of one link: what the driver sends to each member."""

from __future__ import annotations

from dataclasses import dataclass

from fsm_trainer.groups.rendezvous import Address
from fsm_trainer.machine.errors import ConfigError

KINDS = ("group", "ipc", "disk")


@dataclass(frozen=True, slots=True)
class Membership:
    """One member's place in one epoch of one link; plain data, cheap to send to a worker.

    ``members`` are the names of all members by rank; ``timeout`` is the deadline of each
    operation, and of opening, in seconds. ``kind`` is the way that weights take: the ``group``
    itself, ``ipc`` or ``disk``, then through files in ``folder``; beside the group they leave it to
    gloo, whatever ``backend`` says. A link may be a bundle: each ``group`` of it has members and a
    store prefix of its own, and all end together. Raises ConfigError when the fields contradict.
    """

    link: str
    epoch: int
    rank: int
    size: int
    members: tuple[str, ...]
    backend: str
    store: Address
    timeout: float
    kind: str = "group"
    folder: str | None = None
    group: str = ""

    def __post_init__(self) -> None:
        names = self.members
        wrong = {
            f"size is {self.size} but members are {names}": self.size != len(names),
            f"rank {self.rank} is not below size {self.size}": not 0 <= self.rank < self.size,
            f"members {names} are not unique": len(set(names)) != len(names),
            f"backend is {self.backend!r}, not gloo or nccl": self.backend not in ("gloo", "nccl"),
            f"timeout {self.timeout} is not above 0 seconds": self.timeout <= 0,
            f"epoch {self.epoch} is negative": self.epoch < 0,
            "link has no name": not self.link,
            f"kind is {self.kind!r}, not group, ipc or disk": self.kind not in KINDS,
            "kind is 'disk' but there is no folder": self.kind == "disk" and not self.folder,
        }
        if any(wrong.values()):
            found = "; ".join(text for text, bad in wrong.items() if bad)
            raise ConfigError(f"membership of link {self.link!r}: {found}")

    @property
    def name(self) -> str:
        """This member's own name."""
        return self.members[self.rank]
