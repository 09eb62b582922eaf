"""Specs from a command line that names models and texts, and the reason for each engine.

    compare-q Qwen/Qwen3-0.6B fp8=RedHatAI/Qwen3-0.6B-FP8-dynamic ./qwen3-0.6b-Q4_K_M.gguf -d wiki2

``--save-specs`` writes these specs as two JSON files for ``-d`` and ``-m``.
"""

from __future__ import annotations

import glob
import json
import os
import re
import shlex
from collections.abc import Collection, Mapping, Sequence, Set
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import SplitResult, urlsplit

from ... import backends
from ...backends import hub
from ...backends.base import PlannedModel
from ...backends.checkpoint import gguf
from ...backends.checkpoint.checkpoint_config import CheckpointConfig
from ...backends.common.errors import InputError
from ...backends.common.json_files import exists, expanded, is_file, is_folder
from ...backends.common.message_text import nearest, one_line, printable, redacted, unicode
from ...backends.reference import pack_files
from ...backends.reference.store import open_reference
from ..common.progress import Progress
from ..plots.measures import SUFFIXES
from ..specs import spec_files
from ..specs.spec_types import LM_EVAL_RUNS_TASKS, DataSpec, ModelSpec
from ..stats.windows_needed import WINDOWS
from ..text import hub_datasets

if TYPE_CHECKING:
    from ..run.runner import RunOutcome

LENGTH = 2048
"""Tokens per window, unless a model's context is shorter."""
CHAT = {
    "dataset": "chat",
    "dataset_path": "HuggingFaceH4/ultrachat_200k",
    "dataset_split": "test_sft",
    "max_text_rows": 200,
    "dataset_display_name": "UltraChat",
}
SHIPPED = Path(__file__).parents[1] / "spec" / "opticks.txt"
"""Newton's Opticks (Project Gutenberg), for machines without the hub."""
HUB_SITES = ("huggingface.co", "hf.co")
NO_INPUT = (*SUFFIXES, ".html", ".csv", ".log")
"""Suffixes of files that are neither models nor texts; hints at similar names leave them out."""
PATHS = ("tokenizer_dir", "path", "dataset_path", "dataset_data_files")
"""Keys of a data spec that may be paths."""
NO_MODEL = """is a file, and no model that an engine reads: name a folder, a .gguf file, a hub id or a server's \
address; specs are given with -m, texts with -d, and finished runs are shown by compare-q show"""


class Named(NamedTuple):
    """A model of the command line, the reason for its engine, and known facts about the model."""

    spec: ModelSpec
    why: str
    tokenizer: str | None  # folder or hub id of its tokenizer
    context: int | None


class Parts(NamedTuple):
    """The parts of a word that names a model; without an engine it is empty."""

    label: str
    model: str  # folder, file, hub id or address
    engine: str  # load_fn, or an unknown word
    options: dict[str, Any]  # of the engine


def specs(
    words: Sequence[str],
    texts_named: Sequence[str | DataSpec],
    progress: Progress,
    *,
    reference: bool = True,
    tokenizer: str | None = None,
    pythons: Collection[str] = (),
    **windows: Any,
) -> tuple[list[DataSpec], list[ModelSpec], list[str]]:
    """Return (the texts, the models, lines about the engines and the text that were chosen) of a
    run without specs.

    ``words``, ``reference``: as ``models`` takes them.  ``texts_named``, ``tokenizer``,
    ``windows``: as ``texts`` takes them.  ``pythons``: engines and load_fns with another Python, in
    addition to the settings file.
    """
    named = models(
        words, {*pythons, *spec_files.load_settings().python}, progress, reference=reference
    )
    data, said = texts(texts_named, named, tokenizer, **windows)
    engines = [f"{each.spec.name}: {each.spec.load_fn} ({each.why})" for each in named]
    return data, [each.spec for each in named], engines + said


def models(
    words: Sequence[str], elsewhere: Set[str], progress: Progress, *, reference: bool
) -> list[Named]:
    """Return the models that the words name; with ``reference``, the first of several is marked.

    ``elsewhere``: engines and load_fns that run in another Python.  Configs and tokenizers are
    downloaded from the hub.  InputError with all problems, one per line.
    """
    named: list[Named] = []
    problems: list[str] = []
    for word in words:
        try:
            named.append(
                model(
                    word, elsewhere, progress, reference=reference and not named and len(words) > 1
                )
            )
        except InputError as error:
            problems += [
                f"{printable(word)}: {line.removeprefix(f'{word}: ')}"
                for line in str(error).splitlines()
            ]
    if problems:
        raise InputError("\n".join(problems))
    specs = spec_files.with_own_labels([each.spec for each in named], progress.say)
    return [each._replace(spec=spec) for spec, each in zip(specs, named, strict=True)]


