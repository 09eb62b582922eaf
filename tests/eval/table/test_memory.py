"""The column ``memory:N`` and ``--fit``, with sizes of Llama 3.1 8B computed by hand."""

from __future__ import annotations

import csv
import io

from compare_q.eval.api import Comparison
from compare_q.eval.results import CachePart, Memory, RunResult
from compare_q.eval.table.columns import named, no_order, ordered
from compare_q.eval.table.conditions import faults, parse
from compare_q.eval.table.memory_fit import Fit
from compare_q.eval.table.render import csv_text
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


def test_value_and_title() -> None:
    assert round(AT_32K, 2) == 10.24
    assert named("memory:32k").value(RUN.models[1]) == AT_32K
    assert named("memory:32768").value(RUN.models[1]) == AT_32K
    assert [named(name).title for name in ("memory:32k", "memory:8192")] == [
        "memory 32k GB",
        "memory 8192 GB",
    ]


def shown(run: RunResult) -> list[str]:
    """The cells of the last column."""
    return [cell.value for cell in table_of(run, ("label", "memory:32k")).columns[-1].cells]


def test_cells_order_and_csv() -> None:
    assert shown(RUN) == ["20.64", "10.24", "n/a", "n/a", "failed"]
    assert ordered(RUN, "memory:32k").labels == ("W4A16", "bf16", "server", "older", "broken")
    assert no_order(RUN, "memory:32k") is None
    assert no_order(run_of(REF, QUANT), "memory:32k") is not None
    rows = list(csv.DictReader(io.StringIO(csv_text(RUN, ("label", "memory:32k")))))
    assert [row["memory:32k"] for row in rows] == ["20.638749952", str(AT_32K), "", "", ""]
    column = Comparison(RUN).frame(["memory:32k"])["memory:32k"]
    assert (column.dtype, column.tolist()[1], column.isna().sum()) == ("float64", AT_32K, 3)


def test_footnotes_say_what_is_missing_or_special() -> None:
    notes = "\n".join(table_of(RUN, ("label", "memory:32k")).notes)
    for fact in (
        "server: memory n/a: weights: no",
        "older: memory n/a: an older",
        "bf16: memory is an upper limit",
        "bf16: memory with a KV cache by the config",
        "memory: without",
    ):
        assert fact in notes
    assert "W4A16: memory" not in notes
    assert "memory" not in "\n".join(table_of(RUN, ("label", "kld")).notes)


def test_conditions() -> None:
    """The reference can also fail, because the condition does not compare it with itself; an
    unknown value fails.
    """
    assert [line.partition(":")[0] for line in faults(RUN, [parse("memory:32k > 20")])] == [
        "bf16",
        "server",
        "older",
        "broken",
    ]
    (_, line, *_) = faults(RUN, [parse("memory:32k>20")])
    assert line == "server: memory:32k > 20 (n/a: weights: no weight files on this machine)"


def test_rows_that_do_not_fit_are_marked_and_stay() -> None:
    """A row of exactly the limit fits; marks do not change results.json."""
    run = Fit(round(AT_32K * 1e9), named("memory:32k"), "10.24GB@32k").marked(RUN)
    assert [model.fits for model in run.models] == [False, True, None, None, None]
    table = table_of(run, ("label", "kld"))
    assert [cell.value for cell in table.columns[0].cells] == [
        "bf16 ✗",
        "W4A16",
        "server",
        "older",
        "broken",
    ]
    notes = "\n".join(table.notes)
    assert "bf16: does not fit into 10.24GB@32k: memory:32k is 20.639 GB" in notes
    assert "server: --fit 10.24GB@32k n/a: weights: no" in notes
    assert "fits" not in run.json_text()
    assert table_of(RUN, ("label", "kld")).columns[0].cells[0].value == "bf16"


def test_a_line_if_everything_fits_names_what_is_needed() -> None:
    """The line names the largest row; there is none if a row is marked, or if no memory is known."""
    both = run_of(replace(REF, memory=BF16), replace(QUANT, memory=MEMORY))
    fit = Fit(24_000_000_000, named("memory:32k"), "24GB@32k")
    assert fit.summary(both) == "--fit 24GB@32k: every row fits; bf16 needs the most, 20.639 GB"
    assert "every row whose memory is known fits; bf16" in (fit.summary(RUN) or "")
    assert Fit(20_000_000_000, named("memory:32k"), "20GB@32k").summary(both) is None
    assert fit.summary(run_of(REF, FAILED)) is None


def test_a_number_of_tokens_beyond_the_context_is_a_note() -> None:
    run = run_of(
        replace(REF, memory=BF16.updated(context=32_768)),
        replace(QUANT, memory=MEMORY.updated(context=8192)),
    )
    notes = "\n".join(table_of(run, ("label", "memory:32k", "memory:8k")).notes)
    assert "W4A16: memory:32k is beyond the model's context of 8,192 tokens" in notes
    assert (notes.count("beyond"), "memory:8k is" in notes, "bf16: memory:32k" in notes) == (
        1,
        False,
        False,
    )
    marked = Fit(99_000_000_000, named("memory:32k"), "99GB@32k").marked(run)
    assert [model.fits for model in marked.models] == [True, True]
    assert marked.models[1].notes == (
        "--fit 99GB@32k: memory:32k is beyond the model's context of 8,192 tokens",
    )
