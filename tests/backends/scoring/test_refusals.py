"""Shapes, dtypes and tokens that do not fit are refused in one line."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from compare_q.backends.common.errors import ModelError
from compare_q.backends.scoring import statistics
from compare_q.backends.scoring.statistics import scores, window_scores


@pytest.mark.parametrize(
    ("shape", "targets", "text"),
    [((3, 9), [0, 9, 1], "token 9 is outside the 9 logits"), ((3, 9), [0, -1, 1], "token -1"),
     ((2, 9), [0] * 3, "(2, 9)"), ((1, 3, 9), [0] * 3, "(1, 3, 9)")],
)  # fmt: skip
def test_window_scores_refuses_what_does_not_fit(shape: tuple[int, ...], targets: list[int], text: str) -> None:
    with pytest.raises(ModelError) as caught:
        window_scores(4, torch.zeros(shape), np.array(targets))
    assert text in str(caught.value)
    assert str(caught.value).startswith("window 4: ")


def test_window_scores_refuses_a_reference_of_another_vocabulary() -> None:
    with pytest.raises(ModelError, match=r"window 4: .*\(3, 9\).*\(3, 8\)"):
        window_scores(4, torch.zeros(3, 9), np.zeros(3, int), torch.zeros(3, 8))


@pytest.mark.parametrize(
    ("change", "text"),
    [({"out": torch.empty(3, 10)}, "out is"), ({"out": torch.empty(2, 5)}, "out is"),
     ({"out": torch.empty(3, 5, dtype=torch.float64)}, "out is"), ({"targets": torch.zeros(3)}, "targets"),
     ({"targets": torch.zeros(2, dtype=torch.int64)}, "targets"), ({"reference": torch.zeros(3, 8)}, "reference")],
)  # fmt: skip
def test_partial_refuses_what_does_not_fit(change: dict[str, Any], text: str) -> None:
    arguments = {"targets": torch.zeros(3, dtype=torch.int64), "out": torch.empty(3, 5), **change}
    with pytest.raises(ValueError, match=text):
        statistics.partial(torch.zeros(3, 9), **arguments)


@pytest.mark.parametrize("shapes", [[], [(3, 5), (3, 10)], [(3, 6)], [(2, 5)], [(3, 5), (4, 5)]], ids=str)
def test_scores_refuses_shards_that_do_not_fit(shapes: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="window 2: shards of shapes"):
        scores(2, np.zeros(3, int), [np.zeros(shape, np.float32) for shape in shapes])
