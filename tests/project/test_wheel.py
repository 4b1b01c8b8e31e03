"""The wheel is whole: it works from any folder, the repository's root included."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SHOW_STATES = (
    "from fsm_trainer.machine.spec import default_states, load, schedules;"
    "[load(schedule) for schedule in schedules()];"
    "print(default_states())"
)


def call(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout.strip()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build from a copy, so that no build folder of the tree gets into the wheel, nor into it."""
    source = tmp_path_factory.mktemp("source")
    junk = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("fsm_trainer", "states"):
        shutil.copytree(ROOT / name, source / name, ignore=junk)
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    out = tmp_path_factory.mktemp("wheel")
    build = ["wheel", "--no-deps", "--no-build-isolation", "--quiet", "--wheel-dir"]
    call(sys.executable, "-m", "pip", *build, out, source, cwd=out)
    (found,) = out.glob("fsm_trainer-*.whl")
    return found


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel where only this environment's dependencies are seen beside it."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    call(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", wheel, cwd=folder)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return python


def test_the_wheel_has_every_module_and_every_table(wheel: Path) -> None:
    within = set(zipfile.ZipFile(wheel).namelist())
    patterns = ("*.py", "*.json", "*.html", "*.svg", "*.mmd", "*.tla", "py.typed")
    expected = {
        path.relative_to(ROOT).as_posix()
        for pattern in patterns
        for path in (ROOT / "fsm_trainer").rglob(pattern)
    } | {
        f"fsm_trainer/{path.relative_to(ROOT).as_posix()}"
        for pattern in ("*.py", "*.yaml", "*.json")
        for path in (ROOT / "states").rglob(pattern)
    }
    assert len(expected) > 30
    assert expected - within == set()
    assert {name.split("/")[0].split("-")[0] for name in within} == {"fsm_trainer"}


def test_the_installed_wheel_finds_its_own_tables_from_another_folder(
    python: Path, tmp_path: Path
) -> None:
    states = Path(call(python, "-c", SHOW_STATES, cwd=tmp_path))
    assert states.is_relative_to(python.parents[1])
    assert states.parts[-2:] == ("fsm_trainer", "states")


def test_the_installed_wheel_works_from_the_repository(python: Path) -> None:
    assert Path(call(python, "-c", SHOW_STATES, cwd=ROOT)) == ROOT / "states"


def test_the_tree_works_without_an_installation() -> None:
    assert Path(call(sys.executable, "-c", SHOW_STATES, cwd=ROOT)) == ROOT / "states"


def test_an_editable_installation_finds_the_tables_of_its_tree(tmp_path: Path) -> None:
    source = tmp_path / "clone"
    for name in ("fsm_trainer", "states"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    install = ["install", "--no-deps", "--no-build-isolation", "--quiet", "--editable"]
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    call(sys.executable, "-m", "pip", "--python", python, *install, source, cwd=tmp_path)
    assert Path(call(python, "-c", SHOW_STATES, cwd=tmp_path)) == source / "states"


def test_the_installed_command_shows_its_help(python: Path, tmp_path: Path) -> None:
    shown = call(python.parent / "fsm-train", "--help", cwd=tmp_path)
    tables = ("validate", "plan", "graph", "export", "explain")
    for command in ("run", *tables, "trace", "report", "doctor"):
        assert command in shown
