"""What is generated and checked in; ``python -m docs.generate`` writes all of it anew.

Parts of README and ``docs/`` stand between ``<!-- begin NAME -->`` and ``<!-- end NAME -->``; the
schemas and ``docs/cli.md`` are whole files. A test sees either drift.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import statistics
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, cast, get_args, get_origin

import typer.main
import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic.json_schema import models_json_schema
from pydantic_core import to_json
from typer.cli import get_docs_for_click

from fsm_trainer.cli.main import app
from fsm_trainer.cli.tables import DEFAULT_SCHEDULE, LINK, machine, mermaid
from fsm_trainer.document import models_in
from fsm_trainer.machine.errors import ConfigError
from fsm_trainer.machine.names import Role
from fsm_trainer.machine.spec import (
    LinkFile,
    RoleFile,
    ScheduleFile,
    Spec,
    SystemFile,
    load,
    schedules,
)
from fsm_trainer.machine.world import System
from fsm_trainer.runtime.config import RunConfig
from fsm_trainer.runtime.journal import Entry
from fsm_trainer.runtime.metrics import MetricsRow
from fsm_trainer.verify.run import STEADY, plan_run

BOUNDS = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *([c.replace("|", r"\|") for c in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def machines() -> str:
    """The machines of the default schedule as Mermaid."""
    spec = load(DEFAULT_SCHEDULE)
    drawn = (mermaid(spec, name) for name in [*map(str, spec.roles), LINK])
    return "\n\n".join(f"```mermaid\n{text}```" for text in drawn)


def phases(schedule: str = DEFAULT_SCHEDULE) -> str:
    """The phases of a steady step: what each wants, and the transitions that the planner finds."""
    spec = load(schedule)
    rows = []
    for name, moves in plan_run(System.of(spec, 2))[STEADY]:
        phase = spec.phases[name]
        wants = [" or ".join(sorted(phase.wants.get(role, {"–"}))) for role in spec.roles]
        planned = ", ".join(map(str, moves)) or "none"
        rows.append([name, *wants, planned, phase.action or "–"])
    return table(["phase", *map(str, spec.roles), "planned transitions", "action"], rows)


def roles() -> str:
    """Every role's machine; schedules in which it is the same share a section."""
    sections = []
    for name in [*map(str, Role), LINK]:
        found: dict[str, list[str]] = {}
        for schedule in schedules():
            spec = load(schedule)
            if name in [*spec.roles, LINK]:
                found.setdefault(_role(spec, name), []).append(schedule)
        for text, where in found.items():
            title = f"## {name}" + (f": {', '.join(where)}" if len(found) > 1 else "")
            sections.append(f"{title}\n\n{text}")
    return "\n\n".join(sections)


def _role(spec: Spec, name: str) -> str:
    found = machine(spec, name)
    if name == LINK:
        return table(["trigger", "from", "to"], [list(t.values()) for t in found["transitions"]])
    columns = ("trigger", "from", "to", "guard", "joint")
    moves = [[_shown(key, t[key]) for key in columns] for t in found["transitions"]]
    actions = [{"action": action, **rest} for action, rest in found["actions"].items()]
    work = [[_shown(key, value) for key, value in action.items()] for action in actions]
    holds = [[state, ", ".join(held) or "nothing"] for state, held in found["states"].items()]
    return "\n\n".join([
        table(["state", "holds"], holds),
        table([*columns], moves),
        table(["action", "needs", "guard", "joint"], work),
    ])  # fmt: skip


def _shown(column: str, value: str | list[str] | None) -> str:
    text = ", ".join(value) if isinstance(value, list) else value or ""
    return f"`{text}`" if text and column == "guard" else text


def steps() -> str:
    """Every schedule's steady step."""
    return "\n\n".join(f"## {name}\n\n{phases(name)}" for name in schedules())


def configuration() -> str:
    """Every field of a configuration, a section a group."""
    return "\n\n".join(_sections(RunConfig, "", {}))


def _sections(model: type[BaseModel], path: str, seen: dict[type[BaseModel], str]) -> Iterator[str]:
    kinds = {n: get_args(f.annotation) for n, f in model.model_fields.items() if _is_kind(f)}
    title = ", ".join([f"`{path}`"] * bool(path) + [f"`{n}: {v[0]}`" for n, v in kinds.items()])
    first = seen.setdefault(model, title or "The top level")
    if first != (title or "The top level"):
        yield f"## {title}\n\nThe same fields as {first}."
        return
    yield f"## {first}\n\n{_plain(inspect.getdoc(model))}\n\n{fields(model)}"
    for name, field in model.model_fields.items():
        below = f"{path}.{name}".lstrip(".")
        below += ".NAME" if get_origin(field.annotation) is dict else ""
        for group in models_in(field.annotation):
            yield from _sections(group, below, seen)


def _is_kind(field: FieldInfo) -> bool:
    """Whether a field says which of several kinds its group is."""
    return get_origin(field.annotation) is Literal and len(get_args(field.annotation)) == 1


