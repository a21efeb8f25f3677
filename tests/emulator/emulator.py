"""Emulator of a CUDA device on the CPU: runs the kernels compiled by g++.

It is slow but strict. It refuses launches that a GPU would refuse or compute wrongly, reports
accesses outside device memory and races between threads, fills shared memory with NaN before each
block, and can run blocks and threads in a random order.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from dptrain.backends.cuda.device.device import (
    SUM_STREAM,
    WEIGHT_STREAM,
    Array,
    Device,
    Extent,
    Function,
    Macro,
)
from dptrain.backends.cuda.device.hardware import DEFAULT_LIMITS
from dptrain.backends.cuda.device.sources import KERNELS
from dptrain.plan.limits import DeviceLimits
from tests.emulator.libraries import Macros, load_library

MOST_THREADS, MOST_BLOCKS_YZ = 1024, 65535

ADDRESSES = np.dtype(np.uint64)
"""Type of arrays of device addresses."""

ALIGNMENT = 256
MEMORY_BYTES = 1 << 30
"""Nominal memory of the device; allocations beyond it do not fail."""


class EmulatorError(Exception):
    """An operation that is invalid or undefined on a GPU."""


class DeviceArray(np.ndarray[Any, Any]):
    """Device memory: the host can take views of it but cannot access its elements."""

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise EmulatorError("the host cannot access device memory: upload or download it")

    def __getitem__(self, key: Any) -> Any:
        part = super().__getitem__(key)
        return part if isinstance(part, DeviceArray) else self._refuse()

    __setitem__ = __array_ufunc__ = __array_function__ = _refuse
    __float__ = __int__ = __bool__ = __iter__ = _refuse
    copy = fill = tolist = astype = _refuse


class Emulator(Device):
    """The CPU as a CUDA device.

    Args:
        seed: seed of a random order of blocks and threads; 0 runs them in order.
        folder: folder whose subfolders contain the kernel sources.
        specializes: see `Device`; each compilation takes a quarter of a second here.
        limits: of the GPU that is emulated; launches that exceed them are refused.
    """

    def __init__(
        self,
        seed: int = 0,
        folder: Path = KERNELS,
        *,
        specializes: bool = False,
        limits: DeviceLimits = DEFAULT_LIMITS,
    ) -> None:
        self.specializes, self.limits = specializes, limits
        self._seed, self._folder = seed, folder
        self._memory: dict[int, int] = {}  # start of each allocation: its end
        self._functions: dict[Any, Function] = {}
        self._is_on_side_stream = False
        self._late: list[Callable[[], None]] = []

    @property
    def free_bytes(self) -> int:
        return MEMORY_BYTES - sum(end - start for start, end in self._memory.items())

    def zeros(self, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        count = int(np.prod(shape, dtype=np.int64))
        nbytes = count * np.dtype(dtype).itemsize
        memory = np.zeros(nbytes + ALIGNMENT, np.uint8)
        offset = -memory.ctypes.data % ALIGNMENT
        part = memory[offset : offset + nbytes]
        return self._known(part, memory).view(dtype).reshape(shape).view(DeviceArray)

    def device_view(self, host: NDArray[Any]) -> Array:
        return self._known(host, host).view(DeviceArray)

    def _known(self, part: NDArray[Any], owner: NDArray[Any]) -> NDArray[Any]:
        """Allow kernels to access an array for the lifetime of its owner."""
        start = part.ctypes.data
        self._memory[start] = start + part.nbytes
        weakref.finalize(owner, self._memory.pop, start).atexit = False
        return part

    def upload(self, target: Array, source: NDArray[Any]) -> None:
        if target.shape != source.shape:
            raise EmulatorError(
                f"cannot upload an array of shape {source.shape} to one of shape {target.shape}"
            )
        _host(target)[...] = source

    def download(self, source: Array, out: NDArray[Any] | None = None) -> NDArray[Any]:
        self.join_streams()
        if out is None:
            return _host(source).copy()
        out[...] = _host(source)
        return out

    @contextmanager
    def side_stream(self, name: str = WEIGHT_STREAM) -> Iterator[None]:
        """Run side work as late as possible, which reveals work that overwrites its memory."""
        if name == SUM_STREAM:
            self.join_streams()
        self._is_on_side_stream = name == WEIGHT_STREAM
        try:
            yield
        finally:
            self._is_on_side_stream = False

    def address(self, array: Array) -> int:
        return int(array.ctypes.data)

    def join_streams(self) -> None:
        late, self._late = self._late, []
        for launch in late:
            launch()

    def function(self, file: str, name: str, **defines: Macro) -> Function:
        key = file, name, tuple(sorted(defines.items()))
        if key not in self._functions:
            self._functions[key] = self._load(file, name, **defines)
        return self._functions[key]

    def synchronize(self) -> None:
        pass

    def _load(self, file: str, name: str, **defines: Macro) -> Function:
        """Return a kernel that is compiled when it is launched: many are bound and never used."""

        def run(grid: Extent, block: Extent, args: Sequence[Any], *, shared_bytes: int = 0) -> None:
            if self._is_on_side_stream:
                now = functools.partial(run, grid, block, args, shared_bytes=shared_bytes)
                self._late.append(now)
                return
            check_launch(grid, block, shared_bytes, self.limits)
            launch, kinds = _kernel(self._folder, file, name, tuple(sorted(defines.items())))
            if len(args) != len(kinds):
                raise EmulatorError(f"{name} takes {len(kinds)} arguments, not {len(args)}")
            values = [
                self._value(name, i, *pair) for i, pair in enumerate(zip(kinds, args, strict=True))
            ]
            pointers = (ctypes.c_void_p * len(values))(*(v.ctypes.data for v in values))
            bounds = [address for ends in self._reachable(args) for address in ends]
            error = launch(
                pointers, (ctypes.c_uint * 6)(*grid, *block), ctypes.c_uint(shared_bytes),
                (ctypes.c_uint64 * len(bounds))(*bounds), len(bounds) // 2,
                ctypes.c_uint64(self._next_seed()),
            )  # fmt: skip
            if error:
                raise EmulatorError(f"{name}: {error.decode()}")

        return run

    def _reachable(self, args: Sequence[Any]) -> list[tuple[int, int]]:
        """Return the start and end of each part of memory that a kernel with `args` may access.

        These are its arguments only, so that accesses beyond the end of a buffer are reported even
        if another buffer follows in the same allocation. Arrays of addresses give access to the
        allocations that they name.
        """
        # The copy, unlike a list of items, cannot start a garbage collection that frees arrays.
        memory = self._memory.copy()
        arrays = [arg for arg in args if isinstance(arg, DeviceArray) and arg.nbytes]
        parts = [(self.address(array), self.address(array) + array.nbytes) for array in arrays]
        named = [a for array in arrays if array.dtype == ADDRESSES for a in _host(array).tolist()]
        parts += [ends for ends in memory.items() if any(ends[0] <= a < ends[1] for a in named)]
        found: list[tuple[int, int]] = []
        for start, end in sorted(parts):
            if not any(first <= start and end <= last for first, last in memory.items()):
                continue
            if found and start < found[-1][1]:
                found[-1] = found[-1][0], max(found[-1][1], end)
            else:
                found.append((start, end))
        return found

    def _next_seed(self) -> int:
        """Return a new seed for each launch."""
        if self._seed:
            self._seed += 1
        return self._seed

    def _value(self, name: str, index: int, kind: str, arg: Any) -> NDArray[Any]:
        """Return the value of a kernel parameter as an array of one element."""
        what = f"argument {index} of {name}"
        if not kind.endswith("*"):
            if not isinstance(arg, np.generic) or _code(arg.dtype) != kind:
                raise EmulatorError(f"{what} must be {kind}, but is {arg!r}")
            return np.array([arg])
        if not isinstance(arg, DeviceArray):
            raise EmulatorError(f"{what} must be {kind}, but is {arg!r}")
        if not arg.flags.c_contiguous:
            raise EmulatorError(f"{what} is not contiguous")
        if _code(arg.dtype) != kind[:-1]:
            raise EmulatorError(f"{what} must be {kind}, but is an array of {arg.dtype}")
        return np.array([arg.ctypes.data], np.uint64)


def _host(array: Array) -> NDArray[Any]:
    if not isinstance(array, DeviceArray) or not array.flags.c_contiguous:
        raise EmulatorError("the array is not contiguous device memory")
    return array.view(np.ndarray)


def _code(dtype: np.dtype[Any]) -> str:
    """Return the type's name as ``emulator::describe`` writes it."""
    return f"{dtype.kind.replace('b', 'u')}{dtype.itemsize}"


