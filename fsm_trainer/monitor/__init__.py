"""Watch another trainer: its events, held against the tables, with the story of what is wrong.

A trainer that knows nothing of fsm-trainer tells what its workers do in the words of the tables: a
trigger (``wake``), an action (``generate``) or a fault (``died``). Here are an actor and a rollout
worker, which start, wake, and join a group one after the other:

>>> from fsm_trainer import System, load
>>> monitor = Monitor(System.of(load("disaggregated"), rollouts=1))
>>> for trigger in ("start", "wake", "connect"):
...     for worker in ("actor", "rollout-0"):
...         assert monitor.tell(Event(worker, trigger)) == []

The link is up when its last end has told its ``connect``. A push concerns all ends, and may be told
at once. Then the engine has the trainer's weights, and may generate:

>>> monitor.tell(Event("all", "push")) + monitor.tell(Event("rollout-0", "generate"))
[]

Now the actor sleeps, and nobody has destroyed its group:

>>> for violation in monitor.tell(Event("actor", "sleep")):
...     print(violation)
event 9: actor is connected and refuses 'sleep': connected has no 'sleep', only ['disconnect']. \
Needs: awake and self.in_flight == 0
  legal after: disconnect(actor, rollout-0)
  breaks property 1: no worker that is sleeping or disconnected holds a communicator
    (actor is sleeping with ['link'])
  before it:
    event 1: actor start
    event 3: actor wake
    event 5: actor connect
    event 7: actor, rollout-0 push

The monitor takes the trainer's word and goes on: the actor sleeps, and the link that it left is
broken. What begins and ends apart is told apart (``at="begin"``, ``at="end"``), so that a request
in flight is seen. `Stream` reads the names of another trainer: see ``docs/monitor.md``.
"""

from fsm_trainer.monitor.stream import Map, Stream
from fsm_trainer.monitor.watch import Event, Monitor, Violation

__all__ = ["Event", "Map", "Monitor", "Stream", "Violation"]
