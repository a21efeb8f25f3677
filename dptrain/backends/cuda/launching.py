"""Starting kernels in which every thread, or every few, compute by themselves."""

from __future__ import annotations

from typing import Any

from dptrain.backends.cuda.device import Function
from dptrain.backends.cuda.gemm_tiles import ceil_div

THREADS = 256
"""Of a block, where every thread computes an element by itself."""


def launch(function: Function, threads: int, *args: Any) -> None:
    """Enqueue a kernel of at least so many threads; none at all where there is nothing to do."""
    if threads:
        function((ceil_div(threads, THREADS), 1, 1), (THREADS, 1, 1), args)


SUM_ELEMENTS, SUM_SHARES = 32, 8
"""Vectors of a block, and threads that share a vector's parts, as ``split_k.cuh`` has them."""


def launch_reduction(function: Function, vectors: int, *args: Any) -> None:
    """Enqueue a kernel that adds up the parts of so many vectors."""
    if vectors:
        grid = ceil_div(vectors, SUM_ELEMENTS), 1, 1
        function(grid, (SUM_ELEMENTS, SUM_SHARES, 1), args)
