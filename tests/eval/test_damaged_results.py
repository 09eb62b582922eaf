"""Damaged results that no run writes.

Each is refused in one line with the key, before any other code reads it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from compare_q.eval.results import NO_RESULTS, RunResult
from compare_q.eval.stats.block_sums import MOST_TEXTS
from tests.support.made import (
    PERCENTILES,
    QUANT,
    REF,
    raw_of,
    read_back,
    replace,
    run_of,
)
from tests.support.made import (
    TEXT as ONE_TEXT,
)
from tests.support.toy import refusal

RUN = run_of(REF, QUANT)
RAW = raw_of(RUN)
TEXT = ("data", "texts", 0)
MODEL = ("models", 1)
TIMING = {
    "started": 1.0,
    "loaded": 2.0,
    "score_began": 3.0,
    "first_window": 4.0,
    "last_window": 5.0,
    "closed": None,
}


def damaged(raw: Any, *path: Any, value: Any = ...) -> Any:
    """Return a copy without the key at a path, or with another value there."""
    copy = json.loads(json.dumps(raw))
    *steps, key = path
    parent = copy
    for step in steps:
        parent = parent[step]
    if value is ...:
        del parent[key]
    else:
        parent[key] = value
    return copy


INPUTS = [
    # The place of the damage, the value there (...: the key is missing), what the line must name.
    (("models",), ..., "models: "),
    (("models",), [], "models: "),
    (("title",), 5, "title: "),
    (("data",), ..., "data: "),
    (("data", "texts"), ..., "data: texts: "),
    (("data", "texts"), [], "data: texts: "),
    (("data", "windows"), -1, "data: windows: "),
    ((*TEXT, "name"), "", "data: texts.0.name: "),
    # For Python, True is an integer.
    ((*TEXT, "text_tokens"), True, "data: texts.0.text_tokens: "),
    (("reference",), {}, "reference: label: "),
    ((*MODEL, "slices"), {"text": {"tokens": -1}}, "models.1.slices.text.tokens: "),
    ((*MODEL, "slices"), {"text": {"tokens": 1, "ppl": 0.0}}, "models.1.slices.text.ppl: "),
    ((*MODEL, "slices"), {"text": {"kld": 1.0}}, "models.1.slices.text.tokens: "),
    ((*MODEL, "label"), "bf16", "models: "),
    ((*MODEL, "ppl"), "7.5", "models.1.ppl: "),
    ((*MODEL, "ppl"), 0.0, "models.1.ppl: "),
    ((*MODEL, "tokens"), -1, "models.1.tokens: "),
    ((*MODEL, "timing"), TIMING | {"loaded": "2"}, "models.1.timing.loaded: "),
    ((*MODEL, "provenance"), {"layers": [{"weights": "nf5"}]}, "models.1.provenance: "),
    ((*MODEL, "provenance"), {"kv_cache_layers": 5}, "models.1.provenance: "),
    ((*MODEL, "blocks", "nll"), [1.0], "models.1.blocks: nll"),
    ((*MODEL, "blocks", "tokens"), [1] * (MOST_TEXTS + 1), "models.1.blocks.tokens: "),
    ((*MODEL, "blocks", "tokens"), [0] * 4, "models.1.blocks: whole"),
    ((*MODEL, "blocks", "whole"), ["losses"], "models.1.blocks.whole.0: "),
    ((*MODEL, "blocks", "kld"), None, "models.1.blocks: whole"),
    ((*MODEL, "curve", "edges"), [3, 1], "models.1.curve: "),
    ((*MODEL, "curve", "edges"), [1, 2, 3], "models.1.curve: "),
    ((*MODEL, "curve", "nll_stderr"), [0.1] * 9, "models.1.curve: "),
]


@pytest.mark.parametrize(("path", "value", "name"), INPUTS)
def test_what_no_run_writes(path: tuple[Any, ...], value: Any, name: str, tmp_path: Path) -> None:
    """The line names the file and the key."""
    message = refusal(read_back, damaged(RAW, *path, value=value), tmp_path)
    assert message.startswith(f"{tmp_path / 'r.json'}: ")
    assert name in message


def test_texts_of_one_name(tmp_path: Path) -> None:
    raw = raw_of(run_of(REF, QUANT, texts=[ONE_TEXT, ONE_TEXT]))
    assert "data.texts: " in refusal(read_back, raw, tmp_path)
    raw["data"]["texts"][1]["name"] = "code"
    assert read_back(raw, tmp_path).labels == ("bf16", "W4A16")


def test_results_of_another_format(tmp_path: Path) -> None:
    assert NO_RESULTS in refusal(read_back, damaged(RAW, "format"), tmp_path)
    assert "format 8" in refusal(read_back, {**RAW, "format": 8}, tmp_path)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_numbers_that_json_does_not_have(tmp_path: Path, number: float) -> None:
    """NaN and infinity are refused in files, and when a row is made, also in free objects."""
    assert "JSON" in refusal(read_back, damaged(RAW, *MODEL, "ppl", value=number), tmp_path)
    for changes in (
        {"load_seconds": number},
        {"correlation": number},
        {"provenance": {"a": [number]}},
    ):
        with pytest.raises(ValidationError, match="number"):
            replace(QUANT, **changes)


def test_names_that_are_not_utf_8(tmp_path: Path) -> None:
    """A byte that is not UTF-8 is written in Python's escaped form, anywhere in a row."""
    # As Python reads the byte E9 in a name (surrogateescape).
    odd = "caf\udce9"
    row = replace(
        QUANT, label=odd, spec={odd: [odd]}, provenance={"log": odd}, notes=(odd,), error=odd
    )
    text = {"name": odd, "spec": {"path": odd}}
    run = run_of(row, reference=None, texts=[text], subtitle=odd, title=odd).with_origin([odd])
    run.write(tmp_path / "r.json")
    assert "\\udce9" in run.labels[0]
    assert RunResult.read(tmp_path / "r.json") == run


def test_every_percentile_is_wanted(tmp_path: Path) -> None:
    """The plot of percentiles needs all of them, or none."""
    for name in PERCENTILES:
        fewer = {key: value for key, value in PERCENTILES.items() if key != name}
        assert "kld_percentiles: " in refusal(
            read_back, damaged(RAW, *MODEL, "kld_percentiles", value=fewer), tmp_path
        )
    bare = damaged(RAW, *MODEL, "kld_percentiles", value={})
    assert read_back(bare, tmp_path).models[1].kld_percentiles == {}
