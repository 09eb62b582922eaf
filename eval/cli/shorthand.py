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
from ...backends.common import jsonl_kinds
from ...backends.common.errors import InputError
from ...backends.common.json_files import exists, expanded, is_file, is_folder
from ...backends.common.message_text import nearest, one_line, printable, redacted, unicode
from ...backends.reference import pack_files
from ...backends.reference.store import open_reference
from ...backends.scores_file import rollouts
from ..common.progress import Progress
from ..plots.measures import SUFFIXES
from ..specs import spec_files
from ..specs.spec_types import LM_EVAL_RUNS_TASKS, DataSpec, ModelSpec
from ..stats.windows_needed import WINDOWS
from ..text import hub_datasets

if TYPE_CHECKING:
    from ..run.runner import RunOutcome

LONGEST_WINDOW = 2048
"""Tokens per window, unless a model's context is shorter."""
CHAT_KEYS = {
    "dataset": "chat",
    "dataset_path": "HuggingFaceH4/ultrachat_200k",
    "dataset_split": "test_sft",
    "max_text_rows": 200,
    "dataset_display_name": "UltraChat",
}
"""The data spec of ``-d chat``."""
SHIPPED_TEXT = Path(__file__).parents[1] / "spec" / "opticks.txt"
"""Newton's Opticks (Project Gutenberg), for machines without the hub."""
HUB_SITES = ("huggingface.co", "hf.co")
NO_INPUT = (*SUFFIXES, ".html", ".csv", ".log")
"""Suffixes of files that no model or text has; hints at similar names leave them out."""
PATH_KEYS = ("tokenizer_dir", "path", "dataset_path", "dataset_data_files")
"""Keys of a data spec that may be paths."""
NO_MODEL = (
    "is a file, and no model that an engine reads: name a folder, a .gguf file, a hub id or a "
    "server's address; specs are given with -m, texts with -d, and finished runs are shown by "
    "compare-q show"
)
NO_SCORES = (
    "holds what an engine is to score, and no scores: name the file that a script made of it "
    "(docs/other_engines.md)"
)
NO_KIND = (
    "is a .jsonl file whose first line does not name its kind: scores of another engine begin with "
    '{"compare_q": "scores", ...} (docs/other_engines.md), rollouts with {"compare_q": "rollouts", '
    "...} (docs/rollouts.md); a text is given with -d"
)
UNKNOWN_KIND = (
    'which is no kind of file that compare_q reads: "scores" (docs/other_engines.md) or "rollouts" '
    "(docs/rollouts.md)"
)
LABEL_AND_MODEL = re.compile(r"((?!.+@[\w.-]+:)[^=/\\]+|[^=/\\@]+)=(.+)")
"""A label may have an @, unless the word reads as MODEL@ENGINE:OPTION=VALUE."""
MODEL_ENGINE_OPTIONS = re.compile(r"(.+?)@([\w.-]+):(\w+=.+)")
MODEL_ENGINE = re.compile(r"(.+)@([\w.-]+)")


class NamedModel(NamedTuple):
    """A model of the command line, the reason for its engine, and known facts about the model."""

    spec: ModelSpec
    reason: str
    tokenizer: str | None  # folder or hub id of its tokenizer
    context: int | None


class Parts(NamedTuple):
    """The parts of a word that names a model; without an engine it is empty."""

    label: str
    model: str  # folder, file, hub id or address
    engine: str  # load_fn, or an unknown word
    options: dict[str, Any]  # of the engine


def specs(
    model_words: Sequence[str],
    text_words: Sequence[str | DataSpec],
    progress: Progress,
    *,
    reference: bool = True,
    tokenizer: str | None = None,
    pythons: Collection[str] = (),
    general: str = "",
    **windows: Any,
) -> tuple[list[DataSpec], list[ModelSpec], list[str]]:
    """Return (the texts, the models, notes) of a run without specs.

    The notes are lines about the engines and the text that were chosen.

    ``model_words``, ``reference``, ``general``: as ``models`` takes them.  ``text_words``,
    ``tokenizer``, ``windows``: as ``texts`` takes them.  ``pythons``: engines and load_fns with
    another Python, in addition to the settings file.
    """
    other_pythons = {*pythons, *spec_files.load_settings().python}
    named_models = models(
        model_words, other_pythons, progress, reference=reference, general=general
    )
    data, notes_on_texts = texts(text_words, named_models, tokenizer, **windows)
    model_specs = [named.spec for named in named_models]
    notes = []
    for named in named_models:
        notes.append(f"{named.spec.name}: {named.spec.load_fn} ({named.reason})")
    return data, model_specs, notes + notes_on_texts


