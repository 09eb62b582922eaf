"""The scripts of docs/other_engines.md: those that run here, against the same models here."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.stale_inputs import write_gguf
from tests.support import ROOT
from tests.support.llama_cpp import runs_llama_cpp
from tests.support.toy import Run

PAGE = ROOT / "docs" / "other_engines.md"
LONGEST_SCRIPT = 25
WINDOWS = ("--eval-len", 100, "-r", 4)
Rows = Callable[..., dict[str, dict[str, Any]]]


def script_of(engine: str) -> str:
    """Return the script below the heading of an engine."""
    match = re.search(
        rf"^### {re.escape(engine)}\n.*?^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S
    )
    assert match is not None
    return match[1]


@pytest.mark.parametrize("engine", ["Transformers", "llama.cpp", "SGLang", "TensorRT-LLM", "MLX"])
def test_every_script_is_short_and_valid(engine: str) -> None:
    script = script_of(engine)
    compile(script, engine, "exec")
    lines = [line for line in script.splitlines() if line.strip()]
    assert len(lines) <= LONGEST_SCRIPT


@pytest.fixture
def rows(
    compare_q: Run, toy_model: Path, toy_text: Path, tmp_path: Path
) -> Callable[[str, Path, str], dict[str, dict[str, Any]]]:
    """Score a model in an engine here and by its script; return the rows ``here`` and ``file``."""

    def run(engine: str, model: Path, here: str) -> dict[str, dict[str, Any]]:
        store = tmp_path / "store"
        reference = f"ref={toy_model}@transformers_auto"
        text = ("-d", toy_text, *WINDOWS)
        ran = compare_q(reference, f"here={model}@{here}", *text, "-lf", store)
        assert ran.status == 0, ran.err
        windows = tmp_path / "windows.jsonl"
        ran = compare_q("windows", toy_model, *text, "-lf", store, "-o", windows)
        assert ran.status == 0, ran.err
        file = tmp_path / "scores.jsonl"
        words = [sys.executable, "-c", script_of(engine), str(model), str(windows), str(file)]
        subprocess.run(words, check=True)
        models = [reference, f"here={model}@{here}", f"file={file}"]
        results = tmp_path / "r.json"
        bounded = without_asked(file, tmp_path / "top.jsonl")
        ran = compare_q(*models, f"top={bounded}", *text, "-lf", store, "-o", results)
        assert ran.status == 0, ran.err
        return {row["label"]: row for row in json.loads(results.read_text())["models"]}

    return run


def without_asked(file: Path, target: Path) -> Path:
    """Write a copy of a file of scores without the tokens that were asked for."""
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines[1:]:
        del line["asked"]
        del line["asked_logprobs"]
    target.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return target


def assert_agrees(rows: dict[str, dict[str, Any]]) -> None:
    """Assert that the rows of a file agree with the row of the same model in an engine here."""
    here = rows["here"]
    for label, kind in (("file", "estimate"), ("top", "bound")):
        row = rows[label]
        assert row["ppl"] == pytest.approx(here["ppl"], rel=1e-4)
        assert row["same_top"] == pytest.approx(here["same_top"], abs=0.005)
        assert row["kld_kind"] == kind
    assert rows["top"]["kld"] <= here["kld"] + 1e-4
    # 396 tokens of a toy whose predictions are peaked, and 4 draws at each of them.
    assert rows["file"]["kld"] == pytest.approx(here["kld"], rel=0.15)


@pytest.mark.engine
def test_transformers(rows: Rows, quantized: Callable[..., Path]) -> None:
    result = rows("Transformers", quantized("W4A16"), "transformers_auto")
    assert_agrees(result)
    # The 20 most probable of 320 tokens.
    assert result["top"]["kld"] > 0.3 * result["here"]["kld"]


@pytest.mark.engine
def test_another_temperature_has_a_note(
    compare_q: Run, toy_model: Path, toy_text: Path, tmp_path: Path
) -> None:
    """Logits of the reference itself that were divided by 0.7."""
    text = ("-d", toy_text, *WINDOWS)
    windows = tmp_path / "windows.jsonl"
    assert compare_q("windows", toy_model, *text, "-o", windows).status == 0
    notes = []
    for name, in_float32 in (("own", ".float()"), ("cold", ".float().div(0.7)")):
        script = script_of("Transformers").replace(".float()", in_float32)
        file = tmp_path / f"{name}.jsonl"
        words = [sys.executable, "-c", script, str(toy_model), str(windows), str(file)]
        subprocess.run(words, check=True)
        results = tmp_path / "r.json"
        ran = compare_q(f"{toy_model}@transformers_auto", file, *text, "-o", results)
        assert ran.status == 0, ran.err
        notes.append(" ".join(json.loads(results.read_text())["models"][1]["notes"]))
    assert "temperature" not in notes[0]
    found = re.search(r"temperature of about ([\d.]+\d)", notes[1])
    assert found is not None, notes[1]
    assert float(found[1]) == pytest.approx(0.7, abs=0.03)


@runs_llama_cpp
def test_llama_cpp(rows: Rows, toy_model: Path, tmp_path: Path) -> None:
    gguf = write_gguf(toy_model, tmp_path / "toy.gguf")
    assert_agrees(rows("llama.cpp", gguf, "llamacpp"))
