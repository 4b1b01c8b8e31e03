"""Is it right: the tables, and a run against them. A tour; its code runs in the tests.

A system is the tables of a schedule over named workers. What may happen next to it is every event
that `step` accepts, and every fault; `check` follows all of it from the start:

>>> from fsm_trainer.machine.spec import load
>>> from fsm_trainer.machine.world import System
>>> from fsm_trainer.verify.check import check
>>> spec = load("disaggregated")
>>> verdict = check(System.of(spec, rollouts=1), fine=False)
>>> verdict.states, verdict.violation
(1099, None)

Whether that means anything shows when something is broken. `mutants` breaks each part in turn; here
is the actor that may sleep while it works:

>>> from fsm_trainer.verify.mutate import mutants
>>> broken = next(m for m in mutants(spec) if m.name.startswith("actor: sleep from"))
>>> system = System.of(broken.spec, rollouts=1)
>>> violation = check(system, fine=False).violation
>>> violation.because
'7: actor works at warm_up without what it needs'

That is the number of a property in ``states/system.yaml``, and what was seen. The way there is the
shortest that exists, and can be told as a diagram:

>>> [step.edge.label for step in violation.steps]
['actor: start', 'actor: wake', 'actor: warm_up', 'actor: sleep']
>>> from fsm_trainer.verify.story import sequence_diagram
>>> print(sequence_diagram(system, violation).splitlines()[-1])
    Note over actor,rollout-0: 7: actor works at warm_up without what it needs

A run is held against the same tables by its journal. Of one worker that starts and stops, both
records conform, and the second alone doesn't:

>>> from fsm_trainer.verify.conformance import check_journal
>>> start = dict(
...     seq=1, time=1.0, worker="actor", role="actor", rank=0, kind="transition", ok=True,
...     trigger="start", source="disconnected", dest="sleeping", epoch=None, version="1.0",
... )
>>> stop = start | dict(
...     seq=2, time=2.0, trigger="stop", source="sleeping", dest="disconnected", version=None
... )
>>> check_journal([start, stop], spec)
>>> print(check_journal([stop | dict(seq=1)], spec))
line 1: actor is disconnected, not sleeping, when it comes to stop

What else is here: `driven` follows the schedule's driver instead of any order, `tla` writes the
system for a model checker that isn't ours, `properties` and `relation` are what `check` asks and
follows. ``docs/proof.md`` says what all of it proves, and what it doesn't.
"""
