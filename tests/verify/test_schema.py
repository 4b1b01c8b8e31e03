"""`states/schema.json` is what the models say, and takes every table that ships."""

from __future__ import annotations

import json

import jsonschema
import pytest
import yaml

from fsm_trainer.machine.spec import default_states
from fsm_trainer.verify.schema import text

STATES = default_states()


def test_the_checked_in_schema_is_the_models() -> None:
    assert (STATES / "schema.json").read_text() == text(), "python -m fsm_trainer.verify.schema"


@pytest.mark.parametrize("path", sorted(STATES.rglob("*.yaml")), ids=lambda path: path.name)
def test_every_table_is_valid_and_a_misspelt_one_is_not(path) -> None:  # type: ignore[no-untyped-def]
    schema = json.loads(text())
    table = json.loads(json.dumps(yaml.safe_load(path.read_text())))
    jsonschema.validate(table, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(table | {"transitons": []}, schema)
