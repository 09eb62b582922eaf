"""Logits from states and a head, whether a head can be computed again, and the spacing of logits by dtype."""

from __future__ import annotations

import math

import pytest
import torch

from compare_q.backends.reference.head import (
    Head,
    head_difference,
    head_logits,
    head_mismatch,
    largest_difference,
    largest_finite,
)
from tests.support.stores import numbers

INF, NAN = math.inf, math.nan


def test_logits_from_states_by_hand() -> None:
    """[1, 2] on rows [3, 4], [5, 6], [0, -1]: 11, 17, -2; bias; then 10 tanh(z / 10); then halved."""
    states, weight = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0], [5.0, 6.0], [0.0, -1.0]])
    bias = torch.tensor([0.5, 0.0, -1.0])
    (plain,) = head_logits(Head(3, "float32"), states, weight, None).tolist()
    assert plain == [11.0, 17.0, -2.0]
    (biased,) = head_logits(Head(3, "float32"), states, weight, bias).tolist()
    assert biased == [11.5, 17.0, -3.0]
    (scaled,) = head_logits(Head(3, "float32", scale=0.5), states, weight, bias).tolist()
    assert scaled == [5.75, 8.5, -1.5]
    gold = [10 * math.tanh(z / 10) for z in (11.5, 17.0, -3.0)]
    (capped,) = head_logits(Head(3, "float32", soft_cap=10.0), states, weight, bias).tolist()
    assert capped == pytest.approx(gold, rel=1e-6)
    (both,) = head_logits(Head(3, "float32", soft_cap=10.0, scale=0.5), states, weight, bias).tolist()
    assert both == pytest.approx([z / 2 for z in gold], rel=1e-6)
    assert states.tolist() == [[1.0, 2.0]]
    assert bias.tolist() == [0.5, 0.0, -1.0]


def test_a_masked_or_nan_logit_never_makes_two_things_equal() -> None:
    logits = torch.tensor([[1.0, -INF, 3.0]])
    assert largest_difference(logits, logits.clone()) == 0.0
    assert largest_difference(logits, torch.tensor([[1.0, -INF, 3.5]])) == 0.5
    assert largest_difference(logits, torch.tensor([[1.0, 2.0, 3.0]])) == INF
    assert largest_difference(logits, torch.tensor([[NAN, -INF, 3.0]])) == INF
    assert largest_finite(torch.tensor([[NAN, -INF, -7.0]])) == 7.0


def test_a_head_is_recomputable_up_to_four_spacings_of_the_largest_logit() -> None:
    """bfloat16 and logits up to 32: 4 * 2**-7 * 32 = 1."""
    assert head_mismatch(1.0, 32.0, "bfloat16") == ""
    assert head_mismatch(1.01, 32.0, "bfloat16") == "its head's product differs from its logits by 1.01"
    assert head_mismatch(1.0, 32.0, "float16") == "its head's product differs from its logits by 1"
    assert head_mismatch("its head is a Strange", 32.0, "bfloat16") == "its head is a Strange"
    for bad in (INF, NAN):
        assert head_mismatch(bad, 32.0, "bfloat16") == f"its head's product differs from its logits by {bad}"


def test_how_far_a_heads_product_is_from_the_logits() -> None:
    states, weight, bias = numbers(5, 4), numbers(9, 4, seed=1), numbers(9, seed=2)
    head = (weight, bias, Head(9, "float32", 30.0, 0.5))
    logits = head_logits(head[2], states, weight, bias)
    assert head_difference(head, states, logits) == 0.0
    assert head_difference(head, states, logits + 0.25) == pytest.approx(0.25, rel=1e-6)
    assert head_difference("its head is a Strange", states, logits) == "its head is a Strange"
    assert head_difference(head, states, logits[:, :8]) == "its head has 9 entries for 8 logits"
    assert head_difference(head, states[:4], logits) == "its head is given other rows than its logits have"
