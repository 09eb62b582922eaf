"""What the first windows of a text and windows spread over it say of the whole text, on simulated texts.

    python -m benchmarks.sampling results/sampling.json

The texts are ``benchmarks/coverage.py``'s, 300,000 tokens each (146 windows of 2,048 that follow one another), with
WikiText-2's lengths of articles.  For each number of windows: the distance of their mean from the whole text's mean
(root mean square over the texts, relative to the mean), and how many of the 95 % intervals hold the whole text's mean,
and the mean of all such texts.  ``until``: the same for ``--until kld:2%`` and ``kld:5%`` (``eval/cli/until.py``),
with the windows that it took.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.coverage import SCORES, simulate
from compare_q.eval.cli import until
from compare_q.eval.stats import uncertainty
from compare_q.eval.text import cutting

TOKENS, LENGTH = 300_000, 2048
STARTS = np.arange(0, TOKENS - LENGTH, LENGTH)
COUNTS = (16, 32, 64, 128)
NAMES = ("loss", "kld", "difference")
TARGETS = (0.02, 0.05)
SPREAD = np.array(
    [cut.start for cut in cutting.spread([cutting.Cut(int(at), np.empty(0, np.int32), ()) for at in STARTS])]
)
ORDERS = {"first": STARTS, "spread": SPREAD}


def estimate(text: NDArray[np.float32], starts: NDArray[np.int64]) -> uncertainty.Mean:
    """The mean over the windows at ``starts``, every token but the first of each, with our error."""
    index = (starts[:, None] + np.arange(1, LENGTH)).ravel()
    return uncertainty.mean_with_errors(text[index], places=uncertainty.places_of(index))


def holds(found: uncertainty.Mean, starts: NDArray[np.int64], truths: Sequence[float]) -> list[bool]:
    """Whether the 95 % interval holds each of the true means."""
    span = int(starts.max() - starts.min()) + LENGTH - 1
    groups = len(np.unique(uncertainty.places_of((starts[:, None] + np.arange(1, LENGTH)).ravel()).block))
    assert found.value is not None
    low, high = uncertainty.interval_95(found.value, found.stderr or 0.0, uncertainty.n_waves(groups, span))
    return [low <= truth <= high for truth in truths]


def stopped(text: NDArray[np.float32], target: float) -> int:
    """The number of windows at which ``--until`` would stop, of one row's KLD."""
    rows = until.PILOT
    for _ in range(1, until.STAGES):
        found = estimate(text, SPREAD[:rows])
        assert found.value
        alone = rows * ((found.stderr or 0.0) / found.value / target) ** 2
        takes = alone / (1 + alone / len(SPREAD))
        if takes <= rows:
            break
        rows = math.ceil(min(takes * until.SPARE, len(SPREAD)))
    return rows


def always(starts: NDArray[np.int64], _: NDArray[np.float32]) -> NDArray[np.int64]:
    """The same windows of every text."""
    return starts


def until_known(target: float, text: NDArray[np.float32]) -> NDArray[np.int64]:
    """The windows of a text that ``--until`` scores."""
    return SPREAD[: stopped(text, target)]


def summary(name: str, texts: int, choose: Callable[[NDArray[np.float32]], NDArray[np.int64]]) -> dict[str, Any]:
    """Distances and coverage in per cent over simulated texts; ``choose``: a text -> where its windows start."""
    off, held, taken, errors = [], [], [], []
    for text in itertools.islice(simulate(name, TOKENS, texts), texts):
        starts = choose(text)
        whole, found = estimate(text, STARTS), estimate(text, starts)
        assert whole.value is not None
        assert found.value is not None
        truth = SCORES[name].mean
        off.append(found.value - whole.value)
        errors.append((found.stderr or 0.0) / truth)
        held.append(holds(found, starts, (whole.value, truth)))
        taken.append(len(starts))
    shares = 100 * np.mean(held, axis=0)
    return {
        "distance_percent": round(100 * float(np.sqrt(np.mean(np.square(off)))) / SCORES[name].mean, 2),
        "error_percent": round(100 * float(np.mean(errors)), 2),
        "holds_the_whole_text": round(float(shares[0]), 1), "holds_the_true_mean": round(float(shares[1]), 1),
        "windows": round(float(np.mean(taken)), 1),
    }  # fmt: skip


def row(texts: int, asked: tuple[str, str, float]) -> dict[str, Any]:
    """A row of the file: (score, order, number of windows), or (score, "until", relative error)."""
    name, order, much = asked
    if order == "until":
        return {"score": name, "sample": "spread", "until": much, **summary(name, texts, partial(until_known, much))}
    starts = ORDERS[order][: int(much)]
    return {"score": name, "sample": order, "count": much, **summary(name, texts, partial(always, starts))}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--texts", type=int, default=1000)
    arguments = parser.parse_args()
    asked = [*itertools.product(NAMES, ORDERS, COUNTS), *(("kld", "until", target) for target in TARGETS)]
    rows = []
    with ProcessPoolExecutor() as pool:
        for found in pool.map(partial(row, arguments.texts), asked):
            print(json.dumps(found), flush=True)
            rows.append(found)
    about = {"texts": arguments.texts, "tokens": TOKENS, "window": LENGTH, "windows_of_the_text": len(STARTS)}
    arguments.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
