"""A start that fails on one rank alone: ``python -m tests.training.starting RANK WORLD ...``."""

from __future__ import annotations

from typing import Any

from fsm_trainer.machine.errors import PeerLost
from tests.training.ranks import Rank, checksum, finish, make_model, train


def scenario(rank: Rank, *stages: str) -> dict[str, Any]:
    """What each rank was told, and whether it learns what an undisturbed one learns, by stage."""
    model = make_model(rank.folder / f"model-{rank.rank}")
    found: dict[str, Any] = {}
    for stage in map(int, stages):
        trainer = rank.trainer(model, zero_stage=stage)
        started, told = trainer._started, ""

        def fails() -> Any:
            started()  # noqa: B023
            raise MemoryError("only here")

        if rank.rank == 1:
            trainer._started = fails  # type: ignore[method-assign]
        try:
            rank.start(trainer)
        except (MemoryError, PeerLost) as error:
            told = f"{type(error).__name__}: {error}"
        trainer._started = started  # type: ignore[method-assign]
        rank.sleep(trainer)  # as the machine does when a transition fails
        rank.wake(trainer)
        losses, weights = train(trainer, 0), checksum(trainer)
        rank.stop(trainer)

        other = rank.start(rank.trainer(model, zero_stage=stage))
        found[str(stage)] = [told, losses == train(other, 0) and weights == checksum(other)]
        rank.stop(other)
    return found


if __name__ == "__main__":
    finish(scenario)
