"""Sums over blocks of the text, and the paired differences of two models that follow from them."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from eval.stats.estimates import BlockSums, Estimates, paired_difference, summarize
from eval.stats.uncertainty import Value
from tests.support.four_tokens import LN2, QUARTERS, four_tokens


def test_sums_of_blocks(four: Estimates) -> None:
    found = four.blocks
    assert (found.tokens, found.whole, found.length) == ((2, 1, 1), ("nll", "kld", "same_top"), 4)
    assert found.nll == pytest.approx((3 * LN2, 3 * LN2, 2 * LN2))
    assert (found.kld, found.same_top) == ((0.75, 1, 0.25), (1, 1, 1))


def test_difference_of_two_models() -> None:
    """KLD sums 2, 6 and 1, 2 of 2 and 3 entries: off by 1, 4, mean 1; 1 - 2, 4 - 3: the only wave is
    cos 45° * -2, root(2 * 2 * 1.6) / 5.  The other way
    round it has the other sign."""
    a = BlockSums((2, 3), (0.0, 0.0), kld=(2.0, 6.0), whole=("nll", "kld"))
    b = BlockSums((2, 3), (0.0, 0.0), kld=(1.0, 2.0), whole=("nll", "kld"))
    error = pytest.approx(math.sqrt(6.4) / 5)
    assert paired_difference(a, b, "kld") == Value(1, error)  # type: ignore[arg-type]
    assert paired_difference(b, a, "kld") == Value(-1, error)  # type: ignore[arg-type]
    assert paired_difference(a, a, "kld") == Value(0, 0)


def test_difference_of_losses_is_that_against_the_reference() -> None:
    """A model's blocks against those of the reference's own row: the same as ``ln_ppl_ratio``."""
    columns = four_tokens()
    model = summarize(columns, QUARTERS, QUARTERS)
    reference = summarize({"logprob": columns["ref_logprob"]}, QUARTERS, QUARTERS)
    found = paired_difference(model.blocks, reference.blocks, "nll")
    assert found is not None
    assert model.against is not None
    ratio = model.against.ln_ppl_ratio
    assert (found.value, found.stderr) == (pytest.approx(ratio.value), pytest.approx(ratio.stderr))


def test_what_cannot_be_compared() -> None:
    """Other windows; a reference, which has no KLD; a score that left entries out."""
    a = BlockSums((2, 3), (1.0, 1.0), kld=(2.0, 6.0), whole=("nll", "kld"))
    assert paired_difference(a, replace(a, tokens=(3, 2)), "nll") is None
    assert paired_difference(a, replace(a, kld=None, whole=("nll",)), "kld") is None
    assert paired_difference(replace(a, whole=("kld",)), a, "nll") is None
    assert paired_difference(a, a, "same_top") is None


def test_a_sum_that_leaves_entries_out_is_not_whole() -> None:
    """An infinite loss: neither losses nor same top (argmax of nan is some token) can be compared, KLD can."""
    columns = four_tokens()
    columns["logprob"][1] = -np.inf
    found = summarize(columns, QUARTERS, QUARTERS).blocks
    assert found.whole == ("kld",)
    assert found.nll == pytest.approx((LN2, 3 * LN2, 2 * LN2))
    columns = four_tokens()
    columns["kld"][3] = np.inf
    assert summarize(columns, QUARTERS, QUARTERS).blocks.whole == ("nll", "same_top")


def test_same_top_is_compared_only_where_the_reference_is_finite() -> None:
    """Its most probable token is whatever argmax made of a nan, and the table leaves such an entry out."""
    half = np.log(np.full(4, 0.5, np.float32))
    columns = {"logprob": half, "ref_logprob": half, "ref_top1_logprob": half, "kld": np.zeros(4, np.float32),
               "same_top": np.ones(4, np.bool_)}  # fmt: skip
    index = np.arange(4)
    assert summarize(columns, index, index + 1).blocks.whole == ("nll", "kld", "same_top")
    columns["ref_logprob"] = np.array([-1, np.nan, -1, -1], np.float32)
    assert summarize(columns, index, index + 1).blocks.whole == ("nll", "kld")
