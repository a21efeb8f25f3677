"""Fake of NVIDIA's module ``cudnn``: it records graphs and computes them with NumPy.

It implements the functions that the backend uses, and refuses what cuDNN would refuse: outputs
without description, plans that were not built, misaligned addresses. Two engines are offered for
every graph: engine 7 uses tensor cores and needs a workspace; engine 3 does neither.
"""

from __future__ import annotations

import ctypes
import enum
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.emulator.fake_cudnn_functions import to_bfloat16

ALIGNMENT = 16
"""Required alignment of addresses, in bytes."""


class cudnnGraphNotSupportedError(Exception):  # noqa: N801 - the module's own name
    """No engine, or not the selected engine, supports a graph."""


data_type = enum.Enum("data_type", "NOT_SET FLOAT BFLOAT16")
heur_mode = enum.Enum("heur_mode", "A B FALLBACK")
numerical_note = enum.Enum(
    "numerical_note",
    "TENSOR_CORE DOWN_CONVERT_INPUTS REDUCED_PRECISION_REDUCTION FFT NONDETERMINISTIC "
    "WINOGRAD_TILE_6x6 WINOGRAD_TILE_13x13",
)


@dataclass(frozen=True)
class Engine:
    """An engine that computes graphs."""

    number: int
    notes: tuple[Any, ...]
    workspace: int

    @property
    def name(self) -> str:
        """Name of the plan, in cuDNN's format."""
        return f"eng{self.number}_k2=1"


ENGINES = (Engine(7, (numerical_note.TENSOR_CORE,), 4096), Engine(3, (), 0))


@dataclass(eq=False)
class Tensor:
    """A tensor of a graph."""

    name: str
    dim: list[int] | None = None
    stride: list[int] | None = None
    data_type: Any = None
    output: bool = False

    def set_output(self, output: bool) -> Tensor:
        self.output = output
        return self

    def set_data_type(self, data_type: Any) -> Tensor:
        self.data_type = data_type
        return self

    def set_dim(self, dim: Sequence[int]) -> Tensor:
        self.dim = list(dim)
        return self

    def set_stride(self, stride: Sequence[int]) -> Tensor:
        self.stride = list(stride)
        return self


@dataclass
class Operation:
    """A node of a graph: the operation, its inputs and its result."""

    name: str
    inputs: tuple[Tensor, ...]
    result: Tensor
    geometry: Mapping[str, Sequence[int]] = field(default_factory=dict)


@dataclass
class Handle:
    """A handle and its stream."""

    stream: int = -1


class Module:
    """The object that ``import cudnn`` returns.

    Attributes:
        graphs: all graphs that were created.
        engines: engines that `create_execution_plans` offers.
        executed: name of the plan of each execution.
    """

    cudnnGraphNotSupportedError = cudnnGraphNotSupportedError  # noqa: N815
    data_type, heur_mode, numerical_note = data_type, heur_mode, numerical_note

    def __init__(self, engines: Sequence[Engine] = ENGINES) -> None:
        self.engines = engines
        self.graphs: list[Graph] = []
        self.executed: list[str] = []

    def backend_version(self) -> int:
        return 91900

    def create_handle(self) -> Handle:
        return Handle()

    def set_stream(self, *, handle: Handle, stream: int) -> None:
        handle.stream = stream

    def pygraph(self, **options: Any) -> Graph:
        self.graphs.append(Graph(self, **options))
        return self.graphs[-1]


