"""Lists, durations and sizes as people write them."""

from __future__ import annotations

import pytest

from dptrain.cli import words
from dptrain.errors import UserError


def test_values() -> None:
    assert words.numbers("64, 2,64", "--x") == (2, 64)
    assert words.numbers("none", "--x", may_be_none=True) == ()
    assert words.names("numba, cuda,numba") == ("numba", "cuda")
    assert [words.seconds(t, "--x") for t in ("1s", "250ms", "2 min", "1.5", ".5h")] == [
        1.0, 0.25, 120.0, 1.5, 1800.0,
    ]  # fmt: skip
    assert [words.nbytes(t, "--x") for t in ("2GB", "1.5gib", "512", "3 kB")] == [
        2 * 10**9, 3 * 2**29, 512, 3000,
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["", "none", "0", "2,-4", "2;4", "1.5", "x"])
def test_no_numbers(text: str) -> None:
    with pytest.raises(UserError, match=r"--x is '.*'; expected whole numbers"):
        words.numbers(text, "--x")


@pytest.mark.parametrize("text", ["", "0s", "1 day", "-1s", "s"])
def test_no_time(text: str) -> None:
    with pytest.raises(UserError, match=r"--x is '.*'; expected a time"):
        words.seconds(text, "--x")


@pytest.mark.parametrize("text", ["0", "2 gigs", "GB"])
def test_no_size(text: str) -> None:
    with pytest.raises(UserError, match=r"--x is '.*'; expected a size"):
        words.nbytes(text, "--x")