def models(
    words: Sequence[str],
    other_pythons: Set[str],
    progress: Progress,
    *,
    reference: bool,
    general: str = "",
) -> list[NamedModel]:
    """Return the models that the words name; with ``reference``, the first of several is marked.

    ``other_pythons``: engines and load_fns that run in another Python.  ``general``: load_fn of
    models without ``@ENGINE`` that several engines run; "" for the first installed one.

    Configs and tokenizers are downloaded from the hub.  InputError with all problems, one per line.
    """
    named_models: list[NamedModel] = []
    problems: list[str] = []
    # One model alone has nothing to be compared with.
    needs_reference = reference and len(words) > 1
    for word in words:
        try:
            is_reference = needs_reference and not is_rollouts(parts_of(word).model)
            named_models.append(
                model(word, other_pythons, progress, reference=is_reference, general=general)
            )
            needs_reference = needs_reference and not is_reference
        except InputError as error:
            for line in str(error).splitlines():
                reason = line.removeprefix(f"{word}: ")
                problems.append(f"{printable(word)}: {reason}")
    if problems:
        raise InputError("\n".join(problems))
    specs = spec_files.with_own_labels([named.spec for named in named_models], progress.say)
    return [named._replace(spec=spec) for spec, named in zip(specs, named_models, strict=True)]


def model(
    word: str,
    other_pythons: Set[str],
    progress: Progress,
    *,
    reference: bool,
    general: str = "",
) -> NamedModel:
    """Return one model, from ``[label=]MODEL[@engine[:option=value,option=value]]``.

    The other arguments are those of ``models``.
    """
    parts = parts_of(word)
    name = parts.model
    try:
        config = config_of(name, progress)
    except InputError as error:
        name = pack_on_hub(name, progress, error)
        config = None
    # A spec, a text or a results.json: its place is after another flag or command.
    if is_file(expanded(name)) and not backends.reader_of(name):
        kind = jsonl_kinds.kind_of(expanded(name))
        if kind == jsonl_kinds.WINDOWS:
            raise InputError(NO_SCORES)
        if kind:
            raise InputError(f"is {printable(kind)!r} by its first line, {UNKNOWN_KIND}")
        if Path(name).suffix.lower() == jsonl_kinds.SUFFIX:
            raise InputError(NO_KIND)
        raise InputError(NO_MODEL)
    if parts.engine:
        load_fn = parts.engine
        reason = "as asked"
    else:
        load_fn, reason = backends.engine_for(name, config, other_pythons)
        if general and is_run_by(general, name, load_fn):
            load_fn = general
            reason = "exchanges modules"
    # An unknown engine is reported before other faults.
    _, engine_class = backends.resolve(load_fn, None)
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
        return NamedModel(spec, reason, spec.located, config.context)
    tokenizer = None
    if pack_files.is_pack(Path(spec.located)):
        tokenizer = str(Path(spec.located, pack_files.TOKENIZER))
    return NamedModel(spec, reason, tokenizer, context_without_config(spec))


def is_run_by(general: str, name: str, load_fn: str) -> bool:
    """Return True if ``general`` can run a model that ``load_fn`` runs by default."""
    if load_fn in (*backends.GENERAL, backends.DEQUANTIZING):
        return True
    _, engine_class = backends.resolve(general, None)
    return backends.reads_if_named(name, engine_class)


def is_rollouts(name: str) -> bool:
    """Return True for a file of rollouts, which is a text and a model, but no reference."""
    return jsonl_kinds.kind_of(expanded(name)) == jsonl_kinds.ROLLOUTS


def parts_of(word: str) -> Parts:
    """Return the parts of ``[label=]MODEL[@engine[:option=value,option=value]]``.

    What exists as a file or folder is a model, even if its name has ``=`` or ``@``.
    """
    label = ""
    name = word
    if not exists(expanded(name)):
        match = LABEL_AND_MODEL.fullmatch(name)
        if match:
            label, name = match.groups()
    if exists(expanded(name)):
        return Parts(label, name, "", {})
    words_of_options = ""
    match = MODEL_ENGINE_OPTIONS.fullmatch(name)
    if match:
        name, engine, words_of_options = match.groups()
    else:
        match = MODEL_ENGINE.fullmatch(name)
        if not match:
            return Parts(label, name, "", {})
        name, engine = match.groups()
    options = options_of(words_of_options)
    return Parts(label, name, backends.ENGINE_ALIASES.get(engine, engine), options)


