"""Reading specs from JSON files: wildcards, labels, masks, one reference.  And the settings file."""

from __future__ import annotations

import glob
import itertools
import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

from platformdirs import user_config_path
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from compare_q.backends.common import json_files
from compare_q.backends.common.errors import InputError
from compare_q.backends.common.messages import printable, shortened
from compare_q.backends.common.options import describe
from compare_q.backends.reference import pack
from compare_q.eval.specs import levels
from compare_q.eval.specs.types import DataSpec, ModelSpec, Spec, SweptSpec, placed

S = TypeVar("S", bound=Spec)
Say = Callable[[str], object]
NAMES = {DataSpec: "text", ModelSpec: "model"}
"""The name of an item of a list of specs in error messages."""
OF_RESULTS = {"format", "created", "models"}
"""Keys of results.json, which is sometimes given instead of a spec."""
NO_REFERENCE = (
    'no KL divergence: no model is the reference; mark one, best the unquantized one, with "reference": true in its '
    "spec, or give a stored one with --logits_file"
)
SETTINGS = "COMPARE_Q_SETTINGS"
COMMAND_LINE = Path("command line")
"""In errors, the file of specs from the command line; their relative paths start in the working directory."""


def parse(kind: type[S], raw: Any, file: Path, where: str = "", places: Mapping[str, str] | None = None) -> S:
    """Return a spec from parsed JSON; InputError in one line that names the file and the key.

    ``file``: relative paths of the spec start in its folder.  ``where``: comes before the key in errors.  ``places``:
    how keys are called in the file, if differently.
    """
    place, places = printable(f"{file}: {where}"), places or {}
    if isinstance(raw, dict):
        raw = {key: value for key, value in raw.items() if key != "$schema"}  # for editors
    try:
        json_files.check_values(raw)
        if kind is DataSpec and isinstance(raw, dict) and isinstance(raw.get("pack"), str):
            raw = with_pack(raw, file.parent)
        spec = kind.model_validate(raw)
        if isinstance(spec, ModelSpec):
            levels.check_options(spec)
    except InputError as error:
        raise InputError(f"{place}{placed(str(error), places)}") from None
    except ValidationError as error:
        reason = fault_of(error, kind, raw)
        raise InputError(f"{place}{placed(reason, places)}") from None
    spec._folder, spec._place, spec._places = file.parent, place, {key: place + at for key, at in places.items()}
    return spec


def fault_of(error: ValidationError, kind: type[Spec], raw: Any) -> str:
    """Return ``key: what is wrong`` with a spec, and where a key belongs that is on the wrong level."""
    spec_kind: type[DataSpec] | type[ModelSpec] = DataSpec if issubclass(kind, DataSpec) else ModelSpec
    reason = describe(error, kind.model_fields).removeprefix("(whole object): ")
    key, unknown, _ = reason.partition(": unknown key")
    hint = levels.hint(key, spec_kind, raw) if unknown else ""
    if hint:
        return f"{key}{unknown}{hint}"
    axis = re.match(r"sweep\.(\w+): this key cannot have several values", reason)
    if axis and levels.hint_on_axis(axis[1]):
        return f"{axis[0]}{levels.hint_on_axis(axis[1])}"
    if isinstance(raw, dict) and raw and not raw.keys() & kind.model_fields:
        required = ", ".join(name for name, field in kind.model_fields.items() if field.is_required())
        reason += f"; it holds no key of a {'data' if spec_kind is DataSpec else 'model'} spec ({required}, ...)"
    return reason


def with_pack(raw: Mapping[str, Any], beside: Path) -> dict[str, Any]:
    """Return the keys of a data spec with those of the reference pack that it names; InputError if it is none."""
    path = beside / json_files.expanded(raw["pack"])
    try:
        folder = pack.resolve(str(path) if json_files.exists(path) else raw["pack"], raw.get("revision"))
    except InputError as error:
        raise InputError(f"pack: {error}") from None
    return {**pack.data_keys(folder), **raw, "pack": str(folder.absolute())}


parse_data_spec = partial(parse, DataSpec)
parse_model_spec = partial(parse, ModelSpec)


def specs_in(kind: type[S], raw: Any, file: Path) -> list[S]:
    """Return the specs of a file's JSON, which is an object or a list; a ``sweep`` gives several model specs."""
    if raw == []:
        raise InputError(f"{printable(file)}: holds no {NAMES[kind]}")
    if isinstance(raw, dict) and raw.keys() >= OF_RESULTS:
        raise InputError(f"{printable(file)}: is the result of a run; compare-q show prints it")
    specs: list[Spec] = []
    for number, entry in enumerate(raw if isinstance(raw, list) else [raw], 1):
        label = entry.get("label") if isinstance(entry, dict) else None
        where = f"{NAMES[kind]} {number}{f' ({shortened(str(label), 60)})' if label else ''}: "
        if kind is DataSpec:
            specs.append(parse(kind, entry, file, where if isinstance(raw, list) else ""))
        else:
            rows = parse(SweptSpec, entry, file, where).rows(entry)
            specs += [parse(ModelSpec, row, file, where, places) for row, places in rows]
    return cast(list[S], specs)


def load(kind: type[S], files: Iterable[Path], hint: str = "") -> list[S]:
    """Return the specs of all files in order; ``hint``: added to the error for a file that is not called .json."""
    specs = []
    for file in files:
        try:
            raw = json_files.read_json(file)
        except InputError as error:
            more = f"; {hint}" if hint and file.suffix.lower() != ".json" else ""
            raise InputError(f"{error}{more}") from None
        specs += specs_in(kind, raw, file)
    return specs


