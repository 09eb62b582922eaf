"""``doctor``: describe checkpoints, and report what is wrong with them.

No engine is used, and no weight is loaded.  Exit status: 0; 1 if a number or an answer would be
wrong; 2 for bad input.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ... import backends
from ...backends import hub
from ...backends.base import PlannedModel
from ...backends.checkpoint.checkpoint_doctor import Report, examine
from ...backends.checkpoint.contents import Contents, compare_all
from ...backends.checkpoint.folder import Checkpoint
from ...backends.checkpoint.gguf import is_gguf, read_model
from ...backends.checkpoint.token_rules import digests, samples
from ...backends.common.errors import InputError
from ...backends.common.json_files import check_no_pipes, exists, expanded
from ...backends.layers.groups import recorded_groups
from ...backends.reference import pack_files
from ..common.processes import run_in_subprocess
from ..common.progress import Progress
from ..common.terminal import say
from ..specs import spec_files
from ..text import stored_tokens
from .pack_command import described


def run(names: Sequence[str]) -> int:
    """Examine every named model and print the findings; return the exit status."""
    progress = Progress()
    packs = [name for name in names if pack_files.is_pack(expanded(name))]
    for name in packs:
        check_pack(expanded(name))
        say(name, *described(expanded(name)), "  nothing wrong found")
    models: list[tuple[str, Path]] = []
    for name in names:
        if name not in packs:
            models += models_of(name, progress)
    contents = contents_of([path for _, path in models], progress)
    is_wrong = False
    for number, (name, path) in enumerate(models):
        first_path = models[0][1]
        with progress.phase(f"examining {name}", unit="bytes") as phase:
            if number == 0:
                report = examine(path, None, contents.get(path), phase)
            else:
                report = examine(
                    path,
                    first_path,
                    contents.get(path),
                    phase,
                    reference_contents=contents.get(first_path),
                    engine_tokens=engine_tokens_of(path),
                )
        misread = misreadings(path)
        if number > 0:
            say("")
        say(name, *lines_of(report, misread))
        if misread or report.is_wrong:
            is_wrong = True
    return int(is_wrong)


def lines_of(report: Report, misread: Sequence[str]) -> list[str]:
    """Return the facts and findings about a model.

    ``misread``: lines on engines that misread it.
    """
    lines = []
    for title, text in report.facts:
        lines.append(f"  {title:11} {text}")
    findings: list[object] = [*misread, *report.findings]
    if not findings:
        findings = ["nothing wrong found"]
    for finding in findings:
        lines.append(f"  {finding}")
    for reason in report.unchecked:
        lines.append(f"  not checked: {reason}")
    return lines


def misreadings(path: Path) -> list[str]:
    """Return a line on each engine that would compute with other weights than a folder holds.

    The engines are asked about a single GPU.
    """
    if is_gguf(path):
        return []
    lines = []
    for name, engine in backends.engines():
        load_fn = engine.capabilities.load_fns[0]
        model = PlannedModel(
            label=name, engine=name, load_fn=load_fn, model_dir=str(path), max_tokens=1
        )
        fault = engine.misreads(model)
        if fault:
            lines.append(f"wrong in {name}: {fault}")
    return lines


def check_pack(folder: Path) -> None:
    """InputError for a pack that a run would refuse before it scores.

    Such a pack is damaged, or its files have other forms.
    """
    manifest = pack_files.verified(folder)
    recorded_groups(manifest.provenance, str(folder / pack_files.PACK_MANIFEST))
    scores = pack_files.scores_of(folder)
    unscored_windows = [window for window in manifest.windows if window not in scores]
    if unscored_windows:
        raise InputError(
            f"{folder / pack_files.SCORES_FILE}: lacks {len(unscored_windows):,} of "
            f"{len(manifest.windows):,} windows"
        )
    # Both raise InputError if a run could not read the text.
    stored_tokens.tokens_of_pack(folder)
    spec_files.parse_data_spec({"pack": str(folder)}, spec_files.COMMAND_LINE)


def engine_tokens_of(path: Path) -> dict[str, Any] | None:
    """Return what its engine's own tokenizer makes of sample texts, for a GGUF.

    None if that is not known.
    """
    if not is_gguf(path):
        return None
    file = read_model(path).files[0]
    title = f"reading the tokenizer of {path}"
    try:
        engine_tokens = run_in_subprocess(tokens_of_engine, title, file=str(file))
    except InputError:
        # The engine's process has died of the file.
        return None
    if engine_tokens is None:
        return None
    return dict(engine_tokens)


def tokens_of_engine(file: str) -> dict[str, Any] | None:
    """Return ``Engine.tokens`` of the samples, with digests instead of ids.

    The engine is the one that reads such files; None if there is none.
    """
    load_fn = backends.reader_of(file)
    if load_fn is None:
        return None
    _, engine_class = backends.resolve(load_fn, None)
    engine_tokens = engine_class.tokens(Path(file), samples())
    if engine_tokens is None:
        return None
    return {**engine_tokens, "ids": digests(engine_tokens["ids"])}


def models_of(name: str, progress: Progress) -> Iterator[tuple[str, Path]]:
    """Yield (name, path) of each model in an argument.

    The argument is a folder, GGUF file or hub id, or a spec file with several models.
    """
    if not name.lower().endswith(".json"):
        yield name, fetched(name, progress)
        return
    for spec in spec_files.load_model_specs(spec_files.expand([name])):
        yield spec.name, fetched(spec.located, progress, spec.revision)


def fetched(name: str, progress: Progress, revision: str | None = None) -> Path:
    """Return the path of a model, downloaded from the hub if it is not on this machine.

    InputError for a name that is not a path and not on the hub.
    """
    path = expanded(name)
    if exists(path):
        return path
    with progress.phase(f"fetching {name}", unit="bytes") as phase:
        load_fn = backends.reader_of(name)
        if load_fn is not None:
            engine, engine_class = backends.resolve(load_fn, None)
            planned = PlannedModel(
                label=name,
                engine=engine,
                load_fn=load_fn,
                model_dir=name,
                max_tokens=1,
                revision=revision,
            )
            files = engine_class.files_of(planned)
            if files.is_remote:
                return Path(files.fetch(phase).model_dir)
        elif hub.is_hub_id(name):
            return hub.resolve(name, revision, watch=phase)
    raise InputError(
        f"{name}: no such folder or GGUF file, and no id of a model on the hub (owner/name)"
    )


def contents_of(paths: Sequence[Path], progress: Progress) -> dict[Path, Contents]:
    """Return folder -> its ``Contents``, from a separate process, since Transformers is imported.

    InputError if a folder cannot be read.
    """
    folders = [path for path in paths if not is_gguf(path)]
    for folder in folders:
        # Errors of these files are raised here, in one line, before a process starts.
        check_no_pipes(folder)
        checkpoint = Checkpoint(folder)
        # Both are read when they are first used.
        _ = checkpoint.config.raw
        _ = checkpoint.tensors
    if not folders:
        return {}
    title = "building models from configs"
    with progress.phase(title):
        contents_fields = run_in_subprocess(
            compare_all, title, folders=[str(folder) for folder in folders]
        )
    contents = {}
    for folder, fields in zip(folders, contents_fields, strict=True):
        contents[folder] = Contents(**fields)
    return contents
