"""The rows of a run: one per model, with its scores or with the reason why they are missing."""

from __future__ import annotations

import hashlib
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...backends.base import Storage
from ...backends.common.errors import CompareQError, InputError, ModelError, StoppedError
from ...backends.common.message_text import with_class
from ..results import ModelResult, RunResult
from ..stats.row_statistics import RowStatistics, statistics_of
from ..stats.sampled_check import sampling_notes
from ..stats.spread_windows import SamplingErrors, sampling_errors, sampling_errors_of_texts
from ..stats.temperature import scale_note
from ..text.eval_data import EvalData
from . import checkpoint_notes, reference, rollout_row
from .reference import RunReference
from .run_config import RunConfig
from .run_model import RunModel
from .score_target import ScoreTarget
from .serving_memory import memory_of
from .slice_masks import slices_of
from .stored_scores import StoredScores, block_assignment


@dataclass(frozen=True)
class ScoredModel:
    """Result of a model's thread: its complete scores, or the error that its row shows."""

    model: RunModel
    target: ScoreTarget | None = None
    scores: StoredScores | None = None
    # An earlier run has made the scores.
    from_cache: bool = False
    # Why the windows of the reference could not be recorded; its scores are kept.
    store_failure: str = ""
    error: Exception | None = None


class RowList:
    """The rows of a run, and the reference that its models are compared with.

    Only the main thread uses it.  ``reference``: set when the reference's row was made without an
    error, before the first of the other models starts.
    """

    def __init__(self, config: RunConfig, models: Sequence[RunModel], data: EvalData) -> None:
        self.config = config
        self.models = models
        self.data = data
        self.reference_model: RunModel | None = None
        for model in models:
            if model.is_reference and self.reference_model is None:
                self.reference_model = model
        self.rows: dict[str, ModelResult] = {}
        self.reference: RunReference | None = None
        self.reference_scores: StoredScores | None = None

    def add(self, scored: ScoredModel) -> None:
        """Add the row of a model whose thread has ended.

        InputError, which ends the run, if the reference is a pack and failed.
        """
        target = scored.target
        scores = scored.scores
        if target is None or scores is None:
            error = scored.error
            if error is None:
                error = RuntimeError("its thread returned neither scores nor an error")
            self.fail(scored.model, error)
            return
        try:
            row = self.row_of(scored, target, scores)
        except Exception as failure:
            self.fail(target.model, failure)
            return
        if target.store is not None and not scored.store_failure:
            # The store may lack windows that the compared models have scores of: for these the
            # agreed recordings count.  For windows in the store, its recordings of now count.
            recordings = {**target.agreed_recordings, **target.store.recordings(self.data.digests)}
            self.reference = RunReference(target.store, recordings)
        if target.model.is_reference:
            self.reference_scores = scores
        self.put(row)

    def row_of(self, scored: ScoredModel, target: ScoreTarget, scores: StoredScores) -> ModelResult:
        """Return the row of a model with complete scores; ModelError if none of them is finite."""
        model = target.model
        row = row_from_scores(
            target,
            scores,
            self.data,
            has_reference=self.reference_model is not None,
            from_cache=scored.from_cache,
            store_failure=scored.store_failure,
        )
        slices = slices_of(scores, self.data, is_reference=model.is_reference)
        row = row.updated(slices=slices)
        file_notes = checkpoint_notes.notes(row, model, self.reference_model, self.data.tokenizer)
        notes = [*row.notes, *file_notes]
        if model.is_reference:
            notes += sampling_notes(scores.columns, self.data.sampler_logprobs)
        # The reference's row has the note on the temperature of rollouts.
        if not row.is_rollouts:
            notes += self.scale_notes(scores)
        notes += rollout_row.notes_of(row, scores, self.data)
        return row.updated(notes=tuple(notes))

    def scale_notes(self, scores: StoredScores) -> list[str]:
        """Return a note if scores from elsewhere look like the reference's at another temperature.

        Engines that run here give an exact KLD, and compute at temperature 1.
        """
        is_exact = "kld" in scores.columns and scores.kld_kind == "exact"
        if self.reference_scores is None or is_exact:
            return []
        note = scale_note(self.reference_scores.columns, scores.columns["logprob"])
        if not note:
            return []
        return [note]

    def fail(self, model: RunModel, error: Exception) -> None:
        """Add a row with the error, so that one failure does not affect the other rows.

        InputError, which ends the run, if the model is a reference pack, unless it was stopped.
        If another reference fails, the run continues, and the other rows have no KLD but a note.
        """
        is_expected = isinstance(error, CompareQError)
        reason = str(error)
        if not is_expected:
            reason = with_class(error)
        is_pack = model.is_reference and model.files.is_store
        if is_pack and not isinstance(error, StoppedError):
            raise InputError(f"{model.label}: {reason}")
        if self.config.verbose and not is_expected:
            # A bug, in compare_q or in an engine.
            traceback.print_exception(error)
        self.config.progress.say(f"{model.label}: failed")
        self.put(described_row(model, error=reason))

    def put(self, row: ModelResult) -> None:
        """Add a row and report it."""
        self.rows[row.label] = row
        self.config.on_row(row)

    def result(self) -> RunResult:
        """Return the results of the run, in the order of the models.

        A model without a row was not finished.
        """
        rows = []
        for model in self.models:
            row = self.rows.get(model.label)
            if row is None:
                row = described_row(model, error=str(StoppedError()))
            rows.append(row)
        facts = None
        if self.reference is not None:
            facts = reference.as_json(self.reference.store, self.data)
        return RunResult(
            data=self.data.as_json(),
            subtitle=self.data.subtitle,
            models=tuple(rows),
            reference=facts,
        )


