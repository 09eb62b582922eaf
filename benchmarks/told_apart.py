"""Measure how often a difference of KLD is significant, and how often the best has its star.

Rules: ``eval/ranking.py``.  Two quantized models are scored on one simulated text.  A token's KLD
is lognormal (sigma 1) around a level that drifts over the text (``DRIFTS``: autocorrelation time in
tokens -> standard deviation of the shared part; each model's own part has half of it), with a
correlation of 0.6 between the models.  The second KLD is ``KLD_RATIOS`` times the first.  For the
stars, all ``MODELS`` models have the same mean, and the share of texts is counted in which the
first one has the star.
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
KLD_RATIOS = (1, 1.25, 1.5, 2, 4, 13)
MODELS = (2, 5, 12, 40)
STARRED_OF = 4000
"""Numbers of models, and the tokens of the text, for the stars."""
SHARED = 0.6
DRIFTS = {20: 0.25, 200: 0.12, 1000: 0.06, 5000: 0.12}
TOKENS_PER_LEVEL = 20
"""Tokens that share a level."""
TEXTS_PER_DRAW = 100


def drift(rng: np.random.Generator, texts: int, tokens: int) -> NDArray[np.float64]:
    """Return levels [texts, tokens] around 0, the sum of first-order processes."""
    cells = -(-tokens // TOKENS_PER_LEVEL)
    levels = np.zeros((texts, cells))
    for memory, deviation in DRIFTS.items():
        keep = math.exp(-TOKENS_PER_LEVEL / memory)
        # The first level is drawn with the deviation of all later ones.
        level = deviation * rng.standard_normal(texts)
        for cell in range(cells):
            levels[:, cell] += level
            level = keep * level + math.sqrt(1 - keep**2) * deviation * rng.standard_normal(texts)
    return np.repeat(levels, TOKENS_PER_LEVEL, axis=1)[:, :tokens]


def kld_sums(
    rng: np.random.Generator, texts: int, assignment: uncertainty.BlockAssignment, models: int = 2
) -> NDArray[np.float64]:
    """Return the KLD of ``models`` models, mean 1 each, summed by block: [models, texts, G]."""
    tokens = assignment.length
    shared_level = drift(rng, texts, tokens)
    difference = drift(rng, texts, tokens) / 2
    shared_noise = math.sqrt(SHARED) * rng.standard_normal((texts, tokens))
    starts = np.searchsorted(assignment.block, np.arange(assignment.block.max() + 1))
    sums = []
    for model in range(models):
        noise = shared_noise + math.sqrt(1 - SHARED) * rng.standard_normal((texts, tokens))
        if models == 2:
            model_level = (1 - 2 * model) * difference
        else:
            model_level = drift(rng, texts, tokens) / math.sqrt(2)
        # exp(noise - 0.5) has a mean of 1.
        kld = np.exp(noise - 0.5) * (1 + shared_level + model_level)
        sums.append(np.add.reduceat(kld, starts, axis=1))
    return np.array(sums)


def shares_told_apart(tokens: int, texts: int, seed: int = 0) -> list[float]:
    """Return, for each of ``KLD_RATIOS``, the share (%) of texts with a significantly larger KLD.

    For 1, the share in which no difference is significant.
    """
    rng = np.random.default_rng([seed, tokens])
    assignment = uncertainty.assign_blocks(np.arange(tokens))
    entries = np.bincount(assignment.block)
    freedom = uncertainty.n_waves(len(entries), tokens)
    counts = np.zeros(len(KLD_RATIOS))
    for done in range(0, texts, TEXTS_PER_DRAW):
        sums = kld_sums(rng, min(TEXTS_PER_DRAW, texts - done), assignment)
        for first, second in np.moveaxis(sums, 0, 1):
            for number, times in enumerate(KLD_RATIOS):
                difference = times * second - first
                error = uncertainty.low_frequency_error(difference, entries, tokens) or 0
                mean = float(difference.sum()) / tokens
                low, high = uncertainty.interval(mean, error, freedom)
                if times == 1:
                    counts[number] += low <= 0 <= high
                else:
                    counts[number] += low > 0
    return [round(share, 1) for share in (100 * counts / texts).tolist()]


def row_of(
    label: str, entries: tuple[int, ...], kld: NDArray[np.float64], length: int
) -> ModelResult:
    """Return a row that has only the sums of its KLD by block [G].

    ``entries``: the counts of each block.
    """
    blocks = BlockSums(entries, (0.0,) * len(entries), tuple(kld), whole=("kld",), length=length)
    return ModelResult.model_construct(label=label, blocks=blocks, bpw_layer=4.0)


def share_starred(models: int, tokens: int, texts: int, seed: int = 0) -> float:
    """Return the share (%) of texts in which the first of equally good models has the star."""
    rng = np.random.default_rng([seed, models, tokens])
    assignment = uncertainty.assign_blocks(np.arange(tokens))
    entries = tuple(np.bincount(assignment.block).tolist())
    starred = 0
    for done in range(0, texts, TEXTS_PER_DRAW):
        sums_of_texts = kld_sums(rng, min(TEXTS_PER_DRAW, texts - done), assignment, models)
        for sums in np.moveaxis(sums_of_texts, 0, 1):
            rows = [row_of(str(model), entries, kld, tokens) for model, kld in enumerate(sums)]
            starred += "0" in best_labels(rows, "kld")
    return round(100 * starred / texts, 1)
