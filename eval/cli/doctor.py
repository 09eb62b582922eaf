"""``doctor``: what checkpoints are, what would run, what is wrong; ``--against``: their weights beside a reference's.

No engine loads a weight.  Exit status: 0; 1 if a number or an answer would be wrong; 2 for bad input.
"""

from __future__ import annotations

import argparse
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from compare_q import backends
from compare_q.backends import hub
from compare_q.backends.base import LoadRequest
from compare_q.backends.checkpoint.contents import Checkpoint
from compare_q.backends.checkpoint.doctor import comparison, parameters
from compare_q.backends.checkpoint.doctor.comparison import LayerError, worst_first
from compare_q.backends.checkpoint.doctor.examining import Examination, Patient, examine
from compare_q.backends.common.errors import InputError
from compare_q.backends.common.json_files import exists, expanded
from compare_q.backends.common.messages import printable
from compare_q.backends.layers.groups import AFTER_LOADING, PLAIN, groups_from_json, short_kernel_name
from compare_q.backends.layers.names import NUMBER
from compare_q.backends.layers.schemes import UNKNOWN
from compare_q.eval.common.processes import apart
from compare_q.eval.common.progress import Progress
from compare_q.eval.specs import reading

TITLE_WIDTH = 11
NOTHING = "nothing wrong found"
WORST = 10
"""Matrices in the table; the picture has all."""
HEIGHT = 6.5
IN_LAYER = re.compile(r"\.(?:layers|h|blocks)\.(\d+)\.(.+)$")
NUMBERED = 3
"""How many of the worst matrices have their layer's number beside them."""


def run(args: argparse.Namespace) -> int:
    """Examine every model that is named; returns the exit status."""
    progress = Progress()
    against = patient_of(args.against, progress, args.against) if args.against else None
    patients = [one for name in args.models for one in patients_of(name, progress)]
    if args.plot_file and (against is None or len(patients) != 1):
        raise InputError("-p: doctor draws the errors of one model's weights; give one model, and --against")
    reference = against or (patients[0] if len(patients) > 1 else None)
    wanted, here, wrong = tensors_wanted(patients, progress), predictions(patients, progress), False
    for number, patient in enumerate(patients):
        errors = compared(patient, against, progress) if against is not None and patient != against else []
        with progress.phase(f"examining {patient.name}"):
            examination = examine(patient, None if patient == reference else reference, wanted.get(patient), errors)
        print(*([""] if number else []), *map(printable, lines(examination, here.get(patient, []))), sep="\n")
        if against is not None and patient != against:
            show(errors, Console())
            if args.plot_file:
                title = args.title or f"Weights of {patient.path.name} against {Path(args.against).name}"
                draw(errors, args.plot_file, title, dark=args.dark)
                print(f"plot: {args.plot_file}")
        wrong = wrong or examination.is_wrong
    return 1 if wrong else 0


def patients_of(name: str, progress: Progress) -> Iterator[Patient]:
    """The models of one word after ``doctor``: a folder, a GGUF file, a hub id, or a spec file with several."""
    if not name.lower().endswith(".json"):
        yield patient_of(name, progress, name)
        return
    for spec in reading.load_model_specs(reading.expand([name])):
        patient = patient_of(spec.located, progress, spec.name, spec.revision)
        yield replace(patient, load_fn=spec.load_fn, has_options=bool(spec.options))


def patient_of(name: str, progress: Progress, label: str, revision: str | None = None) -> Patient:
    """A model, fetched from the hub if it is not here; InputError if it is nowhere."""
    path = expanded(name)
    if exists(path):
        return Patient(label, path)
    load_fn = backends.reader_of(name)
    with progress.phase(f"fetching {name}", unit="bytes") as phase:
        if load_fn is not None:
            request = LoadRequest(label, load_fn, name, 1, revision=revision)
            model = backends.resolve(load_fn, None)[1].files(request)
            if model.is_remote:
                return Patient(label, Path(model.fetch(phase).model_dir))
        elif hub.is_hub_id(name):
            return Patient(label, hub.resolve(name, revision, watch=phase))
    raise InputError(f"{name}: no such folder or GGUF file, and no id of a model on the hub (owner/name)")


