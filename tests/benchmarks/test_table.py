"""Times and numbers of a table that two versions of compare_q ran."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.table import timings
from benchmarks.table.timings import Timing


def timing(first_window: float | None, last_window: float | None) -> Timing:
    return {"first_window": first_window, "last_window": last_window}


def table_of(**numbers: Any) -> dict[str, Any]:
    return {"rows": [{"label": "W4A16", "ppl": 8.25, "kld": 0.1, "scores_digest": "ab", **numbers}]}


def test_models_of_older_formats_are_those_of_the_first_text() -> None:
    models = [{"label": "a"}]
    assert timings.models_of({"format": 8, "texts": [{"models": models}]}) == models
    assert timings.models_of({"format": 10, "models": models}) == models


def test_seconds_before_the_first_window_and_after_the_last_one() -> None:
    # The second row was scored first, and the third one failed.
    times = [timing(20.0, 25.0), timing(12.5, 19.0), timing(None, None)]
    assert timings.ends(times, began=10.0, ended=27.0) == {
        "until_first_window": 2.5,
        "after_last_window": 2.0,
    }
    failed = timings.ends([timing(None, None)], began=10.0, ended=27.0)
    assert failed == {"until_first_window": None, "after_last_window": None}


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({}, []),
        ({"seconds": 3.0}, []),
        ({"label": "W8"}, ["label"]),
        ({"ppl": 8.25 + 2**-49}, ["ppl"]),
        ({"kld": None, "scores_digest": "ac"}, ["kld", "scores_digest"]),
    ],
)
def test_every_different_number_is_named(changed: dict[str, Any], found: list[str]) -> None:
    differences = timings.differences(table_of(), table_of(**changed))
    assert [difference.split()[1] for difference in differences] == found


def test_a_table_without_rows_differs() -> None:
    assert len(timings.differences(table_of(), {"error": "no results"})) == 1
    assert timings.differences({"error": "no results"}, {"error": "no results"}) == []
