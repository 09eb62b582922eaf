"""``--check``: what would run, on which windows, and what is missing; starts no engine and downloads no weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from compare_q import backends
from compare_q.backends import hub
from compare_q.backends.common.errors import InputError
from compare_q.eval.cli import doctor
from compare_q.eval.common.cache import Cache
from compare_q.eval.common.progress import Progress
from compare_q.eval.run import jobs
from compare_q.eval.run.hosts import Hosts
from compare_q.eval.run.jobs import Job
from compare_q.eval.specs.types import DataSpec, ModelSpec
from compare_q.eval.text import windows


@dataclass(frozen=True)
class Checked:
    """``lines`` say what would run, and what the doctor finds; ``problems`` why something would not.

    ``is_wrong``: a number or an answer of a model would be wrong.
    """

    lines: list[str]
    problems: list[str]
    is_wrong: bool


def check(
    texts: Mapping[str, DataSpec],
    model_specs: Sequence[ModelSpec],
    n_windows: int | None,
    cache: Cache,
    progress: Progress,
    hosts: Hosts,
) -> Checked:
    """What would run, and what is wrong; ``texts``: by their names.

    A text that is on this machine, or whose tokens the cache holds, is tokenized, so that its windows can be counted;
    the hub is only asked which files it has.
    """
    lines: list[str] = []
    problems: list[str] = []
    found, wrong = {}, False
    for name, spec in texts.items():
        title = "data" if len(texts) == 1 else f"data {name}"
        try:
            missing = downloads(spec, cache)
            if not missing:
                found[name] = windows.build(spec, n_windows, cache, progress)
            told = [f"data: {windows.in_words(spec, found.get(name))}", *missing]
            lines += [f"{title}{line.removeprefix('data')}" for line in told]
        except InputError as error:
            problems.append(f"{title}: {error}")
    longest = max(found[name].length if name in found else spec.longest for name, spec in texts.items())
    planned, refused = jobs.plan(model_specs, longest, hosts)
    problems += refused
    for job in planned:
        try:
            lines += model_lines(job)
            said, is_wrong = examined(job, planned)
            lines, wrong = lines + said, wrong or is_wrong
        except InputError as error:
            problems.append(f"{job.request.label}: {error}")
            continue
        if job.described.silence:
            problems.append(f"{job.request.label}: {job.described.silence}")
        named = {name if len(texts) > 1 else "": data for name, data in found.items()}
        problems += jobs.vocabulary_problems(job, named)
    lines += filter(None, [jobs.emulated_dtypes(planned)])
    return Checked(lines, problems, wrong)


def examined(job: Job, planned: Sequence[Job]) -> tuple[list[str], bool]:
    """The doctor's lines on a model that is on this machine, and whether something is wrong with it."""
    if job.is_remote:
        return [], False
    reference = next((Path(each.request.model_dir) for each in planned if each.spec.is_reference), None)
    return doctor.short_form(job.request.label, Path(job.request.model_dir), reference)


def downloads(spec: DataSpec, cache: Cache) -> list[str]:
    """Lines on what of text and tokenizer is still to be downloaded; InputError if one of them is nowhere."""
    windows.text_identity(spec)  # names a missing file
    name, missing = spec.locate(spec.tokenizer_dir), []
    try:
        hub.resolve(name, spec.tokenizer_revision, tokenizer_only=True, download=False)
    except InputError:
        if not hub.is_hub_id(name):
            raise
        size = hub.would_fetch(name, spec.tokenizer_revision, hub.TOKENIZER_FILES)
        missing.append(f"data: the tokenizer of {name}, {size}")
    if what := windows.would_fetch(spec, cache, tokenizer_is_here=not missing):
        missing.append(f"data: {what}")
    return missing


def model_lines(job: Job) -> list[str]:
    """A model in one line, with what of its files would be downloaded."""
    version = " ".join(job.described.installed or ())
    line = f"{job.request.label}: {job.engine} ({version.strip()}), {job.request.model_dir}"
    with backends.suggest_engine():
        return [f"{line}, {job.files.would_fetch()}" if job.is_remote else line]
