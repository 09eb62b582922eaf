"""``check``: what would run, on which windows, and what is missing; starts no engine and downloads no weights.

What a run refuses before a model loads is refused here, by the same functions: first what takes no time (the specs, the
engines, the outputs), then what needs the texts' tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from compare_q import backends
from compare_q.backends import hub
from compare_q.backends.base import PlannedModel
from compare_q.backends.common.errors import InputError
from compare_q.eval.cli import doctor
from compare_q.eval.common.cache import Cache
from compare_q.eval.run import plan, reference
from compare_q.eval.run.config import RunConfig
from compare_q.eval.specs.types import DataSpec, ModelSpec
from compare_q.eval.text import windows
from compare_q.eval.text.windows import EvalData


def check(
    config: RunConfig, texts: Mapping[str, DataSpec], model_specs: Sequence[ModelSpec], n_windows: int | None
) -> tuple[list[str], list[str], bool]:
    """(lines on what would run, and what the doctor finds; why something would not; whether a number or an answer of a
    model would be wrong).  ``texts``: by their names.

    A text that is on this machine, or whose tokens the cache holds, is tokenized, so that its windows can be counted,
    if nothing was wrong before; the hub is only asked which files it has.
    """
    lines: list[str] = []
    problems: list[str] = []
    models: list[PlannedModel] = []
    found: dict[str, EvalData] = {}
    wrong = False
    try:
        models = plan.plan_models(config, model_specs, max(spec.longest for spec in texts.values()))
    except InputError as error:
        problems += str(error).splitlines()
    is_refused = bool(problems)
    for name, spec in texts.items():
        title, key = ("data", "") if len(texts) == 1 else (f"data {name}", name)
        try:
            missing = downloads(spec, config.cache)
            if not (missing or is_refused):
                found[key] = windows.build(spec, n_windows, config.cache, config.progress)
            if missing or not is_refused:
                lines.append(f"{title}: {windows.in_words(spec, found.get(key))}")
            lines += [f"{title}: {line}" for line in missing]
        except InputError as error:
            problems.append(spec.blamed(error) if len(texts) == 1 else f"{title}: {error}")
    marked = next((model for model in models if model.is_reference), None)
    for model in models:
        label, folder, files = model.label, model.model_dir, backends.files_of(model)
        line = f"{label}: {model.engine} ({' '.join(model.info.installed or ()).strip()}), {folder}"
        try:
            lines.append(f"{line}, {files.would_fetch()}" if files.is_remote else line)
            beside = Path(marked.model_dir) if marked else None
            said, is_wrong = ([], False) if files.is_remote else doctor.short_form(label, Path(folder), beside)
        except InputError as error:
            problems.append(f"{label}: {error}")
            continue
        lines, wrong = lines + said, wrong or is_wrong
        if model.info.silence:
            problems.append(f"{label}: {model.info.silence}")
    if found and not problems:
        try:
            fitted = plan.fitted(config, model_specs, models, found)
            check_references(config, next((model for model in fitted if model.is_reference), None), found)
        except InputError as error:
            problems += str(error).splitlines()
    return [*lines, *filter(None, [plan.emulated_dtypes(config, models)])], problems, wrong


def check_references(config: RunConfig, marked: PlannedModel | None, texts: Mapping[str, EvalData]) -> None:
    """InputError if the texts cannot be compared with the reference that the user asks for."""
    for text in texts.values():
        if marked is None and config.logits_file is not None:
            reference.of_store(config, config.logits_file, text)
        elif marked is not None and not backends.files_of(marked).is_remote:
            reference.of_model(config, marked, text)


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
