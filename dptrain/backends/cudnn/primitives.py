"""Poolings, activations and softmax by cuDNN's C functions, called through ctypes.

CuDNN's Python frontend has no functions for them that are shorter than a graph. The C functions
need no engine, no workspace and no compilation.

Sources: cuDNN 9 API reference, "cudnn_ops"; enumerations of ``cudnn_ops_v9.h``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import byref, c_double, c_float, c_int, c_void_p
from typing import Any

from dptrain.backends.cuda.device.device import Array, Device
from dptrain.backends.replica import Context, Kernel

NOT_SUPPORTED = 3000
"""CUDNN_STATUS_NOT_SUPPORTED."""

NHWC = 1
"""CUDNN_TENSOR_NHWC."""

DATA_TYPES = {"float32": 0, "uint16": 9}
"""CUDNN_DATA_FLOAT and CUDNN_DATA_BFLOAT16, by the dtype in which activations are stored."""

PROPAGATE_NAN = 1
AVERAGE_POOLING, MAX_POOLING = 2, 3
"""CUDNN_POOLING_AVERAGE_COUNT_EXCLUDE_PADDING and CUDNN_POOLING_MAX_DETERMINISTIC. The other
maximum mode adds gradients of overlapping windows in a random order."""

SIGMOID, RELU = 0, 1
"""Modes of activations."""

LOG_SOFTMAX, EACH_SAMPLE = 2, 0
"""CUDNN_SOFTMAX_LOG and CUDNN_SOFTMAX_MODE_INSTANCE."""

Dims = Sequence[int]
"""(N, C, H, W) of an array that is stored as (N, H, W, C)."""


class CudnnError(RuntimeError):
    """A failed call of cuDNN.

    Attributes:
        status: number of the status.
    """

    def __init__(self, function: str, status: int, text: str) -> None:
        super().__init__(f"{function} failed: {text} ({status})")
        self.status = status


class Primitives:
    """cuDNN's functions without graphs, with a handle for the current GPU.

    Calls enqueue work without allocating memory, so that they can be captured in CUDA graphs.
    Descriptors are created once and are never destroyed; there are a few for each layer.

    Args:
        functions: the loaded library.

    Attributes:
        dtypes: dtypes of activations for which they are used; `find_dtypes` checks them.
    """

    def __init__(self, functions: Any) -> None:
        self._functions = functions
        self.dtypes: Sequence[str] = tuple(DATA_TYPES)
        self._handle = c_void_p()
        self._descriptors: dict[tuple[Any, ...], c_void_p] = {}
        self._call("cudnnCreate", byref(self._handle))

    def set_stream(self, stream: int) -> None:
        """Select the stream of the following calls."""
        self._call("cudnnSetStream", self._handle, c_void_p(stream))

    def tensor(self, dims: Dims, dtype: str) -> c_void_p:
        """Return the descriptor of an array."""
        return self._descriptor("Tensor", "4d", NHWC, DATA_TYPES[dtype], *dims)

    def pooling(
        self, mode: int, window: Sequence[int], pads: Sequence[int], strides: Sequence[int]
    ) -> c_void_p:
        """Return the descriptor of a pooling; sizes are vertical and horizontal."""
        return self._descriptor("Pooling", "2d", mode, PROPAGATE_NAN, *window, *pads, *strides)

    def activation(self, mode: int) -> c_void_p:
        """Return the descriptor of an activation."""
        return self._descriptor("Activation", "", mode, PROPAGATE_NAN, c_double(0.0))

    def forward(
        self, kind: str, described: Sequence[Any], x: tuple[c_void_p, int], y: tuple[c_void_p, int]
    ) -> None:
        """Enqueue y = f(x).

        Args:
            kind: ``Pooling``, ``Activation`` or ``Softmax``.
            described: descriptor of the operation; for softmax, algorithm and mode.
            x, y: descriptors and addresses.
        """
        one, zero = c_float(1.0), c_float(0.0)
        self._call(
            f"cudnn{kind}Forward",
            self._handle,
            *described,
            byref(one),
            *_array(x),
            byref(zero),
            *_array(y),
        )

    def backward(
        self,
        kind: str,
        described: Sequence[Any],
        y: tuple[c_void_p, int],
        dy: tuple[c_void_p, int],
        x: tuple[c_void_p, int] | None,
        dx: tuple[c_void_p, int],
    ) -> None:
        """Enqueue dx = df(x)/dx · dy; softmax does not read x. dx may be dy, except in poolings."""
        one, zero = c_float(1.0), c_float(0.0)
        inputs = _array(x) if x is not None else ()
        self._call(
            f"cudnn{kind}Backward",
            self._handle,
            *described,
            byref(one),
            *_array(y),
            *_array(dy),
            *inputs,
            byref(zero),
            *_array(dx),
        )

    def _descriptor(self, kind: str, suffix: str, *values: Any) -> c_void_p:
        key = (kind, *(v.value if isinstance(v, c_double) else v for v in values))
        if key not in self._descriptors:
            descriptor = c_void_p()
            self._call(f"cudnnCreate{kind}Descriptor", byref(descriptor))
            arguments = (v if isinstance(v, c_double) else c_int(v) for v in values)
            self._call(f"cudnnSet{kind}{suffix}Descriptor", descriptor, *arguments)
            self._descriptors[key] = descriptor
        return self._descriptors[key]

    def _call(self, name: str, *arguments: Any) -> None:
        """Call a function of the library.

        Raises:
            CudnnError: the status is not success.
        """
        function: Callable[..., int] = getattr(self._functions, name)
        status = function(*arguments)
        if status:
            describe = self._functions.cudnnGetErrorString
            describe.restype = ctypes.c_char_p
            raise CudnnError(name, status, (describe(c_int(status)) or b"").decode())


def find_dtypes(primitives: Primitives, device: Device) -> Sequence[str]:
    """Return the dtypes of activations that cuDNN's functions support on a device."""
    return tuple(dtype for dtype in DATA_TYPES if _supports(primitives, device, dtype))


