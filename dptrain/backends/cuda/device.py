"""What the CUDA backend knows of the world: memory, and kernels that run on it.

A device runs what it is given in order, and returns before it is done; `download` and
`synchronize` wait. `gpu.GPU` is one; another, which the tests supply, runs the same kernels on the
CPU.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from dptrain.network.layers import Shape

KERNELS = Path(__file__).parents[2] / "kernels"
"""Folder of the sources of kernels."""

Array = Any
"""Memory on a device: contiguous, with ``shape``, ``dtype``, ``size``, ``nbytes``, ``reshape``,
``view`` and slices of its first dimension, as NumPy has them. Its values are on the device: only
kernels, `Device.upload` and `Device.download` reach them."""

Extent = tuple[int, int, int]
"""Blocks of a grid, or threads of a block, in x, y and z."""


class Function(Protocol):
    """A kernel, compiled."""

    def __call__(
        self,
        grid: Extent,
        block: Extent,
        args: Sequence[Array | np.generic],
        *,
        shared_bytes: int = 0,
    ) -> None:
        """Enqueue the kernel.

        Args:
            grid, block: extents, at least 1 in every direction.
            args: one for each of the kernel's parameters: an array for a pointer, a NumPy scalar of
                the parameter's very type for a number.
            shared_bytes: of what the kernel declares ``extern __shared__``.
        """


class Device(ABC):
    """Memory and kernels of one accelerator.

    Attributes:
        asynchronous: that it returns before it is done, as `Memory` has it.
        identity: what tells it from the other devices of this machine.
        specializes: whether kernels are to be compiled for each layer, which makes them faster and
            costs a compilation.
    """

    asynchronous: bool = True
    identity: str = ""
    specializes: bool = True

    @abstractmethod
    def zeros(self, shape: Shape, dtype: DTypeLike) -> Array:
        """Memory that holds zeros, aligned to at least 256 bytes."""

    @abstractmethod
    def upload(self, target: Array, source: NDArray[Any]) -> None:
        """Copy an array of the same shape from the host, converted to the target's dtype.

        The source may be changed as soon as this returns.
        """

    @abstractmethod
    def download(self, source: Array) -> NDArray[Any]:
        """A copy on the host, taken when everything enqueued before is done."""

    @abstractmethod
    def function(self, file: str, name: str, **defines: int) -> Function:
        """A kernel, compiled for this device unless it has been before.

        Args:
            file: source in the folder of kernels, such as ``pooling.cu``.
            name: of an ``extern "C" __global__`` function in it.
            defines: macros that the source is compiled with.
        """

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until everything enqueued is done."""
