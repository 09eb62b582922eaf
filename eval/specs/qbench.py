"""A project of ExLlamaV3's qbench (YAML) -> a data spec and a model spec, and what cannot be carried over.

Read in the source of ExLlamaV3, commit 4f8ad01; docs/from_compare_q_or_qbench.md has the table of keys.  The specs are
written beside the project, so that relative paths in them mean the same files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compare_q.backends.common import json_files
from compare_q.backends.common.errors import InputError
from compare_q.backends.common.json_files import expanded
from compare_q.backends.common.messages import one_line, printable
from compare_q.eval.specs import reading

ENGINES = {"transformers": "transformers_auto_bf16", "exllamav3": "exllamav3", "llamacpp": "llamacpp"}
OPTIONS = {
    "transformers": {"streaming", "dtype", "device_map", "trust_remote_code"}, "exllamav3": set[str](),
    "llamacpp": {"n_gpu_layers", "split_mode", "main_gpu"},
}  # fmt: skip
"""The options that have the same name and meaning here."""
FLAGS = {"title": "-t", "logit_cache": "--cache-dir and --cache-limit", "output": "--plots, -o and --html"}
"""Keys of a project that are flags here."""


@dataclass(frozen=True)
class Project:
    """The keys of a data spec and of model specs, and lines on what was not carried over."""

    data: dict[str, Any]
    models: list[dict[str, Any]]
    said: tuple[str, ...]


def convert(file: Path) -> tuple[Path, Path, tuple[str, ...]]:
    """Write both specs beside the project; returns their files and what was not carried over.

    InputError if the project is none, if a spec of it would be refused, or if a file is there already.
    """
    project = read(file)
    targets = [file.with_name(f"{file.stem}.{what}.json") for what in ("data", "models")]
    reading.parse_data_spec(project.data, targets[0])
    for number, model in enumerate(project.models, 1):
        reading.parse_model_spec(model, targets[1], f"model {number}: ")
    texts = [json_of(keys, printable(file)) for keys in (project.data, project.models)]
    for target in targets:
        if json_files.exists(target):
            raise InputError(f"{printable(target)}: is there already; move it away")
    for target, text in zip(targets, texts, strict=True):
        try:
            with target.open("x", encoding="utf-8") as stream:
                stream.write(text)
        except OSError as error:
            raise InputError(f"{printable(target)}: cannot be written: {error.strerror}") from None
    return targets[0], targets[1], project.said


def json_of(content: Any, name: str) -> str:
    """A spec as JSON; InputError for what YAML has and JSON has not, such as dates."""
    try:
        text = json.dumps(content, indent=4, ensure_ascii=False, allow_nan=False) + "\n"
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"{name}: has a value that cannot be written as JSON: {one_line(error)}") from None
    return text


def read(file: Path) -> Project:
    """A project in the words of compare_q; InputError in one line that names file and key."""
    import yaml

    name = printable(file)
    try:
        project = yaml.safe_load(json_files.read_bytes(file))
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise InputError(f"{name}: not valid YAML: {one_line(error)}") from None
    models = project.get("models") if isinstance(project, dict) else None
    if not isinstance(models, list) or not models or not all(isinstance(model, dict) for model in models):
        raise InputError(f"{name}: models: must be a list of models; is this a project of qbench?")
    said = [f"{key}: is a flag here, {flag}" for key, flag in FLAGS.items() if key in project]
    known = {*FLAGS, "test_data", "test_trace", "tokenizer", "models", "noise_floor"}
    said += [
        f"{printable(str(key))}: no key of qbench's that is known here; left out" for key in project if key not in known
    ]
    made = [model_of(model, f"{name}: models[{number}]", said) for number, model in enumerate(models)]
    marked = [model for model in made if model.get("reference")]
    if len(marked) != 1:
        raise InputError(f"{name}: models: {len(marked)} models of group reference; a project has one")
    if project.get("noise_floor", True):
        if marked[0]["load_fn"] == ENGINES["transformers"]:
            made.insert(made.index(marked[0]) + 1, floor_of(marked[0]))
        else:
            said.append("noise_floor: only a reference in Transformers has one here; left out")
    from_trace = "test_trace" in project
    data = trace_keys(project, marked[0], file, said) if from_trace else text_keys(project, name, said)
    return Project(data, made, tuple(said))


def model_of(raw: Mapping[str, Any], where: str, said: list[str]) -> dict[str, Any]:
    """One model's keys."""
    engine = raw.get("engine")
    if not isinstance(engine, str) or engine not in ENGINES or not isinstance(raw.get("source"), str):
        raise InputError(f"{where}: needs a source, and an engine out of {', '.join(ENGINES)}")
    options = raw.get("options") or {}
    if not isinstance(options, dict):
        raise InputError(f"{where}.options: must be a mapping")
    for key in sorted(options.keys() - OPTIONS[engine], key=str):
        said.append(f"{where.rpartition(': ')[2]}.options.{printable(str(key))}: left out; see docs/engines.md")
    model = {"load_fn": ENGINES[engine], "label": str(raw.get("label", raw["source"])), "model_dir": raw["source"]}
    if kept := {key: value for key, value in options.items() if key in OPTIONS[engine]}:
        model["engine"] = kept
    is_reference = raw.get("group") == "reference"
    return {
        **model,
        **({"reference": True} if is_reference else {"group": str(raw["group"])} if "group" in raw else {}),
    }


