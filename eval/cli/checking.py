"""``--check``: what would run, on which windows, and what is missing; starts no engine and downloads no weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from compare_q.backends import hub
from compare_q.backends.common.errors import InputError
from compare_q.eval.cli import doctor
from compare_q.eval.common.cache import Cache
from compare_q.eval.common.progress import Progress
from compare_q.eval.run import jobs
from compare_q.eval.run.hosts import Hosts
from compare_q.eval.specs.types import DataSpec, ModelSpec
from compare_q.eval.text import windows


def check(
    texts: Mapping[str, DataSpec],
    model_specs: Sequence[ModelSpec],
    n_windows: int | None,
    cache: Cache,
    progress: Progress,
    hosts: Hosts,
) -> tuple[list[str], list[str], bool]:
    """(lines on what would run, and what the doctor finds; why something would not; whether a number or an answer of a
    model would be wrong).  ``texts``: by their names.

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
            lines.append(f"{title}: {windows.in_words(spec, found.get(name))}")
            lines += [f"{title}: {line}" for line in missing]
        except InputError as error:
            problems.append(f"{title}: {error}")
    longest = max(found[name].length if name in found else spec.longest for name, spec in texts.items())
    planned, refused = jobs.plan(model_specs, longest, hosts)
    problems += refused
    reference = next((Path(job.request.model_dir) for job in planned if job.spec.is_reference), None)
    named = {name if len(texts) > 1 else "": data for name, data in found.items()}
    for job in planned:
        label, folder = job.request.label, job.request.model_dir
        line = f"{label}: {job.engine} ({' '.join(job.described.installed or ()).strip()}), {folder}"
        try:
            lines.append(f"{line}, {job.files.would_fetch()}" if job.is_remote else line)
            said, is_wrong = ([], False) if job.is_remote else doctor.short_form(label, Path(folder), reference)
        except InputError as error:
            problems.append(f"{label}: {error}")
            continue
        lines, wrong = lines + said, wrong or is_wrong
        if job.described.silence:
            problems.append(f"{label}: {job.described.silence}")
        problems += jobs.vocabulary_problems(job, named)
    return [*lines, *filter(None, [jobs.emulated_dtypes(planned)])], problems, wrong


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
        missing.append(f"the tokenizer of {name}, {size}")
    if what := windows.would_fetch(spec, cache, tokenizer_is_here=not missing):
        missing.append(what)
    return missing
