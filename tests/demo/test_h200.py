"""The command that makes and measures the GPU table, dry: toy models, what fails, what is left out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from demo.h200 import making, measuring
from demo.h200.rows import Row


@pytest.fixture
def toy_base(toy_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The toy in place of the padded SmolLM2, and windows that fit it."""
    monkeypatch.setattr(making, "padded_base", lambda out, source: shutil.copytree(toy_model, out))
    monkeypatch.setattr(measuring, "WINDOW", 100)
    monkeypatch.setattr(measuring, "STRIDE", 100)


@pytest.mark.engine
@pytest.mark.usefixtures("toy_base")
def test_only_what_is_asked_for_is_made_and_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models = tmp_path / "models"
    making.make_all(models, ["w8a8"])
    assert sorted(folder.name for folder in models.iterdir() if folder.is_dir()) == ["bf16", "w8a8"]
    capsys.readouterr()
    making.make_all(models, ["w8a8"])
    assert "making" not in capsys.readouterr().out


CONVERTERS = {
    "exllamav3": "convert_model.py",
    "exllamav2": "convert_exl2.py",
}


@pytest.fixture
def converters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Packages in place of exllamav3 and exllamav2: their converters run what is written to the files in this folder.

    The real ones need a GPU.
    """
    for package, name in CONVERTERS.items():
        folder = tmp_path / "fake" / package / "conversion"
        folder.mkdir(parents=True)
        (folder.parent / "__init__.py").touch()
        (folder / "__init__.py").touch()
        (folder / name).write_text("print('one'); print(' !! Error: no such thing')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "fake"))
    (tmp_path / "models").mkdir()
    return tmp_path / "fake"


@pytest.mark.engine
@pytest.mark.usefixtures("toy_base")
def test_table_plots_and_report(tmp_path: Path, toy_text: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The whole command on Transformers; rows whose engine or model is not there are left out with a line."""
    rows = [
        Row("bf16 Transformers", "transformers_auto_bf16", "bf16"),
        Row("W8A8 int8", "transformers_auto_bf16", "w8a8"),
        Row("EXL3 4.0 bpw", "no_such_engine", "bf16"),
        Row("FP8 dynamic", "transformers_auto_bf16", "not made"),
    ]
    making.make_all(tmp_path / "models", ["w8a8"])
    assert measuring.measure_table(tmp_path, rows, toy_text, "2") == 0
    out = capfd.readouterr().out
    assert "left out: EXL3 4.0 bpw: load_fn: unknown engine 'no_such_engine'" in out
    assert "left out: FP8 dynamic: " in out
    assert out.count("left out: ") == 2
    results = json.loads((tmp_path / "results" / "results.json").read_text())
    assert [model["label"] for model in results["texts"][0]["models"]] == ["bf16 Transformers", "W8A8 int8"]
    assert results["texts"][0]["reference"]["label"] == "bf16 Transformers"
    for name in ("ppl_bpw.png", "kld_bpw.png"):
        assert (tmp_path / "results" / "plots" / name).read_bytes()[:4] == b"\x89PNG"
    assert '"W8A8 int8"' in (tmp_path / "results" / "report.html").read_text()
    assert "W8A8 int8" in (tmp_path / "results" / "table.md").read_text()
    assert "W8A8 int8" in (tmp_path / "results" / "table.txt").read_text()
