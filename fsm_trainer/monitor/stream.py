"""Another trainer's stream of JSON lines: what its names mean in the tables is said by a file."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from fsm_trainer.machine.errors import DataError
from fsm_trainer.machine.names import Role, State
from fsm_trainer.machine.spec import Spec
from fsm_trainer.machine.version import Version
from fsm_trainer.machine.world import System, World
from fsm_trainer.monitor.watch import Event
from fsm_trainer.verify.remedy import stand

EVENT = TypeAdapter(Event)
Field = Literal["worker", "trigger", "at", "ok", "epoch", "version", "time"]
FIELDS: tuple[Field, ...] = get_args(Field)


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Rule(_Model):
    """Which records mean an event; each rule that matches a record gives one, in order."""

    match: dict[str, Any]
    """Fields and their values; a mapping matches if all that it names does."""
    trigger: str | None = None
    """A trigger, an action or a fault of the tables; None: the record's field says it, if any."""
    worker: str | None = None
    """Whose; None: the record says."""
    at: Literal["begin", "end"] | None = None
    ok: bool | None = None
    version: Literal["kept"] | None = None


class Place(_Model):
    """A worker of the stream, and where it stands when the stream begins."""

    role: Role
    state: State = State.DISCONNECTED


class Map(_Model):
    """What a stream's names mean."""

    schedule: str
    """Whose tables they are held against."""
    workers: dict[str, Place]
    """All of them, by their names in the stream; whoever holds weights at first has the same."""
    fields: dict[Field, str] = {}
    """Which field of a record says it; default: that of the same name."""
    events: list[Rule]

    def compose(self, spec: Spec) -> tuple[System, World]:
        """The system of the stream's workers, and the world in which it begins."""
        system = System(spec, {name: place.role for name, place in self.workers.items()})
        placed = {n: place for n, place in self.workers.items() if place.state != "disconnected"}
        weights = {name: (place.state, Version(1, 0)) for name, place in placed.items()}
        return system, stand(system, system.initial(), weights)


class Stream:
    """Reads a stream's lines as a map says."""

    def __init__(self, names: Map) -> None:
        self._names, self.unread = names, Counter[str]()
        """The kinds of lines that no rule matched, and how many of each."""

    def events(self, lines: Iterable[str]) -> Iterator[Event]:
        """The events of each line, as it comes.

        Raises:
            DataError: a field is missing or isn't what it must be.
        """
        for number, line in enumerate(lines, start=1):
            try:
                record = json.loads(line)
            except ValueError:
                record = None
            for told in self._read(record) if isinstance(record, dict) else self._skip("no object"):
                try:
                    yield EVENT.validate_python({**told, "where": f"line {number}"})
                except ValidationError as error:
                    first = error.errors(include_url=False)[0]
                    field = ".".join(str(part) for part in first["loc"])
                    raise DataError(f"line {number}: {field}: {first['msg']}") from None

    def _skip(self, kind: str) -> list[dict[str, Any]]:
        self.unread[kind] += 1
        return []

    def _read(self, record: dict[str, Any]) -> list[dict[str, Any]]:
        rules = [rule for rule in self._names.events if _matches(rule.match, record)]
        if not rules:
            keys = dict.fromkeys(key for rule in self._names.events for key in rule.match)
            kind = [f"{key}={record[key]}" for key in keys if isinstance(record.get(key), str)]
            return self._skip(", ".join(kind) or "other fields")
        fields = {name: self._names.fields.get(name, name) for name in FIELDS}
        told = {str(name): record[field] for name, field in fields.items() if field in record}
        said = [told | rule.model_dump(exclude={"match"}, exclude_none=True) for rule in rules]
        return [each for each in said if "trigger" in each]


def _matches(pattern: Mapping[str, Any], record: Any) -> bool:
    return isinstance(record, dict) and all(
        _matches(value, record.get(key)) if isinstance(value, dict) else record.get(key) == value
        for key, value in pattern.items()
    )
