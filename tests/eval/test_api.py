"""The call from Python: the command line's run, as a DataFrame, also of several texts."""

from __future__ import annotations

import html
import json
import math
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pandas as pd
import pytest
from matplotlib.text import Text

import compare_q
from compare_q.backends.common.errors import InputError
from compare_q.eval import api
from compare_q.eval.api import compare, load
from compare_q.eval.table.tables import table_of
from tests.support import ROOT
from tests.support.made import FAILED, QUANT, REF, replace, run_of, storage_of
from tests.support.toy import Run, Specs, refusal

UNIFORM = {
    "load_fn": "fake",
    "label": "uniform",
    "model_dir": "none",
    "engine": {"vocab_size": 500},
}
BOOSTED = {
    **UNIFORM,
    "label": "boosted",
    "engine": {"vocab_size": 500, "boost": 3.0},
    "reference": True,
}


@pytest.fixture
def data(toy_model: Path, toy_text: Path) -> dict[str, Any]:
    return {
        "tokenizer_dir": toy_model,
        "dataset": "text",
        "path": toy_text,
        "eval_len": 100,
        "eval_stride": 100,
    }


def test_a_call_is_the_command_line(
    compare_q: Run,
    write_specs: Specs,
    data: dict[str, Any],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The PPL of uniform logits is V, their KLD from the boosted ones 0.07862; the second run uses
    cached scores.
    """
    file, models = write_specs([UNIFORM, BOOSTED])
    assert compare_q("-d", file, "-m", models, "-o", tmp_path / "r.json", "-r", 3).status == 0
    comparison = compare(data, [UNIFORM, BOOSTED], rows=3, quiet=True)
    frame = comparison.frame().set_index("label")
    assert frame.loc["uniform", "ppl"] == pytest.approx(500, rel=1e-6)
    assert frame.loc["uniform", "kld"] == pytest.approx(0.078622, abs=1e-6)
    assert frame.kld["boosted"] == 0
    # 3 windows with 99 scored tokens each.
    assert frame.tokens.tolist() == [297, 297]
    assert frame.reference.tolist() == [False, True]
    assert frame.from_cache.all()
    assert frame["where"].notna().all()
    same = load(tmp_path / "r.json").frame().drop(columns="from_cache")
    pd.testing.assert_frame_equal(comparison.frame().drop(columns="from_cache"), same)
    assert capfd.readouterr() == ("", "")


def test_models_by_name_are_those_of_the_command_line(
    compare_q: Run,
    toy_model: Path,
    toy_text: Path,
    data: dict[str, Any],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The text has 9 windows of 100 with a token after them; the default is 32 windows."""
    words = [
        f"{toy_model}@fake:vocab_size=500,boost=3.0",
        f"uniform={toy_model}@fake:vocab_size=500",
    ]
    line = (
        "-d",
        toy_text,
        "-r",
        "all",
        "--eval-len",
        100,
        "--sample",
        "first",
        "-o",
        tmp_path / "r.json",
    )
    assert compare_q(*words, *line).status == 0
    comparison = compare(
        *words, data=str(toy_text), rows="all", eval_len=100, sample="first", quiet=True
    )
    frame = comparison.frame()
    assert frame.label.tolist() == [f"{toy_model.name} vocab_size=500 boost=3.0", "uniform"]
    assert frame.reference.tolist() == [True, False]
    assert frame.ppl[1] == pytest.approx(500, rel=1e-6)
    assert frame.kld[1] == pytest.approx(0.078622, abs=1e-6)
    assert frame.tokens.tolist() == [891, 891]
    assert frame.from_cache.all()
    same = load(tmp_path / "r.json").frame().drop(columns="from_cache")
    pd.testing.assert_frame_equal(frame.drop(columns="from_cache"), same)
    chosen = compare(*words, data=toy_text, eval_len=50, eval_stride=20, quiet=True)
    assert chosen.frame().tokens.tolist() == [32 * 49] * 2
    for rows in (2, "2"):
        comparison = compare(*words, data=data, rows=rows, quiet=True)
        assert comparison.frame().tokens.tolist() == [198, 198]
    assert capfd.readouterr() == ("", "")


def test_names_that_a_call_cannot_mean_are_one_line(
    toy_model: Path, toy_text: Path, data: dict[str, Any]
) -> None:
    model = f"{toy_model}@fake"
    for arguments, keys, begin in (
        ((), {"data": "wiki2"}, "models: missing; "),
        ((model,), {"data": "nowhere"}, "-d: nowhere: no such file"),
        (
            (f"{toy_model}@fak",),
            {"data": toy_text},
            f"{toy_model}@fak: load_fn: unknown engine 'fak'",
        ),
        (
            (f"{model}:boots=1",),
            {"data": toy_text},
            f"{toy_model.name} boots=1: engine.boots: unknown",
        ),
        (
            (model,),
            {"data": toy_text, "rows": "some"},
            "rows: 'some': expected a number of windows, or all",
        ),
        # For Python, True is an integer.
        ((model,), {"data": toy_text, "rows": True}, "rows: 'True': expected "),
        ((model,), {"data": toy_text, "rows": -1}, "rows: '-1': expected "),
        (
            (model,),
            {"data": toy_text, "sample": "middle"},
            "sample: 'middle' is none of first, spread",
        ),
        ((model,), {"data": toy_text, "eval_len": 0}, "eval_len: '0': expected a whole number"),
        ((model,), {"data": data, "eval_len": 64}, "eval_len: is for a text without a data spec"),
        ((data, UNIFORM), {"sample": "first"}, "sample: is for a text without a data spec"),
        (
            (model,),
            {"data": data, "models": UNIFORM},
            "models: specs cannot be combined with MODEL arguments",
        ),
        ((3,), {"models": UNIFORM}, "data: 3: expected names, spec files or dicts"),
    ):
        assert refusal(compare, *arguments, quiet=True, **keys).startswith(begin), keys


def test_the_schema_of_results_is_that_of_the_file(data: dict[str, Any], tmp_path: Path) -> None:
    compare_q.compare(data=data, models=[BOOSTED, UNIFORM], rows=2, quiet=True).save(
        tmp_path / "r.json"
    )
    schema = compare_q.results_schema()
    assert schema == json.loads(
        (ROOT / "eval" / "spec" / "schema" / "results.schema.json").read_text()
    )
    jsonschema.validate(json.loads((tmp_path / "r.json").read_text()), schema)


def test_specs_are_files_dicts_or_both_and_paths_start_here(
    write_specs: Specs, data: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, models = write_specs([UNIFORM])
    monkeypatch.chdir(data["path"].parent)
    both = compare(
        {**data, "path": data["path"].name}, [models, BOOSTED], cache_dir="kept", quiet=True
    )
    assert [model.label for model in both.results.models] == ["uniform", "boosted"]
    assert list(Path("kept", "scores").glob("*/*.safetensors"))
    one = compare(str(file), UNIFORM, rows=2, quiet=True)
    assert len(one.frame()) == 1
    one.save(tmp_path / "r.json")
    assert load(tmp_path / "r.json").frame().equals(one.frame())
    assert json.loads((tmp_path / "r.json").read_text())["command"] == ["compare_q"]


def test_what_is_not_known_is_missing_and_notes_say_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizeless = replace(
        QUANT, label="server", storage=replace(storage_of(QUANT), bpw_layer=None, note="a server")
    )
    run_of(REF, QUANT, FAILED, sizeless).with_origin([]).write(tmp_path / "r.json")
    api.show(tmp_path / "r.json")
    assert QUANT.label in capsys.readouterr().out
    frame = load(tmp_path / "r.json").frame()
    assert {"label", "kld_p99.9", "kld_stderr", "reference", "notes"} <= set(frame.columns)
    assert not {"blocks", "spec", "provenance", "text"} & set(frame.columns)
    assert frame.kld.tolist()[:2] == [0, 0.01234567]
    assert frame.kld_stderr.isna().tolist() == [True, False, True, False]
    assert frame.tokens.isna().tolist() == [False, False, True, False]
    assert frame.error.tolist() == [None, None, "told to fail", None]
    assert frame.notes.tolist() == [None, None, "failed: told to fail", "size n/a: a server"]
    assert frame.bpw_layer.isna().tolist() == [False, False, True, True]
    numbers = ("ppl", "kld", "vram_gib", "same_top", "score_seconds")
    assert {str(frame[name].dtype) for name in numbers} == {"float64"}


def test_bad_specs_are_one_line(data: dict[str, Any], tmp_path: Path) -> None:
    """The errors are those of the command line, with the argument's name instead of the file's."""
    unknown = refusal(compare, data, [UNIFORM, {**UNIFORM, "label": "x", "modeldir": 1}])
    assert unknown.startswith("models[1]: model 1 (x): modeldir: ")
    assert refusal(compare, {**data, "eval_len": 0}, UNIFORM).startswith("data: eval_len: ")
    assert (
        refusal(compare, {**data, "eval_len": {1}}, UNIFORM)
        == "spec: holds what JSON cannot: expected str, bytes or os.PathLike object, not set"
    )
    assert refusal(compare, data, []) == "models: give a spec file or a dict, at least one"
    assert refusal(compare, data, tmp_path / "none.json").endswith("none.json: no such file")
    assert refusal(load) == "load: give at least one results.json or report.html, each by its name"


def test_what_a_result_gives_beside_its_frame(data: dict[str, Any], tmp_path: Path) -> None:
    """Single tokens, pairs and the plot equal those of the command line; a run that was read back
    has no tokens.
    """
    comparison = compare(data, [UNIFORM, BOOSTED], rows=3, quiet=True)
    tokens = comparison.tokens("uniform")
    assert len(tokens) == 297
    assert tokens.logprob.to_numpy() == pytest.approx(-math.log(500), abs=1e-5)
    assert tokens.kld.mean() == pytest.approx(comparison.frame().kld[0], rel=1e-6)
    (pair,) = comparison.pairs().to_dict("records")
    assert (pair["first"], pair["second"]) == ("uniform", "boosted")
    (uniform, boosted) = comparison.frame().ppl
    assert pair["ln_ppl_ratio"] == pytest.approx(math.log(uniform / boosted), abs=1e-6)
    assert pair["ln_ppl_ratio_low"] <= pair["ln_ppl_ratio"] <= pair["ln_ppl_ratio_high"]
    sized = api.Comparison(run_of(REF, QUANT))
    sized.plot(tmp_path / "plot.png", measure="kld")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    earlier = sized.results.updated(
        created="2026-01-02T03:04:05+00:00", versions={"compare-q": "0.1"}
    )
    card = api.Comparison(earlier).plot(card=True)
    texts_of_card = " ".join(artist.get_text() for artist in card.findobj(Text))
    assert "2026-01-02, compare_q 0.1" in texts_of_card
    assert repr(comparison) == "<Comparison of 2 models: uniform, boosted>"
    page = comparison._repr_html_()
    assert ">uniform</td>" in page
    # A footnote.
    assert page.count("<p>method exllamav3: ") == 1
    (finding,) = table_of(comparison.results).finding
    assert f"<p>{html.escape(finding)}</p>" in page
    comparison.save(tmp_path / "r.json")
    assert "read back" in refusal(lambda: load(tmp_path / "r.json").tokens("uniform"))
    assert "no model is called 'x'" in refusal(lambda: comparison.tokens("x"))
    assert refusal(lambda: sized.plot(measure="acc")).startswith("plot: ")


@pytest.fixture
def texts(toy_model: Path, toy_text: Path, tmp_path: Path) -> list[dict[str, Any]]:
    (tmp_path / "other.txt").write_text("hgfedcba\n" * 60)
    keys = {"tokenizer_dir": toy_model, "dataset": "text", "eval_stride": 100}
    return [
        {**keys, "path": toy_text, "eval_len": 100},
        {**keys, "path": tmp_path / "other.txt", "eval_len": 50, "label": "other"},
    ]


def test_slices_of_several_texts_are_columns(texts: list[dict[str, Any]], tmp_path: Path) -> None:
    """Each text's numbers are those of a run of the text alone, to the bit; KLDs are weighted by
    tokens.
    """
    comparison = compare(texts, [UNIFORM, BOOSTED], quiet=True)
    frame = comparison.frame(["kld", "kld:text", "kld:other", "ppl:other"])
    sliced = [
        "kld:text",
        "kld:text_stderr",
        "kld:other",
        "kld:other_stderr",
        "ppl:other",
        "ppl:other_stderr",
    ]
    assert frame.columns.tolist() == ["label", "kld", "kld_stderr", *sliced]
    counts = []
    for name, file in zip(("text", "other"), texts, strict=True):
        alone = compare(file, [UNIFORM, BOOSTED], quiet=True)
        # The scores of a run of several texts are those of one text.
        assert alone.frame().from_cache.all()
        assert frame[f"kld:{name}"][0] == alone.frame().kld[0]
        counts.append(alone.frame().tokens[0])
        tokens = comparison.tokens("uniform", name)
        assert len(tokens) == counts[-1]
        of_text = tokens.drop(columns=["text", "window"])
        pd.testing.assert_frame_equal(of_text, alone.tokens("uniform").drop(columns="window"))
    assert np.average(
        [frame["kld:text"][0], frame["kld:other"][0]], weights=counts
    ) == pytest.approx(frame.kld[0])
    assert frame["ppl:other"][0] == pytest.approx(500, rel=1e-6)
    comparison.save(tmp_path / "r.json")
    again = load(tmp_path / "r.json")
    pd.testing.assert_frame_equal(
        again.frame(["kld:text", "ppl:begin"]), comparison.frame(["kld:text", "ppl:begin"])
    )
    assert "there are: text, other, unsure, begin" in refusal(comparison.frame, ["kld:prose"])
    assert "name one of the texts: text, other" in refusal(comparison.tokens, "uniform", "prose")


def test_bad_input_is_an_error_that_the_package_exports() -> None:
    assert compare_q.InputError is InputError
    with pytest.raises(compare_q.InputError):
        compare_q.compare({}, [])
