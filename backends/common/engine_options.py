"""Check the ``engine`` object of a model spec, and compute digests of the files that it names."""

from __future__ import annotations

import hashlib
import itertools
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from .errors import InputError
from .json_files import exists
from .message_text import nearest, printable, shortened

MOST_FILES = 1_000
"""Largest number of files in a folder that an option names, such as a draft model."""
SAMPLE = 1 << 20
"""Bytes that are read at the beginning of a file that an option names; of a larger file, size and
time are also part of the digest."""
OBJECTS = ("model_type", "dict_type", "model_attributes_type")
"""Pydantic's types of errors for a value that is not an object."""
TAGS = ("str", "list[any]", "list[str]", "dict[str,any]")
"""Parts of a path in pydantic's errors that name a type instead of a key, if an option may have
several types."""
WRITTEN = ("offload_folder", "download_dir")
"""Options that name a folder for output."""
NAMES_PATHS = re.compile(
    r"(path|file|filename|folder|dir|model|tokenizer|adapter)s?$", re.IGNORECASE
)
"""Ends of the names of options and variables whose values are paths."""
HAS_SUFFIX = re.compile(r"[^.]\.[A-Za-z]\w*$")
"""A name of a file: ``weights.json``, but not ``1.5``."""
Model = TypeVar("Model", bound=BaseModel)


class EngineOptions(BaseModel):
    """Base of the options of an engine."""

    model_config = ConfigDict(extra="forbid")


def parse_options(model: type[Model], options: Mapping[str, Any]) -> Model:
    """Parse the options as an object of ``model``; InputError with one line about the first wrong
    option.
    """
    try:
        return model.model_validate(dict(options))
    except ValidationError as error:
        raise InputError(f"engine.{describe(error, model.model_fields)}") from None


def describe(error: ValidationError, known: Iterable[str]) -> str:
    """``key: fault`` for the first error of a pydantic validation, on one line."""
    errors = error.errors(include_url=False)
    unknown = [each for each in errors if each["type"] == "extra_forbidden"]
    first = (
        errors[0] if errors[0]["type"] != "missing" else (*unknown, errors[0])[0]
    )  # misspelled keys first
    steps = [str(step) for step in first["loc"] if step not in TAGS]
    key = shortened(printable(".".join(steps))) or "(whole object)"
    if first["type"] == "extra_forbidden":
        return f"{key}: unknown key{nearest(str(first['loc'][-1]), known)}"
    if first["type"] == "missing":
        return f"{key}: missing"
    message = printable(first["msg"].removeprefix("Value error, "))
    message = "must be a JSON object" if first["type"] in OBJECTS else message
    given = "" if isinstance(first["input"], dict) else f" (got {shortened(repr(first['input']))})"
    return f"{key}: {message[0].lower()}{message[1:]}{given}"


def check_names(given: Iterable[str], known: Iterable[str], owner: str) -> None:
    """InputError for the first option that ``owner`` does not have."""
    names = set(known)
    for name in given:
        if name not in names:
            raise InputError(
                f"engine.{printable(name)}: {owner} has no such argument{nearest(name, names)}"
            )


def named_files(options: Mapping[str, Any]) -> dict[str, str]:
    """Path -> digest of the content, for every local file and folder that the value of an option
    names.

    InputError for a folder of more than ``MOST_FILES`` files.
    """
    return {name: content_of(Path(name)) for name in sorted(set(paths_in(options))) if exists(name)}


def paths_in(value: Any, key: str = "") -> Iterator[str]:
    """All strings in the value of the option ``key`` that are meant as paths, except folders for
    output.
    """
    if isinstance(value, str):
        if is_meant_as_path(value, key):
            yield value
    elif isinstance(value, Mapping):
        for name, each in value.items():
            if name not in WRITTEN:
                yield from paths_in(each, str(name))
    elif isinstance(value, Iterable):
        for each in value:
            yield from paths_in(each, key)


def is_meant_as_path(value: str, key: str) -> bool:
    """True if the value of an option ``key`` can be a path.

    Other values, such as ``fp8``, are words of the engine, even if the current folder has a file of
    that name.
    """
    has_separator = os.sep in value
    return bool(has_separator or NAMES_PATHS.search(key) or HAS_SUFFIX.search(value))


def strings_in(value: Any) -> Iterator[str]:
    """All strings in the value of an option, except names of folders for output."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from strings_in([each for name, each in value.items() if name not in WRITTEN])
    elif isinstance(value, Iterable):
        yield from itertools.chain.from_iterable(map(strings_in, value))


def content_of(path: Path) -> str:
    """Hex digest of a file, or of all files of a folder and their names."""
    digest = hashlib.sha256()
    files = sorted(itertools.islice(path.rglob("*"), MOST_FILES + 1)) if path.is_dir() else [path]
    if len(files) > MOST_FILES:
        raise InputError(
            f"engine: {printable(path)}: a folder of more than {MOST_FILES:,} files; name another one"
        )
    for file in filter(Path.is_file, files):
        stat = file.stat()
        times = f"{stat.st_size} {stat.st_mtime_ns}" if stat.st_size > SAMPLE else ""
        digest.update(os.fsencode(file.relative_to(path)) + f"\0{times}\0".encode())
        with file.open("rb") as stream:
            digest.update(hashlib.sha256(stream.read(SAMPLE)).digest())
    return digest.hexdigest()
