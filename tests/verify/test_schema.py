"""`states/schema.json` takes every table that ships; that it is the models', another test says."""

from __future__ import annotations

import json

import jsonschema
import pytest
import yaml

from fsm_trainer.machine.spec import default_states

STATES = default_states()


@pytest.mark.parametrize("path", sorted(STATES.rglob("*.yaml")), ids=lambda path: path.name)
def test_every_table_is_valid_and_a_misspelt_one_is_not(path) -> None:  # type: ignore[no-untyped-def]
    schema = json.loads((STATES / "schema.json").read_text())
    table = json.loads(json.dumps(yaml.safe_load(path.read_text())))
    jsonschema.validate(table, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(table | {"transitons": []}, schema)
