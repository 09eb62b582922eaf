"""The model card of ``--model-card``: Markdown for the README of a quantized model on the hub.

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
from ..table.markdown import escaped, markdown_lines, note_lines
from ..table.tables import table_of
from ..table.wording import first_words_and_count

LOCAL_KEYS = ("python", "out_logits", "repeat", "replicas")
"""Keys of a model spec about the machine on which it ran."""
FOLDERS = re.compile(r"(?<![\w.:/~-])~?/(?:[^\s/\"'`|,;:]+/)+(?=[^\s/])")
"""The folders of an absolute path."""
METRICS_OF_KLD = {
    "exact": ("kl_divergence", "KL divergence"),
    "estimate": ("kl_divergence", "Estimated KL divergence"),
    "bound": ("kl_divergence_lower_bound", "Lower bound of the KL divergence"),
}
"""Kind of a KLD -> type and name of its metric."""
HOST = re.compile(r"(?<=://)[^\s/\"']+")
"""The host of an address."""


def card_text(run: RunResult, names: Sequence[str] | None = None) -> str:
    """Return the model card of all quantized rows; ``names``: columns of its table.

    InputError if no row is quantized, or if the results do not name the data of a text.
    """
    rows = []
    originals = []
    measured = []
    for model in run.models:
        if model.reference:
            originals.append(str(model.spec.get("model_dir")))
        is_usual = not (model.reference or model.noise_floor)
        if model.is_quantized and model.blocks and is_usual:
            rows.append(model)
        if not model.error:
            measured.append(model.updated(from_cache=False))
    if not rows:
        raise InputError("a model card is about quantized models, and none was measured")
    for text in run.texts:
        if not spec_of(text):
            raise InputError(
                f"{text.name}: the results lack the spec of this text, which names its data; "
                "run again"
            )
    results: list[EvalResult] = []
    for text in run.texts:
        for model in rows:
            results += eval_results(run, text, model)
    base_models = [original for original in originals if hub.is_hub_id(original)]
    index = ModelCardData(
        model_name=public(", ".join(model.label for model in rows)),
        base_model=next(iter(base_models), None),
        eval_results=results,
    )
    measured_run = run.updated(models=tuple(measured))
    table = table_of(measured_run, names)
    body = ["## What quantization lost", ""]
    for sentences in table.finding:
        body.append(escaped(sentences))
    body += ["", *markdown_lines(table.columns), ""]
    body += [*note_lines(table), ""]
    body += ["## How it was measured", "", *how_measured(measured_run), ""]
    lines = ["---", index.to_yaml(), "---", ""]
    lines += [public(line) for line in body]
    return str(ModelCard("\n".join(lines)))


def eval_results(run: RunResult, text: UsedText, model: ModelResult) -> Iterator[EvalResult]:
    """Yield the known results of a row on a text, unrounded, for the ``model-index``."""
    spec = spec_of(text)
    data = str(spec.get("dataset_path") or spec.get("dataset"))
    if data in ("text", "chat", "sampled") or ("/" in data and not hub.is_hub_id(data)):
        data = public(text.name)
    row = model.marked_label
    scores: ModelResult | Slice | None = model
    if len(run.texts) > 1:
        row += f" on {text.name}"
        scores = model.slices.get(text.name)
    if scores is None:
        return
    values = [("perplexity", "Perplexity", scores.ppl)]
    if run.reference and run.reference["label"]:
        kind, name = METRICS_OF_KLD[model.kld_kind]
        title = f"{name} from {run.reference['label']}, nats per token"
        values.append((kind, title, scores.kld))
    for kind, title, value in values:
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
    """Yield lines about texts, windows, engines and machines, and how to repeat the run."""
    lines = []
    several = len(run.texts) > 1
    if several:
        lines.append(f"Texts: {run.subtitle}")
    for text in run.texts:
        title = text.name
        if not several:
            title = f"Text: {run.subtitle or text.name}"
        context = f"context of up to {text.window_length:,} tokens"
        lines.append(f"{title}; {context}, {text.scored_tokens:,} scored tokens")
    engines = [model.engine_version or model.engine for model in run.models]
    machines = [model.where or "not known" for model in run.models]
    lines += facts_by_row("Engine", run, engines)
    lines += facts_by_row("Machine", run, machines)
    versions = ", ".join(f"{name} {version}" for name, version in run.versions.items())
    lines.append(f"Versions: {versions}")
    lines.append(f"Date: {run.created[:10]}")
    for line in lines:
        yield f"- {escaped(line)}"
    yield from how_to_repeat(run)


def how_to_repeat(run: RunResult) -> Iterator[str]:
    """Yield the specs and the command that repeat the run."""
    yield ""
    yield "To repeat it, write these two files, with your paths, and run the command below them."
    yield ""
    data_specs = [{**spec_of(text), "max_rows": text.windows} for text in run.texts]
    yield from collapsed_json("data.json", data_specs)
    model_specs = []
    for model in run.models:
        spec = {key: value for key, value in model.spec.items() if key not in LOCAL_KEYS}
        if model.reference:
            spec["reference"] = True
        model_specs.append(spec)
    yield from collapsed_json("models.json", model_specs)
    command = "compare-q -d data.json -m models.json"
    if run.reference is not None and not any(model.reference for model in run.models):
        command += " -lf REFERENCE"
    yield "```sh"
    yield command
    yield "```"


def collapsed_json(name: str, specs: Sequence[Any]) -> Iterator[str]:
    """Yield a file of specs as Markdown that a click opens."""
    text = json.dumps(base_names(specs), indent=2, ensure_ascii=False)
    yield "<details>"
    yield f"<summary>{name}</summary>"
    yield ""
    yield "```json"
    yield text.replace("```", "'''")  # which would end the block
    yield "```"
    yield ""
    yield "</details>"
    yield ""


def facts_by_row(title: str, run: RunResult, facts: Sequence[str]) -> Iterator[str]:
    """Yield a line for each different fact, with the labels of its rows if there are several facts.

    ``facts``: one per row.
    """
    labels_by_fact: dict[str, list[str]] = {}
    for model, fact in zip(run.models, facts, strict=True):
        labels_by_fact.setdefault(fact, []).append(model.label)
    for fact, labels in labels_by_fact.items():
        line = f"{title}: {fact}"
        if len(labels_by_fact) > 1:
            line += f" ({first_words_and_count(labels)})"
        yield line


def spec_of(text: UsedText) -> dict[str, Any]:
    """Return the spec of a text; empty if the results do not have one that names the data."""
    if text.spec.get("dataset"):
        return text.spec
    return {}


def base_names(value: Any) -> Any:
    """Return JSON types with each path as its last part, and without the hosts of addresses.

    Ids of the hub stay.
    """
    if isinstance(value, dict):
        return {key: base_names(member) for key, member in value.items()}
    if isinstance(value, list | tuple):
        return [base_names(member) for member in value]
    if not isinstance(value, str) or "/" not in value or hub.is_hub_id(value):
        return value
    # Text, such as a chat template, that contains a slash.
    if re.search(r"[\n{<]", value):
        return value
    if "://" in value:
        return HOST.sub("HOST", value)
    return PurePath(value).name


def public(words: str) -> str:
    """Return a text in which absolute paths have no folders."""
    return FOLDERS.sub("", words)
