"""What the first windows of a text and windows spread over it say of the whole text, on simulated and on real texts.

    python -m benchmarks.sampling results/sampling.json
    python -m benchmarks.sampling FILE --scores FOLDER --run RESULTS

Simulated texts are ``benchmarks/coverage.py``'s, with WikiText-2's lengths of articles; 300,000 tokens are 146 windows
of 2,048 that follow one another.  ``until`` stops as ``--until kld:2%`` does, by ``eval.cli.until.in_stages``.

``--scores``: the folder of ``--tokens-out`` of a run that scored all N windows of a text, with ``"sample": "spread"``;
``--run``: its results.json.  Samples of n windows are any n that follow one another, and the spread ones moved on by 0
to N - 1 windows, from the text's end to its beginning.

For each number of windows: the distance of their mean from the mean of all windows of the text (root mean square,
relative to the latter; of PPL for the losses of real texts); both errors, and how many 95 % intervals hold:
``error_percent`` is the table's ±, about texts like this one, ``of_the_text_percent`` what spread windows say of all
windows of the text (``eval.stats.uncertainty.sampling_error``).
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.coverage import SCORES, simulate
from compare_q.backends.common import machine
from compare_q.eval.cli import until
from compare_q.eval.stats import uncertainty
from compare_q.eval.text import cutting

LENGTH = 2048
SIMULATED = (("loss", 300_000), ("difference", 300_000), ("kld", 300_000), ("kld", 80_000), ("kld", 1_000_000))
"""Scores, and tokens of their texts."""
COUNTS = (16, 32, 64, 128)
TARGETS = (0.01, 0.02, 0.05)
OF_THE_TEXT = ("method", "windows", "window_length", "text_tokens", "scored_tokens", "windows_sha256")
Windows = NDArray[np.float32]
"""The scores of a text's windows in their order [N, T]: each window's tokens but the first."""


@dataclass(frozen=True)
class Seen:
    """What a sample of a text's windows says: the mean, the table's error with its degrees of freedom, and the error
    of the mean as the whole text's."""

    mean: float
    error: float
    freedom: int
    of_the_text: float
    windows: int

    def holds(self, truth: float) -> bool:
        """Whether the table's 95 % interval holds the truth."""
        return abs(self.mean - truth) <= uncertainty.student_t(self.freedom) * self.error

    def holds_the_text(self, truth: float) -> bool:
        """Whether the 95 % interval of the whole text's mean holds the truth."""
        return abs(self.mean - truth) <= uncertainty.student_t(self.windows - 1) * self.of_the_text


def spread_order(windows: int) -> NDArray[np.int64]:
    """The numbers of a text's windows in the order in which a spread run takes them."""
    empty = np.empty(0, np.int32)
    return np.array([cut.start for cut in cutting.spread([cutting.Cut(at, empty, ()) for at in range(windows)])])


def look(text: Windows, chosen: NDArray[np.int64]) -> Seen:
    """What the windows of these numbers say."""
    kept = np.sort(chosen)
    length = text.shape[1] + 1
    places = uncertainty.places_of((kept[:, None] * length + np.arange(1, length)).ravel())
    found = uncertainty.mean_with_errors(text[kept].ravel(), places=places)
    groups = len(np.unique(places.block))
    sums, tokens = text[kept].sum(1, dtype=np.float64), np.full(len(kept), length - 1)
    of_the_text = uncertainty.sampling_error(sums, tokens, len(text))
    assert None not in (found.value, found.stderr, of_the_text)
    return Seen(
        found.value or 0.0, found.stderr or 0.0, uncertainty.n_waves(groups, places.length), of_the_text or 0.0,
        len(kept),
    )  # fmt: skip


def until_known(text: Windows, target: float) -> Seen:
    """What the windows say at which ``--until`` stops, of one row's KLD."""
    order, seen = spread_order(len(text)), []

    def score(counts: Mapping[str, int]) -> dict[str, until.Known]:
        seen.append(look(text, order[: counts["text"]]))
        done = seen[-1].windows
        takes = until.windows_for(seen[-1].of_the_text / seen[-1].mean, target, done, len(text))
        return {"text": until.Known(done, len(text), takes)}

    until.in_stages(["text"], score)
    return seen[-1]