def described_row(model: RunModel, **fields: Any) -> ModelResult:
    """Return the row of a model with the facts of its spec, and these fields."""
    return ModelResult.of(
        model.label,
        model.engine,
        # Without the keys that the user did not set.
        spec=model.spec.model_dump(mode="json", exclude_unset=True),
        spec_sha256=model.spec.digest(),
        reference=model.is_reference,
        **fields,
    )


def row_from_scores(
    target: ScoreTarget,
    scores: StoredScores,
    data: EvalData,
    *,
    has_reference: bool,
    from_cache: bool,
    store_failure: str,
) -> ModelResult:
    """Return the row of a model; ModelError if none of its scores is finite."""
    model = target.model
    record = scores.run_record
    provenance = record["provenance"]
    engine_notes = provenance.get("notes", ())
    statistics = statistics_of_scores(scores, data)
    if not statistics.tokens:
        reasons = ["", *overflow(model, provenance), *engine_notes]
        reason = "; ".join(reasons)
        n_tokens = len(scores.token_id)
        raise ModelError(f"no perplexity: none of {n_tokens} positions is finite{reason}")
    fields = statistics.computed()
    errors_of_text = sampling_errors_of_run(data, scores)
    if errors_of_text is not None:
        fields |= errors_of_text.row_fields
    fields |= rollout_row.fields_of(model, scores, data)
    size = size_of(model)
    notes = [
        *score_notes(target, scores, has_reference=has_reference, store_failure=store_failure),
        *engine_notes,
    ]
    if statistics.non_finite:
        notes += overflow(model, provenance)
    # An engine that reads a file of scores has computed nothing.
    if record.get("shared_gpu") or model.capabilities.kinds:
        # Set, so that the row does not compute it from the seconds.
        fields["tokens_per_second"] = None
    return described_row(
        model,
        storage=size,
        memory=memory_of(model, size, provenance),
        **fields,
        windows=len(data.windows),
        timing=scores.timing,
        load_seconds=record["load_seconds"],
        score_seconds=record["score_seconds"],
        provenance=provenance,
        notes=tuple(notes),
        scores_key=f"{target.key}/{target.tag}",
        scores_digest=logprob_digest(scores),
        from_cache=from_cache,
    )


def statistics_of_scores(scores: StoredScores, data: EvalData) -> RowStatistics:
    """Return the statistics of a row."""
    assignment = block_assignment(data, scores)
    return statistics_of(
        scores.columns, assignment, scores.position, data.text_size, kld_kind=scores.kld_kind
    )


def logprob_digest(scores: StoredScores) -> str:
    """Return the SHA-256 of the log-probabilities of all tokens."""
    return hashlib.sha256(scores.columns["logprob"].tobytes()).hexdigest()


def row_of_text(row: ModelResult, scores: StoredScores, data: EvalData) -> ModelResult:
    """Return a row whose statistics are those of one text alone.

    ``scores``: the model's scores of this text's windows.
    """
    statistics = statistics_of_scores(scores, data)
    digest = logprob_digest(scores)
    compared = rollout_row.compared_fields(scores, data)
    return row.updated(
        **statistics.computed(), **compared, windows=len(data.windows), scores_digest=digest
    )


