"""The closing lines on precision, of rows whose errors and times are made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from compare_q.backends.base import Storage
from compare_q.backends.common.message_text import duration_in_words
from compare_q.eval.results import ModelResult, RunResult, Timing
from compare_q.eval.stats.uncertainty import Mean
from compare_q.eval.table.precision_sentences import advice, loading_seconds, sentences
from tests.support.made import FAILED, QUANT, REF, REFERENCE, replace, run_of, with_against

BASE = replace(REF, windows=32, load_seconds=10.0, score_seconds=16.0)


def row(label: str, kld: float, error: float | None, **keys: Any) -> ModelResult:
    """A row with this KLD and its error as an estimate of the whole text's KLD: 20 s of loading, 2
    s per window.
    """
    non_finite = keys.pop("non_finite", 0)
    keys = {"windows": 32, "load_seconds": 20.0, "score_seconds": 64.0, **keys}
    model = replace(QUANT, label=label, **keys)
    model = with_against(model, kld=Mean(kld, 40 * kld, 40, non_finite, 0.01))
    return replace(model, kld_stderr_of_text=error)


def spread(*models: ModelResult, available: int = 100, **reference: Any) -> RunResult:
    """A run of a text of which 32 spread windows were scored."""
    text = {"name": "text", "windows": 32, "windows_of_the_text": available}
    return run_of(*models, reference=REFERENCE | reference, texts=[text])


def sentences_on(*models: ModelResult) -> str:
    """Return the sentences on spread windows of these models."""
    return "\n".join(sentences(spread(*models)))


def advice_on(*models: ModelResult, **keys: Any) -> str:
    """Return the advice on spread windows of these models."""
    return "\n".join(advice(spread(*models, **keys)))


W4 = row("W4", 0.1, 0.003)
"""Known to 3 %."""
W8 = row("W8", 0.05, 0.0011)
"""Known to 2.2 %."""
BROKEN = row("broken", 0.1, None, non_finite=3)


def test_each_row_has_its_precision() -> None:
    assert sentences_on(BASE, W4, W8).count("3 % (W4) and 2.2 % (W8)") == 1


def test_of_many_rows_the_best_and_the_worst_have_their_precision() -> None:
    rows = [row(f"r{number}", 0.1, 0.001 * number) for number in range(1, 8)]
    words = sentences_on(*rows)
    assert "1 % (r1)" in words
    assert "7 % (r7)" in words
    assert "r4" not in words


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (BROKEN, "3 tokens"),
        (row("few", 0.1, 0.003, windows=4), "4 windows"),
        (row("old", 0.1, None), "no error"),
        (row("again", -1e-9, 0.001), "rounding"),
    ],
)
def test_a_row_without_an_error_has_a_reason_and_decides_nothing(
    model: ModelResult, reason: str
) -> None:
    words = sentences_on(BASE, model, W4)
    assert "3 % (W4)" in words
    assert "n/a" in words
    assert reason in words
    # As many as without the row: 3 % from 32 of 100 windows needs 51.4
    # (tests/eval/stats/test_precision.py).
    assert "-r 52," in advice_on(BASE, model, W4)
    assert advice_on(BASE, model) == ""
    assert "n/a" in sentences_on(BASE, model)


def test_the_worst_row_decides_how_many_windows_it_takes() -> None:
    """3 % with 32 of 100 windows takes 52: 20 more.  The reference takes 10 + 20 / 2 s, each of two
    rows 20 + 20 * 2 s.

    The row that failed has no times.
    """
    words = advice_on(BASE, W4, W8, FAILED)
    assert "-r 52," in words
    # 20 s for the reference and 60 s for each of two rows: 140 s.
    assert "2 min" in words
    assert "80 s" in advice_on(BASE, W4)
    assert advice_on(BASE, row("W4", 0.1, 0.002)) == ""
    # From 90 % to 2 % takes 39.995 of 40 windows.
    assert "-r all" in advice_on(BASE, row("W4", 0.1, 0.09), available=40)


def test_all_windows_of_a_text_do_not_make_an_estimate_exact() -> None:
    """3 % of 32 windows: 32 * (3 / 2) ** 2, as if the text had no end; 52 of an exact KLD."""
    estimated = replace(W4, kld_kind="estimate")
    assert "-r 72," in advice_on(BASE, estimated)
    assert "-r 72," in advice_on(BASE, W4, estimated)


def test_a_finished_reference_limits_the_windows() -> None:
    assert "-r 52," in advice_on(BASE, W4, windows=60)
    forty = advice_on(BASE, W4, windows=40)
    assert "-r 40," in forty
    assert "52" in forty
    no_more = advice_on(BASE, W4, windows=32)
    assert "-r" not in no_more
    assert "52" in no_more


def test_klds_of_roundings_decide_nothing() -> None:
    """Rows up to 0.001, or up to twice the noise floor's 0.004, are nearly lossless.  Unquantized
    rows count only if there are no others.
    """
    near = row("near", 0.006, 0.001)
    floor = row("floor", 0.004, 0.001, spec={"noise_floor": True})
    unquantized = row("in another engine", 0.002, 0.0005, storage=Storage(16.0, 16.0, 2.0**30))
    good = row("good", 0.1, 0.001)
    assert advice_on(BASE, row("again", 0.0001, 0.00005)) == ""
    # 0.006 is above 0.001, which counts without a floor, and below twice the floor's 0.004.
    assert advice_on(BASE, near) != ""
    assert advice_on(BASE, near, floor) == ""
    assert advice_on(BASE, unquantized) != ""
    assert advice_on(BASE, good, unquantized) == ""
    assert "25 % (in another engine)" in sentences_on(BASE, good, unquantized)


def test_windows_that_are_not_spread_have_no_line() -> None:
    run = run_of(BASE, W4)
    assert (sentences(run), advice(run)) == ([], [])
    assert sentences_on(BASE) == ""


@pytest.mark.parametrize("facts", [{}, {"windows": 0}, {"windows": 200}])
def test_damaged_facts_about_windows_give_no_advice(facts: dict[str, int]) -> None:
    run = spread(BASE, W4)
    assert advice(run) != []
    data = {"texts": run.data["texts"], **facts}
    assert advice(run.updated(data=data)) == []


@pytest.mark.parametrize(
    ("long", "short", "flag"),
    [
        # 42 + 10 windows: the short text is scored as a whole.
        (90, None, "-r 42 (of each text)"),
        # 26 + 26 windows are the 52.
        (50, 50, "-r 26 (of each text)"),
        # 44.8 of 66 windows
        (33, 33, "-r 23 (of each text)"),
    ],
)
def test_windows_of_several_texts_count_for_each(long: int, short: int | None, flag: str) -> None:
    """3 % with 32 of 100 windows takes 52 windows together; the second text has few."""
    texts = [
        {"name": "long", "windows": 22, "windows_of_the_text": long},
        {"name": "short", "windows": 10, "windows_of_the_text": short},
    ]
    run = run_of(BASE, W4, texts=texts)
    (sentence,) = sentences(run)
    assert "texts' KLD" in sentence
    (line,) = advice(run)
    assert flag in line


def test_durations() -> None:
    words = [duration_in_words(seconds) for seconds in (0.2, 40.4, 89, 180, 5000, 9000)]
    assert words == ["1 s", "40 s", "89 s", "3 min", "83 min", "2.5 h"]


def loaded(seconds: float, end: float) -> ModelResult:
    """Return a row whose load took these seconds, and ended at this time."""
    timing = Timing(end - seconds, end, end, end + 1, end + 2)
    return replace(BASE, load_seconds=seconds, timing=timing)


def test_loads_at_the_same_time_count_once() -> None:
    first = loaded(10.0, 100.0)
    # 110 to 130, and 115 to 135.
    together = [loaded(20.0, 130.0), loaded(20.0, 135.0)]
    # Within one of these.
    short = loaded(5.0, 125.0)
    assert loading_seconds([first, *together, short]) == 10.0 + 25.0
    # Without times, loads count one after the other.
    assert loading_seconds([BASE, BASE, first]) == 30.0
