"""Read specs from JSON files: wildcards, labels, masks, one reference.  And the settings file."""

from __future__ import annotations

import glob
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

from ...backends.common import json_files
from ...backends.common.engine_options import UNKNOWN_KEY, describe
from ...backends.common.errors import InputError
from ...backends.common.jsonl_kinds import label_of
from ...backends.common.message_text import printable, shortened, unicode
from ...backends.reference import pack_files
from . import misplaced_keys
from .spec_types import NOT_SWEPT, DataSpec, ModelSpec, Spec, SweptSpec, with_sweep_place

S = TypeVar("S", bound=Spec)
Say = Callable[[str], object]
ITEM_NAMES = {DataSpec: "text", ModelSpec: "model"}
"""The name of an item of a list of specs in error messages."""
KEYS_OF_RESULTS = {"format", "created", "models"}
"""Keys of results.json, which is sometimes given instead of a spec."""
NO_KLD_NOTE = (
    "no KL divergence: no model is the reference; mark one, best the unquantized one, "
    'with "reference": true in its spec, or give a stored one with --logits_file'
)
SETTINGS_VARIABLE = "COMPARE_Q_SETTINGS"
COMMAND_LINE = Path("command line")
"""In errors, the file of specs from the command line.

Their relative paths start in the working directory.
"""


def parse(
    kind: type[S], raw: Any, file: Path, where: str = "", places: Mapping[str, str] | None = None
) -> S:
    """Return a spec from parsed JSON; InputError in one line that names the file and the key.

    ``file``: relative paths of the spec start in its folder.  ``where``: comes before the key in
    errors.  ``places``: how keys are called in the file, if differently.
    """
    place = printable(f"{file}: {where}")
    if places is None:
        places = {}
    if isinstance(raw, dict):
        # Editors read the schema's address; it is not part of the spec.
        raw = dict(raw)
        raw.pop("$schema", None)
    try:
        json_files.check_values(raw)
        if kind is DataSpec and isinstance(raw, dict) and isinstance(raw.get("pack"), str):
            raw = with_keys_of_pack(raw, file.parent)
        spec = kind.model_validate(raw)
        if isinstance(spec, ModelSpec):
            misplaced_keys.check_options(spec)
    except InputError as error:
        raise InputError(f"{place}{with_sweep_place(str(error), places)}") from None
    except ValidationError as error:
        reason = fault_of(error, kind, raw)
        raise InputError(f"{place}{with_sweep_place(reason, places)}") from None
    spec._folder = file.parent
    spec._place = place
    spec._places = {key: place + place_in_file for key, place_in_file in places.items()}
    return spec


def fault_of(error: ValidationError, kind: type[Spec], raw: Any) -> str:
    """Return ``key: what is wrong`` with a spec, and where a key of another level belongs."""
    spec_kind: type[DataSpec] | type[ModelSpec] = ModelSpec
    kind_name = "model"
    if issubclass(kind, DataSpec):
        spec_kind = DataSpec
        kind_name = "data"
    reason = describe(error, kind.model_fields).removeprefix("(whole object): ")
    # For two faults a hint at the right place replaces the rest of the line, a similar key's name.
    # ``describe`` writes the first fault, ``SweptSpec`` the second.
    key, separator, _ = reason.partition(UNKNOWN_KEY)
    if separator:
        hint = misplaced_keys.hint_at_level(key, spec_kind, raw)
        if hint:
            return f"{key}{UNKNOWN_KEY}{hint}"
    axis = re.match(rf"sweep\.(\w+){NOT_SWEPT}", reason)
    if axis:
        hint = misplaced_keys.hint_at_axis(axis[1])
        if hint:
            return f"{axis[0]}{hint}"
    if isinstance(raw, dict) and raw and not raw.keys() & kind.model_fields:
        required = []
        for name, field in kind.model_fields.items():
            if field.is_required():
                required.append(name)
        reason += f"; it holds no key of a {kind_name} spec ({', '.join(required)}, ...)"
    return reason


