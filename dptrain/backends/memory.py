"""Memory of a replica: aligned for vectors, and seen by name in the layouts that users know."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dptrain.errors import UserError
from dptrain.network.layers import Shape
from dptrain.plan.flat import FlatLayout, Slot


def aligned_zeros(size: int, dtype: str) -> NDArray[Any]:
    """Zeros that start on a cache line, as vector kernels want it; NumPy aligns to 16 bytes."""
    nbytes = size * np.dtype(dtype).itemsize
    memory = np.zeros(nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + nbytes].view(dtype)


def as_numbers(stored: NDArray[Any]) -> NDArray[Any]:
    """Activations as numbers: uint16 holds the bits of bfloat16, the upper half of a float32."""
    if stored.dtype != np.uint16:
        return stored
    bits: NDArray[Any] = stored.astype(np.uint32) << np.uint32(16)
    return bits.view(np.float32)


class Memory(Protocol):
    """Where the arrays of a replica lie: the host's memory, or that of a device.

    Arrays of a device can be sliced, reshaped and seen in another dtype as NumPy's can.

    Attributes:
        asynchronous: stages return before they are done; `synchronize` waits for them.
        on_gpu: arrays are memory of a GPU, as NCCL takes it.
        identity: what tells the device from others of this machine; empty for the host.
        name: of the kind of device, such as ``NVIDIA H200``; empty for the host.
    """

    asynchronous: bool
    on_gpu: bool
    identity: str
    name: str

    def zeros(self, shape: Shape, dtype: str) -> NDArray[Any]:
        """A new array of zeros."""

    def upload(self, target: NDArray[Any], source: NDArray[Any]) -> None:
        """Copy an array of the host to `target`, converted to its dtype."""

    def download(self, source: NDArray[Any], out: NDArray[Any] | None = None) -> NDArray[Any]:
        """A copy on the host, in `out` where that is given; `source` itself if it lies there."""

    def host_copy(self, source: NDArray[Any]) -> NDArray[Any]:
        """`download` to memory that later ones, and uploads from it, reach fastest."""

    def copy(self, target: NDArray[Any], source: NDArray[Any]) -> None:
        """Copy one of its arrays to another of the same shape and dtype."""

    def product_ms(self, size: int, precision: str) -> list[float] | None:
        """Milliseconds, several times over, of a product by a library of the processor's maker.

        Of random square matrices. None where there is none; nothing is trained with it.
        """

    def program(self, start: Callable[[], None], *, warm: bool = False) -> Callable[[], None]:
        """What starts, at each call, the very work that `start` starts.

        `start` may be called at the first calls only, and no more than started again later.

        Args:
            start: enqueues work.
            warm: such work was done before, but for where it reads and writes.
        """

    def times_ms(self, start: Callable[[], None]) -> list[float]:
        """Milliseconds that the work takes which `start` starts, several times over."""

    def synchronize(self) -> None:
        """Wait until every stage that was started is done."""


REPEATS = 7
"""How often `Memory.times_ms` times."""


class HostMemory:
    """The host's own."""

    asynchronous = False
    on_gpu = False
    identity = ""
    name = ""

    def zeros(self, shape: Shape, dtype: str) -> NDArray[Any]:
        return aligned_zeros(math.prod(shape), dtype).reshape(shape)

    def upload(self, target: NDArray[Any], source: NDArray[Any]) -> None:
        if target is not source:
            target[...] = source

    def download(self, source: NDArray[Any], out: NDArray[Any] | None = None) -> NDArray[Any]:
        return source

    def host_copy(self, source: NDArray[Any]) -> NDArray[Any]:
        return source

    def copy(self, target: NDArray[Any], source: NDArray[Any]) -> None:
        np.copyto(target, source)

    def product_ms(self, size: int, precision: str) -> list[float] | None:
        return None

    def program(self, start: Callable[[], None], *, warm: bool = False) -> Callable[[], None]:
        return start

    def times_ms(self, start: Callable[[], None]) -> list[float]:
        begin = time.perf_counter()
        start()
        # A tenth of a second in all; what takes longer is run once each time.
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


class NamedArrays(Mapping[str, NDArray[Any]]):
    """Parameters (or gradients, or optimizer state) by name, in canonical layout.

    Reading gives a copy; assigning writes through to the replica.

    Example:
        >>> replica.parameters["conv1.weight"].shape            # doctest: +SKIP
        (16, 3, 3, 3)
        >>> replica.parameters["conv1.bias"] = np.zeros(16)     # doctest: +SKIP
    """

    def __init__(self, layout: FlatLayout, flat: NDArray[Any], memory: Memory = HOST) -> None:
        self._layout, self._flat, self._memory = layout, flat, memory

    def _slot(self, name: str) -> Slot:
        try:
            return self._layout[name]
        except KeyError:
            names = ", ".join(self) or "none"
            raise KeyError(f"no parameter {name!r}; this network has {names}") from None

    def __getitem__(self, name: str) -> NDArray[Any]:
        slot = self._slot(name)
        stored = self._memory.download(self._flat[slot.start : slot.stop])
        canonical: NDArray[Any] = np.array(_canonical(slot, stored), order="C", copy=True)
        return canonical.reshape(slot.parameter.shape)

    def __setitem__(self, name: str, value: ArrayLike) -> None:
        slot = self._slot(name)
        array = np.asarray(value)
        if array.shape != slot.parameter.shape:
            raise UserError(f"{name} has shape {slot.parameter.shape}, got {array.shape}")

        def write(target: NDArray[Any]) -> None:
            target[...] = array.reshape(slot.storage.view)

        self.fill(name, write)

    def fill(self, name: str, write: Callable[[NDArray[Any]], None]) -> None:
        """Have `write` fill memory of the host, seen in canonical order and `Storage.view`.

        Where the array lies in host memory, that is the array itself: nothing is copied.
        """
        slot = self._slot(name)
        flat = self._flat[slot.start : slot.stop]
        stored = self._memory.download(flat)
        write(_canonical(slot, stored))
        self._memory.upload(flat, stored)

    def __iter__(self) -> Iterator[str]:
        return (slot.name for slot in sorted(self._layout.slots, key=lambda s: s.node.index))

    def __len__(self) -> int:
        return len(self._layout.slots)


def _canonical(slot: Slot, stored: NDArray[Any]) -> NDArray[Any]:
    """A view of a parameter's memory in canonical order, of shape `Storage.view`."""
    return np.transpose(stored.reshape(slot.storage.shape), np.argsort(slot.storage.axes))
