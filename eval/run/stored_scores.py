"""Token scores of one model: read from segments in the cache, and written as parquet.

The parquet file has one row per scored token, with the columns ``text`` (its name, if there are
several), ``window``, ``position`` (of the scored token in its window), ``token_id``, ``logprob``,
and every other field of ``TokenScores`` that the engine and the reference computed.  Columns that
they did not compute are absent, and so is ``kld_kind`` if the KLD is exact.  The other columns have
no nulls, and NaN stays NaN.  All other statistics can be computed from these columns later, without
running a model.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...backends.base import KldKind, Window
from ...backends.common import storage
from ...backends.common.errors import InputError, ModelError
from ...backends.common.message_text import amount, one_line
from ...backends.scoring import segments
from ...backends.scoring.segments import Loaded
from ..common.cache import Cache
from ..common.output_files import replacing
from ..common.progress import Progress
from ..results import Timing
from ..stats.kld_kinds import kind_of_mean
from ..stats.uncertainty import BlockAssignment, assign_blocks
from ..text.eval_data import EvalData

INDEX_COLUMNS = ("window", "position", "token_id")
MIXED_KINDS = (
    "its KLD is a bound in some windows and an estimate in others, whose mean is neither; score "
    "these texts in separate runs"
)
FIRST = ("started", "score_began", "first_window")
"""Moments that every run records; with replicas, the earliest one counts."""
LAST = ("loaded", "last_window")
"""Moments that every run records; with replicas, the latest one counts."""


@dataclass(frozen=True)
class StoredScores:
    """A model's scores over all N scored tokens, and the record of the run that made them."""

    # Name -> float32 (nats) or bool [N]: ``logprob``, and every other stored score.
    columns: dict[str, NDArray[Any]]
    # Of each scored token, as the next two fields.
    window: NDArray[np.int32]
    # In the window.
    position: NDArray[np.int32]
    token_id: NDArray[np.int32]
    # provenance, load_seconds, score_seconds, reference or None; shared_gpu: by whom; no_kld: why
    # the KLD of the windows is left out.
    run_record: dict[str, Any]
    # How many runs of the model the windows came from.
    sessions: int = 1
    # How many workers shared the windows of the last of these runs.
    replicas: int = 1
    # Times of the steps of this run.
    timing: Timing | None = None
    # Of the mean of ``kld``.
    kld_kind: KldKind = "exact"


@dataclass(frozen=True)
class Lookup:
    """The part of a model's scores that the cache has."""

    # Of all windows; None if one is missing.
    scores: StoredScores | None
    # Digests of the windows that must be scored.
    missing: frozenset[str]


def look_up(
    cache: Cache,
    key: str,
    tag: str,
    data: EvalData,
    recordings: Mapping[str, str],
    progress: Progress | None = None,
) -> Lookup:
    """Look up the scores of the run's windows, which are stored under a key and a tag.

    ``recordings``: which numbers of the reference the windows are compared with.  With
    ``progress``, which needs a claim on the windows, damaged files are deleted and reported.
    ModelError if some windows have a score that others do not have.
    """
    folder = cache.path("scores", key, "")
    if progress is None:
        # Headers are read faster than content.
        missing = data.digests - segments.committed(folder, tag, recordings)
        if missing:
            return Lookup(None, missing)
    loaded = segments.load(folder, tag, data.distinct, recordings)
    if progress is not None:
        report_damage(folder, loaded, progress)
    missing = data.digests - loaded.scores.keys()
    usable_sessions = []
    for session in reversed(loaded.sessions):
        if has_record(loaded, session, tag):
            usable_sessions.append(session)
    if not missing and not usable_sessions:
        # A worker was killed before it could write what ran.
        missing = frozenset([data.windows[-1].digest])
    if missing:
        return Lookup(None, missing)
    for file in loaded.used:
        # The cache's limit deletes files that were not used for long.
        with suppress(OSError):
            os.utime(file)
    return Lookup(assembled(loaded, tag, usable_sessions, data.windows), frozenset())


def report_damage(folder: Path, loaded: Loaded, progress: Progress) -> None:
    """Delete and report damaged files, and report those that belong to other scores."""
    for file in loaded.damaged:
        progress.say(f"{file}: damaged; what it held is made again")
    storage.delete(loaded.damaged)
    count = segments.n_foreign_segments(folder)
    if count:
        files = amount(count, "file")
        progress.say(f"{folder}: {files} of other scores, or of an older compare_q: not used")


def has_record(loaded: Loaded, session: str, tag: str) -> bool:
    """Return True if a session has a record of the kernels that ran.

    With the reference, if the scores are compared.
    """
    record = loaded.records.get(session)
    if record is None:
        return False
    return tag == segments.ALONE or record["reference"] is not None


def assembled(
    loaded: Loaded, tag: str, usable_sessions: Sequence[str], windows: Sequence[Window]
) -> StoredScores:
    """Return the scores of all windows in their order, with what their sessions recorded.

    ``usable_sessions``: those with a record, the last one first: the row states what ran in it.
    ModelError if only some windows have a column, such as the KLD.
    """
    seconds = seconds_of_runs(loaded.sessions)
    records = [loaded.records[session] for session in usable_sessions]
    last_run = run_of(usable_sessions[0])
    moments_of_replicas = []
    for session, record in zip(usable_sessions, records, strict=True):
        if run_of(session) == last_run:
            moments_of_replicas.append(record.get("moments", {}))
    run_record = joined_record(records, tag)
    run_record["score_seconds"] = sum(seconds.values())
    try:
        columns = segments.joined([(window, loaded.scores[window.digest]) for window in windows])
    except ModelError as error:
        raise ModelError(f"{error}; run with -cc") from None
    kld_kind = kind_of_mean({scores.kld_kind for scores in loaded.scores.values()})
    if kld_kind is None:
        del columns["kld"]
        run_record["no_kld"] = MIXED_KINDS
    numbers = np.array([window.index for window in windows], np.int32)
    return StoredScores(
        columns=columns,
        window=np.repeat(numbers, [window.n_scored for window in windows]),
        position=np.concatenate([window.positions for window in windows]),
        token_id=np.concatenate([window.targets for window in windows]),
        run_record=run_record,
        sessions=len(seconds),
        replicas=len(moments_of_replicas),
        timing=timing_of(moments_of_replicas),
        kld_kind=kld_kind or "exact",
    )


