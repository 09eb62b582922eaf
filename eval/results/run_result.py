"""A run as results.json holds it, and the only writer and reader of this file."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator

from ... import __version__
from ...backends.common import json_files, machine
from ...backends.common.engine_options import describe
from ...backends.common.errors import InputError
from ...backends.common.message_text import printable, shortened, unicode
from ..common.output_files import write_text
from ..common.stored import JsonObject, Stored, Text
from ..stats.uncertainty import Count
from .model_result import ModelResult, noise_floor_of

RESULTS_FORMAT = 10
"""Version of the layout of results.json."""
READ_FORMATS = (9, RESULTS_FORMAT)
"""The versions that are read.  Format 9 has no ``kld_kind``: each of its KLDs is exact."""
EMBEDDED = b'<script type="application/json" id="results">'
EMBEDDED_END = b"</script>"
"""The texts before and after the results.json in a report.html."""
NO_RESULTS = "neither a results.json nor a report.html of compare_q"


class UsedText(Stored):
    """Types of those facts about one text that tables and reports use."""

    name: Text = Field(min_length=1)
    spec: dict[str, Any] = Field(default={})
    text_tokens: Count | None = None
    windows: Count = 0
    windows_of_the_text: Count | None = None
    window_length: Count = 0
    scored_tokens: Count = 0
    method: str | None = None
    text_note: str = ""
    notes: list[str] = Field(default=[])


class UsedData(Stored):
    """Types of those facts about the windows that tables and reports use."""

    texts: list[UsedText] = Field(min_length=1)
    windows: Count = 0
    window_length: Count = 0
    scored_tokens: Count = 0
    windows_sha256: str | None = None
    vocabulary_sha256: str | None = None


class UsedReference(Stored):
    """Types of those facts about the reference that tables and plots use."""

    label: str
    key: str | None = None


def check_types(types: type[Stored], values: dict[str, Any]) -> None:
    """Raise ValueError in one line for a value that has another type."""
    try:
        types.model_validate(values)
    except ValidationError as error:
        raise ValueError(describe(error, ())) from None


class RunResult(Stored):
    """A run: its windows, its reference, and a row for each model."""

    format: Literal[10] = 10
    created: str = Field(
        default="", description="date and time of the run; empty until it is written"
    )
    command: tuple[Text, ...] = Field(default=(), description="the command line")
    commit: str | None = Field(default=None, description="commit of the checkout of compare_q")
    versions: dict[str, str] = Field(default={})
    hardware: JsonObject = Field(default={})
    title: Text | None = Field(
        default=None, description="the user's title of report and plots; None: each has its own"
    )
    subtitle: Text = Field(default="", description="what the windows are, for plots")
    data: JsonObject = Field(
        description="facts about each of the ``texts``; digests and numbers of all windows"
    )
    reference: JsonObject | None = Field(
        default=None, description="label, key, identity; None without one"
    )
    models: tuple[ModelResult, ...]

    @field_validator("format", mode="before")
    @classmethod
    def current_format(cls, number: Any) -> Any:
        """Return the number of the format that is written, for each one that is read."""
        if number in READ_FORMATS:
            return RESULTS_FORMAT
        return number

    @field_validator("data")
    @classmethod
    def check_data(cls, data: dict[str, Any]) -> dict[str, Any]:
        check_types(UsedData, data)
        return data

    @field_validator("reference")
    @classmethod
    def check_reference(cls, reference: dict[str, Any] | None) -> dict[str, Any] | None:
        if reference is not None:
            check_types(UsedReference, reference)
        return reference

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels of all models."""
        return tuple(model.label for model in self.models)

    @property
    def texts(self) -> tuple[UsedText, ...]:
        """Facts about each text."""
        return tuple(UsedData.model_validate(self.data).texts)

    @property
    def slices(self) -> tuple[str, ...]:
        """The names of all slices that a row has, in their order."""
        names: dict[str, None] = {}
        for model in self.models:
            names |= dict.fromkeys(model.slices)
        return tuple(names)

    @property
    def text_tokens(self) -> int | None:
        """Tokens of all texts together, scored or not; None if that of one text is not known."""
        total = 0
        for text in self.texts:
            if text.text_tokens is None:
                return None
            total += text.text_tokens
        return total

    @property
    def available_windows(self) -> int:
        """Windows that the whole texts would have; of a text without a sample, its scored ones."""
        return sum(text.windows_of_the_text or text.windows for text in self.texts)

    @property
    def is_sample(self) -> bool:
        """True if the windows of a text are a part that is spread over it."""
        return any(text.windows_of_the_text is not None for text in self.texts)

    @property
    def reference_ppl(self) -> float | None:
        """The reference's perplexity, from its own row.

        Without such a row: from the comparison with the model that has most scored tokens.
        """
        candidates = [
            (row.tokens or 0, row.ppl) for row in self.models if row.reference and row.blocks
        ]
        if not candidates:
            candidates = [
                (row.ref_ppl_tokens or 0, row.ref_ppl) for row in self.models if row.is_compared
            ]
        most_tokens = -1
        reference_ppl = None
        for tokens, ppl in candidates:
            if ppl is not None and tokens > most_tokens:
                most_tokens = tokens
                reference_ppl = ppl
        return reference_ppl

    @property
    def noise_floor(self) -> ModelResult | None:
        """The row of ``noise_floor_of``."""
        return noise_floor_of(self.models)

    def with_origin(self, command: Sequence[str]) -> RunResult:
        """Return the run with the date, versions and hardware of now.

        A run that was read from a file is returned unchanged.
        """
        if self.created:
            return self
        return self.updated(**origin(command))

    def masked(self, keeps: Sequence[str]) -> RunResult:
        """Return the run with only the models of these labels; the reference's row stays."""
        models = [model for model in self.models if model.label in keeps or model.reference]
        return self.updated(models=tuple(models))

    def write(self, file: Path) -> None:
        """Write results.json atomically."""
        write_text(file, self.json_text())

    def json_text(self) -> str:
        """Return the content of results.json."""
        return self.model_dump_json(indent=2) + "\n"

    @classmethod
    def read(cls, file: Path) -> RunResult:
        """Return the run of a results.json or a report.html.

        InputError in one line for another file or format, or damage.
        """
        name = printable(file)
        content = json_of(file)
        raw = json_files.parsed(content, name)
        if not isinstance(raw, dict) or "format" not in raw:
            raise InputError(f"{name}: {NO_RESULTS}")
        if raw["format"] not in READ_FORMATS:
            number = shortened(repr(raw["format"]), 20)
            formats = " and ".join(str(known) for known in READ_FORMATS)
            raise InputError(
                f"{name}: results of format {number}, but this compare_q reads formats {formats}; "
                "run compare_q again with -o (token scores in the cache are used)"
            )
        try:
            run = cls.model_validate_json(content)
            check_names(run)
        except ValidationError as error:
            raise InputError(f"{name}: damaged results: {describe(error, ())}") from None
        except ValueError as error:
            raise InputError(f"{name}: damaged results: {error}") from None
        return run


