"""The device that the CUDA backend uses: memory, streams, and kernels that run on it.

A device runs what is enqueued in order, and calls return before it has run; `Device.download` and
`Device.synchronize` wait. What is enqueued within `Device.side_stream` may overlap with what
follows, until `Device.join_streams`. `gpu.GPU` is a device; the tests have another, which runs the
same kernels on the CPU.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from dptrain.backends.cuda.device.hardware import DEFAULT_LIMITS
from dptrain.backends.cuda.device.tensor_maps import PatchGrid
from dptrain.errors import UserError
from dptrain.network.layers import Shape
from dptrain.plan.limits import DeviceLimits

Array = Any
"""Device memory: contiguous, with ``shape``, ``dtype``, ``size``, ``nbytes``, ``reshape``, ``view``
and slices of the first dimension like NumPy's. Its values are reached by kernels,
`Device.upload` and `Device.download` only."""

Macro = int | str
"""Value of a macro that a source is compiled with; text is code without line breaks."""

Extent = tuple[int, int, int]
"""Blocks of a grid, or threads of a block, in x, y and z."""


class Function(Protocol):
    """A compiled kernel."""

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
            args: one for each parameter of the kernel: an array for a pointer, or a NumPy scalar
                of exactly the parameter's type.
            shared_bytes: size of the dynamic shared memory (``extern __shared__``).
        """


DIRECT_READ_BYTES = 2 << 10
"""Kernels read messages up to this size, about 50 crop windows, directly from host memory. A
separate copy takes the host 7 µs of a step's 45 µs (one H200), and 10 µs as part of a graph."""

WEIGHT_STREAM, SUM_STREAM, LOAD_STREAM = "weights", "sums", "loads"
"""Streams of a device next to its main one: weight gradients and early updates, sums over the
ranks, and the minibatch of the next step."""


class StagingBuffer:
    """Staging slots, through which messages reach a device, and loss sums come back.

    The host writes a message to a slot of host memory and submits it. Several messages may be in
    flight, one per slot. Short messages and the loss sums pass directly between host memory and
    kernels: a copy engine would have to wait for the kernels, and the kernels for the copy.

    Args:
        device: receives the messages.
        memory: uint8 (slots, bytes) on the device.
        sums: float32, on the device: what comes back.

    Attributes:
        host: the slots in host memory, uint8 (bytes,) each.
        slot: index of the slot that is open, or was submitted last.
    """

    def __init__(self, device: Device, memory: Array, sums: Array) -> None:
        self._device, self._sums = device, sums
        self._num_slots, nbytes = memory.shape  # Of steps that are not in series.
        self._memory: list[Array] = [memory[slot] for slot in range(self._num_slots)]
        self._uploads_series = False
        self.host: list[NDArray[np.uint8]] = []
        self._host_view: list[Array] = []
        self._host_results: list[tuple[NDArray[np.float32], NDArray[np.int64]]] = []
        self._host_results_view: list[tuple[Array, Array]] = []
        self._copy_sums = device.function("unpack_batch.cu", "copy_loss_sums")
        self.slot = 0
        self._nbytes = 0
        for _ in range(self._num_slots):
            self._add_slot(nbytes)

    def _add_slot(self, nbytes: int) -> None:
        """Allocate the host's memory of a slot."""
        device = self._device
        self.host.append(device.pinned_memory(nbytes))
        self._host_view.append(device.device_view(self.host[-1]))
        sums = device.pinned_memory(self._sums.nbytes).view(np.float32)
        results = sums, device.pinned_memory(8).view(np.int64)
        self._host_results.append(results)
        self._host_results_view.append((device.device_view(sums), device.device_view(results[1])))

    def add_slots(self, count: int, nbytes: int, *, uploads: bool) -> range:
        """Make slots for steps in series, all of which upload messages or none.

        Args:
            count: number of slots.
            nbytes: size of their messages.
            uploads: True copies messages to the device, as part of the work that reads them;
                otherwise kernels read them from host memory.

        Returns:
            The slots.
        """
        first = len(self.host)
        assert first == self._num_slots or uploads == self._uploads_series
        self._uploads_series = uploads
        if uploads:
            memory = self._device.zeros((count, nbytes), "uint8")
            self._memory += [memory[slot] for slot in range(count)]
        for _ in range(count):
            self._add_slot(nbytes)
        return range(first, len(self.host))

    def open_slot(self, slot: int | None = None) -> int:
        """Return the index of a slot after all work that reads its message has run.

        Args:
            slot: the slot; None for the one after the last.
        """
        self.slot = (self.slot + 1) % self._num_slots if slot is None else slot
        return self.slot

    def submit(self, nbytes: int) -> None:
        """Submit the first `nbytes` bytes of the open slot as a message."""
        self._nbytes = nbytes
        if self._is_uploaded and self.slot < self._num_slots:
            self._upload()

    def move_message(self, source: int, slot: int) -> None:
        """Submit the message of a slot of a series, which has the size of the last one, in another.

        Args:
            source: the slot of the series.
            slot: the other slot, which is opened.
        """
        nbytes = self._nbytes
        self.open_slot(slot)
        self.host[slot][:nbytes] = self.host[source][:nbytes]
        self.submit(nbytes)

    def enqueue_series_upload(self) -> None:
        """Enqueue the copy of the message of a step in series, if there is one."""
        if self._uploads_series:
            self._copy_message()

    @property
    def _is_uploaded(self) -> bool:
        """True if the message is copied to the device before kernels read it."""
        if self.slot >= self._num_slots:
            return self._uploads_series
        return self._nbytes > DIRECT_READ_BYTES

    @property
    def upload_ms(self) -> float:
        """Mean time of `_upload`, of those that were timed."""
        return 0.0

    def _upload(self) -> None:
        """Enqueue a copy of the message to the device."""
        self._copy_message()

    def _copy_message(self) -> None:
        span = slice(self._nbytes)
        self._device.upload(self._memory[self.slot][span], self.host[self.slot][span])

    @property
    def message(self) -> Array:
        """The message, for kernels that are enqueued after `submit`.

        A program that contains such a kernel is valid for this slot only. The same is true of
        `enqueue_sums_copy`.
        """
        return (self._memory if self._is_uploaded else self._host_view)[self.slot]

    @contextmanager
    def load_stream(self, free_after: int | None) -> Iterator[None]:
        """Enqueue the work of the context, which unpacks the message, next to earlier work.

        All work that is enqueued afterwards waits for it.

        Args:
            free_after: slot of the step that is the last one to read the memory that is
                overwritten; None if it may be any, so that the work waits for all earlier work.
        """
        yield

    def enqueue_sums_copy(self) -> None:
        """Enqueue a kernel that copies the sums, and the time, to host memory."""
        with self._device.side_stream():
            sums, time = self._host_results_view[self.slot]
            self._copy_sums(
                (1, 1, 1), (32, 1, 1), [self._sums, sums, np.int32(self._sums.size), time]
            )

    def sums_of(self, slot: int) -> list[float]:
        """Return the sums that `enqueue_sums_copy` has copied for a slot."""
        sums: list[float] = self._host_results[slot][0].tolist()
        return sums

    def time_of(self, slot: int) -> int:
        """Return the time at which they were copied, in nanoseconds on the clock of the device."""
        return int(self._host_results[slot][1][0])

    def series_future(self) -> Callable[[float], None]:
        """Mark the end of the steps of a series, of which the open slot is the last.

        Returns:
            A function that waits for them, at most so many seconds (`TimeoutError`).
        """
        self._device.join_streams()
        return lambda timeout: None

    def sums_future(self) -> Callable[[float], list[float]]:
        """Mark the end of the work that reads the message.

        Returns:
            A function that waits for that work, at most so many seconds (`TimeoutError`), and
            returns the sums that were copied.
        """
        self._device.join_streams()
        slot = self.slot
        return lambda timeout: self.sums_of(slot)


