"""The JSON schema of the tables, for editors; ``states/schema.json`` is what this module prints."""

from __future__ import annotations

import json
from typing import Any

from pydantic.json_schema import models_json_schema

from fsm_trainer.machine.spec import LinkFile, RoleFile, ScheduleFile, SystemFile

FILES = (RoleFile, LinkFile, SystemFile, ScheduleFile)


def schema() -> dict[str, Any]:
    """One schema for the four kinds of file under ``states/``."""
    kinds, definitions = models_json_schema([(model, "validation") for model in FILES])
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A table of fsm-trainer: a role, a link, the system or a schedule",
        "anyOf": [kinds[model, "validation"] for model in FILES],
        **definitions,
    }


def text() -> str:
    """The schema as the checked-in file holds it."""
    return json.dumps(schema(), indent=2) + "\n"


if __name__ == "__main__":
    print(text(), end="")
