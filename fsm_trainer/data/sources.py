"""Where prompts come from: JSONL files and reasoning-gym tasks, split by the hash of the prompt.

Membership in the held-out part is a function of the prompt alone. Seeds can't split a procedural
task: reasoning-gym draws item i from ``Random(seed + i)``, so two seeds overlap almost wholly.
"""

from __future__ import annotations

import functools
import hashlib
import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, model_validator

from fsm_trainer.data.seeds import derive
from fsm_trainer.data.trajectory import Message, Prompt, Sample
from fsm_trainer.machine.errors import CapabilityMissing, DataError

#: The name of the evaluation set that is split off the training prompts.
HELDOUT = "heldout"
_STATE_FORMAT = 2


class _SetConfig(BaseModel, extra="forbid", frozen=True):
    chat: bool = False
    """Whether a plain prompt becomes one user message of a conversation."""
    system: str | None = None
    """The system message that precedes it; needs ``chat``."""

    @model_validator(mode="after")
    def _system_needs_chat(self) -> _SetConfig:
        if self.system is not None and not self.chat:
            raise ValueError("system is set but chat is false: set chat to true, or drop system")
        return self


class JsonlConfig(_SetConfig, extra="forbid", frozen=True):
    """One JSON object a line: ``prompt`` (text, or messages), ``answer``, anything else."""

    kind: Literal["jsonl"]
    path: Path
    """The file, UTF-8; what is neither ``prompt`` nor ``answer`` becomes the sample's metadata."""


class ReasoningGymConfig(_SetConfig, extra="forbid", frozen=True):
    """Items of a procedural task of reasoning-gym."""

    kind: Literal["reasoning_gym"]
    task: str
    """The task's name, such as ``chain_sum``."""
    arguments: dict[str, Any] = {}
    """Arguments of the task; ``size`` and ``seed`` stand beside, not in here."""
    size: int = Field(default=10_000, ge=1)
    """How many items are drawn, before duplicates are removed."""
    seed: int = 0
    """Item i is drawn from ``Random(seed + i)``."""
    prompt: str = "{question}"
    """Template of the prompt: ``question`` and the names of the item's metadata in braces."""
    strip_blanks: bool = False
    """Whether blanks are removed from what the template inserts: ``1 + 2`` to ``1+2``."""

    @model_validator(mode="after")
    def _arguments_leave_ours_alone(self) -> ReasoningGymConfig:
        taken = sorted({"size", "seed"} & set(self.arguments))
        if taken:
            raise ValueError(f"arguments sets {taken}: move it beside task, out of arguments")
        return self


SetConfig = Annotated[JsonlConfig | ReasoningGymConfig, Field(discriminator="kind")]


class DataConfig(BaseModel, extra="forbid", frozen=True):
    """What is trained on, and on which sets it is measured."""

    train: SetConfig
    """The training prompts."""
    heldout_fraction: float = Field(default=0.1, ge=0, lt=1)
    """The part of them, chosen by hash, that becomes the evaluation set ``heldout``."""
    evaluation: dict[str, SetConfig] = {}
    """More evaluation sets by name; their prompts are removed from the training prompts."""
    evaluation_limit: int | None = Field(default=500, ge=1)
    """The most samples of an evaluation set: those with the smallest hashes; null for all."""

    @model_validator(mode="after")
    def _heldout_is_taken(self) -> DataConfig:
        if HELDOUT in self.evaluation:
            raise ValueError(f"evaluation.{HELDOUT} is the name of the split: rename the set")
        return self


def prompt_hash(prompt: Prompt) -> str:
    """Return SHA-256 of the prompt in hex: what decides whether two prompts are the same.

    Blind to case, to the amount of white space and to the system message, so that the same
    question is recognised in another dress.
    """
    parts = (
        (prompt,) if isinstance(prompt, str) else [m.content for m in prompt if m.role != "system"]
    )
    text = "\n".join(parts)
    return hashlib.sha256(" ".join(text.casefold().split()).encode()).hexdigest()


