from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from fsm_trainer.data.sources import DataConfig, DataSource, prompt_hash, read_set
from fsm_trainer.data.trajectory import Message, Sample
from fsm_trainer.machine.errors import DataError

SUM = {
    "kind": "reasoning_gym",
    "task": "chain_sum",
    "arguments": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    "size": 300,
    "prompt": "{expression}=",
    "strip_blanks": True,
}


def jsonl(path: Path, *rows: object) -> dict[str, Any]:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return {"kind": "jsonl", "path": str(path)}


def config(train: dict[str, Any], **more: Any) -> DataConfig:
    return DataConfig.model_validate({"train": train, **more})


@pytest.fixture(scope="module")
def eleven(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    path = tmp_path_factory.mktemp("data") / "eleven.jsonl"
    rows = ({"prompt": f"question {i}", "answer": i} for i in range(11))
    return config(jsonl(path, *rows), heldout_fraction=0)


def hashes(samples: list[Sample]) -> set[str]:
    return {prompt_hash(sample.prompt) for sample in samples}


@settings(deadline=None)
@given(
    draws=st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=12),
    seed=st.integers(0, 5),
)
def test_a_run_that_is_cut_anywhere_draws_what_an_undisturbed_one_draws(
    eleven: DataConfig, draws: list[tuple[int, bool]], seed: int
) -> None:
    undisturbed = DataSource(eleven, seed).draw(sum(count for count, _ in draws))
    drawn: list[Sample] = []
    source = DataSource(eleven, seed)
    for count, restart in draws:
        if restart:
            state = json.loads(json.dumps(source.state()))
            source = DataSource(eleven, seed)
            source.restore(state)
        drawn += source.draw(count)
    assert drawn == undisturbed


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(0, 5))
def test_each_epoch_holds_every_prompt_once_in_an_order_of_its_own(
    eleven: DataConfig, epochs: int, seed: int
) -> None:
    drawn = DataSource(eleven, seed).draw(11 * epochs)
    orders = [tuple(s.prompt for s in drawn[11 * e : 11 * e + 11]) for e in range(epochs)]
    expected = {f"question {i}" for i in range(11)}
    assert all(set(order) == expected and len(order) == 11 for order in orders)
    assert len(set(orders)) == epochs  # by chance they'd be equal once in 11! = 4e7


def test_the_order_is_fixed_for_ever(eleven: DataConfig) -> None:
    # A checkpoint of today must find its place in any later version: the order written out.
    def seed_of(text: str) -> int:
        return int(hashlib.sha256(text.encode()).hexdigest()[:16], 16) >> 1

    stream = seed_of('[1,"data","train"]')
    expected = []
    for epoch in range(2):
        draw = random.Random(seed_of(f'[{stream},"epoch",{epoch}]')).random
        expected += [name for _, name in sorted((draw(), f"train/{i + 1}") for i in range(11))]
    drawn = DataSource(eleven, seed=1).draw(22)
    assert [s.id.split("@")[0] for s in drawn] == [f"train:{name}" for name in expected]


def test_copies_share_a_group_and_no_two_samples_share_an_id(eleven: DataConfig) -> None:
    drawn = DataSource(eleven, 0).draw(22, copies=3)  # two epochs
    assert len({s.id for s in drawn}) == 66
    assert Counter(Counter(s.group for s in drawn).values()) == {3: 22}
    assert [s.group for s in drawn] == [g for s in drawn[::3] for g in [s.group] * 3]


def test_streams_do_not_move_each_other(eleven: DataConfig) -> None:
    alone, both = DataSource(eleven, 0), DataSource(eleven, 0)
    warmup = both.draw(5, stream="warmup")
    assert both.draw(7) == alone.draw(7)
    resumed = DataSource(eleven, 0)
    resumed.restore(both.state())
    assert resumed.draw(6, stream="warmup") == both.draw(6, stream="warmup")
    assert [s.prompt for s in warmup] != [s.prompt for s in DataSource(eleven, 0).draw(5)]


