"""Lists, times and sizes in the values of flags."""

from __future__ import annotations

import pytest

from dptrain.cli import parsing
from dptrain.errors import UserError


def test_values() -> None:
    assert parsing.parse_numbers("64, 2,64", "--x") == (2, 64)
    assert parsing.parse_numbers("none", "--x", may_be_none=True) == ()
    assert parsing.parse_names("numba, cuda,numba") == ("numba", "cuda")
    assert [parsing.parse_seconds(t, "--x") for t in ("1s", "250ms", "2 min", "1.5", ".5h")] == [
        1.0, 0.25, 120.0, 1.5, 1800.0,
    ]  # fmt: skip
    assert [parsing.parse_bytes(t, "--x") for t in ("2GB", "1.5gib", "512", "3 kB")] == [
        2 * 10**9, 3 * 2**29, 512, 3000,
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["", "none", "0", "2,-4", "2;4", "1.5", "x"])
def test_no_numbers(text: str) -> None:
    with pytest.raises(UserError, match=r"--x is '.*'; expected whole numbers"):
        parsing.parse_numbers(text, "--x")


@pytest.mark.parametrize("text", ["", "0s", "1 day", "-1s", "s"])
def test_no_time(text: str) -> None:
    with pytest.raises(UserError, match=r"--x is '.*'; expected a time"):
        parsing.parse_seconds(text, "--x")


@pytest.mark.parametrize("text", ["0", "2 gigs", "GB"])
def test_no_size(text: str) -> None:
    with pytest.raises(UserError, match=r"--x is '.*'; expected a size"):
        parsing.parse_bytes(text, "--x")