def options_of(words: str) -> dict[str, Any]:
    """Return the options in ``option=value,option=value``; a value may have commas."""
    options: dict[str, Any] = {}
    if not words:
        return options
    for word in re.split(r",(?=\w+=)", words):
        key, _, value = word.partition("=")
        if key in options:
            raise InputError(f"engine.{key}: is given twice; give it once")
        options[key] = spec_files.json_or_word(value)
    return options


def own_label(name: str, options: Mapping[str, Any]) -> str:
    """Return the label of a model without one.

    It is the model's short name, or the label in a pack or in the first line of a file, and the
    options.
    """
    path = expanded(name)
    label = jsonl_kinds.label_of(path) or short_name(name)
    if pack_files.is_pack(path):
        label = pack_files.read(path).label
    for key, value in options.items():
        label += f" {key}={value}"
    return label


def context_without_config(spec: ModelSpec) -> int | None:
    """Return the context of a model without config.json, from its file.

    None for a server, or before a download.
    """
    engine, engine_class = backends.resolve(spec.load_fn, None)
    if not engine_class.capabilities.here:
        return None
    planned = PlannedModel(
        label=spec.name,
        engine=engine,
        load_fn=spec.load_fn,
        model_dir=spec.located,
        max_tokens=LONGEST_WINDOW,
        options=spec.options,
    )
    files = engine_class.files_of(planned)
    if files.is_remote:
        return None
    return files.facts().context


def pack_on_hub(name: str, progress: Progress, error: InputError) -> str:
    """Return the folder of a reference pack of the hub, which is downloaded.

    Raises the error if it is not a pack.
    """
    if hub.is_hub_id(name):
        with (
            suppress(InputError),
            progress.phase(f"fetching the pack {name}", unit="bytes") as phase,
        ):
            return str(pack_files.resolve(name, watch=phase))
        if is_folder(Path(name).parent):
            hint = hint_at_similar_name(Path(name))
            reason = str(error).removeprefix(f"{name}: ")
            raise InputError(f"no such folder or file{hint}; as a model of the hub: {reason}")
    raise error


def short_name(name: str) -> str:
    """Return a label: the last part of a path or hub id, or the address of a server."""
    address = address_of(name)
    if address.netloc:
        return address.netloc
    path = name
    if exists(expanded(name)):
        path = os.path.abspath(expanded(name))
    # The label does not have the number of a file of several.
    stem = Path(path).stem
    stem_of_split_file = re.sub(r"-\d{5}-of-\d{5}$", "", stem)
    return stem_of_split_file or name


def address_of(name: str) -> SplitResult:
    """Return the parts of an address; InputError for a wrong one.

    A name that is not an address has no ``netloc``.
    """
    try:
        return urlsplit(name)
    except ValueError as error:
        if exists(expanded(name)):
            return SplitResult("", "", name, "", "")
        raise InputError(f"not an address: {one_line(error)}") from None


