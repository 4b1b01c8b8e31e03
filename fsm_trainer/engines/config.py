"""How rollout engines run; what they generate is said by each request. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Discriminator, Field, Tag, field_validator


class EngineSettings(BaseModel, extra="forbid", frozen=True):
    """What all engines share."""

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of the weights and the KV cache; a push must carry the same."""

    device: str = "cpu"
    """Where weights and KV cache live, as torch names it."""

    start_timeout: float = Field(default=180.0, gt=0)
    """Seconds until the engine process is up (it imports torch)."""

    call_timeout: float = Field(default=60.0, gt=0)
    """Seconds that any call may take beyond what it waits for; then the process is killed."""

    generate_timeout: float = Field(default=1800.0, gt=0)
    """Seconds that a ``generate`` call may take when it doesn't say so itself."""

    routing_replay: bool = False
    """Record the experts that each token was sent to, and train with the same (R3); for models with
    a mixture of experts. See docs/routing-replay.md."""


class EmbeddedConfig(EngineSettings, extra="forbid", frozen=True):
    """The embedded engine: transformers, on any device."""

    kind: Literal["embedded"] = "embedded"
    """The engine."""

    threads: int = Field(default=1, ge=1)
    """CPU threads of the engine process."""

    max_batch_tokens: int = Field(default=65_536, ge=1024)
    """KV cache positions in use at once, padding included; further requests wait their turn."""


_OURS = frozenset((
    "model_path", "host", "port", "api_key", "dtype", "device", "base_gpu_id", "tp_size",
    "skip_tokenizer_init", "load_format", "custom_weight_loader", "enable_deterministic_inference",
    "enable_memory_saver", "mem_fraction_static", "enable_return_routed_experts",
))  # fmt: skip


class SglangConfig(EngineSettings, extra="forbid", frozen=True):
    """SGLang 0.5.17 or newer, started by the worker or running elsewhere."""

    kind: Literal["sglang"]
    """The engine."""

    tensor_parallel: int = Field(default=1, ge=1)
    """Processes, and devices, that share the model: SGLang's ``tp_size``."""

    url: str | None = None
    """A server that runs already, ``http://host:port``; by default each worker starts its own.
    See docs/engines.md for the flags that it needs."""

    api_key: str | None = None
    """The key of the server at ``url``; a server of our own gets a random one."""

    memory_fraction: float | None = Field(default=None, gt=0, lt=1)
    """Share of the device's memory for weights and KV cache: SGLang's ``mem_fraction_static``."""

    deterministic: bool = True
    """Whether a request's seed decides its tokens (``enable_deterministic_inference``). Off, runs
    can't be repeated, and generation is faster."""

    arguments: dict[str, Any] = {}
    """Further arguments of SGLang's server, by their names there: ``attention_backend: triton``."""

    @field_validator("arguments")
    @classmethod
    def _are_not_ours(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        ours = sorted(_OURS & arguments.keys())
        if ours:
            raise ValueError(
                f"{', '.join(ours)} can't be set here: use the field of rollout.engine that stands "
                "for it; what has none is fixed by how weights are pushed"
            )
        return arguments


def _kind(value: Any) -> str:
    return str(value.get("kind", "embedded") if isinstance(value, dict) else value.kind)


EngineConfig = Annotated[
    Annotated[EmbeddedConfig, Tag("embedded")] | Annotated[SglangConfig, Tag("sglang")],
    Discriminator(_kind),
]
"""The settings of either engine; without ``kind`` it is the embedded one."""
