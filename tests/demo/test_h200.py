"""The command that makes and measures the GPU table, dry: toy models, what fails, what is left out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from compare_q.eval.plots import looks
from demo.h200 import making, measuring
from demo.h200.rows import EXL3_BITS, GPTQ, Row, table_rows


@pytest.fixture
def toy_base(toy_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The toy in place of the padded SmolLM2, and windows that fit it."""
    monkeypatch.setattr(making, "padded_base", lambda out, source: shutil.copytree(toy_model, out))
    monkeypatch.setattr(measuring, "WINDOW", 100)
    monkeypatch.setattr(measuring, "STRIDE", 100)


def test_labels() -> None:
    """Each once; and no more groups than the plot has colours."""
    rows = table_rows()
    labels = [row.label for row in rows]
    assert len(set(labels)) == len(labels) == 41
    assert len({row.group for row in rows}) <= len(looks.COLOURS)


@pytest.mark.engine
@pytest.mark.usefixtures("toy_base")
def test_only_what_is_asked_for_is_made_and_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models = tmp_path / "models"
    making.make_all(models, ["w8a8"])
    assert sorted(folder.name for folder in models.iterdir() if folder.is_dir()) == ["bf16", "w8a8"]
    capsys.readouterr()
    making.make_all(models, ["w8a8"])
    assert "making" not in capsys.readouterr().out


def test_a_failure_is_one_line_and_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def half(out: Path) -> None:
        out.mkdir()
        raise ValueError("does not\nfit")

    making.make_or_report(tmp_path / "q", half)
    assert capsys.readouterr().out.splitlines()[1:] == ["q: failed: ValueError: does not fit"]
    assert not (tmp_path / "q").exists()


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


def failures(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().out.splitlines() if "failed" in line]


def test_a_converter_that_refuses_and_exits_with_0(
    tmp_path: Path, toy_model: Path, converters: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """exllamav3's does; here both print and make nothing.  Each bitrate of EXL3 is a line of its own."""
    models = tmp_path / "models"
    making.make_exl3(models)
    lines = failures(capsys)
    assert len(lines) == len(EXL3_BITS)
    assert all("!! Error: no such thing (log: " in line for line in lines)
    shutil.copytree(toy_model, models / "bf16")
    making.make_exl2(models)
    assert [line.split(" (log")[0] for line in failures(capsys)] == [
        "exl2-measurement.json: failed: RuntimeError: !! Error: no such thing"
    ]


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


def test_an_end_after_seconds_lets_compare_q_write(
    tmp_path: Path, toy_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in, which does what compare_q does on Ctrl-C: it writes what is finished, and says so by its status."""
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval" / "compare_q.py").write_text(
        "import signal, sys, time\n"
        "def end(*_):\n"
        "    time.sleep(0.5)\n"
        "    print('written')\n"
        "    sys.exit(130)\n"
        "signal.signal(signal.SIGINT, end)\n"
        "time.sleep(60)\n"
    )
    monkeypatch.setattr(measuring, "ROOT", tmp_path)
    shutil.copytree(toy_model, tmp_path / "models" / "bf16")
    rows = [Row("bf16", "transformers_auto_bf16", "bf16")]
    monkeypatch.setattr(measuring, "WINDOW", 100)
    assert measuring.measure_table(tmp_path, rows, tmp_path / "text", "all", seconds=3) == 130
    assert (tmp_path / "results" / "table.txt").read_text() == "written\n"


def test_a_gptq_checkpoint_of_another_base_is_left_out(
    tmp_path: Path, toy_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors.torch import load_file, save_file

    models = tmp_path / "models"
    for name in ("bf16", GPTQ):
        shutil.copytree(toy_model, models / name)
    rows = [Row("W4A16 g128 GPTQ", "transformers_auto_bf16", GPTQ)]
    monkeypatch.setattr(measuring, "WINDOW", 100)
    assert len(measuring.usable_rows(tmp_path, rows)) == 1
    file = models / GPTQ / "model.safetensors"
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"] * 2
    save_file(tensors, file, metadata={"format": "pt"})
    assert measuring.usable_rows(tmp_path, rows) == []
    assert "was made of another base; make it again (demo/h200/gptq.py)" in capsys.readouterr().out
