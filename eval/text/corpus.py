"""Read the text of a data set of the hub (``eval/text/hub_datasets.py``) or of a local file.

The non-blank rows of a data set are joined by a blank line.  GPTQ's windows keep the blank rows;
for lm-eval's windows each row is a document.  A local text file is read whole, and every line end
becomes a newline, except for llama.cpp's windows.  The same corpus has different tokens as rows and
as a file, so results must report the source.
"""

from __future__ import annotations

import glob
import hashlib
import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ...backends.common.errors import InputError
from ...backends.common.json_files import (
    exists,
    is_file,
    is_folder,
    open_regular,
    parsed,
    read_bytes,
)
from ...backends.common.message_text import one_line, printable, redacted, shortened, unicode
from ..common.progress import Progress
from ..specs import spec_files
from ..specs.spec_types import DataSpec, texts_in
from . import hub_datasets
from .hub_datasets import SOURCES, row_limit, source_of
from .slice_names import refuse_ambiguous

TABLES = (".jsonl", ".parquet")
MESSAGES = ("messages", "conversations")
"""Columns that may hold conversations."""
CONVERSATIONS = '; conversations are read with "dataset": "chat" (docs/chat.md)'
BATCH_ROWS = 64
"""Number of rows of a parquet file that are read at a time."""


def display_name(spec: DataSpec) -> str:
    """Return the name of the data for titles."""
    named = spec.dataset_path if spec.is_chat else None
    fallback = Path(spec.path).stem if spec.path else named or spec.dataset
    source = SOURCES.get(spec.dataset.lower())
    return str(
        redacted(unicode(spec.dataset_display_name or (source.display if source else fallback)))
    )


def names_of(specs: Sequence[DataSpec]) -> list[str]:
    """Return a unique name for each text of a run: its label, or the name of the data.

    If two texts without a label have the same name, the second is called ``name (2)``.
    InputError if a name already means something else (``eval/text/slice_names.py``).
    """
    labels = [spec.label for spec in specs if spec.label is not None]
    others = iter(
        spec_files.numbered([display_name(spec) for spec in specs if spec.label is None], labels)
    )
    different = [next(others) if spec.label is None else spec.label for spec in specs]
    refuse_ambiguous(specs, different)
    return different


def method_notes(spec: DataSpec) -> list[str]:
    """Return a note on whether the text is a raw file or joined rows, if the other kind is usual
    for the method.
    """
    raw = spec.path is not None and Path(spec.path).suffix.lower() not in TABLES
    if spec.method == "gptq" and not spec.is_chat:
        rows = "the rows of data sets joined with blank lines"
        return [
            f"method gptq on a raw file; published GPTQ numbers are of {rows}"
            if raw
            else f"method gptq on {rows}"
        ]
    if spec.method == "llamacpp" and not raw:
        return [
            "method llamacpp on joined rows; published numbers of llama-perplexity are of raw files"
        ]
    return []


def identity(spec: DataSpec) -> dict[str, Any]:
    """Return everything the text depends on, as JSON types: digests of local files, or a place on
    the hub.
    """
    if spec.path is None:
        return {
            **redacted(vars(source_of(spec))),
            "files": digests(paths_of(spec)),
            "rows": row_limit(spec),
        }
    file, rows = text_file(spec), row_limit(spec)
    return {
        "files": [file_digest(file)],
        "column": spec.text_column,
        "suffix": file.suffix,
        "rows": rows,
    }


def paths_of(spec: DataSpec) -> list[Path]:
    """Return the files and folders on this machine that the text is read from."""
    if spec.path is not None:
        return [Path(spec.locate(spec.path))]
    source = source_of(spec)
    return [Path(source.path), *files_in(texts_in(source.data_files), [source.path])]


def files_in(names: Iterable[str], folders: Iterable[str]) -> list[Path]:
    """Return the files on this machine that match ``names`` (with wildcards), and all files in
    ``folders``.
    """
    named = [Path(match) for name in names for match in glob.iglob(name, recursive=True)]
    held = [
        file for folder in folders if is_folder(Path(folder)) for file in Path(folder).rglob("*")
    ]
    return sorted(file for file in named + held if is_file(file))


def digests(files: Iterable[Path]) -> dict[str, str]:
    """Return path -> SHA-256; paths count, because ``datasets`` derives splits and the order of
    rows from them.
    """
    return {str(file): file_digest(file) for file in files if is_file(file)}


def file_digest(file: Path) -> str:
    """Return the SHA-256 of a file's content; InputError if it cannot be opened."""
    with open_regular(file) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def text_file(spec: DataSpec) -> Path:
    """Return the local file of a text or of conversations; InputError if it is missing or of an
    unsupported type.
    """
    file = Path(spec.locate(spec.path or ""))
    if not is_file(file):
        what = "not a regular file" if exists(file) else "no such file"
        raise InputError(f"path: {printable(file)}: {what}")
    suffix = file.suffix.lower()
    if spec.is_chat and suffix not in TABLES:
        raise InputError(f"path: {file}: conversations are read from .jsonl and .parquet files")
    if not spec.is_chat and suffix in (".json", ".csv", ".tsv"):
        raise InputError(
            f"path: {file}: {suffix} is not read as text; give .jsonl, .parquet or plain text"
        )
    if not spec.is_chat and suffix not in TABLES and (spec.text_column or row_limit(spec)):
        raise InputError(
            f"path: {file}: a plain text file has no rows: leave text_column and max_text_rows out"
        )
    return file


