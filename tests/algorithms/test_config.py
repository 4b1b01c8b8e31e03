"""The settings refuse what can't work, explain themselves, and load without torch."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from fsm_trainer.algorithms import config
from fsm_trainer.algorithms.config import (
    CorrectionConfig,
    GRPOConfig,
    PolicyConfig,
    PPOConfig,
    ReinforcePPConfig,
    RLOOConfig,
)


@pytest.mark.parametrize(
    "wrong",
    [
        {"klip": 0.2},
        {"clip": 0.0},
        {"gamma": 1.1},
        {"lam": -0.1},
        {"kl_estimator": "k4"},
        {"minibatches": 0},
        {"temperature": 0.0},
        {"aggregation": "mean"},
        {"value_clip": 0.0},
        {"clip_high": 0.0},
        {"dual_clip": 1.0},
        {"ratio": "product"},
        {"ratio": "sequence"},
        {"ratio": "geometric", "aggregation": "constant", "aggregation_length": 8},
        {"kl_in": "advantage"},
        {"aggregation_length": 0},
        {"aggregation": "constant"},
        {"aggregation_length": 8},
    ],
)
def test_a_setting_that_cannot_work_is_refused_by_name(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        PPOConfig.model_validate(wrong)


@pytest.mark.parametrize("kind", [GRPOConfig, RLOOConfig, ReinforcePPConfig])
def test_what_has_no_critic_knows_none(kind: type[PolicyConfig]) -> None:
    with pytest.raises(ValidationError, match="lam"):
        kind.model_validate({"lam": 0.9})


@pytest.mark.parametrize(
    "wrong", [{"high": 0.9}, {"low": 1.1, "kind": "mask"}, {"low": 0.5}, {"level": "geometric"}]
)
def test_a_correction_that_cannot_work_is_refused_by_name(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        CorrectionConfig.model_validate(wrong)


def test_the_combinations_in_the_docs_are_configurations() -> None:
    text = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
    blocks = text.partition("```yaml")[2].partition("```")[0].strip().splitlines()
    assert len(blocks) == 4

    for line in blocks:
        GRPOConfig.model_validate(yaml.safe_load(line)["algorithm"])


def test_each_field_has_a_docstring_under_it() -> None:
    for node in ast.parse(inspect.getsource(config)).body:
        if not isinstance(node, ast.ClassDef):
            continue
        for at, field in enumerate(node.body):
            if isinstance(field, ast.AnnAssign):
                below = node.body[at + 1]
                assert isinstance(below, ast.Expr), f"{node.name}: {ast.unparse(field.target)}"
                assert isinstance(below.value, ast.Constant)


def test_the_settings_load_without_torch() -> None:
    program = "import sys, fsm_trainer.algorithms.config; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0
