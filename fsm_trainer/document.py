"""YAML files, and files of JSON lines, read into pydantic models: mistakes with file and line."""

from __future__ import annotations

import os
import textwrap
import threading
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from fsm_trainer.machine.errors import DataError, FsmError

M = TypeVar("M", bound=BaseModel)
Key = tuple[str | int, ...]

GROUP = ("must hold fields of its own", "Write them below it, indented.")
NUMBER = ("is not a number", "Write a number, such as 0.5.")
WHOLE = ("is not a whole number", "Write a whole number, such as 2.")
TEXT = ("is not a text", "Write a text; quote it if YAML reads it as something else.")
LIST = ("is not a list", "Write its items in brackets: [a, b].")
SWITCH = ("is neither true nor false", "Write true or false.")
MISTAKES: Mapping[str, tuple[str, str]] = {
    "missing": ("the field is missing", "Add it."),
    "int_type": WHOLE, "int_parsing": WHOLE, "int_from_float": WHOLE,
    "float_type": NUMBER, "float_parsing": NUMBER,
    "bool_type": SWITCH, "bool_parsing": SWITCH,
    "string_type": TEXT, "path_type": TEXT,
    "list_type": LIST, "tuple_type": LIST, "frozen_set_type": LIST,
    "model_type": GROUP, "model_attributes_type": GROUP, "dict_type": GROUP,
    "greater_than": ("is too small", "Choose more than {gt}."),
    "greater_than_equal": ("is too small", "Choose at least {ge}."),
    "less_than": ("is too large", "Choose less than {lt}."),
    "less_than_equal": ("is too large", "Choose at most {le}."),
    "too_short": ("has too few items", "Write {min_length}."),
    "too_long": ("has too many items", "Write {max_length}."),
    "enum": ("is not one of the choices", "Choose one of {expected}."),
    "literal_error": ("is not one of the choices", "Choose one of {expected}."),
    "union_tag_invalid": ("is not one of the choices", "Choose one of {expected_tags}."),
    "union_tag_not_found": ("the field is missing", "Add it: it says which kind this is."),
    "string_pattern_mismatch": ("has another form", "Write module:function, to match {pattern}."),
}  # fmt: skip
"""What is wrong and its remedy, by pydantic's type of the error."""


def nearest(name: object, known: Iterable[str]) -> str:
    """``Did you mean x? `` for a name that is almost a known one, else nothing."""
    close = get_close_matches(str(name), [*known], n=1)
    return f"Did you mean {close[0]}? " if close else ""


class LineError(DataError):
    """Raised when a line of a file isn't what it must be; ``line`` is None if none can be read."""

    def __init__(self, path: Path, line: int | None, reason: str) -> None:
        self.path, self.line, self.reason = path, line, reason
        super().__init__(f"{path}: {reason}" if line is None else f"{path}:{line}: {reason}")


class LineFile:
    """A file that grows by whole lines; any thread may append, under ``lock``.

    A last line that a kill has cut off is cut away.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.lock = path, threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
        self.file = path.open("a", encoding="utf-8", buffering=1)

    def sync(self) -> None:
        """Have the disk keep what was appended so far."""
        with self.lock:
            os.fsync(self.file.fileno())

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        with self.lock:
            self.file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_lines(path: Path, model: type[M]) -> list[M]:
    """Read a file of JSON lines; a last one that doesn't end was cut off, and counts for nothing.

    Raises :class:`LineError` for a line that isn't one of ``model``.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise LineError(path, None, f"can't be read ({error.strerror})") from error
    found = []
    for number, line in enumerate(content[: content.rfind(b"\n") + 1].splitlines(), start=1):
        try:
            found.append(model.model_validate_json(line))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            field = ".".join(str(part) for part in first["loc"]) or "the line"
            raise LineError(path, number, f"{field}: {first['msg']}") from error
    return found


