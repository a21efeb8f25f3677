"""Fake of cuDNN's C functions: it checks descriptors and computes with NumPy.

Each function is a C function pointer with the prototype of cuDNN 9, so arguments are passed by the
C calling convention as to the library. A call that cuDNN would refuse, or that this fake does not
understand, returns a status other than 0.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from ctypes import POINTER, c_char_p, c_double, c_float, c_int, c_size_t, c_void_p
from typing import Any

import numpy as np
from numpy.typing import NDArray

BAD_PARAM, NOT_SUPPORTED = 2000, 3000
FLOAT, BFLOAT16, NHWC = 0, 9, 1
AVERAGE_EXCLUDING_PADDING, MAX_DETERMINISTIC = 2, 3
SIGMOID, RELU = 0, 1
LOG_SOFTMAX, INSTANCE = 2, 0

Descriptor = tuple[Any, ...]
Array = NDArray[np.float64]

_handle, _scale = c_void_p, POINTER(c_float)
_array = (c_void_p, c_void_p)
PROTOTYPES: dict[str, tuple[Any, ...]] = {
    "Create": (POINTER(c_void_p),),
    "SetStream": (_handle, c_void_p),
    "CreateTensorDescriptor": (POINTER(c_void_p),),
    "CreatePoolingDescriptor": (POINTER(c_void_p),),
    "CreateActivationDescriptor": (POINTER(c_void_p),),
    "SetTensor4dDescriptor": (c_void_p, *[c_int] * 6),
    "SetPooling2dDescriptor": (c_void_p, *[c_int] * 8),
    "SetActivationDescriptor": (c_void_p, c_int, c_int, c_double),
    "PoolingForward": (_handle, c_void_p, _scale, *_array, _scale, *_array),
    "PoolingBackward": (_handle, c_void_p, _scale, *_array * 3, _scale, *_array),
    "ActivationForward": (_handle, c_void_p, _scale, *_array, _scale, *_array),
    "ActivationBackward": (_handle, c_void_p, _scale, *_array * 3, _scale, *_array),
    "SoftmaxForward": (_handle, c_int, c_int, _scale, *_array, _scale, *_array),
    "SoftmaxBackward": (_handle, c_int, c_int, _scale, *_array * 2, _scale, *_array),
}


class Functions:
    """What `open_functions` returns: attributes such as ``cudnnPoolingForward``.

    Args:
        dtypes: data types that the computing functions support.

    Attributes:
        calls: names of the computing functions that were called.
        errors: what was refused, with the reason.
    """

    def __init__(self, dtypes: tuple[int, ...] = (FLOAT, BFLOAT16)) -> None:
        self.dtypes = dtypes
        self.calls: list[str] = []
        self.errors: list[str] = []
        self._next = itertools.count(1)
        self._stream: int | None = None
        self._handles: set[int] = set()
        self._descriptors: dict[int, tuple[str, Descriptor | None]] = {}
        self._keep: list[Any] = []
        self._text = ctypes.create_string_buffer(b"a status of the fake")
        for name, prototype in PROTOTYPES.items():
            self._add(name, prototype)
        get_text = ctypes.CFUNCTYPE(c_size_t, c_int)(lambda _: ctypes.addressof(self._text))
        self._keep.append(get_text)
        # The caller sets the type of the result.
        self.cudnnGetErrorString = ctypes.cast(get_text, ctypes.CFUNCTYPE(c_char_p, c_int))

    def _add(self, name: str, prototype: tuple[Any, ...]) -> None:
        method: Callable[..., None] = getattr(self, f"_{name}", None) or self._create(name)

        def call(*arguments: Any) -> int:
            try:
                method(*arguments)
            except NotImplementedError as error:
                self.errors.append(f"{name}: {error}")
                return NOT_SUPPORTED
            except Exception as error:
                self.errors.append(f"{name}: {type(error).__name__} {error}")
                return BAD_PARAM
            return 0

        function = ctypes.CFUNCTYPE(c_int, *prototype)(call)
        self._keep.append(function)
        setattr(self, f"cudnn{name}", function)

    # Handles and descriptors.

    def _Create(self, handle: Any) -> None:
        handle[0] = next(self._next)
        self._handles.add(handle[0])

    def _SetStream(self, handle: int, stream: int | None) -> None:
        assert handle in self._handles
        self._stream = stream or 0

    def _create(self, name: str) -> Callable[[Any], None]:
        kind = name.removeprefix("Create").removesuffix("Descriptor")

        def create(descriptor: Any) -> None:
            descriptor[0] = next(self._next)
            self._descriptors[descriptor[0]] = kind, None

        return create

    def _set(self, kind: str, descriptor: int, values: Descriptor) -> None:
        assert self._descriptors[descriptor][0] == kind
        self._descriptors[descriptor] = kind, values

    def _SetTensor4dDescriptor(self, descriptor: int, *values: int) -> None:
        layout, dtype, *dims = values
        assert layout == NHWC
        assert dtype in (FLOAT, BFLOAT16)
        assert min(dims) > 0
        self._set("Tensor", descriptor, (dtype, *dims))

    def _SetPooling2dDescriptor(self, descriptor: int, *values: int) -> None:
        mode, propagate, *sizes = values
        assert mode in (AVERAGE_EXCLUDING_PADDING, MAX_DETERMINISTIC)
        assert propagate == 1
        window, pads, strides = sizes[:2], sizes[2:4], sizes[4:]
        assert min(*window, *strides) > 0
        assert all(0 <= pad < size for pad, size in zip(pads, window, strict=True))
        self._set("Pooling", descriptor, values)

    def _SetActivationDescriptor(
        self, descriptor: int, mode: int, propagate: int, coefficient: float
    ) -> None:
        assert mode in (SIGMOID, RELU)
        assert propagate == 1
        assert coefficient == 0.0
        self._set("Activation", descriptor, (mode,))

    def _get(self, kind: str, descriptor: int) -> Descriptor:
        found, values = self._descriptors[descriptor]
        assert found == kind
        assert values is not None, "the descriptor was not set"
        return values

    # Data.

    def _start(self, name: str, handle: int, alpha: Any, beta: Any) -> None:
        assert handle in self._handles
        assert self._stream is not None, "no stream was set"
        assert (alpha[0], beta[0]) == (1.0, 0.0)
        self.calls.append(name)

    def _memory(self, descriptor: int, address: int) -> NDArray[Any]:
        """Return the array (N, C, H, W) at an address."""
        dtype, n, c, h, w = self._get("Tensor", descriptor)
        if dtype not in self.dtypes:
            raise NotImplementedError(f"data type {dtype}")
        item = np.dtype(np.float32 if dtype == FLOAT else np.uint16)
        assert address % item.itemsize == 0
        memory = (ctypes.c_char * (n * c * h * w * item.itemsize)).from_address(address)
        return np.frombuffer(memory, item).reshape(n, h, w, c).transpose(0, 3, 1, 2)

    def _read(self, descriptor: int, address: int) -> Array:
        memory = self._memory(descriptor, address)
        if memory.dtype == np.uint16:
            memory = (memory.astype(np.uint32) << 16).view(np.float32)
        return memory.astype(np.float64)

    def _write(self, descriptor: int, address: int, values: Array) -> None:
        memory = self._memory(descriptor, address)
        assert memory.shape == values.shape, f"{values.shape} does not fit {memory.shape}"
        numbers = values.astype(np.float32)
        memory[...] = numbers if memory.dtype == np.float32 else to_bfloat16(numbers)

    # Poolings.

    def _windows(self, descriptor: int, x: Array) -> tuple[int, NDArray[Any], NDArray[np.int64]]:
        """Return mode, values (N, C, Ho, Wo, R·S), NaN outside the map, and their pixels or −1."""
        mode, _, r, s, top, left, down, across = self._get("Pooling", descriptor)
        height, width = x.shape[2:]
        pads = (top, top), (left, left)
        inside = np.pad(np.arange(height * width).reshape(height, width), pads, constant_values=-1)
        view = np.lib.stride_tricks.sliding_window_view(inside, (r, s))[::down, ::across]
        pixels = view.reshape(*view.shape[:2], r * s)
        values = x.reshape(*x.shape[:2], -1)[:, :, pixels]
        return mode, values, pixels

    def _PoolingForward(
        self, handle: int, pooling: int, alpha: Any, xd: int, x: int, beta: Any, yd: int, y: int
    ) -> None:
        self._start("PoolingForward", handle, alpha, beta)
        mode, values, pixels = self._windows(pooling, self._read(xd, x))
        there = pixels >= 0
        if mode == MAX_DETERMINISTIC:
            self._write(yd, y, np.where(there, values, -np.inf).max(-1))
        else:
            self._write(yd, y, np.where(there, values, 0.0).sum(-1) / there.sum(-1))

    def _PoolingBackward(
        self,
        handle: int,
        pooling: int,
        alpha: Any,
        *arrays: Any,
    ) -> None:
        (yd, y, dyd, dy, xd, x), beta, (dxd, dx) = arrays[:6], arrays[6], arrays[7:]
        self._start("PoolingBackward", handle, alpha, beta)
        source, outputs, dout = self._read(xd, x), self._read(yd, y), self._read(dyd, dy)
        assert len({x, dy, dx}) == 3, "poolings are not computed in place"
        mode, values, pixels = self._windows(pooling, source)
        there = pixels >= 0
        if mode == MAX_DETERMINISTIC:
            largest = np.where(there, values, -np.inf)
            np.testing.assert_array_equal(outputs, largest.max(-1), "y is not the output of x")
            parts = np.zeros(values.shape)
            # The first of equal maxima.
            first = largest.argmax(-1)[..., None]
            np.put_along_axis(parts, first, dout[..., None], -1)
        else:
            parts = np.broadcast_to((dout / there.sum(-1))[..., None], values.shape)
        result = np.zeros((*source.shape[:2], source.shape[2] * source.shape[3]))
        index = np.broadcast_to(pixels, parts.shape)
        n, c = np.ogrid[: source.shape[0], : source.shape[1]]
        where = (n[..., None, None, None], c[..., None, None, None], np.maximum(index, 0))
        np.add.at(result, where, np.where(there, parts, 0.0))
        self._write(dxd, dx, result.reshape(source.shape))

    # Activations and softmax.

    def _ActivationForward(
        self, handle: int, activation: int, alpha: Any, xd: int, x: int, beta: Any, yd: int, y: int
    ) -> None:
        self._start("ActivationForward", handle, alpha, beta)
        (mode,) = self._get("Activation", activation)
        z = self._read(xd, x)
        relu = np.where(z <= 0.0, 0.0, z)
        self._write(yd, y, relu if mode == RELU else 0.5 + 0.5 * np.tanh(0.5 * z))

    def _ActivationBackward(self, handle: int, activation: int, alpha: Any, *arrays: Any) -> None:
        (yd, y, dyd, dy, xd, x), beta, (dxd, dx) = arrays[:6], arrays[6], arrays[7:]
        self._start("ActivationBackward", handle, alpha, beta)
        (mode,) = self._get("Activation", activation)
        outputs, dout, z = self._read(yd, y), self._read(dyd, dy), self._read(xd, x)
        # Which of both cuDNN reads is not documented, so they must agree.
        assert ((z > 0.0) == (outputs > 0.0)).all()
        slope = (outputs > 0.0) if mode == RELU else outputs * (1.0 - outputs)
        self._write(dxd, dx, dout * slope)

    def _SoftmaxForward(
        self, handle: int, algorithm: int, mode: int, alpha: Any, *arrays: Any
    ) -> None:
        (xd, x), beta, (yd, y) = arrays[:2], arrays[2], arrays[3:]
        self._start("SoftmaxForward", handle, alpha, beta)
        assert (algorithm, mode) == (LOG_SOFTMAX, INSTANCE)
        z = self._read(xd, x)
        shifted = z - z.max((1, 2, 3), keepdims=True)
        self._write(yd, y, shifted - np.log(np.exp(shifted).sum((1, 2, 3), keepdims=True)))

    def _SoftmaxBackward(
        self, handle: int, algorithm: int, mode: int, alpha: Any, *arrays: Any
    ) -> None:
        (yd, y, dyd, dy), beta, (dxd, dx) = arrays[:4], arrays[4], arrays[5:]
        self._start("SoftmaxBackward", handle, alpha, beta)
        assert (algorithm, mode) == (LOG_SOFTMAX, INSTANCE)
        logs, dout = self._read(yd, y), self._read(dyd, dy)
        self._write(dxd, dx, dout - np.exp(logs) * dout.sum((1, 2, 3), keepdims=True))


def to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Return the bits of the nearest bfloat16, ties to even."""
    bits = np.ascontiguousarray(values).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
