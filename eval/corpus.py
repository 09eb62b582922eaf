"""Data sets -> text.  Upstream's twelve names, any other hub or local data set, and local text files.

Rows of a data set: the non-blank ones, joined by a blank line.  A local ``.txt`` file is taken whole, as it is: the
same corpus read both ways tokenizes differently, so say which one a number belongs to.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backends.base import InputError
from backends.names import nearest
from eval.progress import Progress
from eval.specs import DataSpec

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
    "ptb": Source("ptb_text_only", "penn_treebank", column="sentence", display="PTB"),
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
        data_files=spec.dataset_data_files or known.data_files,
    )


def identity(spec: DataSpec) -> dict[str, Any]:
    """What the text depends on, as JSON types: the content of a local file, the coordinates of a data set."""
    if spec.dataset == "text":
        file = text_file(spec)
        return {"sha256": hashlib.sha256(file.read_bytes()).hexdigest(), "column": spec.text_column, "suffix": file.suffix,
                "rows": row_limit(spec)}  # fmt: skip
    return {**vars(source_of(spec)), "rows": row_limit(spec), "revision": spec.revision}


def text_file(spec: DataSpec) -> Path:
    """The local file of dataset "text"; InputError if there is none."""
    file = Path(spec.locate(spec.path or ""))
    if not file.is_file():
        raise InputError(f"path: {file}: no such file")
    return file


def row_limit(spec: DataSpec) -> int:
    """How many rows of the data set are wanted; 0: all."""
    return spec.max_text_rows or spec.max_dataset_rows or 0


def load_text(spec: DataSpec, progress: Progress) -> str:
    """The evaluation text of a data spec; InputError with the reason if it cannot be had."""
    if spec.dataset == "text" and text_file(spec).suffix not in (".jsonl", ".parquet"):
        file = text_file(spec)
        try:
            return file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise InputError(f"path: {file}: not UTF-8 text: {error}") from None
    rows = local_rows(spec) if spec.dataset == "text" else hub_rows(spec)
    texts = []
    with progress.phase(f"reading {display_name(spec)}", unit="rows", total=row_limit(spec) or None) as phase:
        for number, row in enumerate(rows, 1):
            if isinstance(row, str) and row.strip():
                texts.append(row)
            phase.advance()
            if number == row_limit(spec):
                break
    if not texts:
        raise InputError(f"dataset {spec.dataset!r}: no text in its rows")
    return "\n\n".join(texts)


def local_rows(spec: DataSpec) -> Iterator[Any]:
    """The text column of a local .jsonl or .parquet file, row by row."""
    file, column = text_file(spec), spec.text_column or "text"
    if file.suffix == ".parquet":
        import pyarrow.parquet as parquet

        try:
            table = parquet.ParquetFile(file)
        except (OSError, ValueError) as error:
            raise InputError(f"path: {file}: not a parquet file: {error}") from None
        check_column(column, table.schema_arrow.names, str(file))
        for batch in table.iter_batches(columns=[column]):
            yield from batch.column(0).to_pylist()
        return
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
    """The text column of a data set, row by row; streamed where only its first rows are wanted."""
    import datasets

    source = source_of(spec)
    datasets.disable_progress_bars()
    first = FIRST_ROWS.fullmatch(source.split)
    limit = int(first["rows"]) if first else 0
    try:
        rows = datasets.load_dataset(
            source.path, source.name, split=first["split"] if first else source.split, data_files=source.data_files,
            revision=spec.revision, streaming=bool(first or row_limit(spec)),
        )  # fmt: skip
        names = list(rows.column_names or [])
    except Exception as error:  # datasets, fsspec, pyarrow and the hub client each raise their own
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        hint = nearest(spec.dataset, SOURCES)
        raise InputError(f"dataset {spec.dataset!r}: cannot load {source.path}: {reason}{hint}") from None
    if names:
        check_column(source.column, names, f"dataset {spec.dataset!r}")
    yield from (row[source.column] for row in (rows.take(limit) if limit else rows))


def check_column(column: str, names: Iterable[str], where: str) -> None:
    """InputError unless ``column`` is one of ``names``."""
    known = list(names)
    if column not in known:
        raise InputError(f"{where}: no text column {column!r}; there are: {', '.join(known)}")
