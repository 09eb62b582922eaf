"""Token scores of one model from the segments in the cache, and as parquet: a row for each scored token.

Columns of the parquet file: ``window``, ``position`` (of the scored token in its window), ``token_id``, ``logprob``,
and every other field of ``TokenScores``, under its name, that the engine and the reference gave.  A column that they
did not give is absent; one that is there has no nulls, and nan is nan.  Any statistic can be made from them later
without running a model.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compare_q.backends.base import TokenScores, Window
from compare_q.backends.common import storage
from compare_q.backends.common.errors import InputError, ModelError
from compare_q.backends.common.messages import one_line
from compare_q.backends.scoring import segments
from compare_q.eval.common.cache import Cache
from compare_q.eval.common.files import replacing
from compare_q.eval.common.progress import Progress
from compare_q.eval.results import Timing

INDEX = ("window", "position", "token_id")
SCORES = tuple(segments.COLUMNS)
"""The fields of ``TokenScores``: float32 in nats, or bool."""

FIRST = ("started", "score_began", "first_window")
LAST = ("loaded", "last_window")
"""Moments that every run has: with replicas, the first one's or the last one's."""


@dataclass(frozen=True)
class StoredScores:
    """A model's scores over all windows, and the record of the run that made them.

    ``columns``: name -> [N], float32 (nats) or bool: ``logprob``, and every other score of ``SCORES`` that was stored.
    ``window``, ``position`` and ``token_id``, int32 [N]: the window of a scored token, and its place in the window.
    ``run_record`` (JSON types): provenance, load_seconds, score_seconds, reference (None without one), and shared_gpu
    where other processes used the same GPU.
    ``sessions``: how many runs of the model the windows came from; ``replicas``: how many workers shared the windows of
    the last of them; ``timing``: of that one.
    """

    columns: dict[str, NDArray[Any]]
    window: NDArray[np.int32]
    position: NDArray[np.int32]
    token_id: NDArray[np.int32]
    run_record: dict[str, Any]
    sessions: int = 1
    replicas: int = 1
    timing: Timing | None = None


def load(
    cache: Cache, key: str, tag: str, windows: Sequence[Window], progress: Progress | None = None
) -> StoredScores | None:
    """The scores of these windows; None if one is missing, as a window is whose file is damaged.

    With ``progress``, which whoever has the lock gives, damaged files are removed, which is said.  ModelError if some
    windows have a score that others do not have.
    """
    folder = cache.path("scores", key, "")
    loaded = segments.load(folder, tag, windows)
    records, sessions = loaded.records, loaded.sessions
    if progress is not None:
        for file in loaded.damaged:
            progress.say(f"{file}: damaged; what it held is made again")
        storage.delete(loaded.damaged)
    if not records or len(loaded.scores) < len(windows):
        return None
    scores = [loaded.scores[window.index] for window in windows]
    positions = [each.positions for each in windows]
    known = [session for session in reversed(sessions) if session in records] or sorted(records)
    record = records[known[0]]
    runs: dict[str, list[str]] = {}  # the replicas of a run have a session each, named by the run, a dash and a number
    for session in sessions:
        runs.setdefault(session.partition("-")[0], []).append(session)
    last = [records[session] for session in known if session.partition("-")[0] == known[0].partition("-")[0]]
    # What a reader must know of some windows, who scored the others does not say.
    notes = dict.fromkeys(note for each in known for note in records[each]["provenance"].get("notes", ()))
    run_record = {
        "provenance": {**record["known"], **record["provenance"], **({"notes": [*notes]} if notes else {})},
        "load_seconds": record["load_seconds"],
        "score_seconds": sum(max(sessions[session] for session in together) for together in runs.values()),
        "reference": None if tag == segments.ALONE else record["reference"],
    }
    if shared := [found for each in known if (found := records[each].get("shared_gpu"))]:
        run_record["shared_gpu"] = shared[0]
    return StoredScores(
        joined(scores, windows),
        np.concatenate([np.full_like(each, window.index) for each, window in zip(positions, windows, strict=True)]),
        np.concatenate(positions),
        np.concatenate([window.targets for window in windows]),
        run_record,
        len(runs),
        len(last),
        timing_of([each.get("moments", {}) for each in last]),
    )


def of_row(cache: Cache, scores_key: str, windows: Sequence[Window]) -> StoredScores | None:
    """The scores that a row of the table was made from, by the row's ``scores_key``; None without any."""
    key, _, tag = scores_key.partition("/")
    return load(cache, key, tag, windows) if tag else None


def joined(scores: Sequence[TokenScores], windows: Sequence[Window]) -> dict[str, NDArray[Any]]:
    """Every score that all windows have, one window after the other."""
    columns = {}
    for name in SCORES:
        parts = [getattr(each, name) for each in scores]
        missing = [window.index for window, part in zip(windows, parts, strict=True) if part is None]
        if missing and len(missing) < len(parts):
            raise ModelError(f"window {missing[0]}: has no {name}, which other windows have; run with -cc")
        if not missing:
            columns[name] = np.concatenate(parts)
    return columns


def write_parquet(stored: StoredScores, target: Path) -> None:
    """The scores as a parquet file, whole or not at all; InputError in one line if that fails."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    index = {name: getattr(stored, name) for name in INDEX}
    try:
        with replacing(target) as part, part.open("wb") as stream:  # pyarrow opens no name that is not UTF-8
            parquet.write_table(pa.table({**index, **stored.columns}), stream)
    except OSError as error:
        raise InputError(f"{target}: the scores could not be written: {one_line(error)}") from None


def timing_of(found: Sequence[Mapping[str, Any]]) -> Timing | None:
    """The timing of a run from the moments in the records of its replicas; None if a record lacks some.

    A run begins with the first of its replicas, and ends with the last one.  No moment is before an earlier one, even
    if replicas overlap or the clock was set back.
    """
    if not found or any(name not in moments for moments in found for name in (*FIRST, *LAST)):
        return None
    first, last = (
        {name: pick(float(moments[name]) for moments in found) for name in names}
        for pick, names in ((min, FIRST), (max, LAST))
    )
    if all(moments["started"] == moments["loaded"] for moments in found):  # loaded for a text before this one
        first["started"] = last["loaded"]
    moments = {**first, **last}
    closed = [float(each["closed"]) for each in found if each.get("closed") is not None]
    if len(closed) == len(found):
        moments["closed"] = max(closed)
    names = [each.name for each in fields(Timing) if each.name in moments]
    return Timing(**dict(zip(names, itertools.accumulate((moments[name] for name in names), max), strict=True)))