class Graph:
    """A graph of operations."""

    def __init__(
        self,
        module: Module,
        *,
        io_data_type: Any,
        intermediate_data_type: Any,
        compute_data_type: Any,
        handle: Handle,
    ) -> None:
        self.module, self.handle, self.io_data_type = module, handle, io_data_type
        assert intermediate_data_type is compute_data_type is data_type.FLOAT
        self.tensors: list[Tensor] = []
        self.operations: list[Operation] = []
        self._barred: set[Any] = set()
        self._plans: list[Engine] | None = None
        self._built: int | None = None

    # Description.

    def tensor(
        self, *, dim: Sequence[int], stride: Sequence[int], data_type: Any, name: str
    ) -> Tensor:
        self.tensors.append(Tensor(name, list(dim), list(stride), data_type))
        return self.tensors[-1]

    def _add(self, name: str, *inputs: Tensor, **geometry: Sequence[int]) -> Tensor:
        assert self._plans is None, "a planned graph does not change"
        result = Tensor(f"{name}_result")
        self.operations.append(Operation(name, inputs, result, geometry))
        return result

    def conv_fprop(self, image: Tensor, weight: Tensor, **geometry: Sequence[int]) -> Tensor:
        return self._add("conv_fprop", image, weight, **geometry)

    def conv_dgrad(self, loss: Tensor, filter: Tensor, **geometry: Sequence[int]) -> Tensor:
        return self._add("conv_dgrad", loss, filter, **geometry)

    def conv_wgrad(self, image: Tensor, loss: Tensor, **geometry: Sequence[int]) -> Tensor:
        return self._add("conv_wgrad", image, loss, **geometry)

    def bias(self, input: Tensor, bias: Tensor) -> Tensor:
        return self._add("bias", input, bias)

    def relu(self, input: Tensor) -> Tensor:
        return self._add("relu", input)

    # Plans.

    def validate(self) -> None:
        results = [operation.result for operation in self.operations]
        assert [result.output for result in results] == [False] * (len(results) - 1) + [True]
        described = [*self.tensors, results[-1]]
        assert all(t.dim and t.stride and t.data_type is self.io_data_type for t in described)

    def build_operation_graph(self) -> None:
        pass

    def deselect_numeric_notes(self, notes: Sequence[Any]) -> None:
        self._barred |= set(notes)

    def create_execution_plans(self, modes: Sequence[Any]) -> None:
        assert modes == [heur_mode.A, heur_mode.FALLBACK]
        if not self.module.engines:
            raise cudnnGraphNotSupportedError("no engine proposed a plan for this graph")
        self._plans = list(self.module.engines)

    def get_execution_plan_count(self) -> int:
        return len(self._plans or ())

    def _plan(self, index: int) -> Engine:
        assert self._plans is not None
        return self._plans[index]

    def get_plan_name_at_index(self, index: int) -> str:
        return self._plan(index).name

    def get_engine_and_knobs_at_index(self, index: int) -> tuple[int, dict[str, int]]:
        return self._plan(index).number, {"k2": 1}

    def build_plan_at_index(self, index: int) -> None:
        if self._barred & set(self._plan(index).notes):
            raise cudnnGraphNotSupportedError("Deselecting execution plan")
        self._built = index

    def get_workspace_size_plan_at_index(self, index: int) -> int:
        assert index == self._built
        return self._plan(index).workspace

    # Execution.

    def execute(self, addresses: Mapping[Tensor, int], workspace: int, handle: Handle) -> None:
        assert self._built is not None
        assert handle is self.handle
        assert handle.stream >= 0, "no stream was set"
        assert workspace
        result = self.operations[-1].result
        assert set(addresses) == {*self.tensors, result}
        assert all(address % ALIGNMENT == 0 for address in addresses.values())
        self.module.executed.append(self._plan(self._built).name)
        values = {tensor: self._read(tensor, addresses[tensor]) for tensor in self.tensors}
        for operation in self.operations:
            inputs = [values[tensor] for tensor in operation.inputs]
            values[operation.result] = _COMPUTE[operation.name](operation, *inputs)
        self._write(result, addresses[result], values[result])

    def _memory(self, tensor: Tensor, address: int) -> NDArray[Any]:
        """Return the tensor's memory as an array with its dimensions in order."""
        assert tensor.dim is not None
        assert tensor.stride is not None
        dtype = np.dtype(np.float32 if tensor.data_type is data_type.FLOAT else np.uint16)
        count = 1 + sum((d - 1) * s for d, s in zip(tensor.dim, tensor.stride, strict=True))
        flat = np.frombuffer(
            (ctypes.c_char * (count * dtype.itemsize)).from_address(address), dtype
        )
        strides = [stride * dtype.itemsize for stride in tensor.stride]
        return np.lib.stride_tricks.as_strided(flat, tensor.dim, strides)

    def _read(self, tensor: Tensor, address: int) -> NDArray[np.float64]:
        memory = self._memory(tensor, address)
        if memory.dtype == np.uint16:
            memory = (memory.astype(np.uint32) << 16).view(np.float32)
        return memory.astype(np.float64)

    def _write(self, tensor: Tensor, address: int, values: NDArray[np.float64]) -> None:
        memory = self._memory(tensor, address)
        assert memory.shape == values.shape
        numbers = values.astype(np.float32)
        memory[...] = numbers if memory.dtype == np.float32 else to_bfloat16(numbers)


