"""The package is light to import, and works where the heavy libraries aren't installed."""

from __future__ import annotations

import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import fsm_trainer

PACKAGE = Path(fsm_trainer.__file__).parent
HEAVY = ["torch", "ray", "transformers", "deepspeed", "sglang", "reasoning_gym", "tensorboard"]

SCRIPT = """
import importlib, json, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in heavy:
            raise ImportError(f"{name} is not installed")

names, heavy, absent = json.loads(sys.argv[1])
if absent:
    sys.meta_path.insert(0, Absent())
for name in names:
    importlib.import_module(name)
print(json.dumps(sorted(set(heavy) & sys.modules.keys())))
"""


def loaded(names: list[str], heavy: list[str], *, absent: bool) -> list[str]:
    """Give which heavy modules are loaded after these imports, in a process of their own."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps([names, heavy, absent])],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout))


def names_in(part: str) -> list[str]:
    folder = PACKAGE / part
    return [f"fsm_trainer.{part}", *(
        f"fsm_trainer.{part}.{module.name}" for module in pkgutil.iter_modules([str(folder)])
    )]  # fmt: skip


def test_importing_the_package_loads_nothing_heavy() -> None:
    assert loaded(["fsm_trainer"], [*HEAVY, "asyncio", "numpy"], absent=False) == []


def test_the_check_sees_a_heavy_module() -> None:
    assert loaded(["asyncio"], ["asyncio"], absent=False) == ["asyncio"]


@pytest.mark.parametrize("part", ["machine", "verify", "monitor", "data", "cli"])
def test_every_light_module_is_imported_where_nothing_heavy_is_installed(part: str) -> None:
    assert loaded(names_in(part), HEAVY, absent=True) == []


def test_the_driver_and_its_modules_need_ray_but_no_torch() -> None:
    without_ray = [name for name in HEAVY if name != "ray"]
    assert loaded(names_in("runtime"), without_ray, absent=True) == []


def test_a_trainers_process_has_imported_what_its_first_wake_needs_before_it_is_asked() -> None:
    script = (
        "import sys; from fsm_trainer.workers.trainer import ActorHost; "
        "needs = {'deepspeed', 'transformers.modeling_utils'}; print(needs <= set(sys.modules)); "
        "ActorHost.prepare(); print(needs <= set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.split() == ["False", "True"], done.stderr


def test_the_machine_needs_no_event_loop() -> None:
    assert loaded(names_in("machine"), ["asyncio"], absent=False) == []