def model(word: str, elsewhere: Set[str], progress: Progress, *, reference: bool) -> Named:
    """Return one model, from ``[label=]MODEL[@engine[:option=value,option=value]]``."""
    parts = parts_of(word)
    name = parts.model
    try:
        config = config_of(name, progress)
    except InputError as error:
        name = pack_on_hub(name, progress, error)
        config = None
    if is_file(expanded(name)) and not backends.reader_of(name):
        raise InputError(NO_MODEL)
    if parts.engine:
        load_fn, why = parts.engine, "as asked"
    else:
        load_fn, why = backends.engine_for(name, config, elsewhere)
    _, engine_class = backends.resolve(
        load_fn, None
    )  # an unknown engine is reported before other faults
    options = {**engine_class.capabilities.one_line.get(load_fn, {}), **parts.options}
    keys: dict[str, Any] = {
        "load_fn": load_fn,
        "label": unicode(parts.label or own_label(name, parts.options)),
        "model_dir": name,
    }
    if options:
        keys["engine"] = options
    if reference:
        keys["reference"] = True
    spec = spec_files.parse_model_spec(keys, spec_files.COMMAND_LINE)
    if config is not None:
        return Named(spec, why, spec.located, config.context)
    tokenizer = (
        str(Path(spec.located, pack_files.TOKENIZER))
        if pack_files.is_pack(Path(spec.located))
        else None
    )
    return Named(spec, why, tokenizer, context_without_config(spec))


def parts_of(word: str) -> Parts:
    """Return the parts of ``[label=]MODEL[@engine[:option=value,option=value]]``.

    What exists as a file or folder is a model, even if its name has ``=`` or ``@``.
    """
    label = ""
    name = word
    if not exists(expanded(name)):
        found = re.fullmatch(r"((?!.+@[\w.-]+:)[^=/\\]+|[^=/\\@]+)=(.+)", name)
        if found:
            label, name = found.groups()
    if exists(expanded(name)):
        return Parts(label, name, "", {})
    found = re.fullmatch(r"(.+?)@([\w.-]+):(\w+=.+)", name) or re.fullmatch(
        r"(.+)@([\w.-]+)()", name
    )
    if not found:
        return Parts(label, name, "", {})
    name, engine, listed = found.groups()
    options: dict[str, Any] = {}
    for pair in re.split(r",(?=\w+=)", listed) if listed else ():
        key, _, text = pair.partition("=")
        if key in options:
            raise InputError(f"engine.{key}: is given twice; give it once")
        options[key] = spec_files.json_or_word(text)
    return Parts(label, name, backends.ENGINE_ALIASES.get(engine, engine), options)


def own_label(name: str, options: Mapping[str, Any]) -> str:
    """Return the label of a model without one: its short name, or the label of a pack, and its
    options.
    """
    folder = expanded(name)
    label = pack_files.read(folder).label if pack_files.is_pack(folder) else short_name(name)
    return " ".join([label, *(f"{key}={value}" for key, value in options.items())])


def context_without_config(spec: ModelSpec) -> int | None:
    """Return the context of a model without config.json, from its file; None for a server, or
    before a download.
    """
    engine, engine_class = backends.resolve(spec.load_fn, None)
    if not engine_class.capabilities.here:
        return None
    planned = PlannedModel(
        label=spec.name,
        engine=engine,
        load_fn=spec.load_fn,
        model_dir=spec.located,
        max_tokens=LENGTH,
        options=spec.options,
    )
    files = engine_class.files(planned)
    return None if files.is_remote else files.facts().context


def pack_on_hub(name: str, progress: Progress, error: InputError) -> str:
    """Return the folder of a reference pack of the hub, which is downloaded; raise the error if it
    is not a pack.
    """
    if hub.is_hub_id(name):
        with (
            suppress(InputError),
            progress.phase(f"fetching the pack {name}", unit="bytes") as phase,
        ):
            return str(pack_files.resolve(name, watch=phase))
        if is_folder(Path(name).parent):
            reason = str(error).removeprefix(f"{name}: ")
            raise InputError(
                f"no such folder or file{near(Path(name))}; as a model of the hub: {reason}"
            )
    raise error


