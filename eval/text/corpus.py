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
    parsed_line,
    read_bytes,
)
from ...backends.common.message_text import one_line, printable, redacted, shortened, unicode
from ..common.progress import Progress
from ..specs import spec_files
from ..specs.spec_types import DataSpec, strings_in
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
    return str(redacted(unicode(name_in_spec(spec))))


def name_in_spec(spec: DataSpec) -> str:
    """Return the name of the data, which may be a URL with a password or have odd characters."""
    if spec.dataset_display_name:
        return spec.dataset_display_name
    if spec.is_sampled:
        return f"sampled {name_of_prompts(spec)}"
    source = SOURCES.get(spec.dataset.lower())
    if source is not None:
        return source.display
    if spec.path:
        return Path(spec.path).stem
    if spec.is_chat and spec.dataset_path:
        return spec.dataset_path
    return spec.dataset


def name_of_prompts(spec: DataSpec) -> str:
    """Return the name of the text whose tokens are the prompts of sampled text."""
    if spec.path:
        return Path(spec.path).stem
    name = spec.dataset_path or spec.dataset
    source = SOURCES.get(name.lower())
    if source is not None:
        return source.display
    return name


def names_of(specs: Sequence[DataSpec]) -> list[str]:
    """Return a unique name for each text of a run: its label, or the name of the data.

    If two texts without a label have the same name, the second is called ``name (2)``.
    InputError if a name already means something else (``eval/text/slice_names.py``).
    """
    labels = []
    names_without_label = []
    for spec in specs:
        if spec.label is None:
            names_without_label.append(display_name(spec))
        else:
            labels.append(spec.label)
    unique_names = iter(spec_files.numbered(names_without_label, labels))
    names = []
    for spec in specs:
        if spec.label is None:
            names.append(next(unique_names))
        else:
            names.append(spec.label)
    refuse_ambiguous(specs, names)
    return names


def method_notes(spec: DataSpec) -> list[str]:
    """Return a note on whether a raw file or joined rows were scored; empty for most methods.

    With method gptq there is always one, except for conversations.  With llamacpp there is one for
    joined rows, because published numbers are of raw files.
    """
    is_raw_file = spec.path is not None and Path(spec.path).suffix.lower() not in TABLES
    if spec.method == "gptq" and not spec.is_chat:
        rows = "the rows of data sets joined with blank lines"
        if is_raw_file:
            return [f"method gptq on a raw file; published GPTQ numbers are of {rows}"]
        return [f"method gptq on {rows}"]
    if spec.method == "llamacpp" and not is_raw_file:
        return [
            "method llamacpp on joined rows; published numbers of llama-perplexity are of raw files"
        ]
    return []


def text_identity(spec: DataSpec) -> dict[str, Any]:
    """Return everything the text depends on, as JSON types.

    These are digests of local files, or a place on the hub.  They are part of the tokens' key: a
    renamed field of ``Source`` would change it.
    """
    if spec.path is None:
        return {
            **redacted(vars(source_of(spec))),
            "files": digests(paths_of(spec)),
            "rows": row_limit(spec),
        }
    file = text_file(spec)
    n_rows = row_limit(spec)
    return {
        "files": [file_digest(file)],
        "column": spec.text_column,
        "suffix": file.suffix,
        "rows": n_rows,
    }


def paths_of(spec: DataSpec) -> list[Path]:
    """Return the files and folders on this machine that the text is read from.

    For a data set of the hub the first path is its id, which names nothing on this machine.
    """
    if spec.path is not None:
        return [Path(spec.locate(spec.path))]
    source = source_of(spec)
    return [Path(source.path), *files_in(strings_in(source.data_files), [source.path])]


def files_in(names: Iterable[str], folders: Iterable[str]) -> list[Path]:
    """Return the files on this machine that match ``names``, and all files in ``folders``.

    Names may have wildcards.
    """
    paths: list[Path] = []
    for name in names:
        for match in glob.iglob(name, recursive=True):
            paths.append(Path(match))
    for folder in folders:
        if is_folder(Path(folder)):
            paths += Path(folder).rglob("*")
    return sorted(path for path in paths if is_file(path))


def digests(files: Iterable[Path]) -> dict[str, str]:
    """Return path -> SHA-256.

    Paths count, because ``datasets`` derives splits and the order of rows from them.
    """
    return {str(file): file_digest(file) for file in files if is_file(file)}


def file_digest(file: Path) -> str:
    """Return the SHA-256 of a file's content; InputError if it cannot be opened."""
    with open_regular(file) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def text_file(spec: DataSpec) -> Path:
    """Return the local file of a text or of conversations.

    InputError if it is missing or of an unsupported type.
    """
    file = Path(spec.locate(spec.path or ""))
    if not is_file(file):
        reason = "no such file"
        if exists(file):
            reason = "not a regular file"
        raise InputError(f"path: {printable(file)}: {reason}")
    suffix = file.suffix.lower()
    if spec.is_rollouts:
        return file
    if spec.is_chat:
        if suffix not in TABLES:
            raise InputError(f"path: {file}: conversations are read from .jsonl and .parquet files")
        return file
    if suffix in (".json", ".csv", ".tsv"):
        raise InputError(
            f"path: {file}: {suffix} is not read as text; give .jsonl, .parquet or plain text"
        )
    if suffix not in TABLES and (spec.text_column or row_limit(spec)):
        raise InputError(
            f"path: {file}: a plain text file has no rows: leave text_column and max_text_rows out"
        )
    return file


