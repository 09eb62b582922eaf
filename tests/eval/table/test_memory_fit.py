"""The column ``memory:N`` and ``--fit``, with sizes of Llama 3.1 8B computed by hand."""

from __future__ import annotations

import csv
import io

from compare_q.eval.api import Comparison
from compare_q.eval.results import CachePart, Memory, RunResult
from compare_q.eval.table.columns import column_of, no_order, sorted_rows
from compare_q.eval.table.conditions import faults, parse
from compare_q.eval.table.csv_text import csv_of_run
from compare_q.eval.table.memory_fit import Fit
from compare_q.eval.table.tables import table_of
from tests.support.made import FAILED, QUANT, REF, replace, run_of

MEMORY = Memory(
    weights=5_700_000_000,
    kv=(CachePart(token_bytes=2 * 8 * 128 * 2 * 32.0),),
    kv_source="engine",
    logits=4 * 128_256,
    step_token=2 * (4 * 4096 + 3 * 14_336),
)
"""W4A16: 32 layers, 8 heads of 128 numbers in bf16, an MLP of 14,336."""
# Per token, 131,072 bytes of cache, and in a step of 2,048 tokens 118,784 bytes of activations;
# once, 513,024 bytes of logits.
AT_32K = (5_700_000_000 + 131_072 * 32_768 + 513_024 + 118_784 * 2048) / 1e9
BF16 = MEMORY.updated(weights=16_100_000_000, kv_source="config", kv_is_upper=True)
SERVER = Memory(missing="weights: no weight files on this machine")
RUN = run_of(
    replace(REF, memory=BF16),
    replace(QUANT, memory=MEMORY),
    replace(QUANT, label="server", memory=SERVER),
    replace(QUANT, label="older", memory=None),
    FAILED,
)


def fit_of(limit: int, words: str) -> Fit:
    """Return the fit of a limit in bytes for 32k tokens, as a user wrote it."""
    return Fit(limit, column_of("memory:32k"), words)


def notes_of(run: RunResult, *names: str) -> str:
    """Return the notes of a table with these columns, one line each."""
    return "\n".join(table_of(run, ("label", *names)).notes)


def test_value_and_title() -> None:
    assert round(AT_32K, 2) == 10.24
    assert column_of("memory:32k").value(RUN.models[1]) == AT_32K
    assert column_of("memory:32768").value(RUN.models[1]) == AT_32K
    assert column_of("memory:32k").title == "memory 32k GB"
    assert column_of("memory:8192").title == "memory 8192 GB"


def test_cells() -> None:
    cells = table_of(RUN, ("label", "memory:32k")).columns[-1].cells
    assert [cell.value for cell in cells] == ["20.64", "10.24", "n/a", "n/a", "failed"]


def test_order() -> None:
    labels = sorted_rows(RUN, "memory:32k").labels
    assert labels == ("W4A16", "bf16", "server", "older", "broken")
    assert no_order(RUN, "memory:32k") is None
    assert no_order(run_of(REF, QUANT), "memory:32k") is not None


def test_csv_and_frame() -> None:
    rows = list(csv.DictReader(io.StringIO(csv_of_run(RUN, ("label", "memory:32k")))))
    assert [row["memory:32k"] for row in rows] == ["20.638749952", str(AT_32K), "", "", ""]
    column = Comparison(RUN).frame(["memory:32k"])["memory:32k"]
    assert (column.dtype, column.tolist()[1], column.isna().sum()) == ("float64", AT_32K, 3)


def test_footnotes_name_what_is_missing_or_special() -> None:
    notes = notes_of(RUN, "memory:32k")
    for fact in (
        "server: memory n/a: weights: no",
        "older: memory n/a: an older",
        "bf16: memory is an upper limit",
        "bf16: memory with a KV cache by the config",
        "memory: without",
    ):
        assert fact in notes
    assert "W4A16: memory" not in notes
    assert "memory" not in notes_of(RUN, "kld")


def test_conditions() -> None:
    """The reference can also fail, because the condition does not compare it with itself; an
    unknown value fails.
    """
    lines = list(faults(RUN, [parse("memory:32k > 20")]))
    assert [line.partition(":")[0] for line in lines] == ["bf16", "server", "older", "broken"]
    reason = "n/a: weights: no weight files on this machine"
    assert lines[1] == f"server: memory:32k > 20 ({reason})"
    assert list(faults(RUN, [parse("memory:32k>20")])) == lines


def test_rows_that_do_not_fit_are_marked_and_stay() -> None:
    """A row of exactly the limit fits; marks do not change results.json."""
    run = fit_of(round(AT_32K * 1e9), "10.24GB@32k").marked(RUN)
    assert [model.fits for model in run.models] == [False, True, None, None, None]
    table = table_of(run, ("label", "kld"))
    labels = ["bf16 ✗", "W4A16", "server", "older", "broken"]
    assert [cell.value for cell in table.columns[0].cells] == labels
    notes = "\n".join(table.notes)
    assert "bf16: does not fit into 10.24GB@32k: memory:32k is 20.639 GB" in notes
    assert "server: --fit 10.24GB@32k n/a: weights: no" in notes
    assert "fits" not in run.json_text()
    assert table_of(RUN, ("label", "kld")).columns[0].cells[0].value == "bf16"


def test_a_line_if_everything_fits_names_what_is_needed() -> None:
    """The line names the largest row; there is none if a row is marked or no memory is known."""
    run = run_of(replace(REF, memory=BF16), replace(QUANT, memory=MEMORY))
    fit = fit_of(24_000_000_000, "24GB@32k")
    assert fit.summary(run) == "--fit 24GB@32k: every row fits; bf16 needs the most, 20.639 GB"
    assert "every row whose memory is known fits; bf16" in (fit.summary(RUN) or "")
    assert fit_of(20_000_000_000, "20GB@32k").summary(run) is None
    assert fit.summary(run_of(REF, FAILED)) is None


def test_a_number_of_tokens_beyond_the_context_is_a_note() -> None:
    """The reference has a context of exactly 32k tokens."""
    run = run_of(
        replace(REF, memory=BF16.updated(context=32_768)),
        replace(QUANT, memory=MEMORY.updated(context=8192)),
    )
    fact = "memory:32k is beyond the model's context of 8,192 tokens"
    notes = notes_of(run, "memory:32k", "memory:8k")
    assert f"W4A16: {fact}" in notes
    assert notes.count("beyond") == 1
    marked = fit_of(99_000_000_000, "99GB@32k").marked(run)
    assert [model.fits for model in marked.models] == [True, True]
    assert marked.models[1].notes == (f"--fit 99GB@32k: {fact}",)
    # The note of --fit has the fact already.
    assert notes_of(marked, "memory:32k").count("beyond") == 1
