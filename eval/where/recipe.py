"""Recipes: which parts of a quantized model to keep in more bits, for a KLD or a size.

Parts are kept in the order of their share per added bit, which is greedy: a prefix of this order
need not be the best choice for its size.  Only parts whose share is above 0 for certain take part.

With 16 bits, a part is as in the reference, and the KLD that is left can be measured.  With 8 bits
it is a forecast.  The error of uniform rounding with the step D has the variance D^2 / 12 (Bennett,
"Spectra of quantized signals", Bell System Technical Journal, 1948), and each bit more halves D.
KLD is quadratic in small errors of the weights, so that the share of weights in b bits falls to
share * 4 ** -(8 - b).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from ...backends.common.errors import InputError
from ...backends.common.message_text import nearest
from .results import Module, PartRow

Key = Literal["kld", "bpw"]
KEYS: tuple[str, ...] = get_args(Key)
FULL_BITS = 16
"""``--keep-bits`` that keeps a part as in the reference."""
FEWER_BITS = 8
FEWEST_POINTS = (1, 2, 3, 5, 8)
"""Numbers of parts that are restored together if there is no recipe."""
INTEGER = re.compile(r"int(\d+)\b")
"""The beginning of the format of integer weights; its group is their number of bits."""
FLOAT_4 = re.compile(r"\w*fp4\b")
"""The beginning of the format of weights in 4-bit floating point, such as nvfp4 and mxfp4."""
ROUNDING = 1e-9
"""Bits per weight by which a recipe may be above a target."""


@dataclass(frozen=True)
class Target:
    """A value of ``--recipe``: at most ``value`` nats (kld), or bits per weight (bpw)."""

    key: str
    value: float

    def __str__(self) -> str:
        return f"{self.key}={self.value:.10g}"


@dataclass(frozen=True)
class KeptPart:
    """A part that is kept in more bits.

    Attributes:
        bits: that are added, for all weights of the part with their scales.
        fraction: of the share that vanishes, above 0; 1 if the part is as in the reference.
    """

    row: PartRow
    bits: float
    fraction: float

    @property
    def gain(self) -> float:
        """KLD that vanishes according to the share alone, nats."""
        assert self.row.share is not None
        return self.row.share.value * self.fraction

    @property
    def gain_per_bit(self) -> float:
        """KLD that vanishes per added bit; infinite if no bits are added."""
        if self.bits <= 0:
            return math.inf
        return self.gain / self.bits


def target_of(word: str) -> Target:
    """Return the target of a value of ``--recipe``; InputError for a wrong one."""
    key, _, text = word.partition("=")
    key = key.strip()
    if key not in KEYS:
        raise InputError(
            f"{word!r}: expected kld=NATS or bpw=BITS, such as kld=0.1{nearest(key, KEYS)}"
        )
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    # False for NaN and for infinity.
    if not 0 < value < math.inf:
        raise InputError(f"{word!r}: expected a number above 0 after {key}=")
    return Target(key, value)


def check_targets(targets: Sequence[Target], modules: Sequence[Module]) -> None:
    """InputError for a size below that of the quantized model; ``modules``: all of the model."""
    n_weights = sum(module.n_weights for module in modules)
    bits = sum(module.bits for module in modules)
    for target in targets:
        if target.key == "bpw" and n_weights and bits / n_weights > target.value + ROUNDING:
            raise InputError(
                f"--recipe: {target}: the quantized modules have {bits / n_weights:.4g} bits per "
                "weight already, and a recipe only adds bits"
            )


def greedy_order(
    rows: Sequence[PartRow], modules: Sequence[Module], keep_bits: int
) -> tuple[KeptPart, ...]:
    """Return the parts in the order in which they are kept, the most KLD per added bit first.

    ``modules``: all of the model.  With 8 bits, parts without a forecast are left out.
    """
    formats = {module.name: module.weights for module in modules}
    parts = []
    for row in rows:
        # A share above 0 that may be 0 could make the model larger for nothing.
        if row.share is None or row.share.low is None or row.share.low <= 0:
            continue
        part = kept_part(row, formats, keep_bits)
        if part is not None:
            parts.append(part)
    return tuple(sorted(parts, key=lambda part: -part.gain_per_bit))


def kept_part(row: PartRow, formats: Mapping[str, str], keep_bits: int) -> KeptPart | None:
    """Return a part that is kept in 16 bits or 8; None without a forecast.

    ``formats``: name of each module -> format of its quantized weights.
    """
    if keep_bits == FULL_BITS:
        return KeptPart(row, row.reference_bits - row.bits, 1.0)
    numbers = {bits_of_format(formats[name]) for name in row.modules}
    # The share cannot be divided among modules of several formats.
    if len(numbers) > 1:
        return None
    number = numbers.pop()
    if number is None or number >= FEWER_BITS:
        return None
    more = FEWER_BITS - number
    return KeptPart(row, float(more * row.n_weights), 1 - 4.0**-more)


def bits_of_format(weights: str) -> int | None:
    """Return the number of bits of a weight without scales: 4 for "int4 g128" and "nvfp4".

    None if the format has no such number.
    """
    match = INTEGER.match(weights)
    if match is not None:
        return int(match[1])
    if is_float(weights):
        return 4
    return None


def is_float(weights: str) -> bool:
    """Return True for weights in 4-bit floating point, such as nvfp4."""
    return FLOAT_4.match(weights) is not None


def spread_counts(n_parts: int, *, has_recipes: bool) -> list[int]:
    """Return the numbers of parts that are restored together first, the smallest first.

    1, 2, 3, 5, 8, and with recipes further Fibonacci numbers up to all parts: 11 numbers for 200
    parts, because the first parts change the KLD most.
    """
    if not has_recipes:
        return [count for count in FEWEST_POINTS if count <= n_parts]
    counts = []
    count = 1
    following = 2
    while count < n_parts:
        counts.append(count)
        next_count = count + following
        count = following
        following = next_count
    if n_parts:
        counts.append(n_parts)
    return counts


def shortest_prefix(
    counts: Sequence[int], kld_of: Callable[[int], float | None], value: float
) -> int | None:
    """Return the smallest number of parts with which the KLD is at most ``value``; None: none.

    The first of ``counts`` (in rising order, from 0) that reaches the value is searched, and then
    bisected with the one before it.  The KLD with one part less is above the value, or unknown.
    """

    def reaches(count: int) -> bool:
        kld = kld_of(count)
        return kld is not None and kld <= value

    too_few = -1
    for count in counts:
        if reaches(count):
            break
        too_few = count
    else:
        return None
    enough = count
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if reaches(middle):
            enough = middle
        else:
            too_few = middle
    return enough


def longest_prefix(bits: Sequence[float], value: float) -> int:
    """Return the largest number of parts with at most ``value`` bits.

    ``bits``: with 0, 1, 2, ... parts kept.
    """
    longest = 0
    for count, total in enumerate(bits):
        if total <= value:
            longest = count
        else:
            break
    return longest
