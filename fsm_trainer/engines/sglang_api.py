"""SGLang's HTTP interface, as far as a rollout engine needs it; the one place that knows it.

What the server refuses raises ActionFailed; a server that is gone raises EngineFailed. Imports no
torch.
"""

from __future__ import annotations

import base64
import json
import math
import re
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from fsm_trainer.data.child import PROMPT
from fsm_trainer.data.routing import Routing
from fsm_trainer.engines.config import SglangConfig
from fsm_trainer.engines.contract import Completion, Finish, PauseMode, Request, Tag
from fsm_trainer.machine.errors import ActionFailed, CapabilityMissing, EngineFailed
from fsm_trainer.machine.version import Version

OLDEST = (0, 5, 17)
"""The oldest SGLang that this was run with."""
LOADER = "fsm_trainer.engines.sglang_loader.carry_out"
"""What SGLang calls to have weights loaded, as its ``custom_weight_loader`` names it."""
_MEMORY = {Tag.WEIGHTS: "weights", Tag.KV: "kv_cache"}
# Ends an id: SGLang takes the id of an abort for the beginning of ids.
_END = "\x1f"
_FINISH = {"stop": Finish.STOP, "length": Finish.LENGTH, "abort": Finish.ABORT}


class Api:
    """A client of one server; ``gone`` makes the error for a server that does not answer.

    ``routing`` is the shape of the routes that completions shall have, if any.
    No call has a deadline of its own: their caller's ends the server, and with it the call.
    """

    def __init__(
        self,
        url: str,
        key: str | None,
        config: SglangConfig,
        gone: Callable[[str, Exception], EngineFailed],
        routing: Routing | None,
    ) -> None:
        import httpx

        self.url, self._config, self._gone, self._routing = url, config, gone, routing
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        # The server hangs up after 5 silent seconds: a connection that old would meet its end.
        limits = httpx.Limits(max_connections=None, keepalive_expiry=2.0)
        self._http = httpx.Client(
            base_url=url, headers=headers, limits=limits, trust_env=False, timeout=None
        )
        self._lost = httpx.TransportError
        self._sessions = False

    def up(self) -> bool:
        """Whether it answers yet."""
        with suppress(self._lost):
            return bool(self._http.get("/model_info", timeout=PROMPT).is_success)
        return False

    def check(self, name: str) -> None:
        """Raise CapabilityMissing for a server that can't keep the contract."""
        config, info = self._config, self._ask("/server_info", method="get")
        number = tuple(map(int, re.findall(r"\d+", str(info.get("version", "0")))[:3]))
        for holds, flag in (
            (number >= OLDEST, f"version {'.'.join(map(str, OLDEST))} or newer"),
            (
                LOADER in (info.get("custom_weight_loader") or ()),
                f"--custom-weight-loader {LOADER}",
            ),
            (info.get("skip_tokenizer_init"), "--skip-tokenizer-init"),
            (info.get("tp_size") == config.tensor_parallel, f"--tp-size {config.tensor_parallel}"),
            (info.get("dtype") in (config.dtype, "auto"), f"--dtype {config.dtype}"),
            (
                not config.deterministic or info.get("enable_deterministic_inference"),
                "--enable-deterministic-inference (or set rollout.engine.deterministic: false)",
            ),
            (
                not config.routing_replay or info.get("enable_return_routed_experts"),
                "--enable-return-routed-experts (or set rollout.engine.routing_replay: false)",
            ),
            (config.device == "cpu" or info.get("enable_memory_saver"), "--enable-memory-saver"),
        ):
            if not holds:
                found = info.get("version")
                raise CapabilityMissing(f"{name}: SGLang {found} at {self.url} lacks {flag}")
        # Newer ones load weights only within a session; older ones have none.
        self._sessions = self._answer("/begin_weight_update", {}).status_code != 404
        if self._sessions:
            self._ask("/end_weight_update")
        # What SGLang takes before it cuts a request short without a word; 5 are its reserve.
        self.longest = int(info.get("max_req_input_len") or 2**31)

    def generate(self, requests: Sequence[Request], version: Version) -> list[Completion]:
        """Continue prompts; SGLang batches them with all others."""
        body = {
            "rid": [request.id + _END for request in requests],
            "input_ids": [list(request.tokens) for request in requests],
            "sampling_params": [self._sampling(request) for request in requests],
            "return_logprob": True,
        }
        if self._routing is not None:
            body["return_routed_experts"] = True
        answers = self._ask("/generate", body)
        return [
            _completion(request, answer, version, self._routing)
            for request, answer in zip(requests, answers, strict=True)
        ]

    def _sampling(self, request: Request) -> dict[str, Any]:
        seed = {"sampling_seed": request.seed & (2**63 - 1)} if self._config.deterministic else {}
        return {
            "max_new_tokens": request.max_new_tokens,
            "temperature": request.temperature,
            # Said, because a server's own defaults may cut the tail: log-probs are of all tokens.
            "top_p": 1.0,
            "top_k": -1,
            "stop_token_ids": list(request.stop),
            "ignore_eos": not request.stop,
            **seed,
        }

    def abort(self, ids: Collection[str] | None) -> None:
        """End requests between two steps."""
        if ids is None:
            self._ask("/abort_request", {"rid": "", "abort_all": True})
        for each in ids or ():
            self._ask("/abort_request", {"rid": each + _END})

    def pause(self, mode: PauseMode) -> None:
        """Stop drawing tokens; SGLang would continue a retracted request, so it is aborted too."""
        how = "in_place" if mode is PauseMode.IN_PLACE else "abort"
        self._ask("/pause_generation", {"mode": how})

    def unpause(self) -> None:
        """Go on."""
        self._ask("/continue_generation")

    def acquire(self, tag: Tag) -> None:
        """Map the memory again; what lies in it is not defined."""
        self._ask("/resume_memory_occupation", {"tags": [_MEMORY[tag]]})

    def release(self, tag: Tag) -> None:
        """Unmap the memory (on the CPU SGLang keeps it); with a request in flight it would die."""
        self._ask("/release_memory_occupation", {"tags": [_MEMORY[tag]]})

    def flush(self) -> None:
        """Drop the prefix cache."""
        self._ask("/flush_cache")

    def run_loader(self, order: str, flush: bool = True) -> None:
        """Have our loader called with this text on each scheduler's thread, caches dropped."""
        payload = base64.b64encode(_pickled(order)).decode()
        if self._sessions:
            self._ask("/begin_weight_update")
        body = {
            "serialized_named_tensors": [payload] * self._config.tensor_parallel,
            "load_format": LOADER,
            "flush_cache": flush,
        }
        self._ask("/update_weights_from_tensor", body)
        if self._sessions:
            self._ask("/end_weight_update")

    def _answer(self, path: str, body: Mapping[str, Any] | None, method: str = "post") -> Any:
        given = {} if method == "get" else {"json": body or {}}
        try:
            return self._http.request(method, path, **given)
        except self._lost as error:
            raise self._gone(path, error) from error

    def _ask(self, path: str, body: Mapping[str, Any] | None = None, method: str = "post") -> Any:
        response = self._answer(path, body, method)
        answer = response.json() if "json" in response.headers.get("content-type", "") else None
        refused = isinstance(answer, dict) and answer.get("success") is False
        if response.is_error or refused:
            told = response.text[:500]
            raise ActionFailed(f"SGLang refused {path} ({response.status_code}): {told}")
        return answer