def run_of(session: str) -> str:
    """Return the run of a session: each replica of a run has a session, named run-number."""
    return session.partition("-")[0]


def seconds_of_runs(sessions: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of each run, which are those of its slowest replica.

    ``sessions``: the seconds of each session.
    """
    seconds: dict[str, float] = {}
    for session, seconds_of_session in sessions.items():
        run = run_of(session)
        seconds[run] = max(seconds.get(run, 0.0), seconds_of_session)
    return seconds


def joined_record(records: Sequence[Mapping[str, Any]], tag: str) -> dict[str, Any]:
    """Return the record of a model's scores from those of its sessions, the last one first."""
    last_record = records[0]
    provenance = {**last_record["known"], **last_record["provenance"]}
    # A warning about some windows must be shown, although the run that scored the others did not
    # report it.
    notes: dict[str, None] = {}
    for record in records:
        notes.update(dict.fromkeys(record["provenance"].get("notes", ())))
    if notes:
        provenance["notes"] = list(notes)
    joined = {
        "provenance": provenance,
        "load_seconds": last_record["load_seconds"],
        "reference": None,
    }
    if tag != segments.ALONE:
        joined["reference"] = last_record["reference"]
    for record in records:
        if record.get("shared_gpu"):
            joined["shared_gpu"] = record["shared_gpu"]
            break
    return joined


def scores_of_row(cache: Cache, scores_key: str, data: EvalData) -> StoredScores | None:
    """Return the scores that a row of the table was made from; None without any.

    ``scores_key``: of the row.
    """
    key, _, tag = scores_key.partition("/")
    if not tag:
        return None
    return look_up(cache, key, tag, data, {}).scores


def timing_of(moments_of_replicas: Sequence[Mapping[str, Any]]) -> Timing | None:
    """Return the timing of a run from the moments in the records of its replicas.

    None if a record lacks some.  A run begins with the first of its replicas, and ends with the
    last one.  No moment is before an earlier one, even if replicas overlap or the clock was set
    back.
    """
    if not moments_of_replicas:
        return None
    for moments in moments_of_replicas:
        if not moments.keys() >= {*FIRST, *LAST}:
            return None
    of_run = {}
    for name in FIRST:
        of_run[name] = min(float(moments[name]) for moments in moments_of_replicas)
    for name in LAST:
        of_run[name] = max(float(moments[name]) for moments in moments_of_replicas)
    # The model was loaded for a text before this one.
    if all(moments["started"] == moments["loaded"] for moments in moments_of_replicas):
        of_run["started"] = of_run["loaded"]
    if all(moments.get("closed") is not None for moments in moments_of_replicas):
        of_run["closed"] = max(float(moments["closed"]) for moments in moments_of_replicas)
    in_order: dict[str, float] = {}
    latest: float | None = None
    for field in fields(Timing):
        if field.name not in of_run:
            continue
        moment = of_run[field.name]
        if latest is not None:
            moment = max(latest, moment)
        in_order[field.name] = moment
        latest = moment
    return Timing(**in_order)


def index_of(scores: StoredScores, data: EvalData) -> dict[str, Any]:
    """Return the columns [N] that locate the token of each score.

    The text's name is one of them only if there are several texts.
    """
    index: dict[str, Any] = {}
    if len(data.texts) > 1:
        names = np.array([text.name for text in data.texts], dtype=object)
        index["text"] = names[data.text_of[scores.window]]
    for name in INDEX_COLUMNS:
        index[name] = getattr(scores, name)
    return index


def columns_by_token(scores: StoredScores, data: EvalData) -> dict[str, Any]:
    """Return all columns [N]: those of ``index_of``, and the scores.

    ``kld_kind`` is one of them only if the KLD is not exact.
    """
    columns = {**index_of(scores, data), **scores.columns}
    if scores.kld_kind != "exact":
        columns["kld_kind"] = np.full(len(scores.window), scores.kld_kind, dtype=object)
    return columns


def write_parquet(scores: StoredScores, data: EvalData, target: Path) -> None:
    """Write the scores as a parquet file, completely or not at all; InputError if that fails."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    try:
        # As a stream, because pyarrow opens no name that is not UTF-8.
        with replacing(target) as part, part.open("wb") as stream:
            table = pa.table(columns_by_token(scores, data))
            parquet.write_table(table, stream)
    except OSError as error:
        raise InputError(f"{target}: the scores could not be written: {one_line(error)}") from None


def block_assignment(data: EvalData, scores: StoredScores) -> BlockAssignment:
    """Return the blocks of the scored tokens, for errors; no block spans two texts."""
    index = data.text_index(scores.window, scores.position)
    begins = data.begins(scores.window, scores.position)
    text = None
    if len(data.texts) > 1:
        text = data.text_of[scores.window]
    return assign_blocks(index, begins, text)
