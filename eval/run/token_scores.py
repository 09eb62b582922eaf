"""Token scores of one model: read from segments in the cache, made into a row of the results,
written as parquet.

The parquet file has one row per scored token, with the columns ``text`` (its name, if there are
several), ``window``, ``position`` (of the scored token in its window), ``token_id``, ``logprob``,
and every other field of ``TokenScores`` that the engine and the reference computed.  Columns that
they did not compute are absent.  The other columns have no nulls, and NaN stays NaN.  All other
statistics can be computed from these columns later, without running a model.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...backends.base import Window
from ...backends.common import storage
from ...backends.common.errors import InputError, ModelError
from ...backends.common.message_text import amount, one_line
from ...backends.scoring import segments
from ...backends.scoring.segments import Loaded
from ..common.cache import Cache
from ..common.output_files import replacing
from ..common.progress import Progress
from ..results import ModelResult, Timing
from ..stats.row_statistics import statistics_of
from ..stats.spread_windows import SamplingErrors, sampling_errors, sampling_errors_of_texts
from ..stats.uncertainty import BlockAssignment, assign_blocks
from ..text.eval_data import EvalData
from .reference import Reference
from .run_model import RunModel
from .serving_memory import memory_of

INDEX = ("window", "position", "token_id")
FIRST = ("started", "score_began", "first_window")
LAST = ("loaded", "last_window")
"""Times that every run records; with replicas, the earliest counts in ``FIRST``, and the latest in
``LAST``."""


@dataclass
class Work:
    """The scores of one model: where they are, and what they depend on, except the windows."""

    model: RunModel
    key: str  # of the folder of scores, as ``tag`` (``backends/scoring/segments.py``)
    tag: str
    reference: Reference | None  # what the model is compared with
    store: Reference | None = None  # the reference that the model is
    unkept: str = ""  # why its windows could not be recorded; its scores are kept


@dataclass(frozen=True)
class StoredScores:
    """A model's scores over all N scored tokens, and the record of the run that made them."""

    columns: dict[
        str, NDArray[Any]
    ]  # name -> float32 (nats) or bool: ``logprob``, and every other stored score
    window: NDArray[np.int32]  # of each scored token, as in the next two fields
    position: NDArray[np.int32]  # in the window
    token_id: NDArray[np.int32]
    run_record: dict[
        str, Any
    ]  # provenance, load_seconds, score_seconds, reference or None; shared_gpu: by whom
    sessions: int = 1  # how many runs of the model the windows came from
    replicas: int = 1  # how many workers shared the windows of the last of these runs
    timing: Timing | None = None  # times of the steps of this run


@dataclass(frozen=True)
class Lookup:
    """The part of a model's scores that the cache has."""

    stored: StoredScores | None  # of all windows; None if one is missing
    missing: frozenset[str]  # digests of the windows that must be scored


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
    if progress is None:  # headers are read faster than content
        missing = data.digests - segments.committed(folder, tag, recordings)
        if missing:
            return Lookup(None, missing)
    loaded = segments.load(folder, tag, data.distinct, recordings)
    if progress is not None:
        report_damage(folder, loaded, progress)
    missing = data.digests - loaded.scores.keys()
    usable = [session for session in reversed(loaded.sessions) if has_record(loaded, session, tag)]
    if not missing and not usable:  # a worker was killed before it could write what ran
        missing = frozenset([data.windows[-1].digest])
    if missing:
        return Lookup(None, missing)
    for file in loaded.used:
        with suppress(OSError):  # the cache's limit deletes files that were not used for long
            os.utime(file)
    return Lookup(assembled(loaded, tag, usable, data.windows), frozenset())


def report_damage(folder: Path, loaded: Loaded, progress: Progress) -> None:
    """Delete and report damaged files, and report those that belong to other scores."""
    for file in loaded.damaged:
        progress.say(f"{file}: damaged; what it held is made again")
    storage.delete(loaded.damaged)
    count = segments.foreign(folder)
    if count:
        progress.say(
            f"{folder}: {amount(count, 'file')} of other scores, or of an older compare_q: not used"
        )


def has_record(loaded: Loaded, session: str, tag: str) -> bool:
    """Return True if a session has a record of the kernels that ran; with the reference, if the
    scores are compared.
    """
    record = loaded.records.get(session)
    return record is not None and (tag == segments.ALONE or record["reference"] is not None)