def short_name(name: str) -> str:
    """Return a label: the last part of a path or hub id, or the address of a server."""
    address = address_of(name)
    last = Path(os.path.abspath(expanded(name)) if exists(expanded(name)) else name).stem
    return address.netloc or re.sub(r"-\d{5}-of-\d{5}$", "", last) or name


def address_of(name: str) -> SplitResult:
    """Return the parts of an address; a name that is not an address has no ``netloc``.  InputError
    for a wrong one.
    """
    try:
        return urlsplit(name)
    except ValueError as error:
        if exists(expanded(name)):
            return SplitResult("", "", name, "", "")
        raise InputError(f"not an address: {one_line(error)}") from None


def config_of(name: str, progress: Progress) -> CheckpointConfig | None:
    """Return a model's config.json, fetched from the hub with the tokenizer; None if the model does
    not have one.
    """
    folder = expanded(name)
    if gguf.is_hub_file(name):
        return None
    if hub.is_hub_id(name):
        with progress.phase(f"fetching the config of {name}", unit="bytes") as phase:
            folder = hub.resolve(name, None, tokenizer_only=True, watch=phase)
    elif address_of(name).netloc in HUB_SITES:
        model_name = "/".join(address_of(name).path.split("/")[1:3])
        raise InputError(f"is a page of the hub; name the model as {model_name}")
    elif not exists(folder) and not address_of(name).netloc:
        hint = "" if "/" in name else "; a model on the hub is named owner/name"
        hint = (
            "; a server's address begins with http://"
            if re.fullmatch(r"[\w.-]+:\d+(/.*)?", name)
            else hint
        )
        raise InputError(f"no such folder or file{near(folder)}{hint}")
    return CheckpointConfig.read(folder) if exists(folder / "config.json") else None


def near(path: Path, *others: str) -> str:
    """Return a hint at a similar name in the same folder, or among the other names, for a path that
    does not exist.
    """
    paths = {}
    if is_folder(path.parent):
        for name in os.listdir(path.parent):
            if Path(name).suffix.lower() not in NO_INPUT:
                paths[name] = str(path.parent / name)
    return nearest(path.name, [*paths, *others], paths)


def texts(
    words: Sequence[str | DataSpec],
    named: Sequence[Named],
    tokenizer: str | None = None,
    **windows: Any,
) -> tuple[list[DataSpec], list[str]]:
    """Return (the texts that the words of ``-d`` name, lines about the text that was chosen without
    a word).

    A word is a spec or its file, ``wiki2`` or another known data set, ``chat``, or a file of text.
    Without a word: WikiText-2 if the hub or its cache has it, or else the shipped text.
    ``tokenizer``: a folder or hub id, for models without a tokenizer.  ``windows``: ``eval_len``,
    ``eval_stride`` and ``sample`` of texts without a spec, if not None; InputError if a text has a
    spec.
    """
    said: list[str] = []
    first, keys = (
        named[0].spec.located,
        {key: value for key, value in windows.items() if value is not None},
    )
    own_tokenizer = {"tokenizer": tokenizer} if tokenizer else {}
    if not words and pack_files.is_pack(Path(first)):
        refuse_keys({**keys, **own_tokenizer}, "a reference pack")
        return [spec_files.parse_data_spec({"pack": first}, spec_files.COMMAND_LINE)], [
            "text: of the pack"
        ]
    if not words:
        words = ["wiki2"]
        try:
            known = {
                **text("wiki2"),
                "tokenizer_dir": "-",
                "eval_len": LENGTH,
                "eval_stride": LENGTH,
            }
            hub_datasets.would_fetch(spec_files.parse_data_spec(known, spec_files.COMMAND_LINE))
        except InputError as error:
            words = [str(SHIPPED)]
            said = [f"text: Newton's Opticks, which is shipped, instead of WikiText-2: {error}"]
    if all(isinstance(word, DataSpec) or word.endswith(".json") for word in words):
        keys |= own_tokenizer
    specs: list[DataSpec] = []
    for word in words:
        if isinstance(word, DataSpec):
            refuse_keys(keys, "this text")
            specs.append(word)
        elif word.endswith(".json"):
            refuse_keys(keys, word)
            specs += spec_files.load_data_specs(spec_files.expand([word]))
        else:
            whole = {**text(word), **common(named, word, tokenizer, keys)}
            if len(words) > 1 and "path" not in whole:
                whole["label"] = word  # the slice is called as the user calls the text: kld:wiki2
            specs.append(spec_files.parse_data_spec(whole, spec_files.COMMAND_LINE, f"-d {word}: "))
    spec_files.check_labels(specs)
    return specs, said


