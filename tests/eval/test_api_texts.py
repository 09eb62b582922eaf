"""Several texts from Python: a DataFrame with a column for the text, and the means over the texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compare_q.eval.api import compare, load
from tests.support.toy import refusal

UNIFORM = {"load_fn": "fake", "label": "uniform", "model_dir": "none", "engine": {"vocab_size": 500}}
BOOSTED = {**UNIFORM, "label": "boosted", "engine": {"vocab_size": 500, "boost": 3.0}, "reference": True}


@pytest.fixture
def texts(toy_model: Path, toy_text: Path, tmp_path: Path) -> list[dict[str, Any]]:
    (tmp_path / "other.txt").write_text("hgfedcba\n" * 60)
    keys = {"tokenizer_dir": toy_model, "dataset": "text", "eval_stride": 100}
    return [
        {**keys, "path": toy_text, "eval_len": 100},
        {**keys, "path": tmp_path / "other.txt", "eval_len": 50, "label": "other"},
    ]


def test_several_texts_are_rows_with_a_text(texts: list[dict[str, Any]], tmp_path: Path) -> None:
    found = compare(texts, [UNIFORM, BOOSTED], quiet=True)
    frame = found.frame(["kld", "ppl"])
    assert frame.columns.tolist() == ["text", "label", "kld", "kld_stderr", "ppl", "ppl_stderr"]
    assert frame.text.tolist() == ["text", "text", "other", "other"]
    for number, each in enumerate(texts):
        alone = compare(each, [UNIFORM, BOOSTED], quiet=True)
        assert alone.frame().from_cache.all()  # the scores of a run of several texts are those of one text
        assert frame.kld.tolist()[2 * number : 2 * number + 2] == alone.frame().kld.tolist()
    means = found.means().set_index("label")
    assert means.mean_ppl["uniform"] == pytest.approx(500, rel=1e-6)
    assert means.mean_kld["uniform"] == np.mean(frame.kld[frame.label == "uniform"])
    assert means.mean_kld["boosted"] == 0
    found.save(tmp_path / "r.json")
    again = load(tmp_path / "r.json")
    assert again.frame()[["text", "kld"]].equals(found.frame()[["text", "kld"]])


def test_a_text_that_fails_is_a_row_with_its_error(texts: list[dict[str, Any]], tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text(json.dumps([json.loads(json.dumps(each, default=str)) for each in texts]))
    (tmp_path / "other.txt").write_text("short")
    found = compare(tmp_path / "list.json", UNIFORM, quiet=True)
    assert found.frame().error.fillna("").str.contains("5 tokens").tolist() == [False, True]
    assert found.means().mean_ppl.isna().all()


def test_what_is_no_list_of_texts(texts: list[dict[str, Any]]) -> None:
    assert refusal(compare, [], UNIFORM) == "data: give a spec file or a dict, at least one"
    assert refusal(compare, [texts[0], 5], UNIFORM) == "5: no such file"
    assert "two texts are called 'other'" in refusal(compare, [texts[1], texts[1]], UNIFORM)
    assert refusal(compare, [texts[0], {**texts[1], "eval_len": "a"}], UNIFORM).startswith("data[1]: eval_len")
