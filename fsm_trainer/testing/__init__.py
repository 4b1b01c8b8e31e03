"""The property-test kit: our machines' tables, asked of lifecycle code of your own.

One class to subclass, one method to give. Hypothesis fires triggers, actions and faults in any
order; what is legal must be done, what isn't must be refused and move nothing, and after each step
the properties of ``states/system.yaml`` are asked of what the workers hold.

>>> from fsm_trainer import System, load
>>> from fsm_trainer.testing import LifecycleMachine, LifecycleWorker
>>> class Suite(LifecycleMachine):
...     system = System.of(load("disaggregated"), rollouts=1)
...     def make_worker(self, name):
...         return LifecycleWorker(self.system, name)

`LifecycleWorker` is a worker whose lifecycle is ours, whose resources only exist, or are yours.
Lifecycle code that isn't ours needs an adapter with eight methods, `Subject`: do a trigger, do
an action, say what is held, which epochs, which weights, fail or stall on demand, end. Under pytest
``TestSuite = Suite.TestCase`` is all; here it runs by hand:

>>> from hypothesis import settings
>>> from hypothesis.stateful import run_state_machine_as_test
>>> quick = settings(max_examples=10, stateful_step_count=10, deadline=None, database=None)
>>> run_state_machine_as_test(Suite, settings=quick)

Now a worker that keeps its end of the link while it sleeps, which is how this project began. It
forgets to tell its machine, so nothing in it can notice; the kit sees what it holds:

>>> class Forgetful(LifecycleWorker):
...     def holds(self):
...         asleep = self.lifecycle.state == "sleeping"
...         return [*super().holds(), *(["link"] if asleep else [])]
>>> class Broken(Suite):
...     def make_worker(self, name):
...         return Forgetful(self.system, name)
>>> run_state_machine_as_test(Broken, settings=quick)
Traceback (most recent call last):
    ...
fsm_trainer.testing.subject.PropertyViolated: 1: actor is sleeping with ...

The error tells the shortest way there, too. What else is here:

- `FakeGroup` keeps the rules of a process group, and `FakeClock` pays for its waits:

>>> from fsm_trainer.testing import FakeClock, FakeGroup
>>> clock = FakeClock()
>>> group = FakeGroup(["actor", "rollout-0"], clock, timeout=60)
>>> group.join("actor", epoch=1)
>>> group.send("actor", 1, "weights")
Traceback (most recent call last):
    ...
fsm_trainer.machine.errors.PeerLost: link epoch 1: rollout-0 did not answer within 60 s
>>> clock.monotonic()
60.0

- `fsm_trainer.testing.processes`: real processes; `ProcessWorker` is a worker under test in one of
  them, with a real group, ended by a real SIGKILL.
- `Faulty` wraps a resource of yours and fails when told to; `LifecycleWorker` does so with all.
- A pytest plugin, `fsm_trainer.pytest_plugin`, with the fixtures ``gloo_processes``, ``no_leaks``
  (groups, processes, threads, descriptors, sockets, memory) and ``conforms`` (a journal against the
  tables).
- `Model`: the plain model that stands beside your workers.
"""

from fsm_trainer.testing.fakes import (
    FakeClock,
    FakeGroup,
    Faulty,
    LifecycleWorker,
    Steps,
    in_step,
)
from fsm_trainer.testing.model import Model, Step
from fsm_trainer.testing.stateful import LifecycleMachine
from fsm_trainer.testing.subject import Order, PeerAbsent, PropertyViolated, Subject

__all__ = [
    "FakeClock",
    "FakeGroup",
    "Faulty",
    "LifecycleMachine",
    "LifecycleWorker",
    "Model",
    "Order",
    "PeerAbsent",
    "PropertyViolated",
    "Step",
    "Steps",
    "Subject",
    "in_step",
]
