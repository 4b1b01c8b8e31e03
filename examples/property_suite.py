"""The property-test kit on a lifecycle that isn't ours: flags, as in many a trainer.

`Trainer` and `Engine` stand for somebody's code. The kit is told how to call them, fires triggers,
actions and faults at them in any order, and compares what they hold with the tables. As they are
they pass; with one line of `sleep` left out, the mistake that this project was started for, they
don't, and the shortest way there is printed.

    python examples/property_suite.py
"""

from __future__ import annotations

from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from fsm_trainer import FsmError, System, load
from fsm_trainer.testing import FakeClock, FakeGroup, LifecycleMachine, Order, PropertyViolated


class Trainer:
    """Somebody's trainer: its lifecycle is three flags, and what its methods ask of them."""

    HOLDS = ("bank", "weights optimizer train_groups", "link")

    def __init__(self, name: str, group: FakeGroup, bug: str = "") -> None:
        self.name, self.group, self.bug = name, group, bug
        self.started = self.loaded = self.connected = False
        self.weights: object = None

    def need(self, true: bool) -> None:
        if not true:
            raise RuntimeError(f"{self.name}: not now")

    def start(self) -> None:
        self.need(not self.started)
        self.started, self.weights = True, object()

    def stop(self) -> None:
        self.need(self.started and not self.loaded)
        self.started = False

    def wake(self) -> None:
        self.need(self.started and not self.loaded)
        self.loaded = True

    def sleep(self) -> None:
        self.need(self.loaded)
        if self.bug != "sleeps with its group":
            self.need(not self.connected)
        self.loaded = False

    def connect(self, epoch: int) -> None:
        self.need(self.loaded and not self.connected)
        self.group.join(self.name, epoch)
        self.connected, self.epoch = True, epoch

    def disconnect(self) -> None:
        self.need(self.connected)
        self.group.leave(self.name)
        self.connected = False

    def train(self) -> None:
        self.need(self.loaded)
        self.weights = object()

    def push(self) -> None:
        self.need(self.connected)
        self.group.send(self.name, self.epoch, (self.version, self.weights))


class Engine(Trainer):
    """Somebody's engine: the same flags, other things held."""

    HOLDS = ("engine", "weights kv", "link")
    version: object = None

    def wake(self) -> None:
        super().wake()
        self.version = None

    def pull(self) -> None:
        self.need(self.connected)
        self.version, self.weights = self.group.receive(self.name, self.epoch)

    def generate(self, newest: object) -> None:
        self.need(self.loaded and self.version is not None)
        self.need(self.version == newest or self.bug == "serves what it has")


class Adapter:
    """Calls it as the kit asks, and says what it holds."""

    def __init__(self, name: str, group: FakeGroup, bug: str) -> None:
        kind = Trainer if name == "actor" else Engine
        self.code = kind(name, group, bug)

    def trigger(self, order: Order) -> None:
        broken = order.world.links[0].state == "broken"
        match order.name:
            case "connect":
                self.code.connect(order.epoch)
            case "sever":
                self.code.disconnect()
            case "disconnect" if broken:  # there is nobody to part from in good order
                raise RuntimeError("the group is broken")
            case _:
                getattr(self.code, order.name)()

    def act(self, order: Order) -> None:
        newest = order.world.workers[0].version
        match order.name, self.code:
            case (("generate" | "evaluate"), Engine()):
                self.code.generate(newest)
            case "push", Engine():
                order.meet()  # the trainer sends first
                self.code.pull()
            case "push", _:
                self.code.version = newest
                self.code.push()
                order.meet()
            case "save", _:
                self.code.need(self.code.loaded)
            case _:
                self.code.train()

    def holds(self) -> list[str]:
        flags = (self.code.started, self.code.loaded, self.code.connected)
        held = zip(flags, self.code.HOLDS, strict=True)
        return [r for flag, resources in held if flag for r in resources.split()]

    def epochs(self) -> dict[str, int]:
        return {"link": self.code.epoch} if self.code.connected else {}

    def weights(self) -> object:
        torn = isinstance(self.code, Engine) and self.code.version is None
        return None if torn else self.code.weights

    def fail_next(self, what: str) -> bool:
        return False  # nothing of it can be made to fail

    def stall(self, seconds: float) -> bool:
        return False

    def kill(self) -> None:
        self.code.group.leave(self.code.name)


class Suite(LifecycleMachine):
    """One class to subclass, one method to give."""

    system = System.of(load("disaggregated"), rollouts=1)
    refuses = (RuntimeError, FsmError)
    bug = ""

    def make_worker(self, name: str) -> Adapter:
        if not hasattr(self, "group"):
            self.group = FakeGroup(self.system.names, FakeClock())
        return Adapter(name, self.group, self.bug)


BUGS = ("sleeps with its group", "serves what it has")


def find(bug: str) -> str:
    """What the kit says of the code with that mistake; empty if nothing is wrong."""
    suite = type("Suite", (Suite,), {"bug": bug})
    some = settings(
        max_examples=60, stateful_step_count=30, deadline=None, derandomize=True,
        phases=[Phase.generate, Phase.shrink],
    )  # fmt: skip
    try:
        run_state_machine_as_test(suite, settings=some)
    except PropertyViolated as violated:
        return str(violated)
    return ""


def main() -> None:
    print("as it is:", find("") or "nothing found")
    for bug in BUGS:
        print(f"if it {bug}:", find(bug) or "nothing found")


if __name__ == "__main__":
    main()