def read_set(config: JsonlConfig | ReasoningGymConfig, name: str) -> Iterator[Sample]:
    """Yield the samples of one set in the order of the source, duplicates included.

    Ids are ``name/line`` or ``name/item``. Raises ``DataError`` with file and line, or task and
    item.
    """
    read = _read_jsonl if isinstance(config, JsonlConfig) else _read_reasoning_gym
    for sample in read(config, name):  # type: ignore[arg-type]
        if config.chat and isinstance(sample.prompt, str):
            head = (Message("system", config.system),) if config.system is not None else ()
            sample = replace(sample, prompt=(*head, Message("user", sample.prompt)))
        yield sample


class DataSource:
    """Training samples in a shuffled order per epoch, with a position, and the evaluation sets.

    Several *streams* read the same training samples independently, each in an order of its own
    (the warm-up and the training proper). The whole of every set is held in memory.
    """

    def __init__(self, config: DataConfig, seed: int) -> None:
        further = {name: _unique(read_set(one, name)) for name, one in config.evaluation.items()}
        everything = _unique(read_set(config.train, "train"))
        limit = int(config.heldout_fraction * 2**64)
        heldout = {key: s for key, s in everything.items() if int(key[:16], 16) < limit}
        reserved = set(heldout).union(*further.values())
        self._training = [s for key, s in everything.items() if key not in reserved]
        sets = {HELDOUT: heldout, **further} if config.heldout_fraction else further
        self._evaluation = {
            name: [samples[key] for key in sorted(samples)[: config.evaluation_limit]]
            for name, samples in sets.items()
        }
        self._seed = seed
        self._fingerprint = _fingerprint(seed, self._training)
        self._positions: dict[str, int] = {}  # by stream, since the first epoch
        for name, samples in {"train": self._training, **self._evaluation}.items():
            if not samples:
                raise DataError(
                    f"data set {name!r} has no prompts left after duplicates and held-out prompts "
                    "were removed. Enlarge it, or change data.heldout_fraction"
                )

    def __len__(self) -> int:
        """Return the number of training prompts, which is the length of an epoch."""
        return len(self._training)

    def draw(self, prompts: int, copies: int = 1, stream: str = "train") -> list[Sample]:
        """Return the next ``prompts`` prompts of a stream, each ``copies`` times in a row.

        The copies of a prompt share their ``group``; no two samples of a stream share an ``id``.
        A draw may cross the end of an epoch.
        """
        seed, length = derive(self._seed, "data", stream), len(self)
        first = self._positions.get(stream, 0)
        self._positions[stream] = first + prompts
        drawn = []
        for position in range(first, first + prompts):
            epoch, place = divmod(position, length)
            sample = self._training[_order(seed, epoch, length)[place]]
            group = f"{stream}:{sample.id}@{epoch}"
            drawn += [replace(sample, id=f"{group}#{k}", group=group) for k in range(copies)]
        return drawn

    def evaluation_sets(self) -> dict[str, list[Sample]]:
        """Return the held-out sets by name; none shares a prompt with the training samples."""
        return {name: list(samples) for name, samples in self._evaluation.items()}

    def state(self) -> dict[str, Any]:
        """Return how many prompts every stream has drawn, ready for JSON."""
        streams = dict(self._positions)
        return {"format": _STATE_FORMAT, "data": self._fingerprint, "streams": streams}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state`` was taken: no sample twice, none lost.

        Raises ``DataError`` if the state belongs to other data, another seed or another format.
        """
        if state.get("format") != _STATE_FORMAT:
            raise DataError(f"data position of format {state.get('format')!r}, not {_STATE_FORMAT}")
        if state.get("data") != self._fingerprint:
            raise DataError(
                "the data position belongs to other training prompts or another seed "
                f"({state.get('data')}, here {self._fingerprint}). Resume with the run's own data "
                "and seed, or start a new run from its weights"
            )
        self._positions = dict(state["streams"])


@functools.lru_cache(maxsize=4)
def _order(seed: int, epoch: int, length: int) -> list[int]:
    # Sorted by random() and not shuffle(): of the two, only random() is promised to give the
    # same numbers in every version of Python.
    draw = random.Random(derive(seed, "epoch", epoch)).random
    keys = [draw() for _ in range(length)]
    return sorted(range(length), key=keys.__getitem__)


def _unique(samples: Iterator[Sample]) -> dict[str, Sample]:
    found: dict[str, Sample] = {}
    for sample in samples:
        found.setdefault(prompt_hash(sample.prompt), sample)
    return found


def _fingerprint(seed: int, samples: list[Sample]) -> str:
    digest = hashlib.sha256(str(seed).encode())
    for sample in samples:
        digest.update(prompt_hash(sample.prompt).encode())
    return digest.hexdigest()[:16]


def _read_jsonl(config: JsonlConfig, name: str) -> Iterator[Sample]:
    try:
        with config.path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    where = f"{config.path}:{number}"
                    yield _parse_line(line, f"{name}/{number}", where)
    except OSError as error:
        raise DataError(f"{config.path}: {error.strerror}. Correct the path of {name!r}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{config.path}: not UTF-8 ({error}). Convert the file") from error


def _parse_line(line: str, identity: str, where: str) -> Sample:
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not JSON: {error}. Write one JSON object a line") from error
    if not isinstance(fields, dict) or "prompt" not in fields:
        raise DataError(f"{where}: not a JSON object with a field 'prompt'")
    prompt = _parse_prompt(fields.pop("prompt"), where)
    answer = fields.pop("answer", None)
    if isinstance(answer, bool) or not isinstance(answer, str | int | float | None):
        raise DataError(f"{where}: 'answer' must be a text or a number, not {answer!r}")
    text = answer if answer is None else str(answer)
    return Sample(identity, prompt, text, group=identity, metadata=fields)


def _parse_prompt(value: object, where: str) -> Prompt:
    if isinstance(value, str) and value.strip():
        return value
    if isinstance(value, list) and value:
        return tuple(_parse_message(message, where) for message in value)
    raise DataError(f"{where}: 'prompt' must be a text or a list of messages, and not empty")


def _parse_message(value: object, where: str) -> Message:
    match value:
        case {"role": str(role), "content": str(content), **more} if not more:
            return Message(role, content)
    raise DataError(
        f"{where}: a message of 'prompt' must be an object with the texts 'role' and 'content' "
        f"and nothing else, not {value!r}"
    )


def _read_reasoning_gym(config: ReasoningGymConfig, name: str) -> Iterator[Sample]:
    try:
        import reasoning_gym
    except ImportError as error:
        raise CapabilityMissing(
            f"data set {name!r} needs reasoning-gym: pip install reasoning-gym"
        ) from error
    try:
        items = reasoning_gym.create_dataset(
            config.task, size=config.size, seed=config.seed, **config.arguments
        )
    except (TypeError, ValueError, AssertionError) as error:
        raise DataError(
            f"data set {name!r}: reasoning-gym refuses task {config.task!r} with "
            f"{config.arguments}: {error}. Correct task or arguments"
        ) from error
    for index in range(config.size):
        item = items[index]
        fields = {"question": item["question"], **item["metadata"]}
        if config.strip_blanks:
            fields = {key: "".join(str(value).split()) for key, value in fields.items()}
        try:
            prompt = config.prompt.format_map(fields)
        except (KeyError, IndexError, ValueError, AttributeError) as error:
            raise DataError(
                f"data set {name!r}: the template {config.prompt!r} can't be filled in for "
                f"{config.task!r} item {index} ({error!r}). It may use {sorted(fields)}"
            ) from error
        identity = f"{name}/{index}"
        metadata = {"task": config.task, "entry": item}
        yield Sample(identity, prompt, str(item["answer"]), group=identity, metadata=metadata)