def floor_of(reference: Mapping[str, Any]) -> dict[str, Any]:
    """The reference once more, with noise of one rounding to bf16 behind every layer."""
    kept = {key: value for key, value in reference.items() if key != "reference"}
    engine = {**reference.get("engine", {}), "noise": "bf16"}
    return {**kept, "label": "Noise floor", "engine": engine, "noise_floor": True}


def text_keys(project: Mapping[str, Any], name: str, said: list[str]) -> dict[str, Any]:
    """The keys of a data spec from ``test_data`` and ``tokenizer``."""
    text, tokenizer = project.get("test_data"), project.get("tokenizer")
    if not isinstance(text, dict) or not isinstance(tokenizer, dict):
        raise InputError(f"{name}: test_data and tokenizer: both are needed where there is no test_trace")
    for key, where in (("source", tokenizer), ("source", text), ("length", text), ("rows", text)):
        if key not in where:
            raise InputError(f"{name}: {'test_data' if where is text else 'tokenizer'}.{key}: missing")
    if tokenizer.get("template") == "assistant" or "prompt" in tokenizer:
        said.append(
            "tokenizer.template: assistant, and tokenizer.prompt: the chat prefix here is that of template: true"
        )
    return {
        "tokenizer_dir": tokenizer["source"],
        "dataset": text["source"],
        "eval_len": text["length"],
        "eval_stride": text.get("stride", text["length"]),
        "max_rows": text["rows"],
        "chat_template": bool(tokenizer.get("template")),
    }


def trace_keys(project: Mapping[str, Any], reference: Mapping[str, Any], file: Path, said: list[str]) -> dict[str, Any]:
    """The keys of a data spec from ``test_trace``, with windows as long as its longest row."""
    trace = file.parent / expanded(str(project["test_trace"]))
    rows = json_files.read_object(trace).get("rows")
    try:
        longest = max(len(row["input_ids"]) + len(row["response_ids"]) for row in rows or ())
    except (TypeError, KeyError, ValueError):
        raise InputError(f"{printable(trace)}: rows: must be a list of input_ids and response_ids") from None
    tokenizer = project.get("tokenizer") or {}
    source = tokenizer.get("source") if isinstance(tokenizer, dict) else None
    if source is None:
        said.append("tokenizer: the reference's, since a trace names none")
    return {
        "tokenizer_dir": source or reference["model_dir"],
        "dataset": "chat",
        "path": str(project["test_trace"]),
        "eval_len": longest,
    }
