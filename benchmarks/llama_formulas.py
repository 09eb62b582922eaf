"""llama-perplexity's statistics in numpy: its formulas, its 16-bit store, the text of its output.

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
LEAST_LOG_PROBABILITY = -16
"""The tool's store cuts log-probabilities off this far below the largest one, and sums no KLD from
them."""


@dataclass(frozen=True)
class Positions:
    """Values of each scored position [N], float64 or float32.

    Attributes:
        nll, base: losses of the model and of the reference, in nats.
        kld: KL divergence, in nats.
        delta: change of the token's probability.
        same_top: True where both have the same most probable token.
    """

    nll: Array
    base: Array
    kld: Array
    delta: Array
    same_top: Array


def printed_numbers(output: str) -> dict[str, tuple[str, ...]]:
    """Return name -> (value, error) as llama-perplexity printed them.

    These are its statistics, or its "Final estimate" as ``PPL``.
    """
    final = FINAL.search(output)
    if final:
        return {"PPL": (final[1], final[2])}
    _, _, block = output.partition("====== Perplexity statistics ======")
    numbers: dict[str, tuple[str, ...]] = {}
    for match in LINE.finditer(block):
        name = " ".join(match["name"].split())
        if match["error"]:
            numbers[name] = (match["value"], match["error"])
        else:
            numbers[name] = (match["value"],)
    return numbers


def name_of(percent: str, unit: str) -> str:
    """Return the name of a percentile's line: ``Median KLD``, ``99.9% KLD``."""
    if percent in NAMES:
        return f"{NAMES[percent]} {unit}"
    return f"{float(percent):.1f}% {unit}"


