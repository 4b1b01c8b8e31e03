"""Sequences that share a row: where each one's tokens stand, and whether a model keeps them apart.

Position ids begin at 0 with each sequence. Given those and no attention mask, transformers lets no
token see another sequence under eager and sdpa attention; :func:`check` asks the model whether that
holds for it.

Rows are as wide as the longest sequence that a forward pass reads, so packing never makes a row
longer, nor attention dearer: what was padding holds another sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from fsm_trainer.machine.errors import CapabilityMissing

_PROBE = 8


class Rows:
    """One forward pass that is being filled, the longest sequence first: first fit."""

    def __init__(self, width: int, packing: bool) -> None:
        self.width = width
        self.sequences: list[list[int]] = []
        self._packing = packing
        self._free: list[int] = []

    def add(self, sequence: int, length: int, limit: int | None = None) -> bool:
        """Put a sequence where it fits; False if that would take more than ``limit`` tokens."""
        for row, free in enumerate(self._free if self._packing else ()):
            if length <= free:
                self.sequences[row].append(sequence)
                self._free[row] -= length
                return True
        if limit is not None and (len(self.sequences) + 1) * self.width > limit:
            return False
        self.sequences.append([sequence])
        self._free.append(self.width - length)
        return True


class Layout:
    """What a forward pass reads of right-padded sequences, packed or a row each.

    ``tokens`` are ``[batch, time]``, ``lengths`` ``[batch]`` without padding. The last token of a
    sequence is read by none: ``inputs`` and ``targets``, the tokens that follow them, are
    ``[batch, time - 1]``, and ``positions`` None; packed, all are ``[rows, width]``.
    """

    def __init__(self, tokens: torch.Tensor, lengths: torch.Tensor, packing: bool) -> None:
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        self.positions: torch.Tensor | None = None
        if packing:
            self._pack(inputs, (lengths - 1).tolist())
        self.inputs, self.targets = self.arrange(inputs), self.arrange(targets)

    def _pack(self, inputs: torch.Tensor, lengths: Sequence[int]) -> None:
        rows = Rows(max(lengths), packing=True)
        for sequence in sorted(range(len(lengths)), key=lambda n: -lengths[n]):
            rows.add(sequence, lengths[sequence])
        shape = len(rows.sequences), rows.width
        positions = torch.arange(rows.width).repeat(len(rows.sequences))
        # Padding is at the place behind the last one.
        self._places = torch.full(inputs.shape, len(positions))
        for row, sequences in enumerate(rows.sequences):
            start = row * rows.width
            for sequence in sequences:
                end = start + lengths[sequence]
                self._places[sequence, : end - start] = torch.arange(start, end)
                positions[start:end] = torch.arange(end - start)
                start = end
        self._places = self._places.to(inputs.device)
        self.positions = positions.view(shape).to(inputs.device)

    def arrange(self, table: torch.Tensor, fill: int = 0) -> torch.Tensor:
        """What stands in ``[batch, time - 1, ...]``, where the forward pass reads it."""
        if self.positions is None:
            return table
        flat = table.new_full((self.positions.numel() + 1, *table.shape[2:]), fill)
        flat[self._places] = table
        return flat[:-1].view(*self.positions.shape, *table.shape[2:])

    def restore(self, found: torch.Tensor) -> torch.Tensor:
        """What was found for each of ``targets``, where its token stands in ``[batch, time]``."""
        if self.positions is not None:
            found = F.pad(found.flatten(), (0, 1))[self._places]
        return F.pad(found, (1, 0))


@torch.no_grad()
def check(hidden: Callable[..., torch.Tensor], vocabulary: int, device: torch.device) -> None:
    """Raise CapabilityMissing unless a packed sequence gives what it gives alone.

    ``hidden`` gives the model's last hidden states for tokens and positions. One forward pass has a
    sequence alone (first in its row), in the context of another, and packed after each of two.
    Which of the two it was must change no bit: what is masked counts exactly 0. From alone to
    packed, rounding may differ: by the square root of the precision, of what a context changes.
    """
    joined = torch.arange(2 * _PROBE, device=device)
    ours, one = joined.remainder(vocabulary).view(2, _PROBE)
    rows = (ours, one), (one, ours), (one, ours), (one.flip(0), ours)
    tokens, packed = torch.stack([torch.cat(row) for row in rows]), joined.remainder(_PROBE)
    try:
        found = hidden(tokens, torch.stack([joined, joined, packed, packed]))
    except TypeError as error:
        raise CapabilityMissing(f"packing: the model takes no position ids ({error})") from error
    alone, context = found[0, :_PROBE], found[1, _PROBE:]
    after_one, after_another = found[2:, _PROBE:]
    moved, would = (float((x - alone).float().norm()) for x in (after_one, context))
    precise = moved <= torch.finfo(found.dtype).eps ** 0.5 * would
    if not (precise and torch.equal(after_one, after_another)):
        raise CapabilityMissing(
            "packing: this model doesn't keep the sequences of a row apart. Packed behind another, "
            f"a sequence's hidden states move by {moved:.2g}, where a context of its own would "
            f"move them by {would:.2g}. Set packing to false"
        )
