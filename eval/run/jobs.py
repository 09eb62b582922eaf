"""Model specs -> jobs: every check that needs no engine, and the key under which a model's scores are kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import backends
from backends.base import Backend, LoadRequest, ModelFacts
from backends.common.errors import InputError
from backends.common.messages import one_line
from backends.layers.groups import groups_to_json
from eval.common import machine
from eval.common.cache import Cache
from eval.common.progress import Progress
from eval.specs.types import ModelSpec
from eval.text import vocabulary
from eval.text.windows import EvalData

SCORES_VERSION = 3
"""Method of measuring; a change that moves numbers raises it, so that stored scores are not mixed."""


@dataclass(frozen=True)
class Job:
    """One model, checked: its engine, and what the engine will be told."""

    spec: ModelSpec
    engine: str
    backend: type[Backend]
    request: LoadRequest

    @property
    def is_remote(self) -> bool:
        """Whether the model still has to be fetched."""
        return self.backend.is_remote(self.request)

    def facts(self) -> ModelFacts:
        """What the files of a fetched model say."""
        return self.backend.facts(self.request)


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
    backends.check_files(request.model_dir, job.backend)
    if capabilities.installed() is None:
        raise InputError(f"load_fn: {request.load_fn!r} is not installed: {capabilities.install}")
    if job.spec.is_reference and not capabilities.reference:
        raise InputError(f"reference: {request.load_fn!r} gives no logits to compare with; mark another model")
    if job.spec.is_reference and job.spec.noise_floor:
        raise InputError("noise_floor: the reference cannot be its own noise floor; mark one of the two")
    if request.options.get("noise") is not None and not job.spec.noise_floor:
        raise InputError('engine.noise: only for a model that is marked with "noise_floor": true')
    if request.revision is not None and not job.is_remote:
        raise InputError("revision: only for a model on the hub")
    job.backend.check(request)
    if request.override_tensors and not capabilities.override_tensors:
        raise InputError(f"model_dir: {request.load_fn!r} takes no override tensors; give the folder alone")
    for file in request.override_tensors:
        if not file.is_file():
            raise InputError(f"model_dir: override tensors {file}: no such file")
    if job.is_remote:
        return
    context = job.facts().context
    if context is not None and request.max_tokens > context:
        raise InputError(f"eval_len: windows of {request.max_tokens} tokens exceed the model's context of {context}")


def check_vocabulary(job: Job, data: EvalData) -> None:
    """InputError if the tokenizer has ordinary tokens that the model has no logit for, or that mean others to it."""
    if job.is_remote:
        return
    facts = job.facts()
    if facts.vocab_size is not None and data.top_id >= facts.vocab_size:
        raise InputError(
            f"tokenizer_dir: its vocabulary reaches id {data.top_id}, the model has {facts.vocab_size} tokens; "
            "give the model's own tokenizer"
        )
    if facts.tokenizer is None:
        return
    trusted = bool(job.request.options.get("trust_remote_code"))
    if other := vocabulary.disagreement(facts.tokenizer, data.tokenizer, trusted=trusted, data_trusted=data.trusted):
        raise InputError(f"tokenizer_dir: is not this model's tokenizer: {other}")


def fetch(job: Job, data: EvalData, progress: Progress) -> Job:
    """The job with its model fetched to this machine, checked as a local one is; a local job as it is."""
    if not job.is_remote:
        return job
    with (
        progress.phase(f"fetching {job.request.model_dir}", unit="bytes") as phase,
        backends.other_engines_named(),
    ):
        local = replace(job, request=job.backend.fetch(job.request, phase))
    check(local)
    check_vocabulary(local, data)
    return local


def hardware(job: Job) -> dict[str, Any]:
    """What the scores of a job are computed on, as far as this machine knows; part of their key."""
    capabilities = job.backend.capabilities
    return {**machine.hardware(torch=capabilities.torch), **machine.settings()} if capabilities.here else {}


def what_ran(job: Job, backend: Backend) -> dict[str, Any]:
    """Provenance of a run that has finished; what an engine cannot tell any more becomes a note, and loses no score."""
    threads = machine.threads() if job.backend.capabilities.here else {}
    found = {"engine": job.engine, **job.backend.versions(), **hardware(job), **threads}
    try:
        return {**found, **backend.provenance(), "layers": groups_to_json(backend.layers())}
    except Exception as error:  # whatever an engine raises when it is asked about itself
        return {**found, "notes": [f"what ran is not known: {type(error).__name__}: {one_line(error)}"]}


@contextmanager
def opened(job: Job, progress: Progress) -> Iterator[Backend]:
    """The engine, closed whatever happens; a close that fails is said and loses nothing."""
    backend = job.backend(job.request)
    try:
        yield backend
    finally:
        try:
            backend.close()
        except Exception as error:  # an engine that is stopped in the middle raises what it likes
            progress.say(f"{job.request.label}: closing its engine failed: {one_line(error)}")


def scores_identity(job: Job, data: EvalData) -> dict[str, Any]:
    """What a fetched model's scores depend on: windows, model content, engine, options, versions, hardware, method."""
    return {
        "version": SCORES_VERSION,
        "windows": data.digest,
        "model": job.backend.stamp(job.request),
        "engine": job.engine,
        "load_fn": job.request.load_fn,
        "options": job.request.options,
        "versions": job.backend.versions(),
        "hardware": hardware(job),
    }


def scores_key(job: Job, data: EvalData, reference_key: str | None) -> str:
    """Key of a fetched model's scores, alone or against a reference."""
    return Cache.key("scores", {**scores_identity(job, data), "reference": reference_key})
