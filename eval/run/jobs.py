"""Model specs -> jobs: every check that needs no engine, and the key under which a model's token scores are kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
"""Version of the scoring; a change that moves numbers or what is kept raises it, so that stored scores are not mixed.

1: log-probabilities of the real tokens, in vLLM.
2: every engine is compared with one reference store, on the same positions.
3: the run's provenance lists every group of layers with its kernel, which older records lack.
"""


@dataclass(frozen=True)
class Job:
    """One model whose spec was checked: its engine, and what the engine will be told."""

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


@dataclass(frozen=True)
class FetchedJob:
    """A job whose model is on this machine, and ``identity``: everything that the model's scores depend on."""

    job: Job
    identity: Mapping[str, Any]

    def scores_key(self, reference_key: str | None) -> str:
        """Key of the model's token scores, alone (None) or beside the reference that has this key."""
        return Cache.key("scores", {**self.identity, "reference": reference_key})


def plan(specs: Sequence[ModelSpec], max_tokens: int) -> tuple[list[Job], list[str]]:
    """(jobs, problems) for windows of ``max_tokens``: each model is checked against what is installed and on disk."""
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


def fit(jobs: Sequence[Job], data: EvalData) -> tuple[list[Job], list[str]]:
    """(the jobs for these windows, problems): a chat prefix may have made the windows longer than the plan knew."""
    fitted, problems = [], []
    for job in jobs:
        try:
            fitted.append(replace(job, request=replace(job.request, max_tokens=data.length)))
            if data.length > job.request.max_tokens:
                check(fitted[-1])
            check_vocabulary(fitted[-1], data)
        except InputError as error:
            problems.append(f"{job.request.label}: {error}")
    return fitted, problems


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


def fetch(job: Job, data: EvalData, progress: Progress) -> FetchedJob:
    """The job with its model on this machine: downloaded where need be, and then checked as a local model is.

    InputError or ModelError if the model cannot be had, or if its files are damaged.
    """
    if not job.is_remote:
        return identified(job, data)
    with (
        progress.phase(f"fetching {job.request.model_dir}", unit="bytes") as phase,
        backends.other_engines_named(),
    ):
        local = replace(job, request=job.backend.fetch(job.request, phase))
    check(local)
    check_vocabulary(local, data)
    return identified(local, data)


def without_download(job: Job, data: EvalData) -> FetchedJob | None:
    """The job, if its model is on this machine already; None if something would have to be downloaded."""
    request = job.backend.here(job.request)
    return None if request is None else identified(replace(job, request=request), data)


def identified(job: Job, data: EvalData) -> FetchedJob:
    """A fetched job with what its scores depend on; reads the headers of the model's files (InputError if damaged)."""
    identity = {
        "version": SCORES_VERSION,
        "windows": data.digest,
        "model": job.backend.stamp(job.request),
        "engine": job.engine,
        "load_fn": job.request.load_fn,
        "options": job.request.options,
        "versions": job.backend.versions(),
        "hardware": hardware(job),
    }
    return FetchedJob(job, identity)


def hardware(job: Job) -> dict[str, Any]:
    """What the scores of a job are computed on, as far as this machine knows; part of the scores' key."""
    capabilities = job.backend.capabilities
    return {**machine.hardware(torch=capabilities.torch), **machine.settings()} if capabilities.here else {}


def what_ran(job: Job, backend: Backend) -> dict[str, Any]:
    """Provenance of a run that has finished; what an engine cannot tell any more becomes a note and loses no score."""
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
