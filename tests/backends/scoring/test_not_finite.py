"""Excluded tokens, NaN and infinities: nothing becomes a number that is none, and nothing is clamped."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.support.definitions import INF, NAN, Partial, assert_scores, definitions, draw, draw_excluding, split, whole


def test_excluded_tokens(partial: Partial) -> None:
    """-inf on either side, both sides, at the target, and in all of a shard."""
    logits, reference = draw_excluding()
    targets = [5, 6, 7, 0, 8, 2999]
    expected = definitions_with_infinity(logits, targets, reference)
    assert [value == INF for value in expected["kld"]] == [False, False, True, False, False, True]
    for cuts in ([], [1000], [1000, 2000]):
        assert_scores(split(partial, logits, targets, cuts, reference), expected)


def definitions_with_infinity(logits: torch.Tensor, targets: Any, reference: torch.Tensor) -> dict[str, list[float]]:
    """``definitions``, where same_top of a target that the model excludes is False by convention."""
    expected = definitions(logits, targets, reference)
    pairs = zip(expected["same_top"], expected["logprob"], strict=True)
    return {**expected, "same_top": [same and lp > -INF for same, lp in pairs]}


@pytest.mark.parametrize("cuts", [[], [2], [1, 2]], ids=str)
def test_an_excluded_token_counts_however_improbable(partial: Partial, cuts: list[int]) -> None:
    # exp(-200) is 0 in float32 and exp(-2000) in float64, but the reference does allow the token.
    for low in (-20.0, -200.0, -2000.0):
        logits, reference = torch.tensor([[0.0, 1.0, -INF]]), torch.tensor([[0.0, 1.0, low]])
        assert split(partial, logits, [0], cuts, reference).kld == INF
        # A larger one after it, in the same lane of the kernel, must not turn the infinity into a NaN.
        tail = torch.full((1, 4096), 500.0)
        long_logits, long_reference = torch.cat([logits, tail], 1), torch.cat([reference, tail], 1)
        assert split(partial, long_logits, [3], cuts, long_reference).kld == INF
        assert split(partial, long_reference, [3], cuts, long_logits).kld == pytest.approx(0.0, abs=1e-6)


def test_the_lowest_float_as_a_mask(partial: Partial) -> None:
    logits = draw(3, 6500)  # four tiles of the kernel
    logits[0, 1:] = logits[1, ::2] = logits[2, :6000] = torch.finfo(torch.float32).min
    targets = [0, 1, 6001]
    masked = logits.clone()
    masked[logits < -1e30] = -INF
    found, expected = whole(partial, logits, targets), definitions(masked, targets, None)
    assert_scores(found, expected)
    np.testing.assert_allclose(split(partial, logits, targets, [1]).logprob, expected["logprob"], atol=1e-5)


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("place", [0, 3, 2047, 2990])
def test_a_nan_never_becomes_a_number(partial: Partial, bad: float, place: int) -> None:
    logits, reference = draw(3, 3000), draw(3, 3000, seed=1)
    reference[:, 100] = logits[:, 100] = 25.0
    clean = definitions(logits, [100] * 3, reference)
    logits[0, place] = bad
    reference[1, place] = bad
    for cuts in ([], [1000], [2048, 2500]):
        found = split(partial, logits, [100] * 3, cuts, reference)
        assert np.isnan(
            [found.logprob[0], found.entropy[0], found.top1_logprob[0], *found.kld[:2], found.ref_logprob[1]]
        ).all()
        assert found.top1.tolist() == [False, True, True]
        assert found.same_top.tolist() == [False, False, True]
        np.testing.assert_allclose(found.logprob[1:], clean["logprob"][1:], atol=1e-5)
        np.testing.assert_allclose(found.ref_logprob[::2], clean["ref_logprob"][::2], atol=1e-5)
        np.testing.assert_allclose(found.kld[2], clean["kld"][2], atol=1e-5)


def test_nothing_but_excluded_tokens_is_not_a_distribution(partial: Partial) -> None:
    logits = torch.full((1, 30), -INF)
    np.testing.assert_array_equal(partial(logits, [3], 40), [[-INF, 0, 0, -INF, 40]])
    found = whole(partial, logits, [3], torch.zeros(1, 30))
    assert np.isnan([found.logprob, found.entropy, found.top1_logprob, found.kld]).all()
    assert not found.top1.any()