def assembled(
    loaded: Loaded, tag: str, usable: Sequence[str], windows: Sequence[Window]
) -> StoredScores:
    """Return the scores of all windows in their order, with what their sessions recorded;
    ModelError.

    ``usable``: the sessions with a record, the last one first; it says what ran.
    """
    seconds = dict[str, float]()
    for (
        session,
        taken,
    ) in (
        loaded.sessions.items()
    ):  # the replicas of a run have a session each: the run's, "-", number
        run = session.partition("-")[0]
        seconds[run] = max(seconds.get(run, 0.0), taken)
    records = [loaded.records[session] for session in usable]
    record = records[0]
    last_run = usable[0].partition("-")[0]
    replicas = [
        loaded.records[session] for session in usable if session.partition("-")[0] == last_run
    ]
    provenance = {**record["known"], **record["provenance"]}
    # A warning about some windows must be shown, although the run that scored the others did not
    # report it.
    notes = dict.fromkeys(note for each in records for note in each["provenance"].get("notes", ()))
    if notes:
        provenance["notes"] = list(notes)
    run_record = {
        "provenance": provenance,
        "load_seconds": record["load_seconds"],
        "score_seconds": sum(seconds.values()),
        "reference": None if tag == segments.ALONE else record["reference"],
    }
    shared = [each["shared_gpu"] for each in records if each.get("shared_gpu")]
    if shared:
        run_record["shared_gpu"] = shared[0]
    try:
        columns = segments.joined([(window, loaded.scores[window.digest]) for window in windows])
    except ModelError as error:
        raise ModelError(f"{error}; run with -cc") from None
    return StoredScores(
        columns=columns,
        window=np.repeat(
            np.array([window.index for window in windows], np.int32),
            [window.n_scored for window in windows],
        ),
        position=np.concatenate([window.positions for window in windows]),
        token_id=np.concatenate([window.targets for window in windows]),
        run_record=run_record,
        sessions=len(seconds),
        replicas=len(replicas),
        timing=timing_of([each.get("moments", {}) for each in replicas]),
    )


def of_row(cache: Cache, scores_key: str, data: EvalData) -> StoredScores | None:
    """Return the scores that a row of the table was made from, by the row's ``scores_key``; None
    without any.
    """
    key, _, tag = scores_key.partition("/")
    return look_up(cache, key, tag, data, {}).stored if tag else None


def timing_of(found: Sequence[Mapping[str, Any]]) -> Timing | None:
    """Return the timing of a run from the moments in the records of its replicas; None if a record
    lacks some.

    A run begins with the first of its replicas, and ends with the last one.  No moment is before an
    earlier one, even if replicas overlap or the clock was set back.
    """
    if not found or any(not each.keys() >= {*FIRST, *LAST} for each in found):
        return None
    moments = {name: min(float(each[name]) for each in found) for name in FIRST}
    moments |= {name: max(float(each[name]) for each in found) for name in LAST}
    if all(
        each["started"] == each["loaded"] for each in found
    ):  # loaded for a text before this one
        moments["started"] = moments["loaded"]
    if all(each.get("closed") is not None for each in found):
        moments["closed"] = max(float(each["closed"]) for each in found)
    names = [each.name for each in fields(Timing) if each.name in moments]
    return Timing(
        **dict(
            zip(names, itertools.accumulate((moments[name] for name in names), max), strict=True)
        )
    )


def index_of(stored: StoredScores, data: EvalData) -> dict[str, Any]:
    """Return the columns [N] that locate the token of each score; the text's name only if there are
    several.
    """
    index = {name: getattr(stored, name) for name in INDEX}
    if len(data.texts) > 1:
        names = np.array([text.name for text in data.texts], dtype=object)
        index = {"text": names[data.text_of[stored.window]], **index}
    return index


def write_parquet(stored: StoredScores, data: EvalData, target: Path) -> None:
    """Write the scores as a parquet file, whole or not at all; InputError in one line if that
    fails.
    """
    import pyarrow as pa
    import pyarrow.parquet as parquet

    try:
        with (
            replacing(target) as part,
            part.open("wb") as stream,
        ):  # pyarrow opens no name that is not UTF-8
            parquet.write_table(pa.table({**index_of(stored, data), **stored.columns}), stream)
    except OSError as error:
        raise InputError(f"{target}: the scores could not be written: {one_line(error)}") from None


def row_of(model: RunModel, **fields: Any) -> ModelResult:
    """Return the row of a model with the facts of its spec, and these fields."""
    return ModelResult.of(
        model.label,
        model.engine,
        spec=model.spec.model_dump(mode="json", exclude_unset=True),
        spec_sha256=model.spec.digest(),
        reference=model.is_reference,
        **fields,
    )