def _supports(primitives: Primitives, device: Device, dtype: str) -> bool:
    x, y = device.zeros((1, 2, 2, 8), dtype), device.zeros((1, 1, 1, 8), dtype)
    calls = PrimitiveCalls(primitives, device, "Pooling")
    described = (primitives.pooling(MAX_POOLING, (2, 2), (0, 0), (2, 2)),)
    try:
        calls.forward(described, x, y)
        calls.backward(described, y, device.zeros(y.shape, dtype), x, device.zeros(x.shape, dtype))
    except CudnnError as error:
        if error.status != NOT_SUPPORTED:
            raise
        return False
    device.synchronize()
    return True


class PrimitiveCalls:
    """Stages that call the functions of one kind.

    Each stage runs once when it is made: cuDNN loads code lazily, which a capture forbids.

    Args:
        primitives: the functions.
        device: has the arrays.
        kind: ``Pooling``, ``Activation`` or ``Softmax``.
    """

    def __init__(self, primitives: Primitives, device: Device, kind: str) -> None:
        self._primitives, self._device, self._kind = primitives, device, kind

    def forward(self, described: Sequence[Any], x: Array, y: Array) -> Kernel:
        """Return the stage y = f(x), for arrays (N, H, W, C)."""

        def run(context: Context) -> None:
            if context.n:
                self._primitives.set_stream(self._device.stream_address)
                arrays = self._of(x, context.n), self._of(y, context.n)
                self._primitives.forward(self._kind, described, *arrays)

        run(Context(seed=0, n=len(x)))
        return run

    def backward(
        self, described: Sequence[Any], y: Array, dy: Array, x: Array | None, dx: Array
    ) -> Kernel:
        """Return the stage that writes dx; see `Primitives.backward`."""

        def run(context: Context) -> None:
            if context.n:
                self._primitives.set_stream(self._device.stream_address)
                inputs = None if x is None else self._of(x, context.n)
                self._primitives.backward(
                    self._kind,
                    described,
                    self._of(y, context.n),
                    self._of(dy, context.n),
                    inputs,
                    self._of(dx, context.n),
                )

        run(Context(seed=0, n=len(y)))
        return run

    def _of(self, array: Array, n: int) -> tuple[c_void_p, int]:
        """Return descriptor and address of the first `n` samples of an array."""
        _, height, width, channels = array.shape
        tensor = self._primitives.tensor((n, channels, height, width), str(array.dtype))
        return tensor, self._device.address(array)


def _array(described: tuple[c_void_p, int]) -> tuple[c_void_p, c_void_p]:
    descriptor, address = described
    return descriptor, c_void_p(address)
