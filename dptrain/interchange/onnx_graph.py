"""A graph of ONNX operators under construction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnx
from numpy.typing import ArrayLike, NDArray
from onnx import TensorProto, helper, numpy_helper

OPSET, IR_VERSION = 17, 8
"""Versions of 2022 in which files are written, which runtimes have read for years."""

FLOAT, DOUBLE, INT64 = TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.INT64


class OnnxGraph:
    """Nodes and constants; tensors are identified by their names.

    The names of nodes, and of tensors they compute, are ``SCOPE/OPERATOR``.

    Attributes:
        nodes: the nodes in topological order.
        constants: the constants, ``initializer`` in ONNX.
    """

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, onnx.TensorProto] = {}
        self._scope = ""
        self._counts: Counter[str] = Counter()

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Name the nodes that a block adds after a layer."""
        before, self._scope = self._scope, name
        try:
            yield
        finally:
            self._scope = before

    def add(self, operator: str, *inputs: str, output: str | None = None, **attributes: Any) -> str:
        """Add a node with one output and return the name of the output.

        Args:
            operator: name of an ONNX operator.
            inputs: names of tensors; "" for an optional input that is omitted.
            output: name of the output; None for that of the node.
            attributes: the attributes of the operator.
        """
        name = self._unique(operator)
        output = name if output is None else output
        self.nodes.append(helper.make_node(operator, inputs, [output], name, **attributes))
        return output

    def constant(self, name: str, values: ArrayLike, dtype: Any = np.float32) -> str:
        """Add a constant of the scope and return its name."""
        return self.parameter(self._unique(name), np.asarray(values, dtype))

    def parameter(self, name: str, values: NDArray[Any]) -> str:
        """Add an array under a name of its own and return the name."""
        # A number has no axes, which ascontiguousarray would add.
        array = values if values.ndim == 0 else np.ascontiguousarray(values)
        self.constants[name] = numpy_helper.from_array(array, name)
        return name

    def cast(self, x: str, dtype: int) -> str:
        """Convert a tensor to another type."""
        return self.add("Cast", x, to=dtype)

    def _unique(self, name: str) -> str:
        full = f"{self._scope}/{name}"
        self._counts[full] += 1
        return full if self._counts[full] == 1 else f"{full}_{self._counts[full]}"
