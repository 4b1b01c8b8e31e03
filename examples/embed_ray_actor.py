"""The machine inside a Ray actor of one's own: called, refused by a typed error, lost, replaced.

Two Ray actors each hold one worker's machine. A trigger is a remote call; a refusal comes back as
the error that was raised there, with its fields. Then the sampler is killed at work: the trainer
is told, gives up the link and keeps its weights, and a new sampler connects under the next epoch.

    python examples/embed_ray_actor.py
"""

from __future__ import annotations

import time
from typing import Any

import ray
from ray.exceptions import RayActorError

from fsm_trainer import Effect, Lifecycle, Refused, State, System, World, load

SYSTEM = System.of(load("disaggregated"), rollouts=1)


class Held:
    """A resource of yours; see embed_torch_loop.py for real ones."""

    def acquire(self, effect: Effect) -> None: ...

    def release(self, effect: Effect) -> None: ...


@ray.remote(num_cpus=0)
class Worker:
    """A process with one machine. All that may be asked of it goes through the machine."""

    def __init__(self, name: str) -> None:
        self.machine = Lifecycle(SYSTEM, name, dict.fromkeys(SYSTEM.spec.system.resources, Held()))

    def world(self) -> World:
        return self.machine.world

    def tell(self, world: World) -> None:
        self.machine.tell(world)

    def reach(self, state: State) -> str:
        return str(self.machine.reach(state).state)

    def trigger(self, name: str) -> str:
        return str(self.machine.trigger(name).state)

    def act(self, action: str, seconds: float = 0) -> str:
        with self.machine.action(action) as worker:
            time.sleep(seconds)  # yours: the work
            return f"{action} as of {worker.version}"

    def peer_died(self, peer: str) -> str:
        """Give up the link that the dead one was an end of."""
        self.machine.peer_died(peer)
        return str(self.machine.sever("link").state)


def call(worker: Any, method: str, *arguments: Any) -> Any:
    """A remote call that doesn't wait for ever."""
    return ray.get(getattr(worker, method).remote(*arguments), timeout=60)


def both(trainer: Any, sampler: Any, method: str, argument: str) -> list[str]:
    """The ends of a link move, and push, together."""
    return ray.get([getattr(w, method).remote(argument) for w in (trainer, sampler)], timeout=60)


def sync(trainer: Any, sampler: Any) -> None:
    """Connect and push; each is told first how the other stands."""
    call(sampler, "tell", call(trainer, "world"))
    call(trainer, "tell", call(sampler, "world"))
    print("connect:", *both(trainer, sampler, "trigger", "connect"))
    print("push:", *both(trainer, sampler, "act", "push"))


def refused(worker: Any, method: str, argument: str) -> None:
    """Ask for what is illegal, and show what arrives here."""
    try:
        call(worker, method, argument)
    except Refused as error:
        print(f"refused: worker={error.worker} state={error.state} asked={error.asked}")
        print("  because", "; ".join(error.because))


def main() -> None:
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    trainer, sampler = Worker.remote("actor"), Worker.remote("rollout-0")
    print("both:", *both(trainer, sampler, "reach", State.AWAKE))
    refused(sampler, "act", "generate")  # its weights never came
    refused(trainer, "trigger", "stop")  # it is awake
    sync(trainer, sampler)
    print(call(sampler, "act", "generate"))

    answer = sampler.act.remote("generate", 60)
    ray.kill(sampler)
    try:
        ray.get(answer, timeout=60)
    except RayActorError:
        print("the sampler died; the trainer is", call(trainer, "peer_died", "rollout-0"))
    refused(trainer, "act", "push")  # nobody is at the other end
    print(call(trainer, "act", "train"))
    sampler = Worker.remote("rollout-0")
    call(sampler, "reach", State.AWAKE)
    sync(trainer, sampler)
    print(call(sampler, "act", "generate"), "at epoch", call(trainer, "world").links[0].epoch)
    ray.shutdown()


if __name__ == "__main__":
    main()
