"""An NVIDIA GPU: CuPy for memory, streams and launches, NVRTC for kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from dptrain.backends.cuda.device import Array, Device, Extent, Function
from dptrain.backends.cuda.nvrtc import MAJORS, compile_cached, find_compiler
from dptrain.errors import UserError
from dptrain.network.layers import Shape

EVERYWHERE_SHARED_BYTES = 48 << 10
"""Dynamic shared memory that a kernel gets without asking."""


class GPU(Device):
    """A GPU of this node. All that is enqueued goes through one stream, in order.

    Args:
        index: which one, from 0.

    Attributes:
        stream: CuPy's, which waits for no other.
        architecture: what kernels are compiled for, such as 90 for ``sm_90``.
        identity: the UUID, the same for every process whatever number it knows the GPU by.
    """

    def __init__(self, index: int = 0) -> None:
        self._cupy = cupy = import_cupy()
        present = device_count(cupy)
        if index >= present:
            raise UserError(f"there is no GPU {index}; this node has {present}, numbered from 0")
        device = cupy.cuda.Device(index)
        device.use()
        self.identity = cupy.cuda.runtime.getDeviceProperties(index)["uuid"].hex()
        self.stream = cupy.cuda.Stream(non_blocking=True)
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

    def download(self, source: Array) -> NDArray[Any]:
        array: NDArray[Any] = source.get(stream=self.stream)
        return array

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
        self.stream.synchronize()

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
            kernel(grid, block, args, shared_bytes, self.stream)

        return launch


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
            f"backend cuda needs CuPy, which cannot be imported{cause}; pip install "
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
            f"backend cuda finds no GPU: {first_line(error)}; nvidia-smi shows GPUs and driver, "
            "--backend numba computes on the CPU"
        ) from None
    if count == 0:
        raise UserError("backend cuda finds no GPU; --backend numba computes on the CPU")
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
