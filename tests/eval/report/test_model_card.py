"""The model card: the values that the hub reads from it, and whether it can be published."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import EvalResult, ModelCard

from compare_q.eval.results import RunResult
from compare_q.eval.specs.spec_types import DataSpec, ModelSpec
from compare_q.eval.stats.uncertainty import Mean
from tests.support.made import FAILED, QUANT, REF, SIZE, data_of, replace, run_of, with_against
from tests.support.several_texts import three
from tests.support.toy import Run

SPEC = {
    "tokenizer_dir": "/home/ann/bf16",
    "dataset": "wiki2",
    "dataset_split": "test",
    "eval_len": 8,
    "eval_stride": 8,
}
DATA = {"name": "wikitext2", "spec": SPEC, "windows": 2, "window_length": 8, "scored_tokens": 40}
PLAIN = replace(
    REF,
    storage=replace(SIZE, bpw_layer=16.0),
    spec={"load_fn": "fake", "label": "bf16", "model_dir": "owner/base"},
)
# Folders, names and hosts of one machine, which a published card must not have.
LOCAL = {
    "load_fn": "fake",
    "label": "/home/ann/q4",
    "model_dir": "/home/ann/q4",
    "python": "/home/ann/env",
    "engine": {"drafts": ["~/d.gguf"], "url": "http://gpu7.lan:8000/v1"},
}
ROWS = (
    PLAIN,
    replace(QUANT, label="/home/ann/q4", spec=LOCAL),
    replace(FAILED, error="no /home/ann/bad"),
    with_against(replace(QUANT, label="no *KLD*"), kld=Mean(None, 0.0, 0, 40), kld_percentiles={}),
)


def card_of(compare_q: Run, tmp_path: Path, run: RunResult) -> str:
    run.with_origin(["compare_q.py", "-d", "/home/ann/data.json"]).write(tmp_path / "r.json")
    ran = compare_q("show", tmp_path / "r.json", "--model-card", tmp_path / "card.md")
    assert (ran.status, f"model card: {tmp_path / 'card.md'}" in ran.out) == (0, True), ran.err
    return (tmp_path / "card.md").read_text()


def specs_in(card: str) -> list[list[dict[str, Any]]]:
    """Return the data specs and the model specs that a card shows."""
    return [json.loads(text) for text in re.findall("```json\n(.*?)```", card, re.DOTALL)]


def test_the_hub_reads_the_numbers(compare_q: Run, tmp_path: Path) -> None:
    """The card has every known value of each quantized row, unrounded; none of the reference."""
    card = ModelCard(card_of(compare_q, tmp_path, run_of(*ROWS, texts=[DATA])))
    same: dict[str, Any] = {
        "task_type": "text-generation",
        "dataset_type": "wiki2",
        "dataset_name": "wikitext2",
        "dataset_split": "test",
    }
    kld = "KL divergence from bf16, nats per token (q4)"
    assert card.data.eval_results == [
        EvalResult(
            **same, metric_type="perplexity", metric_name="Perplexity (q4)", metric_value=QUANT.ppl
        ),
        EvalResult(**same, metric_type="kl_divergence", metric_name=kld, metric_value=QUANT.kld),
        EvalResult(
            **same,
            metric_type="perplexity",
            metric_name="Perplexity (no *KLD*)",
            metric_value=QUANT.ppl,
        ),
    ]
    assert (card.data.model_name, card.data.base_model) == ("q4, no *KLD*", "owner/base")
    assert "| q4 | Linear | 4.50 |" in card.text
    assert "0.01235 ± 0.00045" in card.text


@pytest.mark.parametrize(
    ("kind", "metric", "name"),
    [
        ("bound", "kl_divergence_lower_bound", "Lower bound of the KL divergence from bf16"),
        ("estimate", "kl_divergence", "Estimated KL divergence from bf16"),
    ],
)
def test_a_bound_is_not_published_as_a_kld(
    compare_q: Run, tmp_path: Path, kind: str, metric: str, name: str
) -> None:
    run = run_of(REF, replace(QUANT, kld_kind=kind), texts=[DATA])
    card = ModelCard(card_of(compare_q, tmp_path, run))
    _, result = card.data.eval_results
    assert (result.metric_type, result.metric_value) == (metric, QUANT.kld)
    assert result.metric_name.startswith(name)
    assert (r"\>=0.01234" in card.text) == (kind == "bound")


def test_each_of_several_texts_has_the_numbers_of_its_slice(compare_q: Run, tmp_path: Path) -> None:
    """KLDs of three texts, whose perplexities are 20 * (1 + KLD); the specs of all texts repeat the
    run.
    """
    run = three()
    texts = []
    # Other numbers of windows for each text, so that they cannot be mixed up.
    for windows, text in enumerate(run.texts, 3):
        spec = {**SPEC, "dataset": text.name}
        texts.append({**DATA, "name": text.name, "spec": spec, "windows": windows})
    card = card_of(compare_q, tmp_path, run.updated(data=data_of(*texts)))
    results = []
    for result in ModelCard(card).data.eval_results:
        results.append((result.dataset_name, result.metric_name, result.metric_value))
    kld = "KL divergence from bf16, nats per token"
    assert results[2:6] == [
        ("wiki2", "Perplexity (GGUF Q4_K on wiki2)", 20.8),
        ("wiki2", f"{kld} (GGUF Q4_K on wiki2)", 0.04),
        ("c4", "Perplexity (EXL3 4.0 on c4)", 20.4),
        ("c4", f"{kld} (EXL3 4.0 on c4)", 0.02),
    ]
    # PPL and KLD of two quantized rows on three texts.
    assert len(results) == 12
    data, _ = specs_in(card)
    assert [spec["max_rows"] for spec in data] == [3, 4, 5]


def test_it_can_be_published_and_repeated(compare_q: Run, tmp_path: Path) -> None:
    """The card contains no folder, host or failed row, and its specs are valid."""
    card = card_of(compare_q, tmp_path, run_of(*ROWS, texts=[DATA]))
    assert not re.search('/home|gpu7|"python|broken', card)
    data, models = specs_in(card)
    assert [DataSpec.model_validate(spec).max_rows for spec in data] == [2]
    assert [ModelSpec.model_validate(spec).is_reference for spec in models[:2]] == [True, False]
    assert models[1]["engine"] == {"drafts": ["d.gguf"], "url": "http://HOST/v1"}


@pytest.mark.parametrize(
    ("data", "rows", "part"),
    [(DATA, ROWS[:1], "quantized"), ({"name": "wikitext2", "windows": 2}, ROWS, "wikitext2: ")],
)
def test_what_cannot_be_described(
    compare_q: Run, tmp_path: Path, data: Any, rows: Any, part: str
) -> None:
    run_of(*rows, texts=[data]).with_origin([]).write(tmp_path / "r.json")
    ran = compare_q("show", tmp_path / "r.json", "--model-card", tmp_path / "card.md")
    (line,) = ran.err.splitlines()
    assert (ran.status, line.startswith("error: "), part in line) == (2, True, True)
    assert not (tmp_path / "card.md").exists()
