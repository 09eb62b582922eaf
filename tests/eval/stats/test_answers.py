"""Accuracy, flips and McNemar's test, compared with values by hand, and with plain loops over random scores."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from compare_q.eval.stats.answers import mcnemar_p, summarize
from compare_q.eval.text.tokens import Requests
from tests.support.questions import requests

THREE = requests(np.array([0, 0, 1, 1, 2, 2]), np.array([1, 0, 0, 1, 1, 0], bool), np.array([1, 4, 2, 2, 1, 2]))
"""Three questions with two answers each; the correct answers are the first, the second and the first."""


def estimated(sums: list[float], reference: list[float] | None = None, asked: Requests = THREE) -> Any:
    columns = {"logprob": np.array(sums, np.float32)}
    columns |= {} if reference is None else {"ref_logprob": np.array(reference, np.float32)}
    return summarize(columns, np.arange(len(sums)), asked)


def test_flips_by_hand() -> None:
    """The reference answers all three correctly, the model only the first: two lost, none won, p = 2 * (1/2)^2."""
    found = estimated([-1, -2, -1, -2, -2, -1], [-1, -2, -2, -1, -1, -2]).acc
    assert (found.right, found.flips.lost, found.flips.won) == ("100", 2, 0)
    assert found.flips.flips.value == found.flips.changed.value == 2 / 3
    assert found.flips.mcnemar_p == 0.5


@pytest.mark.parametrize(
    ("lost", "won", "gold"),
    [
        (0, 0, 1.0),
        (1, 0, 1.0),  # 2 * 1/2
        (5, 0, 1 / 16),  # 2 * 1/32
        (7, 1, 2 * (1 + 8) / 256),
        (3, 9, 2 * (1 + 12 + 66 + 220) / 4096),
        (6, 6, 1.0),  # 2 * P(X <= 6) is above 1
    ],
)
def test_mcnemar_by_hand(lost: int, won: int, gold: float) -> None:
    assert mcnemar_p(lost, won) == mcnemar_p(won, lost) == gold


def test_against_plain_loops() -> None:
    """200 questions of 2 to 5 answers of 1 to 4 tokens, some of them with several right answers."""
    draw = np.random.default_rng(5)
    question, right, chars, tokens, reference, window = [], [], [], [], [], []
    golds: dict[str, list[bool]] = {"acc": [], "acc_norm": [], "changed": [], "flips": []}
    for number in range(200):
        own, other, good, size = [], [], [], []
        for _ in range(draw.integers(2, 6)):
            scores = -draw.exponential(3, draw.integers(1, 5)).astype(np.float32)
            near = (scores + draw.normal(0, 1, len(scores)).astype(np.float32)).astype(np.float32)
            window += [len(question)] * len(scores)
            question.append(number)
            tokens += scores.tolist()
            reference += near.tolist()
            own.append(math.fsum(scores.tolist()))
            other.append(math.fsum(near.tolist()))
            good.append(bool(draw.random() < 0.4))
            size.append(int(draw.integers(1, 20)))
        right += good
        chars += size
        best, norm, before = (
            values.index(max(values)) for values in (own, [a / b for a, b in zip(own, size, strict=True)], other)
        )
        golds["acc"].append(good[best])
        golds["acc_norm"].append(good[norm])
        golds["changed"].append(best != before)
        golds["flips"].append(good[best] != good[before])
    asked = requests(np.array(question), np.array(right), np.array(chars))
    columns = {"logprob": np.array(tokens, np.float32), "ref_logprob": np.array(reference, np.float32)}
    found = summarize(columns, np.array(window), asked)
    flips = found.acc.flips
    assert found.acc.right == "".join("01"[each] for each in golds["acc"])
    assert found.acc_norm.accuracy.value == sum(golds["acc_norm"]) / 200
    assert flips.changed.value == sum(golds["changed"]) / 200 > flips.flips.value == sum(golds["flips"]) / 200 > 0.1
    assert flips.lost + flips.won == sum(golds["flips"])
