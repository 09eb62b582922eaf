"""Method "gptq" against GPTQ's own evaluation in float64, on a toy model, and WikiText-2's rows and pages."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import pytest

from benchmarks import against_gptq, wikitext_rows
from tests.support.toy import ATOL_LOGPROB

ROWS = [
    "",
    " = A = \n",
    "",
    " The first one , with a mark . \n",
    " And a second row . \n",
    "",
    " = = B = = \n",
    "",
    " é \n",
]


@pytest.mark.engine
@pytest.mark.parametrize("windows", [0, 2])
def test_gptqs_perplexity(toy_model: Path, tmp_path: Path, windows: int) -> None:
    """A token a byte, so that the joined rows are cut by hand: 16 tokens a window, 15 of them scored."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": row}) + "\n" for row in ROWS))
    text = "\n\n".join(ROWS)
    assert against_gptq.joined(rows) == text
    gold = against_gptq.gptq(toy_model, text, 16, windows)
    n = len(text.encode()) // 16
    assert (gold["tokens"], gold["windows_in_all"], gold["windows"]) == (len(text.encode()), n, windows or n)
    args = argparse.Namespace(model=toy_model, text=rows, seqlen=16, windows=windows)
    seen, perplexity = against_gptq.compare_q(args, tmp_path, {"dtype": "float32"})
    assert seen == {"text_tokens": gold["tokens"], "windows": windows or n, "scored_tokens": (windows or n) * 15}
    assert math.log(perplexity) == pytest.approx(math.log(gold["ppl"]), abs=ATOL_LOGPROB)


LINES = [" = A = ", " a ", " = = B = = ", " = = = C = = = ", " c ", " = D = ", " = = E = = ", " = F = ", " f "]
TEXT = (
    " \n = A = \n \n a \n \n = = B = = \n \n \n = = = C = = = \n \n c \n \n"
    " \n = D = \n \n \n = = E = = \n \n \n \n = F = \n \n f \n \n"
)


def test_blank_lines_of_wikitext() -> None:
    """As the published file has them; that they are right for all of it, its SHA-256 says (``original``)."""
    assert wikitext_rows.with_blank_lines(LINES) == TEXT


def test_a_file_that_is_not_wikitext_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.raw").write_text(TEXT)
    with pytest.raises(SystemExit, match=r"a\.raw: not WikiText-2's wiki\.test\.raw"):
        wikitext_rows.original(tmp_path / "a.raw")


def test_rows_and_pages_of_wikitext() -> None:
    """A row is a line and its newline, blank ones empty; a page begins at a title, and what is blank before is none."""
    rows = wikitext_rows.rows(TEXT)
    assert rows[:6] == ["", " = A = \n", "", " a \n", "", " = = B = = \n"]
    assert [row for row in rows if row] == [f"{line}\n" for line in LINES]
    assert wikitext_rows.pages(TEXT) == [
        " = A = \n \n a \n \n = = B = = \n \n \n = = = C = = = \n \n c \n \n ",
        " = D = \n \n \n = = E = = \n \n \n ",
        " = F = \n \n f \n \n",
    ]
