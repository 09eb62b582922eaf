"""From the words of a command line to its command, a dataclass of ``commands.py``.

Only this file uses argparse: other files read the fields of the command.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, get_type_hints

from ... import __version__
from ...backends.common import json_files
from ...backends.common.errors import InputError
from ...backends.common.message_text import nearest, printable
from ..common.cache import default_root
from . import flag_checks
from .commands import COMMAND_TYPES, Command
from .flag_table import COMMANDS, FLAGS, PAGE, RUN, Flag, flags_of
from .help_text import help_of, usage_of

FOREIGN_FLAGS = {
    "-f": "-d",
    "--chunks": "-r",
    "--limit": "-r",
    "--device": "--gpus",
    "--tasks": "compare-q flips, for samples of lm_eval,",
    "-ngl": 'n_gpu_layers in "engine" of a model spec',
    "-c": "--eval-len, or eval_len in a data spec,",
    "--context": "--eval-len, or eval_len in a data spec,",
    "--ctx": "--eval-len, or eval_len in a data spec,",
    "--ctx-size": "--eval-len, or eval_len in a data spec,",
    "--dtype": 'dtype and kv_cache_dtype in "engine" of a model spec',
    "--kv-cache-dtype": 'dtype and kv_cache_dtype in "engine" of a model spec',
    "--model": "MODEL arguments (compare-q MODEL MODEL ...)",
    "--model_args": "MODEL arguments (compare-q MODEL MODEL ...)",
    "--reference": "the first MODEL",
    "--ref": "the first MODEL",
    "--kl-divergence": "the first MODEL",
    "--kl-divergence-base": "the first MODEL",
    "--kld-base": "the first MODEL",
    "--quantization": '"engine" in a model spec, or MODEL@vllm:option=value,',
    "--tensor-parallel-size": '"engine" in a model spec, or MODEL@vllm:option=value,',
    "-tp": '"engine" in a model spec, or MODEL@vllm:option=value,',
    "--max-model-len": '"engine" in a model spec, or MODEL@vllm:option=value,',
    "--trust-remote-code": '"engine" in a model spec, or MODEL@vllm:option=value,',
    "--json": "-o",
    "-hf": "MODEL arguments, also as owner/name,",
    "--until": "-r N (a run ends with the N for a standard error of 2 %)",
}
"""Flags of llama-perplexity, of lm-eval and of compare_q 0.3, and what compare-q has instead."""
DEFAULT_PLOT = Path("compare_q.png")


class StoreOnce(argparse.Action):
    """Store the value of a flag, or its ``const``; InputError if the field has a value already."""

    def __call__(
        self, _: Any, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        if hasattr(namespace, self.dest):
            raise InputError(
                f"{option}: is given twice, or with a flag that excludes it; give one of them"
            )
        if self.nargs == 0:
            values = self.const
        setattr(namespace, self.dest, values)


class Parser(argparse.ArgumentParser):
    """The parser of a subcommand; its errors are InputErrors of one line.

    Only fields that the command line gives are in its namespace: the dataclasses have the defaults.
    """

    def __init__(self, command: str) -> None:
        super().__init__(
            prog=f"compare-q {command}",
            usage=usage_of(command),
            allow_abbrev=False,
            add_help=False,
            argument_default=argparse.SUPPRESS,
        )
        self.command = command
        for group in FLAGS.values():
            for flag in group:
                if command in flag.commands:
                    self.add_flag(flag)

    def add_flag(self, flag: Flag) -> None:
        """Add a flag of ``flag_table``, or the command's arguments."""
        keys: dict[str, Any] = {}
        if flag.kind in ("arguments", "value", "values", "repeated"):
            keys["metavar"] = flag.metavar[0]
            if flag.convert is not None:
                keys["type"] = with_argparse_error(flag.convert)
        names = flag.names
        match flag.kind:
            case "arguments":
                keys |= {"nargs": "+" if flag.required else "*", "default": argparse.SUPPRESS}
            case "value":
                keys["action"] = StoreOnce
            case "values":
                keys |= {"action": "extend", "nargs": "+"}
            case "repeated":
                keys["action"] = "append"
                if len(flag.metavar) > 1:
                    keys |= {"nargs": len(flag.metavar), "metavar": flag.metavar}
            case "switch":
                keys["action"] = "store_true"
            case "constant":
                keys |= {"action": StoreOnce, "nargs": 0, "const": flag.constant}
            case "yes or no":
                keys["action"] = argparse.BooleanOptionalAction
                # The action itself adds the name with --no-.
                names = flag.names[:1]
            case "help":
                keys["action"] = "help"
            case "version":
                keys |= {"action": "version", "version": f"compare_q {__version__}"}
        if flag.kind == "arguments":
            self.add_argument(flag.field, **keys)
        else:
            self.add_argument(*names, dest=flag.field, **keys)

    def error(self, message: str) -> NoReturn:
        """Raise an InputError instead of printing the usage and ending."""
        raise InputError(f"{message.removeprefix('argument ')}; see {self.prog} --help")

    def format_help(self) -> str:
        """Return the page that ``--help`` prints."""
        return help_of(self.command)


