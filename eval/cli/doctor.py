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
from compare_q.backends.checkpoint.doctor.examining import Examination, Patient, examine
from compare_q.backends.checkpoint.folder import Checkpoint
from compare_q.backends.common.errors import InputError
from compare_q.backends.common.json_files import exists, expanded
from compare_q.backends.common.messages import printable
from compare_q.eval.common.processes import apart
from compare_q.eval.common.progress import Progress
from compare_q.eval.specs import reading

TITLE_WIDTH = 11
NOTHING = "nothing wrong found"


def run(args: argparse.Namespace) -> int:
    """Examine every model that is named, and print what was found; returns the exit status."""
    progress = Progress()
    patients = [one for name in args.models for one in patients_of(name, progress)]
    found, wrong = compared(patients, progress), False
    for number, patient in enumerate(patients):
        with progress.phase(f"examining {patient.name}"):
            examination = examine(patient, patients[0] if number else None, found.get(patient))
        print(*([""] if number else []), *map(printable, lines(examination)), sep="\n")
        wrong = wrong or examination.is_wrong
    return int(wrong)


def patients_of(name: str, progress: Progress) -> Iterator[Patient]:
    """The models of one word after ``doctor``: a folder, a GGUF file, a hub id, or a spec file with several."""
    if not name.lower().endswith(".json"):
        yield patient_of(name, progress, name)
        return
    for spec in reading.load_model_specs(reading.expand([name])):
        yield patient_of(spec.located, progress, spec.name, spec.revision)


def patient_of(name: str, progress: Progress, label: str, revision: str | None = None) -> Patient:
    """A model, fetched from the hub if it is not here; InputError if it is nowhere."""
    path = expanded(name)
    if exists(path):
        return Patient(label, path)
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
                return Patient(label, Path(model.fetch(phase).model_dir))
        elif hub.is_hub_id(name):
            return Patient(label, hub.resolve(name, revision, watch=phase))
    raise InputError(f"{name}: no such folder or GGUF file, and no id of a model on the hub (owner/name)")


def compared(patients: Sequence[Patient], progress: Progress) -> dict[Patient, Contents]:
    """Folder -> its ``Contents``, from a process of its own, since Transformers is imported."""
    folders = [patient for patient in patients if not patient.is_gguf]
    for patient in folders:  # what cannot be read is reported before a process starts
        checkpoint = Checkpoint(patient.path)
        assert checkpoint.config.raw is not None
        assert checkpoint.tensors is not None
    if not folders:
        return {}
    title = "building models from configs"
    with progress.phase(title):
        found = apart(compare_all, title, folders=[str(patient.path) for patient in folders])
    return {patient: Contents(**fields) for patient, fields in zip(folders, found, strict=True)}


def lines(examination: Examination) -> list[str]:
    """An examination as it is printed."""
    told = [f"  {title:{TITLE_WIDTH}} {text}" for title, text in examination.facts]
    told += [f"  {finding}" for finding in examination.findings] or [f"  {NOTHING}"]
    return [examination.name, *told, *(f"  not checked: {reason}" for reason in examination.unchecked)]


def short_form(name: str, path: Path, reference: Path | None) -> tuple[list[str], bool]:
    """For ``check``: what a model is in one line and its findings, and whether one of them is wrong.

    ``reference``: the model whose tokens it should have.  Models that are no folder and no GGUF file have no lines.
    """
    patient = Patient(name, path)
    if not patient.is_gguf and not exists(path / "config.json"):
        return [], False
    examination = examine(patient, None if reference in (None, path) else Patient("", reference))
    facts = dict(reversed(examination.facts))  # the first of the groups of layers
    layers = facts.get("layers", "").partition(":")[0]
    return [
        f"{name}: {layers}; {facts['size']}; {facts['files']}",
        *(f"{name}: {finding}" for finding in examination.findings),
    ], examination.is_wrong
