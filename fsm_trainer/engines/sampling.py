"""Draw tokens from logits such that a draw depends on its own seed and position alone.

The randomness is a function, not a stream: nothing has to be carried from token to token, and a
request draws the same tokens whatever shares its batch, and whenever it arrives.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from fsm_trainer.machine.errors import ActionFailed

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def _mix(word: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return the finalizer of SplitMix64 (Steele, Lea, Flood 2014, figure 16) of each word."""
    word = (word ^ (word >> np.uint64(30))) * _MIX[0]
    word = (word ^ (word >> np.uint64(27))) * _MIX[1]
    return word ^ (word >> np.uint64(31))


def uniform(
    seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.uint64]
) -> npt.NDArray[np.float64]:
    """Return one number in [0, 1) for each (seed, position), all arguments ``[rows]``.

    It is element ``position`` of the SplitMix64 stream whose state starts at ``mix(seed)``.
    """
    words = _mix(_mix(seeds) + (positions + np.uint64(1)) * _GAMMA)
    # 52 bits, not 53: then u * total < total holds after rounding, and the draw stays in range.
    return (words >> np.uint64(12)).astype(np.float64) * np.float64(2.0**-52)


def draw(
    logits: torch.Tensor,
    temperatures: npt.NDArray[np.float32],
    uniforms: npt.NDArray[np.float64],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw a token per row by inverting the cumulative distribution in float64.

    ``logits`` ``[rows, vocabulary]``; ``temperatures`` (0: greedy) and ``uniforms`` ``[rows]``.
    Returns tokens ``[rows]`` and their log-probs ``[rows]``, in float32 at the temperature (at 1
    for greedy rows). Raises ActionFailed when logits are not finite.
    """
    greedy = temperatures == 0
    scale = torch.from_numpy(np.where(greedy, np.float32(1), temperatures)).to(logits.device)
    logprobs = torch.log_softmax(logits.float() / scale[:, None], dim=-1)
    cumulative = logprobs.double().exp_().cumsum(dim=-1)
    if not bool(cumulative[:, -1].isfinite().all()):
        raise ActionFailed(
            "the model's logits are not finite: its weights hold NaN or infinities, or overflow"
        )
    threshold = torch.from_numpy(uniforms).to(logits.device)[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, threshold, right=True)[:, 0]
    if greedy.any():
        chosen = torch.from_numpy(greedy).to(logits.device)
        tokens = torch.where(chosen, logprobs.argmax(dim=-1), tokens)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]
