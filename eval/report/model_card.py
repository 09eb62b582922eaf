"""The model card of ``--model-card``: Markdown for the README of a quantized model on the Hugging Face hub.

Its YAML block holds the ``model-index``, which the hub reads: for each quantized row and text a perplexity and a KL
divergence, named by the row's label; an unknown value is left out.  Then come the finding, the table, and how it was
measured.  Paths are replaced by their last part."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from compare_q.backends import hub
from compare_q.backends.common.errors import InputError
from compare_q.eval.results import ModelResult, RunResult, TextResult
from compare_q.eval.table import render, tables
from compare_q.eval.table.verdict import listed, verdict

LOCAL = "python", "out_logits", "repeat", "replicas"
"""Keys of a model spec about places."""
FOLDERS, HOST = re.compile(r"(?<![\w.:/~-])~?/(?:[^\s/\"'`|,;:]+/)+(?=[^\s/])"), re.compile(r"(?<=://)[^\s/\"']+")
"""The folders of an absolute path, and the host of an address."""


def card_text(run: RunResult, names: Sequence[str] | None = None) -> str:
    """Return the model card of all quantized rows; ``names``: columns of its table.

    InputError if no row is quantized, or if the results do not name the data of a text.
    """
    found = [(text, model) for text in run.scored for model in text.models
             if model.is_quantized and model.blocks and not (model.reference or model.noise_floor)]  # fmt: skip
    if not found:
        raise InputError("a model card is about quantized models, and none was measured")
    if unknown := [text.name for text in run.scored if not spec_of(text)]:
        raise InputError(f"{unknown[0]}: the results lack the spec of this text, which names its data; run again")
    failed = {model.label for text in run.scored for model in text.models if model.error}
    originals = [str(m.spec.get("model_dir")) for text in run.scored for m in text.models if m.reference]
    index = ModelCardData(
        model_name=public(", ".join(dict.fromkeys(model.label for _, model in found))),
        base_model=next(filter(hub.is_hub_id, originals), None),
        eval_results=[each for text, model in found for each in eval_results(run, text, model)],
    )  # fmt: skip
    kept = run.masked([label for label in run.labels if label not in failed])
    kept = kept.updated(texts=tuple(text.updated(models=tuple(m.updated(from_cache=False) for m in text.models))
                                    for text in kept.texts))  # fmt: skip
    table = tables.table_of(kept, names)
    body = ["## What quantization lost", "", render.escaped(verdict(kept)), "", *render.markdown_lines(table.columns)]
    body += ["", *render.note_lines(table), ""]
    body += ["## How it was measured", "", *how_measured(kept), ""]
    return str(ModelCard("\n".join(["---", index.to_yaml(), "---", "", *map(public, body)])))


def eval_results(run: RunResult, text: TextResult, model: ModelResult) -> Iterator[EvalResult]:
    """Yield the known results of a row, unrounded, for the ``model-index``."""
    spec, reference = spec_of(text), (text.reference or {}).get("label")
    data = str(spec.get("dataset_path") or spec.get("dataset"))
    if data in ("text", "chat") or ("/" in data and not hub.is_hub_id(data)):
        data = public(text.name)
    row = model.marked_label + (f" on {text.name}" if len(run.texts) > 1 else "")
    for kind, title, value in (
        ("perplexity", "Perplexity", model.ppl),
        ("kl_divergence", f"KL divergence from {reference}, nats per token", model.kld if reference else None),
    ):
        if value is not None:
            yield EvalResult(
                task_type="text-generation", metric_type=kind, metric_name=public(f"{title} ({row})"),
                metric_value=value, dataset_name=public(text.name), dataset_type=data,
                dataset_config=spec.get("dataset_name"), dataset_revision=spec.get("revision"),
                dataset_split=spec.get("dataset_split") or spec.get("split"),
            )  # fmt: skip


def how_measured(run: RunResult) -> Iterator[str]:
    """Yield lines about text, windows, engines and machines, and the specs and the command that repeat the run."""
    rows, texts, lines = run.scored[0].models, [], []
    for text in run.scored:
        data = {"window_length": 0, "scored_tokens": 0, "windows": 0, **text.data}
        counted = f"context of up to {data['window_length']:,} tokens, {data['scored_tokens']:,} scored tokens"
        lines.append(f"Text: {text.subtitle or text.name}; {counted}")
        texts.append({**spec_of(text), "max_rows": data["windows"]})
    for title, said in (("Engine", [model.engine_version or model.engine for model in rows]),
                        ("Machine", [model.where or "not known" for model in rows])):  # fmt: skip
        for words in dict.fromkeys(said):
            own = listed([model.label for model, each in zip(rows, said, strict=True) if each == words])
            lines.append(f"{title}: {words}{f' ({own})' if len(set(said)) > 1 else ''}")
    lines.append(f"Versions: {', '.join(f'{name} {version}' for name, version in run.versions.items())}")
    yield from [f"- {render.escaped(line)}" for line in [*lines, f"Date: {run.created[:10]}"]]
    yield from ["", "To repeat it, write these two files, with your paths, and run the command below them.", ""]
    given = [{**model.spec, "reference": True} if model.reference else model.spec for model in rows]
    models = [{key: value for key, value in spec.items() if key not in LOCAL} for spec in given]
    for name, specs in (("data.json", texts), ("models.json", models)):
        shown = json.dumps(base_names(specs), indent=2, ensure_ascii=False).replace("```", "'''")
        yield from ["<details>", f"<summary>{name}</summary>", "", "```json", shown, "```", "", "</details>", ""]
    stored = " -lf REFERENCE" if run.scored[0].reference and not any(model.reference for model in rows) else ""
    yield from ["```sh", f"compare-q -d data.json -m models.json{stored}", "```"]


def spec_of(text: TextResult) -> dict[str, Any]:
    """Return the spec of a text; empty if the results do not have one that names the data."""
    spec = text.data.get("spec")
    return spec if isinstance(spec, dict) and spec.get("dataset") else {}


def base_names(value: Any) -> Any:
    """Return JSON types with each path as its last part and without the hosts of addresses; ids of the hub stay."""
    if isinstance(value, dict):
        return {key: base_names(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [base_names(each) for each in value]
    if not isinstance(value, str) or "/" not in value or hub.is_hub_id(value) or re.search(r"[\n{<]", value):
        return value
    return HOST.sub("HOST", value) if "://" in value else PurePath(value).name


def public(words: str) -> str:
    """Return a text in which absolute paths have no folders."""
    return FOLDERS.sub("", words)
