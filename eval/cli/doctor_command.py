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
from ...backends.checkpoint.checkpoint_doctor import examine
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
from ..text import text_tokens
from .pack_command import described


def run(names: Sequence[str]) -> int:
    """Examine every named model and print the findings; return the exit status."""
    progress = Progress()
    for name in (packs := [name for name in names if pack_files.is_pack(expanded(name))]):
        check_pack(expanded(name))
        say(name, *described(expanded(name)), "  nothing wrong found")
    models = [model for name in names if name not in packs for model in models_of(name, progress)]
    contents = contents_of([path for _, path in models], progress)
    wrong = False
    for number, (name, path) in enumerate(models):
        with progress.phase(f"examining {name}", unit="bytes") as phase:
            if number:
                first = models[0][1]
                made = made_tokens(path)
                report = examine(
                    path,
                    first,
                    contents.get(path),
                    phase,
                    reference_contents=contents.get(first),
                    engine_tokens=made,
                )
            else:
                report = examine(path, None, contents.get(path), phase)
        facts = [f"  {title:11} {text}" for title, text in report.facts]
        misread = misreadings(path)
        findings = [f"  {finding}" for finding in (*misread, *report.findings)] or [
            "  nothing wrong found"
        ]
        unchecked = [f"  not checked: {reason}" for reason in report.unchecked]
        say(*([""] if number else []), name, *facts, *findings, *unchecked)
        wrong = wrong or bool(misread) or report.is_wrong
    return int(wrong)


def misreadings(path: Path) -> list[str]:
    """Return a line on each engine that would compute with other weights than a folder holds, on a
    single GPU.
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
    """InputError for a pack that a run would refuse before it scores: damaged, or files of other
    forms.
    """
    manifest = pack_files.verified(folder)
    recorded_groups(manifest.provenance, str(folder / pack_files.MANIFEST))
    scored = pack_files.scores_of(folder).keys()
    lacking = [window for window in manifest.windows if window not in scored]
    if lacking:
        raise InputError(
            f"{folder / pack_files.SCORES}: lacks {len(lacking):,} of {len(manifest.windows):,} windows"
        )
    text_tokens.of_pack(folder)
    spec_files.parse_data_spec({"pack": str(folder)}, spec_files.COMMAND_LINE)


def made_tokens(path: Path) -> dict[str, Any] | None:
    """Return what its engine's own tokenizer makes of sample texts, for a GGUF; None if that is not
    known.
    """
    if not is_gguf(path):
        return None
    file = read_model(path).files[0]
    try:
        made = run_in_subprocess(
            tokens_of_engine, f"reading the tokenizer of {path}", file=str(file)
        )
    except InputError:  # the engine's process has died of it
        return None
    return None if made is None else dict(made)


def tokens_of_engine(file: str) -> dict[str, Any] | None:
    """Return ``Engine.tokens`` of the samples with digests instead of ids, by the engine that reads
    such files.
    """
    load_fn = backends.reader_of(file)
    if load_fn is None:
        return None
    made = backends.resolve(load_fn, None)[1].tokens(Path(file), samples())
    return None if made is None else {**made, "ids": digests(made["ids"])}


def models_of(name: str, progress: Progress) -> Iterator[tuple[str, Path]]:
    """Yield (name, path) of each model in an argument: a folder, GGUF file, hub id, or a spec file
    with several.
    """
    if not name.lower().endswith(".json"):
        yield name, fetched(name, progress)
        return
    for spec in spec_files.load_model_specs(spec_files.expand([name])):
        yield spec.name, fetched(spec.located, progress, spec.revision)


def fetched(name: str, progress: Progress, revision: str | None = None) -> Path:
    """Return the path of a model, downloaded from the hub if it is not on this machine; InputError."""
    path = expanded(name)
    if exists(path):
        return path
    with progress.phase(f"fetching {name}", unit="bytes") as phase:
        if load_fn := backends.reader_of(name):
            engine, engine_class = backends.resolve(load_fn, None)
            files = engine_class.files(
                PlannedModel(
                    label=name,
                    engine=engine,
                    load_fn=load_fn,
                    model_dir=name,
                    max_tokens=1,
                    revision=revision,
                )
            )
            if files.is_remote:
                return Path(files.fetch(phase).model_dir)
        elif hub.is_hub_id(name):
            return hub.resolve(name, revision, watch=phase)
    raise InputError(
        f"{name}: no such folder or GGUF file, and no id of a model on the hub (owner/name)"
    )


def contents_of(paths: Sequence[Path], progress: Progress) -> dict[Path, Contents]:
    """Folder -> its ``Contents``, from a separate process, since Transformers is imported."""
    folders = [path for path in paths if not is_gguf(path)]
    for folder in folders:  # what cannot be read is reported before a process starts
        check_no_pipes(folder)
        checkpoint = Checkpoint(folder)
        assert None not in (checkpoint.config.raw, checkpoint.tensors)
    if not folders:
        return {}
    with progress.phase(title := "building models from configs"):
        found = run_in_subprocess(compare_all, title, folders=[str(folder) for folder in folders])
    return {folder: Contents(**fields) for folder, fields in zip(folders, found, strict=True)}
