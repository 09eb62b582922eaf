"""Results <-> results.json, and the results that a report.html holds.

    {"format": 7, <the keys of ORIGIN>, "title": ..., "texts": [...], "means": [...]}

A text is ``{"name": ..., "error": null, "data": ..., "subtitle": ..., "reference": ..., "models": [...]}``; of a text
that failed there are only its ``name`` and its ``error``.  ``means`` has an object for each model: ``label``,
``mean_kld`` (nats), ``mean_kld_stderr``, ``mean_ppl``, ``mean_ppl_stderr``, null where not known; it is made from the
texts, and not read.  A report.html holds this object.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from compare_q import __version__
from compare_q.backends.common import json_files, machine
from compare_q.backends.common.errors import InputError
from compare_q.backends.common.messages import one_line, printable, shortened, unicode
from compare_q.backends.common.options import describe
from compare_q.eval.common.files import write_text
from compare_q.eval.results import checks
from compare_q.eval.results.flat import flat_json
from compare_q.eval.results.run_result import ORIGIN, ModelResult, Results, TextResult

FORMAT = 7
"""Version of the layout of results.json: no other one is read."""
PAYLOAD = re.compile(rb'<script type="application/json" id="results">(.*?)</script>', re.DOTALL)
"""Where report.html holds its JSON."""
NO_RESULTS = "neither a results.json nor a report.html of compare_q"
_RESULTS = TypeAdapter(Results)


def results_json(results: Results, command: Sequence[str]) -> dict[str, Any]:
    """results.json: everything needed to check or repeat the run; a run that was read back keeps its own ``ORIGIN``."""
    return {
        "format": FORMAT,
        **(origin_now(command) if results.origin is None else results.origin),
        "title": results.title,
        "texts": [text_json(text) for text in results.texts],
        "means": [means_json(results, label) for label in results.labels],
    }


def origin_now(command: Sequence[str]) -> dict[str, Any]:
    """The ``ORIGIN`` of a run that has just been made by a command line."""
    return {
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": list(map(unicode, command)),
        "commit": machine.commit(),
        "versions": {**machine.versions(), "compare-q": __version__},
        "hardware": {
            **machine.hardware(machine.gpus(), cpu_only=machine.cpu_build_of_torch()),
            **machine.threads(),
        },
    }


def text_json(text: TextResult) -> dict[str, Any]:
    """What results.json has of a text, and of the models on it."""
    if text.error:
        return {"name": text.name, "error": text.error}
    return {
        "name": text.name,
        "error": None,
        "data": text.data,
        "subtitle": text.subtitle,
        "reference": text.reference,
        "models": [model_json(model) for model in text.models],
    }


def model_json(model: ModelResult) -> dict[str, Any]:
    """One model of a text for results.json."""
    return {
        **flat_json(model),
        "seconds": model.timing.seconds if model.timing else None,
        "timing": dataclasses.asdict(model.timing) if model.timing else None,
        "notes": list(model.notes),
        "spec": model.spec,
        "provenance": model.provenance,
        "estimates": dataclasses.asdict(model.estimates) if model.estimates else None,
        "worst_tokens": [dataclasses.asdict(token) for token in model.worst_tokens],
    }


def means_json(results: Results, label: str) -> dict[str, Any]:
    """A model's macro means over the texts."""
    kld, ppl = results.mean_kld(label), results.mean_ppl(label)
    return {
        "label": label,
        "mean_kld": kld.value,
        "mean_kld_stderr": kld.stderr,
        "mean_ppl": ppl.value,
        "mean_ppl_stderr": ppl.stderr,
    }


def json_text(results: Results, command: Sequence[str]) -> str:
    """The content of results.json."""
    return json.dumps(results_json(results, command), indent=2, allow_nan=False) + "\n"


def write_json(results: Results, file: Path, command: Sequence[str]) -> None:
    """Write results.json atomically."""
    write_text(file, json_text(results, command))


def load(file: Path) -> Results:
    """The results of a results.json or a report.html.  InputError in one line for another or a damaged file."""
    name = printable(file)
    content = json_files.read_bytes(file)
    is_object = content.lstrip().startswith(b"{")  # in which a label may hold what PAYLOAD looks for
    embedded = None if is_object else PAYLOAD.search(content)
    if embedded is None and not is_object:
        raise InputError(f"{name}: {NO_RESULTS}")
    raw = json_files.parsed(content if embedded is None else embedded[1], name)
    try:
        return from_json(raw)
    except InputError as error:
        raise InputError(f"{name}: {error}") from None


def from_json(raw: Any) -> Results:
    """The results of a results.json; InputError in one line if it is of another format, or damaged."""
    if not isinstance(raw, dict) or "format" not in raw:
        raise InputError("not a results.json of compare_q")
    if raw["format"] != FORMAT:
        raise InputError(
            f"results of format {shortened(repr(raw['format']), 20)}, but this compare_q reads format {FORMAT}; "
            "run compare_q again with -o (token scores in the cache are used)"
        )
    with damage_in_one_line("damaged results"):
        fields = {
            "texts": [text_fields(text) for text in raw["texts"]],
            "title": raw["title"],
            "origin": {key: raw[key] for key in ORIGIN},
        }
        # Strict, as JSON: lists become tuples, and nothing else becomes anything else.
        results = _RESULTS.validate_json(json.dumps(fields, allow_nan=False), strict=True)
        checks.check_results(results)
    return results


def text_fields(raw: dict[str, Any]) -> dict[str, Any]:
    """The fields of a ``TextResult`` from its ``text_json``."""
    if raw["error"] is not None:
        return {"name": raw["name"], "error": raw["error"]}
    models = [model_fields(model) for model in raw["models"]]
    return {key: raw[key] for key in ("name", "data", "subtitle", "reference")} | {"models": models}


def model_fields(raw: dict[str, Any]) -> dict[str, Any]:
    """The fields of a ``ModelResult`` from its ``model_json``."""
    same = ("label", "engine", "windows", "load_seconds", "score_seconds", "timing", "spec", "spec_sha256",
            "scores_key", "provenance", "notes", "estimates")  # fmt: skip
    size = {key: raw[key] for key in ("bpw_layer", "bpw_head", "vram_bits", "file_bytes")}
    return {key: raw[key] for key in same} | {
        "storage": {**size, "note": raw["storage_note"] or ""},
        "is_reference": raw["reference"],
        "cached": raw["from_cache"],
        "worst_tokens": raw.get("worst_tokens", []),  # which results made before have in their report alone
        "error": raw["error"] or "",
    }


@contextmanager
def damage_in_one_line(what: str) -> Iterator[None]:
    """InputError in one line for what a block that reads results finds damaged."""
    try:
        yield
        return
    except ValidationError as error:
        reason = describe(error, ())
    except KeyError as error:
        reason = f"{error.args[0]}: missing"
    except TypeError:
        reason = "no object where one must be"
    except ValueError as error:
        reason = one_line(error)
    raise InputError(f"{what}: {reason}") from None
