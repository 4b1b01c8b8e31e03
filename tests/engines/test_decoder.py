"""The decoder in this process: budgets, traffic, architectures."""

from __future__ import annotations

import gc
import random
from multiprocessing import Pipe
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, LlamaConfig, PretrainedConfig, Qwen3Config

from fsm_trainer.engines.config import EmbeddedConfig
from fsm_trainer.engines.contract import Completion, Finish, Request, Tag
from fsm_trainer.engines.decoder import Decoder
from fsm_trainer.engines.embedded_server import EmbeddedServer
from fsm_trainer.engines.replica import Replica
from fsm_trainer.machine.errors import CapabilityMissing, DataError
from fsm_trainer.machine.version import Version

VERSION = Version(1, 1)
SHAPE = {
    "vocab_size": 100,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 300,
    "bos_token_id": None,
    "eos_token_id": None,
}
ARCHITECTURES = {
    "qwen3": Qwen3Config(**SHAPE),
    "llama, tied": LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "gpt2": GPT2Config(vocab_size=100, n_embd=48, n_layer=3, n_head=4, n_positions=300),
}


def replica(folder: Path, config: PretrainedConfig, dtype: str = "float32") -> Replica:
    torch.set_num_threads(1)
    config.save_pretrained(folder)
    replica = Replica(str(folder), dtype, "cpu")
    replica.acquire()
    generator = torch.Generator().manual_seed(0)
    for parameter in replica.model.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return replica


def requests(count: int) -> list[Request]:
    source = random.Random(3)
    return [
        Request(
            str(index),
            tuple(source.randrange(100) for _ in range(source.choice((1, 3, 16, 40, 130)))),
            source.randrange(1, 30),
            1.0,
            source.getrandbits(64),
        )
        for index in range(count)
    ]


def run(decoder: Decoder, asked: list[Request]) -> dict[str, Completion]:
    decoder.submit(asked, VERSION)
    ended: dict[str, Completion] = {}
    while decoder.active:
        ended.update((each.id, each) for each in decoder.step())
    return ended


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_small_budget_and_a_large_one_give_the_same_bits(
    tmp_path: Path, name: str, dtype: str
) -> None:
    model = replica(tmp_path, ARCHITECTURES[name], dtype)
    large = run(Decoder(model, 100_000), requests(60))
    small = Decoder(model, 2048)
    peak = 0
    small.submit(requests(60), VERSION)
    ended: dict[str, Completion] = {}
    while small.active:
        ended.update((each.id, each) for each in small.step())
        peak = max(peak, small._slots.rows * small._slots.columns)
    assert ended == large
    assert 1024 < peak <= 2048


def test_what_never_fits_is_refused(tmp_path: Path) -> None:
    decoder = Decoder(replica(tmp_path, ARCHITECTURES["qwen3"]), 1024)
    with pytest.raises(DataError, match="only 128 fit"):
        decoder.submit([Request("big", (1,) * 120, 20)], VERSION)
    assert not decoder.active


def test_an_abort_leaves_the_others_as_they_were(tmp_path: Path) -> None:
    decoder = Decoder(replica(tmp_path, ARCHITECTURES["qwen3"]), 4096)
    whole = run(decoder, requests(40))
    decoder.submit(requests(40), VERSION)
    ended = {each.id: each for _ in range(3) for each in decoder.step()}
    ids = {str(index) for index in range(0, 40, 3)} - ended.keys()
    for each in decoder.abort(ids):
        length = len(each.tokens)
        assert each.finish is Finish.ABORT
        assert each.tokens == whole[each.id].tokens[:length]
    while decoder.active:
        ended.update((each.id, each) for each in decoder.step())
    assert ended == {key: each for key, each in whole.items() if key not in ids}


def test_released_weights_are_given_back_to_the_system(tmp_path: Path) -> None:
    # 12 million parameters: 48 MB that must be seen to come and go.
    shape = {"hidden_size": 512, "intermediate_size": 2048, "head_dim": 64}
    shape |= {"num_attention_heads": 8, "num_key_value_heads": 8}
    Qwen3Config(**{**SHAPE, **shape}).save_pretrained(tmp_path)
    ours, theirs = Pipe()
    server = EmbeddedServer(theirs)
    size = sum(spec.bytes for spec in server.start(str(tmp_path), EmbeddedConfig()))
    gc.unfreeze()
    server.release(Tag.KV)
    sleeping = server._replica.vitals().resident_bytes
    for tag in Tag:
        server.acquire(tag)
    server._generate(7, [Request("one", (3, 4, 5), 4)], VERSION)
    while server._step():
        pass
    assert ours.recv().number == 7
    awake = server._replica.vitals().resident_bytes
    for tag in Tag:
        server.release(tag)
    after = server._replica.vitals().resident_bytes
    assert size > 40e6
    assert awake - sleeping > 0.8 * size
    assert awake - after > 0.8 * size


def test_tied_weights_are_one_tensor_of_an_update(tmp_path: Path) -> None:
    held = replica(tmp_path, ARCHITECTURES["llama, tied"])
    names = [spec.name for spec in held.specs]
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    assert list(held.checksums()) == names
    assert held.model.lm_head.weight is held.model.model.embed_tokens.weight


def test_layers_that_look_through_a_window_are_refused(tmp_path: Path) -> None:
    config = Qwen3Config(**SHAPE, use_sliding_window=True, sliding_window=8, max_window_layers=1)
    config.save_pretrained(tmp_path)
    with pytest.raises(CapabilityMissing, match="sliding_attention"):
        Replica(str(tmp_path), "float32", "cpu")
