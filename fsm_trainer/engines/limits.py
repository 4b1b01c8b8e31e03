"""What a model can take, and where it ends by itself, read from its folder. Imports no torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsm_trainer.engines.contract import Request
from fsm_trainer.machine.errors import ConfigError, DataError


@dataclass(frozen=True, slots=True)
class Limits:
    """Tokens are below ``vocabulary``, a sequence has ``positions``; ``ends`` end a completion."""

    vocabulary: int
    positions: int
    ends: frozenset[int]

    @classmethod
    def of(cls, folder: str) -> Limits:
        """Read ``config.json`` and ``generation_config.json``; raises ConfigError without one."""
        try:
            whole = json.loads((Path(folder) / "config.json").read_text())
        except FileNotFoundError:
            raise ConfigError(
                f"the model folder {folder!r} has no config.json; save a model there, or name "
                "another folder"
            ) from None
        config = whole.get("text_config") or whole
        generation = Path(folder) / "generation_config.json"
        more = json.loads(generation.read_text()) if generation.is_file() else {}
        ends = {end for source in (whole, config, more) for end in _listed(source)}
        positions = config.get("max_position_embeddings") or config["n_positions"]
        return cls(config["vocab_size"], positions, frozenset(ends))

    def check(self, request: Request) -> None:
        """Raise DataError for a prompt that the model can't take."""
        spans = len(request.tokens) + request.max_new_tokens
        if not 0 <= min(request.tokens) <= max(request.tokens) < self.vocabulary:
            problem = (
                f"a token is not in the vocabulary [0, {self.vocabulary}); use this model's "
                "tokenizer"
            )
        elif spans > self.positions:
            problem = f"{spans} tokens, the model has {self.positions} positions; shorten it"
        else:
            return
        raise DataError(f"request {request.id} (prompt and max_new_tokens): {problem}")


def _listed(config: dict[str, Any]) -> list[int]:
    found = config.get("eos_token_id")
    return [found] if isinstance(found, int) else list(found or ())