def is_here(spec: DataSpec) -> bool:
    """Return True if the text is in local files, so that nothing is downloaded."""
    return spec.path is not None or source_of(spec).is_local


def load_texts(spec: DataSpec, progress: Progress) -> list[str]:
    """Return the texts of a data spec, which are tokenized one by one: lm-eval's documents, or a
    single text.

    A document is a whole file, or a row of a data set that is a string.  Blank rows are documents
    too: lm-eval counts an empty row as a word, and scores the tokens of a blank row.
    """
    if spec.path is not None and (file := text_file(spec)).suffix.lower() not in TABLES:
        text = whole_file(file, raw=spec.method == "llamacpp")
    else:
        rows = load_rows(spec, progress)
        if spec.method == "lm_eval":
            return rows
        text = "\n\n".join(row for row in rows if row.strip() or spec.method == "gptq")
    return [text.removesuffix("\n") if spec.method == "llamacpp" else text]


def load_rows(spec: DataSpec, progress: Progress) -> list[str]:
    """Return the rows of a data set that are strings; InputError if all of them are blank."""
    values = [next(iter(row.values())) for _, row in records(spec, progress)]
    texts = [value for value in values if isinstance(value, str)]
    if not any(text.strip() for text in texts):
        hint = CONVERSATIONS if any(isinstance(value, list) for value in values) else ""
        raise InputError(f"dataset {spec.dataset!r}: no text in its rows{hint}")
    return texts


def whole_file(file: Path, *, raw: bool = False) -> str:
    """Read a plain text file; line ends become newlines unless ``raw``.  A byte order mark is kept.

    Without this a copy with Windows line ends would have other tokens and another perplexity.
    llama-perplexity (on Linux) keeps the line ends.
    """
    try:
        text = read_bytes(file, sys.maxsize).decode()
    except UnicodeDecodeError as error:
        bad = f"{error.reason} at byte {error.start:,}"
        raise InputError(
            f"path: {printable(file)}: not UTF-8 text: {bad}; save it as plain text in UTF-8"
        ) from None
    if not text.strip():
        raise InputError(f"path: {printable(file)}: no text in it")
    return text if raw else text.replace("\r\n", "\n").replace("\r", "\n")


def records(spec: DataSpec, progress: Progress) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (the row's name in errors, its columns of ``columns``) for the rows of a data set or a
    local file.
    """
    limit = row_limit(spec)
    with progress.phase(f"reading {display_name(spec)}", unit="rows", total=limit or None) as phase:
        if spec.path is None:
            rows = hub_datasets.hub_records(spec)
        else:
            file = text_file(spec)
            rows = (
                parquet_records(spec, file)
                if file.suffix.lower() == ".parquet"
                else jsonl_records(file)
            )
        for where, row in itertools.islice(rows, limit or None):
            yield where, {key: row[key] for key in columns(spec, row, where)}
            phase.advance()


def columns(spec: DataSpec, names: Iterable[str], where: str) -> list[str]:
    """Return the column of the text, or of the messages and ``tools`` where there is such a column.

    Raises InputError unless it is one of ``names``.
    """
    known = list(names)
    plain = spec.text_column or ("text" if spec.path is not None else source_of(spec).column)
    wanted = MESSAGES if spec.is_chat and not spec.text_column else (plain,)
    if not (found := [name for name in wanted if name in known]):
        there = f"there are: {shortened(printable(', '.join(known)))}"
        if spec.is_chat:
            raise InputError(
                f"{where}: no key {' or '.join(wanted)}; {there}; name it in text_column"
            )
        hint = CONVERSATIONS if {*MESSAGES, "conversation"} & set(known) else ""
        raise InputError(f"{where}: no text column {plain!r}; {there}{hint}")
    return [found[0], *(["tools"] if spec.is_chat and "tools" in known else [])]


def parquet_records(spec: DataSpec, file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (the row's name in errors, its columns of ``columns``) for the rows of a parquet file."""
    import pyarrow.parquet as parquet

    name = f"path: {printable(file)}"
    try:
        table = parquet.ParquetFile(file)
        batches = table.iter_batches(
            BATCH_ROWS, columns=columns(spec, table.schema_arrow.names, name)
        )
        for number, row in enumerate((row for batch in batches for row in batch.to_pylist()), 1):
            yield f"{name}: row {number}", row
    except InputError:
        raise
    except Exception as error:  # pyarrow raises its own, and Python's, for a file that is damaged
        raise InputError(f"{name}: not a parquet file: {one_line(error)}") from None


def jsonl_records(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (the line's name in errors, its object) for the non-blank lines of a JSON lines file."""
    with open_regular(file) as lines:
        for number, line in enumerate(lines, 1):
            where = f"path: {printable(file)}: line {number}"
            if line.strip():
                row = parsed(line, where, strict=False)
                if not isinstance(row, dict):
                    raise InputError(f"{where}: must be a JSON object")
                yield where, row
