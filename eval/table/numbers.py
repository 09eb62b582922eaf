"""Numbers as text: with thousands separators, errors with two significant digits, n/a if they are
not known.
"""

from __future__ import annotations

import math

PPL_DIGITS, KLD_DIGITS = 4, 5
"""Decimals of PPL and of KLD.  With four decimals a KLD of 0.0004 (an 8-bit format) would show one
digit."""
LARGEST = 1e7
"""Values of this size and above are written as 1.2346e+07."""
SMALLEST = 1e-4
"""Errors below this are written as 4.5e-6: a column of errors of KLD has room for 0.00045."""


def number_text(value: float | None, digits: int) -> str:
    """Return a number with thousands separators, or n/a; never "-0.0", which a KLD just below 0
    would be.
    """
    if value is None:
        return "n/a"
    return f"{value:z,.{digits}f}" if abs(value) < LARGEST else f"{value:.4e}"


def kld_in_words(kld: float) -> str:
    """Return the words for a mean KLD below 0, which only rounding causes; empty for any other KLD."""
    return "0 within rounding" if kld < 0 else ""


def kld_text(kld: float) -> str:
    """Return a KLD with five decimals, or three significant digits if it is small: 0.03280,
    4.52e-06.
    """
    return number_text(kld, KLD_DIGITS) if kld >= SMALLEST or kld == 0 else f"{kld:.2e}"


def error_text(stderr: float | None) -> str:
    """Return an error with two significant digits: 0.85, 12, 120, 0.00045, 4.5e-6; empty if it is
    not known.
    """
    if stderr is None:
        return ""
    if 0 < stderr < SMALLEST:
        mantissa, exponent = f"{stderr:.1e}".split("e")
        return f"{mantissa}e{int(exponent)}"
    return f"{two_digits(stderr):,.{decimals_of_error(stderr)}f}"


def decimals_of_error(stderr: float) -> int:
    """Return how many decimals give a number >= 0 two significant digits; 0 for 0 and infinity."""
    rounded = two_digits(stderr)  # infinity also for a number just below the largest one
    if not rounded or not math.isfinite(rounded):
        return 0
    return max(0, 1 - math.floor(math.log10(rounded)))


def two_digits(stderr: float) -> float:
    """Return a number rounded to two significant digits: 0.0996 is 0.10, 123 is 120."""
    return float(f"{stderr:.1e}")


def number_with_error(
    value: float, stderr: float | None, unit: str = "", *, sign: bool = False
) -> str:
    """Return ``0.2940 ± 0.0042 nats``: a number with the decimals of its error, five if that is 0
    or not known.
    """
    digits = decimals_of_error(stderr) if stderr else 5
    shown = f"{value:+,.{digits}f}" if sign else f"{value:z,.{digits}f}"
    off = f"{two_digits(stderr):,.{digits}f}" if stderr else error_text(stderr) or "n/a"
    return f"{shown} ± {off} {unit}".rstrip()