def with_keys_of_pack(raw: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the keys of a data spec with those of the reference pack that it names.

    InputError if it is none.  ``folder``: where a relative path of the pack starts.
    """
    name = raw["pack"]
    path = folder / json_files.expanded(name)
    if json_files.exists(path):
        name = str(path)
    try:
        pack = pack_files.resolve(name, raw.get("revision"))
    except InputError as error:
        raise InputError(f"pack: {error}") from None
    return {**pack_files.data_keys(pack), **raw, "pack": str(pack.absolute())}


parse_data_spec = partial(parse, DataSpec)
parse_model_spec = partial(parse, ModelSpec)


def specs_in(kind: type[S], raw: Any, file: Path) -> list[S]:
    """Return the specs of a file's JSON, which is an object or a list.

    A ``sweep`` gives several model specs.  InputError names the number of the wrong entry, except
    for a text that is not in a list.
    """
    if raw == []:
        raise InputError(f"{printable(file)}: holds no {ITEM_NAMES[kind]}")
    if isinstance(raw, dict) and raw.keys() >= KEYS_OF_RESULTS:
        raise InputError(f"{printable(file)}: is the result of a run; compare-q show prints it")
    if isinstance(raw, list):
        entries = raw
    else:
        entries = [raw]
    specs: list[Spec] = []
    for number, entry in enumerate(entries, 1):
        where = f"{ITEM_NAMES[kind]} {number}{label_in_brackets(entry)}: "
        if kind is ModelSpec:
            specs += swept_models(entry, file, where)
        elif isinstance(raw, list):
            specs.append(parse(kind, entry, file, where))
        else:
            specs.append(parse(kind, entry, file))
    return cast(list[S], specs)


def swept_models(entry: Any, file: Path, where: str) -> list[ModelSpec]:
    """Return the model specs that an entry gives: one, or with a ``sweep`` one for each choice.

    The entry is parsed as a whole first: this checks the ``sweep`` itself.  Then each model is
    parsed with its values.  ``file``, ``where``: as in ``parse``.
    """
    swept = parse(SweptSpec, entry, file, where)
    models = []
    for row, places in swept.rows(entry):
        models.append(parse(ModelSpec, row, file, where, places))
    return models


def label_in_brackets(entry: Any) -> str:
    """Return the label of a spec for an error message; empty without one."""
    label = None
    if isinstance(entry, dict):
        label = entry.get("label")
    if not label:
        return ""
    return f" ({shortened(str(label), 60)})"


def load(kind: type[S], files: Iterable[Path], hint: str = "") -> list[S]:
    """Return the specs of all files in order.

    ``hint``: added to the error for a file that is not called .json.
    """
    specs: list[S] = []
    for file in files:
        try:
            raw = json_files.read_json(file)
        except InputError as error:
            reason = str(error)
            if hint and file.suffix.lower() != ".json":
                reason += f"; {hint}"
            raise InputError(reason) from None
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
    for label in labels:
        if labels.count(label) > 1:
            raise InputError(f"label: two texts are called {label!r}; give them different labels")


def load_model_specs(
    files: Iterable[Path], hint: str = "", say: Say = lambda _: None
) -> list[ModelSpec]:
    """Return the model specs of all files in order, with different labels."""
    return with_own_labels(load(ModelSpec, files, hint), say)


def with_own_labels(specs: Sequence[ModelSpec], say: Say) -> list[ModelSpec]:
    """Return the specs with different labels: the second model of one label is ``Label (2)``.

    A spec without a label has the label in the first line of its file, if there is one.  ``say`` is
    called with a line for each changed label.
    """
    specs = [labelled_by_file(spec) for spec in specs]
    labels = numbered([spec.name for spec in specs])
    labelled_specs = []
    for spec, label in zip(specs, labels, strict=True):
        if label == spec.name:
            labelled_specs.append(spec)
            continue
        name = printable(spec.name)
        model = printable(f"{spec.load_fn} {spec.located}")
        say(f"label: an earlier model is called {name} too; this one ({model}) is called {label}")
        labelled_specs.append(spec.model_copy(update={"label": label}))
    return labelled_specs


def labelled_by_file(spec: ModelSpec) -> ModelSpec:
    """Return a spec without a label with the label in the first line of its file, if any."""
    if spec.label is not None:
        return spec
    label = label_of(Path(spec.located))
    if not label:
        return spec
    return spec.model_copy(update={"label": unicode(label)})


def numbered(names: Sequence[str], taken: Collection[str] = ()) -> list[str]:
    """Return different names: the second ``name`` is ``name (2)``, or has the next free number.

    A number is free if ``names`` and ``taken`` do not have the name with it.
    """
    different: list[str] = []
    for name in names:
        number = 1
        candidate = name
        is_free = candidate not in different and candidate not in taken
        while not is_free:
            number += 1
            candidate = f"{name} ({number})"
            # A later item that is called so keeps its name.
            is_free = (
                candidate not in names and candidate not in different and candidate not in taken
            )
        different.append(candidate)
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
        # A file may be called as a pattern is: "[1].json".
        if json_files.exists(Path(pattern)) or not glob.has_magic(pattern):
            matches = [pattern]
        else:
            matches = sorted(glob.glob(pattern))
        if not matches:
            raise InputError(f"{printable(pattern)}: no file matches")
        for match in matches:
            files[Path(match)] = None
    return list(files)


def matching(labels: Sequence[str], mask: str | None) -> list[str]:
    """Return the labels that contain one of the mask's words; case is ignored.

    Semicolons separate the words.  Without a word all labels match.  InputError if none does.
    """
    words = []
    if mask is not None:
        for word in mask.split(";"):
            # "gguf;" has an empty word, which every label contains.
            if word.strip():
                words.append(word.strip().upper())
    matching_labels = []
    for label in labels:
        if not words or any(word in label.upper() for word in words):
            matching_labels.append(label)
    if not matching_labels:
        all_labels = printable(", ".join(labels))
        raise InputError(f"--mask: {mask!r} matches no label; there are: {all_labels}")
    return matching_labels


def apply_mask(specs: Sequence[ModelSpec], mask: str | None) -> list[ModelSpec]:
    """Return the models that match a mask, and the reference.

    Without the reference the others have no KL divergence.
    """
    labels = matching([spec.name for spec in specs], mask)
    return [spec for spec in specs if spec.name in labels or spec.is_reference]


def one_reference(
    specs: Sequence[ModelSpec], *, stored: bool = False
) -> tuple[list[ModelSpec], list[str]]:
    """Return (the specs with at most one reference, lines to print about the reference).

    Example files mark their unquantized model, so several files have several marks; the first one
    counts.  ``stored``: without a mark the reference is a store.
    """
    reference_specs = [spec for spec in specs if spec.is_reference]
    if not reference_specs and len(specs) > 1 and not stored:
        return list(specs), [NO_KLD_NOTE]
    if len(reference_specs) < 2:
        return list(specs), []
    others = reference_specs[1:]
    specs_with_one_reference = []
    for spec in specs:
        if spec in others:
            unmarked = spec.model_copy(update={"reference": False, "out_logits": None})
            specs_with_one_reference.append(unmarked)
        else:
            specs_with_one_reference.append(spec)
    first = reference_specs[0].name
    other_names = ", ".join(spec.name for spec in others)
    line = (
        f"{first} is the reference, as the first of {len(reference_specs)} that are marked; "
        f"not: {other_names}"
    )
    return specs_with_one_reference, [line]


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
    """Return the settings of ``$COMPARE_Q_SETTINGS``, or of the user's ``settings.json``.

    The latter is in the user's configuration folder.  Without a file the settings are empty.
    InputError names the file and the key.
    """
    path = os.environ.get(SETTINGS_VARIABLE)
    if path:
        file = Path(path)
    else:
        file = user_config_path("compare_q", appauthor=False) / "settings.json"
    if not file.is_file():
        return Settings()
    try:
        return Settings.model_validate(json_files.read_object(file))
    except ValidationError as error:
        raise InputError(f"{file}: {describe(error, Settings.model_fields)}") from None