def load_data_specs(files: Iterable[Path], hint: str = "") -> list[DataSpec]:
    """Return the data specs of all files in order; InputError if two have the same label."""
    specs = load(DataSpec, files, hint)
    check_labels(specs)
    return specs


def check_labels(specs: Sequence[DataSpec]) -> None:
    """InputError if two texts of a run have the same label."""
    labels = [spec.label for spec in specs if spec.label is not None]
    if twice := next((label for label in labels if labels.count(label) > 1), None):
        raise InputError(f"label: two texts are called {twice!r}; give them different labels")


def load_model_specs(files: Iterable[Path], hint: str = "", say: Say = lambda _: None) -> list[ModelSpec]:
    """Return the model specs of all files in order, with different labels."""
    return with_own_labels(load(ModelSpec, files, hint), say)


def with_own_labels(specs: Sequence[ModelSpec], say: Say) -> list[ModelSpec]:
    """Return the specs with different labels: the second model of one label becomes ``Label (2)``, and ``say`` is
    called with a line about it."""
    found = []
    for spec, name in zip(specs, numbered([spec.name for spec in specs]), strict=True):
        if name != spec.name:
            model = printable(f"{spec.load_fn} {spec.located}")
            say(f"label: an earlier model is called {printable(spec.name)} too; this one ({model}) is called {name}")
        found.append(spec if name == spec.name else spec.model_copy(update={"label": name}))
    return found


def numbered(names: Sequence[str], taken: Collection[str] = ()) -> list[str]:
    """Return different names: the second ``name`` becomes ``name (2)``, or gets the next number that is not taken."""
    different: list[str] = []
    for name in names:
        others = (f"{name} ({number})" for number in itertools.count(2))
        free = (other for other in others if other not in names)
        own = (each for each in itertools.chain([name], free) if each not in different and each not in taken)
        different.append(next(own))
    return different


def as_json(spec: DataSpec) -> dict[str, Any]:
    """Return a data spec as JSON types for another process; ``from_json`` reverses it."""
    return {"keys": spec.model_dump(mode="json", exclude_unset=True), "folder": str(spec._folder)}


def from_json(saved: Mapping[str, Any]) -> DataSpec:
    """Return the data spec that ``as_json`` returned."""
    return parse_data_spec(saved["keys"], Path(saved["folder"]) / "data spec")


def expand(patterns: Iterable[str]) -> list[Path]:
    """Return spec files: wildcards are expanded in sorted order, and each file comes once."""
    files: dict[Path, None] = {}
    for pattern in patterns:
        is_name = json_files.exists(Path(pattern)) or not glob.has_magic(pattern)
        matches = [pattern] if is_name else sorted(glob.glob(pattern))
        if not matches:
            raise InputError(f"{printable(pattern)}: no file matches")
        files.update(dict.fromkeys(Path(match) for match in matches))
    return list(files)


def matching(labels: Sequence[str], mask: str | None) -> list[str]:
    """Return the labels that contain one of the mask's words, which are separated by semicolons; case is ignored.

    Without a mask all match.  InputError if none does.
    """
    words = [word.strip().upper() for word in (mask or "").split(";") if word.strip()]
    found = [label for label in labels if not words or any(word in label.upper() for word in words)]
    if not found:
        raise InputError(f"--mask: {mask!r} matches no label; there are: {printable(', '.join(labels))}")
    return found


def apply_mask(specs: Sequence[ModelSpec], mask: str | None) -> list[ModelSpec]:
    """Return the models that match a mask, and the reference, without which the others have no KL divergence."""
    named = matching([spec.name for spec in specs], mask)
    return [spec for spec in specs if spec.name in named or spec.is_reference]


def one_reference(specs: Sequence[ModelSpec], *, stored: bool = False) -> tuple[list[ModelSpec], list[str]]:
    """Return (the specs with at most one reference, lines to print about the reference).

    Example files mark their unquantized model, so several files have several marks; the first one counts.  ``stored``:
    without a mark the reference is a store.
    """
    marked = [spec for spec in specs if spec.is_reference]
    if len(marked) < 2:
        return list(specs), [NO_REFERENCE] if not marked and len(specs) > 1 and not stored else []
    first, others = marked[0].name, ", ".join(spec.name for spec in marked[1:])
    unmarked = {"reference": False, "out_logits": None}
    kept = [spec.model_copy(update=unmarked if spec in marked[1:] else {}) for spec in specs]
    return kept, [f"{first} is the reference, as the first of {len(marked)} that are marked; not: {others}"]


def json_or_word(text: str) -> Any:
    """Return what JSON reads in a word of the command line, else the word."""
    with suppress(ValueError):
        return json.loads(text)
    return text


class Settings(BaseModel):
    """The user's settings file, for every run on this machine.

    ``python``: engine or load_fn -> a Python, or the folder of a virtual environment:
    ``{"python": {"vllm_score": "/home/me/vllm/bin/python", "exllamav3": "~/venvs/exl3"}}``
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    python: dict[str, str] = Field(default_factory=dict)


def load_settings() -> Settings:
    """Return the settings of ``$COMPARE_Q_SETTINGS``, or of ``settings.json`` in the user's configuration folder.

    They are empty if there is no file; InputError names the file and the key.
    """
    chosen = os.environ.get(SETTINGS)
    file = Path(chosen) if chosen else user_config_path("compare_q", appauthor=False) / "settings.json"
    if not file.is_file():
        return Settings()
    try:
        return Settings.model_validate(json_files.read_object(file))
    except ValidationError as error:
        raise InputError(f"{file}: {describe(error, Settings.model_fields)}") from None
