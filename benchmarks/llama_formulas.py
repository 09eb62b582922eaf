"""llama-perplexity's statistics in numpy, for benchmarks and tests: formulas, 16-bit store, text of
the output.

``exact_positions`` and ``through_16_bits`` return values per position; ``tool_statistics`` computes
llama-perplexity's statistics from either.  ``through_16_bits`` computes like
tools/perplexity/perplexity.cpp, in float32 where the tool does.  The store that ``store16`` makes
from a reference's logits equals the tool's --kl-divergence-base file byte for byte.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

LINE = re.compile(
    r"^ *(?P<name>\S.*?) *: +(?P<value>-?[\d.]+) *%?(?: ± +(?P<error>[\d.]+))?(?: %)?$",
    re.MULTILINE,
)
FINAL = re.compile(r"Final estimate: PPL = ([\d.]+) \+/- ([\d.]+)")
KLD_PERCENTS = ("max", "99.9", "99", "95", "90", "50", "10", "5", "1", "0.1", "min")
DELTA_PERCENTS = ("max", "99.9", "99", "95", "90", "75", "50", "25", "10", "5", "1", "0.1", "min")
NAMES = {"max": "Maximum", "50": "Median", "min": "Minimum"}
CORRELATION = "Cor(ln(PPL(Q)), ln(PPL(base)))"
Array = NDArray[Any]
Numbers = dict[str, tuple[float, ...]]
"""Name of a line -> (value, error) or (value,), in the line's unit."""


@dataclass(frozen=True)
class Positions:
    """Per scored position [N], float64 or float32: both losses and the KL divergence in nats,
    change of probability.
    """

    nll: Array
    base: Array
    kld: Array
    delta: Array
    same_top: Array


def printed_numbers(output: str) -> dict[str, tuple[str, ...]]:
    """Name -> (value, error) as llama-perplexity printed them: its statistics, or its "Final
    estimate" as ``PPL``.
    """
    if final := FINAL.search(output):
        return {"PPL": (final[1], final[2])}
    _, _, block = output.partition("====== Perplexity statistics ======")
    return {
        " ".join(match["name"].split()): tuple(filter(None, (match["value"], match["error"])))
        for match in LINE.finditer(block)
    }


def name_of(percent: str, unit: str) -> str:
    """``Median KLD``, ``99.9% KLD``."""
    return f"{NAMES.get(percent) or f'{float(percent):.1f}%'} {unit}"


