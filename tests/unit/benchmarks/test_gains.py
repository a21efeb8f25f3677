"""`benchmarks.step.gains` leaves out one row, and prints times with and without it."""

from __future__ import annotations

import click
import pytest

from benchmarks.step import gains, shards
from dptrain.backends.numba.convolution import algorithms
from dptrain.network import get_network


def test_one_row_is_left_out() -> None:
    names = [row.name for row in algorithms.CONVOLUTION]
    with gains.without("numba", "convolution", "GEMM"):
        assert [row.name for row in algorithms.CONVOLUTION] == [n for n in names if n != "GEMM"]
    assert [row.name for row in algorithms.CONVOLUTION] == names


def test_an_unknown_name_lists_those_of_the_table() -> None:
    message = (
        "'gemm' is no algorithm of dense; expected 'skinny GEMM', 'wgmma GEMM', 'general GEMM'"
    )
    with pytest.raises(click.BadParameter, match=message), gains.without("cuda", "dense", "gemm"):
        pass


@pytest.mark.more
def test_a_line_has_both_times() -> None:
    line = gains.gain(get_network("model0"), "numba", "convolution", "GEMM", 1, None, 1)
    assert line.startswith("model0, batch 1: ")
    assert "without GEMM" in line
    assert "1 pairs" in line


@pytest.mark.more
def test_a_line_has_the_cost_of_micro_shards() -> None:
    line = shards.cost(get_network("model0"), "numba", 4, None, 2, 1)
    assert line.startswith("model0, batch 4: ")
    assert ", --shards 1 " in line
    assert ", --shards 2 " in line
