"""Data sets -> text.  Upstream's twelve names, any other hub or local data set, and local text files.

Rows of a data set: the non-blank ones, joined by a blank line; for GPTQ's windows the blank ones too; for lm-eval's
each row is a document.  A local text file is taken whole, every line end read as a newline, but for llama.cpp's windows
as it stands.  The same corpus as rows and as a file tokenizes differently: say which one a number belongs to.
"""

from __future__ import annotations

import glob
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backends.base import InputError
from backends.messages import nearest, one_line
from eval.progress import Progress
from eval.specs import DataSpec

TABLES = (".jsonl", ".parquet")
CHAT_COLUMNS = {"messages", "conversations", "conversation"}
CONVERSATIONS = (
    "; conversations are not read: write each as text to a column of its own, with the tokenizer's "
    "apply_chat_template(..., tokenize=False), and name that column in text_column"
)
FIRST_ROWS = re.compile(r"(?P<split>[\w.-]+)\[:(?P<rows>\d+)\]")


@dataclass(frozen=True)
class Source:
    """Where a data set lies: arguments of ``datasets.load_dataset``, and how it is called in titles."""

    path: str
    name: str | None = None
    split: str = "test"
    column: str = "text"
    display: str = ""
    data_files: Any = None


WIKITEXT2 = Source("wikitext", "wikitext-2-raw-v1", display="wikitext2")
WIKITEXT103 = Source("wikitext", "wikitext-103-raw-v1", display="wiki103")
SOURCES = {
    "wiki2": WIKITEXT2,
    "wikitext2": WIKITEXT2,
    "wiki103": WIKITEXT103,
    "wikitext103": WIKITEXT103,
    # Upstream's ptb_text_only is a loading script, which datasets 4 and later refuse: the hub's parquet copy of it.
    "ptb": Source(
        "parquet", column="sentence", display="PTB",
        data_files={"test": "hf://datasets/ptb-text-only/ptb_text_only@refs/convert/parquet/penn_treebank/test/*.parquet"},
    ),
    "lambada": Source("EleutherAI/lambada_openai", display="lambada"),
    "tinystories": Source("roneneldan/TinyStories", split="validation", display="TinyStories"),
    "c4": Source("allenai/c4", "en", split="validation", display="c4"),
    "openwebtext10k": Source(
        "parquet", split="train", display="openwebtext",
        data_files="hf://datasets/stas/openwebtext-10k@refs/convert/parquet/plain_text/train/*.parquet",
    ),
    "openwebtext": Source("Skylion007/openwebtext", split="train[:1000]", display="openwebtext"),
    "fineweb": Source("HuggingFaceFW/fineweb", "sample-10BT", split="train[:1000]", display="fineweb"),
    "fineweb-edu": Source("HuggingFaceFW/fineweb-edu", "sample-10BT", split="train[:1000]", display="fineweb-edu"),
}  # fmt: skip


def display_name(spec: DataSpec) -> str:
    """Name of the data in titles."""
    source = SOURCES.get(spec.dataset.lower())
    fallback = Path(spec.path).stem if spec.path else spec.dataset
    return spec.dataset_display_name or (source.display if source else fallback)


def source_of(spec: DataSpec) -> Source:
    """The known source, with every key that the spec sets in its place."""
    known = SOURCES.get(spec.dataset.lower(), Source(spec.dataset))
    return Source(
        path=spec.locate(spec.dataset_path or known.path),
        name=spec.dataset_name or known.name,
        split=spec.dataset_split or spec.split or known.split,
        column=spec.text_column or known.column,
        display=known.display,
        data_files=map_names(spec.dataset_data_files, spec.locate) or known.data_files,
    )


def map_names(names: Any, change: Callable[[str], str]) -> Any:
    """``change`` applied to each file name in a string, list or mapping, as load_dataset takes them."""
    if isinstance(names, str):
        return change(names)
    if isinstance(names, list):
        return [map_names(name, change) for name in names]
    return {key: map_names(value, change) for key, value in names.items()} if isinstance(names, dict) else names