def origin(command: Sequence[str]) -> dict[str, Any]:
    """Return the fields of a run that say when, how and where it was made.

    That is now, by this ``command``, on this machine.
    """
    now = datetime.datetime.now(datetime.UTC)
    hardware = machine.hardware(machine.gpus(), cpu_only=machine.cpu_build_of_torch())
    return {
        "created": now.isoformat(timespec="seconds"),
        "command": tuple(unicode(word) for word in command),
        "commit": machine.commit(),
        "versions": {**machine.versions(), "compare-q": __version__},
        "hardware": hardware | machine.threads(),
    }


def json_of(file: Path) -> bytes:
    """Return the results.json in a file, which may be a report.html; InputError without one."""
    content = json_files.read_bytes(file)
    # First, since a label in a results.json may contain EMBEDDED.
    if content.lstrip().startswith(b"{"):
        return content
    begin = content.find(EMBEDDED)
    end = content.find(EMBEDDED_END, begin)
    if begin < 0 or end < 0:
        raise InputError(f"{printable(file)}: {NO_RESULTS}")
    return content[begin + len(EMBEDDED) : end]


def check_names(run: RunResult) -> None:
    """Raise ValueError unless there are rows, and texts and rows have unique names."""
    if not run.labels:
        raise ValueError("models: there is none")
    names = [text.name for text in run.texts]
    if len(set(names)) < len(names):
        raise ValueError("data.texts: two have one name")
    if len(set(run.labels)) < len(run.labels):
        raise ValueError("models: two have one label")


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of results.json; ``python -m compare_q.eval.results`` writes it."""
    schema = RunResult.model_json_schema(mode="serialization")
    return {"title": "results.json of compare_q", **schema}
