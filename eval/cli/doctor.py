"""``doctor``: what checkpoints are, and what is wrong with them.

No engine is used, and no weight is loaded.  Exit status: 0; 1 if a number or an answer would be wrong; 2 for bad input.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from compare_q import backends
from compare_q.backends import hub
from compare_q.backends.base import PlannedModel
from compare_q.backends.checkpoint.contents import Contents, compare_all
from compare_q.backends.checkpoint.doctor import Report, Target, examine
from compare_q.backends.checkpoint.folder import Checkpoint
from compare_q.backends.common.errors import InputError
from compare_q.backends.common.json_files import exists, expanded
from compare_q.backends.common.messages import printable
from compare_q.eval.common.processes import run_in_subprocess
from compare_q.eval.common.progress import Progress
from compare_q.eval.specs import reading

TITLE_WIDTH = 11
NOTHING = "nothing wrong found"


def run(args: argparse.Namespace) -> int:
    """Examine every model that is named, and print what was found; returns the exit status."""
    progress = Progress()
    targets = [one for name in args.models for one in targets_of(name, progress)]
    found, wrong = compared(targets, progress), False
    for number, target in enumerate(targets):
        with progress.phase(f"examining {target.name}"):
            report = examine(target, targets[0] if number else None, found.get(target))
        print(*([""] if number else []), *map(printable, lines(report)), sep="\n")
        wrong = wrong or report.is_wrong
    return int(wrong)


def targets_of(name: str, progress: Progress) -> Iterator[Target]:
    """The models of one word after ``doctor``: a folder, a GGUF file, a hub id, or a spec file with several."""
    if not name.lower().endswith(".json"):
        yield target_of(name, progress, name)
        return
    for spec in reading.load_model_specs(reading.expand([name])):
        yield target_of(spec.located, progress, spec.name, spec.revision)


def target_of(name: str, progress: Progress, label: str, revision: str | None = None) -> Target:
    """A model, fetched from the hub if it is not here; InputError if it is nowhere."""
    path = expanded(name)
    if exists(path):
        return Target(label, path)
    load_fn = backends.reader_of(name)
    with progress.phase(f"fetching {name}", unit="bytes") as phase:
        if load_fn is not None:
            engine, engine_class = backends.resolve(load_fn, None)
            model = engine_class.files(
                PlannedModel(
                    label=label, engine=engine, load_fn=load_fn, model_dir=name, max_tokens=1, revision=revision
                )
            )
            if model.is_remote:
                return Target(label, Path(model.fetch(phase).model_dir))
        elif hub.is_hub_id(name):
            return Target(label, hub.resolve(name, revision, watch=phase))
    raise InputError(f"{name}: no such folder or GGUF file, and no id of a model on the hub (owner/name)")


def compared(targets: Sequence[Target], progress: Progress) -> dict[Target, Contents]:
    """Folder -> its ``Contents``, from a process of its own, since Transformers is imported."""
    folders = [target for target in targets if not target.is_gguf]
    for target in folders:  # what cannot be read is reported before a process starts
        checkpoint = Checkpoint(target.path)
        assert checkpoint.config.raw is not None
        assert checkpoint.tensors is not None
    if not folders:
        return {}
    title = "building models from configs"
    with progress.phase(title):
        found = run_in_subprocess(compare_all, title, folders=[str(target.path) for target in folders])
    return {target: Contents(**fields) for target, fields in zip(folders, found, strict=True)}


def lines(report: Report) -> list[str]:
    """An report as it is printed."""
    told = [f"  {title:{TITLE_WIDTH}} {text}" for title, text in report.facts]
    told += [f"  {finding}" for finding in report.findings] or [f"  {NOTHING}"]
    return [report.name, *told, *(f"  not checked: {reason}" for reason in report.unchecked)]


def short_form(name: str, path: Path, reference: Path | None) -> tuple[list[str], bool]:
    """For ``check``: what a model is in one line and its findings, and whether one of them is wrong.

    ``reference``: the model whose tokens it should have.  Models that are no folder and no GGUF file have no lines.
    """
    target = Target(name, path)
    if not target.is_gguf and not exists(path / "config.json"):
        return [], False
    report = examine(target, None if reference in (None, path) else Target("", reference))
    facts = dict(reversed(report.facts))  # the first of the groups of layers
    layers = facts.get("layers", "").partition(":")[0]
    return [
        f"{name}: {layers}; {facts['size']}; {facts['files']}",
        *(f"{name}: {finding}" for finding in report.findings),
    ], report.is_wrong
