"""``check``: what would run, on which windows, and what is missing; starts no engine and downloads no weights.

What a run refuses before a model loads is refused here, by the same functions: first what takes no time (the specs, the
engines, the outputs), then what needs the texts' tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from compare_q.backends import hub
from compare_q.backends.common.errors import InputError
from compare_q.eval.cli import doctor
from compare_q.eval.common.cache import Cache
from compare_q.eval.run import jobs, references, runner
from compare_q.eval.run.hosts import Job, Session
from compare_q.eval.specs.types import DataSpec, ModelSpec
from compare_q.eval.text import windows
from compare_q.eval.text.windows import EvalData


def check(
    session: Session, texts: Mapping[str, DataSpec], model_specs: Sequence[ModelSpec], n_windows: int | None
) -> tuple[list[str], list[str], bool]:
    """(lines on what would run, and what the doctor finds; why something would not; whether a number or an answer of a
    model would be wrong).  ``texts``: by their names.

    A text that is on this machine, or whose tokens the cache holds, is tokenized, so that its windows can be counted,
    if nothing was wrong before; the hub is only asked which files it has.
    """
    lines: list[str] = []
    problems: list[str] = []
    planned: list[Job] = []
    found: dict[str, EvalData] = {}
    wrong = False
    try:
        planned = runner.checked(session, list(texts.values()), model_specs)
    except InputError as error:
        problems += str(error).splitlines()
    is_refused = bool(problems)
    for name, spec in texts.items():
        title, key = ("data", "") if len(texts) == 1 else (f"data {name}", name)
        try:
            missing = downloads(spec, session.cache)
            if not (missing or is_refused):
                found[key] = windows.build(spec, n_windows, session.cache, session.progress)
            if missing or not is_refused:
                lines.append(f"{title}: {windows.in_words(spec, found.get(key))}")
            lines += [f"{title}: {line}" for line in missing]
        except InputError as error:
            problems.append(spec.blamed(error) if len(texts) == 1 else f"{title}: {error}")
    reference = next((job for job in planned if job.spec.is_reference), None)
    for job in planned:
        label, folder = job.request.label, job.request.model_dir
        line = f"{label}: {job.engine} ({' '.join(job.described.installed or ()).strip()}), {folder}"
        try:
            lines.append(f"{line}, {job.files.would_fetch()}" if job.is_remote else line)
            beside = Path(reference.request.model_dir) if reference else None
            said, is_wrong = ([], False) if job.is_remote else doctor.short_form(label, Path(folder), beside)
        except InputError as error:
            problems.append(f"{label}: {error}")
            continue
        lines, wrong = lines + said, wrong or is_wrong
        if job.described.silence:
            problems.append(f"{label}: {job.described.silence}")
    if found and not problems:
        problems += unfit(session, planned, reference, found)
    return [*lines, *filter(None, [jobs.emulated_dtypes(planned)])], problems, wrong


def unfit(session: Session, planned: Sequence[Job], reference: Job | None, found: Mapping[str, EvalData]) -> list[str]:
    """Why these models cannot score these windows, or cannot be compared with the reference that is asked for."""
    try:
        jobs.fit(planned, found, session.hosts)
        for data in found.values():
            if reference is None and session.logits_file is not None:
                references.of_store(session.logits_file, data, session)
            elif reference is not None and not reference.is_remote:
                references.of_model(reference, data, session)
    except InputError as error:
        return str(error).splitlines()
    return []


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
