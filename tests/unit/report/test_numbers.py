"""Numbers as people read them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dptrain.numbers import (
    decimals_for,
    fixed,
    flop_rate,
    percent,
    scaled_bytes,
    short,
)


@pytest.mark.parametrize(
    ("value", "decimals", "text"),
    [
        (1234567.8, 0, "1\u202f234\u202f568"),
        (0.0004, 3, "0.000"),
        (-0.0004, 3, "0.000"),
        (-1.25, 1, "−1.2"),
        (math.inf, 2, "∞"),
        (math.nan, 2, "–"),
    ],
)
def test_a_number_is_rounded_and_grouped(value: float, decimals: int, text: str) -> None:
    assert fixed(value, decimals) == text


@given(st.floats(1e-3, 1e9), st.integers(2, 5))
def test_the_largest_of_a_column_has_the_digits_asked_for(value: float, digits: int) -> None:
    text = fixed(value, decimals_for([value, value / 7], digits=digits, most=9))
    plain = text.replace("\u202f", "").replace(".", "").lstrip("0")
    assert len(plain) >= digits
    shown = float(text.replace("\u202f", ""))
    # Half of the last digit asked for, of a number that may begin with 1.
    assert math.isclose(shown, value, rel_tol=0.51 * 10 ** (1 - digits))


def test_units_are_those_of_the_tables() -> None:
    assert scaled_bytes(824_400) == "824 kB"
    assert scaled_bytes(137_438_953_472) == "137 GB"
    assert percent(0.1234) == "12.3%"
    assert short(0.00123456) == "0.00123"
    assert short(0.0) == "0"
    assert flop_rate(26.5432) == "26.5 GFLOP/s"
    assert flop_rate(55_576.0) == "55.6 TFLOP/s"
