"""A project of ExLlamaV3's qbench (YAML) -> a data spec and a model spec, and what cannot be carried over.

Read in the source of ExLlamaV3, commit 4f8ad01; docs/from_compare_q_or_qbench.md has the table of keys.  The specs are
written beside the project, so that relative paths in them mean the same files.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from compare_q.backends.common import json_files
from compare_q.backends.common.errors import InputError
from compare_q.backends.common.json_files import expanded
from compare_q.backends.common.messages import one_line, printable
from compare_q.backends.common.options import describe
from compare_q.eval.specs import reading
from compare_q.eval.specs.types import ModelSpec

ENGINES = {"transformers": "transformers_auto_bf16", "exllamav3": "exllamav3", "llamacpp": "llamacpp"}
OPTIONS = {
    "transformers": {"streaming", "dtype", "device_map", "trust_remote_code"}, "exllamav3": set[str](),
    "llamacpp": {"n_gpu_layers", "split_mode", "main_gpu"},
}  # fmt: skip
"""The options that have the same name and meaning here."""
FLAGS = {"title": "-t", "logit_cache": "--cache-dir and --cache-limit", "output": "--plots, -o and --html"}
"""Keys of a project that are flags here."""


class Keys(BaseModel):
    """Keys of a project; of those that are not known here the values are kept, too."""

    model_config = ConfigDict(extra="allow", coerce_numbers_to_str=True)


class Model(Keys):
    """One of a project's models."""

    source: str
    engine: Literal["transformers", "exllamav3", "llamacpp"]
    label: str | None = None
    group: str | None = None
    options: dict[str, Any] | None = None


class Text(Keys):
    """A project's ``test_data``."""

    source: str
    length: int
    rows: int
    stride: int | None = None


class Tokenizer(Keys):
    """A project's ``tokenizer``."""

    source: str | None = None
    template: bool | str = False
    prompt: Any = None


class Project(Keys):
    """A project's keys."""

    models: list[Model] = Field(min_length=1)
    test_data: Text | None = None
    test_trace: str | None = None
    tokenizer: Tokenizer = Tokenizer()
    noise_floor: bool = True


def convert(file: Path) -> tuple[list[str], str]:
    """Write both specs beside the project; returns what was not carried over, and the command that runs the specs.

    InputError if the project is none, if a spec of it would be refused, or if a file is there already.
    """
    data, models, said = read(file)
    targets = [file.with_name(f"{file.stem}.{what}.json") for what in ("data", "models")]
    reading.parse_data_spec(data, targets[0])
    reading.specs_in(ModelSpec, models, targets[1])
    for target in targets:
        if json_files.exists(target):
            raise InputError(f"{printable(target)}: is there already; move it away")
    for target, keys in zip(targets, (data, models), strict=True):
        target.write_text(json.dumps(keys, indent=4, default=str) + "\n", encoding="utf-8")  # YAML has dates
    return said, reading.command(*targets)


def read(file: Path) -> tuple[dict[str, Any], list[dict[str, Any]], list[str]]:
    """(the keys of a data spec, of model specs, lines on what was not carried over); InputError in one line."""
    import yaml

    name = printable(file)
    try:
        raw = yaml.safe_load(json_files.read_bytes(file))
        if not isinstance(raw, dict):
            raise InputError(f"{name}: is no project of qbench, which has keys such as models and test_data")
        project = Project.model_validate(raw)
    except ValidationError as error:
        raise InputError(f"{name}: {describe(error, Project.model_fields)}; is this a project of qbench?") from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise InputError(f"{name}: not valid YAML: {one_line(error)}") from None
    said = [
        f"{printable(str(key))}: "
        + (f"is a flag here, {FLAGS[key]}" if key in FLAGS else "no key of qbench's that is known here; left out")
        for key in project.model_extra or {}
    ]
    for number, model in enumerate(project.models):
        left_out = [key for key in model.options or {} if key not in OPTIONS[model.engine]]
        said += [f"models[{number}].options.{printable(key)}: left out; see docs/engines.md" for key in left_out]
    models = [model_of(model) for model in project.models]
    marked = [model for model in models if "reference" in model]
    if len(marked) != 1:
        raise InputError(f"{name}: models: {len(marked)} models of group reference; a project has one")
    if project.noise_floor and marked[0]["load_fn"] == ENGINES["transformers"]:
        floor = {key: value for key, value in marked[0].items() if key != "reference"}
        floor |= {"label": "Noise floor", "noise_floor": True, "engine": {**floor.get("engine", {}), "noise": "bf16"}}
        models.insert(models.index(marked[0]) + 1, floor)
    elif project.noise_floor:
        said.append("noise_floor: only a reference in Transformers has one here; left out")
    tokenizer = project.tokenizer
    if project.test_trace is not None:
        if tokenizer.source is None:
            said.append("tokenizer: the reference's, since a trace names none")
        source = tokenizer.source or marked[0]["model_dir"]
        longest = longest_row(file.parent / expanded(project.test_trace))
        data = {"tokenizer_dir": source, "dataset": "chat", "path": project.test_trace, "eval_len": longest}
        return data, models, said
    text = project.test_data
    if text is None or tokenizer.source is None:
        raise InputError(f"{name}: test_data and tokenizer: both are needed where there is no test_trace")
    if tokenizer.template == "assistant" or tokenizer.prompt is not None:
        said.append("tokenizer.template: assistant, and tokenizer.prompt: the chat prefix is that of template: true")
    data = {
        "tokenizer_dir": tokenizer.source, "dataset": text.source, "eval_len": text.length,
        "eval_stride": text.stride or text.length, "max_rows": text.rows, "chat_template": bool(tokenizer.template),
    }  # fmt: skip
    return data, models, said


def model_of(model: Model) -> dict[str, Any]:
    """One model's keys."""
    kept = {key: value for key, value in (model.options or {}).items() if key in OPTIONS[model.engine]}
    keys: dict[str, Any] = {
        "load_fn": ENGINES[model.engine], "label": model.label or model.source, "model_dir": model.source,
    }  # fmt: skip
    if kept:
        keys["engine"] = kept
    if model.group is not None:
        keys |= {"reference": True} if model.group == "reference" else {"group": model.group}
    return keys


def longest_row(trace: Path) -> int:
    """Tokens of the longest row of a trace."""
    try:
        rows = json_files.read_object(trace)["rows"]
        return max(len(row["input_ids"]) + len(row["response_ids"]) for row in rows)
    except (TypeError, KeyError, ValueError):
        raise InputError(f"{printable(trace)}: rows: must be a list of input_ids and response_ids") from None
