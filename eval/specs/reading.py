"""Spec files of a command line -> specs: JSON, strictly; wildcards, masks, labels, one reference; the settings file."""

from __future__ import annotations

import glob
import os
import shlex
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

from platformdirs import user_config_path
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from compare_q.backends.common import json_files
from compare_q.backends.common.errors import InputError
from compare_q.backends.common.messages import printable, shortened
from compare_q.backends.common.options import describe
from compare_q.eval.specs.types import DataSpec, ModelSpec, Spec, SweptSpec, placed

S = TypeVar("S", bound=Spec)
Say = Callable[[str], object]
NAMES = {DataSpec: "text", ModelSpec: "model"}
"""What errors call one of a list."""
KEYS = {DataSpec: {"dataset", "eval_len"}, ModelSpec: {"load_fn", "model_dir"}}
"""Keys by which a spec of each kind is told from the other."""
OTHERS = {
    DataSpec: "is a model spec; give it with -m, and with -d the spec of a text",
    ModelSpec: "is a data spec; give it with -d, and with -m the specs of models",
}
"""What a spec is told that was given in place of one of this kind."""
NO_REFERENCE = (
    'no KL divergence: no model is the reference; mark one, best the unquantized one, with "reference": true in its '
    "spec, or give a stored one with --logits_file"
)
"""What a run of several models without a reference is told."""
SETTINGS = "COMPARE_Q_SETTINGS"


def parse(kind: type[S], raw: Any, file: Path, where: str = "", places: Mapping[str, str] | None = None) -> S:
    """A spec from parsed JSON; ``file`` names it in errors, and its folder is where relative paths start; ``where``
    comes before the key in errors, and ``places`` say where a key stands that is called otherwise in the file."""
    place = printable(f"{file}: {where}")
    if isinstance(raw, dict):
        raw = {key: value for key, value in raw.items() if key != "$schema"}  # for editors
    try:
        json_files.check_values(raw)
        spec = kind.model_validate(raw)
    except InputError as error:
        raise InputError(f"{place}{error}") from None
    except ValidationError as error:
        reason = describe(error, kind.model_fields).removeprefix("(whole object): ")
        other = ModelSpec if issubclass(kind, DataSpec) else DataSpec
        if reason.removesuffix(": unknown key") in other.model_fields:
            reason += f"; it is a key of {'model' if other is ModelSpec else 'data'} specs"
        raise InputError(f"{place}{placed(reason, places or {})}") from None
    spec._folder, spec._place = file.parent, place
    return spec


parse_data_spec = partial(parse, DataSpec)
parse_model_spec = partial(parse, ModelSpec)


def specs_in(kind: type[S], raw: Any, file: Path) -> list[S]:
    """The specs of a file's JSON, which is a list of objects, or one; a model spec with a ``sweep`` gives several."""
    if raw == []:
        raise InputError(f"{printable(file)}: holds no {NAMES[kind]}")
    specs: list[S] = []
    for number, entry in enumerate(raw if isinstance(raw, list) else [raw], 1):
        label = entry.get("label") if isinstance(entry, dict) else None
        keys = entry.keys() if isinstance(entry, dict) else set[str]()
        if not keys & KEYS[kind] and any(keys & others for others in KEYS.values()):
            raise InputError(f"{printable(file)}: {OTHERS[kind]}")
        where = f"{NAMES[kind]} {number}{f' ({shortened(str(label), 60)})' if label else ''}: "
        if kind is ModelSpec:
            specs += cast(list[S], rows_of(entry, file, where))
        else:
            specs.append(parse(kind, entry, file, where if isinstance(raw, list) else ""))
    return specs


def rows_of(entry: Any, file: Path, where: str) -> list[ModelSpec]:
    """The models that one object of a file stands for: several if it has a ``sweep``, of which nothing is left."""
    specs = []
    for keys, places in parse(SweptSpec, entry, file, where).rows(entry):
        spec = parse(ModelSpec, keys, file, where, places)
        spec._places = {key: printable(f"{file}: {where}{place}") for key, place in places.items()}
        specs.append(spec)
    return specs


def command(data: Path, models: Path) -> str:
    """The command line that runs two spec files."""
    return f"compare-q -d {shlex.quote(printable(data))} -m {shlex.quote(printable(models))}"


def load(kind: type[S], files: Iterable[Path], instead: str = "") -> list[S]:
    """The specs of all files in order; ``instead``: what a file is told that is no JSON, and is not called JSON."""
    return [spec for file in files for spec in specs_in(kind, read(file, instead), file)]


def read(file: Path, instead: str) -> Any:
    """The JSON of a spec file, as for ``load``."""
    try:
        return json_files.read_json(file)
    except InputError as error:
        hint = "" if file.suffix.lower() == ".json" else instead
        raise InputError(f"{error}; {hint}" if hint else str(error)) from None


def load_data_specs(files: Iterable[Path], instead: str = "") -> list[DataSpec]:
    """The data specs of all files in order; a file holds a list of texts, or one text.  No two have one label."""
    specs = load(DataSpec, files, instead)
    check_labels(specs)
    return specs


