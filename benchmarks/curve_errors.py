"""How often the 95 % intervals of the curves over the position in the window hold, on texts of ``coverage``.

    python -m benchmarks.curve_errors --output results/curve_errors.json

A text of 131,072 tokens is scored in windows of one length.  Its scores do not depend on the position, so that each bin
of the curve has the same true mean.  An interval is of as many waves as the blocks that hold a bin's scores give.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.coverage import SCORES, simulate
from compare_q.eval.stats.distributions import LEAST_BLOCKS, curve_over_position
from compare_q.eval.stats.uncertainty import interval_95, n_waves, places_of

TOKENS = 1 << 17
LENGTHS = (2048, 8192, 32_768, 131_072)


def covered(score: str, length: int, texts: int) -> dict[str, Any]:
    """Of all bins that have an error: how many, which share of their intervals holds, and the worst bin's share."""
    index, truth = np.arange(TOKENS), SCORES[score].mean
    position, places = index % length, places_of(index)
    holds, known = [], []
    for values in simulate(score, TOKENS, texts):
        curve = curve_over_position(position, values, None, places)
        bins = list(zip(curve.edges[:-1], curve.edges[1:], curve.nll, curve.nll_stderr or (), strict=True))
        held = [np.nan] * len(bins)
        for number, (low, high, mean, error) in enumerate(bins):
            if mean is not None and error is not None:
                blocks = len(np.unique(places.block[(low <= position) & (position < high)]))
                assert blocks >= LEAST_BLOCKS
                below, above = interval_95(mean, error, n_waves(blocks, places.length))
                held[number] = below <= truth <= above
        holds.append(held)
        known.append([error is not None for *_, error in bins])
    shares = np.nanmean(np.array(holds)[:, np.any(known, 0)], 0)
    return {
        "score": score, "tokens_a_window": length, "bins": len(known[0]),
        "bins_with_errors": int(np.any(known, 0).sum()),
        "share_that_holds": round(float(shares.mean()), 4), "worst_bin": round(float(shares.min()), 4),
        "best_bin": round(float(shares.max()), 4),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--texts", type=int, default=400)
    args = parser.parse_args()
    found = [covered(score, length, args.texts) for score in ("loss", "kld") for length in LENGTHS]
    args.output.write_text(json.dumps({"texts": args.texts, "lines": found}, indent=1) + "\n", encoding="utf-8")
    for line in found:
        print(json.dumps(line))


if __name__ == "__main__":
    main()
