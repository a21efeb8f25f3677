"""Kernels on the emulator, called with host arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.emulator.emulator import Emulator

THREADS = 256

SEEDS = (0, 1, 2)
"""Orders in which kernels must give the same bits: threads and blocks in order, and two others."""


def launch(
    file: str,
    name: str,
    threads: int,
    *args: Any,
    seed: int = 0,
    block: int = THREADS,
    **defines: int,
) -> list[NDArray[Any]]:
    """Run a kernel and return what its array arguments hold afterwards.

    Args:
        file, name: of the kernel.
        threads: how many must run, at least.
        args: host arrays, which are uploaded, and NumPy scalars.
        seed: of the order of threads.
        block: threads of a block.
        defines: macros.
    """
    device = Emulator(seed)
    memory = []
    for arg in args:
        if isinstance(arg, np.ndarray):
            array = device.zeros(arg.shape, arg.dtype)
            device.upload(array, arg)
            memory.append(array)
        else:
            memory.append(arg)
    grid = -(-threads // block), 1, 1
    device.function(file, name, **defines)(grid, (block, 1, 1), memory)
    return [device.download(m) for m in memory if not isinstance(m, np.generic)]


def launch_in_every_order(*args: Any, **options: Any) -> list[NDArray[Any]]:
    """`launch`, with the same bits whatever the order."""
    first, *others = (launch(*args, seed=seed, **options) for seed in SEEDS)
    for other in others:
        for one, another in zip(first, other, strict=True):
            np.testing.assert_array_equal(one.view(np.uint8), another.view(np.uint8))
    return first


def ints(*numbers: Any) -> list[np.int32]:
    """As kernels take them."""
    return [np.int32(number) for number in numbers]
