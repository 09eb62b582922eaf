"""Results and excerpts that no run writes: each is refused in one line with its place, so that no reader meets it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from compare_q.eval.results import results_json
from compare_q.eval.results.run_result import Results, TextResult
from tests.support.made import LAYERS, PERCENTILES, QUANT, REF, results_of, run_of
from tests.support.toy import refusal

RUN = run_of(REF, QUANT)
RAW = json.loads(json.dumps(results_json.results_json(results_of(RUN), [])))
TEXT = ("texts", 0)
MODEL = (*TEXT, "models", 1)
ESTIMATES = (*MODEL, "estimates")
AGAINST = (*ESTIMATES, "against")
TOGETHER = "its numbers do not go together"
BOUNDS = "is below 0, or no count"
LABELS = "models: two have one label, or are not those of text"


def damaged(raw: Any, *path: Any, value: Any = ...) -> Any:
    """A copy without the key at a path, or with another value there."""
    copy = at = json.loads(json.dumps(raw))
    for step in path[:-1]:
        at = at[step]
    if value is ...:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return copy


@pytest.mark.parametrize(
    ("path", "value", "gold"),
    [
        (("versions",), ..., "versions: missing"),
        ((*TEXT, "subtitle"), ..., "subtitle: missing"),
        ((*MODEL, "bpw_layer"), ..., "bpw_layer: missing"),
        ((*ESTIMATES, "ppl", "tokens"), ..., "texts.0.models.1.estimates.ppl.tokens: missing"),
        ((*ESTIMATES, "ppl", "value"), "7.5",
         "texts.0.models.1.estimates.ppl.value: input should be a valid number (got '7.5')"),
        (("title",), 5, "title: input should be a valid string (got 5)"),
        (("texts",), [5], "no object where one must be"),
        (MODEL, "W4A16", "no object where one must be"),
        ((*TEXT, "models"), [], "texts: none has results"),
        ((*TEXT, "name"), "", "texts: a text has no name, or two have one"),
        ((*TEXT, "error"), "", "texts: none has results"),
        ((*MODEL, "label"), "bf16", LABELS),
        ((*ESTIMATES, "blocks", "nll"), [1.0], f"W4A16: estimates: blocks: {TOGETHER}"),
        ((*ESTIMATES, "blocks", "tokens"), [0] * 4, f"W4A16: estimates: blocks: {TOGETHER}"),
        ((*ESTIMATES, "blocks", "tokens"), [1] * 31, f"W4A16: estimates: blocks: {TOGETHER}"),
        ((*ESTIMATES, "blocks", "whole"), ["losses"], f"W4A16: estimates: blocks: {TOGETHER}"),
        ((*ESTIMATES, "blocks", "length"), -1, f"W4A16.estimates.blocks.length: -1 {BOUNDS}"),
        ((*ESTIMATES, "ppl", "tokens"), 2**53 + 1, f"W4A16.estimates.ppl.tokens: {2**53 + 1} {BOUNDS}"),
        ((*ESTIMATES, "ppl", "stderr"), -0.1, f"W4A16.estimates.ppl.stderr: -0.1 {BOUNDS}"),
        ((*ESTIMATES, "ppl", "value"), 0.0, f"W4A16: estimates: ppl: {TOGETHER}"),
        ((*ESTIMATES, "curve", "edges"), [3, 1], f"W4A16: estimates: curve: {TOGETHER}"),
        ((*ESTIMATES, "curve", "nll_stderr"), [0.1] * 9, f"W4A16: estimates: curve: {TOGETHER}"),
        ((*ESTIMATES, "curve", "nll_stderr"), [-0.1], f"W4A16: estimates: curve: {TOGETHER}"),
        ((*ESTIMATES, "curve", "edges"), [1, 2, 3], f"W4A16: estimates: curve: {TOGETHER}"),
        ((*AGAINST, "kld_percentiles"), {"50": 0.5}, f"W4A16: estimates: against: {TOGETHER}"),
        ((*AGAINST, "kld", "value"), None, f"W4A16: estimates: against: {TOGETHER}"),
        ((*AGAINST, "kld_histogram"), {"first": 0, "per_decade": 8, "counts": [], "below": 0, "above": 0},
         f"W4A16: estimates: against: {TOGETHER}"),
        ((*AGAINST, "kld_histogram", "first"), -9999, f"W4A16: estimates: against: {TOGETHER}"),
        ((*MODEL, "score_seconds"), -1.0, f"W4A16.score_seconds: -1.0 {BOUNDS}"),
        ((*MODEL, "bpw_layer"), -4.0, f"W4A16.storage.bpw_layer: -4.0 {BOUNDS}"),
        ((*MODEL, "provenance"), {"layers": [{"weights": "nf5"}]},
         "W4A16: provenance: layers or kv_cache_layers are no groups of layers"),
        ((*MODEL, "provenance"), {"layers": [{**LAYERS, "count": "many"}]},
         "W4A16: provenance: layers or kv_cache_layers are no groups of layers"),
        ((*MODEL, "provenance"), {"kv_cache_layers": 5},
         "W4A16: provenance: layers or kv_cache_layers are no groups of layers"),
        ((*TEXT, "data"), {"text_tokens": True}, "data.text_tokens: input should be a valid integer (got True)"),
        ((*TEXT, "reference"), {}, "reference.label: missing"),
        ((*TEXT, "reference", "key"), [1], "reference.key: input should be a valid string (got [1])"),
        (("commit",), ["a"], "origin.commit: input should be a valid string (got ['a'])"),
        (("versions",), {"torch": 2}, "origin.versions.torch: input should be a valid string (got 2)"),
    ],
)  # fmt: skip
def test_what_no_run_writes(path: tuple[Any, ...], value: Any, gold: str) -> None:
    assert results_json.from_json(RAW).texts == (RUN,)
    assert refusal(results_json.from_json, damaged(RAW, *path, value=value)) == f"damaged results: {gold}"


def test_texts_that_do_not_go_together() -> None:
    """Names that are one, models that differ, parts of several texts; a text that failed needs no models."""
    texts = Results((RUN, run_of(REF, QUANT), TextResult("chat", error="no such file")))
    raw = json.loads(json.dumps(results_json.results_json(texts, [])))
    assert refusal(results_json.from_json, raw) == "damaged results: texts: a text has no name, or two have one"
    raw["texts"][1]["name"] = "code"
    assert results_json.from_json(raw).labels == ("bf16", "W4A16")
    fewer = damaged(raw, "texts", 1, "models", 1)
    assert refusal(results_json.from_json, fewer) == f"damaged results: code: {LABELS}"


def test_results_of_another_format() -> None:
    assert refusal(results_json.from_json, []) == "not a results.json of compare_q"
    assert refusal(results_json.from_json, damaged(RAW, "format")) == "not a results.json of compare_q"
    found = refusal(results_json.from_json, {**RAW, "format": 3})
    assert found.startswith("results of format 3, but this compare_q reads format 7; run compare_q again with -o")
    nan = damaged(RAW, *MODEL, "score_seconds", value=float("nan"))
    assert "not JSON compliant" in refusal(results_json.from_json, nan)


def test_every_percentile_is_wanted() -> None:
    """The percentiles of a run are those that the check wants: a thirteenth would be refused, and so would twelve."""
    for name in PERCENTILES:
        fewer = {key: value for key, value in PERCENTILES.items() if key != name}
        assert TOGETHER in refusal(results_json.from_json, damaged(RAW, *AGAINST, "kld_percentiles", value=fewer))
