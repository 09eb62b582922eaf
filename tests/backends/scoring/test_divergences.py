"""The divergences of the second pass, in torch and in the Triton kernel, compared with float64 in Python loops."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from compare_q.backends.base import TokenScores
from compare_q.backends.scoring import divergences, statistics
from tests.support.definitions import INF, NAN, divergence_definitions, draw, draw_excluding

Second = Callable[..., np.ndarray]
"""``second(logits, reference, whole, first)`` -> [n, divergences.WIDTH]."""
NAMES = ("reverse_kld", "js", "tv", "top5")
LN2 = math.log(2)


def compared(second: Second, logits: torch.Tensor, reference: torch.Tensor, cuts: Any = ()) -> TokenScores:
    """Scores from shards that end at ``cuts`` and at the end, with both passes, as ranks exchange them."""
    targets, edges = torch.zeros(len(logits), dtype=torch.int64), [0, *cuts, logits.shape[1]]
    shards = [(logits[:, a:b], reference[:, a:b], a) for a, b in pairwise(edges)]
    firsts = torch.empty(len(shards), len(logits), divergences.FIRST)
    for (z, r, begin), out in zip(shards, firsts, strict=True):
        statistics.partial(z, targets, out, first=begin, reference=r)
    whole = divergences.normalizers(firsts)
    rows = [
        np.concatenate([out.numpy(), second(z, r, whole, begin)], 1)
        for (z, r, begin), out in zip(shards, firsts, strict=True)
    ]
    return divergences.scores(0, targets.numpy(), rows)


def assert_divergences(found: TokenScores, expected: dict[str, list[float]], atol: float = 1e-5) -> None:
    for name in NAMES:
        array = getattr(found, name)
        assert array.dtype == np.float32, name
        np.testing.assert_allclose(array.astype(np.float64), expected[name], rtol=1e-6, atol=atol, err_msg=name)


@pytest.mark.parametrize(
    ("columns", "cuts", "dtype"),
    [
        (1, (), torch.bfloat16),
        (3, (1,), torch.float16),
        (7, (3,), torch.float32),
        (129, (), torch.float16),
        (2048, (0, 700), torch.float32),
        (4099, (4098,), torch.bfloat16),
    ],
    ids=str,
)
def test_every_divergence_is_its_definition(
    second: Second, dtype: torch.dtype, columns: int, cuts: tuple[int, ...]
) -> None:
    """One rank, or several ranks of which some have fewer than five columns, or none."""
    logits, reference = draw(3, columns).to(dtype), draw(3, columns, seed=1).bfloat16()
    reference[1] = logits[1] + 0.1 * draw(1, columns, seed=2)[0]
    assert_divergences(compared(second, logits, reference, cuts), divergence_definitions(logits, reference))


@pytest.mark.parametrize(("sigma", "apart"), [(0.1, 0.3), (3.0, 0.01), (12.0, 0.3)], ids=["flat", "usual", "peaky"])
def test_accuracy_at_the_size_of_a_real_vocabulary(second: Second, sigma: float, apart: float) -> None:
    reference = draw(2, 49152, sigma=sigma).bfloat16()
    logits = (reference.float() + draw(2, 49152, seed=1, sigma=apart) + 5).bfloat16()
    expected = divergence_definitions(logits, reference)
    assert_divergences(compared(second, logits, reference, (24576,)), expected, atol=5e-6)


@pytest.mark.parametrize(("cuts", "dtype"), [((), torch.bfloat16), ((1, 4000), torch.float32)], ids=str)
def test_equal_logits_are_exactly_no_distance_apart(second: Second, dtype: torch.dtype, cuts: tuple[int, ...]) -> None:
    logits = draw(5, 4500, sigma=6.0).to(dtype)
    logits[3, 100:900] = -INF
    found = compared(second, logits, logits.clone(), cuts)
    assert [getattr(found, name).tolist() for name in NAMES] == [[0.0] * 5, [0.0] * 5, [0.0] * 5, [1.0] * 5]


def test_divergences_worked_by_hand(second: Second) -> None:
    """p = (1/2, 1/4, 1/4), q = (1/4, 1/4, 1/2): m = (3/8, 1/4, 3/8)."""
    reference, logits = torch.tensor([[1 / 2, 1 / 4, 1 / 4]]).log() + 5, torch.tensor([[1 / 4, 1 / 4, 1 / 2]]).log() - 3
    js = (math.log(4 / 3) / 2 + math.log(2 / 3) / 4) / 2 * 2
    expected = {"reverse_kld": [LN2 / 4], "js": [js], "tv": [1 / 4], "top5": [1.0]}
    assert_divergences(compared(second, logits, reference), expected, atol=1e-6)


@pytest.mark.parametrize("cuts", [(), (1000, 2000)], ids=str)
def test_excluded_tokens(second: Second, cuts: tuple[int, ...]) -> None:
    """-inf in one model, in both, in a whole shard, and in all entries that the other model allows."""
    logits, reference = draw_excluding()
    reference[5, 1000:] = -INF
    found = compared(second, logits, reference, cuts)
    assert_divergences(found, divergence_definitions(logits, reference))
    assert np.isposinf(found.reverse_kld).tolist() == [False, True, False, False, True, True]
    assert np.isfinite([found.js, found.tv]).all()
    np.testing.assert_allclose([found.js[5], found.tv[5], found.top5[5]], [LN2, 1.0, 0.0], atol=1e-6)


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("cuts", [(), (2048,)], ids=str)
def test_what_is_no_distribution_has_no_divergence(second: Second, bad: float, cuts: tuple[int, ...]) -> None:
    logits, reference = draw(5, 3000), draw(5, 3000, seed=1)
    logits[0, 7], reference[1, 2990], logits[2], reference[3] = bad, bad, -INF, -INF
    logits[0, 5] = reference[1, 6] = -INF
    found = compared(second, logits, reference, cuts)
    assert all(np.isnan(getattr(found, name)).tolist() == [True] * 4 + [False] for name in NAMES)
    assert_divergences(
        divergences.replace(found, **{name: getattr(found, name)[4:] for name in NAMES}),
        divergence_definitions(logits[4:], reference[4:]),
    )