def identity(spec: DataSpec) -> dict[str, Any]:
    """What the text depends on, as JSON types: the content of local files, the coordinates of a data set."""
    if spec.dataset == "text":
        file = text_file(spec)
        return {
            "files": [file_digest(file)],
            "column": spec.text_column,
            "suffix": file.suffix,
            "rows": row_limit(spec),
        }
    source = source_of(spec)
    names: list[str] = []
    map_names(source.data_files, lambda name: names.append(name) or name)  # type: ignore[func-returns-value]
    local = [Path(match) for name in names for match in sorted(glob.glob(name, recursive=True))]
    if Path(source.path).is_dir():
        local += sorted(Path(source.path).rglob("*"))
    files = [file_digest(file) for file in local if file.is_file()]
    return {**vars(source), "files": files, "rows": row_limit(spec), "revision": spec.revision}


def is_here(spec: DataSpec) -> bool:
    """Whether the text lies in local files, so that nothing has to be downloaded."""
    if spec.dataset == "text":
        return True
    source = source_of(spec)
    names: list[str] = []
    map_names(source.data_files, lambda name: names.append(name) or name)  # type: ignore[func-returns-value]
    return Path(source.path).exists() or (bool(names) and not any("://" in name for name in names))


def file_digest(file: Path) -> str:
    """SHA-256 of a file's content."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def text_file(spec: DataSpec) -> Path:
    """The local file of dataset "text"; InputError if there is none."""
    file = Path(spec.locate(spec.path or ""))
    if not file.is_file():
        raise InputError(f"path: {file}: no such file")
    suffix = file.suffix.lower()
    if suffix in (".json", ".csv", ".tsv"):
        raise InputError(f"path: {file}: {suffix} is not read as text; give .jsonl, .parquet or plain text")
    if suffix not in TABLES and (spec.text_column or row_limit(spec)):
        raise InputError(f"path: {file}: a plain text file has no rows: leave text_column and max_text_rows out")
    return file


def row_limit(spec: DataSpec) -> int:
    """How many rows of the data set are wanted; 0: all.  ``max_text_rows`` comes first if it is there at all."""
    return (spec.max_text_rows if "max_text_rows" in spec.model_fields_set else spec.max_dataset_rows) or 0


def load_text(spec: DataSpec, progress: Progress) -> str:
    """The evaluation text of a data spec; InputError with the reason if it cannot be had."""
    if is_plain(spec):
        return whole_file(text_file(spec), raw=spec.method == "llamacpp")
    return "\n\n".join(row for row in load_rows(spec, progress) if row.strip() or spec.method == "gptq")


def load_documents(spec: DataSpec, progress: Progress) -> list[str]:
    """The texts that are documents of their own: a file, or every row of a data set that holds text, if only blanks.

    lm-eval counts an empty row as a word, and scores the tokens of a blank one.
    """
    return [whole_file(text_file(spec))] if is_plain(spec) else load_rows(spec, progress)


def is_plain(spec: DataSpec) -> bool:
    """Whether the text is a plain file and has no rows."""
    return spec.dataset == "text" and text_file(spec).suffix.lower() not in TABLES


def load_rows(spec: DataSpec, progress: Progress) -> list[str]:
    """The rows of a data set that hold text; InputError if all of them are blank."""
    rows = local_rows(spec) if spec.dataset == "text" else hub_rows(spec)
    texts: list[str] = []
    other = None
    with progress.phase(f"reading {display_name(spec)}", unit="rows", total=row_limit(spec) or None) as phase:
        for number, row in enumerate(rows, 1):
            if isinstance(row, str):
                texts.append(row)
            elif row is not None:
                other = row
            phase.advance()
            if number == row_limit(spec):
                break
    if not any(text.strip() for text in texts):
        held = "" if other is None else f"; they hold values of type {type(other).__name__}"
        hint = CONVERSATIONS if isinstance(other, list) else ""
        raise InputError(f"dataset {spec.dataset!r}: no text in its rows{held}{hint}")
    return texts


def whole_file(file: Path, *, raw: bool = False) -> str:
    """A plain text file, every line end read as a newline; ``raw``: as it stands, a byte order mark always stays.

    A copy with Windows line ends would score differently otherwise: WikiText-2's first window of 2048 by SmolLM2-135M
    has PPL 15.20 with newlines and 15.02 with the carriage returns kept.  llama-perplexity (on Linux) keeps them.
    """
    try:
        with file.open(encoding="utf-8", newline="" if raw else None) as stream:
            text = stream.read()
    except UnicodeDecodeError as error:
        raise InputError(f"path: {file}: not UTF-8 text: {error}") from None
    if not text.strip():
        raise InputError(f"path: {file}: no text in it")
    return text


def local_rows(spec: DataSpec) -> Iterator[Any]:
    """The text column of a local .jsonl or .parquet file, row by row."""
    file, column = text_file(spec), spec.text_column or "text"
    try:
        yield from (parquet_rows if file.suffix.lower() == ".parquet" else jsonl_rows)(file, column)
    except UnicodeDecodeError as error:
        raise InputError(f"path: {file}: not UTF-8 text: {error}") from None
    except (OSError, ValueError) as error:
        raise InputError(f"path: {file}: not a {file.suffix[1:]} file: {one_line(error)}") from None


def parquet_rows(file: Path, column: str) -> Iterator[Any]:
    """One column of a parquet file."""
    import pyarrow.parquet as parquet

    table = parquet.ParquetFile(file)
    check_column(column, table.schema_arrow.names, f"path: {file}")
    for batch in table.iter_batches(columns=[column]):
        yield from batch.column(0).to_pylist()


def jsonl_rows(file: Path, column: str) -> Iterator[Any]:
    """One key of each line of a JSON lines file."""
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield jsonl_row(line, column, f"path: {file}: line {number}")


def jsonl_row(line: str, column: str, where: str) -> Any:
    """The ``column`` of one JSON line."""
    try:
        row = json.loads(line)
    except ValueError as error:
        raise InputError(f"{where}: not valid JSON: {error}") from None
    if not isinstance(row, dict):
        raise InputError(f"{where}: must be a JSON object")
    check_column(column, row, where)
    return row[column]


def hub_rows(spec: DataSpec) -> Iterator[Any]:
    """The text column of a data set, row by row; InputError with the library's reason if it cannot be had."""
    source = source_of(spec)
    try:
        yield from open_rows(source, spec.revision, row_limit(spec))
    except InputError:
        raise
    except Exception as error:  # datasets, fsspec, pyarrow and the hub client each raise their own
        hint = "" if spec.dataset.lower() in SOURCES else nearest(spec.dataset, SOURCES)
        raise InputError(f"dataset {spec.dataset!r}: cannot load {source.path}: {one_line(error)}{hint}") from None


def open_rows(source: Source, revision: str | None, limit: int) -> Iterator[Any]:
    """The text column of a source, streamed where only its first rows are wanted.

    A stream cannot be sliced: ``train[:1000]`` is streamed and cut here, any other slice is loaded.
    """
    import datasets

    datasets.disable_progress_bars()
    first = FIRST_ROWS.fullmatch(source.split)
    stream = first is not None or (limit > 0 and "[" not in source.split)
    rows = datasets.load_dataset(
        source.path, source.name, split=first["split"] if first else source.split, data_files=source.data_files,
        revision=revision, streaming=stream,
    )  # fmt: skip
    if rows.column_names:
        check_column(source.column, rows.column_names, f"dataset {source.path!r}")
    for row in itertools.islice(rows, int(first["rows"])) if first else rows:
        check_column(source.column, row, f"dataset {source.path!r}")
        yield row[source.column]


def check_column(column: str, names: Iterable[str], where: str) -> None:
    """InputError unless ``column`` is one of ``names``."""
    known = list(names)
    if column not in known:
        hint = CONVERSATIONS if CHAT_COLUMNS & set(known) else ""
        raise InputError(f"{where}: no text column {column!r}; there are: {', '.join(known)}{hint}")