def test_a_position_of_other_data_or_another_seed_is_refused(
    eleven: DataConfig, tmp_path: Path
) -> None:
    state = DataSource(eleven, 0).state()
    other = config(jsonl(tmp_path / "a.jsonl", {"prompt": "x"}), heldout_fraction=0)
    for source in (DataSource(eleven, 1), DataSource(other, 0)):
        with pytest.raises(DataError, match="other training prompts or another seed"):
            source.restore(state)
    with pytest.raises(DataError, match="format 1"):
        DataSource(eleven, 0).restore({**state, "format": 1})


@settings(deadline=None, max_examples=20)
@given(
    seeds=st.tuples(*[st.integers(0, 400)] * 3),
    fraction=st.floats(0.05, 0.6),
)
def test_no_evaluation_set_shares_a_prompt_with_training(
    seeds: tuple[int, int, int], fraction: float
) -> None:
    # Neighbouring seeds of reasoning-gym overlap: item i is drawn from Random(seed + i).
    source = DataSource(
        config(
            {**SUM, "seed": seeds[0]},
            heldout_fraction=fraction,
            evaluation={"second": {**SUM, "size": 40, "seed": seeds[1]}},
        ),
        seeds[2],
    )
    training = source.draw(len(source))
    assert len(hashes(training)) == len(source)
    sets = source.evaluation_sets()
    assert set(sets) == {"heldout", "second"}
    for samples in sets.values():
        assert samples and len(hashes(samples)) == len(samples)
        assert not hashes(samples) & hashes(training)


def test_the_split_depends_on_the_prompt_alone() -> None:
    first = DataSource(config({**SUM, "seed": 0}), 1).evaluation_sets()["heldout"]
    second = DataSource(config({**SUM, "seed": 77}), 2)
    assert not hashes(first) & hashes(second.draw(len(second)))


def test_the_heldout_part_has_the_size_of_its_fraction(tmp_path: Path) -> None:
    rows = ({"prompt": f"question {i}"} for i in range(4000))
    source = DataSource(config(jsonl(tmp_path / "a.jsonl", *rows), evaluation_limit=None), 0)
    # Binomial(4000, 0.1): mean 400, standard deviation 19; 5 of them are 95.
    assert abs(len(source.evaluation_sets()["heldout"]) - 400) < 95
    assert len(source) + len(source.evaluation_sets()["heldout"]) == 4000


def test_the_same_question_in_another_dress_is_one_prompt(tmp_path: Path) -> None:
    train = jsonl(
        tmp_path / "train.jsonl",
        {"prompt": "What is  2 + 2?"},
        {"prompt": [{"role": "user", "content": "what is 2 + 2?\n"}]},
        {"prompt": "another"},
    )
    further = {**jsonl(tmp_path / "x.jsonl", {"prompt": "WHAT IS 2 + 2?"}), "chat": True}
    further["system"] = "Be brief."
    source = DataSource(config(train, heldout_fraction=0, evaluation={"x": further}), 0)
    assert [s.prompt for s in source.draw(1)] == ["another"] and len(source) == 1


def test_a_limited_set_holds_the_same_samples_whatever_the_order_of_the_file(
    tmp_path: Path,
) -> None:
    rows = [{"prompt": f"question {i}"} for i in range(30)]
    chosen = []
    for name, order in (("a", rows), ("b", rows[::-1])):
        further = {"x": jsonl(tmp_path / f"{name}.jsonl", *order)}
        source = DataSource(config(SUM, evaluation=further, evaluation_limit=7), 0)
        chosen.append([s.prompt for s in source.evaluation_sets()["x"]])
    assert chosen[0] == chosen[1] and len(chosen[0]) == 7


def test_reasoning_gym_prompts_come_from_the_template_and_keep_the_item() -> None:
    sample = next(read_set(config(SUM).train, "train"))
    entry = sample.metadata["entry"]
    left, sign, right = entry["metadata"]["expression"].split(" ")
    assert sample.prompt == f"{left}{sign}{right}="
    assert int(str(sample.answer)) == int(left) + int(f"{sign}{right}")
    full = next(read_set(config({**SUM, "prompt": "{question}", "strip_blanks": False}).train, ""))
    assert full.prompt == entry["question"]