def fields(model: type[BaseModel]) -> str:
    """A table of a model's fields: name, type with bounds, default, and the docstring below it."""
    told, rows = _docstrings(model), []
    for name, field in model.model_fields.items():
        groups, default = models_in(field.annotation), field.default
        bounds = (
            f", {sign} {getattr(limit, at):g}"
            for limit in field.metadata
            for at, sign in BOUNDS.items()
            if getattr(limit, at, None) is not None
        )
        kind = re.sub(r"[\w.]+\.(\w+)", r"\1", inspect.formatannotation(field.annotation))
        if field.is_required():
            stands = "required"
        else:
            stands = "" if isinstance(default, BaseModel) else f"`{to_json(default).decode()}`"
        meaning = told.get(name) or (inspect.getdoc(groups[0]) if groups else "")
        kind = "group" if groups else f"`{kind}`"
        row = [f"`{field.alias or name}`", kind + "".join(bounds), stands, _plain(meaning)]
        rows.append(row)
    return table(["field", "type", "default", "meaning"], rows)


def _plain(text: str | None) -> str:
    """The first paragraph of a docstring as one line of Markdown."""
    return " ".join((text or "").partition("\n\n")[0].replace("``", "`").split())


def _docstrings(model: type[BaseModel]) -> dict[str, str]:
    """What stands below each field in the source, inherited ones included."""
    found: dict[str, str] = {}
    for base in reversed(model.__mro__[: model.__mro__.index(BaseModel)]):
        tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        for field, below in pairwise(cast(ast.ClassDef, tree.body[0]).body):
            match field, below:
                case (ast.AnnAssign(target=ast.Name(id=name)),
                      ast.Expr(value=ast.Constant(value=str(text)))):  # fmt: skip
                    found[name] = text
    return found