def with_argparse_error(convert: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a function for ``add_argument(type=...)``, whose error argparse shows.

    argparse puts the flag's name before the unchanged text of an ArgumentTypeError.
    """

    def value_of(word: str) -> Any:
        try:
            return convert(word)
        except InputError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return value_of


def parse(words: Sequence[str]) -> Command:
    """Return the command of a command line; InputError for flags that cannot be combined.

    SystemExit after the page of help or the version.
    """
    if not words:
        print(PAGE, end="", file=sys.stderr)
        raise SystemExit(2)
    if words[0] in ("-h", "--help", "help"):
        print(PAGE, end="")
        raise SystemExit(0)
    name, flag_words = split_command(words)
    values = values_of(name, flag_words)
    # For every command: COMPARE_Q_CACHE may name a file instead of a folder.
    flag_checks.check_cache_folder(values.get("cache_dir", default_root()))
    is_plot = "plot" in values
    # -p takes no file, because the next word may be a model.
    if is_plot:
        values.setdefault("plot_file", DEFAULT_PLOT)
    if "kld_value" in values:
        flag_checks.check_measure(values.get("measure"))
        values["measure"] = "kld"
    values["only_checks"] = name == "check"
    command: Command = fill(COMMAND_TYPES[name], values)
    flag_checks.check(command, name, is_plot=is_plot)
    return command


def split_command(words: Sequence[str]) -> tuple[str, Sequence[str]]:
    """Return the command and the words after it; "run" and all words without a command.

    InputError for a word that resembles a command, and is not a file.
    """
    first = words[0]
    if first in COMMANDS:
        return first, words[1:]
    # A model's name mostly has a slash, a dot or a dash, which no command has.
    is_name = json_files.exists(first) or re.search(r"\W", first)
    if not is_name:
        hint = nearest(first, COMMANDS)
        if hint:
            raise InputError(
                f"{first}: no such command, folder or file{hint}; see compare-q --help"
            )
    return "run", words


def values_of(command: str, words: Sequence[str]) -> dict[str, Any]:
    """Return field -> value of the flags and arguments that the words give."""
    # Intermixed: models and texts may come before, between and after flags.
    namespace, unknown_words = Parser(command).parse_known_intermixed_args(
        normalize_flags(words, command)
    )
    if unknown_words:
        raise InputError(unknown(unknown_words[0], command))
    return vars(namespace)


def normalize_flags(words: Sequence[str], command: str) -> list[str]:
    """Return the words with flags as they are declared.

    In flags - and _ are equal, and so are one and two leading -.

    InputError for an unknown flag: argparse would read ``-output x`` as ``-o utput`` and a MODEL x.
    """
    declared_names = {name.replace("_", "-"): name for name in flags_of(command)}
    normalized = []
    for word in words:
        is_flag = word.startswith("-")
        # A negative number, a value without a space (-r64), - and -- are left to argparse.
        if re.match(r"-\d|-\w\d|-?$", word):
            is_flag = False
        if is_flag:
            name, equals, value = word.partition("=")
            plain = name.replace("_", "-")
            declared = declared_names.get(plain) or declared_names.get(f"-{plain}")
            if declared is None:
                raise InputError(unknown(name, command))
            word = f"{declared}{equals}{value}"
        normalized.append(word)
    return normalized


def unknown(word: str, command: str) -> str:
    """Return a line about a word or flag that a command does not take."""
    word = printable(word)
    see = f"see compare-q {command} --help"
    if not word.startswith("-"):
        return f"{word}: compare-q {command} takes no such word; {see}"
    if word in FOREIGN_FLAGS and command in RUN.split():
        return f"{word}: compare-q has {FOREIGN_FLAGS[word]} instead; {see}"
    # The same name in another command says more than a similar name in this one.
    for other in COMMANDS:
        if word in flags_of(other):
            return f"{word}: is a flag of compare-q {other}, not of compare-q {command}"
    hint = ""
    if word.startswith("--"):
        hint = nearest(word, flags_of(command))
    return f"{word}: compare-q {command} has no such flag{hint}; {see}"


def fill(kind: type[Any], values: Mapping[str, Any]) -> Any:
    """Return a dataclass with the values of its fields.

    A field that is a dataclass is filled in the same way.
    """
    types = get_type_hints(kind)
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        field_type = types[field.name]
        if dataclasses.is_dataclass(field_type):
            fields[field.name] = fill(types[field.name], values)
        elif field.name in values:
            fields[field.name] = as_tuples(values[field.name])
    return kind(**fields)


def as_tuples(value: Any) -> Any:
    """Return a value with tuples instead of lists, in which argparse collects words."""
    if isinstance(value, list):
        return tuple(as_tuples(item) for item in value)
    return value