def percentile(values: Array, percent: str) -> float:
    """Return llama.cpp's percentile of sorted values, linear between two values.

    Fraction and place have the values' dtype, float32 in the tool.  There the place of 99.9 % among
    2,040 values is too high by 6e-5 of the gap between two values (1.1e-5 nats for a gap of 0.18).
    """
    n = len(values)
    dtype = values.dtype.type
    if percent == "50":
        return float(dtype(0.5) * (values[n // 2] + values[(n - 1) // 2]))
    if percent == "min":
        return float(values[0])
    if percent == "max":
        return float(values[-1])
    place = dtype(float(percent) / 100) * dtype(n - 1)
    below = int(place)
    above = min(below + 1, n - 1)
    part = place - np.floor(place)
    return float((1 - part) * values[below] + part * values[above])


def mean_and_error(values: Array, squares: Array) -> tuple[float, float]:
    """Return the mean of values [N] and its error, by their squares."""
    n = len(values)
    mean = float(values.mean(dtype=np.float64))
    variance = float(squares.mean(dtype=np.float64)) - mean**2
    # Rounding may leave equal values a variance below 0.
    return mean, (max(variance, 0.0) / (n - 1)) ** 0.5


def tool_statistics(positions: Positions) -> Numbers:
    """Return llama-perplexity's block of statistics by its formulas; probabilities in percent."""
    n = len(positions.nll)
    squares = positions.delta**2
    change, change_error = mean_and_error(positions.delta, squares)
    mean_square, mean_square_error = mean_and_error(squares, squares.astype(np.float64) ** 2)
    rms = mean_square**0.5
    same = float(positions.same_top.mean())
    numbers = ppl_statistics(positions)
    numbers["Mean KLD"] = mean_and_error(positions.kld, positions.kld**2)
    # Percentiles are of the KLDs in the tool's dtype, float32; their mean is not.
    klds = np.sort(positions.kld.astype(positions.nll.dtype))
    for percent in KLD_PERCENTS:
        numbers[name_of(percent, "KLD")] = (percentile(klds, percent),)
    numbers["Mean Δp"] = (100 * change, 100 * change_error)
    deltas = np.sort(positions.delta)
    for percent in DELTA_PERCENTS:
        numbers[name_of(percent, "Δp")] = (100 * percentile(deltas, percent),)
    # The error of a root is that of its square over twice the root; 50 is half of 100 %.
    numbers["RMS Δp"] = (100 * rms, 50 * mean_square_error / rms)
    numbers["Same top p"] = (100 * same, 100 * (same * (1 - same) / (n - 1)) ** 0.5)
    return numbers


def ppl_statistics(positions: Positions) -> Numbers:
    """Return the lines on both perplexities, which share the covariance of the two losses."""
    n = len(positions.nll)
    loss, loss_error = mean_and_error(positions.nll, positions.nll**2)
    base_loss, base_error = mean_and_error(positions.base, positions.base**2)
    product = float((positions.nll * positions.base).mean(dtype=np.float64))
    covariance = (product - loss * base_loss) / (n - 1)
    log_ratio_error = (loss_error**2 + base_error**2 - 2 * covariance) ** 0.5
    ppl = np.exp(loss)
    base_ppl = np.exp(base_loss)
    ratio = np.exp(loss - base_loss)
    variance = (ppl * loss_error) ** 2 + (base_ppl * base_error) ** 2
    difference_error = (variance - 2 * ppl * base_ppl * covariance) ** 0.5
    return {
        "Mean PPL(Q)": (ppl, ppl * loss_error),
        "Mean PPL(base)": (base_ppl, base_ppl * base_error),
        CORRELATION: (100 * covariance / (loss_error * base_error),),
        "Mean ln(PPL(Q)/PPL(base))": (loss - base_loss, log_ratio_error),
        "Mean PPL(Q)/PPL(base)": (ratio, ratio * log_ratio_error),
        "Mean PPL(Q)-PPL(base)": (ppl - base_ppl, difference_error),
    }


def exact_positions(model: Array, base: Array, targets: Array) -> Positions:
    """Return float64 values from logits float32 [T, V] of both models and the real tokens [T]."""
    rows = np.arange(len(targets))
    q = log_softmax(model)
    p = log_softmax(base)
    ln_q = q[rows, targets]
    ln_p = p[rows, targets]
    kld = (np.exp(p) * (p - q)).sum(1)
    delta = np.exp(ln_q) - np.exp(ln_p)
    return Positions(-ln_q, -ln_p, kld, delta, model.argmax(1) == base.argmax(1))


def log_softmax(logits: Array) -> Array:
    """Return log-probabilities, float64 [T, V]."""
    centred = logits.astype(np.float64) - logits.max(1, keepdims=True)
    log_probabilities: Array = centred - np.log(np.exp(centred).sum(1, keepdims=True))
    return log_probabilities


def expf(values: Array) -> Array:
    """Return C's float32 exp."""
    # numpy's own float32 exp may differ in the last bit.
    return np.exp(values.astype(np.float64)).astype(np.float32)


def log_sum_exp(logits: Array, largest: Array) -> Array:
    """Return ln of the sum of exp(logits - largest) [T, 1], summed in float64, in float32."""
    total = expf(logits - largest).sum(1, dtype=np.float64, keepdims=True)
    log_total: Array = np.log(total).astype(np.float32)
    return log_total


def store16(logits: Array) -> Array:
    """Return the tool's rows of a reference, uint16 [T, 4 + V, V even].

    A row is a scale and a minimum in float32, then one step per token.
    """
    largest = logits.max(1, keepdims=True)
    lowest = largest + np.float32(LEAST_LOG_PROBABILITY)
    least = np.maximum(logits.min(1, keepdims=True), lowest)
    scale = (largest - least) / np.float32(65535)
    rounded = np.rint(np.float32(1) / scale * (logits - least))
    steps = np.where(logits > least, rounded, 0).astype(np.uint16)
    minimum = least - largest - log_sum_exp(logits, largest)
    head = np.concatenate((scale, minimum), 1).view(np.uint16)
    # With an odd vocabulary, the tool's rows have one more step, of 0.
    padding = np.zeros((len(logits), logits.shape[1] % 2), np.uint16)
    return np.concatenate((head, steps, padding), 1)


def through_16_bits(model: Array, store: Array, targets: Array) -> Positions:
    """Return the tool's results for a model's logits float32 [T, V] and a reference's ``store``."""
    rows = np.arange(len(targets))
    head = np.ascontiguousarray(store[:, :4]).view(np.float32)
    steps = store[:, 4 : 4 + model.shape[1]].astype(np.float32)
    p = head[:, :1] * steps + head[:, 1:]
    largest = model.max(1, keepdims=True)
    total = largest + log_sum_exp(model, largest)
    terms = np.where(p > LEAST_LOG_PROBABILITY, expf(p) * (p - model + total), np.float32(0))
    kld = terms.sum(1, dtype=np.float64)
    nll = total[:, 0] - model[rows, targets]
    base = -p[rows, targets]
    delta = expf(-nll) - expf(-base)
    return Positions(nll, base, kld, delta, model.argmax(1) == p.argmax(1))


def joined_positions(parts: Sequence[Positions]) -> Positions:
    """Return the positions of several windows as one."""
    columns = []
    for field in fields(Positions):
        columns.append(np.concatenate([getattr(part, field.name) for part in parts]))
    return Positions(*columns)