def command(model: str, url: str, key: str, config: SglangConfig) -> list[str]:
    """The command line of a server of our own."""
    given: dict[str, Any] = {
        "model_path": model,
        "host": "127.0.0.1",
        "port": url.rpartition(":")[2],
        "api_key": key,
        "dtype": config.dtype,
        "device": config.device.partition(":")[0],
        "base_gpu_id": int(config.device.partition(":")[2] or 0),
        "tp_size": config.tensor_parallel,
        "skip_tokenizer_init": True,
        # Weights come over a link; what a folder holds is never served.
        "load_format": "dummy",
        "custom_weight_loader": LOADER,
        "skip_server_warmup": True,
        "sleep_on_idle": True,
        "enable_deterministic_inference": config.deterministic,
        "enable_memory_saver": config.device != "cpu",
        "enable_return_routed_experts": config.routing_replay,
        "log_level": "error",
        "mem_fraction_static": config.memory_fraction,
    }
    words: list[str] = []
    for name, value in {**given, **config.arguments}.items():
        if value is not None and value is not False:
            words.append("--" + name.replace("_", "-"))
            parts = value if isinstance(value, list) else [] if value is True else [value]
            words += [json.dumps(each) if isinstance(each, dict) else str(each) for each in parts]
    return words


def _completion(
    request: Request, answer: Mapping[str, Any], version: Version, routing: Routing | None
) -> Completion:
    about = answer["meta_info"]
    drawn = about.get("output_token_logprobs") or []
    logprobs = tuple(math.nan if each[0] is None else float(each[0]) for each in drawn)
    if not all(map(math.isfinite, logprobs)):
        raise ActionFailed(
            f"request {request.id}: the model's log-probs are not finite: its weights hold NaN or "
            "infinities, or overflow"
        )
    tokens, finish = tuple(int(each[1]) for each in drawn), _FINISH[about["finish_reason"]["type"]]
    if finish is Finish.LENGTH and len(tokens) < request.max_new_tokens:
        raise ActionFailed(
            f"request {request.id}: SGLang ended it after {len(tokens)} of "
            f"{request.max_new_tokens} tokens, for want of room; give the engine more memory, or "
            "ask for fewer"
        )
    routes = None
    if routing is not None and finish is not Finish.ABORT:
        routes = _routes(request, len(tokens), about, routing)
    return Completion(request.id, tokens, logprobs, finish, version, routes)


def _routes(
    request: Request, drawn: int, about: Mapping[str, Any], routing: Routing
) -> npt.NDArray[np.int32]:
    if about.get("routed_experts") is None:
        raise CapabilityMissing(
            f"request {request.id}: SGLang gave no routed experts with it. Start the server with "
            "--enable-return-routed-experts, or set rollout.engine.routing_replay: false"
        )
    flat = np.frombuffer(base64.b64decode(about["routed_experts"]), dtype=np.int32)
    shape = len(request.tokens) + drawn - 1, routing.layers, routing.top_k
    if flat.size != math.prod(shape):
        raise ActionFailed(
            f"request {request.id}: SGLang gave {flat.size} routed experts, not {shape}"
        )
    return flat.reshape(shape)


def _pickled(text: str) -> bytes:
    """Return the pickle of ``[(text, torch.Tensor())]``, spelt out: there is no torch here.

    A list, a mark, the text with its length, ``torch.Tensor`` called without arguments, a tuple of
    what follows the mark, appended.
    """
    raw = text.encode()
    word = b"X" + struct.pack("<I", len(raw)) + raw
    return b"\x80\x02](" + word + b"ctorch\nTensor\n)Rta."