def results(pattern: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names and contents of the benchmarks' results."""
    for path in sorted((Path(__file__).parents[1] / "benchmarks/results").glob(pattern)):
        yield path.stem, json.loads(path.read_text(encoding="utf-8"))


def ms(seconds: float) -> str:
    """Milliseconds, three digits."""
    return f"{1e3 * seconds:.3g} ms"


def pushes() -> str:
    """What the benchmark of pushes measured, a row for each kind of link in each result."""
    rows = []
    for name, result in results("weight-push-*.json"):
        raw = result["raw_broadcast"]["seconds"]
        for kind in ("group", "ipc", "disk"):
            found = result.get(kind)
            if found is None:
                continue
            push, first = found["steady_push"], found["first_push"]
            share = f" ({raw / push['transfer']:.0%} of raw)" if kind == "group" else ""
            extra = " and ".join(f"{each / 1e6:.0f}" for each in found["first_push_device_bytes"])
            rows.append(
                [
                    name, f"`{kind}`", ms(raw), ms(push["transfer"]) + share,
                    ms(push["end_to_end"]),
                    f"{ms(first['transfer'])}, {ms(found['first_push_again'])}", f"{extra} MB",
                    *(ms(found[part]) for part in ("connect", "reconnect", "disconnect")),
                ]
            )  # fmt: skip
    heads = ["result", "kind", "raw broadcast", "transfer", "end to end", "first, first again"]
    return table([*heads, "extra memory", "connect", "reconnect", "disconnect"], rows)


def reconnects() -> str:
    """What the benchmark of reconnects measured, a row for each way in each result."""
    rows = []
    for name, result in results("reconnect-*.json"):
        for way in ("destroy", "abort", "suspend", "torchft"):
            if (found := result.get(way)) is not None:
                back = found.get("device_bytes_given_back")
                held = "" if back is None else f"{back / 1e6:.0f} MB"
                times = [ms(found[part]) for part in ("disconnect", "reconnect", "both")]
                rows.append([name, f"`{way}`", *times, held])
    return table(["result", "way", "disconnect", "reconnect", "both", "memory given back"], rows)


def sleeps() -> str:
    """What the benchmark of sleep and wake measured, a row for each policy of each result."""
    rows = []
    for name, result in results("sleep-wake-*.json"):
        each = [(t, p) for t in result["summary"] for p in ("destroy", "suspend")]
        for target, policy in each:
            found, size = result["summary"][target][0], result["ranks"][target][0].get("bytes")
            if (one := found.get(policy)) is None:
                continue
            speeds = [
                f"{one['bank_gb_per_second'][way]:.1f} GB/s ({one['bank_of_link'][way]:.0%})"
                for way in ("sleep", "wake")
            ]
            groups = " + ".join(ms(seconds) for seconds in one["groups_seconds"].values())
            whole = [ms(one[f"{way}_seconds"]) for way in ("sleep", "wake")]
            left = f"{one['left_bytes'] / 2**20:.0f} MiB"
            how = f"`{target}`, `{policy}`"
            rows.append([name, f"{size / 1e9:.2f} GB", how, *speeds, groups, *whole, left])
    heads = ["result", "bytes", "target, groups", "bank out", "bank in"]
    heads += ["groups: sleep + wake + first use"]
    return table([*heads, "sleep", "wake", "left"], rows)


def faults() -> str:
    """What faults of a link cost in fuzzed rounds: seconds, median and most."""
    rows = []
    for name, result in results("fuzzed-links-*.json"):
        for what, (median, most) in result["median_and_most_seconds"].items():
            rows.append([name, what.replace("_", " "), f"{median:.3g} s", f"{most:.3g} s"])
    return table(["result", "what", "median", "most"], rows)


def curves() -> str:
    """Held-out reward by step, of each algorithm: the mean over seeds, the least and the most."""
    rows, steps = [], ["0", "15", "30", "45", "60"]
    for name, result in results("learning-curves-*.json"):
        found: dict[str, list[dict[str, Any]]] = {}
        for run, one in result["runs"].items():
            found.setdefault(run.rpartition("-")[0], []).append(one)
        for algorithm, runs in found.items():
            at = [[run["heldout"][step] for run in runs] for step in steps]
            seen = [f"{statistics.fmean(x):.2f} ({min(x):.2f}–{max(x):.2f})" for x in at]
            seconds = f"{statistics.fmean(run['seconds'] for run in runs):.0f} s"
            rows.append([name, f"`{algorithm}`", str(len(runs)), *seen, seconds])
    heads = ["result", "algorithm", "seeds", *(f"step {step}" for step in steps)]
    return table([*heads, "a run takes"], rows)


def mistakes() -> str:
    """Mistakes that the runtime's code could have, and which layers see each."""
    table_of = Path(__file__).parents[1] / "tests/patches/caught.yaml"
    rows = []
    for name, row in yaml.safe_load(table_of.read_text(encoding="utf-8")).items():
        first, *others = row["caught"]
        words = name.rpartition("_row_")[0].replace("_", " ")
        seen = f"{first}: `{row['caught'][first]}`"
        rows.append([row["report"], words, f"`{row['where']}`", seen, ", ".join(others)])
    return table(["report", "mistake", "in", "first seen by, saying", "and by"], rows)


PARTS: Mapping[str, Callable[[], str]] = {
    "machines": machines, "phases": phases, "roles": roles, "steps": steps,
    "configuration": configuration, "journal": lambda: fields(Entry),
    "metrics": lambda: fields(MetricsRow), "pushes": pushes,
    "reconnects": reconnects, "faults": faults, "sleeps": sleeps, "mistakes": mistakes,
    "curves": curves,
}  # fmt: skip


def whole() -> dict[str, str]:
    """The files that are generated whole, by their paths."""
    group = typer.main.get_command(app)
    context, title = typer.Context(group, info_name=app.info.name), "The commands of fsm-train"
    commands = get_docs_for_click(obj=group, ctx=context, name="fsm-train", title=title)
    schemas = {
        "states/schema.json": tables_schema(),
        "fsm_trainer/runtime/schemas/journal.schema.json": Entry.model_json_schema(),
        "fsm_trainer/runtime/schemas/metrics.schema.json": MetricsRow.model_json_schema(),
    }
    written = {path: json.dumps(schema, indent=2) + "\n" for path, schema in schemas.items()}
    return {"docs/cli.md": f"{commands.strip()}\n", **written}


def tables_schema() -> dict[str, Any]:
    """One JSON schema for the four kinds of file under ``states/``, for editors."""
    files = (RoleFile, LinkFile, SystemFile, ScheduleFile)
    kinds, definitions = models_json_schema([(model, "validation") for model in files])
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A table of fsm-trainer: a role, a link, the system or a schedule",
        "anyOf": [kinds[model, "validation"] for model in files],
        **definitions,
    }


def anew(root: Path) -> dict[Path, str]:
    """Each file that is generated or has generated parts, and the text that it should have.

    Raises:
        ConfigError: nothing generates a part of that name.
    """

    def part(found: re.Match[str]) -> str:
        name = found[1]
        if name not in PARTS:
            raise ConfigError(f"{path}: nothing generates {name!r}. Known are: {', '.join(PARTS)}")
        return f"<!-- begin {name} -->\n{PARTS[name]()}\n<!-- end {name} -->"

    texts = {root / path: text for path, text in whole().items()}
    for path in [root / "README.md", *sorted((root / "docs").glob("*.md"))]:
        if path not in texts:
            text = path.read_text(encoding="utf-8")
            texts[path] = re.sub(r"(?s)<!-- begin (\S+) -->.*?<!-- end \1 -->", part, text)
    return texts


def check(root: Path) -> list[Path]:
    """The files that have drifted."""
    return [path for path, text in anew(root).items() if text != path.read_text(encoding="utf-8")]


def write(root: Path) -> None:
    """Write all of it anew."""
    for path, text in anew(root).items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(Path(*sys.argv[1:2]))
