"""A job and its stored scores -> what its row of the table says of it."""

from __future__ import annotations

import json
from dataclasses import replace

from backends.base import Storage
from eval.results.run_result import ModelResult
from eval.run import token_scores
from eval.run.jobs import Job
from eval.specs.types import ModelSpec
from eval.stats import estimates
from eval.text.windows import EvalData


def described(job: Job) -> ModelResult:
    """A result that holds no more than what the spec says."""
    return ModelResult(
        job.request.label, job.engine, spec=json.loads(job.spec.model_dump_json(exclude_unset=True)),
        spec_sha256=job.spec.digest(), is_reference=job.spec.is_reference,
    )  # fmt: skip


def summarize(stored: token_scores.StoredScores, data: EvalData) -> estimates.Estimates:
    """A model's estimates: its scores, and which tokens of the text they are of."""
    index = data.text_index(stored.window, stored.position)
    size = data.text_size
    return estimates.summarize(
        stored.columns, index, stored.position, None if size is None else (size.n_bytes, size.n_words)
    )


def overridden(storage: Storage, spec: ModelSpec) -> Storage:
    """The measured storage with the spec's override_* in its place."""
    return replace(
        storage,
        bpw_layer=storage.bpw_layer if spec.override_bpw_layer is None else spec.override_bpw_layer,
        bpw_head=storage.bpw_head if spec.override_bpw_head is None else spec.override_bpw_head,
        vram_bits=storage.vram_bits if spec.override_vram_bits is None else spec.override_vram_bits,
    )
