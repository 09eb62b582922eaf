"""The model card of ``--model-card``: Markdown for the README of a quantized model on the Hugging
Face hub.

Its YAML block holds the ``model-index``, which the hub reads: for each quantized row and text a
perplexity and a KL divergence, named by the row's label; an unknown value is left out.  Then come
the finding, the table, and how it was measured.  Paths are replaced by their last part.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from ...backends import hub
from ...backends.common.errors import InputError
from ..results import ModelResult, RunResult, UsedText
from ..stats.slices import Slice
from ..table import render, tables
from ..table.findings import listed, verdict

LOCAL = "python", "out_logits", "repeat", "replicas"
"""Keys of a model spec about places."""
FOLDERS, HOST = (
    re.compile(r"(?<![\w.:/~-])~?/(?:[^\s/\"'`|,;:]+/)+(?=[^\s/])"),
    re.compile(r"(?<=://)[^\s/\"']+"),
)
"""The folders of an absolute path, and the host of an address."""


def card_text(run: RunResult, names: Sequence[str] | None = None) -> str:
    """Return the model card of all quantized rows; ``names``: columns of its table.

    InputError if no row is quantized, or if the results do not name the data of a text.
    """
    rows = []
    for model in run.models:
        is_usual = not (model.reference or model.noise_floor)
        if model.is_quantized and model.blocks and is_usual:
            rows.append(model)
    if not rows:
        raise InputError("a model card is about quantized models, and none was measured")
    for text in run.texts:
        if not spec_of(text):
            raise InputError(
                f"{text.name}: the results lack the spec of this text, which names its data; run again"
            )
    originals = [str(model.spec.get("model_dir")) for model in run.models if model.reference]
    results: list[EvalResult] = []
    for text in run.texts:
        for model in rows:
            results += eval_results(run, text, model)
    index = ModelCardData(
        model_name=public(", ".join(model.label for model in rows)),
        base_model=next(filter(hub.is_hub_id, originals), None),
        eval_results=results,
    )
    measured = [model.updated(from_cache=False) for model in run.models if not model.error]
    shown = run.updated(models=tuple(measured))
    table = tables.table_of(shown, names)
    body = [
        "## What quantization lost",
        "",
        render.escaped(verdict(shown)),
        "",
        *render.markdown_lines(table.columns),
    ]
    body += ["", *render.note_lines(table), ""]
    body += ["## How it was measured", "", *how_measured(shown), ""]
    return str(ModelCard("\n".join(["---", index.to_yaml(), "---", "", *map(public, body)])))


def eval_results(run: RunResult, text: UsedText, model: ModelResult) -> Iterator[EvalResult]:
    """Yield the known results of a row on a text, unrounded, for the ``model-index``."""
    spec = spec_of(text)
    reference = run.reference["label"] if run.reference else None
    data = str(spec.get("dataset_path") or spec.get("dataset"))
    if data in ("text", "chat") or ("/" in data and not hub.is_hub_id(data)):
        data = public(text.name)
    row = model.marked_label
    scores: ModelResult | Slice | None = model
    if len(run.texts) > 1:
        row += f" on {text.name}"
        scores = model.slices.get(text.name)
    if scores is None:
        return
    for kind, title, value in (
        ("perplexity", "Perplexity", scores.ppl),
        (
            "kl_divergence",
            f"KL divergence from {reference}, nats per token",
            scores.kld if reference else None,
        ),
    ):
        if value is not None:
            yield EvalResult(
                task_type="text-generation",
                metric_type=kind,
                metric_name=public(f"{title} ({row})"),
                metric_value=value,
                dataset_name=public(text.name),
                dataset_type=data,
                dataset_config=spec.get("dataset_name"),
                dataset_revision=spec.get("revision"),
                dataset_split=spec.get("dataset_split") or spec.get("split"),
            )


def how_measured(run: RunResult) -> Iterator[str]:
    """Yield lines about texts, windows, engines and machines, and the specs and the command that
    repeat the run.
    """
    lines = []
    data_specs = []
    if len(run.texts) > 1:
        lines.append(f"Texts: {run.subtitle}")
    for text in run.texts:
        title = text.name if len(run.texts) > 1 else f"Text: {run.subtitle or text.name}"
        context = f"context of up to {text.window_length:,} tokens"
        lines.append(f"{title}; {context}, {text.scored_tokens:,} scored tokens")
        data_specs.append({**spec_of(text), "max_rows": text.windows})
    lines += facts_by_row(
        "Engine", run, [model.engine_version or model.engine for model in run.models]
    )
    lines += facts_by_row("Machine", run, [model.where or "not known" for model in run.models])
    lines.append(
        f"Versions: {', '.join(f'{name} {version}' for name, version in run.versions.items())}"
    )
    lines.append(f"Date: {run.created[:10]}")
    for line in lines:
        yield f"- {render.escaped(line)}"
    yield from [
        "",
        "To repeat it, write these two files, with your paths, and run the command below them.",
        "",
    ]
    model_specs = []
    for model in run.models:
        spec = {key: value for key, value in model.spec.items() if key not in LOCAL}
        if model.reference:
            spec["reference"] = True
        model_specs.append(spec)
    for name, specs in (("data.json", data_specs), ("models.json", model_specs)):
        shown = json.dumps(base_names(specs), indent=2, ensure_ascii=False).replace("```", "'''")
        yield from [
            "<details>",
            f"<summary>{name}</summary>",
            "",
            "```json",
            shown,
            "```",
            "",
            "</details>",
            "",
        ]
    has_stored_reference = run.reference is not None and not any(
        model.reference for model in run.models
    )
    stored = " -lf REFERENCE" if has_stored_reference else ""
    yield from ["```sh", f"compare-q -d data.json -m models.json{stored}", "```"]


def facts_by_row(title: str, run: RunResult, facts: Sequence[str]) -> Iterator[str]:
    """Yield a line for each different fact, with the labels of its rows if there are several facts;
    one per row.
    """
    different = dict.fromkeys(facts)
    for fact in different:
        labels = [
            model.label for model, each in zip(run.models, facts, strict=True) if each == fact
        ]
        rows = f" ({listed(labels)})" if len(different) > 1 else ""
        yield f"{title}: {fact}{rows}"


def spec_of(text: UsedText) -> dict[str, Any]:
    """Return the spec of a text; empty if the results do not have one that names the data."""
    return text.spec if text.spec.get("dataset") else {}


def base_names(value: Any) -> Any:
    """Return JSON types with each path as its last part and without the hosts of addresses; ids of
    the hub stay.
    """
    if isinstance(value, dict):
        return {key: base_names(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [base_names(each) for each in value]
    if (
        not isinstance(value, str)
        or "/" not in value
        or hub.is_hub_id(value)
        or re.search(r"[\n{<]", value)
    ):
        return value
    return HOST.sub("HOST", value) if "://" in value else PurePath(value).name


def public(words: str) -> str:
    """Return a text in which absolute paths have no folders."""
    return FOLDERS.sub("", words)
