"""Results of the right types that no run writes: each is refused with its place, so that no reader meets it."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest

from compare_q.eval.results import results_json
from tests.support.made import PERCENTILES, QUANT, REF, results_of, run_of
from tests.support.report_page import inspection_of
from tests.support.toy import refusal

RUN = run_of(REF, QUANT)
TEXT = ("texts", 0)
MODEL = (*TEXT, "models", 1)
ESTIMATES = (*MODEL, "estimates")
AGAINST = (*ESTIMATES, "against")


def damaged(raw: Any, *path: Any, value: Any) -> Any:
    """A copy with another value at a path."""
    copy = at = json.loads(json.dumps(raw))
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = value
    return copy


@pytest.mark.parametrize(
    ("path", "value", "gold"),
    [
        ((*ESTIMATES, "blocks", "nll"), [1.0], "W4A16: blocks: not a sum for each block"),
        ((*ESTIMATES, "blocks", "tokens"), [0] * 4, "W4A16: blocks.whole: names what is not there"),
        ((*ESTIMATES, "blocks", "whole"), ["losses"], "W4A16: blocks.whole: names what is not there"),
        ((*ESTIMATES, "blocks", "length"), -1, "W4A16.estimates.blocks.length: -1 is no count"),
        ((*ESTIMATES, "ppl", "tokens"), 2**53 + 1, f"W4A16.estimates.ppl.tokens: {2**53 + 1} is no count"),
        ((*ESTIMATES, "ppl", "stderr"), -0.1, "W4A16.estimates.ppl.stderr: -0.1 is below 0"),
        ((*ESTIMATES, "ppl", "value"), 0.0, "W4A16: ppl: is not above 0"),
        ((*ESTIMATES, "curve", "edges"), [3, 1], "W4A16: curve.edges: are no positions in order"),
        ((*ESTIMATES, "curve", "edges"), [1, 2, 3], "W4A16: curve: not a mean for each bin"),
        ((*AGAINST, "kld_percentiles"), {"50": 0.5}, "W4A16: kld_percentiles: some are missing"),
        ((*AGAINST, "kld", "value"), None, "W4A16: kld_percentiles: some are missing"),
        ((*AGAINST, "kld_histogram"), {"first": 0, "per_decade": 8, "counts": [], "below": 0, "above": 0},
         "W4A16: kld_histogram: holds nothing"),
        ((*AGAINST, "kld_histogram", "first"), -9999, "W4A16: kld_histogram: reaches beyond every number"),
        ((*MODEL, "score_seconds"), -1.0, "W4A16.score_seconds: -1.0 is below 0"),
        ((*MODEL, "bpw_layer"), -4.0, "W4A16.storage.bpw_layer: -4.0 is below 0"),
        ((*MODEL, "provenance"), {"layers": 5}, "W4A16: provenance.layers: are no groups of layers"),
        ((*MODEL, "provenance"), {"kv_cache_layers": 5},
         "W4A16: provenance.kv_cache_layers: are no groups of layers"),
        (MODEL, "W4A16", "text: models: must be a list of objects"),
        ((*TEXT, "data"), {"text_tokens": True}, "data: text_tokens is no number of tokens"),
        ((*TEXT, "reference"), {}, "reference: has no label"),
        ((*TEXT, "reference", "key"), [1], "reference: key is no text"),
        ((*TEXT, "reference", "same_as"), [1], "reference: same_as is no text"),
        (("commit",), ["a"], "commit: is of another type"),
        (("versions",), {"torch": 2}, "versions: is no object of texts"),
        (("parts",), ["a"], "parts.0: input should be an object (got 'a')"),
    ],
)  # fmt: skip
def test_what_no_run_writes(path: tuple[Any, ...], value: Any, gold: str) -> None:
    raw = json.loads(json.dumps(results_json.results_json(results_of(RUN), [])))
    assert results_json.from_json(raw).texts == (RUN,)
    assert refusal(results_json.from_json, damaged(raw, *path, value=value)) == f"damaged results: {gold}"


@pytest.mark.parametrize(
    ("path", "value", "gold"),
    [
        (("worst",), [None], "worst: is of other models"),
        (("worst", 0), [{}], "worst.0.0.window: missing"),
        (("passages", 0, "logprob"), [], "passages: are of other models"),
        (("passages", 0, "ref_logprob"), [1.0], "passages: not a score for each token"),
        (("passages", 0, "tokens", 0), 5, "passages.0.tokens.0: input should be a valid string (got 5)"),
        (("passages",), 5, "passages: input should be a valid list (got 5)"),
    ],
)
def test_excerpts_of_another_run(path: tuple[Any, ...], value: Any, gold: str) -> None:
    inspection = json.loads(json.dumps(asdict(inspection_of(RUN))))
    page = {"results": results_json.results_json(results_of(RUN), []), "inspections": [inspection]}
    assert results_json.report_from_json(page)[1] == [inspection]
    page["inspections"] = [damaged(inspection, *path, value=value)]
    found = refusal(results_json.report_from_json, page)
    assert found == f"the report's excerpts are damaged: {gold}; write it again"


def test_every_percentile_is_wanted() -> None:
    """The percentiles of a run are those that the check wants: a thirteenth would be refused, and so would twelve."""
    raw = json.loads(json.dumps(results_json.results_json(results_of(RUN), [])))
    for name in PERCENTILES:
        fewer = {key: value for key, value in PERCENTILES.items() if key != name}
        assert "some are missing" in refusal(
            results_json.from_json, damaged(raw, *AGAINST, "kld_percentiles", value=fewer)
        )
