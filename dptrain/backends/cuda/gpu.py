"""An NVIDIA GPU: CuPy for memory, streams, graphs and launches, NVRTC for kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from dptrain.backends.cuda import cublas, dependent_launch, tensor_maps
from dptrain.backends.cuda.device import (
    SUMS,
    WEIGHTS,
    Array,
    Device,
    Extent,
    Function,
    Mailbox,
)
from dptrain.backends.cuda.launching import launch
from dptrain.backends.cuda.nvrtc import MAJORS, compile_cached, find_compiler
from dptrain.backends.cuda.pinned import PinnedMailbox
from dptrain.errors import UserError
from dptrain.network.layers import Shape

EVERYWHERE_SHARED_BYTES = 48 << 10
"""Dynamic shared memory that a kernel gets without asking."""

TIMED, REPEATS = 10, 5
"""How often work is captured in a row where its time is taken, and how often that is launched."""


class GPU(Device):
    """A GPU of this node. What is enqueued goes through one stream, in order, or beside it.

    Args:
        index: which one, from 0.

    Attributes:
        index: as given.
        cupy: the module.
        stream: CuPy's, which waits for no other.
        current: the stream that work is enqueued to at present.
        architecture: what kernels are compiled for, such as 90 for ``sm_90``.
        identity: the UUID, the same for every process whatever number it knows the GPU by.
    """

    on_gpu = True

    def __init__(self, index: int = 0) -> None:
        self.index = index
        self.cupy = cupy = import_cupy()
        present = device_count(cupy)
        if index >= present:
            raise UserError(f"there is no GPU {index}; this node has {present}, numbered from 0")
        device = cupy.cuda.Device(index)
        device.use()
        properties = cupy.cuda.runtime.getDeviceProperties(index)
        self.identity, self.name = properties["uuid"].hex(), properties["name"].decode()
        self.shared_bytes = int(properties["sharedMemPerBlockOptin"])
        self.stream = self.current = cupy.cuda.Stream(non_blocking=True)
        self._lanes = {name: cupy.cuda.Stream(non_blocking=True) for name in (WEIGHTS, SUMS)}
        self._busy: list[Any] = []
        own = cupy.cuda.runtime.runtimeGetVersion() // 1000
        # A driver that runs CuPy's version of CUDA runs what that version's compiler makes.
        self._compiler = find_compiler([major for major in MAJORS if major <= own] or MAJORS)
        capability = int(device.compute_capability)
        self.architecture = best_architecture(capability, self._compiler.architectures)
        self._launch_early = dependent_launch.find_launch(self.architecture)
        self._encode = tensor_maps.find_encoder(self.architecture)
        self._functions: dict[Any, Function] = {}
        self._modules: dict[Any, Any] = {}

    @property
    def free_bytes(self) -> int:
        # What CuPy keeps of arrays that are gone, it gives again or, where that is short, back.
        kept = self.cupy.get_default_memory_pool().free_bytes()
        return int(self.cupy.cuda.runtime.memGetInfo()[0] + kept)

    def zeros(self, shape: Shape, dtype: DTypeLike) -> Array:
        with self.stream:
            return self.cupy.zeros(shape, dtype)

    def upload(self, target: Array, source: NDArray[Any]) -> None:
        # From memory that is not pinned the copy is staged before this returns.
        target.set(np.ascontiguousarray(source, target.dtype), stream=self.stream)

    def download(self, source: Array, out: NDArray[Any] | None = None) -> NDArray[Any]:
        self.join()
        array: NDArray[Any] = source.get(stream=self.stream, out=out)
        return array

    def copy(self, target: Array, source: Array) -> None:
        # By a kernel: the engine that a captured graph has for copies is slower than the memory.
        # One H200, 2 GiB read and written together: 2.7 TB/s, a kernel 4.2.
        words = source.nbytes // 16 * 4
        function = self.function("elementwise.cu", "copy", VECTOR=4)
        launch(function, words // 4, *(array.view("float32") for array in (source, target)),
               np.int32(words))  # fmt: skip

    def product_ms(self, size: int, precision: str) -> list[float] | None:
        dtype = "uint16" if precision == "bf16" else "float32"
        random = np.random.default_rng(0).standard_normal((size, size), np.float32)
        try:
            a, b, c = (self.zeros((size, size), dtype) for _ in range(3))
            for array in (a, b):
                # The upper halves of numbers are theirs in bfloat16.
                self.upload(array, random.view("uint32") >> 16 if dtype == "uint16" else random)
            run = cublas.product(self.cupy, self.stream, a, b, c, precision)
            run()
            # Not captured, which cuBLAS does not always allow: it takes milliseconds.
            return [self._lap_ms(run) for _ in range(REPEATS)]
        # No cuBLAS, or no room for it.
        except (ImportError, OSError, RuntimeError, MemoryError):
            return None

    def _lap_ms(self, start: Callable[[], object]) -> float:
        """Milliseconds from the beginning to the end of what `start` enqueues."""
        event = self.cupy.cuda.Event
        begin = self.stream.record(event())
        start()
        end = self.stream.record(event())
        end.synchronize()
        return float(self.cupy.cuda.get_elapsed_time(begin, end))

    def host_memory(self, nbytes: int) -> NDArray[np.uint8]:
        # Pinned: the system does not move it, so copies need no detour.
        memory = self.cupy.cuda.alloc_pinned_memory(max(nbytes, 1))
        host = np.frombuffer(memory, np.uint8, nbytes)
        host[:] = 0
        return host

    def reach(self, host: NDArray[Any]) -> Array:
        # Memory that is pinned has the same address for all.
        cuda = self.cupy.cuda
        memory = cuda.UnownedMemory(host.ctypes.data, host.nbytes, host, self.index)
        return self.cupy.ndarray(host.shape, host.dtype, cuda.MemoryPointer(memory, 0))

    def host_copy(self, source: Array) -> NDArray[Any]:
        return self.download(source, self.host_memory(source.nbytes).view(source.dtype))

    def function(self, file: str, name: str, **defines: int) -> Function:
        unit = file, tuple(sorted(defines.items()))
        if (unit, name) not in self._functions:
            if unit not in self._modules:
                module = self.cupy.cuda.function.Module()
                module.load(compile_cached(self._compiler, file, self.architecture, defines))
                self._modules[unit] = module
            self._functions[unit, name] = self._launcher(self._modules[unit].get_function(name))
        return self._functions[unit, name]

    def tensor_map(
        self, maps: Array, shape: Shape, box: Shape, kind: str, *, as_factors: bool = True
    ) -> np.void | None:
        if self._encode is None or self._launch_early is None:
            return None
        return self._encode(self.address(maps), shape, box, kind, as_factors)

    def synchronize(self) -> None:
        self.join()
        self.stream.synchronize()

    def event(self) -> Any:
        """A new event, which keeps no time."""
        return self.cupy.cuda.Event(disable_timing=True)

    def program(self, start: Callable[[], None], *, warm: bool = False) -> Callable[[], None]:
        return Program(self, start, warm).run

    def times_ms(self, start: Callable[[], None]) -> list[float]:
        def repeatedly() -> None:
            for _ in range(TIMED):
                start()

        launch = self.program(repeatedly)
        launch()  # As it is; the next is captured, and both are warm.
        launch()
        return [self._lap_ms(launch) / TIMED for _ in range(REPEATS)]

    def mailbox(self, memory: Array, answer: Array) -> Mailbox:
        return PinnedMailbox(self, memory, answer)

    @contextmanager
    def beside(self, lane: str = WEIGHTS) -> Iterator[None]:
        stream = self._lanes[lane]
        before = [self.stream, *self._busy] if lane == SUMS else [self.stream]
        for other in before:
            if other is not stream:
                stream.wait_event(other.record(self.event()))
        if stream not in self._busy:
            self._busy.append(stream)
        self.current = stream
        try:
            yield
        finally:
            self.current = self.stream

    def join(self) -> None:
        for stream in self._busy:
            self.stream.wait_event(stream.record(self.event()))
        self._busy.clear()

    def address(self, array: Array) -> int:
        return int(array.data.ptr)

    @property
    def stream_address(self) -> int:
        return int(self.current.ptr)

    def share(self, nbytes: int) -> tuple[Array, bytes]:
        # What others open is a whole allocation, so it must not be part of CuPy's pool.
        runtime = self.cupy.cuda.runtime
        try:
            address = runtime.malloc(max(nbytes, 1))
            handle = runtime.ipcGetMemHandle(address)
        except runtime.CUDARuntimeError as error:
            raise UserError(f"memory that GPUs share cannot be had: {first_line(error)}") from None
        memory = self.cupy.cuda.UnownedMemory(address, nbytes, None, self.index)
        pointer = self.cupy.cuda.MemoryPointer(memory, 0)
        return self.cupy.ndarray((nbytes,), "uint8", pointer), bytes(handle)

    def unshare(self, memory: Array) -> None:
        self.cupy.cuda.runtime.free(self.address(memory))

    def open_shared(self, handle: bytes) -> int:
        runtime = self.cupy.cuda.runtime
        try:
            return int(runtime.ipcOpenMemHandle(handle))
        except runtime.CUDARuntimeError as error:
            raise UserError(
                f"GPU {self.index} does not reach another's memory: {first_line(error)}"
            ) from None

    def close_shared(self, address: int) -> None:
        self.cupy.cuda.runtime.ipcCloseMemHandle(address)

    def _launcher(self, kernel: Any) -> Function:
        driver, allowed = self.cupy.cuda.driver, EVERYWHERE_SHARED_BYTES

        def launch(
            grid: Extent,
            block: Extent,
            args: Sequence[Array | np.generic],
            *,
            shared_bytes: int = 0,
        ) -> None:
            nonlocal allowed
            if shared_bytes > allowed:
                attribute = driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                driver.funcSetAttribute(kernel.ptr, attribute, shared_bytes)
                allowed = shared_bytes
            if self._launch_early is None:
                kernel(grid, block, args, shared_bytes, self.current)
            else:
                self._launch_early(kernel.ptr, grid, block, args, shared_bytes, self.current.ptr)

        return launch


class Program:
    """Work that is enqueued again and again, as one graph.

    The first time it is enqueued as it is, unless `warm`, which compiles and warms up whatever
    needs it; the next time its launches are captured.

    Source: CUDA C++ Programming Guide, section "CUDA Graphs".
    """

    def __init__(self, gpu: GPU, start: Callable[[], None], warm: bool) -> None:
        self._gpu, self._start, self._warm = gpu, start, warm
        self._graph: Any = None

    def run(self) -> None:
        """Enqueue it."""
        stream = self._gpu.stream
        if not self._warm:
            self._start()
            self._gpu.join()
            self._warm = True
            return
        if self._graph is None:
            stream.begin_capture()
            try:
                self._start()
                self._gpu.join()
            finally:
                # What was captured before an error is dropped, and the stream as it was.
                self._graph = stream.end_capture()
        self._graph.launch(stream)


def import_cupy() -> Any:
    """The module ``cupy``.

    Raises:
        UserError: it is not installed, or does not load.
    """
    try:
        import cupy
    except ImportError as error:
        cause = "" if isinstance(error, ModuleNotFoundError) else f" ({first_line(error)})"
        raise UserError(
            f"a backend for GPUs needs CuPy, which cannot be imported{cause}; pip install "
            "'dptrain[cuda13]', or 'dptrain[cuda12]' where nvidia-smi shows CUDA 12"
        ) from None
    return cupy


def device_count(cupy: Any) -> int:
    """Number of GPUs, at least 1.

    Raises:
        UserError: there is none, or its driver does not answer.
    """
    try:
        count = int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise UserError(
            f"dptrain finds no GPU: {first_line(error)}; nvidia-smi shows GPUs and driver, "
            "--backend numba computes on the CPU"
        ) from None
    if count == 0:
        raise UserError("dptrain finds no GPU; --backend numba computes on the CPU")
    return count


def best_architecture(capability: int, architectures: Sequence[int]) -> int:
    """What to compile for: the GPU's own architecture, or an older one of its generation.

    Args:
        capability: the GPU's, such as 90.
        architectures: what the compiler knows.

    Raises:
        UserError: the compiler knows none that this GPU runs.
    """
    same = [a for a in architectures if a // 10 == capability // 10 and a <= capability]
    if not same:
        known = ", ".join(f"sm_{a}" for a in sorted(architectures))
        raise UserError(
            f"this GPU is sm_{capability}, but libnvrtc compiles for {known}; install a libnvrtc "
            "of a CUDA version that knows it"
        )
    return max(same)


def first_line(error: BaseException) -> str:
    """What an error says, without the advice that follows it."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
