"""Process groups as leases: good for one epoch, for nobody's state but their own."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fsm_trainer.groups.rendezvous import Address
from fsm_trainer.machine.errors import ConfigError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Membership:
    """One member's place in one epoch of one link; plain data, cheap to send to a worker.

    ``members`` are the names of all members by rank; ``timeout`` is the deadline of each
    operation, and of opening, in seconds. Raises ConfigError when the fields contradict.
    """

    link: str
    epoch: int
    rank: int
    size: int
    members: tuple[str, ...]
    backend: str
    store: Address
    timeout: float

    def __post_init__(self) -> None:
        wrong = [
            text
            for text, bad in (
                (f"size is {self.size} but members are {self.members}",
                 self.size != len(self.members)),
                (f"rank {self.rank} is not below size {self.size}",
                 not 0 <= self.rank < self.size),
                (f"members {self.members} are not unique",
                 len(set(self.members)) != len(self.members)),
                (f"backend {self.backend!r} is neither 'gloo' nor 'nccl'",
                 self.backend not in ("gloo", "nccl")),
                (f"timeout {self.timeout} is not above 0 seconds", self.timeout <= 0),
                (f"epoch {self.epoch} is negative", self.epoch < 0),
                ("link has no name", not self.link),
            )
            if bad
        ]
        if wrong:
            raise ConfigError(f"membership of link {self.link!r}: " + "; ".join(wrong))

    @property
    def name(self) -> str:
        """This member's own name."""
        return self.members[self.rank]

    @property
    def order(self) -> tuple[str, int]:
        """Sort key of the one global order over groups: link name, then its trailing index."""
        match = re.fullmatch(r"(.*?)(\d*)", self.link, re.DOTALL)
        name, index = match.groups() if match else (self.link, "")
        return name, int(index or 0)


class Lease:
    """A process group that is good for one epoch."""

    link: str
    epoch: int
    rank: int
    size: int

    @classmethod
    def open(cls, membership: Membership, device: str = "cpu") -> Lease:
        """Build and warm the group. Raises PeerLost naming who did not arrive in time."""
        raise NotImplementedError

    @property
    def usable(self) -> bool:
        """Whether the next operation would be let through."""
        raise NotImplementedError

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None:
        """Overwrite ``tensor`` everywhere with that of rank ``source``."""
        raise NotImplementedError

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum ``tensor`` over all members, in place."""
        raise NotImplementedError

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return every member's ``tensor`` by rank (small ones)."""
        raise NotImplementedError

    def barrier(self) -> None:
        """Return when all members came here."""
        raise NotImplementedError

    def revoke(self, why: str = "it was revoked") -> None:
        """Make every further use raise LeaseExpired; callable from any thread."""
        raise NotImplementedError

    def close(self) -> None:
        """Free the group's threads, sockets and device memory; idempotent."""
        raise NotImplementedError

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_all(memberships: Iterable[Membership], device: str = "cpu") -> tuple[Lease, ...]:
    """Open a bundle of groups in the one global order, all or none."""
    raise NotImplementedError


def registered_groups() -> tuple[str, ...]:
    """Return the names of the groups that torch.distributed has registered in this process."""
    raise NotImplementedError
