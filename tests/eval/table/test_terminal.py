"""The printed table: what fits, what wraps, what is marked."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from compare_q.backends.base import Storage
from compare_q.backends.common.messages import CONTROL
from compare_q.eval.results import TextResult
from compare_q.eval.stats.uncertainty import Perplexity
from compare_q.eval.table import terminal
from compare_q.eval.table.pairs import pair_lines
from tests.support.made import FAILED, QUANT, REF, REFERENCE, replace, results_of, run_of, with_ppl


def shown(run: TextResult, width: int = 80, names: tuple[str, ...] | None = None, **keys: Any) -> str:
    stream = io.StringIO()
    terminal.show(results_of(run), Console(**{"width": width, "file": stream, "color_system": None, **keys}), names)
    return stream.getvalue()


def row(run: TextResult, label: str, width: int = 80) -> str:
    """The table's row of a label without spaces, one space between its cells."""
    (words,) = [line.split() for line in shown(run, width).splitlines() if line.split()[:1] == [label]]
    return " ".join(words)


def test_rows_with_a_reference() -> None:
    run = run_of(REF, QUANT, FAILED)
    assert row(run, "bf16") == "bf16 Linear 4.50 1.00 7.5000±0.85 ref ref ref ref"
    assert (
        row(run, "W4A16", 100) == "W4A16 Linear 4.50 1.00 7.5000±0.85 +3.45±0.21 0.01235±0.00045 0.9990 98.77±0.52 20"
    )
    assert row(run, "broken") == "broken failed"


def test_labels_are_shown_as_they_are() -> None:
    """Square brackets are markup to rich."""
    assert row(run_of(replace(QUANT, label="[h8]/[/x]")), "[h8]/[/x]").startswith("[h8]/[/x] Linear")


@pytest.mark.parametrize("reference", [None, REFERENCE])
def test_eighty_columns_hold_every_number(reference: dict[str, Any] | None) -> None:
    """Large numbers in every column, non-finite positions too: only label and kernel wrap."""
    large = with_ppl(replace(
        QUANT, label="vLLM Llama-3.1-70B-Instruct W4A16 g128", storage=Storage(16.25, 16.0, 8 * 131.5 * 2**30),
        windows=586, score_seconds=1234.5, from_cache=True,
    ), Perplexity(1234.5678, -1.0, 1_199_542, 12, 123.4))  # fmt: skip
    text = shown(run_of(REF, large, reference=reference))
    lines = text[: text.index("586 windows")].splitlines()
    assert max(len(line) for line in lines) <= 80
    assert "…" not in text
    numbers = ["0.01235±0.00045", "98.77", "12"] if reference else ["12", "972*"]
    head = ["16.25", "131.50", "1,234.5678±120"]
    assert any(line.split()[-len(head + numbers) :] == [*head, *numbers] for line in lines), text


def test_chosen_columns_are_all_there() -> None:
    """In a narrow terminal too, where lines are longer then: nothing is cut off."""
    chosen = ("kld_p99.9", "label", "kernel", "ppl", "ratio", "kld", "same_top", "entropy", "bits_per_byte", "where")
    text = shown(run_of(REF, QUANT), 60, names=chosen)
    (line,) = (line for line in text.splitlines() if "W4A16" in line)
    assert line.split() == [
        "0.9990", "W4A16", "Linear", "7.5000±0.85", "+3.45±0.21", "0.01235±0.00045", "98.77±0.52", "1.2500", "1.2500",
        "n/a",
    ]  # fmt: skip


def test_nothing_moves_the_cursor() -> None:
    """Labels, kernels, titles and an engine's reasons are shown with their control characters escaped."""
    hostile = "a\x1b[2J\r\u202eb\nc"
    run = replace(run_of(REF, replace(QUANT, label=hostile), replace(FAILED, error=hostile)), subtitle=hostile)
    lines = [shown(run, 200), *pair_lines([(REF, run.models[1])])]
    assert not any(CONTROL.search(line) for text in lines for line in text.split("\n"))
    assert shown(run, 200).count("a\\x1b[2J\\r\\u202eb\\nc") == 3
