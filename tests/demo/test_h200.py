"""The command that makes and measures the GPU table, dry: toy models, what fails, what is left out."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from demo import h200
from eval.plots import grouping


@pytest.fixture
def toy_base(toy_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The toy in place of the padded SmolLM2, and windows that fit it."""
    monkeypatch.setattr(h200, "padded_base", lambda out, source: shutil.copytree(toy_model, out))
    monkeypatch.setattr(h200, "WINDOW", 100)
    monkeypatch.setattr(h200, "STRIDE", 100)


def test_labels() -> None:
    """Each once; and no more groups than the plot has colours."""
    labels = [row.label for row in h200.table_rows()]
    assert len(set(labels)) == len(labels) == 29
    assert len({grouping.split_label(label)[0] for label in labels}) <= len(grouping.COLOURS)


@pytest.mark.engine
@pytest.mark.usefixtures("toy_base")
def test_only_what_is_asked_for_is_made_and_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models = tmp_path / "models"
    h200.make_all(models, ["w8a8"])
    assert sorted(folder.name for folder in models.iterdir() if folder.is_dir()) == ["bf16", "w8a8"]
    capsys.readouterr()
    h200.make_all(models, ["w8a8"])
    assert "making" not in capsys.readouterr().out


def test_a_failure_is_one_line_and_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def half(out: Path) -> None:
        out.mkdir()
        raise ValueError("does not\nfit")

    h200.make_or_report(tmp_path / "q", half)
    assert capsys.readouterr().out.splitlines()[1:] == ["q: failed: ValueError: does not fit"]
    assert not (tmp_path / "q").exists()


def test_a_converter_that_refuses_and_exits_with_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """exllamav3's does; here it prints and makes nothing.  Each bitrate is a line of its own."""
    fake = tmp_path / "fake"
    (fake / "exllamav3" / "conversion").mkdir(parents=True)
    (fake / "exllamav3" / "__init__.py").touch()
    (fake / "exllamav3" / "conversion" / "__init__.py").touch()
    (fake / "exllamav3" / "conversion" / "convert_model.py").write_text(
        "print('one'); print(' !! Error: no such thing')"
    )
    monkeypatch.setenv("PYTHONPATH", str(fake))
    models = tmp_path / "models"
    models.mkdir()
    h200.make_exl3(models, lambda name: name == "exl3")
    lines = [line for line in capsys.readouterr().out.splitlines() if "failed" in line]
    assert len(lines) == len(h200.EXL3_BITS)
    assert all("!! Error: no such thing (log: " in line for line in lines)


@pytest.mark.engine
@pytest.mark.usefixtures("toy_base")
def test_table_plots_and_report(
    tmp_path: Path, toy_text: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The whole command on Transformers; rows whose engine or model is not there are left out with a line."""
    rows = [
        h200.Row("bf16 Transformers", "transformers_auto_bf16", "bf16"),
        h200.Row("W8A8 int8", "transformers_auto_bf16", "w8a8"),
        h200.Row("EXL3 4.0 bpw", "no_such_engine", "bf16"),
        h200.Row("FP8 dynamic", "transformers_auto_bf16", "not made"),
    ]
    monkeypatch.setattr(h200, "table_rows", lambda: rows)
    h200.make_all(tmp_path / "models", ["w8a8"])
    assert h200.measure_table(tmp_path, toy_text, "2") == 0
    out = capfd.readouterr().out
    assert "left out: EXL3 4.0 bpw: load_fn: unknown engine 'no_such_engine'" in out
    assert "left out: FP8 dynamic: " in out
    assert out.count("left out: ") == 2
    results = json.loads((tmp_path / "results" / "results.json").read_text())
    assert [model["label"] for model in results["models"]] == ["bf16 Transformers", "W8A8 int8"]
    assert results["reference"]["label"] == "bf16 Transformers"
    assert all(model["from_cache"] for model in results["models"])
    for name in ("ppl_bpw.png", "kld_bpw.png"):
        assert (tmp_path / "results" / "plots" / name).read_bytes()[:4] == b"\x89PNG"
    assert '"W8A8 int8"' in (tmp_path / "results" / "report.html").read_text()
    assert "W8A8 int8" in (tmp_path / "results" / "table.md").read_text()
    assert "W8A8 int8" in (tmp_path / "results" / "table.txt").read_text()


def stub_compare(failing: dict[str, int], runs: list[str]) -> Callable[..., tuple[int, str]]:
    """compare_q by engine: a status (0 where none is given); 1 means that its first row failed."""

    def compare(out: Path, some: list[dict[str, Any]], *words: object) -> tuple[int, str]:
        runs.append("".join(entry["label"] + ("*" if entry.get("reference") else "") for entry in some))
        status = max((failing.get(entry["load_fn"], 0) for entry in some), key=abs)
        if status in (0, 1):
            (out / "engine.json").write_text(json.dumps({"reference": None if status else {"label": some[0]["label"]}}))
        return status, ""

    return compare


@pytest.mark.parametrize(
    ("failing", "expected"),
    [
        ({}, ["a*c", "a*b", "a*d", "a*bcd"]),
        ({"y": -11}, ["a*c", "a*b", "a*d", "a*cd"]),
        ({"x": 2}, ["a*c", "b*", "b*c", "b*d", "b*d"]),
        ({"x": -11, "y": 1}, ["a*c", "b*", "c*", "d*", "d*"]),
        ({"x": 2, "y": 2, "z": 2}, ["a*c", "b*", "c*", "d*"]),
    ],
)
def test_what_fails_takes_no_more_than_its_own_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: dict[str, int], expected: list[str]
) -> None:
    """An engine that dies loses its rows; a reference that fails loses its place to the next row.

    The last run is the table of all that is left.
    """
    engines = {"a": "x", "b": "y", "c": "x", "d": "z"}
    monkeypatch.setattr(
        h200, "usable_rows", lambda out: [{"label": label, "load_fn": engine} for label, engine in engines.items()]
    )
    runs: list[str] = []
    monkeypatch.setattr(h200, "run_compare_q", stub_compare(failing, runs))
    assert h200.measure_table(tmp_path, tmp_path / "text", "all") == (2 if len(failing) == 3 else 0)
    assert runs == expected