def check_labels(specs: Sequence[DataSpec]) -> None:
    """InputError if two texts of a run have one label."""
    labels = [spec.label for spec in specs if spec.label is not None]
    if twice := next((label for label in labels if labels.count(label) > 1), None):
        raise InputError(f"label: two texts are called {twice!r}; give each text of a run a label of its own")


def packed(spec: DataSpec) -> dict[str, Any]:
    """A data spec as JSON types, for another process; ``unpacked`` makes it a spec again."""
    return {"keys": spec.model_dump(mode="json", exclude_unset=True), "folder": str(spec._folder)}


def unpacked(packed: Mapping[str, Any]) -> DataSpec:
    """The data spec that ``packed`` holds."""
    return parse_data_spec(packed["keys"], Path(packed["folder"]) / "data spec")


def expand(patterns: Iterable[str]) -> list[Path]:
    """Spec files of a command line: names as they are, wildcards expanded in sorted order, each file once."""
    files: dict[Path, None] = {}
    for pattern in patterns:
        is_name = json_files.exists(Path(pattern)) or not glob.has_magic(pattern)
        matches = [pattern] if is_name else sorted(glob.glob(pattern))
        if not matches:
            raise InputError(f"{printable(pattern)}: no file matches")
        files.update(dict.fromkeys(Path(match) for match in matches))
    return list(files)


def load_model_specs(files: Iterable[Path], instead: str = "", say: Say = lambda _: None) -> list[ModelSpec]:
    """The model specs of all files in order; a file holds a list of models, or one model.  No two have one label."""
    return with_own_labels(load(ModelSpec, files, instead), say)


def with_own_labels(specs: Sequence[ModelSpec], say: Say) -> list[ModelSpec]:
    """The same specs, no two with one label: the second of one label is called ``Label (2)``, which is said."""
    names = numbered([spec.name for spec in specs])
    for spec, name in zip(specs, names, strict=True):
        if name != spec.name:
            model = printable(f"{spec.load_fn} {spec.located}")
            say(f"label: an earlier model is called {printable(spec.name)} too; this one ({model}) is called {name}")
    return [
        spec if name == spec.name else spec.model_copy(update={"label": name})
        for spec, name in zip(specs, names, strict=True)
    ]


def numbered(names: Sequence[str], taken: Collection[str] = ()) -> list[str]:
    """The same names, all different: the second of one name gets `` (2)``, the third `` (3)``, unless that is taken."""
    seen: set[str] = set(taken)
    different = []
    for name in names:
        own, number = name, 1
        while own in seen or (number > 1 and own in names):
            number += 1
            own = f"{name} ({number})"
        seen.add(own)
        different.append(own)
    return different


def matching(labels: Sequence[str], mask: str | None) -> list[str]:
    """The labels that hold one of the mask's semicolon-separated words (case ignored); all without a mask.

    InputError if there are none.
    """
    words = [word.strip().upper() for word in (mask or "").split(";") if word.strip()]
    found = [label for label in labels if not words or any(word in label.upper() for word in words)]
    if not found:
        raise InputError(f"--mask: {mask!r} matches no label; there are: {', '.join(labels)}")
    return found


def apply_mask(specs: Sequence[ModelSpec], mask: str | None) -> list[ModelSpec]:
    """The models that a mask leaves; the reference stays: without it the others would lose their KL divergence."""
    named = matching([spec.name for spec in specs], mask)
    return [spec for spec in specs if spec.name in named or spec.is_reference]


def one_reference(specs: Sequence[ModelSpec]) -> tuple[list[ModelSpec], list[str]]:
    """(the specs with at most one reference, lines that must be said about the reference).

    Example files mark their unquantized model, so that a run of several files has several marks: the first one counts.
    """
    marked = [spec for spec in specs if spec.is_reference]
    if len(marked) > 1:
        unmarked = {"reference": False, "out_logits": None}
        first, others = marked[0].name, ", ".join(spec.name for spec in marked[1:])
        kept = [spec if spec is marked[0] else spec.model_copy(update=unmarked) for spec in specs]
        return kept, [f"{first} is the reference, as the first of {len(marked)} that are marked; not: {others}"]
    if not marked and len(specs) > 1:
        return list(specs), [NO_REFERENCE]
    return list(specs), []


class Settings(BaseModel):
    """The user's settings file: which Python runs which engine, for every run on this machine.

    ``{"python": {"vllm_score": "/home/me/vllm/bin/python", "exllamav3": "~/venvs/exl3"}}``: engine or load_fn -> a
    Python, or the folder of a virtual environment.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    python: dict[str, str] = Field(default_factory=dict)


def settings_file() -> Path:
    """``$COMPARE_Q_SETTINGS``, else ``settings.json`` in the user's folder of settings."""
    chosen = os.environ.get(SETTINGS)
    return Path(chosen) if chosen else user_config_path("compare_q", appauthor=False) / "settings.json"


def load_settings() -> Settings:
    """The settings; empty where there is no file.  InputError in one line that names the file and the key."""
    file = settings_file()
    if not file.is_file():
        return Settings()
    try:
        return Settings.model_validate(json_files.read_object(file))
    except ValidationError as error:
        raise InputError(f"{file}: {describe(error, Settings.model_fields)}") from None
