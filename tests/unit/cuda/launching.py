"""Runs kernels on the emulator with host arrays."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptrain.backends.memory import as_numbers
from tests.emulator.emulator import Emulator

THREADS = 256

SEEDS = (0, 1, 2)
"""Seeds of execution orders for which kernels must compute the same bits; 0 is in order."""


def launch(
    file: str,
    name: str,
    threads: int,
    *args: Any,
    seed: int = 0,
    block: int = THREADS,
    shared_bytes: int = 0,
    columns: int = 1,
    **defines: int,
) -> list[NDArray[Any]]:
    """Run a kernel and return its array arguments afterwards.

    Args:
        file, name: source file and name of the kernel.
        threads: smallest number of threads.
        args: host arrays, which are uploaded, and NumPy scalars.
        seed: seed of the execution order.
        block: threads per block.
        shared_bytes: bytes of dynamic shared memory.
        columns: number of blocks in y.
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
    grid = -(-threads // block), columns, 1
    device.function(file, name, **defines)(grid, (block, 1, 1), memory, shared_bytes=shared_bytes)
    return [device.download(m) for m in memory if not isinstance(m, np.generic)]


def launch_in_every_order(*args: Any, **options: Any) -> list[NDArray[Any]]:
    """Run `launch` for all `SEEDS`; the results must be bit-identical."""
    first, *others = (launch(*args, seed=seed, **options) for seed in SEEDS)
    for other in others:
        for one, another in zip(first, other, strict=True):
            np.testing.assert_array_equal(one.view(np.uint8), another.view(np.uint8))
    return first


def ints(*numbers: Any) -> list[np.int32]:
    """Return the numbers as kernel arguments."""
    return [np.int32(number) for number in numbers]


@dataclass(frozen=True)
class Kept:
    """Storage format of activations.

    Attributes:
        precision: value of the macro PRECISION.
        unit: largest relative error of rounding to this format.
        widths: vector widths.
    """

    precision: int
    unit: float
    widths: tuple[int, int]

    def store(self, x: NDArray[Any]) -> NDArray[Any]:
        """Convert to the storage format: float32, or bfloat16 bits, rounded to nearest even."""
        x = np.asarray(x, np.float32)
        if self.precision == 0:
            return x
        bits = x.view(np.uint32)
        rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        return np.where(np.isnan(x), 0x7FFF, rounded).astype(np.uint16)

    def round(self, x: NDArray[Any]) -> NDArray[Any]:
        """Round to the storage format, as float32."""
        return as_numbers(self.store(x))

    def vectors(self, length: int) -> Iterator[int]:
        """Return the vector widths that divide rows of this length."""
        return (width for width in self.widths if length % width == 0)


FP32 = Kept(0, 0.0, (1, 4))
BF16 = Kept(2, 2.0**-8, (1, 8))