def summary(found: Iterable[tuple[Seen, float]], truth: float | None, *, as_ppl: bool = False) -> dict[str, Any]:
    """Distances, errors and coverage in per cent over samples, each with the mean of its whole text.

    ``truth``: the mean of all such texts, where it is known; ``as_ppl``: of the perplexities, not of the losses.
    """
    pairs = list(found)

    def relative(off: float, whole: float) -> float:
        return math.expm1(off) if as_ppl else off / whole

    def percent(values: Iterable[float]) -> float:
        return round(100 * float(np.mean(list(values))), 2)

    squares = [relative(seen.mean - whole, whole) ** 2 for seen, whole in pairs]
    return {
        "distance_percent": round(100 * math.sqrt(float(np.mean(squares))), 2),
        "error_percent": percent(relative(seen.error, whole) for seen, whole in pairs),
        "of_the_text_percent": percent(relative(seen.of_the_text, whole) for seen, whole in pairs),
        **({} if truth is None else {"holds_all_texts": percent(seen.holds(truth) for seen, _ in pairs)}),
        "holds_the_text": percent(seen.holds(whole) for seen, whole in pairs),
        "sampling_holds_the_text": percent(seen.holds_the_text(whole) for seen, whole in pairs),
        "windows": round(float(np.mean([seen.windows for seen, _ in pairs])), 1),
    }


def simulated(name: str, tokens: int, texts: int) -> Iterator[Windows]:
    """Texts' scores as windows that follow one another."""
    index = np.arange(0, tokens - LENGTH, LENGTH)[:, None] + np.arange(1, LENGTH)
    for text in itertools.islice(simulate(name, tokens, texts), texts):
        yield text[index]


def of_simulated(texts: int, asked: tuple[str, int]) -> list[dict[str, Any]]:
    """The rows of the file that are about one of ``SIMULATED``."""
    name, tokens = asked
    found: dict[tuple[str, float], list[tuple[Seen, float]]] = {}
    for text in simulated(name, tokens, texts):
        whole, spread = float(text.mean(dtype=np.float64)), spread_order(len(text))
        for count in (each for each in COUNTS if each < len(text)):
            found.setdefault(("first", count), []).append((look(text, np.arange(count)), whole))
            found.setdefault(("spread", count), []).append((look(text, spread[:count]), whole))
        for target in TARGETS if name == "kld" else ():
            found.setdefault(("until", target), []).append((until_known(text, target), whole))
    return [
        {"score": name, "tokens": tokens, "sample": sample, "until" if sample == "until" else "count": much,
         **summary(pairs, SCORES[name].mean)}
        for (sample, much), pairs in found.items()
    ]  # fmt: skip


def of_real(file: Path, counts: Sequence[int] = COUNTS) -> list[dict[str, Any]]:
    """The rows of the file that are about the token scores of one model on all windows of a text."""
    import pyarrow.parquet as parquet

    columns = {name: np.asarray(column) for name, column in parquet.read_table(file).to_pydict().items()}
    count = int(columns["window"].max()) + 1
    in_text_order = np.argsort(spread_order(count))
    rows = []
    for name, values in (("ppl", -columns["logprob"]), ("kld", columns.get("kld"))):
        if values is None:
            continue
        assert np.isfinite(values).all()
        assert len(values) % count == 0
        text = values.reshape(count, -1)[in_text_order]
        for sample, n in itertools.product(("first", "spread"), counts):
            looks = [(look(text, chosen), float(text.mean(dtype=np.float64))) for chosen in rotations(count, n, sample)]
            rows.append({"model": file.stem, "score": name, "sample": sample, "count": n, "samples": len(looks),
                         **summary(looks, None, as_ppl=name == "ppl")})  # fmt: skip
    return rows


def rotations(available: int, count: int, sample: str) -> list[NDArray[np.int64]]:
    """Every sample of so many windows: those that follow one another, or the spread ones moved on."""
    if sample == "first":
        return [np.arange(at, at + count) for at in range(available - count + 1)]
    return [(spread_order(available)[:count] + at) % available for at in range(available)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--texts", type=int, default=1000)
    parser.add_argument("--scores", type=Path, help="token scores of a run on all windows of a text")
    parser.add_argument("--run", type=Path, help="results.json of that run")
    arguments = parser.parse_args()
    about: dict[str, Any] = {"commit": machine.commit(), "versions": {"numpy": np.__version__}}
    with ProcessPoolExecutor() as pool:
        if arguments.scores:
            run = json.loads(arguments.run.read_text())
            about |= {"run": {key: run[key] for key in ("commit", "versions", "hardware")}}
            text = run["texts"][0]
            about |= {"text": text["subtitle"], **{key: text["data"][key] for key in OF_THE_TEXT}}
            files = sorted(arguments.scores.rglob("*.parquet"))
            rows = list(itertools.chain(*pool.map(of_real, files)))
        else:
            about |= {"texts": arguments.texts, "window": LENGTH}
            rows = list(itertools.chain(*pool.map(partial(of_simulated, arguments.texts), SIMULATED)))
    for row in rows:
        print(json.dumps(row))
    arguments.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
