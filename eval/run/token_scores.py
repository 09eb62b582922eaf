"""Token scores in the cache: parquet, a row for each scored token, and the record of the run beside it as JSON.

Columns: ``window``, ``position`` (of the scored token in its window), ``token_id``, ``logprob``, and every other
field of ``TokenScores``, under its name, that the engine and the reference gave.  A column that they did not give is
absent; one that is there has no nulls, and nan is nan.  Any statistic can be made from them later without running a
model.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
from numpy.typing import NDArray

from backends.base import TokenScores, Window
from backends.common.errors import InputError, ModelError
from backends.common.messages import one_line
from eval.common.cache import Cache
from eval.common.files import replacing

INDEX = {"window": pa.int32(), "position": pa.int32(), "token_id": pa.int32()}
SCORES = {
    "logprob": pa.float32(),
    "entropy": pa.float32(),
    "top1_logprob": pa.float32(),
    "top1": pa.bool_(),
    "ref_logprob": pa.float32(),
    "ref_top1_logprob": pa.float32(),
    "kld": pa.float32(),
    "same_top": pa.bool_(),
}
"""The fields of ``TokenScores``: nats, or bool."""


@dataclass(frozen=True)
class StoredScores:
    """A model's scores over all windows, and the record of the run that made them.

    ``columns``: name -> [N], float32 (nats) or bool: ``logprob``, and every other score of ``SCORES`` that was stored.
    ``window`` and ``position``, int32 [N]: the window of a scored token, and the token's place in the window.
    ``run_record`` (JSON types): provenance, load_seconds, score_seconds, and reference (None without one).
    """

    columns: dict[str, NDArray[Any]]
    window: NDArray[np.int32]
    position: NDArray[np.int32]
    run_record: dict[str, Any]

    @property
    def windows(self) -> int:
        """Number of windows."""
        return len(np.unique(self.window))

    @property
    def logprob(self) -> NDArray[np.float32]:
        """Log-probabilities of the real tokens, float32 [N], nats."""
        return self.columns["logprob"]


def save(
    cache: Cache, key: str, windows: Sequence[Window], scored: Mapping[int, TokenScores], run_record: Mapping[str, Any]
) -> None:
    """Write the scores and then the run's record, whose presence says that both files are whole.

    ModelError if a window is missing, if one of its positions was not scored, or if it lacks a column that another
    window has.
    """
    tables: list[pa.Table] = []
    for window in windows:
        table = window_table(window, scored.get(window.index))
        if tables and table.column_names != tables[0].column_names:
            differ = sorted(set(table.column_names) ^ set(tables[0].column_names))
            raise ModelError(f"window {window.index}: some windows have {', '.join(differ)} and others do not")
        tables.append(table)
    with cache.write("scores", key, ".parquet") as file:
        parquet.write_table(pa.concat_tables(tables), file)
    with cache.write("scores", key, ".json") as file:
        file.write_text(json.dumps(run_record, indent=2) + "\n", encoding="utf-8")


def window_table(window: Window, scores: TokenScores | None) -> pa.Table:
    """One window's rows of the file; ModelError if not each of its positions has each score that was given."""
    if scores is None:
        raise ModelError(f"window {window.index}: none of {window.n_scored} positions were scored")
    positions = np.arange(window.score_from, len(window.token_ids), dtype=np.int32)
    columns = {
        "window": np.full_like(positions, window.index),
        "position": positions,
        "token_id": window.token_ids[window.score_from :],
    }
    for name in SCORES:
        column = getattr(scores, name)
        if column is None:
            continue
        if len(column) != window.n_scored:
            what = "" if name == "logprob" else f"{name}: "
            raise ModelError(f"window {window.index}: {what}{len(column)} of {window.n_scored} positions were scored")
        columns[name] = column
    types = INDEX | SCORES
    return pa.table({name: pa.array(column, type=types[name]) for name, column in columns.items()})


def load(cache: Cache, key: str) -> StoredScores | None:
    """The scores under ``key``, or None; InputError that names the file if it is damaged."""
    record_file, scores_file = cache.path("scores", key, ".json"), cache.path("scores", key, ".parquet")
    if not record_file.is_file():
        return None
    try:
        record = json.loads(record_file.read_text(encoding="utf-8"))
        run_record = {name: record[name] for name in ("provenance", "load_seconds", "score_seconds")}
        run_record["reference"] = record.get("reference")
        stored = parquet.read_schema(scores_file).names
        names = [name for name in stored if name in SCORES]
        windows = "row" if "row" in stored else "window"  # compare_q 0.1 and 0.2 called the column "row"
        table = parquet.read_table(scores_file, columns=[windows, "position", *names])
        for name in ("logprob", *names):
            if table[name].type != SCORES[name] or table[name].null_count:
                raise ValueError(f"{name} is not {SCORES[name]} throughout")
        window, position = table[windows].to_numpy(), table["position"].to_numpy()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, pa.ArrowException) as error:
        raise InputError(f"{scores_file}: damaged: {one_line(error)}; delete it or run with -cc") from None
    return StoredScores({name: table[name].to_numpy() for name in names}, window, position, run_record)


def copy(cache: Cache, key: str, target: Path) -> None:
    """Copy the scores under ``key`` to ``target``, whole or not at all; InputError in one line if that fails."""
    try:
        with replacing(target) as part:
            shutil.copyfile(cache.path("scores", key, ".parquet"), part)
    except OSError as error:
        raise InputError(f"{target}: the scores could not be copied: {one_line(error)}") from None


def file_names(labels: Sequence[str]) -> list[str]:
    """A file name without suffix for each label, in order: safe, and no two equal even where case does not count."""
    names: list[str] = []
    for label in labels:
        safe = "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in label)[:50]
        safe = f"_{safe[1:]}" if safe.startswith(".") else safe  # a hidden file
        name, number = safe, 1
        while name.casefold() in (taken.casefold() for taken in names):
            number += 1
            name = f"{safe}-{number}"
        names.append(name)
    return names


def expected_load(cache: Cache, engine: str) -> float | None:
    """Seconds that this engine's last load took with this cache, for the ETA; None the first time."""
    for file in sorted((cache.root / "scores").glob("*.json"), key=lambda file: file.stat().st_mtime, reverse=True):
        with suppress(OSError, ValueError, KeyError, TypeError):  # an estimate must not stop a run
            record = json.loads(file.read_text(encoding="utf-8"))
            if record["provenance"]["engine"] == engine:
                return float(record["load_seconds"])
    return None
