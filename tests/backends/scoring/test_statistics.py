"""Partial statistics and their merging, in torch and in the Triton kernel.

They are compared with float64 in plain Python loops.  Excluded tokens, NaN and infinities are never
replaced by a number, and never clamped.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from compare_q.backends.base import TokenScores
from compare_q.backends.scoring.token_statistics import Column, scores
from tests.support.definitions import INF, NAN, Partial, definitions, draw, draw_excluding

BOOLEAN = ("top1", "same_top")


def assert_scores(
    token_scores: TokenScores, expected: dict[str, list[float]], atol: float = 1e-5
) -> None:
    assert token_scores.kld_kind == "exact"
    for name, values in expected.items():
        array = getattr(token_scores, name)
        if not values:
            assert array is None, name
            continue
        if name in BOOLEAN:
            assert array.dtype == np.bool_, name
        else:
            assert array.dtype == np.float32, name
        np.testing.assert_allclose(
            array.astype(np.float64), np.array(values, float), rtol=1e-6, atol=atol, err_msg=name
        )


def split(
    partial: Partial,
    logits: torch.Tensor,
    targets: Any,
    cuts: list[int],
    reference: torch.Tensor | None = None,
) -> TokenScores:
    """Scores from shards that end at ``cuts`` and at the end."""
    edges = [0, *cuts, logits.shape[1]]
    shards = []
    for begin, end in pairwise(edges):
        part = None
        if reference is not None:
            part = reference[:, begin:end]
        shards.append(partial(logits[:, begin:end], targets, begin, part))
    return scores(0, np.array(targets), shards)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(2, 1), (3, 7), (19, 129), (2, 2048), (3, 4099)])
@pytest.mark.parametrize("with_reference", [False, True])
def test_every_field_is_its_definition(
    partial: Partial, dtype: torch.dtype, rows: int, columns: int, with_reference: bool
) -> None:
    logits = draw(rows, columns).to(dtype)
    reference = None
    if with_reference:
        reference = draw(rows, columns, seed=1).bfloat16()
    targets = [(i * 31) % columns for i in range(rows)]
    targets[0] = int(logits[0].argmax())
    token_scores = split(partial, logits, targets, [], reference)
    assert token_scores.window == 0
    assert_scores(token_scores, definitions(logits, targets, reference))


@pytest.fixture(scope="module", params=[0.1, 3.0, 12.0], ids=["flat", "usual", "peaky"])
def real_size(
    request: pytest.FixtureRequest,
) -> tuple[torch.Tensor, list[int], torch.Tensor, dict[str, list[float]]]:
    """Logits of 49,152 entries, targets, a reference, and the scores by definition.

    The definitions take a second of plain Python.
    """
    reference = draw(2, 49152, sigma=request.param).bfloat16()
    logits = (reference.float() + draw(2, 49152, seed=1, sigma=0.1)).bfloat16()
    targets = [int(reference[0].argmax()), 49151]
    return logits, targets, reference, definitions(logits, targets, reference)


def test_accuracy_at_the_size_of_a_real_vocabulary(partial: Partial, real_size: Any) -> None:
    logits, targets, reference, expected = real_size
    assert_scores(split(partial, logits, targets, [], reference), expected)


@pytest.mark.parametrize("offset", [1, 8])
def test_a_column_slice_scores_like_its_copy(partial: Partial, offset: int) -> None:
    logits = draw(11, 3000).bfloat16()[:, offset : offset + 2500]
    reference = draw(11, 2501, seed=1)[:, 1:]
    # A contiguous slice would not show a kernel that ignores the row stride.
    assert logits.stride(0) > logits.shape[1]
    targets = list(range(0, 2500, 230))
    np.testing.assert_array_equal(
        partial(logits, targets, 0, reference),
        partial(logits.clone(), targets, 0, reference.clone()),
    )


@pytest.mark.parametrize(
    "cuts", [[1500], [1000, 2000], [1, 2999], [700, 701, 702], [0, 3000]], ids=str
)
def test_shards_merge_to_the_whole(partial: Partial, cuts: list[int]) -> None:
    logits = draw(6, 3000).bfloat16()
    reference = draw(6, 3000, seed=1).bfloat16()
    logits[:, 5] = 20.0  # the maxima and some targets are in the first shards only
    reference[:3, 2999] = 20.0
    targets = [5, 1, 2999, 1500, 701, 0]
    token_scores = split(partial, logits, targets, cuts, reference)
    assert_scores(token_scores, definitions(logits, targets, reference))
    assert token_scores.top1.tolist() == [True, False, False, False, False, False]


@pytest.mark.parametrize("cuts", [[], [333], [1, 4000]], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_model_against_itself_has_a_divergence_of_exactly_zero(
    partial: Partial, dtype: torch.dtype, cuts: list[int]
) -> None:
    logits = draw(9, 4500, sigma=6.0).to(dtype)
    logits[3, 100:900] = -INF
    token_scores = split(partial, logits, [0] * 9, cuts, logits.clone())
    assert token_scores.kld.tolist() == [0.0] * 9
    assert token_scores.same_top.all()
    np.testing.assert_array_equal(token_scores.ref_logprob, token_scores.logprob)


@pytest.mark.parametrize(
    "places", [(0, 1), (3, 2051), (2050, 2051), (2049, 4096), (7, 4097), (4098, 4099)], ids=str
)
def test_the_first_of_equal_maxima_is_the_top(partial: Partial, places: tuple[int, int]) -> None:
    logits = draw(1, 4100)
    logits[0, list(places)] = 30.0
    low, high = places
    assert partial(logits, [0], 1000)[0, Column.TOP] == 1000 + low
    both = partial(draw(1, 4100), [0], 0, logits)
    assert both[0, Column.REF_TOP] == low
    for cuts in ([], [low + 1], [high]):
        assert split(partial, logits, [low], cuts).top1.tolist() == [True]
        assert split(partial, logits, [high], cuts).top1.tolist() == [False]


def test_excluded_tokens(partial: Partial) -> None:
    """-inf in one model, in both, at the target, and in a whole shard."""
    logits, reference = draw_excluding()
    targets = [5, 6, 7, 0, 8, 2999]
    expected = definitions(logits, targets, reference)
    # KL is infinite only if the model excludes a token that the reference does not.
    assert [value == INF for value in expected["kld"]] == [False, False, True, False, False, True]
    for cuts in ([], [1000], [1000, 2000]):
        assert_scores(split(partial, logits, targets, cuts, reference), expected)


def test_the_lowest_float_as_a_mask(partial: Partial) -> None:
    logits = draw(3, 6500)  # four tiles of the kernel
    logits[0, 1:] = logits[1, ::2] = logits[2, :6000] = torch.finfo(torch.float32).min
    targets = [0, 1, 6001]
    masked = logits.clone()
    # The lowest float has probability 0, so the definitions may use -inf for it.
    masked[logits < -1e30] = -INF
    expected = definitions(masked, targets, None)
    assert_scores(split(partial, logits, targets, []), expected)
    in_shards = split(partial, logits, targets, [1])
    np.testing.assert_allclose(in_shards.logprob, expected["logprob"], atol=1e-5)


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("place", [0, 3, 2047, 2990])
def test_a_nan_never_becomes_a_number(partial: Partial, bad: float, place: int) -> None:
    logits = draw(3, 3000)
    reference = draw(3, 3000, seed=1)
    # A clear maximum in both: the clean rows have the same top token, also across shards.
    reference[:, 100] = logits[:, 100] = 25.0
    clean = definitions(logits, [100] * 3, reference)
    logits[0, place] = bad
    reference[1, place] = bad
    for cuts in ([], [1000], [2048, 2500]):
        token_scores = split(partial, logits, [100] * 3, cuts, reference)
        assert np.isnan(token_scores.logprob[0])
        assert np.isnan(token_scores.entropy[0])
        assert np.isnan(token_scores.top1_logprob[0])
        assert np.isnan(token_scores.kld[:2]).all()
        assert np.isnan(token_scores.ref_logprob[1])
        assert token_scores.top1.tolist() == [False, True, True]
        assert token_scores.same_top.tolist() == [False, False, True]
        np.testing.assert_allclose(token_scores.logprob[1:], clean["logprob"][1:], atol=1e-5)
        np.testing.assert_allclose(
            token_scores.ref_logprob[::2], clean["ref_logprob"][::2], atol=1e-5
        )
        np.testing.assert_allclose(token_scores.kld[2], clean["kld"][2], atol=1e-5)
