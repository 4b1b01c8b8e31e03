"""What README and docs say is so: generated parts, the code that embeds, links, names of tests."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from docs import generate
from fsm_trainer.machine.errors import ConfigError

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]

EMBEDDED = re.search(r"<!-- embed -->\n```python\n(.*?)```", README, re.DOTALL)
OUTPUT = re.search(r"<!-- output -->\n```text\n(.*?)```", README, re.DOTALL)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the files that have generated parts."""
    for folder in ("docs", "states", "fsm_trainer/runtime/schemas"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    shutil.copy(ROOT / "README.md", tmp_path)
    return tmp_path


def test_the_generated_parts_are_those_of_the_tables_and_the_code() -> None:
    assert generate.check(ROOT) == [], "write them anew: python -m docs.generate"


@pytest.mark.parametrize(
    ("page", "old", "new"),
    [
        ("README.md", "sleeping --> awake: wake", "sleeping --> awake: rise"),
        ("README.md", "wake(critic)", "–"),
        ("docs/states.md", "| optimizer, train_groups, weights |", "| weights |"),
        ("docs/configuration.md", "`0.95`", "`0.9`"),
        ("docs/journal-and-metrics.md", "a gap is a lost record", "a gap is nothing"),
        ("docs/cli.md", "Check a configuration; start nothing.", "Check nothing."),
        ("states/schema.json", "A table of fsm-trainer", "A table"),
        ("fsm_trainer/runtime/schemas/journal.schema.json", "a lost record", "nothing"),
    ],
)
def test_a_part_that_drifted_is_seen_and_written_anew(
    tree: Path, page: str, old: str, new: str
) -> None:
    path = tree / page
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")
    assert generate.check(tree) == [path]
    generate.write(tree)
    assert path.read_text(encoding="utf-8") == text


def test_a_part_that_nothing_generates_is_refused(tree: Path) -> None:
    (tree / "README.md").write_text("<!-- begin plans --><!-- end plans -->")
    with pytest.raises(ConfigError, match=r"README.md: nothing generates 'plans'. Known are"):
        generate.check(tree)


def test_the_code_that_embeds_a_machine_runs_as_it_stands_and_prints_what_is_said() -> None:
    assert EMBEDDED is not None and OUTPUT is not None
    done = subprocess.run(
        [sys.executable, "-c", EMBEDDED[1]], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == OUTPUT[1]


def test_it_embeds_in_twenty_lines() -> None:
    assert EMBEDDED is not None
    assert len([line for line in EMBEDDED[1].splitlines() if line.strip()]) <= 20


def test_the_continuous_check_is_the_readmes_command() -> None:
    (command,) = re.findall(r"^python -m pip install tox && tox run$", README, re.MULTILINE)
    assert command in (ROOT / ".ci" / "run").read_text().splitlines()


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_between_files_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", page.read_text(encoding="utf-8")):
        name, _, anchor = target.partition("#")
        file = (page.parent / name) if name else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


def test_every_test_that_is_named_exists() -> None:
    text = (ROOT / "docs" / "failures.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(test_\w+)`", text))
    written = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"def (test_\w+)", path.read_text(encoding="utf-8"))
    }
    assert len(named) > 30
    assert named - written == set()


def test_every_kind_of_failure_that_the_runtime_answers_has_a_test_of_its_name() -> None:
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")]
    rows = {int(n) for text in texts for n in re.findall(r"def test_\w+_row_(\d+)\b", text)}
    assert {*range(1, 7), 14, 16, *range(20, 27), *range(29, 34), 35} - rows == set()
