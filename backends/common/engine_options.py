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
DIGEST_FIRST_BYTES = 1 << 20
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
UNKNOWN_KEY = ": unknown key"
"""Follows the key in ``describe``; ``spec_files.fault_of`` looks for it to add a hint."""
Model = TypeVar("Model", bound=BaseModel)


class EngineOptions(BaseModel):
    """Base of the options of an engine."""

    model_config = ConfigDict(extra="forbid")


def parse_options(model: type[Model], options: Mapping[str, Any]) -> Model:
    """Return the options as a ``model``; InputError with one line about the first wrong option."""
    try:
        return model.model_validate(dict(options))
    except ValidationError as error:
        raise InputError(f"engine.{describe(error, model.model_fields)}") from None


def describe(error: ValidationError, known: Iterable[str]) -> str:
    """Return ``key: fault`` for the most helpful error of a pydantic validation, on one line.

    ``known``: the keys; the one that is nearest to a misspelled key is suggested.
    """
    errors = error.errors(include_url=False)
    first = errors[0]
    if first["type"] == "missing":
        # A key may be missing because it is misspelled: then report the misspelled key.
        for other in errors:
            if other["type"] == "extra_forbidden":
                first = other
                break
    steps = [str(step) for step in first["loc"] if step not in TAGS]
    key = shortened(printable(".".join(steps))) or "(whole object)"
    if first["type"] == "extra_forbidden":
        return f"{key}{UNKNOWN_KEY}{nearest(str(first['loc'][-1]), known)}"
    if first["type"] == "missing":
        return f"{key}: missing"
    if first["type"] in OBJECTS:
        message = "must be a JSON object"
    else:
        message = printable(first["msg"].removeprefix("Value error, "))
    value = ""
    if not isinstance(first["input"], dict):
        value = f" (got {shortened(repr(first['input']))})"
    return f"{key}: {message[0].lower()}{message[1:]}{value}"


def check_names(names: Iterable[str], known: Iterable[str], owner: str) -> None:
    """InputError for the first option that ``owner`` does not have."""
    known_names = set(known)
    for name in names:
        if name not in known_names:
            hint = nearest(name, known_names)
            raise InputError(f"engine.{printable(name)}: {owner} has no such argument{hint}")


def named_files(options: Mapping[str, Any]) -> dict[str, str]:
    """Return path -> digest of the content, for every local file and folder that options name.

    InputError for a folder of more than ``MOST_FILES`` files.
    """
    digests = {}
    for path in sorted(set(paths_in(options))):
        if exists(path):
            digests[path] = content_of(Path(path))
    return digests


def paths_in(value: Any, key: str = "") -> Iterator[str]:
    """Yield the strings in the value of option ``key`` that are paths, except output folders."""
    if isinstance(value, str):
        if is_meant_as_path(value, key):
            yield value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            if name not in WRITTEN:
                yield from paths_in(item, str(name))
    elif isinstance(value, Iterable):
        for item in value:
            yield from paths_in(item, key)


def is_meant_as_path(value: str, key: str) -> bool:
    """True if the value of an option ``key`` can be a path.

    Other values, such as ``fp8``, are words of the engine, even if the current folder has a file of
    that name.
    """
    has_separator = os.sep in value
    return bool(has_separator or NAMES_PATHS.search(key) or HAS_SUFFIX.search(value))


def strings_in(value: Any) -> Iterator[str]:
    """Yield the strings in the value of an option, except names of folders for output."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            if name not in WRITTEN:
                yield from strings_in(item)
    elif isinstance(value, Iterable):
        for item in value:
            yield from strings_in(item)


def content_of(path: Path) -> str:
    """Return the hex digest of a file, or of all files of a folder and their names."""
    files = [path]
    if path.is_dir():
        files = sorted(itertools.islice(path.rglob("*"), MOST_FILES + 1))
    if len(files) > MOST_FILES:
        raise InputError(
            f"engine: {printable(path)}: a folder of more than {MOST_FILES:,} files; "
            "name another one"
        )
    digest = hashlib.sha256()
    for file in files:
        if not file.is_file():
            continue
        stat = file.stat()
        # Size and time stand for the part of a large file that is not read.
        times = ""
        if stat.st_size > DIGEST_FIRST_BYTES:
            times = f"{stat.st_size} {stat.st_mtime_ns}"
        digest.update(os.fsencode(file.relative_to(path)) + f"\0{times}\0".encode())
        with file.open("rb") as stream:
            digest.update(hashlib.sha256(stream.read(DIGEST_FIRST_BYTES)).digest())
    return digest.hexdigest()
