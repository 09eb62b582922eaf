"""Rounding of numbers and of their errors, by hand."""

from __future__ import annotations

import pytest

from compare_q.eval.results import digits


@pytest.mark.parametrize(
    ("stderr", "text"),
    [
        (0.852, "0.85"), (12.34, "12"), (123.4, "120"), (1234.0, "1,200"), (3.55, "3.5"), (9.96, "10"),
        (0.0996, "0.10"), (0.000452, "0.00045"), (0.0001, "0.00010"), (0.0000999, "1.0e-4"), (0.00000446, "4.5e-6"),
        (1e-12, "1.0e-12"),
        (0.0, "0"), (None, ""),
    ],
)  # fmt: skip
def test_errors_have_two_significant_digits(stderr: float | None, text: str) -> None:
    """3.55 is 3.54999... in binary."""
    assert digits.error_text(stderr) == text


@pytest.mark.parametrize(
    ("value", "stderr", "text"),
    [
        (0.29404, 0.00421, "0.2940 ± 0.0042"), (-1.5, 0.123, "-1.50 ± 0.12"),
        (0.00001234, 0.00000446, "0.0000123 ± 0.0000045"),
        (1234.5, 123.4, "1,234 ± 120"), (0.5, 0.0, "0.50000 ± 0"), (0.5, None, "0.50000 ± n/a"),
        (-0.001, 0.12, "0.00 ± 0.12"),
    ],
)  # fmt: skip
def test_a_number_has_the_decimals_of_its_error(value: float, stderr: float | None, text: str) -> None:
    assert digits.number_with_error(value, stderr) == text


def test_sign_and_unit() -> None:
    assert digits.number_with_error(0.5, 0.1, "nats", sign=True) == "+0.50 ± 0.10 nats"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0004, "0.00040"), (0.5, "0.50000"), (1234.5, "1,234.50000"), (-1e-9, "0.00000"), (-2e-5, "-0.00002"),
     (None, "n/a")],
)  # fmt: skip
def test_what_rounding_takes_below_zero_is_no_minus_sign(value: float | None, text: str) -> None:
    assert digits.number_text(value, digits.KLD_DIGITS) == text


def test_values_that_no_column_holds_are_written_with_an_exponent() -> None:
    assert digits.number_text(9_999_999.5, 1) == "9,999,999.5"
    assert digits.number_text(1.23456e129, 4) == "1.2346e+129"