def percentile(values: Array, percent: str) -> float:
    """llama.cpp's percentile of sorted values: linear; fraction and place have the values' dtype,
    float32 in the tool.

    In float32, the place of 99.9 % among 2,040 values is too high by 6e-5 of the gap between two
    values (1.1e-5 nats for a gap of 0.18).
    """
    n, dtype = len(values), values.dtype.type
    if percent == "50":
        return float(dtype(0.5) * (values[n // 2] + values[(n - 1) // 2]))
    if percent in NAMES:
        return float(values[0 if percent == "min" else -1])
    place = dtype(float(percent) / 100) * dtype(n - 1)
    part = place - np.floor(place)
    return float((1 - part) * values[int(place)] + part * values[min(int(place) + 1, n - 1)])


def mean_and_error(values: Array, squares: Array) -> tuple[float, float]:
    """Mean of values [N] and its error, by their squares."""
    value, n = float(values.mean(dtype=np.float64)), len(values)
    return value, (max(float(squares.mean(dtype=np.float64)) - value**2, 0.0) / (n - 1)) ** 0.5


def tool_statistics(of: Positions) -> Numbers:
    """llama-perplexity's block from values per position, by its formulas; probabilities in percent."""
    n = len(of.nll)
    (a, ea), (b, eb) = mean_and_error(of.nll, of.nll**2), mean_and_error(of.base, of.base**2)
    covariance = (float((of.nll * of.base).mean(dtype=np.float64)) - a * b) / (n - 1)
    error = (ea**2 + eb**2 - 2 * covariance) ** 0.5
    ppl, base, ratio, top = np.exp(a), np.exp(b), np.exp(a - b), float(of.same_top.mean())
    apart = ((ppl * ea) ** 2 + (base * eb) ** 2 - 2 * ppl * base * covariance) ** 0.5
    squares = of.delta**2
    moved, moved_error = mean_and_error(squares, squares.astype(np.float64) ** 2)
    kld, delta = np.sort(of.kld.astype(of.nll.dtype)), np.sort(of.delta)
    return {
        "Mean PPL(Q)": (ppl, ppl * ea),
        "Mean PPL(base)": (base, base * eb),
        CORRELATION: (100 * covariance / (ea * eb),),
        "Mean ln(PPL(Q)/PPL(base))": (a - b, error),
        "Mean PPL(Q)/PPL(base)": (ratio, ratio * error),
        "Mean PPL(Q)-PPL(base)": (ppl - base, apart),
        "Mean KLD": mean_and_error(of.kld, of.kld**2),
        **{name_of(p, "KLD"): (percentile(kld, p),) for p in KLD_PERCENTS},
        "Mean Δp": tuple(100 * each for each in mean_and_error(of.delta, squares)),
        **{name_of(p, "Δp"): (100 * percentile(delta, p),) for p in DELTA_PERCENTS},
        "RMS Δp": (100 * moved**0.5, 50 * moved_error / moved**0.5),
        "Same top p": (100 * top, 100 * (top * (1 - top) / (n - 1)) ** 0.5),
    }


def exact_positions(model: Array, base: Array, targets: Array) -> Positions:
    """Float64 from logits float32 [T, V] of both models and the real tokens [T]."""
    rows = np.arange(len(targets))
    q, p = log_softmax(model), log_softmax(base)
    ln_q, ln_p = q[rows, targets], p[rows, targets]
    kld = (np.exp(p) * (p - q)).sum(1)
    return Positions(
        -ln_q, -ln_p, kld, np.exp(ln_q) - np.exp(ln_p), model.argmax(1) == base.argmax(1)
    )


def log_softmax(logits: Array) -> Array:
    """Log-probabilities, float64 [T, V]."""
    centred = logits.astype(np.float64) - logits.max(1, keepdims=True)
    found: Array = centred - np.log(np.exp(centred).sum(1, keepdims=True))
    return found


def expf(values: Array) -> Array:
    """C's float32 exp."""
    return np.exp(values.astype(np.float64)).astype(np.float32)


def log_sum_exp(logits: Array, largest: Array) -> Array:
    """ln of the sum of exp(logits - largest), summed in float64 and rounded to float32, [T, 1]."""
    total = expf(logits - largest).sum(1, dtype=np.float64, keepdims=True)
    found: Array = np.log(total).astype(np.float32)
    return found


def store16(logits: Array) -> Array:
    """The tool's rows of a reference, uint16 [T, 4 + V, V even]: float32 scale and minimum, then
    one step per token.
    """
    largest = logits.max(1, keepdims=True)
    least = np.maximum(logits.min(1, keepdims=True), largest - np.float32(16))
    scale = (largest - least) / np.float32(65535)
    steps = np.where(logits > least, np.rint(np.float32(1) / scale * (logits - least)), 0).astype(
        np.uint16
    )
    head = np.concatenate((scale, least - largest - log_sum_exp(logits, largest)), 1).view(
        np.uint16
    )
    return np.concatenate((head, steps, np.zeros((len(logits), logits.shape[1] % 2), np.uint16)), 1)


def through_16_bits(model: Array, store: Array, targets: Array) -> Positions:
    """Return the tool's results for a model's logits float32 [T, V] and the rows of the reference's
    store.
    """
    rows = np.arange(len(targets))
    head = np.ascontiguousarray(store[:, :4]).view(np.float32)
    p = head[:, :1] * store[:, 4 : 4 + model.shape[1]].astype(np.float32) + head[:, 1:]
    largest = model.max(1, keepdims=True)
    total = largest + log_sum_exp(model, largest)
    terms = np.where(p > -16, expf(p) * (p - model + total), np.float32(0))
    nll, base = total[:, 0] - model[rows, targets], -p[rows, targets]
    same = model.argmax(1) == p.argmax(1)
    return Positions(nll, base, terms.sum(1, dtype=np.float64), expf(-nll) - expf(-base), same)


def joined_positions(parts: Sequence[Positions]) -> Positions:
    """Positions of several windows."""
    names = [field.name for field in fields(Positions)]
    return Positions(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))
