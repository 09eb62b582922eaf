"""Numbers as text: thousands separators, errors with two significant digits, n/a if unknown."""

from __future__ import annotations

import math
from decimal import ROUND_FLOOR, Decimal

from ...backends.base import KldKind

PPL_DIGITS = 4
"""Decimals of PPL."""
KLD_DIGITS = 5
"""Decimals of KLD.  With four decimals a KLD of 0.0004 (an 8-bit format) would show one digit."""
DIGITS_WITHOUT_ERROR = 5
"""Decimals of a number whose error is 0 or not known."""
LARGEST_PLAIN = 1e7
"""Values of this size and above are written as 1.2346e+07."""
SMALLEST_PLAIN = 1e-4
"""Errors below this are written as 4.5e-6: a column of errors of KLD has room for 0.00045."""
AT_LEAST = ">="
"""Before a bound in the table."""


def number_text(value: float | None, digits: int) -> str:
    """Return a number with thousands separators, or n/a; never "-0.0", which a KLD just below 0
    would be.
    """
    if value is None:
        return "n/a"
    if abs(value) < LARGEST_PLAIN:
        return f"{value:z,.{digits}f}"
    return f"{value:.4e}"


def rounded_down(value: float, digits: int) -> float:
    """Return the largest number with ``digits`` decimals that is not above ``value``.

    A bound that was rounded up would not be one.
    """
    return float(Decimal(repr(value)).quantize(Decimal(1).scaleb(-digits), ROUND_FLOOR))


def bound_text(value: float, digits: int) -> str:
    """Return a bound as the table has it: >=0.0431."""
    if abs(value) < LARGEST_PLAIN:
        value = rounded_down(value, digits)
    return AT_LEAST + number_text(value, digits)


def significant_text(kld: float, digits: int, kind: KldKind = "exact") -> str:
    """Return a KLD with ``digits`` significant digits: 0.04317, >=0.04316."""
    if kind != "bound":
        return f"{kld:.{digits}g}"
    if kld:
        kld = rounded_down(kld, digits - 1 - math.floor(math.log10(abs(kld))))
    return f"{AT_LEAST}{kld:.{digits}g}"


def kld_in_words(kld: float, kind: KldKind = "exact") -> str:
    """Return the words for an exact mean KLD below 0, which only rounding causes.

    Empty for other KLDs.
    """
    if kld < 0 and kind == "exact":
        return "0 within rounding"
    return ""


def kld_text(kld: float, kind: KldKind = "exact") -> str:
    """Return a KLD with five decimals, or three significant digits if it is small: 0.03280,
    4.52e-06, at least 0.03280.
    """
    decimals = KLD_DIGITS
    is_small = abs(kld) < SMALLEST_PLAIN and kld != 0
    if is_small:
        decimals = 2 - math.floor(math.log10(abs(kld)))
    if kind == "bound":
        kld = rounded_down(kld, decimals)
    text = number_text(kld, KLD_DIGITS)
    if is_small:
        text = f"{kld:.2e}"
    if kind == "bound":
        return f"at least {text}"
    return text


def error_text(stderr: float | None) -> str:
    """Return an error with two significant digits: 0.85, 12, 120, 0.00045, 4.5e-6; empty if it is
    not known.
    """
    if stderr is None:
        return ""
    if 0 < stderr < SMALLEST_PLAIN:
        # Python writes at least two digits of an exponent: 4.5e-06.
        mantissa, exponent = f"{stderr:.1e}".split("e")
        return f"{mantissa}e{int(exponent)}"
    return f"{two_digits(stderr):,.{decimals_of_error(stderr)}f}"


def decimals_of_error(stderr: float) -> int:
    """Return how many decimals give a number >= 0 two significant digits; 0 for 0 and infinity."""
    rounded = two_digits(stderr)
    # The logarithms of 0 and infinity have no ``floor``.  Rounding makes infinity also of a number
    # just below the largest float.
    if not rounded or not math.isfinite(rounded):
        return 0
    return max(0, 1 - math.floor(math.log10(rounded)))


def two_digits(number: float) -> float:
    """Return a number rounded to two significant digits: 0.0996 is 0.10, 123 is 120."""
    return float(f"{number:.1e}")


def number_with_error(
    value: float, stderr: float | None, unit: str = "", *, sign: bool = False, bound: bool = False
) -> str:
    """Return ``0.2940 ± 0.0042 nats``: a number with the decimals of its error.

    Both are written as 3.00e-11 ± 7.2e-12 if they are below ``SMALLEST_PLAIN``.  ``bound``: ``at
    least 0.2940 ± 0.0042 nats``.
    """
    digits = DIGITS_WITHOUT_ERROR
    if stderr:
        digits = decimals_of_error(stderr)
    if bound:
        lower = number_with_error(rounded_down(value, digits), stderr, unit, sign=sign)
        return f"at least {lower}"
    if stderr and 0 < abs(value) < SMALLEST_PLAIN and stderr < SMALLEST_PLAIN:
        # As many digits as with ``digits`` decimals.
        exponent = math.floor(math.log10(abs(value)))
        return f"{value:.{max(digits + exponent, 0)}e} ± {error_text(stderr)} {unit}".rstrip()
    if sign:
        number = f"{value:+,.{digits}f}"
    else:
        number = f"{value:z,.{digits}f}"
    if stderr is None:
        error = "n/a"
    elif stderr == 0:
        error = error_text(stderr)
    else:
        error = f"{two_digits(stderr):,.{digits}f}"
    return f"{number} ± {error} {unit}".rstrip()