def _taps(operation: Operation, x_shape: Sequence[int], w_shape: Sequence[int]) -> Any:
    """Yield, for each filter element, its index and the pixels of the padded map it multiplies."""
    geometry = operation.geometry
    (top, left), (bottom, right) = geometry["pre_padding"], geometry["post_padding"]
    (down, across), dilations = geometry["stride"], geometry["dilation"]
    height, width = x_shape[2] + top + bottom, x_shape[3] + left + right
    extents = [(size - 1) * step + 1 for size, step in zip(w_shape[2:], dilations, strict=True)]
    rows, columns = (height - extents[0]) // down + 1, (width - extents[1]) // across + 1
    inside = np.s_[:, :, top : top + x_shape[2], left : left + x_shape[3]]
    taps = []
    for r, s in itertools.product(range(w_shape[2]), range(w_shape[3])):
        i, j = r * dilations[0], s * dilations[1]
        window = np.s_[:, :, i : i + down * rows : down, j : j + across * columns : across]
        taps.append((r, s, window))
    return (height, width), (rows, columns), inside, taps


def _padded(x: NDArray[np.float64], size: tuple[int, int], inside: Any) -> NDArray[np.float64]:
    padded = np.zeros((*x.shape[:2], *size))
    padded[inside] = x
    return padded


def _fprop(operation: Operation, x: Any, w: Any) -> NDArray[np.float64]:
    size, out, inside, taps = _taps(operation, x.shape, w.shape)
    padded, y = _padded(x, size, inside), np.zeros((len(x), len(w), *out))
    for r, s, window in taps:
        y += np.einsum("nchw,kc->nkhw", padded[window], w[:, :, r, s])
    return y


def _dgrad(operation: Operation, dy: Any, w: Any) -> NDArray[np.float64]:
    dim = operation.result.dim
    assert dim is not None
    size, _, inside, taps = _taps(operation, dim, w.shape)
    padded = np.zeros((*dim[:2], *size))
    for r, s, window in taps:
        padded[window] += np.einsum("nkhw,kc->nchw", dy, w[:, :, r, s])
    return np.asarray(padded[inside])


def _wgrad(operation: Operation, x: Any, dy: Any) -> NDArray[np.float64]:
    dim = operation.result.dim
    assert dim is not None
    size, _, inside, taps = _taps(operation, x.shape, dim)
    padded, dw = _padded(x, size, inside), np.zeros(dim)
    for r, s, window in taps:
        dw[:, :, r, s] = np.einsum("nkhw,nchw->kc", dy, padded[window])
    return dw


_COMPUTE: Mapping[str, Any] = {
    "conv_fprop": _fprop,
    "conv_dgrad": _dgrad,
    "conv_wgrad": _wgrad,
    "bias": lambda operation, y, b: y + b,
    "relu": lambda operation, y: np.where(y <= 0.0, 0.0, y),
}
