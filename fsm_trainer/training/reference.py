"""The reference: frozen weights that take the live ones' place on the device, checked each time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from fsm_trainer.machine.errors import SelfCheckFailed
from fsm_trainer.training.offload import Bank, bytes_of, fingerprint
from fsm_trainer.training.port import Bank as BankName


class Reference:
    """Two sets of weights under one model: ``live`` ones and, once frozen, the ``reference``.

    ``storages`` gives what the model's weights stand in; no second model is on the device. The
    set that isn't resident waits in ``bank``.
    """

    def __init__(
        self, bank: Bank, owner: str, storages: Callable[[], list[torch.UntypedStorage]]
    ) -> None:
        self._bank, self._owner, self._storages = bank, owner, storages
        self._resident: BankName = "live"
        self._prints: dict[BankName, str] = {}

    @property
    def frozen(self) -> bool:
        """Whether there is a reference."""
        return "reference" in self._prints

    @property
    def fingerprint(self) -> str:
        """Of the reference; empty without one."""
        return self._prints.get("reference", "")

    def freeze(self) -> None:
        """Make a copy of the live weights the reference."""
        self.show("live")
        self._bank.keep("reference", self._storages())
        self._prints["reference"] = self._print()

    def show(self, bank: BankName) -> None:
        """Have that set in the model; raises SelfCheckFailed if its bytes are not what they were.

        Asking for a reference that was never frozen is a SelfCheckFailed too.
        """
        if bank == self._resident:
            return
        storages = self._storages()
        if bank == "reference":
            self._prints["live"] = self._print()
            self._bank.keep("weights", storages)
        # Before the load: what a load leaves that breaks half-way is neither of the two.
        self._resident = bank
        self._bank.load("weights" if bank == "live" else "reference", storages)
        found, expected = self._print(), self._prints[bank]
        if found != expected:
            raise SelfCheckFailed(
                f"{self._owner}: the {bank} weights have checksum {found} after a swap of banks, "
                f"{expected} before. Memory or disk is damaged, or something wrote to the bank"
            )

    def to_bytes(self) -> list[torch.Tensor]:
        """The reference's storages as uint8 tensors on the CPU; empty without one."""
        if not self.frozen:
            return []
        self.show("reference")
        copies = [bytes_of(storage).cpu().clone() for storage in self._storages()]
        self.show("live")
        return copies

    def adopt(self, content: Sequence[torch.Tensor]) -> None:
        """Take :meth:`to_bytes` of an equal model as the reference."""
        if not content:
            return
        storages = self._storages()
        self._bank.keep("weights", storages)
        for storage, data in zip(storages, content, strict=True):
            bytes_of(storage).copy_(data)
        self._bank.keep("reference", storages)
        self._prints["reference"] = self._print()
        self._bank.load("weights", storages)

    def _print(self) -> str:
        return fingerprint(bytes_of(storage) for storage in self._storages())
