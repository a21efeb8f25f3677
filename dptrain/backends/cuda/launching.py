"""Starting kernels in which every thread computes by itself."""

from __future__ import annotations

from typing import Any

from dptrain.backends.cuda.device import Function
from dptrain.backends.cuda.tiles import ceil_div

THREADS = 256
"""Of a block, where every thread computes an element by itself."""


def launch(function: Function, threads: int, *args: Any) -> None:
    """Enqueue a kernel of at least so many threads; none at all where there is nothing to do."""
    if threads:
        function((ceil_div(threads, THREADS), 1, 1), (THREADS, 1, 1), args)
