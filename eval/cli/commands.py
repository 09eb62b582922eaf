"""A dataclass for each command of the command line; its fields are the values of the flags.

Commands with the same flags share a group of fields, for example ``Inputs``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ..common.cache import default_root
from ..flips import flip_conditions
from ..table import conditions
from ..table.memory_fit import Fit
from ..where import parts
from ..where.recipe import Target


@dataclass(frozen=True)
class Inputs:
    """Models and texts, and which windows of the texts.

    Attributes:
        models: MODEL arguments; empty if ``specs`` gives the models.
        data: data specs, or with ``models`` texts.
        specs: files of model specs.
        rows: number of windows of each text, 0 for all; None for the default.
    """

    models: tuple[str, ...] = ()
    data: tuple[Path, ...] = ()
    specs: tuple[str, ...] = ()
    mask: str | None = None
    tokenizer: str | None = None
    eval_len: int | None = None
    eval_stride: int | None = None
    sample: str | None = None
    rows: int | None = None
    no_reference: bool = False


@dataclass(frozen=True)
class Resources:
    """Where models run, and what is stored of them.

    Attributes:
        gpus: names as in CUDA_VISIBLE_DEVICES; empty for all GPUs of one type.
        ray: address of a Ray cluster.
        deadline: seconds of silence after which a model is stopped.
        pythons: pairs of an engine and its Python.
        logits_file: reference store that is read, or made there.
    """

    gpus: tuple[str, ...] = ()
    ray: str | None = None
    deadline: float | None = None
    pythons: tuple[tuple[str, str], ...] = ()
    verbose: bool = False
    cache_dir: Path = field(default_factory=default_root)
    clear_cache: bool = False
    verify_weights: bool = False
    logits_file: Path | None = None


@dataclass(frozen=True)
class TableFlags:
    """The table: its columns, order and marks, and the conditions for a failed row."""

    columns: tuple[str, ...] | None = None
    sort: str | None = None
    fit: Fit | None = None
    notes: bool = False
    pairs: bool = False
    pair: tuple[tuple[str, str], ...] = ()  # labels of two models
    fail_if: tuple[conditions.Condition, ...] = ()


@dataclass(frozen=True)
class OutputFiles:
    """Files that a command writes; ``tokens_out`` and ``save_specs`` are folders."""

    output: Path | None = None
    csv: Path | None = None
    markdown: Path | None = None
    model_card: Path | None = None
    junit: Path | None = None
    html: Path | None = None
    tokens_out: Path | None = None
    save_specs: Path | None = None


@dataclass(frozen=True)
class PictureFlags:
    """Plots, and what they show.

    Attributes:
        plot_file: file of the scatter plot, also if only ``-p`` was given.
        card: file of the plot in the size for sharing.
        plots: folder for every kind of plot.
        front: file of the front of ``where --recipe``, next to ``plot_file``.
        measure: "kld" or "ppl"; None for KLD if it is known.
        kld_value: a word of ``measures.KLD_VALUES``; ``measure`` is "kld" with it.
        x_axis: a word of ``measures.size_of``; None for bits per weight.
        log_y: None if the data decide.
    """

    plot_file: Path | None = None
    card: Path | None = None
    plots: Path | None = None
    front: Path | None = None
    measure: str | None = None
    kld_value: str | None = None
    x_axis: str | None = None
    max_x: float = float("inf")
    max_y: float = float("inf")
    log_y: bool | None = None
    title: str | None = None
    dark: bool = False


@dataclass(frozen=True)
class RunCommand:
    """``run``, and ``check``, which ends before anything is scored (``only_checks``)."""

    inputs: Inputs
    resources: Resources
    table: TableFlags
    files: OutputFiles
    pictures: PictureFlags
    cache_limit: int | None = None  # bytes
    only_checks: bool = False


@dataclass(frozen=True)
class ShowCommand:
    """``show``; ``sources``: results.json or report.html of finished runs."""

    table: TableFlags
    files: OutputFiles
    pictures: PictureFlags
    sources: tuple[Path, ...] = ()
    mask: str | None = None
    verbose: bool = False


@dataclass(frozen=True)
class GateCommand:
    """``gate``; ``phase``: "prefill" or "decode", None for both."""

    inputs: Inputs
    resources: Resources
    files: OutputFiles
    sweeps: tuple[str, ...] = ()
    variants: tuple[str, ...] = ()
    phase: str | None = None
    baseline: Path | None = None
    arbiter: str | None = None  # an engine
    where: bool = False  # name the module where a variant begins to differ
    fail_if: tuple[conditions.Condition, ...] = ()


@dataclass(frozen=True)
class PackCommand:
    """``pack``; ``output``: the folder of the pack; ``sampled``: the model samples the text."""

    inputs: Inputs
    resources: Resources
    output: Path | None = None
    no_floor: bool = False
    logits: bool = False
    sampled: bool = False


@dataclass(frozen=True)
class WindowsCommand:
    """``windows``; ``output``: the file of the windows."""

    inputs: Inputs
    resources: Resources
    output: Path | None = None


@dataclass(frozen=True)
class FlipsCommand:
    """``flips``; ``results``: a file with the KLDs of the same models."""

    files: OutputFiles
    samples: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()
    margin: float | None = None  # a share, 0.01 for 1 %
    results: Path | None = None
    fail_if: tuple[flip_conditions.Condition, ...] = ()


@dataclass(frozen=True)
class WhereCommand:
    """``where``; ``by``, ``only``: how the modules are divided and exchanged (``eval/where/``).

    ``targets``: of recipes, which keep parts in ``keep_bits`` bits; None for 16.
    """

    inputs: Inputs
    resources: Resources
    files: OutputFiles
    pictures: PictureFlags
    by: str = parts.LAYER
    only: bool = False
    targets: tuple[Target, ...] = ()
    keep_bits: int | None = None
    cache_limit: int | None = None  # bytes


@dataclass(frozen=True)
class DoctorCommand:
    """``doctor``; ``models``: folders, files, hub ids, or files of specs."""

    models: tuple[str, ...] = ()


@dataclass(frozen=True)
class CacheCommand:
    """``cache``."""

    cache_dir: Path = field(default_factory=default_root)
    cache_limit: int | None = None  # bytes


@dataclass(frozen=True)
class EnginesCommand:
    """``engines``."""


Command = (
    RunCommand
    | ShowCommand
    | GateCommand
    | PackCommand
    | WindowsCommand
    | FlipsCommand
    | WhereCommand
    | DoctorCommand
    | CacheCommand
    | EnginesCommand
)
COMMAND_TYPES: dict[str, type[Command]] = {
    "run": RunCommand,
    "check": RunCommand,
    "show": ShowCommand,
    "gate": GateCommand,
    "pack": PackCommand,
    "windows": WindowsCommand,
    "flips": FlipsCommand,
    "where": WhereCommand,
    "doctor": DoctorCommand,
    "cache": CacheCommand,
    "engines": EnginesCommand,
}
"""Name of each command -> its dataclass."""
