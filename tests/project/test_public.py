"""What others embed stands at the top of the package, under one version."""

from __future__ import annotations

import configparser
from pathlib import Path

import fsm_trainer

ROOT = Path(__file__).parents[2]


def test_every_public_name_is_there_and_documented() -> None:
    assert sorted(fsm_trainer.__all__, key=str.casefold) == sorted(
        set(fsm_trainer.__all__), key=str.casefold
    )
    for name in set(fsm_trainer.__all__) - {"__version__"}:
        assert getattr(fsm_trainer, name).__doc__, name


def test_the_version_is_that_of_the_distribution() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    assert fsm_trainer.__version__ == setup["metadata"]["version"]
    assert f"## {fsm_trainer.__version__}" in (ROOT / "CHANGELOG.md").read_text()
