"""A link for workers of your own: process groups as leases, and pushes of weights over them.

It loads torch; the machines, at the top of the package, don't.
"""

from fsm_trainer.groups.lease import Lease
from fsm_trainer.groups.membership import Membership
from fsm_trainer.groups.rendezvous import Address, Rendezvous
from fsm_trainer.sync.manifest import Manifest
from fsm_trainer.sync.push import Receiver, Sender

__all__ = ["Address", "Lease", "Manifest", "Membership", "Receiver", "Rendezvous", "Sender"]
