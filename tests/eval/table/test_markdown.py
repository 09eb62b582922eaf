"""The table as Markdown: its source to the letter, and that nothing in a label becomes markup."""

from __future__ import annotations

from compare_q.eval.results import MARK
from compare_q.eval.table import markdown
from tests.support.made import BASE, FAILED, QUANT, REF, replace, results_of, run_of, with_sums


def test_the_whole_text() -> None:
    worse = with_sums(replace(QUANT, label="q*_|4"), nll=(14.0, 24.0, 34.0, 44.0), kld=(5.0, 5.0, 5.0, 5.0))
    lines = markdown.markdown_text(results_of(replace(run_of(REF, QUANT, worse, FAILED), subtitle="a_b"))).splitlines()
    assert lines[:8] == [
        "**a\\_b**",
        "",
        "| label | kernel | layer bpw | VRAM GiB | PPL | PPL vs ref % | KLD | 99.9 % KLD | same top % | tok/s |",
        "| :-- | :-- | --: | --: | --: | --: | --: | --: | --: | --: |",
        "| bf16 | Linear | 4.50 | 1.00 | 7.5000 ± 0.85 | ref | ref | ref | ref | 20 |",
        "| W4A16 | Linear | 4.50 | 1.00 | **★7.5000** ± 0.85 | +3.45 ± 0.21 | **★0.01235** ± 0.00045 | 0.9990 "
        "| **★98.77** ± 0.52 | 20 |",
        "| q\\*\\_\\|4 | Linear | 4.50 | 1.00 | 7.5000 ± 0.85 | +3.45 ± 0.21 | 0.01235 ± 0.00045 | 0.9990 "
        "| **★98.77** ± 0.52 | 20 |",
        "| broken |  |  |  | failed |  |  |  |  |  |",
    ]
    assert lines[8:12] == ["", lines[9], "", "- 2 windows, 40 scored tokens"]
    assert lines[9].startswith(
        "W4A16 keeps 98.8 % of the most probable tokens of bf16 (KLD 0.01235 ± 0.00045); q\\*\\_\\|4 "
    )
    assert "- broken: failed: told to fail" in lines
    assert any(line.startswith("- ★: the best quantized model") for line in lines)
    assert all(line.startswith("- ") for line in lines[11:])


def test_every_row_has_the_cells_of_the_header() -> None:
    """Also without a reference, with non-finite positions, and with a mark."""
    for run in (run_of(BASE, FAILED, reference=None), run_of(REF, replace(QUANT, spec={"noise_floor": True}))):
        rows = [line for line in markdown.markdown_text(results_of(run)).splitlines() if line.startswith("|")]
        assert len({line.count("|") for line in rows}) == 1


def test_special_letters_are_escaped() -> None:
    assert markdown.escaped("a*b_c`d|e<f>g[h]i#j~k^l&m\\n{o}") == (
        "a\\*b\\_c\\`d\\|e\\<f\\>g\\[h\\]i\\#j\\~k\\^l\\&m\\\\n\\{o\\}"
    )
    assert markdown.escaped(f"two\n lines {MARK} ± 4.5e-6, (0.85)") == f"two lines {MARK} ± 4.5e-6, (0.85)"
