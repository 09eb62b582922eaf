"""How the benchmark of samples looks at them, by hand, and what it finds in a few simulated texts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from benchmarks import sampling
from compare_q.eval.cli import until


def test_samples_of_a_text() -> None:
    """Of 6 windows, 2 that follow one another begin at 5 places; the spread ones, 0 and 3, are moved on 6 times."""
    assert [each.tolist() for each in sampling.rotations(6, 2, "first")] == [[at, at + 1] for at in range(5)]
    assert [each.tolist() for each in sampling.rotations(6, 2, "spread")] == [
        [0, 3], [1, 4], [2, 5], [3, 0], [4, 1], [5, 2]
    ]  # fmt: skip


def test_scores_of_a_run_are_put_into_the_order_of_the_text(tmp_path: Path) -> None:
    """20 windows of 4 scores, which are the window's number in the text: 16 that follow one another have their own
    mean, 16 spread ones miss 4 of them; the mean of all is 9.5."""
    order = sampling.spread_order(20)
    table = {"window": np.repeat(np.arange(20), 4), "logprob": -np.repeat(order, 4), "kld": np.repeat(order, 4)}
    parquet.write_table(pa.table(table), tmp_path / "model.parquet")
    rows = {(row["score"], row["sample"]): row for row in sampling.of_real(tmp_path / "model.parquet", (16,))}
    offsets = np.arange(5) + 7.5 - 9.5
    assert rows["kld", "first"]["samples"] == 5
    assert rows["kld", "first"]["distance_percent"] == pytest.approx(
        100 * np.sqrt(np.mean(offsets**2)) / 9.5, abs=0.005
    )
    assert rows["ppl", "first"]["distance_percent"] == pytest.approx(
        100 * np.sqrt(np.mean(np.expm1(offsets) ** 2)), abs=0.005
    )
    assert rows["kld", "spread"]["samples"] == 20


@pytest.mark.slow
def test_spread_windows_and_the_stop_rule_hold_in_simulated_texts() -> None:
    """In 100 texts; results/sampling.json has 1,000."""
    rows = {
        (row["sample"], row.get("count", row.get("until"))): row for row in sampling.of_simulated(100, ("kld", 300_000))
    }
    assert rows["spread", 32]["distance_percent"] < rows["first", 32]["distance_percent"] / 1.8
    for row in rows.values():
        assert row["holds_all_texts"] >= 91, row
    for sample, much in (("spread", 16), ("spread", 64), ("until", 0.02), ("until", 0.05)):
        assert rows[sample, much]["sampling_holds_the_text"] >= 91, (sample, much)
    assert until.PILOT <= rows["until", 0.05]["windows"] < rows["until", 0.02]["windows"] < 146
    assert rows["until", 0.02]["distance_percent"] < 2.2
