"""Who belongs to one epoch of one link: what the driver sends to each member."""

from __future__ import annotations

import re
from dataclasses import dataclass

from fsm_trainer.groups.rendezvous import Address
from fsm_trainer.machine.errors import ConfigError


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
                (
                    f"size is {self.size} but members are {self.members}",
                    self.size != len(self.members),
                ),
                (f"rank {self.rank} is not below size {self.size}", not 0 <= self.rank < self.size),
                (
                    f"members {self.members} are not unique",
                    len(set(self.members)) != len(self.members),
                ),
                (
                    f"backend {self.backend!r} is neither 'gloo' nor 'nccl'",
                    self.backend not in ("gloo", "nccl"),
                ),
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
