"""The subcommands, and one table of their flags."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ...backends.common.errors import InputError
from ...backends.common.message_text import unicode
from ..flips import flip_conditions
from ..plots.measures import KLD_VALUES, SIZES
from ..specs.spec_types import Sample
from ..table import conditions
from . import flag_values

COMMANDS = {
    "run": "measure models (the word may be left out)",
    "check": "print what a run would do, and what it would refuse; starts no engine",
    "show": "print, draw, filter and combine finished runs",
    "gate": "check that several ways to run a model compute the same",
    "pack": "record a model as a reference pack, for machines without the model",
    "windows": "write what another engine is to score, for a file of its scores",
    "flips": "compare answers to tasks, from samples that lm_eval logged",
    "where": "find the modules in which a quantized model loses its KLD",
    "doctor": "describe checkpoints and what is wrong with them; loads nothing",
    "cache": "list what is kept of earlier runs, and keep it small",
    "engines": "list the engines, and how to install what is missing",
}
"""Subcommands and what they do."""
SUMMARIES = "".join(f"  {name:9}{summary}\n" for name, summary in COMMANDS.items())
PAGE = f"""\
compare-q measures what quantized language models lost: perplexity and KL
divergence, in the engines that serve them, in one table with error bars.

  compare-q Qwen/Qwen3-0.6B RedHatAI/Qwen3-0.6B-FP8-dynamic ./qwen3-Q4_K_M.gguf
    the first model is the reference; text, windows and engines follow from it
  compare-q -d data.json -m models.json -p -o results.json
    the same from specs: a plot, and a file that holds everything
  compare-q show results.json --sort kld --html report.html
    a finished run again, in another order, and as a report

{SUMMARIES}
`compare-q COMMAND --help` has the flags of a command, `compare-q --version` the
version. A model in a folder called like a command is ./NAME.
"""
"""``compare-q --help``."""

Kind = Literal[
    "arguments", "value", "values", "repeated", "switch", "constant", "yes or no", "help", "version"
]
"""How a flag takes its values:

- ``arguments``: no flag, but the words of a command that belong to no flag;
- ``value``: one word, and the flag may be given once;
- ``values``: all words up to the next flag, added to those of the same flag before;
- ``repeated``: one word for each metavar, and the flag may be given several times;
- ``switch``: none, its value is True;
- ``constant``: none, its value is ``Flag.constant``, and the field may be given once;
- ``yes or no``: none, its value is True for the first name and False for the second;
- ``help``, ``version``: none; prints and ends.
"""


@dataclass(frozen=True)
class Flag:
    """A flag of some commands, or their arguments.

    Attributes:
        names: as on the command line, the short one first; empty for arguments.
        commands: subcommands that take it.
        field: the field of a command's dataclass (``commands.py``) that gets the value.
        metavar: names of its values in the help; empty if it takes none.
        convert: returns the value of a word, or raises InputError; None for the word itself.
        required: True if a command needs at least one of these arguments.
    """

    names: tuple[str, ...]
    commands: tuple[str, ...]
    field: str
    help: str
    kind: Kind
    metavar: tuple[str, ...] = ()
    convert: Callable[[str], Any] | None = None
    constant: str = ""
    required: bool = False


def flag(
    names: str,
    commands: str,
    metavar: str,
    help: str,
    convert: Callable[[str], Any] | None = None,
    *,
    kind: Kind = "value",
    field: str = "",
    constant: str = "",
) -> Flag:
    """Return a flag; ``names``, ``commands`` and ``metavar`` have spaces between.

    ``field``: by default the last name, without dashes at the start and with _ for the others.
    """
    if not field:
        field = names.split()[-1].lstrip("-").replace("-", "_")
    return Flag(
        names=tuple(names.split()),
        commands=tuple(commands.split()),
        field=field,
        help=help,
        kind=kind,
        metavar=tuple(metavar.split()),
        convert=convert,
        constant=constant,
    )


def switch(names: str, commands: str, help: str) -> Flag:
    """Return a flag without a value."""
    return flag(names, commands, "", help, kind="switch")


def constant(names: str, commands: str, help: str, field: str, value: str) -> Flag:
    """Return a flag that sets one value of a field."""
    return flag(names, commands, "", help, kind="constant", field=field, constant=value)


def arguments(
    field: str,
    commands: str,
    metavar: str,
    help: str,
    convert: Callable[[str], Any] | None = None,
    *,
    required: bool = False,
) -> Flag:
    """Return the arguments of commands; ``required``: True for at least one."""
    return Flag(
        names=(),
        commands=tuple(commands.split()),
        field=field,
        help=help,
        kind="arguments",
        metavar=(metavar,),
        convert=convert,
        required=required,
    )


RUN = "run check"
"""Commands with the flags of a run."""
SCORING = "run check gate pack"
"""Commands that score models."""
CUTTING = f"{SCORING} windows where"
"""Commands that cut texts into windows."""
SHOWING = "run check show"
"""Commands with a table and pictures."""
EVERY = " ".join(COMMANDS)

FLAGS: dict[str, tuple[Flag, ...]] = {
    "what": (
        arguments(
            "models",
            RUN,
            "MODEL",
            "folders, hub ids, files or servers as [LABEL=]MODEL[@ENGINE]; the first is the "
            "reference",
        ),
        arguments(
            "models",
            "gate",
            "MODEL",
            "folders or hub ids as [LABEL=]MODEL[@ENGINE]; the others are compared with the first",
        ),
        arguments("models", "pack", "MODEL", "folder or hub id as [LABEL=]MODEL[@ENGINE]"),
        arguments(
            "models",
            "windows",
            "MODEL",
            "models of the later run, for tokenizer and length; a reference pack has its text",
        ),
        arguments("models", "where", "MODEL", "the reference, then the quantized model"),
        arguments(
            "models",
            "doctor",
            "MODEL",
            "folders, GGUF files, hub ids, or model specs",
            required=True,
        ),
        arguments(
            "sources",
            "show",
            "FILE",
            "results.json or report.html of finished runs; several become one table",
            flag_values.path,
            required=True,
        ),
        arguments(
            "samples",
            "flips",
            "RUN",
            "files or folders of samples as [LABEL=]PATH; the first is the reference",
        ),
        flag("--tasks", "flips", "A,B", "compare these tasks only", flag_values.names),
        flag(
            "--metrics",
            "flips",
            "A,B",
            "compare by these metrics only; each must be 0 or 1",
            flag_values.names,
        ),
        flag(
            "--margin",
            "flips",
            "1%",
            "test whether accuracies differ by less than this",
            flag_values.margin,
        ),
        flag(
            "--results",
            "flips",
            "FILE",
            "show KLDs of this results.json next to rows of the same label",
            flag_values.path,
        ),
        flag(
            "--by",
            "where",
            "PARTS",
            "layer (default), kind, matrix, or a regular expression for names of modules",
            flag_values.parts_pattern,
        ),
        switch("--only", "where", "quantize one part of the reference instead of restoring one"),
        flag(
            "--recipe",
            "where",
            "TARGET",
            "which parts to keep in 16 bits for kld=NATS or bpw=BITS (repeatable)",
            flag_values.recipe_target,
            kind="repeated",
            field="targets",
        ),
        flag(
            "--keep-bits",
            "where",
            "BITS",
            "16 (default), or 8 for a forecast of recipes in 8 bits",
            flag_values.keep_bits,
        ),
        flag(
            "-d --dataspec",
            f"{RUN} windows where",
            "TEXT",
            "data specs (JSON), whose windows are joined; with MODELs also "
            "wiki2, code, chat, or a file of text",
            flag_values.path,
            kind="values",
            field="data",
        ),
        flag(
            "-d --dataspec",
            "gate pack",
            "TEXT",
            "data spec (JSON) of one text; with MODELs also wiki2, code, chat, or a file of text",
            flag_values.path,
            kind="values",
            field="data",
        ),
        flag("-m --modelspec", SCORING, "SPEC", "model specs (JSON)", kind="values", field="specs"),
        flag("-mask --mask", SHOWING, "A;B", "only models with one of these words in the label"),
        flag(
            "--tokenizer",
            CUTTING,
            "FOLDER",
            "tokenizer for MODELs without one, as GGUF files",
            flag_values.text,
        ),
        switch(
            "--sampled", "pack", "record text that the model samples after prompts from the text"
        ),
        switch("--no-floor", "pack", "do not score the model once more for the noise floor"),
        switch(
            "--logits",
            "pack",
            "allow a pack of logits where states do not suffice; it is much larger",
        ),
        flag("--eval-len", CUTTING, "N", "with MODELs: tokens in a window", flag_values.count),
        flag(
            "--eval-stride",
            CUTTING,
            "N",
            "with MODELs: tokens between the starts of two windows",
            flag_values.count,
        ),
        flag(
            "--sample",
            "run check pack windows where",
            "WHICH",
            f"with MODELs: windows that -r takes: {' or '.join(get_args(Sample))}",
            flag_values.one_of(get_args(Sample)),
        ),
        switch("--no-reference", RUN, "do not compare MODELs with the first one"),
        flag(
            "-r --rows", CUTTING, "N", "number of windows of each text, or all", flag_values.windows
        ),
        flag(
            "--sweep",
            "gate",
            "KEY=A,B",
            "a variant for each value of a key of the model spec, as engine.NAME=A,B",
            flag_values.text,
            kind="repeated",
            field="sweeps",
        ),
        flag(
            "--variant",
            "gate",
            "LABEL:KEY=A",
            "a variant with these keys, as new:python=~/vllm-new",
            flag_values.text,
            kind="repeated",
            field="variants",
        ),
        flag(
            "--phase",
            "gate",
            "PHASE",
            "prefill or decode alone",
            flag_values.one_of(("prefill", "decode")),
        ),
        flag(
            "--baseline",
            "gate",
            "FILE",
            "take the first variant's scores of this gate.json from the cache",
            flag_values.path,
        ),
        flag(
            "--arbiter",
            "gate",
            "ENGINE",
            "report which variant is nearer to float32 in this engine",
            flag_values.text,
        ),
        switch("--where", "gate", "name the module at which a variant begins to differ"),
        flag(
            "--fail-if",
            "run check show gate",
            "CONDITION",
            "fail if a row fulfils it, as 'kld > 0.05' or 'kld:SLICE > 0.1'",
            conditions.parse,
            kind="repeated",
        ),
        flag(
            "--fail-if",
            "flips",
            "CONDITION",
            "fail if a row fulfils it, as 'lost > 5' or not_equivalent",
            flip_conditions.parse,
            kind="repeated",
        ),
        flag(
            "-lf --logits_file",
            f"{RUN} windows",
            "FILE",
            "reference store to read, or to make",
            flag_values.path,
        ),
        switch(
            "-cc --clear_cache",
            f"{RUN} where",
            "first delete what is cached of this run's windows and models",
        ),
        switch("--verify-weights", f"{RUN} where", "identify models by every byte, not by samples"),
    ),
    "where": (
        flag("--gpus", f"{SCORING} where", "LIST", "GPUs to use, as 0,1", flag_values.names),
        flag(
            "--python",
            f"{SCORING} where",
            "ENGINE=PYTHON",
            "Python or virtual environment for an engine",
            flag_values.python_of_engine,
            kind="repeated",
            field="pythons",
        ),
        flag(
            "--ray",
            RUN,
            "ADDRESS",
            "run on the nodes of a Ray cluster; auto: the local",
            flag_values.text,
        ),
        flag(
            "--deadline",
            f"{SCORING} where",
            "SECONDS",
            "stop a model that is silent for this time",
            flag_values.seconds,
        ),
        switch("--verbose", "run check show gate pack where", "let engines print their logs"),
        flag(
            "--cache-dir",
            "run check gate pack windows where cache",
            "FOLDER",
            "where scores and references are kept",
            flag_values.path,
        ),
        flag(
            "--cache-limit",
            "run check where cache",
            "SIZE",
            "delete the oldest entries above SIZE, as 20GB",
            flag_values.size,
        ),
        flag("--version", "run", "", "print the version", kind="version"),
        flag("-h --help", EVERY, "", "print this", kind="help"),
    ),
    "table": (
        flag(
            "--columns",
            SHOWING,
            "A,B,C",
            "columns of table, Markdown, CSV and report, as label,kld,kld:SLICE",
            flag_values.column_names,
        ),
        flag(
            "--sort",
            SHOWING,
            "COLUMN",
            "order rows by a column, as kld or kld:SLICE",
            flag_values.sort_column,
        ),
        flag(
            "--fit",
            SHOWING,
            "24GB@32k",
            "mark rows that need more memory for this context",
            flag_values.fit,
        ),
        switch("--notes", SHOWING, "explain the columns and marks of the table"),
        switch("--pairs", SHOWING, "print the difference of each row from the next"),
        flag(
            "--pair",
            SHOWING,
            "A B",
            "print the difference of two models, by label",
            kind="repeated",
        ),
    ),
    "files": (
        flag(
            "-o --output",
            "run check show gate pack windows flips where",
            "FILE",
            "write the results as JSON, the pack, or the windows",
            flag_values.path,
        ),
        flag(
            "--csv",
            "run check show flips where",
            "FILE",
            "write the results as CSV",
            flag_values.path,
        ),
        flag(
            "--markdown",
            "run check show gate flips where",
            "FILE",
            "write the table, or the verdicts, as Markdown",
            flag_values.path,
        ),
        flag(
            "--model-card",
            SHOWING,
            "FILE",
            "write a model card for the hub about the quantized rows",
            flag_values.path,
        ),
        flag("--junit", "gate", "FILE", "write the verdicts as JUnit XML", flag_values.path),
        flag(
            "--html",
            f"{SHOWING} where",
            "FILE",
            "write a report as one HTML file",
            flag_values.path,
        ),
        flag(
            "--tokens-out",
            RUN,
            "FOLDER",
            "write the token scores of each model as Parquet",
            flag_values.path,
        ),
        flag(
            "--save-specs",
            RUN,
            "FOLDER",
            "write data.json and models.json of what ran",
            flag_values.path,
        ),
    ),
    "picture": (
        switch("-p --plot", SHOWING, "draw a scatter plot, into -pf or compare_q.png"),
        switch("-p --plot", "where", "draw bars of the shares, into -pf or compare_q.png"),
        flag(
            "-pf --plot_file",
            f"{SHOWING} where",
            "FILE",
            "file of the plot: .png, .svg or .pdf; implies -p",
            flag_values.path,
        ),
        flag(
            "--card",
            SHOWING,
            "FILE",
            "draw the plot in 1,200 x 675 pixels, to be shared",
            flag_values.path,
        ),
        flag("--plots", SHOWING, "FOLDER", "draw every kind of plot", flag_values.path),
        constant("-kld --kld", SHOWING, "plot KLD, the default if known", "measure", "kld"),
        constant("-ppl --ppl", SHOWING, "plot perplexity", "measure", "ppl"),
        flag(
            "--kld-value",
            SHOWING,
            "VALUE",
            f"plot this KLD: {', '.join(KLD_VALUES)}",
            flag_values.one_of(KLD_VALUES),
        ),
        flag(
            "--x-axis",
            SHOWING,
            "SIZE",
            f"plot over one of {', '.join(SIZES)}, memory:32k",
            flag_values.x_axis,
        ),
        constant("-v --vram", SHOWING, "plot over VRAM", "x_axis", "vram"),
        flag("-mx --max_x", SHOWING, "X", "leave out points beyond this x", flag_values.limit),
        flag("-my --max_y", SHOWING, "Y", "leave out points beyond this y", flag_values.limit),
        flag(
            "--log_y --no-log_y",
            SHOWING,
            "",
            "logarithmic or linear y axis; default: by the data",
            kind="yes or no",
            field="log_y",
        ),
        flag("-t --title", f"{SHOWING} where", "TITLE", "title of plots and report", unicode),
        switch("-dark --dark", f"{SHOWING} where", "dark plots"),
    ),
}
"""Every flag, under its heading in the help."""


def flags_of(command: str) -> dict[str, Flag]:
    """Return name -> flag of a subcommand, in the order of its help; arguments have no name."""
    flags: dict[str, Flag] = {}
    for group in FLAGS.values():
        for entry in group:
            if command in entry.commands:
                flags.update(dict.fromkeys(entry.names, entry))
    return flags


def converted(name: str, value: object) -> Any:
    """Return the value of a run's flag from Python; InputError names the flag.

    The value of ``rows`` is 0 for "all".
    """
    entry = flags_of("run")[f"--{name.replace('_', '-')}"]
    assert entry.convert is not None
    try:
        return entry.convert(str(value))
    except InputError as error:
        raise InputError(f"{name}: {error}") from None
