"""A job and its stored scores -> what the model's row of the table says."""

from __future__ import annotations

import json
from dataclasses import replace

from compare_q.backends.base import Storage
from compare_q.backends.common.errors import ModelError
from compare_q.eval.results.run_result import ModelResult
from compare_q.eval.run.jobs import Job
from compare_q.eval.run.references import LostReference, NoReference, Reference
from compare_q.eval.run.token_scores import StoredScores
from compare_q.eval.specs.types import ModelSpec
from compare_q.eval.stats import answers, estimates
from compare_q.eval.text.windows import EvalData


def row_of(job: Job) -> ModelResult:
    """A row that holds no more than what the spec says."""
    return ModelResult(
        job.request.label, job.engine, spec=json.loads(job.spec.model_dump_json(exclude_unset=True)),
        spec_sha256=job.spec.digest(), is_reference=job.spec.is_reference,
    )  # fmt: skip


def scored_row(
    job: Job, stored: StoredScores, data: EvalData, reference: Reference, *, key: str, cached: bool
) -> ModelResult:
    """The whole row of a model; ModelError if none of its scores is finite.

    ``key``: of the scores in the cache; ``cached``: they were there before this run.
    """
    found = summarize(stored, data)
    if not found.ppl.tokens:
        raise ModelError(f"no perplexity: none of {len(stored.logprob)} positions is finite")
    record = stored.run_record
    return replace(
        row_of(job),
        storage=overridden(replace(job.files.storage(), file_bytes=file_bytes(job)), job.spec),
        estimates=found,
        windows=stored.windows,
        load_seconds=record["load_seconds"],
        score_seconds=record["score_seconds"],
        timing=stored.timing,
        provenance=record["provenance"],
        scores_key=key,
        cached=cached,
        notes=(
            *replica_notes(job, stored),
            *resumed_notes(job, stored),
            *kld_notes(job, stored, reference),
            *record["provenance"].get("notes", ()),
        ),
    )


def summarize(stored: StoredScores, data: EvalData) -> estimates.Estimates:
    """A model's estimates, from its scores and from the places in the text that the scored tokens have."""
    index = data.text_index(stored.window, stored.position)
    size, asked = data.text_size, data.answers
    found = estimates.summarize(
        stored.columns, index, stored.position, None if size is None else (size.n_bytes, size.n_words),
        data.begins(stored.window),
    )  # fmt: skip
    if data.is_spread:
        return replace(found, sampled=estimates.sampled(stored.columns, stored.window, data.starts, data.available))
    if asked is None:
        return found
    return replace(found, answers=answers.summarize(stored.columns, stored.window, asked.requests))


def file_bytes(job: Job) -> int | None:
    """Bytes on disk of the files that the engine loads; None where they are not here (a server, or removed since)."""
    try:
        return sum(file.stat().st_size for file in job.files.weight_files()) or None
    except OSError:
        return None


def overridden(storage: Storage, spec: ModelSpec) -> Storage:
    """The measured storage, with the spec's override_* values in place of the measured ones."""
    given = {name: getattr(spec, f"override_{name}") for name in ("bpw_layer", "bpw_head", "vram_bits")}
    return replace(storage, **{name: value for name, value in given.items() if value is not None})


def resumed_notes(job: Job, stored: StoredScores) -> tuple[str, ...]:
    """What has to be said of scores that several runs of a model have made, where that can move a rounding."""
    if stored.sessions < 2 or not job.engine_class.capabilities.batches:
        return ()
    return (f"scored in {stored.sessions} runs: its batches, and so its rounding, differ from those of one run",)


def replica_notes(job: Job, stored: StoredScores) -> tuple[str, ...]:
    """How many replicas shared the windows, where these were several, or several were asked for."""
    if stored.replicas == job.spec.replicas == 1:
        return ()
    fewer = f", not by {job.spec.replicas}: there were no more GPUs, or no more windows"
    return (f"scored by {stored.replicas} replicas{fewer if stored.replicas < job.spec.replicas else ''}",)


def kld_notes(job: Job, stored: StoredScores, reference: Reference) -> tuple[str, ...]:
    """What has to be said of a model's KL divergence."""
    if job.spec.is_reference or isinstance(reference, NoReference):
        return ()
    if isinstance(reference, LostReference):
        return ("no KLD: the reference failed",)
    if "kld" not in stored.columns:
        more = ", nor what --divergences asks for" if reference.divergences else ""
        return (f"no KLD{more}: this engine gives no more than the real tokens' log-probabilities",)
    entries = stored.run_record["reference"]["vocab_size"]
    size = stored.run_record["reference"]["model_vocab_size"]
    return () if size in (None, entries) else (f"of {size} and {entries} logits, only those that both have count",)
