"""Measure how often 95 % intervals of parts of real texts contain the value of the whole text.

    python -m benchmarks.coverage_of_texts -d texts.json -m models.json -o results/cpu/coverage_of_texts.json

All models score each text once, in windows that do not overlap (the reference first; from the cache if the scores are
cached).  Then each part of a text is treated as a separate run, by the functions that the tables use:

- **first**: consecutive parts of ``PARTS`` tokens, as ``-r`` takes them.  A table's ± is about other texts of the same
  kind, and the whole text is the best available example of that kind.  The whole includes the part itself: with
  f = part / whole and independent parts, the variance of (part - whole) is 1 - f times the variance of the part.  The
  interval therefore holds if abs(part - whole) / sqrt(1 - f) is at most its half width; f is at most
  1 / ``LEAST_PARTS``.
- **spread**: samples of ``WINDOWS`` windows in the product's order, moved along the text.  Their error
  (``estimates.sampled``) is about the whole text and needs no correction; the interval is ``Z`` errors.

``error_by_spread``: root mean square of the standard errors over the standard deviation of the parts' values, 1 if the
errors are right.  ``error_by_bootstrap``, ``held_bootstrap``: the same over the errors of a moving-block bootstrap, and
how often its intervals hold.  ``certain``: parts in which one of two models is called better; ``wrong``: certain parts
in which the whole text shows the opposite.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compare_q.eval import api
from compare_q.eval.ranking import compare
from compare_q.eval.results import ModelResult
from compare_q.eval.stats import estimates, uncertainty
from compare_q.eval.text import cutting

PARTS, WINDOWS, LEAST_PARTS = (4096, 8704, 20_480, 40_960), (16, 64), 4
Z = 1.96
Columns = Mapping[str, NDArray[Any]]
Said = tuple[float, float, float, float, str]
"""A value with its error, its interval's half width, a bootstrap's error, and the outcome of a comparison."""


def counts(whole: float, fraction: float, parts: Sequence[Said]) -> dict[str, Any]:
    """The counts and ratios at the top of this file, for one score of all parts that are a ``fraction`` of a text."""
    value, error, half, bootstrap = np.array([said[:4] for said in parts]).T
    off = np.abs(value - whole) / math.sqrt(1 - fraction)
    certain = [said[4] for said in parts if said[4] in ("less", "more")]
    root = np.sqrt([np.square(error).mean(), np.var(value, ddof=1), np.square(bootstrap).mean()])
    ratios = [round(float(root[0] / other), 2) if other > 0 else None for other in root[1:]]
    found = {"whole": whole, "parts": len(parts), "held": int((off <= half).sum()), "error_by_spread": ratios[0]}
    if bootstrap.any():
        found |= {"error_by_bootstrap": ratios[1], "held_bootstrap": int((off <= Z * bootstrap).sum())}
    wrong = len(certain) - certain.count("less" if whole < 0 else "more")
    return found | ({"certain": len(certain), "wrong": wrong} if any(said[4] for said in parts) else {})


def bootstrap_error(scores: NDArray[Any], blocks: int = uncertainty.MOST_BLOCKS) -> float:
    """Standard error of the mean of scores [N] by a moving-block bootstrap (Künsch, Annals of Statistics 17, 1989).

    It is the closed form for infinitely many samples, with blocks of N / ``blocks`` tokens.
    """
    length = max(len(scores) // blocks, 1)
    sums = np.cumsum(np.concatenate(([0.0], scores.astype(np.float64))))
    return math.sqrt(length / len(scores) * float(np.var((sums[length:] - sums[:-length]) / length)))


def statements(
    models: Mapping[str, Columns], index: NDArray[Any], position: NDArray[Any]
) -> Iterator[tuple[str, Said]]:
    """Yield the name of every score of the models and of their pairs, and the value and error that a table shows."""
    rows: list[ModelResult] = []
    for label, columns in models.items():
        found = estimates.summarize(columns, index, position)
        rows.append(ModelResult.model_construct(label=label, estimates=found, reference=not rows, scores_digest=label))
        means: list[tuple[str, Any, str, float]] = [("PPL", found.ppl, "logprob", found.ppl.value or math.nan)]
        if found.against:
            means += [("KLD", found.against.kld, "kld", 1.0), ("same top", found.against.same_top, "same_top", 1.0)]
        for name, mean, column, scale in means:
            half = uncertainty.interval(0, mean.stderr, found.blocks.waves)[1]
            yield f"{name} {label}", (mean.value, mean.stderr, half, scale * bootstrap_error(columns[column]), "")
    for (one, two), name in itertools.product(itertools.combinations(rows, 2), ("nll", "kld")):
        pair = compare(two, one, name)
        if pair.limits:
            column, shown = ("logprob", "ln PPL") if name == "nll" else ("kld", "KLD")
            off = models[two.label][column].astype(np.float64) - models[one.label][column]
            half, error = (pair.limits[1] - pair.limits[0]) / 2, bootstrap_error(off)
            yield f"{shown} {two.label} - {one.label}", (pair.value or 0, pair.stderr or 0, half, error, pair.outcome)


def first_parts(models: Mapping[str, Columns], index: NDArray[Any], position: NDArray[Any]) -> Iterator[dict[str, Any]]:
    """Rows of the results for consecutive parts of each of ``PARTS`` tokens, from scores [N] in the text's order."""
    whole = dict(statements(models, index, position))
    for size in (size for size in PARTS if size * LEAST_PARTS <= len(index)):
        said = defaultdict[str, list[Said]](list)
        for begin in range(0, len(index) - size + 1, size):
            part = slice(begin, begin + size)
            cut = {label: {name: column[part] for name, column in own.items()} for label, own in models.items()}
            for name, found in statements(cut, index[part], position[part]):
                said[name].append(found)
        for name, parts in said.items():
            yield {"taken": "first", "size": size, "score": name, **counts(whole[name][0], size / len(index), parts)}