def with_default_windows(
    texts: Mapping[str, DataSpec], finished_store: Path | None
) -> dict[str, DataSpec]:
    """Return the texts by name; those whose windows are spread have a number of windows, unless the
    spec has one.

    ``finished_store``: the reference store of the run if no model extends it; it may have fewer
    windows.
    """
    windows = WINDOWS
    if finished_store is not None:
        with suppress(InputError):  # the run reports it
            windows = min(windows, len(open_reference(finished_store).windows))
    sized: dict[str, DataSpec] = {}
    for name, spec in texts.items():
        if spec.sample == "spread" and spec.max_rows is None:
            spec = spec.model_copy(update={"max_rows": windows})
        sized[name] = spec
    return sized


def refuse_keys(keys: Mapping[str, Any], owner: str) -> None:
    """InputError if there are keys, of windows or ``tokenizer``, for a text that has a data spec."""
    for key in keys:
        raise InputError(
            f"{key}: is for a text without a data spec, and {printable(owner)} has one; leave {key} out"
        )


def text(word: str) -> dict[str, Any]:
    """Return the keys of a data spec for the text that a word names."""
    if word == "chat":
        return CHAT
    if word.startswith("lm_eval:"):
        raise InputError(f"-d: {printable(word)}: {LM_EVAL_RUNS_TASKS}")
    if word.lower() in hub_datasets.SOURCES:
        return {"dataset": word, "sample": "spread"}
    if exists(expanded(word)):
        return {"dataset": "text", "path": word, "sample": "spread"}
    known = [*hub_datasets.SOURCES, "chat"]
    if re.match("https?:/", word):
        raise InputError(
            f"-d: {printable(word)}: is an address; download the text, and name its file"
        )
    raise InputError(
        f"-d: {printable(word)}: no such file{near(Path(word), *known)}; a text is a file, a spec "
        f"(.json), or one of {', '.join(known)}"
    )


def common(
    named: Sequence[Named], word: str, tokenizer: str | None, windows: Mapping[str, Any]
) -> dict[str, Any]:
    """Return ``windows`` and what follows from the models: the tokenizer, and windows that fit all
    contexts.
    """
    tokenizer = tokenizer or next(filter(None, (each.tokenizer for each in named)), None)
    if tokenizer is None:
        raise InputError(
            f"-d: {printable(word)}: none of the models has a tokenizer in Transformers' format; give "
            "--tokenizer the folder or hub id of the unquantized model"
        )
    length = windows.get("eval_len") or min(
        [LENGTH, *(each.context for each in named if each.context)]
    )
    strides = {} if word == "chat" else {"eval_stride": length}
    return {"tokenizer_dir": tokenizer, "eval_len": length, **strides, **windows}


def save(
    folder: Path,
    names: Sequence[str],
    data: Sequence[DataSpec],
    specs: Sequence[ModelSpec],
    done: RunOutcome,
) -> str:
    """Write the data specs and the model specs that repeat a run, and return the command that runs
    them.

    ``names``: of the two files in ``folder``.  The command sets environment variables that change
    scores, because specs cannot contain them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    texts = []
    for spec, text in zip(data, done.data.texts, strict=True):
        texts.append({**keys_of(spec, *PATHS), "max_rows": len(text.windows)})
    words = []
    models = [keys_of(spec, "model_dir") for spec in specs]
    for flag, name, content in zip(("-d", "-m"), names, (texts, models), strict=True):
        (folder / name).write_text(json.dumps(content, indent=4) + "\n", encoding="utf-8")
        words += [flag, shlex.quote(printable(folder / name))]
    ran: dict[str, Any] = {}
    for model in done.results.models:
        ran |= model.provenance
    kept = [
        name
        for name in sorted(ran.keys() & os.environ)
        if str(ran[name]).startswith(os.environ[name])
    ]
    variables = [f"{name}={shlex.quote(printable(os.environ[name]))}" for name in kept]
    return " ".join([*variables, "compare-q", *words])


def keys_of(spec: DataSpec | ModelSpec, *paths: str) -> dict[str, Any]:
    """Return the keys that a spec sets, with absolute paths and without secrets."""
    keys: dict[str, Any] = json.loads(spec.model_dump_json(exclude_unset=True))

    def absolute(name: str) -> str:
        found = spec.locate(name)
        return os.path.abspath(found) if exists(Path(found)) or glob.glob(found) else name

    keys |= {key: hub_datasets.map_names(keys[key], absolute) for key in keys.keys() & set(paths)}
    return redacted(keys)  # type: ignore[no-any-return]
