from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from fsm_trainer.data.scorers import exact_match, extract_answer, reasoning_gym_score
from fsm_trainer.data.sources import ReasoningGymConfig, read_set
from fsm_trainer.data.trajectory import Sample, Status, Trajectory
from fsm_trainer.machine.errors import DataError
from fsm_trainer.machine.version import Version

CONFIG = ReasoningGymConfig(kind="reasoning_gym", task="chain_sum", size=1)
SUM = next(iter(read_set(CONFIG, "train")))


def answered(sample: Sample, text: str, status: Status = Status.FINISHED) -> Trajectory:
    return Trajectory(sample, [5, 6], [0, 1], [0.0, -1.0], Version(0, 0), status, text)


def test_the_last_tagged_answer_is_taken_and_else_the_whole_text() -> None:
    assert extract_answer("a <answer>1</answer> no, <answer>\n 2 </answer>.") == "2"
    assert extract_answer(" 3\n") == "3"


@pytest.mark.parametrize("form", ["{}", " {} \n", "I think <answer> {} </answer>"])
def test_a_right_answer_scores_one_with_blanks_or_tags_around_it(form: str) -> None:
    text = form.format(SUM.answer)
    for scorer in (exact_match, reasoning_gym_score):
        assert scorer(answered(SUM, text)) == {"reward": 1.0, "exact": 1.0}


def test_partial_credit_is_not_exact() -> None:
    # reasoning-gym: len(oracle) / len(answer) where the answer contains the oracle.
    text = f"it is {SUM.answer}"
    expected = len(str(SUM.answer)) / len(text)
    assert reasoning_gym_score(answered(SUM, text)) == {"reward": expected, "exact": 0.0}
    assert exact_match(answered(SUM, text))["reward"] == 0.0


@pytest.mark.parametrize("status", [Status.TRUNCATED, Status.ABORTED])
@pytest.mark.parametrize("scorer", [exact_match, reasoning_gym_score])
def test_a_response_that_was_cut_off_scores_zero(scorer: Any, status: Status) -> None:
    assert scorer(answered(SUM, str(SUM.answer), status)) == {"reward": 0.0, "exact": 0.0}


def test_a_sample_that_the_scorer_is_not_for_is_refused_by_its_id() -> None:
    plain = Sample(id="file/3", prompt="p", answer=None, group="g")
    for scorer in (exact_match, reasoning_gym_score):
        with pytest.raises(DataError, match="file/3"):
            scorer(answered(plain, "x"))


def test_the_data_modules_import_no_torch() -> None:
    names = "child models reward_process rewards scorers sources tiny trajectory"
    imports = "; ".join(f"import fsm_trainer.data.{name}" for name in names.split())
    heavy = "{'torch', 'transformers', 'ray', 'deepspeed'}"
    code = f"import sys; {imports}; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")
