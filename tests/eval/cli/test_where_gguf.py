"""``compare-q where`` with a GGUF file, and a GGUF file as a row in Transformers."""

from __future__ import annotations

from pathlib import Path

import pytest

from compare_q.eval.results import RunResult
from compare_q.eval.where.results import WhereResult
from tests.support.gguf_toys import save_gguf
from tests.support.toy import Run, assert_refused, needs_accelerate, save_llama

pytestmark = pytest.mark.engine


@pytest.fixture
def q4(toy_model: Path, tmp_path: Path) -> Path:
    """The toy as GGUF in Q4_0."""
    return save_gguf(toy_model, tmp_path / "q4.gguf", "Q4_0")


@needs_accelerate
def test_shares_of_a_gguf_file(
    compare_q: Run, toy_model: Path, q4: Path, long_text: Path, tmp_path: Path
) -> None:
    text = ("-d", long_text, "--eval-len", 50, "-r", 8)
    file = tmp_path / "where.json"
    ran = compare_q("where", toy_model, q4, *text, "--by", "kind", "-o", file)
    assert ran.status == 0, ran.err
    assert "q4: transformers_auto_bf16 (exchanges modules)" in ran.err
    # The terminal may wrap the note.
    assert "llama.cpp also rounds activations" in " ".join(ran.out.split())
    result = WhereResult.read(file)
    assert result.activations == ("bfloat16 with q4_0 weights",)
    names = {row.name for row in result.rows}
    assert names == {"q", "k", "v", "o", "gate", "up", "down", "embed_tokens", "lm_head"}
    for row in result.rows:
        assert row.bits == row.n_weights * 4.5
        assert row.share is not None
    assert result.whole is not None
    assert result.whole.value > 0.01


@needs_accelerate
def test_a_recipe_for_a_gguf_file(
    compare_q: Run, toy_model: Path, q4: Path, long_text: Path
) -> None:
    """Blocks of ggml have no forecast with other bits."""
    words = (toy_model, f"{q4}@transformers:dtype=bfloat16", "-d", long_text, "--eval-len", 50)
    ran = compare_q("where", *words, "-r", 8, "--by", "kind", "--recipe", "bpw=8")
    assert ran.status == 0, ran.err
    assert "llama-quantize" in ran.out
    ran = compare_q("where", *words, "-r", 8, "--recipe", "bpw=8", "--keep-bits", 8)
    assert ran.status == 0, ran.err
    assert "without a forecast left out" in ran.out


@needs_accelerate
def test_a_row_in_transformers(
    compare_q: Run, toy_model: Path, q4: Path, long_text: Path, tmp_path: Path
) -> None:
    file = tmp_path / "r.json"
    ran = compare_q(
        *(f"{toy_model}@transformers", f"{q4}@transformers", "-d", long_text),
        *("--eval-len", 50, "-r", 8, "-o", file),
    )
    assert ran.status == 0, ran.err
    row = RunResult.read(file).models[1]
    assert row.bpw_layer == 4.5
    assert row.provenance["dtype"] == "float32"
    assert row.kld is not None
    assert row.kld > 0.01


def test_files_that_would_be_wrong_are_refused(
    compare_q: Run, toy_model: Path, q4: Path, long_text: Path, tmp_path: Path
) -> None:
    text = ("-d", long_text, "--eval-len", 50)
    in_llamacpp = f"x={q4}@llamacpp"
    assert_refused(compare_q("where", toy_model, in_llamacpp, *text), "x", "llamacpp", ".gguf")
    other = save_gguf(toy_model, tmp_path / "other.gguf", architecture="gemma3")
    folder = save_llama(tmp_path / "larger", vocab_size=400)
    larger = save_gguf(folder, tmp_path / "larger.gguf")
    streamed = f"x={q4}@transformers:streaming=true"
    for words, parts in (
        (("where", toy_model, other), ("other.gguf", "gemma3", "name a folder")),
        (("where", toy_model, streamed), ("x", "engine.streaming", "leave it out")),
        ((toy_model, f"{other}@transformers"), ("other.gguf", "gemma3", "name a folder")),
        (("where", toy_model, larger), ("vocabular", "larger has 400")),
    ):
        ran = compare_q(*words, *text)
        assert ran.status == 2, ran.out + ran.err
        # The lines before it name the engines.
        (error,) = [line for line in ran.err.splitlines() if "error: " in line]
        assert error == ran.err.splitlines()[-1]
        for part in parts:
            assert part in error
