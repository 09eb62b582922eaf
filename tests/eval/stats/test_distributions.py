"""The distribution of scores: percentiles, and the curve over the position, computed by hand."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from compare_q.eval.stats import curve
from compare_q.eval.stats.curve import Curve, curve_over_position
from compare_q.eval.stats.row_statistics import percentiles_of
from compare_q.eval.stats.uncertainty import BlockAssignment, assign_blocks, mean_with_errors


def test_percentiles() -> None:
    """Percentile p of the numbers 0 to 10 is p / 10, interpolated linearly; the order does not
    matter.
    """
    expected = {
        "min": 0,
        "0.1": 0.01,
        "1": 0.1,
        "5": 0.5,
        "10": 1,
        "25": 2.5,
        "50": 5,
        "75": 7.5,
        "90": 9,
        "95": 9.5,
        "99": 9.9,
        "99.9": 9.99,
        "max": 10,
    }
    percentiles = percentiles_of(np.arange(10, -1, -1, dtype=np.float32))
    assert percentiles == pytest.approx(expected)


def test_curve_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions 1 to 7 in two bins: p + 1 runs from 2 to 9, whose geometric middle is 4.2, so that
    the bins are 1 to 2 and 3 to 7.  Non-finite entries do not count; a bin without finite entries
    is unknown.
    """
    monkeypatch.setattr(curve, "CURVE_BINS", 2)
    position = np.array([1, 2, 2, 3, 7, 7], np.int32)
    nll = np.array([8, 4, np.inf, 2, 1, 0], np.float32)
    kld = np.array([np.nan, np.nan, np.inf, 1, 2, 3], np.float32)
    # Six tokens have three blocks, too few for any error of the curve.
    assignment = assign_blocks(np.arange(6))
    unknown = (None, None)
    expected = Curve((1, 3, 8), (6.0, 1.0), (None, 2.0), unknown, unknown)
    assert curve_over_position(position, nll, kld, assignment) == expected
    assert curve_over_position(position, nll, None, assignment).kld is None


def test_errors_of_a_curve_are_those_of_means_over_each_bins_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Six windows of 100 tokens; the last two have no KLD.  An error needs five blocks of the text
    in a bin.
    """
    monkeypatch.setattr(curve, "CURVE_BINS", 3)
    position = np.tile(np.arange(1, 101), 6)
    # The trend makes the blocks differ, so that no error is near 0.
    index = np.arange(600)
    nll = np.random.default_rng(0).normal(size=600).astype(np.float32) + index // 150
    # 400 tokens are four blocks: one too few for an error of a KLD.
    kld = np.where(index < 400, np.abs(nll), np.nan).astype(np.float32)
    assignment = assign_blocks(index)
    assert assignment.block.max() == 5
    means = curve_over_position(position, nll, kld, assignment)
    assert means.nll_stderr is not None
    for number, (low, high) in enumerate(itertools.pairwise(means.edges)):
        mean = means.nll[number]
        error = means.nll_stderr[number]
        inside = (low <= position) & (position < high)
        expected = mean_with_errors(
            nll[inside], None, BlockAssignment(assignment.block[inside], assignment.length)
        )
        assert (mean, error) == (pytest.approx(expected.value), pytest.approx(expected.stderr))
        # An unknown error would be equal to an unknown expected one.
        assert (error or 0) > 0.1
    assert means.kld_stderr == (None, None, None)
