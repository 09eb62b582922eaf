"""``windows``, and runs with files of scores next to models whose KLD is exact."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.support import scores_files
from tests.support.comparisons import KLD, fake
from tests.support.toy import Run, Specs, assert_refused

VOCAB = 500
"""Logits of the fake engine."""
LN_VOCAB = math.log(VOCAB)
REFERENCE = fake("ref", boost=3.0, reference=True)


@pytest.fixture
def windows(compare_q: Run, write_specs: Specs, tmp_path: Path) -> list[dict[str, Any]]:
    """The lines of ``windows.jsonl`` of the toy text, without the first one."""
    data, _ = write_specs()
    ran = compare_q("windows", "-d", data, "-r", 3, "-o", tmp_path / "windows.jsonl")
    assert ran.status == 0, ran.err
    return lines_of(tmp_path / "windows.jsonl")[1:]


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def uniform(window: dict[str, Any], top: int = 20) -> dict[str, Any]:
    """Return the scores of a window by a model for which all tokens are equally probable."""
    n_scored = sum(end - begin for begin, end in window["spans"])
    line: dict[str, Any] = {"window": window["window"], "logprob": [-LN_VOCAB] * n_scored}
    if top:
        line["top_ids"] = [list(range(top))] * n_scored
        line["top_logprobs"] = [[-LN_VOCAB] * top] * n_scored
    return line


@pytest.fixture
def rows(
    compare_q: Run, write_specs: Specs, tmp_path: Path
) -> Callable[..., dict[str, dict[str, Any]]]:
    """Run models and files next to the reference; return the rows by their labels."""

    def run(*models: dict[str, Any], n: int = 3, status: int = 0) -> dict[str, dict[str, Any]]:
        data, spec = write_specs([REFERENCE, *models])
        ran = compare_q("-d", data, "-m", spec, "-r", n, "-o", tmp_path / "r.json")
        assert ran.status == status, ran.err
        results = json.loads((tmp_path / "r.json").read_text())
        return {row["label"]: row for row in results["models"]}

    return run


def spec_of(file: Path, **keys: Any) -> dict[str, Any]:
    return {"load_fn": "scores_file", "path": str(file), **keys}


Rows = Callable[..., dict[str, dict[str, Any]]]
Lines = Sequence[dict[str, Any]]


def test_windows_have_the_tokens_that_a_run_scores(
    windows: Lines, toy_text: Path, toy_model: Path
) -> None:
    text = toy_text.read_text()
    tokenizer = Tokenizer.from_file(str(toy_model / "tokenizer.json"))
    assert len(windows) == 3
    for number, window in enumerate(windows):
        # A token per byte.
        expected = text[100 * number : 100 * number + 100]
        assert tokenizer.decode(window["token_ids"]) == expected
        assert window["spans"] == [[1, 100]]
        assert "asked" not in window


def test_a_file_has_the_perplexity_and_the_bound_of_its_model(
    windows: Lines, rows: Rows, tmp_path: Path
) -> None:
    """All tokens except the real one are equally probable in both: the bound is the KLD."""
    file = scores_files.write(
        tmp_path / "u.jsonl", map(uniform, windows), label="from a file", hardware="2 x MI300"
    )
    by_label = rows(fake("uniform"), spec_of(file))
    row = by_label["from a file"]
    assert row["ppl"] == pytest.approx(VOCAB)
    assert row["kld_kind"] == "bound"
    # A rounding of 2 ** -14 that the bound allows for, in ln q and in the rest.
    assert row["kld"] == pytest.approx(KLD, abs=2e-4)
    assert row["kld"] <= KLD
    assert by_label["uniform"]["kld"] == pytest.approx(KLD, abs=1e-6)
    assert row["ref_ppl"] == pytest.approx(by_label["uniform"]["ref_ppl"])
    assert row["engine_version"] == "other 1.2"
    assert row["where"] == "2 x MI300"
    # Reading a file is no measure of the engine that made it.
    assert row["tokens_per_second"] is None
    assert by_label["uniform"]["tokens_per_second"] > 0


def test_targets_alone_give_a_perplexity_and_the_reason_for_no_divergence(
    windows: Lines, rows: Rows, tmp_path: Path
) -> None:
    lines = [uniform(window, top=0) for window in windows]
    row = rows(spec_of(scores_files.write(tmp_path / "u.jsonl", lines), label="u"))["u"]
    assert row["ppl"] == pytest.approx(VOCAB)
    assert row["kld"] is None
    assert any("KLD" in note for note in row["notes"])


def test_half_a_file_is_a_row_without_numbers(windows: Lines, rows: Rows, tmp_path: Path) -> None:
    file = scores_files.write(tmp_path / "half.jsonl", map(uniform, windows[:2]))
    by_label = rows(fake("uniform"), spec_of(file, label="half"), status=1)
    assert "1 of 3 windows" in by_label["half"]["error"]
    assert by_label["half"]["ppl"] is None
    assert by_label["uniform"]["ppl"] == pytest.approx(VOCAB)


def test_a_longer_file_gives_the_rows_of_fewer_windows(
    windows: Lines, rows: Rows, tmp_path: Path
) -> None:
    file = scores_files.write(tmp_path / "u.jsonl", map(uniform, windows))
    assert rows(spec_of(file, label="u"), n=2)["u"]["windows"] == 2


def test_a_changed_file_is_read_again(windows: Lines, rows: Rows, tmp_path: Path) -> None:
    file = scores_files.write(tmp_path / "u.jsonl", map(uniform, windows))
    assert rows(spec_of(file, label="u"))["u"]["ppl"] == pytest.approx(VOCAB)
    lines = [uniform(window, top=0) for window in windows]
    for line in lines:
        line["logprob"] = [-1.0] * len(line["logprob"])
    scores_files.write(file, lines)
    assert rows(spec_of(file, label="u"))["u"]["ppl"] == pytest.approx(math.e)


def test_two_files_of_one_label_are_two_rows(windows: Lines, rows: Rows, tmp_path: Path) -> None:
    specs = []
    for name in ("a.jsonl", "b.jsonl"):
        file = scores_files.write(tmp_path / name, map(uniform, windows), label="same")
        specs.append(spec_of(file))
    assert list(rows(*specs)) == ["ref", "same", "same (2)"]


def test_asked_tokens_are_those_of_the_store(
    compare_q: Run, write_specs: Specs, rows: Rows, tmp_path: Path
) -> None:
    """The estimate is exact here: q / p is the same for all tokens that could be drawn."""
    store = tmp_path / "store"
    data, spec = write_specs([REFERENCE])
    assert compare_q("-d", data, "-m", spec, "-r", 3, "-lf", store).status == 0
    ran = compare_q("windows", "-d", data, "-r", 3, "-lf", store, "-o", tmp_path / "w.jsonl")
    assert ran.status == 0, ran.err
    lines = []
    for window in lines_of(tmp_path / "w.jsonl")[1:]:
        asked = window["asked"]
        # The real token is the most probable one.
        assert [ids[0] for ids in asked["ids"]] == window["token_ids"][1:]
        line = uniform(window, top=0)
        line |= {"asked": asked, "asked_logprobs": [[-LN_VOCAB] * 24] * len(asked["ids"])}
        lines.append(line)
    file = scores_files.write(tmp_path / "s.jsonl", lines)
    data, spec = write_specs([spec_of(file, label="asked")])
    ran = compare_q("-d", data, "-m", spec, "-r", 3, "-lf", store, "-o", tmp_path / "r.json")
    assert ran.status == 0, ran.err
    (row,) = json.loads((tmp_path / "r.json").read_text())["models"]
    assert row["kld_kind"] == "estimate"
    assert row["kld"] == pytest.approx(KLD, abs=1e-6)
    assert row["ppl"] == pytest.approx(VOCAB)


def test_a_store_without_the_windows_is_refused(
    compare_q: Run, write_specs: Specs, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    data, spec = write_specs([REFERENCE])
    assert compare_q("-d", data, "-m", spec, "-r", 2, "-lf", store).status == 0
    target = tmp_path / "w.jsonl"
    ran = compare_q("windows", "-d", data, "-r", 3, "-lf", store, "-o", target)
    assert_refused(ran, "1 of 3 windows")
    assert not target.exists()


def test_the_file_itself_is_a_model_of_a_one_line_call(
    windows: Lines, compare_q: Run, toy_model: Path, toy_text: Path, tmp_path: Path
) -> None:
    """Windows of the length that the file names, and its label."""
    header = lines_of(tmp_path / "windows.jsonl")[0]
    lines = [uniform(window, top=0) for window in windows]
    file = scores_files.write(tmp_path / "u.jsonl", lines, label="mine", text=header["text"])
    words = [file, "-d", toy_text, "--tokenizer", toy_model, "--sample", "first", "-r", 3]
    ran = compare_q(*words, "-o", tmp_path / "r.json")
    assert ran.status == 0, ran.err
    (row,) = json.loads((tmp_path / "r.json").read_text())["models"]
    assert row["label"] == "mine"
    assert row["ppl"] == pytest.approx(VOCAB)


@pytest.mark.parametrize("label", ["   ", "a\nb"])
def test_a_label_that_cannot_be_read_is_refused(
    windows: Lines,
    compare_q: Run,
    write_specs: Specs,
    toy_model: Path,
    toy_text: Path,
    tmp_path: Path,
    label: str,
) -> None:
    """As a model of the command line, and of a spec."""
    file = scores_files.write(tmp_path / "u.jsonl", map(uniform, windows), label=label)
    parts = [f"{file}: line 1", "label"]
    words = [file, "-d", toy_text, "--tokenizer", toy_model]
    assert_refused(compare_q(*words), *parts)
    data, spec = write_specs([spec_of(file)])
    assert_refused(compare_q("-d", data, "-m", spec), *parts)


def test_a_file_of_windows_is_not_a_model(
    windows: Lines, compare_q: Run, toy_text: Path, tmp_path: Path
) -> None:
    assert_refused(compare_q(tmp_path / "windows.jsonl", "-d", toy_text), "windows.jsonl")
    spec = tmp_path / "m.json"
    spec.write_text(json.dumps(spec_of(tmp_path / "windows.jsonl")))
    ran = compare_q("-d", tmp_path / "data.json", "-m", spec)
    assert_refused(ran, "windows.jsonl: line 1", "compare_q")


def test_a_file_is_no_reference(
    windows: Lines, compare_q: Run, write_specs: Specs, tmp_path: Path
) -> None:
    file = scores_files.write(tmp_path / "u.jsonl", map(uniform, windows))
    data, spec = write_specs([spec_of(file, reference=True)])
    assert_refused(compare_q("-d", data, "-m", spec), "reference")


def test_text_that_must_be_sampled_is_refused(
    compare_q: Run, write_specs: Specs, tmp_path: Path
) -> None:
    """Only a run, or a pack, has a reference that samples it."""
    data, _ = write_specs(dataset="sampled", eval_stride=..., max_rows=4)
    assert_refused(compare_q("windows", "-d", data, "-o", tmp_path / "w.jsonl"))


@pytest.mark.parametrize(
    "words",
    [
        ["windows"],
        ["windows", "-o", "w.jsonl"],
        ["windows", "-d", "nowhere.txt", "-o", "w.jsonl"],
        ["windows", "-d", "wiki2"],
        ["windows", "nowhere", "-o", "w.jsonl"],
        ["windows", "-o", "w.jsonl", "-m", "m.json"],
    ],
)
def test_wrong_words_are_one_line(
    compare_q: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert_refused(compare_q(*words))
    assert not (tmp_path / "w.jsonl").exists()
