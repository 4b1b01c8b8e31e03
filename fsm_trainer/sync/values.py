"""Send what the critic estimates over a lease: a table, from rank 0 to all others.

    step and shape -> the table -> every member's checksum

All members have the same bytes afterwards, or each raises and the lease is over.
"""

from __future__ import annotations

import hashlib
import time

import torch

from fsm_trainer.groups.lease import Lease
from fsm_trainer.machine.errors import SelfCheckFailed
from fsm_trainer.sync.checksums import raw_bytes
from fsm_trainer.sync.manifest import Transfer
from fsm_trainer.sync.push import all_or_over


def send_values(lease: Lease, step: int, table: torch.Tensor) -> Transfer:
    """Send a step's ``table``, ``[batch, time]`` float32 on the CPU; gives bytes and seconds.

    Raises SelfCheckFailed (somebody got other bytes), PeerLost, LeaseExpired.
    """
    began = time.monotonic()
    with all_or_over(lease, "sending values"):
        lease.broadcast(torch.tensor([step, *table.shape]))
        lease.broadcast(table.to(lease.device))
        _compare(lease, table)
    return Transfer(table.nbytes, time.monotonic() - began)


def receive_values(lease: Lease, step: int) -> torch.Tensor:
    """Receive a step's table, on the CPU.

    Raises SelfCheckFailed (other bytes than were sent, or of another step), PeerLost, LeaseExpired.
    """
    with all_or_over(lease, "sending values"):
        header = torch.zeros(3, dtype=torch.int64)
        lease.broadcast(header)
        sent, rows, length = header.tolist()
        table = torch.empty(rows, length, device=lease.device)
        lease.broadcast(table)
        table = table.cpu()
        _compare(lease, table)
        if sent != step:
            raise SelfCheckFailed(
                f"link {lease.link!r} epoch {lease.epoch}: {lease.membership.name} is at step "
                f"{step} and got the values of step {sent}. Was one end rewound without the other?"
            )
    return table


def _compare(lease: Lease, table: torch.Tensor) -> None:
    word = bytearray(hashlib.sha256(raw_bytes(table)).digest())
    said = lease.all_gather(torch.frombuffer(word, dtype=torch.uint8))
    both = zip(lease.membership.members, said, strict=True)
    other = [name for name, digest in both if not torch.equal(digest, said[0])]
    if other:
        raise SelfCheckFailed(
            f"link {lease.link!r} epoch {lease.epoch}: {', '.join(other)} got other values than "
            f"{lease.membership.members[0]} sent; suspect memory or the network"
        )
