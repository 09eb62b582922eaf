"""Token scores of one model: read from segments in the cache, made into a row of the results, written as parquet.

The parquet file has one row per scored token, with the columns ``window``, ``position`` (of the scored token in its
window), ``token_id``, ``logprob``, and every other field of ``TokenScores`` that the engine and the reference computed.
Columns that they did not compute are absent.  The other columns have no nulls, and NaN stays NaN.  All other statistics
can be computed from these columns later, without running a model.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compare_q import backends
from compare_q.backends.base import PlannedModel, Window
from compare_q.backends.common import storage
from compare_q.backends.common.errors import InputError, ModelError
from compare_q.backends.common.messages import amount, one_line
from compare_q.backends.scoring import segments
from compare_q.eval.common.cache import Cache
from compare_q.eval.common.files import replacing
from compare_q.eval.common.progress import Progress
from compare_q.eval.results import ModelResult, Timing
from compare_q.eval.run.memory import memory_of
from compare_q.eval.run.reference import Reference
from compare_q.eval.run.row import fields_of
from compare_q.eval.stats import estimates
from compare_q.eval.text.windows import EvalData

INDEX = ("window", "position", "token_id")
FIRST = ("started", "score_began", "first_window")
LAST = ("loaded", "last_window")
"""Times that every run records; with replicas, the earliest counts in ``FIRST``, and the latest in ``LAST``."""


@dataclass
class Work:
    """One model and one text that it scores."""

    model: PlannedModel
    name: str  # the text's name; empty for the only text
    text: EvalData
    key: str  # of the scores, as ``tag`` (``backends/scoring/segments.py``)
    tag: str
    reference: Reference | None  # what the model is compared with
    store: Reference | None = None  # the reference that the model is
    needs_store: bool = False  # the store is read, made or extended, since scores that depend on it are missing
    stored: StoredScores | None = None  # of the windows, once they are complete and read
    unkept: str = ""  # why the store could not be made; its scores are kept

    @property
    def title(self) -> str:
        """The model's label, with the text's name if there are several."""
        return f"{self.model.label} on {self.name}" if self.name else self.model.label

    @property
    def lacks_windows(self) -> bool:
        """True if the reference must run although its scores may be complete, because its store lacks windows."""
        no_store = self.store is not None and not self.store.has(len(self.text.windows))
        return self.needs_store and no_store and not self.unkept


@dataclass(frozen=True)
class StoredScores:
    """A model's scores over all N scored tokens, and the record of the run that made them."""

    columns: dict[str, NDArray[Any]]  # name -> float32 (nats) or bool: ``logprob``, and every other stored score
    window: NDArray[np.int32]  # of each scored token, as in the next two fields
    position: NDArray[np.int32]  # in the window
    token_id: NDArray[np.int32]
    run_record: dict[str, Any]  # provenance, load_seconds, score_seconds, reference or None; shared_gpu: by whom
    sessions: int = 1  # how many runs of the model the windows came from
    replicas: int = 1  # how many workers shared the windows of the last of these runs
    timing: Timing | None = None  # times of the steps of this run


def load(
    cache: Cache, key: str, tag: str, windows: Sequence[Window], progress: Progress | None = None
) -> StoredScores | None:
    """Return the scores of these windows; None if one is missing, for example because its file is damaged.

    With ``progress``, which needs the lock of the scores, damaged files are deleted and reported.  ModelError if some
    windows have a score that others do not have.
    """
    folder = cache.path("scores", key, "")
    loaded = segments.load(folder, tag, windows)
    records, seconds = loaded.records, dict[str, float]()
    if progress is not None:
        for file in loaded.damaged:
            progress.say(f"{file}: damaged; what it held is made again")
        storage.delete(loaded.damaged)
        if count := segments.foreign(folder):
            progress.say(f"{folder}: {amount(count, 'file')} of other scores, or of an older compare_q: not used")
    if not records or len(loaded.scores) < len(windows):
        return None
    for session, taken in loaded.sessions.items():  # the replicas of a run have a session each: the run's, "-", number
        run = session.partition("-")[0]
        seconds[run] = max(seconds.get(run, 0.0), taken)
    known = [session for session in reversed(loaded.sessions) if session in records] or sorted(records)
    record, run = records[known[0]], known[0].partition("-")[0]
    last = [records[session] for session in known if session.partition("-")[0] == run]
    # A warning about some windows must be shown, although the run that scored the others did not report it.
    notes = dict.fromkeys(note for each in known for note in records[each]["provenance"].get("notes", ()))
    run_record = {
        "provenance": {**record["known"], **record["provenance"], **({"notes": [*notes]} if notes else {})},
        "load_seconds": record["load_seconds"],
        "score_seconds": sum(seconds.values()),
        "reference": None if tag == segments.ALONE else record["reference"],
    }
    if shared := [found for each in known if (found := records[each].get("shared_gpu"))]:
        run_record["shared_gpu"] = shared[0]
    try:
        columns = segments.joined([(window, loaded.scores[window.index]) for window in windows])
    except ModelError as error:
        raise ModelError(f"{error}; run with -cc") from None
    return StoredScores(
        columns,
        np.repeat(np.array([each.index for each in windows], np.int32), [each.n_scored for each in windows]),
        np.concatenate([each.positions for each in windows]),
        np.concatenate([each.targets for each in windows]),
        run_record, len(seconds), len(last), timing_of([each.get("moments", {}) for each in last]),
    )  # fmt: skip