def sampling_errors_of_run(data: EvalData, scores: StoredScores) -> SamplingErrors | None:
    """Return the errors of the means as means of all windows of the texts.

    None if no text's windows are a sample.
    """
    if not any(text.is_spread for text in data.texts):
        return None
    errors_of_texts = []
    first = 0
    for text in data.texts:
        end = first + len(text.windows)
        inside = (scores.window >= first) & (scores.window < end)
        # A text that was scored completely has no sampling error, except that of an estimate.
        errors = SamplingErrors(0.0, 0.0)
        if text.is_spread or scores.kld_kind == "estimate":
            columns = {name: column[inside] for name, column in scores.columns.items()}
            window = scores.window[inside] - first
            available = len(text.windows)
            if text.is_spread:
                available = text.available
            errors = sampling_errors(
                columns, window, text.starts, available, kld_kind=scores.kld_kind
            )
        errors_of_texts.append((errors, int(inside.sum())))
        first = end
    return sampling_errors_of_texts(errors_of_texts)


def size_of(model: RunModel) -> Storage:
    """Return the stored size of a model, with the values that its spec overrides."""
    spec = model.spec
    size = replace(model.files.storage(), file_bytes=file_bytes(model))
    if spec.override_bpw_layer is not None:
        size = replace(size, bpw_layer=spec.override_bpw_layer)
    if spec.override_bpw_head is not None:
        size = replace(size, bpw_head=spec.override_bpw_head)
    if spec.override_vram_bits is not None:
        size = replace(size, vram_bits=spec.override_vram_bits)
    return size


def file_bytes(model: RunModel) -> int | None:
    """Return the size of the weight files on disk in bytes.

    None if they are not here (a server, or deleted since).
    """
    n_bytes = 0
    try:
        for file in model.files.weight_files():
            n_bytes += file.stat().st_size
    except OSError:
        return None
    return n_bytes or None


def overflow(model: RunModel, provenance: Mapping[str, Any]) -> list[str]:
    """Return the probable reason why scores of a model are not finite, and what to do.

    Empty if none is known.
    """
    if provenance.get("dtype") != "float16":
        return []
    remedy = ""
    if "dtype" in model.capabilities.arithmetic:
        remedy = ': give "dtype": "bfloat16" in "engine"'
    return [f"it ran in float16, in which numbers above 65,504 overflow{remedy}"]


def score_notes(
    target: ScoreTarget, scores: StoredScores, *, has_reference: bool, store_failure: str
) -> Iterator[str]:
    """Yield notes on replicas, on runs whose rounding differs, and on why there is no KLD."""
    model = target.model
    requested_replicas = model.spec.replicas
    if max(requested_replicas, scores.replicas) > 1:
        shortage = ""
        if scores.replicas < requested_replicas:
            shortage = f", not by {requested_replicas}: there were no more GPUs, or no more windows"
        yield f"scored by {scores.replicas} replicas{shortage}"
    if scores.sessions > 1 and is_batched(model):
        yield (
            f"scored in {scores.sessions} runs: its batches, and so its rounding, differ from "
            "those of one run"
        )
    shared_gpu = scores.run_record.get("shared_gpu")
    if shared_gpu:
        yield f"tok/s n/a: while it was scored the GPU was also used by {shared_gpu}"
    if store_failure:
        yield f"no KLD of other models: {store_failure}"
    if not model.is_reference:
        yield from comparison_notes(target, scores, has_reference=has_reference)


def is_batched(model: RunModel) -> bool:
    """Return True if a window's rounding depends on the other windows of its batch."""
    decode = model.planned.decode
    if decode is not None:
        return decode.batch > 1
    return model.capabilities.batches


def comparison_notes(
    target: ScoreTarget, scores: StoredScores, *, has_reference: bool
) -> Iterator[str]:
    """Yield a note if a model was not compared with the reference, or not in all logits."""
    if target.reference is None:
        if has_reference:
            yield "no KLD: the reference failed, or could not be kept"
        return
    if "no_kld" in scores.run_record:
        yield f"no KLD: {scores.run_record['no_kld']}"
        return
    if "kld" not in scores.columns:
        default = "this engine gives no more than the real tokens' log-probabilities"
        yield f"no KLD: {scores.run_record['provenance'].get('no_kld', default)}"
        return
    compared_reference = scores.run_record["reference"]
    entries = compared_reference["vocab_size"]
    size = compared_reference["model_vocab_size"]
    if size not in (None, entries):
        yield f"of {size} and {entries} logits, only those that both have count"
