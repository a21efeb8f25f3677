"""An NVIDIA GPU: CuPy for memory, streams, graphs and launches, NVRTC for kernels."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from dptrain.backends.cuda.device import SUMS, WEIGHTS, Array, Device, Extent, Function, Mailbox
from dptrain.backends.cuda.nvrtc import MAJORS, compile_cached, find_compiler
from dptrain.errors import UserError
from dptrain.network.layers import Shape

EVERYWHERE_SHARED_BYTES = 48 << 10
"""Dynamic shared memory that a kernel gets without asking."""

RESULTS, RESULT_BYTES = 16, 256
"""Downloads that may be under way at a time, and how large they may be."""

TIMED, REPEATS = 10, 5
"""How often work is captured in a row where its time is taken, and how often that is launched."""

PATIENCE_S, NAP_S = 0.02, 50e-6
"""How long to look without a pause, and the pause then."""


class GPU(Device):
    """A GPU of this node. What is enqueued goes through one stream, in order, or beside it.

    Args:
        index: which one, from 0.

    Attributes:
        index: as given.
        stream: CuPy's, which waits for no other.
        current: the stream that work is enqueued to at present.
        architecture: what kernels are compiled for, such as 90 for ``sm_90``.
        identity: the UUID, the same for every process whatever number it knows the GPU by.
    """

    on_gpu = True

    def __init__(self, index: int = 0) -> None:
        self.index = index
        self._cupy = cupy = import_cupy()
        present = device_count(cupy)
        if index >= present:
            raise UserError(f"there is no GPU {index}; this node has {present}, numbered from 0")
        device = cupy.cuda.Device(index)
        device.use()
        properties = cupy.cuda.runtime.getDeviceProperties(index)
        self.identity, self.name = properties["uuid"].hex(), properties["name"].decode()
        self.stream = self.current = cupy.cuda.Stream(non_blocking=True)
        self._lanes = {name: cupy.cuda.Stream(non_blocking=True) for name in (WEIGHTS, SUMS)}
        self._busy: list[Any] = []
        self._results = self.pinned(RESULTS * RESULT_BYTES)
        self._next_result = 0
        own = cupy.cuda.runtime.runtimeGetVersion() // 1000
        # A driver that runs CuPy's version of CUDA runs what that version's compiler makes.
        self._compiler = find_compiler([major for major in MAJORS if major <= own] or MAJORS)
        capability = int(device.compute_capability)
        self.architecture = best_architecture(capability, self._compiler.architectures)
        self._functions: dict[Any, Function] = {}
        self._modules: dict[Any, Any] = {}

    def zeros(self, shape: Shape, dtype: DTypeLike) -> Array:
        with self.stream:
            return self._cupy.zeros(shape, dtype)

    def upload(self, target: Array, source: NDArray[Any]) -> None:
        # From memory that is not pinned the copy is staged before this returns.
        target.set(np.ascontiguousarray(source, target.dtype), stream=self.stream)

    def download(self, source: Array, out: NDArray[Any] | None = None) -> NDArray[Any]:
        self.join()
        array: NDArray[Any] = source.get(stream=self.stream, out=out)
        return array

    def copy(self, target: Array, source: Array) -> None:
        runtime = self._cupy.cuda.runtime
        runtime.memcpyAsync(
            target.data.ptr, source.data.ptr, source.nbytes,
            runtime.memcpyDeviceToDevice, self.current.ptr,
        )  # fmt: skip

    def host_copy(self, source: Array) -> NDArray[Any]:
        return self.download(source, self.pinned(source.nbytes).view(source.dtype))

    def pinned(self, nbytes: int) -> NDArray[np.uint8]:
        """Memory of the host that the system does not move, so that copies need no detour."""
        memory = self._cupy.cuda.alloc_pinned_memory(max(nbytes, 1))
        return np.frombuffer(memory, np.uint8, nbytes)

    def function(self, file: str, name: str, **defines: int) -> Function:
        unit = file, tuple(sorted(defines.items()))
        if (unit, name) not in self._functions:
            if unit not in self._modules:
                module = self._cupy.cuda.function.Module()
                module.load(compile_cached(self._compiler, file, self.architecture, defines))
                self._modules[unit] = module
            self._functions[unit, name] = self._launcher(self._modules[unit].get_function(name))
        return self._functions[unit, name]

    def synchronize(self) -> None:
        self.join()
        self.stream.synchronize()

    def download_later(self, source: Array) -> Callable[[float], NDArray[Any]]:
        assert source.nbytes <= RESULT_BYTES
        place = self._next_result % RESULTS * RESULT_BYTES
        self._next_result += 1
        values = self._results[place : place + source.nbytes].view(source.dtype)
        runtime = self._cupy.cuda.runtime
        runtime.memcpyAsync(
            values.ctypes.data, source.data.ptr, source.nbytes,
            runtime.memcpyDeviceToHost, self.stream.ptr,
        )  # fmt: skip
        done = self.stream.record(self.event())

        def wait(timeout: float) -> NDArray[Any]:
            wait_for(done, timeout)
            copy: NDArray[Any] = values.copy()
            return copy

        return wait

    def event(self) -> Any:
        """A new event, which keeps no time."""
        return self._cupy.cuda.Event(disable_timing=True)

    def program(self, start: Callable[[], None]) -> Callable[[], None]:
        return Program(self, start).run

    def times_ms(self, start: Callable[[], None]) -> list[float]:
        def repeatedly() -> None:
            for _ in range(TIMED):
                start()

        event, times = self._cupy.cuda.Event, []
        launch = Program(self, repeatedly).run
        launch()  # As it is; the next is captured, and both are warm.
        launch()
        for _ in range(REPEATS):
            begin = self.stream.record(event())
            launch()
            end = self.stream.record(event())
            end.synchronize()
            times.append(float(self._cupy.cuda.get_elapsed_time(begin, end)) / TIMED)
        return times

    def mailbox(self, memory: Array) -> Mailbox:
        return PinnedMailbox(self, memory)

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

    def _launcher(self, kernel: Any) -> Function:
        driver, allowed = self._cupy.cuda.driver, EVERYWHERE_SHARED_BYTES

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
            kernel(grid, block, args, shared_bytes, self.current)

        return launch


class Program:
    """Work that is enqueued again and again, as one graph.

    The first time it is enqueued as it is, which compiles and warms up whatever needs it; the
    second time its launches are captured.

    Source: CUDA C++ Programming Guide, section "CUDA Graphs".
    """

    def __init__(self, gpu: GPU, start: Callable[[], None]) -> None:
        self._gpu, self._start = gpu, start
        self._warm = False
        self._graph: Any = None

    def run(self) -> None:
        """Enqueue it."""
        stream = self._gpu.stream
        if not self._warm:
            self._start()
            self._warm = True
            return
        if self._graph is None:
            stream.begin_capture()
            try:
                self._start()
            finally:
                # What was captured before an error is dropped, and the stream as it was.
                self._graph = stream.end_capture()
        self._graph.launch(stream)


class PinnedMailbox(Mailbox):
    """Messages travel on a stream of their own, from memory that the system does not move."""

    def __init__(self, gpu: GPU, memory: Array) -> None:
        self._gpu, self._memory = gpu, memory
        self._cupy = import_cupy()
        nbytes = memory.shape[1]
        self._host = [gpu.pinned(nbytes) for _ in range(2)]
        self._stream = self._cupy.cuda.Stream(non_blocking=True)
        self._left: list[Any] = [None, None]
        self._taken: list[Any] = [None, None]
        self._turn = 0

    def open(self) -> NDArray[np.uint8]:
        self._turn ^= 1
        left = self._left[self._turn]
        if left is not None:
            left.synchronize()
        return self._host[self._turn]

    def post(self, nbytes: int) -> Array:
        turn, runtime = self._turn, self._cupy.cuda.runtime
        memory, host = self._memory[turn], self._host[turn]
        if self._taken[turn] is not None:
            self._stream.wait_event(self._taken[turn])
        runtime.memcpyAsync(
            memory.data.ptr, host.ctypes.data, nbytes,
            runtime.memcpyHostToDevice, self._stream.ptr,
        )  # fmt: skip
        self._left[turn] = self._stream.record(self._gpu.event())
        self._gpu.stream.wait_event(self._left[turn])
        return memory

    def taken(self) -> None:
        self._taken[self._turn] = self._gpu.stream.record(self._gpu.event())


def wait_for(event: Any, timeout: float) -> None:
    """Wait for an event, which may depend on other ranks.

    Raises:
        TimeoutError: it took longer than so many seconds.
    """
    begin = time.monotonic()
    while not event.done:
        waited = time.monotonic() - begin
        if waited > timeout:
            raise TimeoutError(
                f"the GPU was not done after {waited:.0f} s: another rank hangs, was stopped or "
                "has left"
            )
        if waited > PATIENCE_S:
            time.sleep(NAP_S)


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
