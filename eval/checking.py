"""``--check``: what would run, on which windows, and what is missing; starts no engine and downloads no weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from backends import hub
from backends.base import InputError
from eval import corpus, jobs, windows
from eval.jobs import Job
from eval.progress import Progress
from eval.specs import DataSpec, ModelSpec
from eval.store import Store
from eval.windows import EvalData


def check(
    data_spec: DataSpec, model_specs: Sequence[ModelSpec], max_rows: int | None, store: Store, progress: Progress
) -> tuple[list[str], list[str]]:
    """(what would run, what is wrong), a line each.

    A local text is tokenized, and so is one that the cache holds, to count its windows; one on the hub is only asked
    whether it is there.
    """
    lines, problems = [], []
    longest, data = data_spec.longest, None
    try:
        data = local_data(data_spec, max_rows, store, progress)
        lines.append(describe_data(data_spec, data))
        longest = data.length if data else longest
    except InputError as error:
        problems.append(f"data: {error}")
    planned, missing = jobs.plan(model_specs, longest)
    problems += missing
    for job in planned:
        lines += describe(job)
        try:
            if data is not None:
                jobs.check_vocabulary(job, data)
        except InputError as error:
            problems.append(f"{job.request.label}: {error}")
    return lines, problems


def local_data(spec: DataSpec, max_rows: int | None, store: Store, progress: Progress) -> EvalData | None:
    """The windows, where text and tokenizer are on this machine; None where they are still to be downloaded."""
    corpus.identity(spec)  # names a missing file
    tokenizer = spec.locate(spec.tokenizer_dir)
    try:
        hub.resolve(tokenizer, spec.tokenizer_revision, tokenizer_only=True, download=False)
    except InputError:
        if not hub.is_hub_id(tokenizer):
            raise
        return None
    if not corpus.is_here(spec) and not windows.are_stored(spec, store):
        return None
    return windows.build(spec, max_rows, store, progress)


def describe_data(spec: DataSpec, data: EvalData | None) -> str:
    """The text and its windows in one line."""
    name = corpus.display_name(spec)
    cut = f"data: {name}, method {spec.method}, windows of {spec.eval_len} every {spec.stride} tokens"
    if data is None:
        return f"{cut}; how many is known once text and tokenizer are downloaded"
    scored = sum(window.n_scored for window in data.windows)
    return f"{cut}: {len(data.windows):,} windows, {scored:,} scored tokens, of a text of {data.n_tokens:,} tokens"


def describe(job: Job) -> Iterator[str]:
    """A model in one line, and whether its files would be downloaded."""
    version = " ".join(job.backend.capabilities.installed() or ())
    yield f"{job.request.label}: {job.engine} ({version.strip()}), {job.request.model_dir}"
    if not job.is_remote:
        return
    try:
        hub.resolve(job.request.model_dir, job.request.revision, download=False)
    except InputError:
        yield f"{job.request.label}: would be downloaded from the hub"