def config_of(name: str, progress: Progress) -> CheckpointConfig | None:
    """Return a model's config.json; None if the model does not have one.

    It is fetched from the hub with the tokenizer.
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
        hint = ""
        if re.fullmatch(r"[\w.-]+:\d+(/.*)?", name):
            hint = "; a server's address begins with http://"
        elif "/" not in name:
            hint = "; a model on the hub is named owner/name"
        raise InputError(f"no such folder or file{hint_at_similar_name(folder)}{hint}")
    if not exists(folder / "config.json"):
        return None
    return CheckpointConfig.read(folder)


def hint_at_similar_name(path: Path, *other_names: str) -> str:
    """Return a hint at a similar name, for a path that does not exist.

    Names are those in the same folder, and the other names.
    """
    paths = {}
    if is_folder(path.parent):
        for name in os.listdir(path.parent):
            if Path(name).suffix.lower() not in NO_INPUT:
                paths[name] = str(path.parent / name)
    return nearest(path.name, [*paths, *other_names], paths)


def texts(
    words: Sequence[str | DataSpec],
    named_models: Sequence[NamedModel],
    tokenizer: str | None = None,
    **windows: Any,
) -> tuple[list[DataSpec], list[str]]:
    """Return (the texts that the words of ``-d`` name, lines about a text that no word names).

    A word is a spec or its file, ``wiki2`` or another known data set, ``chat``, or a file of text.
    Without a word: WikiText-2 if the hub or its cache has it, or else the shipped text.
    ``tokenizer``: a folder or hub id, for models without a tokenizer.  ``windows``: ``eval_len``,
    ``eval_stride`` and ``sample`` of texts without a spec, if not None; InputError if a text has a
    spec.
    """
    window_keys = {key: value for key, value in windows.items() if value is not None}
    # Texts with a spec have these keys in their spec.
    refused_keys = dict(window_keys)
    first_model = ""
    if named_models:
        first_model = named_models[0].spec.located
    notes: list[str] = []
    if not words and first_model and pack_files.is_pack(Path(first_model)):
        if tokenizer:
            refused_keys["tokenizer"] = tokenizer
        refuse_keys(refused_keys, "a reference pack")
        spec = spec_files.parse_data_spec({"pack": first_model}, spec_files.COMMAND_LINE)
        return [spec], ["text: of the pack"]
    rollouts_among_models: list[str] = []
    for named in named_models:
        if is_rollouts(named.spec.located):
            rollouts_among_models.append(named.spec.located)
    if not words and rollouts_among_models:
        words = rollouts_among_models[:1]
        notes = [f"text: the sequences of {printable(words[0])}"]
    if not words:
        default_word, notes = default_text()
        words = [default_word]
    # --tokenizer is for texts without a spec; if there is one, it is not refused.
    if tokenizer and all(isinstance(word, DataSpec) or is_spec_file(word) for word in words):
        refused_keys["tokenizer"] = tokenizer
    specs: list[DataSpec] = []
    for word in words:
        if isinstance(word, DataSpec):
            refuse_keys(refused_keys, "this text")
            specs.append(word)
        elif is_spec_file(word):
            refuse_keys(refused_keys, word)
            specs += spec_files.load_data_specs(spec_files.expand([word]))
        else:
            keys = keys_of_text(word)
            keys |= keys_of_windows(named_models, word, tokenizer, window_keys)
            # The slice is called as the user calls the text: kld:wiki2.
            if len(words) > 1 and "path" not in keys:
                keys["label"] = word
            specs.append(spec_files.parse_data_spec(keys, spec_files.COMMAND_LINE, f"-d {word}: "))
    spec_files.check_labels(specs)
    return specs, notes


def is_spec_file(word: str) -> bool:
    """True if a word of ``-d`` names a data spec, not a text."""
    return word.endswith(".json")


def default_text() -> tuple[str, list[str]]:
    """Return (the word of the text without ``-d``, lines about it)."""
    keys = {
        **keys_of_text("wiki2"),
        "tokenizer_dir": "-",
        "eval_len": LONGEST_WINDOW,
        "eval_stride": LONGEST_WINDOW,
    }
    try:
        hub_datasets.would_fetch(spec_files.parse_data_spec(keys, spec_files.COMMAND_LINE))
    except InputError as error:
        note = f"text: Newton's Opticks, which is shipped, instead of WikiText-2: {error}"
        return str(SHIPPED_TEXT), [note]
    return "wiki2", []


def with_default_windows(
    texts: Mapping[str, DataSpec], finished_store: Path | None
) -> dict[str, DataSpec]:
    """Return the texts by name, with a number of windows.

    A text gets the default if its windows are spread and its spec has no number.

    ``finished_store``: the reference store of the run if no model extends it; it may have fewer
    windows.
    """
    n_windows = WINDOWS
    if finished_store is not None:
        # The run reports a store that cannot be opened.
        with suppress(InputError):
            n_windows = min(n_windows, len(open_reference(finished_store).windows))
    sized: dict[str, DataSpec] = {}
    for name, spec in texts.items():
        if spec.sample == "spread" and spec.max_rows is None:
            spec = spec.model_copy(update={"max_rows": n_windows})
        sized[name] = spec
    return sized


def refuse_keys(keys: Mapping[str, Any], owner: str) -> None:
    """InputError if there are keys, of windows or ``tokenizer``, for a text with a data spec."""
    if keys:
        key = next(iter(keys))
        raise InputError(
            f"{key}: is for a text without a data spec, and {printable(owner)} has one; leave "
            f"{key} out"
        )


def keys_of_text(word: str) -> dict[str, Any]:
    """Return the keys of a data spec for the text that a word names."""
    if word == "chat":
        return dict(CHAT_KEYS)
    if word.startswith("lm_eval:"):
        raise InputError(f"-d: {printable(word)}: {LM_EVAL_RUNS_TASKS}")
    if word.lower() in hub_datasets.SOURCES:
        return {"dataset": word, "sample": "spread"}
    if is_rollouts(word):
        return {"dataset": jsonl_kinds.ROLLOUTS, "path": word}
    if exists(expanded(word)):
        return {"dataset": "text", "path": word, "sample": "spread"}
    known_texts = [*hub_datasets.SOURCES, "chat"]
    if re.match("https?:/", word):
        raise InputError(
            f"-d: {printable(word)}: is an address; download the text, and name its file"
        )
    hint = hint_at_similar_name(Path(word), *known_texts)
    raise InputError(
        f"-d: {printable(word)}: no such file{hint}; a text is a file, a spec (.json), or one of "
        f"{', '.join(known_texts)}"
    )


def keys_of_windows(
    named_models: Sequence[NamedModel],
    word: str,
    tokenizer: str | None,
    window_keys: Mapping[str, Any],
) -> dict[str, Any]:
    """Return ``window_keys`` and the keys that follow from the models.

    These are the tokenizer, and windows that fit all contexts.
    """
    for named in named_models:
        if not tokenizer:
            tokenizer = named.tokenizer
    if not tokenizer:
        raise InputError(
            f"-d: {printable(word)}: none of the models has a tokenizer in Transformers' format; "
            "give --tokenizer the folder or hub id of the unquantized model"
        )
    length = window_keys.get("eval_len")
    if not length and is_rollouts(word):
        length = rollouts.longest(expanded(word))
    if not length:
        contexts = [named.context for named in named_models if named.context]
        length = min([LONGEST_WINDOW, *contexts])
    keys: dict[str, Any] = {"tokenizer_dir": tokenizer, "eval_len": length}
    if word != "chat" and not is_rollouts(word):
        keys["eval_stride"] = length
    return {**keys, **window_keys}


def save(
    folder: Path,
    names: Sequence[str],
    data: Sequence[DataSpec],
    specs: Sequence[ModelSpec],
    outcome: RunOutcome,
) -> str:
    """Write the specs that repeat a run, and return the command that runs them.

    ``names``: of the two files in ``folder``.  The command sets environment variables that change
    scores, because specs cannot contain them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    text_keys = []
    for spec, text in zip(data, outcome.data.texts, strict=True):
        text_keys.append({**keys_of(spec, *PATH_KEYS), "max_rows": len(text.windows)})
    model_keys = [keys_of(spec, "model_dir") for spec in specs]
    data_file, models_file = [folder / name for name in names]
    data_file.write_text(json.dumps(text_keys, indent=4) + "\n", encoding="utf-8")
    models_file.write_text(json.dumps(model_keys, indent=4) + "\n", encoding="utf-8")
    words = ["compare-q", "-d", quoted(data_file), "-m", quoted(models_file)]
    return " ".join([*variables_of(outcome), *words])


def variables_of(outcome: RunOutcome) -> list[str]:
    """Return the assignments of environment variables that the provenance of a run names."""
    provenance: dict[str, Any] = {}
    for model in outcome.results.models:
        provenance |= model.provenance
    assignments = []
    for name in sorted(provenance.keys() & os.environ):
        if str(provenance[name]).startswith(os.environ[name]):
            assignments.append(f"{name}={quoted(os.environ[name])}")
    return assignments


def quoted(word: object) -> str:
    """Return a word for a shell."""
    return shlex.quote(printable(word))


def keys_of(spec: DataSpec | ModelSpec, *path_keys: str) -> dict[str, Any]:
    """Return the keys that a spec sets, with absolute paths and without secrets."""
    keys: dict[str, Any] = json.loads(spec.model_dump_json(exclude_unset=True))

    def absolute(name: str) -> str:
        path = spec.locate(name)
        if exists(Path(path)) or glob.glob(path):
            return os.path.abspath(path)
        return name

    for key in path_keys:
        if key in keys:
            keys[key] = hub_datasets.map_names(keys[key], absolute)
    return redacted(keys)  # type: ignore[no-any-return]
