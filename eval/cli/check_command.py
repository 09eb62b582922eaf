"""``check``: print what a run would do, and what is missing, without loading or downloading
weights.

The checks are the functions that a run calls before a model loads.  Checks that take no time come
first, then those that need the texts' tokens.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from ... import backends
from ...backends import hub
from ...backends.base import PlannedModel
from ...backends.checkpoint.checkpoint_doctor import examine
from ...backends.checkpoint.contents import Contents
from ...backends.checkpoint.folder import HuggingFaceFolder
from ...backends.checkpoint.gguf import is_gguf
from ...backends.common import machine
from ...backends.common.errors import InputError, ModelError
from ...backends.common.json_files import exists
from ...backends.common.message_text import bytes_in_words
from ..common.cache import Cache
from ..common.terminal import say
from ..run import plan, reference
from ..run.run_config import RunConfig
from ..specs.spec_types import DataSpec, ModelSpec
from ..text import corpus, text_windows
from ..text.eval_data import EvalData
from ..text.text_windows import TextWindows
from .doctor_command import contents_of, made_tokens
from .outputs import print_errors


def run(
    config: RunConfig,
    args: argparse.Namespace,
    texts: Mapping[str, DataSpec],
    model_specs: Sequence[ModelSpec],
) -> int:
    """Print what a run would do, and its problems; return the exit status, 1 if a number would be
    wrong.

    A text is tokenized to count its windows if its data is on this machine or its tokens are in the
    cache, unless a problem has already been found.  Only names of files are requested from the hub.
    """
    lines, problems, models = list[str](), list[str](), list[PlannedModel]()
    try:
        models = plan.plan_models(config, model_specs, max(spec.longest for spec in texts.values()))
    except InputError as error:
        problems += str(error).splitlines()
    built: list[TextWindows] = []
    tokenize = not problems
    for name, spec in texts.items():
        title = "data" if len(texts) == 1 else f"data {name}"
        try:
            missing = downloads(spec, config.cache)
            text = None
            if not missing and tokenize:
                text = text_windows.build(
                    spec,
                    args.rows,
                    config.cache,
                    config.progress,
                    name=name,
                    render_s=config.window_timeout_s,
                )
                built.append(text)
            if missing or tokenize:
                lines.append(f"{title}: {text_windows.in_words(spec, text)}")
            lines += [f"{title}: {line}" for line in missing]
            if text is not None:
                lines += [f"{title}: {line}" for line in text.notes]
        except InputError as error:
            problems.append(spec.blamed(error) if len(texts) == 1 else f"{title}: {error}")
    wrong = checked_files(config, models, lines, problems)
    if built and not problems:
        try:
            data = EvalData.joined(built)
            fitted = plan.fitted(config, model_specs, models, data)
            marked = next((model for model in fitted if model.is_reference), None)
            if marked is None and config.logits_file is not None:
                reference.of_store(config.logits_file, data)
            elif marked is not None and not backends.files_of(marked).is_remote:
                reference.of_model(config, marked, data)
        except InputError as error:
            problems += str(error).splitlines()
    lines += filter(None, [plan.emulated_dtypes(config, models)])
    say(*lines)
    return print_errors("\n".join(problems)) or int(wrong)


def checked_files(
    config: RunConfig, models: Sequence[PlannedModel], lines: list[str], problems: list[str]
) -> bool:
    """Add ``lines`` about the models' files, and ``problems``; return True if a number would be
    wrong.
    """
    wrong, found = False, dict[Path, Contents]()
    owned = [(model, backends.files_of(model)) for model in models]
    with suppress(InputError):  # reported below, for its own model
        folders = [
            Path(model.model_dir)
            for model, files in owned
            if isinstance(files, HuggingFaceFolder)
            and not files.is_remote
            and not files.other_config
        ]
        found = contents_of(folders, config.progress)
    reference = next((Path(model.model_dir) for model in models if model.is_reference), None)
    for model, files in owned:
        label, path = model.label, Path(model.model_dir)
        line = f"{label}: {model.engine} ({' '.join(model.info.installed or ()).strip()}), {model.model_dir}"
        try:
            lines.append(f"{line}, {files.would_fetch()}" if files.is_remote else line)
            if not files.is_remote and (is_gguf(path) or exists(path / "config.json")):
                if reference is None or reference == path:
                    report = examine(path, None, found.get(path))
                else:
                    others = found.get(reference)
                    made = made_tokens(path)
                    report = examine(
                        path,
                        reference,
                        found.get(path),
                        reference_contents=others,
                        engine_tokens=made,
                    )
                facts = dict(reversed(report.facts))  # the first of the groups of layers
                layers = facts.get("layers", "").partition(":")[0]
                said = [f"{layers}; {facts['size']}; {facts['files']}", *map(str, report.findings)]
                said += [f"not checked: {reason}" for reason in report.unchecked]
                lines += [f"{label}: {each}" for each in (*said, *too_large(config, model))]
                wrong = wrong or report.is_wrong
                fault = backends.engine_class(model.engine).misreads(model)
                if fault:
                    lines.append(f"{label}: wrong: {fault}")
                    wrong = True
                if refusal := config.workers.refusal(model):
                    problems.append(f"{label}: {refusal}")
        except (InputError, ModelError) as error:
            problems.append(f"{label}: {error}")
            continue
        problems += [f"{label}: {model.info.silence}"] if model.info.silence else []
    return wrong


def too_large(config: RunConfig, model: PlannedModel) -> Iterator[str]:
    """Yield a line on a model whose weight files are larger than the memory that it gets."""
    capabilities, files = backends.engine_class(model.engine).capabilities, backends.files_of(model)
    if not (capabilities.here and config.workers.is_local) or model.options.get("streaming"):
        return
    size = sum(file.stat().st_size for file in files.weight_files())
    gpus = config.gpus.gpus[: model.n_gpus]
    room, whose = machine.memory_bytes(), "this machine has"
    if gpus:
        room, whose = (
            int(sum(gpu.mib for gpu in gpus) * 2**20),
            f"{len(gpus)} GPUs have" if len(gpus) > 1 else "the GPU has",
        )
    if size > room:
        pack = "; a reference pack needs no model (docs/packs.md)" if model.is_reference else ""
        yield (
            f"does not fit: its weights are {bytes_in_words(size)}, {whose} {bytes_in_words(room)}; "
            f"{backends.LAYER_BY_LAYER}{pack}"
        )


def downloads(spec: DataSpec, cache: Cache) -> list[str]:
    """Return lines about the parts of text and tokenizer that a run downloads; InputError if one
    does not exist.
    """
    if spec.pack is not None:
        return []
    corpus.identity(spec)  # names a missing file
    name, missing = spec.locate(spec.tokenizer_dir), []
    try:
        hub.resolve(name, spec.tokenizer_revision, tokenizer_only=True, download=False)
    except InputError:
        if not hub.is_hub_id(name):
            raise
        size = hub.would_fetch(name, spec.tokenizer_revision, hub.TOKENIZER_FILES)
        missing.append(f"the tokenizer of {name}, {size}")
    if what := text_windows.would_fetch(spec, cache, tokenizer_is_here=not missing):
        missing.append(what)
    return missing