def of_row(cache: Cache, scores_key: str, windows: Sequence[Window]) -> StoredScores | None:
    """Return the scores that a row of the table was made from, by the row's ``scores_key``; None without any."""
    key, _, tag = scores_key.partition("/")
    return load(cache, key, tag, windows) if tag else None


def timing_of(found: Sequence[Mapping[str, Any]]) -> Timing | None:
    """Return the timing of a run from the moments in the records of its replicas; None if a record lacks some.

    A run begins with the first of its replicas, and ends with the last one.  No moment is before an earlier one, even
    if replicas overlap or the clock was set back.
    """
    if not found or any(not each.keys() >= {*FIRST, *LAST} for each in found):
        return None
    moments = {name: min(float(each[name]) for each in found) for name in FIRST}
    moments |= {name: max(float(each[name]) for each in found) for name in LAST}
    if all(each["started"] == each["loaded"] for each in found):  # loaded for a text before this one
        moments["started"] = moments["loaded"]
    if all(each.get("closed") is not None for each in found):
        moments["closed"] = max(float(each["closed"]) for each in found)
    names = [each.name for each in fields(Timing) if each.name in moments]
    return Timing(**dict(zip(names, itertools.accumulate((moments[name] for name in names), max), strict=True)))


def write_parquet(stored: StoredScores, target: Path) -> None:
    """Write the scores as a parquet file, whole or not at all; InputError in one line if that fails."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    index = {name: getattr(stored, name) for name in INDEX}
    try:
        with replacing(target) as part, part.open("wb") as stream:  # pyarrow opens no name that is not UTF-8
            parquet.write_table(pa.table({**index, **stored.columns}), stream)
    except OSError as error:
        raise InputError(f"{target}: the scores could not be written: {one_line(error)}") from None


def row_of(model: PlannedModel, **fields: Any) -> ModelResult:
    """Return the row of a model with the facts of its spec, and these fields."""
    return ModelResult.of(
        model.label, model.engine, spec=model.spec, spec_sha256=model.spec_sha256, reference=model.is_reference,
        **fields,
    )  # fmt: skip


def of_scores(work: Work, stored: StoredScores, *, has_reference: bool, from_cache: bool) -> ModelResult:
    """Return the row of a model on a text; ModelError if none of its scores is finite."""
    model, text, record = work.model, work.text, stored.run_record
    index, begins = text.text_index(stored.window, stored.position), text.begins(stored.window)
    found = estimates.summarize(stored.columns, index, stored.position, text.text_size, begins)
    if not found.ppl.tokens:
        raise ModelError(f"no perplexity: none of {len(stored.token_id)} positions is finite")
    if text.is_spread:
        found = replace(found, sampled=estimates.sampled(stored.columns, stored.window, text.starts, text.available))
    overrides = {name: model.spec.get(f"override_{name}") for name in ("bpw_layer", "bpw_head", "vram_bits")}
    given: dict[str, Any] = {name: value for name, value in overrides.items() if value is not None}
    size_on_disk = replace(backends.files_of(model).storage(), file_bytes=file_bytes(model), **given)
    notes = (*notes_of(work, stored, has_reference=has_reference), *record["provenance"].get("notes", ()))
    speed: dict[str, Any] = {"tokens_per_second": None} if record.get("shared_gpu") else {}
    memory = memory_of(model, size_on_disk, record["provenance"])
    return row_of(
        model, storage=size_on_disk, memory=memory, **fields_of(found), windows=len(text.windows), timing=stored.timing,
        load_seconds=record["load_seconds"], score_seconds=record["score_seconds"], provenance=record["provenance"],
        notes=notes, scores_key=f"{work.key}/{work.tag}", from_cache=from_cache, **speed,
        scores_digest=hashlib.sha256(stored.columns["logprob"].tobytes()).hexdigest(),
    )  # fmt: skip


def file_bytes(model: PlannedModel) -> int | None:
    """Return the size of the weight files on disk in bytes; None if they are not here (a server, or deleted since)."""
    try:
        return sum(file.stat().st_size for file in backends.files_of(model).weight_files()) or None
    except OSError:
        return None


def notes_of(work: Work, stored: StoredScores, *, has_reference: bool) -> Iterator[str]:
    """Yield notes on replicas, on runs whose batches and so whose rounding differ, and on why there is no KLD."""
    model, decode = work.model, work.model.decode
    asked, count = model.spec.get("replicas", 1), stored.replicas
    if max(asked, count) > 1:
        fewer = f", not by {asked}: there were no more GPUs, or no more windows"
        yield f"scored by {count} replicas{fewer if count < asked else ''}"
    batches = decode.batch > 1 if decode else backends.engine_class(model.engine).capabilities.batches
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
