"""YAML files read into pydantic models, with the file and line in every error."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from fsm_trainer.machine.errors import FsmError

M = TypeVar("M", bound=BaseModel)
Key = tuple[str | int, ...]


class Document:
    """A YAML file with the line of every key and item.

    ``kind`` is the error class that its mistakes raise.
    """

    def __init__(self, path: Path, kind: type[FsmError]) -> None:
        self.path, self.kind = path, kind
        self.lines: dict[Key, int] = {}
        try:
            root = yaml.compose(path.read_text(), Loader=yaml.SafeLoader)
        except FileNotFoundError:
            raise kind(f"{path}:1: the file is missing") from None
        except yaml.MarkedYAMLError as error:
            line = error.problem_mark.line + 1 if error.problem_mark else 1
            raise kind(f"{path}:{line}: not YAML: {error.problem}") from None
        self.data: Any = self._convert(root, ()) if root is not None else {}

    def _convert(self, node: yaml.Node, at: Key) -> Any:
        self.lines.setdefault(at, node.start_mark.line + 1)
        if isinstance(node, yaml.MappingNode):
            result: dict[Any, Any] = {}
            for key_node, value in node.value:
                key = yaml.SafeLoader("").construct_object(key_node)
                line = key_node.start_mark.line + 1
                if key in result:
                    raise self.kind(f"{self.path}:{line}: the key {key!r} stands twice")
                self.lines[(*at, key)] = line
                result[key] = self._convert(value, (*at, key))
            return result
        if isinstance(node, yaml.SequenceNode):
            return [self._convert(item, (*at, i)) for i, item in enumerate(node.value)]
        return yaml.SafeLoader("").construct_object(node)

    def where(self, *at: str | int) -> str:
        """``file:line`` of a key, or of the nearest one above it."""
        while at not in self.lines and at:
            at = at[:-1]
        return f"{self.path}:{self.lines.get(at, 1)}"

    def error(self, message: str, *at: str | int) -> FsmError:
        """An error that stands at a key."""
        return self.kind(f"{self.where(*at)}: {message}")

    def parse(self, model: type[M], overrides: Mapping[Key, str] | None = None) -> M:
        """Validate the file against a model; the error lists every mistake with its line.

        ``overrides`` says where a key that doesn't stand in the file came from.
        """
        try:
            return model.model_validate(self.data)
        except ValidationError as error:
            raise self.kind(
                "\n".join(self._mistake(e, overrides or {}) for e in error.errors())
            ) from None

    def _mistake(self, error: Any, overrides: Mapping[Key, str]) -> str:
        at: Key = tuple(error["loc"])
        field = ".".join(str(part) for part in at) or "the file"
        origin = next((v for k, v in overrides.items() if at[: len(k)] == k), self.where(*at))
        known = error.get("ctx", {}).get("remedy", "")
        given = "" if error["type"] == "missing" else f" (given: {error['input']!r})"
        return f"{origin}: {field}: {error['msg']}{given}{known}"
