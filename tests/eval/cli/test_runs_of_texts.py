"""Several texts on the command line: accepted and refused specs, checks, and written files."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import pytest

from compare_q.eval.results import RunResult
from tests.support.comparisons import fake, write_texts
from tests.support.toy import Run

MODELS = [fake("ref", boost=3.0, reference=True), fake("a"), fake("b", boost=1.0)]


@pytest.fixture
def files(tmp_path: Path, toy_model: Path) -> dict[str, Path]:
    files = write_texts(tmp_path, toy_model)
    (tmp_path / "models.json").write_text(json.dumps(MODELS))
    return {**files, "models": tmp_path / "models.json"}


def listed(files: dict[str, Path], *changes: dict[str, Any]) -> Path:
    specs = []
    for name, change in zip(("prose", "code"), changes, strict=False):
        specs.append(json.loads(files[name].read_text()) | change)
    file = files["prose"].parent / "list.json"
    file.write_text(json.dumps(specs))
    return file


def test_a_list_in_one_file_and_wildcards(
    compare_q: Run, files: dict[str, Path], tmp_path: Path
) -> None:
    one = listed(files, {"label": "Prose"}, {})
    ran = compare_q("-d", one, "-m", files["models"], "-r", 2)
    assert ran.status == 0, ran.err
    assert ran.out.startswith("2 texts: Prose, code")
    assert "Prose: method exllamav3: 2 windows" in ran.out
    # The wildcard matches list.json, which has two texts, logs.json and prose.json.
    same = compare_q(
        "-d", tmp_path / "[lp]*s*.json", "-d", files["code"], "-m", files["models"], "-r", 2
    )
    assert same.out.startswith("5 texts: Prose, code, logs, prose, code (2)"), same.err


def test_check_says_what_every_text_is(
    compare_q: Run, files: dict[str, Path], tmp_path: Path
) -> None:
    words = ("check", "-d", files["prose"], files["code"], "-m", files["models"])
    ran = compare_q(*words)
    assert ran.status == 0, ran.err
    assert (
        "data prose: prose, method exllamav3, windows of 100 every 100 tokens: 9 windows" in ran.out
    )
    assert "data code: code, method exllamav3, windows of 60 every 60 tokens: 1" in ran.out
    (tmp_path / "code.txt").write_text("")
    ran = compare_q(*words)
    assert ran.status == 2
    assert "error: data code: " in ran.err
    assert "data prose: prose" in ran.out


def test_everything_that_can_be_written(
    compare_q: Run, files: dict[str, Path], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    flags = [
        "-o",
        out / "r.json",
        "--csv",
        out / "r.csv",
        "--markdown",
        out / "r.md",
        "--html",
        out / "r.html",
        "--tokens-out",
        out / "tokens",
        "--pairs",
        "--sort",
        "kld:code",
        "-t",
        "Texts <b>",
    ]
    ran = compare_q("-d", files["prose"], files["code"], "-m", files["models"], *flags)
    assert ran.status == 0, ran.err
    # The pairs, over all tokens.
    assert ran.out.count("Differences: ") == 1
    files_of_tokens = sorted(file.name for file in (out / "tokens").iterdir())
    assert files_of_tokens == ["a.parquet", "b.parquet", "ref.parquet"]
    assert set(parquet.read_table(out / "tokens" / "a.parquet")["text"].to_pylist()) == {
        "prose",
        "code",
    }
    with (out / "r.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert [row["label"] for row in rows] == ["ref", "b", "a"]
    assert "<title>Texts &lt;b&gt;" in (out / "r.html").read_text()
    results = RunResult.read(out / "r.json")
    assert results == RunResult.read(out / "r.html")
    assert [len(model.worst_tokens) for model in results.models] == [20] * 3
    for source in (out / "r.json", out / "r.html"):
        again = compare_q("show", source, "-o", out / "again.json", "--html", out / "again.html")
        assert again.status == 0, again.err
        results_of_show = json.loads((out / "again.json").read_text())
        results_of_run = json.loads((out / "r.json").read_text())
        # ``created`` is the time of writing.
        assert {**results_of_show, "created": ""} == {
            **results_of_run,
            "created": "",
        }
