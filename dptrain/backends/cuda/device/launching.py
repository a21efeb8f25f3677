"""Launch grids of elementwise kernels and of reductions."""

from __future__ import annotations

from typing import Any

from dptrain.backends.cuda.dense.gemm_tiles import ceil_div
from dptrain.backends.cuda.device.device import Function

THREADS = 256
"""Threads of a block of an elementwise kernel."""

REDUCE_VECTORS, REDUCE_THREADS = 32, 8
"""Vectors of a reduction block, and threads that share the parts of one vector; both are constants
of ``split_k.cuh``."""


def launch(function: Function, threads: int, *args: Any) -> None:
    """Enqueue a kernel with at least `threads` threads, or nothing if `threads` is 0."""
    if threads:
        function((ceil_div(threads, THREADS), 1, 1), (THREADS, 1, 1), args)


def launch_reduction(function: Function, vectors: int, *args: Any) -> None:
    """Enqueue a kernel that adds the split-K parts of `vectors` vectors."""
    if vectors:
        grid = ceil_div(vectors, REDUCE_VECTORS), 1, 1
        function(grid, (REDUCE_VECTORS, REDUCE_THREADS, 1), args)