def is_here(spec: DataSpec) -> bool:
    """Return True if the text is in local files, so that nothing is downloaded."""
    return spec.path is not None or source_of(spec).is_local


def load_texts(spec: DataSpec, progress: Progress) -> list[str]:
    """Return the texts of a data spec, which are tokenized one by one.

    They are lm-eval's documents, or a single text.  A document is a whole file, or a row of a data
    set that is a string.  Blank rows are documents too: lm-eval counts an empty row as a word, and
    scores the tokens of a blank row.
    """
    is_llamacpp = spec.method == "llamacpp"
    if spec.path is not None:
        file = text_file(spec)
        if file.suffix.lower() not in TABLES:
            return [without_last_newline(whole_file(file, raw=is_llamacpp), is_llamacpp)]
    rows = load_rows(spec, progress)
    if spec.method == "lm_eval":
        return rows
    if spec.method != "gptq":
        rows = [row for row in rows if row.strip()]
    return [without_last_newline("\n\n".join(rows), is_llamacpp)]


def without_last_newline(text: str, is_llamacpp: bool) -> str:
    """Return a text as llama-perplexity's ``-f`` reads it: it drops one newline at the end."""
    if is_llamacpp:
        return text.removesuffix("\n")
    return text


def load_rows(spec: DataSpec, progress: Progress) -> list[str]:
    """Return the rows of a data set that are strings; InputError if all of them are blank."""
    texts = []
    hint = ""
    for _, row in records(spec, progress):
        value = next(iter(row.values()))
        if isinstance(value, str):
            texts.append(value)
        elif isinstance(value, list):
            hint = CONVERSATIONS
    if not any(text.strip() for text in texts):
        raise InputError(f"dataset {spec.dataset!r}: no text in its rows{hint}")
    return texts


def whole_file(file: Path, *, raw: bool = False) -> str:
    """Read a plain text file.  Line ends become newlines unless ``raw``.

    Otherwise a copy with Windows line ends would have other tokens and another perplexity;
    llama-perplexity (on Linux) keeps the line ends.  A byte order mark is kept.
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
    if raw:
        return text
    return text.replace("\r\n", "\n").replace("\r", "\n")


def records(spec: DataSpec, progress: Progress) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (name in errors, columns of ``columns``) for each row of a data set or local file."""
    limit = row_limit(spec)
    with progress.phase(f"reading {display_name(spec)}", unit="rows", total=limit or None) as phase:
        for where, row in itertools.islice(all_records(spec), limit or None):
            yield where, {name: row[name] for name in columns(spec, row, where)}
            phase.advance()


def all_records(spec: DataSpec) -> Iterator[tuple[str, dict[str, Any]]]:
    """Return (name in errors, values) for each row, perhaps of columns that are not needed."""
    if spec.path is None:
        return hub_datasets.hub_records(spec)
    file = text_file(spec)
    if file.suffix.lower() == ".parquet":
        return parquet_records(spec, file)
    return jsonl_records(file)


def columns(spec: DataSpec, names: Iterable[str], where: str) -> list[str]:
    """Return the column of the text, or of the messages and ``tools`` where there is such a column.

    Raises InputError unless it is one of ``names``.
    """
    present = list(names)
    if spec.is_chat:
        return conversation_columns(spec, present, where)
    column = text_column(spec)
    if column in present:
        return [column]
    hint = ""
    if {*MESSAGES, "conversation"} & set(present):
        hint = CONVERSATIONS
    columns_in_words = shortened(printable(", ".join(present)))
    raise InputError(f"{where}: no text column {column!r}; there are: {columns_in_words}{hint}")


def text_column(spec: DataSpec) -> str:
    """Return the name of the column with the text."""
    if spec.text_column:
        return spec.text_column
    if spec.path is not None:
        return "text"
    return source_of(spec).column


def conversation_columns(spec: DataSpec, present: Sequence[str], where: str) -> list[str]:
    """Return the column of the messages, and ``tools`` if it is present."""
    candidates: Sequence[str] = MESSAGES
    if spec.text_column:
        candidates = [spec.text_column]
    column = next((name for name in candidates if name in present), None)
    if column is None:
        columns_in_words = shortened(printable(", ".join(present)))
        raise InputError(
            f"{where}: no key {' or '.join(candidates)}; there are: {columns_in_words}; "
            "name it in text_column"
        )
    if "tools" in present:
        return [column, "tools"]
    return [column]


def parquet_records(spec: DataSpec, file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (name in errors, columns of ``columns``) for each row of a parquet file."""
    import pyarrow.parquet as parquet

    name = f"path: {printable(file)}"
    try:
        table = parquet.ParquetFile(file)
        names = columns(spec, table.schema_arrow.names, name)
        number = 0
        for batch in table.iter_batches(BATCH_ROWS, columns=names):
            for row in batch.to_pylist():
                number += 1
                yield f"{name}: row {number}", row
    except InputError:  # of ``columns``
        raise
    except Exception as error:  # pyarrow raises its own, and Python's, for a file that is damaged
        raise InputError(f"{name}: not a parquet file: {one_line(error)}") from None


def jsonl_records(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (name in errors, object) for each line of a JSON lines file that is not blank."""
    with open_regular(file) as lines:
        for number, line in enumerate(lines, 1):
            where = f"path: {printable(file)}: line {number}"
            if line.strip():
                row = parsed_line(line, where, strict=False)
                if not isinstance(row, dict):
                    raise InputError(f"{where}: must be a JSON object")
                yield where, row
