"""The rows of a run: what models and texts they are of, and how token scores become one."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from compare_q import backends
from compare_q.backends.base import PlannedModel
from compare_q.backends.common.errors import CompareQError, ModelError
from compare_q.backends.common.messages import one_line
from compare_q.backends.reference import store
from compare_q.backends.scoring import segments
from compare_q.eval.common.progress import Progress
from compare_q.eval.results import ModelResult
from compare_q.eval.run import token_scores
from compare_q.eval.run.config import RunConfig
from compare_q.eval.run.reference import Reference
from compare_q.eval.run.token_scores import StoredScores
from compare_q.eval.stats import answers, estimates
from compare_q.eval.text.windows import EvalData

TAG_DIGITS = 16


@dataclass(frozen=True)
class Work:
    """One model and one text that it scores.

    Attributes:
        name: the text's name; empty for the only text.
        key: the key of the scores.
        reference: what the model is compared with, or the reference that it is; None without one.
        records: the model is the reference, and its store is needed.
        reads_store: the model is the reference, and its store is read or extended if it exists.
    """

    model: PlannedModel
    name: str
    text: EvalData
    key: str
    reference: Reference | None
    records: bool = False
    reads_store: bool = False

    @property
    def title(self) -> str:
        """The model's label, with the text's name if there are several."""
        return f"{self.model.label} on {self.name}" if self.name else self.model.label

    @property
    def tag(self) -> str:
        """The tag of the segments (``backends/scoring/segments.py``)."""
        return tag_of(self.model, self.reference)

    @property
    def lacks_windows(self) -> bool:
        """True if the reference must run although its scores may be complete, because its store lacks windows."""
        return self.records and self.reference is not None and not self.reference.has(len(self.text.windows))


def tag_of(model: PlannedModel, against: Reference | None) -> str:
    """Return the tag of a model's scores: the reference's key, or ``ALONE`` for scores that depend on no reference.

    These are the reference's own, and those of an engine that cannot be compared.
    """
    compares = backends.engine_class(model.engine).capabilities.compares
    if against is None or model.is_reference or not compares:
        return segments.ALONE
    return against.key[:TAG_DIGITS] + (segments.DIVERGENCES_SUFFIX if against.divergences else "")


class Rows:
    """The rows of a run and the references of its texts, by the texts' names; threads add them."""

    def __init__(self, config: RunConfig, models: Sequence[PlannedModel], texts: Mapping[str, EvalData]) -> None:
        first = sorted(models, key=lambda model: not model.is_reference)
        self.config, self.places = config, {model.label: place for place, model in enumerate(first)}
        self.has_reference = any(model.is_reference for model in models)
        self.by_text: dict[str, dict[str, ModelResult]] = {name: {} for name in texts}
        self.references: dict[str, Reference | None] = dict.fromkeys(texts)
        self.scored: list[Work] = []
        self.cleared: set[str] = set()
        self.lock, self.adding = threading.Lock(), threading.Lock()

    def numbered(self, title: str, model: PlannedModel) -> str:
        """Return the title of a model's progress bar, with the model's number."""
        count = len(self.places)
        return f"{title} (model {self.places[model.label] + 1} of {count})" if count > 1 else title

    def from_cache(self, work: Work, progress: Progress | None = None, *, cached: bool = True) -> bool:
        """Add the row of a work whose scores are complete; return False if they are not.

        ``progress``: given by whoever holds the lock; damaged files are then deleted, and reported there.  ``cached``:
        an earlier run has made them.
        """
        if work.lacks_windows:
            return False
        try:
            stored = token_scores.load(self.config.cache, work.key, work.tag, work.text.windows, progress)
            if stored is not None:
                self.add(work, stored, cached=cached)
        except Exception as error:
            self.fail(work.model, [work.name], error)
            return True
        return stored is not None

    def add_scored(self) -> None:
        """Add the rows of works that were ``scored``; one that is interrupted here stays among them."""
        with self.adding:
            while self.scored:
                work = self.scored[0]
                if not self.from_cache(work, self.config.progress, cached=False):
                    folder = self.config.cache.path("scores", work.key, "")
                    self.fail(work.model, [work.name], ModelError(f"{folder}: vanished while the run went on"))
                self.scored.remove(work)

    def add(self, work: Work, stored: StoredScores, *, cached: bool = False) -> None:
        """Add the row of a work from its scores."""
        row = of_scores(work, stored, has_reference=self.has_reference, from_cache=cached)
        if work.model.is_reference:
            self.references[work.name] = work.reference
        self.put(work.name, row)

    def put(self, name: str, row: ModelResult) -> None:
        """Add a row of a text."""
        with self.lock:
            self.by_text[name][row.label] = row
        self.config.on_row(name, row)

    def fail(self, model: PlannedModel, names: Sequence[str], error: Exception) -> None:
        """Add a row with the error for each of these texts, so that one failure does not affect the other rows."""
        reason = str(error) if isinstance(error, CompareQError) else f"{type(error).__name__}: {one_line(error)}"
        if self.config.verbose and not isinstance(error, CompareQError):  # a bug, in compare_q or in an engine
            traceback.print_exception(error)
        for name in names:
            self.config.progress.say(f"{model.label}{name and f' on {name}'}: failed")
            self.put(name, row_of(model, error=reason))

    @contextmanager
    def failing(self, model: PlannedModel, name: str, then: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Turn an error of the block into the model's row of this text, after a call of ``then``."""
        try:
            yield
        except Exception as error:
            then()
            self.fail(model, [name], error)

    def forget(self, work: Work) -> None:
        """Delete what the cache has of a work, whose locks are held; once, as two texts may share a key.

        A store that another run reads is kept.
        """
        cache, found = self.config.cache, work.reference
        if work.key not in self.cleared:
            self.cleared.add(work.key)
            cache.clear("scores", work.key)
        if work.model.is_reference and found is not None:
            if found.key in cache.used_by_runs(others=True):
                self.config.progress.say(f"{found.path}: kept, because another run uses this reference")
            else:
                store.discard(found.path)


def row_of(model: PlannedModel, **fields: Any) -> ModelResult:
    """Return the row of a model with what its spec says, and these fields."""
    return ModelResult.of(
        model.label, model.engine, spec=model.spec, spec_sha256=model.spec_sha256, reference=model.is_reference,
        **fields,
    )  # fmt: skip


def of_scores(work: Work, stored: StoredScores, *, has_reference: bool, from_cache: bool) -> ModelResult:
    """Return the row of a model on a text; ModelError if none of its scores is finite."""
    model, text, record = work.model, work.text, stored.run_record
    index, size = text.text_index(stored.window, stored.position), text.text_size
    found = estimates.summarize(
        stored.columns, index, stored.position, None if size is None else (size.n_bytes, size.n_words),
        text.begins(stored.window),
    )  # fmt: skip
    if not found.ppl.tokens:
        raise ModelError(f"no perplexity: none of {len(stored.token_id)} positions is finite")
    if text.is_spread:
        sampled = estimates.sampled(stored.columns, stored.window, text.starts, text.available)
        found = replace(found, sampled=sampled)
    elif text.answers is not None:
        found = replace(found, answers=answers.summarize(stored.columns, stored.window, text.answers.requests))
    overrides = {name: model.spec.get(f"override_{name}") for name in ("bpw_layer", "bpw_head", "vram_bits")}
    given: dict[str, Any] = {name: value for name, value in overrides.items() if value is not None}
    storage = replace(backends.files_of(model).storage(), file_bytes=file_bytes(model), **given)
    notes = (*notes_of(work, stored, has_reference=has_reference), *record["provenance"].get("notes", ()))
    speed: dict[str, Any] = {"tokens_per_second": None} if record.get("shared_gpu") else {}
    return row_of(
        model, storage=storage, estimates=found, windows=len(text.windows), timing=stored.timing,
        load_seconds=record["load_seconds"], score_seconds=record["score_seconds"], provenance=record["provenance"],
        notes=notes, scores_key=f"{work.key}/{work.tag}", from_cache=from_cache, **speed,
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
    if work.reference is None or model.is_reference:
        if has_reference and not model.is_reference:
            yield "no KLD: the reference failed"
        return
    if "kld" not in stored.columns:
        more = ", nor what --divergences asks for" if work.reference.divergences else ""
        yield f"no KLD{more}: this engine gives no more than the real tokens' log-probabilities"
        return
    entries = stored.run_record["reference"]["vocab_size"]
    size = stored.run_record["reference"]["model_vocab_size"]
    if size not in (None, entries):
        yield f"of {size} and {entries} logits, only those that both have count"