class Device(ABC):
    """Memory and kernels of one accelerator.

    Attributes:
        asynchronous: True if calls return before the work has run; see `Memory`.
        on_gpu: True if arrays are GPU memory that NCCL accepts.
        identity: distinguishes the devices of a machine.
        name: of the model, such as ``NVIDIA H200``.
        num_devices: number of such accelerators that this process sees; 0 if that is unknown.
        limits: on which the selection of kernels depends.
        specializes: True if kernels should be compiled for each layer, which makes them faster but
            costs compilations.
    """

    asynchronous: bool = True
    on_gpu: bool = False
    identity: str = ""
    name: str = ""
    num_devices: int = 0
    limits: DeviceLimits = DEFAULT_LIMITS
    specializes: bool = True

    @property
    def free_bytes(self) -> int:
        """Memory that `zeros` can still allocate."""
        raise NotImplementedError

    @abstractmethod
    def zeros(self, shape: Shape, dtype: DTypeLike) -> Array:
        """Allocate an array of zeros, aligned to at least 256 bytes."""

    @abstractmethod
    def upload(self, target: Array, source: NDArray[Any]) -> None:
        """Copy a host array of the same shape, converted to the target's dtype.

        The source may be changed as soon as this returns.
        """

    def uploaded(self, values: NDArray[Any]) -> Array:
        """Return a copy of a host array on the device."""
        array = self.zeros(values.shape, values.dtype)
        self.upload(array, values)
        return array

    @abstractmethod
    def download(self, source: Array, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """Return a copy on the host, in `out` if given, after all enqueued work has run."""

    def pinned_memory(self, nbytes: int) -> NDArray[np.uint8]:
        """Allocate zeros in host memory that kernels can access through `device_view`."""
        return np.zeros(nbytes, np.uint8)

    def device_view(self, host: NDArray[Any]) -> Array:
        """Return `pinned_memory` as an array that kernels accept."""
        return host

    def host_copy(self, source: Array) -> NDArray[Any]:
        """Return a copy in host memory from which later uploads and downloads are fastest."""
        return self.download(source)

    def begin_download(self, source: Array, out: NDArray[Any]) -> Callable[[], None]:
        """Enqueue a copy to the host; see `Memory.begin_download`."""
        self.download(source, out)
        return lambda: None

    @abstractmethod
    def function(self, file: str, name: str, **defines: Macro) -> Function:
        """Return a kernel. It is compiled meanwhile, unless it was compiled before.

        The first launch waits for the compilation.

        Args:
            file: source in the folder of kernels, such as ``pooling.cu``.
            name: of an ``extern "C" __global__`` function in it.
            defines: macros that the source is compiled with.
        """

    def load_functions(self) -> None:
        """Wait until all kernels of `function` have been compiled, and load them.

        Raises:
            CompileError: a source has errors.
        """

    @property
    def compilation_progress(self) -> tuple[int, int]:
        """The number of sources that are compiled, and the number of those requested so far."""
        return 0, 0

    def tensor_map(
        self, maps: Array, shape: Shape, box: Shape, kind: str, *, as_factors: bool = True
    ) -> np.void | None:
        """Return a tensor map, with which the Tensor Memory Accelerator (TMA) copies tiles.

        Args:
            maps: activations, or arg-max marks of pooling.
            shape: (N, H, W, C), as stored.
            box: elements of each dimension that one copy transfers.
            kind: precision of the matrix product, or ``marks``.
            as_factors: True stores tiles in the swizzled order that tensor cores read, for which C
                of the box is 32, 64 or 128 bytes, and rounds numbers of tf32.

        Returns:
            A kernel argument; None if the device has no TMA.
        """
        return None

    def patch_map(
        self, maps: Array, shape: Shape, grid: PatchGrid, box: tuple[int, int], kind: str
    ) -> np.void | None:
        """Return a tensor map, with which TMA copies the same tap of several patches.

        Args:
            maps: activations.
            shape: (N, H, W, C), as stored.
            grid: the positions of the patches.
            box: positions and channels that one copy transfers; the channels have 128 bytes.
            kind: precision of the matrix product.

        Returns:
            A kernel argument; None if the device has no TMA.
        """
        return None

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until all enqueued work has run."""

    def copy(self, target: Array, source: Array) -> None:
        """Enqueue a copy between two arrays of the device of the same shape and dtype."""
        self.upload(target, self.download(source))

    def product_ms(self, size: int, precision: str) -> list[float] | None:
        """Time products of square matrices by the vendor's library; see `Memory.product_ms`."""
        return None

    def times_ms(self, start: Callable[[], None]) -> list[float]:
        """Return milliseconds of the work that `start` enqueues, of several repeats.

        Raises:
            RuntimeError: the work cannot run, or cannot be captured.
        """
        self.synchronize()
        begin = time.perf_counter()
        start()
        self.synchronize()
        return [(time.perf_counter() - begin) * 1e3]

    def program(self, start: Callable[[], None], *, warm: bool = False) -> Callable[[], None]:
        """Return a function that repeats the work of `start`; see `Memory.program`."""
        return start

    def staging_buffer(self, memory: Array, sums: Array) -> StagingBuffer:
        """Return a staging buffer; see `StagingBuffer` for the arguments."""
        return StagingBuffer(self, memory, sums)

    @contextmanager
    def side_stream(self, name: str = WEIGHT_STREAM) -> Iterator[None]:
        """Enqueue the work of the context on another stream, after all earlier work.

        It may overlap with what is enqueued afterwards, until `join_streams`.

        Args:
            name: of the stream, which runs its own work in order. `SUM_STREAM` also waits for the
                other streams.
        """
        yield

    def join_streams(self) -> None:
        """Let all work that is enqueued from now on wait for the side streams."""

    def address(self, array: Array) -> int:
        """Return the address of an array in device memory."""
        raise NotImplementedError

    @property
    def stream_address(self) -> int:
        """The CUDA stream to which work is enqueued at present."""
        return 0

    def share(self, nbytes: int) -> tuple[Array, bytes]:
        """Allocate memory that devices of other processes on this machine can access.

        Returns:
            uint8 (bytes,), which exists until `unshare`, and a handle for `open_shared`.

        Raises:
            UserError: the device does not support it.
        """
        raise UserError(
            f"{self.name or 'this device'} cannot share memory between processes; use "
            "--transport host"
        )

    def unshare(self, memory: Array) -> None:
        """Free memory of `share` that no process uses any more."""

    def open_shared(self, handle: bytes) -> int:
        """Return the address of another device's shared memory, until `close_shared`.

        Args:
            handle: from `share`.

        Raises:
            UserError: this device cannot access it.
        """
        raise UserError(
            f"{self.name or 'this device'} cannot access memory of other processes; use "
            "--transport host"
        )

    def close_shared(self, address: int) -> None:
        """Release an address of `open_shared`."""
