"""Results that an earlier compare_q wrote -> the keys of today's format (``eval/results/results_json.py``)."""

from __future__ import annotations

from typing import Any

READABLE = (4,)
"""Older formats that are read."""


def upgraded(raw: dict[str, Any]) -> dict[str, Any]:
    """A results.json of a readable older format with the keys of today's; the reader finds what is damaged.

    Format 4 called windows "rows", the blocks of text that errors come from "stretches", and what a reference's store
    holds ("states" or "logits") its "kind".
    """
    models = raw.get("models")
    if not isinstance(raw.get("data"), dict) or not isinstance(models, list):
        return raw
    return {
        **raw,
        "data": with_renamed_key(raw["data"], "rows", "windows"),
        "models": [upgraded_model(model) if isinstance(model, dict) else model for model in models],
        "reference": upgraded_reference(raw.get("reference")),
        **({"parts": upgraded_parts(raw["parts"])} if "parts" in raw else {}),
    }


def upgraded_reference(reference: Any) -> Any:
    """What a results.json of format 4 says of a reference; None without one."""
    if not isinstance(reference, dict):
        return reference
    return with_renamed_key(with_renamed_key(reference, "kind", "contents"), "kind_reason", "contents_reason")


def upgraded_parts(parts: Any) -> Any:
    """The runs that a results.json of format 4 was merged from, each with its reference."""
    if not isinstance(parts, list):
        return parts
    return [
        {**part, "reference": upgraded_reference(part.get("reference"))} if isinstance(part, dict) else part
        for part in parts
    ]


def upgraded_model(model: dict[str, Any]) -> dict[str, Any]:
    """One model of a results.json of format 4."""
    estimates = model.get("estimates")
    if isinstance(estimates, dict):
        model = {**model, "estimates": with_renamed_key(estimates, "stretches", "blocks")}
    return with_renamed_key(model, "rows", "windows")


def upgraded_inspection(inspection: Any) -> Any:
    """The excerpts with single tokens from a report.html of format 4."""
    if isinstance(inspection, dict):
        return {renamed_key(key, "row", "window"): upgraded_inspection(value) for key, value in inspection.items()}
    return [upgraded_inspection(value) for value in inspection] if isinstance(inspection, list) else inspection


def with_renamed_key(found: dict[str, Any], old: str, new: str) -> dict[str, Any]:
    """The same object, in the same order, with one key called otherwise."""
    return {renamed_key(key, old, new): value for key, value in found.items()}


def renamed_key(key: str, old: str, new: str) -> str:
    """``new`` in place of ``old``."""
    return new if key == old else key


def timing(raw: Any) -> Any:
    """A row's ``timing``; in early results of format 5 a worker was started, and waited, before its model's turn."""
    if not isinstance(raw, dict) or "load_began" not in raw:
        return raw
    kept = {name: at for name, at in raw.items() if name not in ("prepared", "load_began")}
    return {**kept, "started": raw["load_began"]}
