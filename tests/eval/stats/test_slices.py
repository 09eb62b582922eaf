"""Slices: a small case by hand, and random columns compared with plain Python loops in float64."""

from __future__ import annotations

import math
import random
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter

from compare_q.eval.stats import slices
from compare_q.eval.stats.slices import Slice
from compare_q.eval.stats.uncertainty import BlockAssignment, assign_blocks
from tests.eval.stats.test_plain_loops import loop_mean

LN2 = math.log(2)


def test_a_small_case_by_hand() -> None:
    """Eight tokens in five blocks; a ninth and a tenth are not in the slice.

    The sums of KLD over the blocks, less 2 per token, are 1, -1, 0, -1, 1.  Only the cosines 2 and
    4 of 5 blocks see this: each sum is root(5), so that p_2 = p_4 = 2 * 5.  The factors are 1 + 0.6
    * 2 ** 2 and 1 + 0.6 * 4 ** 2, hence the variance is (10 * 3.4 + 10 * 10.6) / 4 / 8 ** 2 = 35 /
    64.
    """
    kld = np.array([1, 4, 1, 2, 2, 0, 3, 3, 50, math.nan])
    block = np.array([0, 0, 1, 2, 2, 3, 3, 4, 0, 4])
    mask = np.array([True] * 8 + [False] * 2)
    same_top = np.array([True, False, True, True, False, True, True, True, False, False])
    columns = {
        "logprob": -kld * LN2,
        "ref_logprob": np.full(10, -1.0),
        "kld": kld,
        "same_top": same_top,
    }
    found = slices.summarize(columns, mask, BlockAssignment(block, 1000))
    assert found.tokens == 8
    assert found.ppl == pytest.approx(4)  # the mean loss is 2 ln 2
    assert found.ppl_stderr == pytest.approx(4 * LN2 * math.sqrt(35) / 8)
    assert found.kld == pytest.approx(2)
    assert found.kld_stderr == pytest.approx(math.sqrt(35) / 8)
    assert found.same_top == 0.75


@pytest.mark.parametrize("n_blocks", [1, 4, 5])
def test_an_error_needs_five_blocks_with_tokens_of_the_slice(n_blocks: int) -> None:
    n = 90
    block = np.arange(n) // 10  # nine blocks
    draw = np.random.default_rng(1)
    columns = {
        "logprob": -draw.exponential(size=n),
        "ref_logprob": -draw.exponential(size=n),
        "kld": draw.exponential(size=n),
        "same_top": draw.random(n) < 0.5,
    }
    mask = block < n_blocks
    found = slices.summarize(columns, mask, BlockAssignment(block, n))
    errors = (found.ppl_stderr, found.kld_stderr, found.same_top_stderr)
    assert found.tokens == 10 * n_blocks
    assert [error is None for error in errors] == [n_blocks < 5] * 3
    columns["kld"][block == 0] = math.nan
    without = slices.summarize(columns, mask, BlockAssignment(block, n))
    assert without.kld_stderr is None, "a block without a finite KLD holds no KLD of the slice"
    assert without.ppl_stderr == found.ppl_stderr


def test_empty_slices_one_token_and_no_reference() -> None:
    columns: dict[str, Any] = {
        "logprob": np.log(np.array([0.5, 0.25, 1])),
        "top1_logprob": np.log([0.5, 0.9, 1]),
    }
    assignment = BlockAssignment(np.array([0, 1, 2]), 3)
    nothing = np.zeros(3, bool)
    one = np.array([False, True, False])
    assert slices.summarize(columns, nothing, assignment) == Slice(0)
    assert slices.summarize(columns, one, assignment) == Slice(1, pytest.approx(4))
    assert slices.by_confidence(columns) == {}
    columns |= {
        "ref_logprob": columns["logprob"],
        "kld": np.array([0.5, 0.125, math.inf]),
        "same_top": one,
    }
    assert slices.summarize(columns, nothing, assignment) == Slice(0)
    assert slices.summarize(columns, one, assignment) == Slice(
        1, pytest.approx(4), kld=0.125, same_top=1
    )
    last = np.array([False, False, True])
    assert slices.summarize(columns, last, assignment) == Slice(1, 1.0, same_top=0)
    columns["logprob"][2] = -math.inf
    assert slices.summarize(columns, last, assignment) == Slice(0)


def test_results_can_hold_a_slice() -> None:
    adapter = TypeAdapter(Slice)
    found = Slice(3, 2.5, None, 0.25, 0.125, 1.0, None)
    assert adapter.validate_json(adapter.dump_json(found)) == found
    for wrong in ({"tokens": -1}, {"tokens": 1, "ppl": 0}, {"tokens": 1, "kld_stderr": -0.1}):
        with pytest.raises(ValueError, match=str(list(wrong)[-1])):
            adapter.validate_python({**asdict(Slice(1)), **wrong})