def check_launch(grid: Extent, block: Extent, shared_bytes: int, limits: DeviceLimits) -> None:
    """Raise `EmulatorError` for a launch that a GPU with these limits would refuse."""
    if min(*grid, *block) < 1:
        raise EmulatorError(f"grid {grid} of blocks {block} is empty")
    if max(grid[1:]) > MOST_BLOCKS_YZ:
        raise EmulatorError(f"grid {grid} exceeds {MOST_BLOCKS_YZ} blocks in y or z")
    if block[0] * block[1] * block[2] > MOST_THREADS or block[2] > 64:
        raise EmulatorError(f"block {block} has more than {MOST_THREADS} threads, or 64 in z")
    if shared_bytes > limits.shared_bytes:
        raise EmulatorError(
            f"{shared_bytes} bytes of shared memory exceed the limit of {limits.shared_bytes}"
        )


@functools.cache
def _kernel(
    folder: Path, file: str, name: str, defines: Macros
) -> tuple[Callable[..., bytes | None], list[str]]:
    """Return the function that launches a kernel, and the types of the kernel's parameters."""
    library = load_library(folder, file, name, defines)
    launch = getattr(library, f"launch_{name}")
    launch.restype = ctypes.c_char_p
    text = ctypes.create_string_buffer(4096)
    getattr(library, f"signature_{name}")(text)
    return launch, text.value.decode().split()
