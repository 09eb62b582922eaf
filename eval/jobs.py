"""Model specs -> jobs: every check that needs no engine, and the key under which a model's scores are kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import backends
from backends import checkpoint, hub
from backends.base import Backend, InputError, LoadRequest
from eval import machine, vocabulary
from eval.progress import Progress
from eval.specs import ModelSpec
from eval.store import Store
from eval.windows import EvalData

SCORES_VERSION = 2
"""Method of measuring; a change that moves numbers raises it, so that stored scores are not mixed."""


@dataclass(frozen=True)
class Job:
    """One model, checked: its engine, and what the engine will be told."""

    spec: ModelSpec
    engine: str
    backend: type[Backend]
    request: LoadRequest

    @property
    def on_hub(self) -> bool:
        """Whether the model still has to be fetched."""
        return self.backend.capabilities.needs_checkpoint and hub.is_hub_id(self.request.model_dir)


def plan(specs: Sequence[ModelSpec], max_tokens: int) -> tuple[list[Job], list[str]]:
    """(jobs, problems) for windows of ``max_tokens``: each model against what is installed and on disk."""
    jobs, problems = [], []
    for spec in specs:
        try:
            engine, backend = backends.resolve(spec.load_fn, spec.fwd_fn)
            request = LoadRequest(
                spec.name, spec.load_fn, spec.located, max_tokens, spec.options, spec.override_tensors, spec.revision
            )
            job = Job(spec, engine, backend, request)
            check(job)
            jobs.append(job)
        except InputError as error:
            problems.append(f"{spec.name}: {error}")
    return jobs, problems


def check(job: Job) -> None:
    """InputError if the engine is not installed, its options are wrong, or a local model's files do not fit."""
    capabilities, request = job.backend.capabilities, job.request
    if capabilities.installed() is None:
        raise InputError(f"load_fn: {request.load_fn!r} is not installed: {capabilities.install}")
    job.backend.check(request)
    if request.override_tensors and not capabilities.override_tensors:
        raise InputError(f"model_dir: {request.load_fn!r} takes no override tensors; give the folder alone")
    for file in request.override_tensors:
        if not file.is_file():
            raise InputError(f"model_dir: override tensors {file}: no such file")
    if not capabilities.needs_checkpoint or job.on_hub:
        return
    folder = hub.resolve(request.model_dir, request.revision)
    config = checkpoint.config_of(folder)
    if not checkpoint.weight_files(folder):
        raise InputError(f"model_dir: {folder}: no .safetensors files; compare_q loads no pickled weights")
    context = checkpoint.context_length(config)
    if context is not None and request.max_tokens > context and "hf_overrides" not in request.options:
        raise InputError(f"eval_len: windows of {request.max_tokens} tokens exceed the model's context of {context}")


def vocab_size(job: Job) -> int | None:
    """Logits that a fetched model has, by its config; None where there is none."""
    if not job.backend.capabilities.needs_checkpoint:
        return None
    return checkpoint.vocab_size(checkpoint.config_of(hub.resolve(job.request.model_dir, job.request.revision)))


def check_vocabulary(job: Job, data: EvalData) -> None:
    """InputError if the tokenizer has ordinary tokens that the model has no logit for, or that mean others to it."""
    if not job.backend.capabilities.needs_checkpoint or job.on_hub:
        return
    folder, size = hub.resolve(job.request.model_dir, job.request.revision), vocab_size(job)
    if size is not None and data.top_id >= size:
        raise InputError(
            f"tokenizer_dir: its vocabulary reaches id {data.top_id}, the model has {size} tokens; "
            "give the model's own tokenizer"
        )
    trusted = bool(job.request.options.get("trust_remote_code"))
    if other := vocabulary.disagreement(folder, data.tokenizer, trusted=trusted, data_trusted=data.trusted):
        raise InputError(f"tokenizer_dir: is not this model's tokenizer: {other}")


def fetch(job: Job, data: EvalData, progress: Progress) -> Job:
    """The job with its hub model in the local cache, checked as a local model is; a local job as it is."""
    if not job.on_hub:
        return job
    with progress.phase(f"fetching {job.request.model_dir}"):
        folder = hub.resolve(job.request.model_dir, job.request.revision)
    local = replace(job, request=replace(job.request, model_dir=str(folder)))
    check(local)
    check_vocabulary(local, data)
    return local


def scores_identity(job: Job, data: EvalData) -> dict[str, Any]:
    """What a fetched model's scores depend on: windows, model content, engine, options, versions, hardware, method."""
    model = ""
    if job.backend.capabilities.needs_checkpoint:
        folder = hub.resolve(job.request.model_dir, job.request.revision)
        model = checkpoint.stamp(folder, job.request.override_tensors)
    return {
        "version": SCORES_VERSION,
        "windows": data.digest,
        "model": model,
        "engine": job.engine,
        "load_fn": job.request.load_fn,
        "options": job.request.options,
        "versions": job.backend.versions(),
        "hardware": machine.hardware(),
    }


def scores_key(job: Job, data: EvalData, reference_key: str | None) -> str:
    """Key of a fetched model's scores, alone or against a reference."""
    return Store.key("scores", {**scores_identity(job, data), "reference": reference_key})
