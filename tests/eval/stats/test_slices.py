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
    part = slices.summarize(columns, mask, BlockAssignment(block, 1000))
    assert part.tokens == 8
    # The mean loss is 2 ln 2.
    assert part.ppl == pytest.approx(4)
    assert part.ppl_stderr == pytest.approx(4 * LN2 * math.sqrt(35) / 8)
    assert part.kld == pytest.approx(2)
    assert part.kld_stderr == pytest.approx(math.sqrt(35) / 8)
    assert part.same_top == 0.75


# Errors have 4 cosines or more, and these need a block more than their number.
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
    part = slices.summarize(columns, mask, BlockAssignment(block, n))
    errors = (part.ppl_stderr, part.kld_stderr, part.same_top_stderr)
    assert part.tokens == 10 * n_blocks
    assert [error is None for error in errors] == [n_blocks < 5] * 3
    # The slice of five blocks keeps its tokens, but only four of its blocks have a KLD.
    columns["kld"][block == 0] = math.nan
    without = slices.summarize(columns, mask, BlockAssignment(block, n))
    assert without.kld_stderr is None, "a block without a finite KLD holds no KLD of the slice"
    assert without.ppl_stderr == part.ppl_stderr


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
    part = Slice(3, 2.5, None, 0.25, 0.125, 1.0, None)
    assert adapter.validate_json(adapter.dump_json(part)) == part
    for name, value in (("tokens", -1), ("ppl", 0), ("kld_stderr", -0.1)):
        with pytest.raises(ValueError, match=name):
            adapter.validate_python({**asdict(Slice(1)), name: value})


def test_thresholds_include_what_they_should() -> None:
    """0.9 is sure, and 0.5 is not unsure, although ln 0.5 in float32 is below ln 0.5."""
    probabilities = np.array([0.9, 0.8999, 0.5, 0.4999, 1, 0])
    # The probability 0 has the log-probability -inf. It is in neither slice, as NaN is.
    with np.errstate(divide="ignore"):
        highest = np.log(probabilities)
    highest = np.append(highest, [math.nan, math.inf])
    for kind in (np.float32, np.float64):
        masks = slices.by_confidence({"ref_top1_logprob": highest.astype(kind)})
        assert masks["sure"].tolist() == [True, False, False, False, True, False, False, False]
        assert masks["unsure"].tolist() == [False, False, False, True, False, False, False, False]
    reference = {"top1_logprob": np.log(np.array([0.95, 0.3])), "logprob": np.zeros(2)}
    masks = slices.by_confidence(reference, is_reference=True)
    assert [mask.tolist() for mask in masks.values()] == [[True, False], [False, True]]


def test_begin_is_256_tokens() -> None:
    # The first 256 positions are 0 to 255.
    masks = slices.by_position(np.array([0, 255, 256, 4000], np.int32))
    assert masks["begin"].tolist() == [True, True, False, False]
    assert masks["rest"].tolist() == [False, False, True, True]


def random_columns(draw: random.Random, n: int) -> dict[str, np.ndarray]:
    """Return scores of which 3 % are not finite.

    A fifth of the highest probabilities is at a threshold.
    """
    highest = []
    for _ in range(n):
        others = [draw.random() for _ in range(8)]
        highest.append(math.log(draw.choice([0.9, 0.5, *others])))
    values: dict[str, list[float]] = {
        "logprob": [-draw.expovariate(0.4) for _ in range(n)],
        "ref_logprob": [-draw.expovariate(0.4) for _ in range(n)],
        "kld": [draw.lognormvariate(-3, 1.5) for _ in range(n)],
        "ref_top1_logprob": highest,
    }
    columns = {}
    for name, column in values.items():
        for i in range(n):
            if draw.random() < 0.03:
                column[i] = draw.choice([math.nan, math.inf, -math.inf])
        columns[name] = np.array(column, np.float32)
    columns["same_top"] = np.array([draw.random() < 0.8 for _ in range(n)])
    return columns


def float32(value: float) -> float:
    return float(np.float32(value))


def slices_of_token(highest: float, position: int) -> list[str]:
    """Return the slices of a token, from the reference's highest log-probability."""
    names = []
    if math.isfinite(highest) and highest >= float32(math.log(0.9)):
        names.append("sure")
    if math.isfinite(highest) and highest < float32(math.log(0.5)):
        names.append("unsure")
    if position < 256:
        names.append("begin")
    else:
        names.append("rest")
    return names


@pytest.mark.parametrize("seed", range(3))
def test_every_slice_against_a_plain_loop(seed: int) -> None:
    """Windows of 400 tokens start every 300 tokens."""
    draw = random.Random(seed)
    index = []
    position = []
    for window in range(6):
        # The first token of a window has no token before it, and has no score.
        index += range(300 * window + 1, 300 * window + 400)
        position += range(1, 400)
    n = len(index)
    columns = random_columns(draw, n)
    assignment = assign_blocks(np.array(index))
    # About 24 of 2,394 tokens: some of the 18 blocks have no token of this slice, and are left out.
    rare = np.array([draw.random() < 0.01 for _ in range(n)])
    masks = slices.by_confidence(columns) | slices.by_position(np.array(position, np.int32))
    masks["rare"] = rare

    values = {name: column.tolist() for name, column in columns.items()}
    entries_by_slice: dict[str, list[int]] = {}
    for i in range(n):
        names = slices_of_token(values["ref_top1_logprob"][i], position[i])
        if rare[i]:
            names.append("rare")
        for name in names:
            entries_by_slice.setdefault(name, []).append(i)
    assert masks.keys() == entries_by_slice.keys()
    thresholds = {float32(math.log(0.9)), float32(math.log(0.5))}
    # About 479 are expected. Without ties, >= and > at a threshold would give the same slices.
    assert sum(highest in thresholds for highest in values["ref_top1_logprob"]) > 100

    for name, entries in entries_by_slice.items():
        part = slices.summarize(columns, masks[name], assignment)
        check_slice(
            part,
            {score: [column[i] for i in entries] for score, column in values.items()},
            assignment.block[entries].tolist(),
        )


def check_slice(part: Slice, values: dict[str, list[float]], block: list[int]) -> None:
    """Compare a slice with loops over the scores of its tokens."""
    losses = [-logprob for logprob in values["logprob"]]
    same_top = []
    for i, same in enumerate(values["same_top"]):
        is_finite = math.isfinite(losses[i]) and math.isfinite(values["ref_logprob"][i])
        if is_finite:
            same_top.append(float(same))
        else:
            same_top.append(math.nan)
    loss, loss_error, _ = loop_mean(losses, block)
    kld, kld_error, _ = loop_mean(values["kld"], block)
    share, share_error, _ = loop_mean(same_top, block)
    assert part.tokens == sum(math.isfinite(value) for value in losses)
    assert part.ppl == pytest.approx(math.exp(loss), rel=1e-9)
    assert part.ppl_stderr == pytest.approx(math.exp(loss) * loss_error, rel=1e-7)
    assert part.kld == pytest.approx(kld, rel=1e-9)
    assert part.kld_stderr == pytest.approx(kld_error, rel=1e-7)
    assert part.same_top == pytest.approx(share, rel=1e-9)
    assert part.same_top_stderr == pytest.approx(share_error, rel=1e-7)
