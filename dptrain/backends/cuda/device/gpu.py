"""The GPU as a `Device`: memory, streams, graphs and launches by CuPy, kernels by NVRTC."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from dptrain.backends.cuda.device import cublas, dependent_launch, tensor_maps
from dptrain.backends.cuda.device.cupy_runtime import (
    best_architecture,
    device_count,
    first_line,
    import_cupy,
)
from dptrain.backends.cuda.device.device import (
    LOAD_STREAM,
    SUM_STREAM,
    WEIGHT_STREAM,
    Array,
    Device,
    Extent,
    Function,
    Macro,
    StagingBuffer,
)
from dptrain.backends.cuda.device.graph import Graph
from dptrain.backends.cuda.device.hardware import DEFAULT_SHARED_BYTES
from dptrain.backends.cuda.device.launching import launch
from dptrain.backends.cuda.device.modules import Modules, Source
from dptrain.backends.cuda.device.nvrtc import MAJORS, compile_cached, find_compiler
from dptrain.backends.cuda.device.pinned import PinnedStagingBuffer
from dptrain.backends.cuda.device.tensor_maps import PatchGrid
from dptrain.errors import UserError
from dptrain.machine import available_cores
from dptrain.network.layers import Shape
from dptrain.plan.limits import DeviceLimits

TIMED_RUNS, REPEATS = 10, 5
"""Runs of the work in a graph that is timed, and launches of that graph."""


class GPU(Device):
    """A GPU of this node.

    Work is enqueued to one main stream, or to side streams that run concurrently with it.

    Args:
        index: CUDA device number, from 0.

    Attributes:
        cupy: the module ``cupy``.
        stream: main CuPy stream, non-blocking.
        current: stream that work is enqueued to at present.
        architecture: what kernels are compiled for, such as 90 for ``sm_90``.
        identity: UUID of the GPU, which is the same for every process.
    """

    on_gpu = True

    def __init__(self, index: int = 0) -> None:
        self.index = index
        self.cupy = cupy = import_cupy()
        present = self.num_devices = device_count(cupy)
        if index >= present:
            raise UserError(f"GPU {index} does not exist: this node has {present}, numbered from 0")
        device = cupy.cuda.Device(index)
        device.use()
        properties = cupy.cuda.runtime.getDeviceProperties(index)
        self.identity, self.name = properties["uuid"].hex(), properties["name"].decode()
        self.stream = self.current = cupy.cuda.Stream(non_blocking=True)
        self._side_streams = {
            name: cupy.cuda.Stream(non_blocking=True)
            for name in (WEIGHT_STREAM, SUM_STREAM, LOAD_STREAM)
        }
        self._download_stream = cupy.cuda.Stream(non_blocking=True)
        self._busy: list[Any] = []
        own = cupy.cuda.runtime.runtimeGetVersion() // 1000
        # A driver that supports CuPy's CUDA version runs code of that version's compiler.
        self._compiler = find_compiler([major for major in MAJORS if major <= own] or MAJORS)
        self.limits = DeviceLimits(
            self.name,
            int(device.compute_capability),
            int(properties["multiProcessorCount"]),
            int(properties["sharedMemPerBlockOptin"]),
            int(properties["maxThreadsPerMultiProcessor"]),
        )
        self.architecture = best_architecture(self.limits.capability, self._compiler.architectures)
        self._launch_dependent = dependent_launch.find_dependent_launch(self.architecture)
        self._encode = tensor_maps.find_encoder(self.architecture)
        self._modules = Modules(self._compile, self._load, available_cores())
        self._functions: dict[Any, Function] = {}

    @property
    def free_bytes(self) -> int:
        # Memory of freed arrays stays in CuPy's pool, which reuses or releases it.
        kept = self.cupy.get_default_memory_pool().free_bytes()
        return int(self.cupy.cuda.runtime.memGetInfo()[0] + kept)

    def zeros(self, shape: Shape, dtype: DTypeLike) -> Array:
        with self.stream:
            return self.cupy.zeros(shape, dtype)

    def upload(self, target: Array, source: NDArray[Any]) -> None:
        # A copy from pageable memory is staged before this returns.
        target.set(np.ascontiguousarray(source, target.dtype), stream=self.stream)

    def download(self, source: Array, out: NDArray[Any] | None = None) -> NDArray[Any]:
        self.join_streams()
        array: NDArray[Any] = source.get(stream=self.stream, out=out)
        return array

    def copy(self, target: Array, source: Array) -> None:
        # A kernel is faster than the copy engine of a captured graph: 4.2 instead of 2.7 TB/s
        # (2 GiB, reads and writes together, H200).
        words = source.nbytes // 16 * 4
        function = self.function("elementwise.cu", "copy", VECTOR=4)
        launch(
            function,
            words // 4,
            *(array.view("float32") for array in (source, target)),
            np.int32(words),
        )

    def product_ms(self, size: int, precision: str) -> list[float] | None:
        dtype = "uint16" if precision == "bf16" else "float32"
        random = np.random.default_rng(0).standard_normal((size, size), np.float32)
        try:
            a, b, c = (self.zeros((size, size), dtype) for _ in range(3))
            for array in (a, b):
                # bfloat16 is the upper half of float32.
                self.upload(array, random.view("uint32") >> 16 if dtype == "uint16" else random)
            run = cublas.square_product(self.cupy, self.stream, a, b, c, precision)
            run()
            # Not captured, which cuBLAS does not always support. A product takes milliseconds.
            return [self._lap_ms(run) for _ in range(REPEATS)]
        # cuBLAS is missing, or memory does not suffice.
        except (ImportError, OSError, RuntimeError, MemoryError):
            return None

    def _lap_ms(self, start: Callable[[], object]) -> float:
        """Return the milliseconds that the work enqueued by `start` takes."""
        event = self.cupy.cuda.Event
        begin = self.stream.record(event())
        start()
        end = self.stream.record(event())
        end.synchronize()
        return float(self.cupy.cuda.get_elapsed_time(begin, end))

    def pinned_memory(self, nbytes: int) -> NDArray[np.uint8]:
        # Pinned memory: copies need no staging.
        memory = self.cupy.cuda.alloc_pinned_memory(max(nbytes, 1))
        host = np.frombuffer(memory, np.uint8, nbytes)
        host[:] = 0
        return host

    def device_view(self, host: NDArray[Any]) -> Array:
        # Pinned memory has the same address on the host and on the device.
        cuda = self.cupy.cuda
        memory = cuda.UnownedMemory(host.ctypes.data, host.nbytes, host, self.index)
        return self.cupy.ndarray(host.shape, host.dtype, cuda.MemoryPointer(memory, 0))

    def host_copy(self, source: Array) -> NDArray[Any]:
        return self.download(source, self.pinned_memory(source.nbytes).view(source.dtype))

    def begin_download(self, source: Array, out: NDArray[Any]) -> Callable[[], None]:
        self.join_streams()
        stream, runtime = self._download_stream, self.cupy.cuda.runtime
        stream.wait_event(self.stream.record(self.event()))
        addresses = out.ctypes.data, self.address(source)
        runtime.memcpyAsync(*addresses, source.nbytes, runtime.memcpyDeviceToHost, stream.ptr)
        # A thread that waits for it sleeps.
        done = stream.record(self.cupy.cuda.Event(block=True, disable_timing=True))
        wait: Callable[[], None] = done.synchronize
        return wait

    def function(self, file: str, name: str, **defines: Macro) -> Function:
        source = self._modules.request(file, defines)
        if (source, name) not in self._functions:
            self._functions[source, name] = self._launcher(source, name)
        return self._functions[source, name]

    def load_functions(self) -> None:
        self._modules.load_all()

    @property
    def compilation_progress(self) -> tuple[int, int]:
        return self._modules.progress

    def _compile(self, file: str, defines: Mapping[str, Macro]) -> bytes | None:
        return compile_cached(self._compiler, file, self.architecture, defines)

    def _load(self, code: bytes) -> Any:
        module = self.cupy.cuda.function.Module()
        module.load(code)
        return module

    def tensor_map(
        self, maps: Array, shape: Shape, box: Shape, kind: str, *, as_factors: bool = True
    ) -> np.void | None:
        if self._encode is None or self._launch_dependent is None:
            return None
        return self._encode.box(self.address(maps), shape, box, kind, as_factors)

    def patch_map(
        self, maps: Array, shape: Shape, grid: PatchGrid, box: tuple[int, int], kind: str
    ) -> np.void | None:
        if self._encode is None or self._launch_dependent is None:
            return None
        return self._encode.patches(self.address(maps), shape, grid, box, kind)

    def synchronize(self) -> None:
        self.join_streams()
        self.stream.synchronize()

    def event(self) -> Any:
        """Return a new event without timing."""
        return self.cupy.cuda.Event(disable_timing=True)

    def program(self, start: Callable[[], None], *, warm: bool = False) -> Callable[[], None]:
        return Graph(self, start, warm).run

    def times_ms(self, start: Callable[[], None]) -> list[float]:
        def repeatedly() -> None:
            for _ in range(TIMED_RUNS):
                start()

        launch = self.program(repeatedly)
        launch()  # Runs directly; the next call captures.
        launch()
        return [self._lap_ms(launch) / TIMED_RUNS for _ in range(REPEATS)]

    def staging_buffer(self, memory: Array, sums: Array) -> StagingBuffer:
        return PinnedStagingBuffer(self, memory, sums)

    @contextmanager
    def side_stream(self, name: str = WEIGHT_STREAM) -> Iterator[None]:
        stream = self._side_streams[name]
        before = [self.stream, *self._busy] if name == SUM_STREAM else [self.stream]
        for other in before:
            if other is not stream:
                stream.wait_event(other.record(self.event()))
        if stream not in self._busy:
            self._busy.append(stream)
        with self.on_stream(stream):
            yield

    @contextmanager
    def on_stream(self, stream: Any) -> Iterator[None]:
        """Enqueue the work of the context to a CuPy stream."""
        self.current = stream
        try:
            yield
        finally:
            self.current = self.stream

    def join_streams(self) -> None:
        for stream in self._busy:
            self.stream.wait_event(stream.record(self.event()))
        self._busy.clear()

    def address(self, array: Array) -> int:
        return int(array.data.ptr)

    @property
    def stream_address(self) -> int:
        return int(self.current.ptr)

    def share(self, nbytes: int) -> tuple[Array, bytes]:
        # Other processes open whole allocations, so the memory must not be part of CuPy's pool.
        runtime = self.cupy.cuda.runtime
        try:
            address = runtime.malloc(max(nbytes, 1))
            handle = runtime.ipcGetMemHandle(address)
        except runtime.CUDARuntimeError as error:
            raise UserError(
                f"GPU {self.index} cannot share {nbytes} bytes with other processes "
                f"({first_line(error)}); use --transport nccl or host"
            ) from None
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
                f"GPU {self.index} cannot access the memory of another rank's GPU "
                f"({first_line(error)}); use --transport nccl or host"
            ) from None

    def close_shared(self, address: int) -> None:
        self.cupy.cuda.runtime.ipcCloseMemHandle(address)

    def _launcher(self, source: Source, name: str) -> Function:
        driver, allowed, kernel = self.cupy.cuda.driver, DEFAULT_SHARED_BYTES, None

        def launch(
            grid: Extent,
            block: Extent,
            args: Sequence[Array | np.generic],
            *,
            shared_bytes: int = 0,
        ) -> None:
            nonlocal allowed, kernel
            if kernel is None:
                kernel = self._modules.module(source).get_function(name)
            if shared_bytes > allowed:
                attribute = driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                driver.funcSetAttribute(kernel.ptr, attribute, shared_bytes)
                allowed = shared_bytes
            if self._launch_dependent is None:
                kernel(grid, block, args, shared_bytes, self.current)
            else:
                self._launch_dependent(
                    kernel.ptr, grid, block, args, shared_bytes, self.current.ptr
                )

        return launch