def spread_samples(
    models: Mapping[str, Columns], window: NDArray[Any], starts: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """Rows of the results for samples of windows that are spread over a text; ``window`` [N]: of each score."""
    shown, available = {"logprob": "ln PPL", "kld": "KLD"}, int(window.max()) + 1
    order: Any = np.array(cutting.spread([*range(available)]))
    for size, (label, columns) in itertools.product(WINDOWS, models.items()):
        said = defaultdict[str, list[Said]](list)
        for moved in range(available // size if available >= LEAST_PARTS * size else 0):
            taken, place = (order[:size] + moved) % available, np.full(available, -1)
            place[taken] = np.arange(size)
            inside = place[window] >= 0
            cut = {name: columns[name][inside] for name in shown if name in columns}
            errors = estimates.sampled(cut, place[window[inside]], [starts[each] for each in taken], available)
            for name, error in zip(cut, (errors.nll or 0, errors.kld or 0), strict=False):
                said[name].append((float(cut[name].mean(dtype=np.float64)), error, Z * error, 0.0, ""))
        for name, parts in said.items():
            found = counts(float(columns[name].mean(dtype=np.float64)), 0.0, parts)
            yield {"taken": "spread", "size": size, "score": f"{shown[name]} {label}", **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-d", "--data", nargs="+", required=True, help="data specs, as compare-q takes them")
    parser.add_argument("-m", "--models", nargs="+", required=True, help="model specs, the reference first")
    parser.add_argument("--cache-dir")
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    separator = ",\n "
    done, lines = api.compare(options.data, options.models, cache_dir=options.cache_dir), []
    for text, data in zip(done.results.texts, done.data, strict=True):
        scores = {model.label: done.tokens(model.label, text.name) for model in text.models}
        window, position = (next(iter(scores.values()))[name].to_numpy() for name in ("window", "position"))
        models = {label: {name: frame[name].to_numpy() for name in frame} for label, frame in scores.items()}
        if data is not None:
            first = first_parts(models, data.text_index(window, position), position)
            for row in (*first, *spread_samples(models, window, data.starts)):
                lines.append(json.dumps({"text": text.name, "tokens": len(window), **row}))
                print(lines[-1])
    options.output.write_text(f"[{separator.join(lines)}]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