def test_thresholds_include_what_they_should() -> None:
    """0.9 itself is sure, and 0.5 itself is not unsure, although ln 0.5 in float32 is below ln 0.5."""
    probabilities = np.array([0.9, 0.8999, 0.5, 0.4999, 1, 0])
    with np.errstate(divide="ignore"):
        highest = np.log(probabilities)
    highest = np.append(highest, [math.nan, math.inf])
    for kind in (np.float32, np.float64):
        masks = slices.by_confidence({"ref_top1_logprob": highest.astype(kind)})
        assert masks["sure"].tolist() == [True, False, False, False, True, False, False, False]
        assert masks["unsure"].tolist() == [False, False, False, True, False, False, False, False]
    own = {"top1_logprob": np.log(np.array([0.95, 0.3])), "logprob": np.zeros(2)}
    masks = slices.by_confidence(own, is_reference=True)
    assert [mask.tolist() for mask in masks.values()] == [[True, False], [False, True]]


def test_begin_is_256_tokens() -> None:
    masks = slices.by_position(np.array([0, 255, 256, 4000], np.int32))
    assert masks["begin"].tolist() == [True, True, False, False]
    assert masks["rest"].tolist() == [False, False, True, True]


def random_columns(draw: random.Random, n: int) -> dict[str, np.ndarray]:
    """Return scores of which 3 % are not finite, and highest probabilities of which a fifth are at
    a threshold.
    """
    values: dict[str, list[float]] = {
        "logprob": [-draw.expovariate(0.4) for _ in range(n)],
        "ref_logprob": [-draw.expovariate(0.4) for _ in range(n)],
        "kld": [draw.lognormvariate(-3, 1.5) for _ in range(n)],
        "ref_top1_logprob": [
            math.log(draw.choice([0.9, 0.5, *(draw.random() for _ in range(8))])) for _ in range(n)
        ],
    }
    for column in values.values():
        for i in range(n):
            if draw.random() < 0.03:
                column[i] = draw.choice([math.nan, math.inf, -math.inf])
    columns = {name: np.array(column, np.float32) for name, column in values.items()}
    return columns | {"same_top": np.array([draw.random() < 0.8 for _ in range(n)])}


def float32(value: float) -> float:
    return float(np.float32(value))


@pytest.mark.parametrize("seed", range(3))
def test_every_slice_against_a_plain_loop(seed: int) -> None:
    """Windows of 400 tokens start every 300 tokens."""
    draw = random.Random(seed)
    spots = [(300 * window + p, p) for window in range(6) for p in range(1, 400)]
    n = len(spots)
    columns = random_columns(draw, n)
    position = np.array([p for _, p in spots], np.int32)
    assignment = assign_blocks(np.array([i for i, _ in spots]))
    rare = np.array([draw.random() < 0.01 for _ in range(n)])
    masks = slices.by_confidence(columns) | slices.by_position(position) | {"rare": rare}

    rows = [{name: float(column[i]) for name, column in columns.items()} for i in range(n)]
    block = [int(each) for each in assignment.block]
    expected: dict[str, list[int]] = {"sure": [], "unsure": [], "begin": [], "rest": [], "rare": []}
    for i, row in enumerate(rows):
        highest = row["ref_top1_logprob"]
        if math.isfinite(highest) and highest >= float32(math.log(0.9)):
            expected["sure"].append(i)
        if math.isfinite(highest) and highest < float32(math.log(0.5)):
            expected["unsure"].append(i)
        expected["begin" if spots[i][1] < 256 else "rest"].append(i)
        if rare[i]:
            expected["rare"].append(i)
    assert masks.keys() == expected.keys()
    at_threshold = sum(
        row["ref_top1_logprob"] in (float32(math.log(0.9)), float32(math.log(0.5))) for row in rows
    )
    assert at_threshold > 100

    for name, entries in expected.items():
        found = slices.summarize(columns, masks[name], assignment)
        at = [block[i] for i in entries]
        loss, loss_error, _ = loop_mean([-rows[i]["logprob"] for i in entries], at)
        kld, kld_error, _ = loop_mean([rows[i]["kld"] for i in entries], at)
        same = []
        for i in entries:
            both = math.isfinite(rows[i]["logprob"]) and math.isfinite(rows[i]["ref_logprob"])
            same.append(rows[i]["same_top"] if both else math.nan)
        share, share_error, _ = loop_mean(same, at)
        assert found.tokens == sum(math.isfinite(rows[i]["logprob"]) for i in entries)
        assert found.ppl == pytest.approx(math.exp(loss), rel=1e-9)
        assert found.ppl_stderr == pytest.approx(math.exp(loss) * loss_error, rel=1e-7)
        assert found.kld == pytest.approx(kld, rel=1e-9)
        assert found.kld_stderr == pytest.approx(kld_error, rel=1e-7)
        assert found.same_top == pytest.approx(share, rel=1e-9)
        assert found.same_top_stderr == pytest.approx(share_error, rel=1e-7)