def of_scores(
    work: Work, stored: StoredScores, data: EvalData, *, has_reference: bool, from_cache: bool
) -> ModelResult:
    """Return the row of a model; ModelError if none of its scores is finite."""
    model = work.model
    record = stored.run_record
    statistics = statistics_of(
        stored.columns, places_in(data, stored), stored.position, data.text_size
    )
    if not statistics.tokens:
        why = "; ".join(
            ["", *overflow(model, record["provenance"]), *record["provenance"].get("notes", ())]
        )
        raise ModelError(f"no perplexity: none of {len(stored.token_id)} positions is finite{why}")
    fields_of_scores = statistics.computed()
    errors_of_text = sampled(data, stored)
    if errors_of_text is not None:
        fields_of_scores |= errors_of_text.row_fields
    overrides = {}
    for name in ("bpw_layer", "bpw_head", "vram_bits"):
        value = getattr(model.spec, f"override_{name}")
        if value is not None:
            overrides[name] = value
    size_on_disk = replace(model.files.storage(), file_bytes=file_bytes(model), **overrides)
    notes = (
        *notes_of(work, stored, has_reference=has_reference),
        *record["provenance"].get("notes", ()),
    )
    if statistics.non_finite:
        notes = (*notes, *overflow(model, record["provenance"]))
    speed: dict[str, Any] = {"tokens_per_second": None} if record.get("shared_gpu") else {}
    return row_of(
        model,
        storage=size_on_disk,
        memory=memory_of(model, size_on_disk, record["provenance"]),
        **fields_of_scores,
        windows=len(data.windows),
        timing=stored.timing,
        load_seconds=record["load_seconds"],
        score_seconds=record["score_seconds"],
        provenance=record["provenance"],
        notes=notes,
        scores_key=f"{work.key}/{work.tag}",
        scores_digest=hashlib.sha256(stored.columns["logprob"].tobytes()).hexdigest(),
        from_cache=from_cache,
        **speed,
    )


def overflow(model: RunModel, provenance: Mapping[str, Any]) -> list[str]:
    """Return the probable reason why scores of a model are not finite, and what to do; empty if
    none is known.
    """
    if provenance.get("dtype") != "float16":
        return []
    remedy = ""
    if "dtype" in model.capabilities.arithmetic:
        remedy = ': give "dtype": "bfloat16" in "engine"'
    return [f"it ran in float16, in which numbers above 65,504 overflow{remedy}"]


def row_on(row: ModelResult, stored: StoredScores, data: EvalData) -> ModelResult:
    """Return a row whose statistics are those of one text alone; ``stored``: its scores of this
    text's windows.
    """
    statistics = statistics_of(
        stored.columns, places_in(data, stored), stored.position, data.text_size
    )
    digest = hashlib.sha256(stored.columns["logprob"].tobytes()).hexdigest()
    return row.updated(**statistics.computed(), windows=len(data.windows), scores_digest=digest)


def places_in(data: EvalData, stored: StoredScores) -> BlockAssignment:
    """Return the blocks of the scored tokens, for errors; no block spans two texts."""
    index = data.text_index(stored.window, stored.position)
    begins = data.begins(stored.window, stored.position)
    text = data.text_of[stored.window] if len(data.texts) > 1 else None
    return assign_blocks(index, begins, text)


def sampled(data: EvalData, stored: StoredScores) -> SamplingErrors | None:
    """Return the errors of the means as means of all windows of the texts; None if no text's
    windows are a sample.
    """
    if not any(text.is_spread for text in data.texts):
        return None
    parts = []
    first = 0
    for text in data.texts:
        last = first + len(text.windows)
        inside = (stored.window >= first) & (stored.window < last)
        columns = {name: column[inside] for name, column in stored.columns.items()}
        errors = SamplingErrors(0.0, 0.0)  # the whole text was scored
        if text.is_spread:
            errors = sampling_errors(
                columns, stored.window[inside] - first, text.starts, text.available
            )
        parts.append((errors, int(inside.sum())))
        first = last
    return sampling_errors_of_texts(parts)


def file_bytes(model: RunModel) -> int | None:
    """Return the size of the weight files on disk in bytes; None if they are not here (a server, or
    deleted since).
    """
    try:
        return sum(file.stat().st_size for file in model.files.weight_files()) or None
    except OSError:
        return None


def notes_of(work: Work, stored: StoredScores, *, has_reference: bool) -> Iterator[str]:
    """Yield notes on replicas, on runs whose batches and so whose rounding differ, and on why there
    is no KLD.
    """
    model, decode = work.model, work.model.planned.decode
    asked, count = model.spec.replicas, stored.replicas
    if max(asked, count) > 1:
        fewer = f", not by {asked}: there were no more GPUs, or no more windows"
        yield f"scored by {count} replicas{fewer if count < asked else ''}"
    batches = decode.batch > 1 if decode else model.capabilities.batches
    if stored.sessions > 1 and batches:
        yield f"scored in {stored.sessions} runs: its batches, and so its rounding, differ from those of one run"
    if shared := stored.run_record.get("shared_gpu"):
        yield f"tok/s n/a: while it was scored the GPU was also used by {shared}"
    if work.unkept:
        yield f"no KLD of other models: {work.unkept}"
    if model.is_reference:
        return
    if work.reference is None:
        if has_reference:
            yield "no KLD: the reference failed, or could not be kept"
    elif "kld" not in stored.columns:
        yield "no KLD: this engine gives no more than the real tokens' log-probabilities"
    else:
        found = stored.run_record["reference"]
        entries, size = found["vocab_size"], found["model_vocab_size"]
        if size not in (None, entries):
            yield f"of {size} and {entries} logits, only those that both have count"
