"""Per-token scores in the store: parquet, one row a scored token, and the facts of the run beside it as JSON.

Columns: ``row`` (window), ``position`` (of the scored token in its window), ``token_id``, ``logprob`` (nats, float32).
Any statistic can be made from them later without running a model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
from numpy.typing import NDArray

from backends.base import InputError, ModelError, TokenScores, Window
from backends.messages import one_line
from eval.store import Store

SCHEMA = pa.schema([("row", pa.int32()), ("position", pa.int32()), ("token_id", pa.int32()), ("logprob", pa.float32())])


@dataclass(frozen=True)
class StoredScores:
    """A model's scores: ``logprob`` float32 [N] over all rows, and the facts of the run that made them."""

    logprob: NDArray[np.float32]
    rows: int
    facts: dict[str, Any]


def save(
    store: Store, key: str, windows: Sequence[Window], scored: Mapping[int, TokenScores], facts: Mapping[str, Any]
) -> None:
    """Write the scores and then the facts, whose presence says that both are whole.

    ModelError if a window is missing or a position of it was not scored.
    """
    tables = []
    for window in windows:
        scores = scored.get(window.row)
        if scores is None or len(scores.logprob) != window.n_scored:
            found = "none" if scores is None else str(len(scores.logprob))
            raise ModelError(f"row {window.row}: {found} of {window.n_scored} positions were scored")
        positions = np.arange(window.score_from, len(window.token_ids), dtype=np.int32)
        columns = [
            np.full_like(positions, window.row),
            positions,
            window.token_ids[window.score_from :],
            scores.logprob,
        ]
        tables.append(pa.table([pa.array(column) for column in columns], schema=SCHEMA))
    with store.write("scores", key, ".parquet") as file:
        parquet.write_table(pa.concat_tables(tables), file)
    with store.write("scores", key, ".json") as file:
        file.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def load(store: Store, key: str) -> StoredScores | None:
    """The scores under ``key``, or None; InputError that names the file if it is damaged."""
    facts_file, scores_file = store.path("scores", key, ".json"), store.path("scores", key, ".parquet")
    if not facts_file.is_file():
        return None
    try:
        facts = json.loads(facts_file.read_text(encoding="utf-8"))
        facts = {name: facts[name] for name in ("provenance", "load_seconds", "score_seconds")}
        table = parquet.read_table(scores_file, columns=["row", "logprob"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{scores_file}: damaged: {one_line(error)}; delete it or run with -cc") from None
    return StoredScores(table["logprob"].to_numpy(), len(table["row"].unique()), facts)


def expected_load(store: Store, engine: str) -> float | None:
    """Seconds that this engine's last load took with this store, for the ETA; None the first time."""
    for file in sorted((store.root / "scores").glob("*.json"), key=lambda file: file.stat().st_mtime, reverse=True):
        with suppress(OSError, ValueError, KeyError, TypeError):  # an estimate must not stop a run
            facts = json.loads(file.read_text(encoding="utf-8"))
            if facts["provenance"]["engine"] == engine:
                return float(facts["load_seconds"])
    return None
