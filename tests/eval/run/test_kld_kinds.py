"""Runs with an engine whose KLD is a bound or an estimate: the kind reaches results.json."""

from __future__ import annotations

from typing import Any

import pytest

from compare_q import backends
from tests.support import partial_engine
from tests.support.comparisons import KLD, Compare, fake


@pytest.fixture
def kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register the engine; its workers are threads."""
    monkeypatch.setitem(backends.ENGINES, "partial", partial_engine.LOCATION)


def partial(label: str, *kinds: str, **keys: Any) -> dict[str, Any]:
    """Return the spec of a model whose windows have KLDs of these kinds by turns."""
    return {**fake(label, kinds=list(kinds), **keys), "load_fn": "partial"}


REF = fake("ref", boost=3.0, reference=True)


@pytest.mark.usefixtures("kinds")
def test_rows_have_the_kind_of_their_kld(measured: Compare) -> None:
    models = [
        REF,
        fake("exact"),
        partial("bound", "bound"),
        partial("estimate", "estimate"),
        partial("some bounds", "exact", "bound"),
    ]
    run = measured(models)
    assert run.status == 0, run.err
    rows = run.models
    found = {label: row["kld_kind"] for label, row in rows.items()}
    assert found == {
        "ref": "exact",
        "exact": "exact",
        "bound": "bound",
        "estimate": "estimate",
        "some bounds": "bound",
    }
    assert rows["exact"]["kld"] == pytest.approx(KLD, rel=1e-5)
    assert rows["bound"]["kld"] == pytest.approx(KLD / 2, rel=1e-5)
    # Each window has 99 tokens: their signs have the sum 1.
    assert rows["estimate"]["kld"] == pytest.approx(KLD + 1 / 99, rel=1e-4)
    assert rows["estimate"]["kld_max"] is None
    assert rows["bound"]["kld_max"] == pytest.approx(KLD / 2, rel=1e-5)
    # The loss and the most probable token are exact in all rows.
    for label in ("bound", "estimate"):
        for field in ("ppl", "same_top", "ppl_ratio"):
            assert rows[label][field] == rows["exact"][field]
    # From the cache, too.
    again = measured(models)
    assert again.loaded == []
    assert {label: row["kld_kind"] for label, row in again.models.items()} == found


@pytest.mark.usefixtures("kinds")
def test_bounds_and_estimates_have_no_mean(measured: Compare) -> None:
    run = measured([REF, fake("exact"), partial("mixed", "bound", "estimate")])
    assert run.status == 0, run.err
    row = run.models["mixed"]
    assert (row["kld"], row["kld_stderr"], row["blocks"]["kld"]) == (None, None, None)
    assert row["ppl_ratio"] == run.models["exact"]["ppl_ratio"]
    assert row["same_top"] == run.models["exact"]["same_top"]
    assert "bound" in " ".join(row["notes"])


@pytest.mark.usefixtures("kinds")
def test_a_row_of_each_kind_in_table_pairs_and_conditions(measured: Compare) -> None:
    """The bounds are half of the KLD, 0.0393, and a tenth of another one, below 0.01."""
    models = [
        REF,
        fake("exact", boost=2.0),
        partial("estimate", "estimate", boost=0.5),
        partial("half", "bound"),
        partial("tenth", "bound", share=0.1, boost=0.1),
    ]
    pairs = ("--pair", "half", "exact", "--pair", "tenth", "half")
    conditions = ("--fail-if", "kld > 0.02", "--fail-if", "kld:begin < 0.001")
    run = measured(models, *pairs, *conditions)
    assert run.status == 4
    assert ">=0.0393" in run.out
    # The first pair on a text that is too short, the second one on any text.
    assert run.out.count("KLD: n/a: ") == 2
    failed = [line for line in run.err.splitlines() if line.startswith("failed: ")]
    labels = [line.split(":")[1].strip() for line in failed]
    assert labels == ["estimate", "half", "tenth"]
    assert ["undecided" in line for line in failed] == [False, False, True]
