"""Numbers as text."""

from __future__ import annotations

import pytest

from compare_q.eval.table.numbers import error_text, number_with_error


@pytest.mark.parametrize(
    ("stderr", "text"),
    [
        (0.852, "0.85"),
        (12.34, "12"),
        (123.4, "120"),
        (1234.0, "1,200"),
        (3.55, "3.5"),
        (9.96, "10"),
        (0.0996, "0.10"),
        (0.000452, "0.00045"),
        (0.0001, "0.00010"),
        (0.0000999, "1.0e-4"),
        (0.00000446, "4.5e-6"),
        (1e-12, "1.0e-12"),
        (0.0, "0"),
        (None, ""),
        # Rounded to two digits it is 1.8e308, which is infinite.
        (1.7976931348623157e308, "inf"),
    ],
)
def test_errors_have_two_significant_digits(stderr: float | None, text: str) -> None:
    """3.55 is 3.54999... in binary, and is therefore rounded down."""
    assert error_text(stderr) == text


@pytest.mark.parametrize(
    ("value", "stderr", "bound", "text"),
    [
        (0.294, 0.0042, False, "0.2940 ± 0.0042"),
        (3.0e-11, 7.2e-12, False, "3.00e-11 ± 7.2e-12"),
        (-3.0e-11, 7.2e-12, False, "-3.00e-11 ± 7.2e-12"),
        # A bound is never rounded up.
        (5.6789e-5, 1.2e-6, True, "at least 5.67e-05 ± 1.2e-6"),
        (0.00123, 4.5e-6, False, "0.0012300 ± 0.0000045"),
        (0.0, 4.5e-6, False, "0.0000000 ± 0.0000045"),
    ],
)
def test_a_small_number_has_the_digits_of_its_error(
    value: float, stderr: float, bound: bool, text: str
) -> None:
    assert number_with_error(value, stderr, bound=bound) == text