def test_a_plain_prompt_becomes_a_conversation_where_asked() -> None:
    sample = next(read_set(config({**SUM, "chat": True, "system": "Be brief."}).train, "train"))
    assert isinstance(sample.prompt, tuple)
    assert sample.prompt[0] == Message("system", "Be brief.")
    assert [m.role for m in sample.prompt] == ["system", "user"]


def test_jsonl_fields_beside_prompt_and_answer_become_metadata(tmp_path: Path) -> None:
    row = {"prompt": "p", "answer": 2.5, "level": 3, "tags": ["a"]}
    [sample] = read_set(config(jsonl(tmp_path / "a.jsonl", row)).train, "train")
    assert (sample.answer, sample.metadata) == ("2.5", {"level": 3, "tags": ["a"]})


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "not JSON"),
        ("[1]", "not a JSON object with a field 'prompt'"),
        ('{"question": "x"}', "not a JSON object with a field 'prompt'"),
        ('{"prompt": " "}', "'prompt' must be a text or a list of messages"),
        ('{"prompt": []}', "'prompt' must be a text or a list of messages"),
        ('{"prompt": [{"role": "user"}]}', "a message of 'prompt' must be an object"),
        ('{"prompt": ["x"]}', "a message of 'prompt' must be an object"),
        ('{"prompt": "x", "answer": true}', "'answer' must be a text or a number, not True"),
    ],
)
def test_a_malformed_line_is_refused_with_file_and_line(
    line: str, problem: str, tmp_path: Path
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(f'{{"prompt": "fine"}}\n\n{line}\n', encoding="utf-8")
    with pytest.raises(DataError) as caught:
        DataSource(config({"kind": "jsonl", "path": str(path)}), 0)
    assert str(caught.value).startswith(f"{path}:3: ") and problem in str(caught.value)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"task": "no_such_task"}, "'no_such_task' not registered"),
        ({"arguments": {"terms": 2}}, "unexpected keyword argument 'terms'"),
        ({"arguments": {"min_terms": 9, "max_terms": 2}}, "max_terms must be >= min_terms"),
        ({"prompt": "{sum}="}, "may use ['difficulty', 'expression'"),
        ({"prompt": "{expression"}, "can't be filled in"),
    ],
)
def test_the_first_sample_shows_a_wrong_task_argument_or_template(
    change: dict[str, Any], problem: str
) -> None:
    with pytest.raises(DataError) as caught:
        next(read_set(config({**SUM, **change}).train, "train"))
    assert problem in str(caught.value) and "'train'" in str(caught.value)


def test_a_missing_file_is_refused_with_the_set_that_names_it(tmp_path: Path) -> None:
    missing = {"kind": "jsonl", "path": str(tmp_path / "missing.jsonl")}
    with pytest.raises(DataError, match=r"missing\.jsonl: No such file.*'second'"):
        DataSource(config(SUM, evaluation={"second": missing}), 0)


def test_an_empty_set_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="'train' has no prompts"):
        DataSource(config(jsonl(tmp_path / "empty.jsonl")), 0)


def test_a_training_set_that_the_evaluation_sets_use_up_is_refused() -> None:
    with pytest.raises(DataError, match="'train' has no prompts left"):
        DataSource(config(SUM, evaluation={"all": SUM}), 0)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"evaluation": {"heldout": SUM}}, "name of the split"),
        ({"train": {**SUM, "kind": "csv"}}, "kind"),
        ({"train": {**SUM, "arguments": {"seed": 3}}}, "move it beside task"),
        ({"train": {**SUM, "system": "x"}}, "set chat to true"),
        ({"train": {**SUM, "path": "x"}}, "Extra inputs"),
        ({"heldout_fraction": 1.0}, "less than 1"),
    ],
)
def test_a_contradictory_config_is_refused(change: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        DataConfig.model_validate({"train": SUM, **change})
