"""The embedded engine: transformers on torch, in a process of its own. Imports no torch."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from fsm_trainer.engines.config import EmbeddedConfig
from fsm_trainer.engines.engine import Engine
from fsm_trainer.engines.process import EngineProcess, Server

if TYPE_CHECKING:
    from fsm_trainer.sync.manifest import TensorSpec

SERVER = "fsm_trainer.engines.embedded_server"


class EmbeddedEngine(Engine):
    """An `Engine` of our own, for where SGLang isn't installed.

    Tokens depend on a request and the weights alone; on CPU with equal ``threads`` log-probs are
    bit-equal in every batch.
    """

    def __init__(
        self, name: str, model: str | os.PathLike[str], config: EmbeddedConfig | None = None
    ) -> None:
        self._config = config or EmbeddedConfig()
        super().__init__(name, model, self._config)

    def _launch(self) -> Server:
        return EngineProcess(self.name, SERVER)

    def _bring_up(self, server: Server) -> list[TensorSpec]:
        timeout = self._config.start_timeout
        specs: list[TensorSpec] = server.call("start", self._model, self._config, timeout=timeout)
        return specs