def tensors_wanted(patients: Sequence[Patient], progress: Progress) -> dict[Patient, Any]:
    """Folder -> what ``parameters.compared`` says of it, from a process of its own, since it imports Transformers."""
    folders = [patient for patient in patients if not patient.is_gguf]
    for patient in folders:  # what cannot be read is told before a process starts
        checkpoint = Checkpoint(patient.path)
        assert checkpoint.config.raw is not None
        assert checkpoint.tensors is not None
    paths = [str(patient.path) for patient in folders]
    if not folders:
        return {}
    title = "building models from configs"
    with progress.phase(title):
        told = apart(parameters.all_compared, title, folders=paths)
    return dict(zip(folders, told, strict=True))


def predictions(patients: Sequence[Patient], progress: Progress) -> dict[Patient, list[str]]:
    """Model -> lines on what would run here, by each engine that knows before it loads a weight, or by its spec's."""
    texts: dict[Patient, list[str]] = {patient: [] for patient in patients if not patient.is_gguf}
    for engine, engine_class in backends.engines():
        folders = [patient for patient in texts if patient.load_fn in ("", *engine_class.capabilities.load_fns)]
        predictor = engine_class.predictor() if folders else ""
        if isinstance(predictor, str):
            for patient in folders if predictor else []:
                texts[patient].append(f"{engine}: {predictor}")
            continue
        try:
            title = f"asking {engine} what would run"
            with progress.phase(title):
                told = apart(predictor, title, folders=[str(patient.path) for patient in folders])
        except InputError as error:
            told = [str(error)] * len(folders)
        for patient, groups in zip(folders, told, strict=True):
            asked = f"{engine} with its default options, not the spec's" if patient.has_options else engine
            texts[patient] += [f"{asked}: {text}" for text in kernels(groups)]
    return texts


def kernels(told: list[Any] | Mapping[str, str] | str) -> list[str]:
    """What would run, a line for each kernel: its layers, and the activations that it takes."""
    if isinstance(told, str):
        return [f"refuses it here: {told}"]
    if isinstance(told, Mapping):
        return [f"known after loading ({told[AFTER_LOADING]})"]
    counts: dict[tuple[str, str, str, str], int] = {}
    for group in groups_from_json(told):
        key = short_kernel_name(group.kernel), group.weights, group.activations, group.asked
        counts[key] = counts.get(key, 0) + group.count
    return [in_words(*key, count) for key, count in counts.items()]


def in_words(kernel: str, weights: str, activations: str, asked: str, count: int) -> str:
    """One kernel: ``Marlin: 30 layers in nvfp4 g16, activations bfloat16 (the checkpoint asks for nvfp4 g16)``.

    Engines join matrices, as q, k and v, so that the files store more of them than there are layers.
    """
    layers = "1 layer" if count == 1 else f"{count:,} layers (matrices that the engine joins are one)"
    if weights in PLAIN and weights == activations:
        return f"{kernel}: {layers} in {weights}"
    ran = "known after loading" if activations == UNKNOWN else activations
    otherwise = f" (the checkpoint asks for {asked})" if asked and activations != UNKNOWN else ""
    return f"{kernel}: {layers} in {weights}, activations {ran}{otherwise}"


def lines(examination: Examination, here: Sequence[str]) -> list[str]:
    """An examination as it is printed."""
    facts = [*examination.facts, *(("here", line) for line in here)]
    told = [f"  {title:{TITLE_WIDTH}} {text}" for title, text in facts]
    told += [f"  {finding}" for finding in examination.findings] or [f"  {NOTHING}"]
    return [examination.name, *told, *(f"  not checked: {reason}" for reason in examination.unchecked)]


