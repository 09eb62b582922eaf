"""Measure how often a difference of KLD is significant, by number of tokens, and how often the best
has its star.

Rules: ``eval/ranking.py``.  Two quantized models are scored on one simulated text.  A token's KLD
is lognormal (sigma 1) around a level that drifts over the text (``DRIFTS``: autocorrelation time in
tokens -> standard deviation of the shared part; each model's own part has half of it), with a
correlation of 0.6 between the models.  The second KLD is ``TIMES`` the first.  For the stars, all
``MODELS`` models have the same mean, and the share of texts is counted in which the first one has
the star.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from compare_q.eval.ranking import best_labels
from compare_q.eval.results import ModelResult
from compare_q.eval.stats import uncertainty
from compare_q.eval.stats.block_sums import BlockSums

LENGTHS = (255, 510, 1000, 2000, 4000, 8000, 16_000, 30_000)
TIMES = (1, 1.25, 1.5, 2, 4, 13)
MODELS, STARRED_OF = (2, 5, 12, 40), 4000
"""Numbers of models, and the tokens of the text, for the stars."""
SHARED = 0.6
DRIFTS = {20: 0.25, 200: 0.12, 1000: 0.06, 5000: 0.12}


def drift(rng: np.random.Generator, texts: int, tokens: int) -> NDArray[np.float64]:
    """Levels [texts, tokens] around 0: first-order memories, each of 20 tokens at once."""
    cells = -(-tokens // 20)
    found = np.zeros((texts, cells))
    for memory, deviation in DRIFTS.items():
        keep = math.exp(-20 / memory)
        level = deviation * rng.standard_normal(texts)
        for cell in range(cells):
            found[:, cell] += level
            level = keep * level + math.sqrt(1 - keep**2) * deviation * rng.standard_normal(texts)
    return np.repeat(found, 20, axis=1)[:, :tokens]


def kld_sums(
    rng: np.random.Generator, texts: int, assignment: uncertainty.BlockAssignment, models: int = 2
) -> NDArray[np.float64]:
    """KLD of ``models`` models, mean 1 each, summed by block: [models, texts, G]."""
    tokens = assignment.length
    text, apart = drift(rng, texts, tokens), drift(rng, texts, tokens) / 2
    both = math.sqrt(SHARED) * rng.standard_normal((texts, tokens))
    starts = np.searchsorted(assignment.block, np.arange(assignment.block.max() + 1))
    found = []
    for model in range(models):
        own = both + math.sqrt(1 - SHARED) * rng.standard_normal((texts, tokens))
        alone = (1 - 2 * model) * apart if models == 2 else drift(rng, texts, tokens) / math.sqrt(2)
        found.append(np.add.reduceat(np.exp(own - 0.5) * (1 + text + alone), starts, axis=1))
    return np.array(found)


def shares_told_apart(tokens: int, texts: int, seed: int = 0) -> list[float]:
    """Return for each of ``TIMES`` the share (%) of texts in which the larger KLD is significantly
    larger.
    """
    rng, assignment, at_once = (
        np.random.default_rng([seed, tokens]),
        uncertainty.assign_blocks(np.arange(tokens)),
        100,
    )
    entries = np.bincount(assignment.block)
    freedom = uncertainty.n_waves(len(entries), tokens)
    seen = np.zeros(len(TIMES))
    for done in range(0, texts, at_once):
        for first, second in np.moveaxis(
            kld_sums(rng, min(at_once, texts - done), assignment), 0, 1
        ):
            for i, times in enumerate(TIMES):
                off = times * second - first
                error = uncertainty.clustered_error(off, entries, tokens) or 0
                low, high = uncertainty.interval(float(off.sum()) / tokens, error, freedom)
                seen[i] += low <= 0 <= high if times == 1 else low > 0
    return [round(each, 1) for each in (100 * seen / texts).tolist()]


def row_of(
    label: str, entries: tuple[int, ...], kld: NDArray[np.float64], length: int
) -> ModelResult:
    """Return a row that has only the sums of its KLD by block [G]; ``entries`` are the counts of
    each block.
    """
    blocks = BlockSums(entries, (0.0,) * len(entries), tuple(kld), whole=("kld",), length=length)
    return ModelResult.model_construct(label=label, blocks=blocks, bpw_layer=4.0)


def share_starred(models: int, tokens: int, texts: int, seed: int = 0) -> float:
    """Return the share (%) of texts in which the first of ``models`` equally good models has the
    star.
    """
    rng, assignment, at_once = (
        np.random.default_rng([seed, models, tokens]),
        uncertainty.assign_blocks(np.arange(tokens)),
        100,
    )
    entries = tuple(np.bincount(assignment.block).tolist())
    starred = 0
    for done in range(0, texts, at_once):
        for sums in np.moveaxis(
            kld_sums(rng, min(at_once, texts - done), assignment, models), 0, 1
        ):
            rows = [row_of(str(model), entries, each, tokens) for model, each in enumerate(sums)]
            starred += "0" in best_labels(rows, "kld")
    return round(100 * starred / texts, 1)
