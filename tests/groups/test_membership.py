from __future__ import annotations

import pickle
import subprocess
import sys

import pytest

from fsm_trainer.groups.membership import Membership
from fsm_trainer.groups.rendezvous import Address
from fsm_trainer.machine.errors import ConfigError

STORE = Address("127.0.0.1", 1)


def membership(**changes: object) -> Membership:
    fields = {
        "link": "weights", "epoch": 1, "rank": 0, "size": 2, "members": ("a", "b"),
        "backend": "gloo", "store": STORE, "timeout": 5.0,
    }  # fmt: skip
    return Membership(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"size": 3}, "size is 3"),
        ({"rank": 2}, "rank 2 is not below size 2"),
        ({"members": ("a", "a")}, "not unique"),
        ({"backend": "mpi"}, "backend is 'mpi'"),
        ({"timeout": 0.0}, "not above 0"),
        ({"epoch": -1}, "negative"),
        ({"link": ""}, "no name"),
        ({"kind": "carrier pigeon"}, "kind is 'carrier pigeon'"),
        ({"kind": "disk"}, "no folder"),
    ],
)
def test_a_contradictory_membership_is_refused(changes: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        membership(**changes)


def test_a_membership_survives_pickling() -> None:
    assert pickle.loads(pickle.dumps(membership())) == membership()


def test_types_and_manifest_need_no_torch() -> None:
    code = (
        "import sys, fsm_trainer.groups.lease, fsm_trainer.groups.rendezvous\n"
        "import fsm_trainer.sync.manifest\n"
        "from fsm_trainer.groups.lease import registered_groups\n"
        "assert registered_groups() == ()\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=60, check=False)
    assert done.returncode == 0


def test_a_process_that_ends_with_a_lease_open_ends_in_order() -> None:
    # Exit handlers run last in, first out: this one is registered before the lease's.
    code = (
        "import atexit, threading\n"
        "atexit.register(lambda: print(threading.active_count()))\n"
        "from fsm_trainer.groups.lease import Lease, Membership\n"
        "from fsm_trainer.groups.rendezvous import Rendezvous\n"
        "rendezvous = Rendezvous.bind()\n"
        "place = Membership('w', 1, 0, 1, ('a',), 'gloo', rendezvous.address, 5.0)\n"
        "lease = Lease.open(place)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], timeout=60, check=False, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "1", "")