def compared(patient: Patient, against: Patient, progress: Progress) -> list[LayerError]:
    """Every matrix of a model against the reference's, with progress."""
    if against.is_gguf:
        raise InputError(f"--against: {against.name}: must be a folder of safetensors")
    reference = Checkpoint(against.path)
    model = patient.gguf or Checkpoint(patient.path)
    total = comparison.weights_of(reference)
    with progress.phase(f"comparing the weights of {patient.name}", unit="weights", total=total) as phase:
        return list(comparison.layer_errors(model, reference, phase.advance))


def show(errors: Sequence[LayerError], console: Console) -> None:
    """Print the worst matrices, the kinds of layers (the worst median first), and what was not compared.

    InputError if nothing was compared.
    """
    ranked = worst_first(errors)
    if ranked:
        worst = [
            (printable(layer.name), layer.stored, f"{layer.error:.5f}", f"{layer.scale:.5f}")
            for layer in ranked[:WORST]
        ]
        console.print(table(("worst matrices", "stored", "relative error", "scale"), worst))
        kinds: dict[str, list[float]] = {}
        for layer in ranked:
            kinds.setdefault(NUMBER.sub("*", layer.name), []).append(layer.error or 0.0)
        rows = [
            (printable(kind), f"{len(values):,}", f"{median(values):.5f}", f"{max(values):.5f}")
            for kind, values in sorted(kinds.items(), key=lambda item: -median(item[1]))
        ]
        console.print(table(("kind of layer", "matrices", "median error", "largest"), rows))
    left_out = Counter(layer.note for layer in errors if layer.error is None)
    for note, count in left_out.items():
        name = next(layer.name for layer in errors if layer.note == note)
        more = f" (and {count - 1:,} more)" if count > 1 else ""
        console.print(f"{printable(name)}{more}: {printable(note)}", markup=False, highlight=False, soft_wrap=True)
    if not ranked:
        raise InputError("--against: no matrix of the model could be compared with the reference's")


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table whose first column is text and whose others are numbers."""
    made = Table(title=None)
    made.add_column(columns[0], overflow="fold")
    for name in columns[1:]:
        made.add_column(name, justify="right")
    for row in rows:
        made.add_row(*row)
    return made


def draw(errors: Sequence[LayerError], file: Path, title: str, *, dark: bool = False) -> None:
    """Draw the errors above zero over the number of the decoder layer, kinds of layers in colours."""
    from matplotlib.ticker import MaxNLocator

    from compare_q.eval.plots import looks, style

    shown = [(layer.name, layer.error) for layer in worst_first(errors) if layer.error and math.isfinite(layer.error)]
    points = [(match[1], match[2], error) for name, error in shown if (match := IN_LAYER.search(name))]
    kinds: dict[str, list[tuple[int, float]]] = {}
    for number, rest, error in points:  # the experts of a layer are one kind
        kinds.setdefault(re.sub(r"\.\d+(?=\.)", ".*", rest), []).append((int(number), error))
    subtitle = "relative error of each dequantized matrix, ||W_q - W|| / ||W||"
    with style.canvas(HEIGHT, title, subtitle, dark=dark) as (figure, axes, theme):
        for kind, (colour, marker) in looks.text_styles(sorted(kinds), theme.ink).items():
            line = zip(*sorted(kinds[kind]), strict=True)
            axes.plot(*line, label=kind, color=colour, linewidth=1, marker=marker, markersize=5)
        if style.is_wide(error for _, error in shown):
            axes.set_yscale("log")
            style.log_ticks(axes.yaxis)
        for number, _, error in points[:NUMBERED]:
            axes.annotate(
                number, (int(number), error), (0, 7), textcoords="offset points", ha="center", size=11,
                color=theme.ink, path_effects=style.halo(theme),
            )  # fmt: skip
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("decoder layer")
        axes.set_ylabel("relative error")
        if kinds:
            figure.legend(loc="outside right upper")
        style.save_figure(figure, file)


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
