"""The memory of a replica: a protocol for host and devices, and host memory."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dptrain.aligned import aligned_zeros
from dptrain.network.layers import Shape


def as_numbers(stored: NDArray[Any]) -> NDArray[Any]:
    """Return activations as floating-point numbers; uint16 is decoded as bfloat16."""
    if stored.dtype != np.uint16:
        return stored
    # A bfloat16 is the upper half of a float32.
    bits: NDArray[Any] = stored.astype(np.uint32) << np.uint32(16)
    return bits.view(np.float32)


class Memory(Protocol):
    """The memory of the host or of a device, in which the arrays of a replica are allocated.

    Arrays of a device can be sliced, reshaped and viewed in another dtype like NumPy's.

    Attributes:
        asynchronous: True if stages return before they have run; `synchronize` waits for them.
        on_gpu: True if arrays are GPU memory that NCCL accepts.
        identity: distinguishes the devices of a machine; empty for the host.
        name: of the device model, such as ``NVIDIA H200``; empty for the host.
        num_devices: number of devices that this process sees; 0 for the host.
    """

    asynchronous: bool
    on_gpu: bool
    identity: str
    name: str
    num_devices: int

    def zeros(self, shape: Shape, dtype: str) -> NDArray[Any]:
        """Allocate an array of zeros."""

    def upload(self, target: NDArray[Any], source: NDArray[Any]) -> None:
        """Copy a host array to `target`, converted to its dtype."""

    def download(self, source: NDArray[Any], out: NDArray[Any] | None = None) -> NDArray[Any]:
        """Return a copy on the host, in `out` if given; host memory returns `source` itself."""

    def host_copy(self, source: NDArray[Any]) -> NDArray[Any]:
        """Return a copy in host memory from which later uploads and downloads are fastest."""

    def begin_download(self, source: NDArray[Any], out: NDArray[Any]) -> Callable[[], None]:
        """Enqueue a copy to the host after all earlier work, next to later work.

        Args:
            source: not written meanwhile.
            out: a `host_copy` of an array of the same shape and dtype.

        Returns:
            A function that waits for the copy, in any thread.
        """

    def copy(self, target: NDArray[Any], source: NDArray[Any]) -> None:
        """Copy one array to another of the same shape and dtype, both in this memory."""

    def product_ms(self, size: int, precision: str) -> list[float] | None:
        """Time products of random square matrices by the vendor's library.

        Returns:
            Milliseconds of several repeats; None if there is no such library.
        """

    def program(self, start: Callable[[], None], *, warm: bool = False) -> Callable[[], None]:
        """Return a function that repeats the work which `start` enqueues, on a GPU as a CUDA graph.

        `start` is called for the first calls only; later calls launch what was captured.

        Args:
            start: enqueues work.
            warm: True if such work was run before with other addresses.
        """

    def times_ms(self, start: Callable[[], None]) -> list[float]:
        """Return milliseconds of the work that `start` starts, of several repeats."""

    def synchronize(self) -> None:
        """Wait until everything that was enqueued has run."""


REPEATS = 7
"""Number of measurements of `Memory.times_ms`."""


class HostMemory:
    """Host memory; see `Memory`."""

    asynchronous = False
    on_gpu = False
    identity = ""
    name = ""
    num_devices = 0

    def zeros(self, shape: Shape, dtype: str) -> NDArray[Any]:
        return aligned_zeros(math.prod(shape), dtype).reshape(shape)

    def upload(self, target: NDArray[Any], source: NDArray[Any]) -> None:
        if target is not source:
            target[...] = source

    def download(self, source: NDArray[Any], out: NDArray[Any] | None = None) -> NDArray[Any]:
        return source

    def host_copy(self, source: NDArray[Any]) -> NDArray[Any]:
        return np.array(source)

    def begin_download(self, source: NDArray[Any], out: NDArray[Any]) -> Callable[[], None]:
        np.copyto(out, source)
        return lambda: None

    def copy(self, target: NDArray[Any], source: NDArray[Any]) -> None:
        np.copyto(target, source)

    def product_ms(self, size: int, precision: str) -> list[float] | None:
        return None

    def program(self, start: Callable[[], None], *, warm: bool = False) -> Callable[[], None]:
        return start

    def times_ms(self, start: Callable[[], None]) -> list[float]:
        begin = time.perf_counter()
        start()
        # All repeats together take 0.1 s; work that takes longer runs once per repeat.
        rounds = max(int(0.1 / REPEATS / max(time.perf_counter() - begin, 1e-7)), 1)
        times = []
        for _ in range(REPEATS):
            begin = time.perf_counter()
            for _ in range(rounds):
                start()
            times.append(1e3 * (time.perf_counter() - begin) / rounds)
        return times

    def synchronize(self) -> None:
        pass


HOST = HostMemory()