class Document:
    """A YAML file with the line of every key and item.

    ``kind`` is the error class that its mistakes raise.
    """

    def __init__(self, path: Path, kind: type[FsmError]) -> None:
        self.path, self.kind = path, kind
        self.lines: dict[Key, int] = {}
        try:
            root = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
            self.data: Any = self._convert(root, ()) if root is not None else {}
        except FileNotFoundError:
            raise kind(f"{path}:1: the file is missing. Is the path right?") from None
        except OSError as error:
            raise kind(f"{path}:1: can't be read: {error.strerror}. Give a YAML file") from None
        except UnicodeDecodeError as error:
            raise kind(f"{path}:1: not UTF-8: {error}. Convert the file") from None
        except yaml.MarkedYAMLError as error:
            line = error.problem_mark.line + 1 if error.problem_mark else 1
            problem = " ".join(filter(None, (error.context, error.problem)))
            remedy = "Correct the indentation, the brackets or the quotes there"
            raise kind(f"{path}:{line}: not YAML: {problem}. {remedy}") from None
        except yaml.YAMLError as error:
            raise kind(f"{path}:1: not YAML: {error}. Give a YAML file") from None
        except RecursionError:
            raise kind(f"{path}:1: an anchor stands inside itself. Write it out") from None

    def _convert(self, node: yaml.Node, at: Key) -> Any:
        self.lines.setdefault(at, node.start_mark.line + 1)
        if isinstance(node, yaml.MappingNode):
            result: dict[Any, Any] = {}
            for key_node, value in node.value:
                line = key_node.start_mark.line + 1
                key = self._scalar(key_node)
                if key in result:
                    problem = f"the key {key!r} stands in line {self.lines[*at, key]} too"
                    raise self.kind(f"{self.path}:{line}: {problem}. Remove one of them")
                self.lines[(*at, key)] = line
                result[key] = self._convert(value, (*at, key))
            return result
        if isinstance(node, yaml.SequenceNode):
            return [self._convert(item, (*at, i)) for i, item in enumerate(node.value)]
        return self._scalar(node)

    def _scalar(self, node: yaml.Node) -> Any:
        where = f"{self.path}:{node.start_mark.line + 1}"
        if not isinstance(node, yaml.ScalarNode):
            raise self.kind(f"{where}: a key is a mapping or a list. Write a name")
        try:
            return yaml.SafeLoader("").construct_object(node)
        except ValueError as error:
            problem = f"{node.value!r} is no {node.tag.rpartition(':')[2]}: {error}"
            raise self.kind(f"{where}: {problem}. Quote it if it is a text") from None

    def where(self, *at: str | int) -> str:
        """``file:line`` of a key, or of the nearest one above it."""
        while at not in self.lines and at:
            at = at[:-1]
        return f"{self.path}:{self.lines.get(at, 1)}"

    def error(self, message: str, *at: str | int) -> FsmError:
        """An error that stands at a key."""
        return self.kind(f"{self.where(*at)}: {message}")

    def parse(self, model: type[M], origins: Mapping[Key, str] | None = None) -> M:
        """Validate the file against a model; the error lists every mistake with its line.

        ``origins`` says where a value that doesn't stand in the file came from.
        """
        try:
            return model.model_validate(self.data)
        except ValidationError as error:
            found = [self._mistake(one, model, origins or {}) for one in error.errors()]
            raise self.kind("\n".join(dict.fromkeys(found))) from None

    def mistake(
        self, at: Key, problem: str, remedy: str, origins: Mapping[Key, str], *given: object
    ) -> str:
        """One line for people: where, the field, what is wrong, the value, what to do."""
        sources = [text for key, text in origins.items() if at[: len(key)] == key]
        where = sources[-1] if sources else self.where(*at)
        value = f" (given: {_short(given[0])})" if given else ""
        field = ".".join(str(part) for part in at) or "the file"
        return f"{where}: {field}: {problem}{value}. {remedy}".rstrip()

    def _mistake(self, error: Any, model: type[BaseModel], origins: Mapping[Key, str]) -> str:
        kind, context = error["type"], error.get("ctx", {})
        problem, remedy = MISTAKES.get(kind, (error["msg"], "Correct it."))
        remedy = remedy.format_map(context)
        at, given = self._within(error["loc"], kind == "missing"), [error["input"]]
        if kind == "extra_forbidden":
            known = _fields(model, error["loc"])
            problem, remedy = "unknown field", f"{nearest(at[-1], known)}{_known(known)}"
        elif kind == "value_error":
            problem, _, remedy = str(context["error"]).partition(": ")
            remedy, given = f"{remedy[:1].upper()}{remedy[1:]}." if remedy else "", []
        elif kind.startswith("union_tag"):
            tag = context["discriminator"].strip("'")
            at, given = (*at, tag), [context["tag"]] if "tag" in context else []
        elif kind == "missing":
            given = []
        return self.mistake(at, problem, remedy, origins, *given)

    def _within(self, loc: Key, missing: bool) -> Key:
        """Pydantic's location less what isn't a key of the file, such as the tag of a union."""
        at: Key = ()
        here = self.data
        for place, part in enumerate(loc):
            try:
                at, here = (*at, part), here[part]
            except (LookupError, TypeError):
                if missing and place == len(loc) - 1:
                    at = (*at, part)
        return at


def _short(value: object) -> str:
    return textwrap.shorten(repr(value), 80, placeholder=" ...")


def _known(names: Iterable[str]) -> str:
    text = ", ".join(sorted(names))
    return f"Known are: {text}." if text else "Remove it."


def _fields(model: type[BaseModel], loc: Key) -> list[str]:
    """The fields that are known where an unknown one was found."""
    models: list[type[BaseModel]] = [model]
    for part in loc[:-1]:
        named = [f.annotation for m in models for n, f in _named(m) if n == part]
        if named:
            models = [m for annotation in named for m in models_in(annotation)]
        else:  # the key of a mapping, the place in a list, or the tag that chooses of a union
            tagged = [m for m in models if part in _tags(m)]
            models = tagged or models
    return [name for m in models for name, _ in _named(m)]


def _named(model: type[BaseModel]) -> list[tuple[str, FieldInfo]]:
    return [(field.alias or name, field) for name, field in model.model_fields.items()]


def _tags(model: type[BaseModel]) -> set[object]:
    annotations = [f.annotation for f in model.model_fields.values()]
    return {tag for a in annotations if get_origin(a) is Literal for tag in get_args(a)}


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """The models that a field's annotation names, alone or in a union or a container."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in models_in(part)]
