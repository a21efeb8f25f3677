"""Numbers that an ONNX graph computes from shapes of its tensors, such as the sizes of a reshape.

They are known before data is, because only the number of samples is free. The shape of each tensor
follows from its operator, one after another.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper, shape_inference

Values = dict[str, NDArray[Any]]

FREE_BATCH = 1_000_003
"""Stands for the number of samples if it is free: a prime, which is no size of a map."""

STARTS = ("Shape", "ConstantOfShape")
"""Operators whose output is known, from which others are computed."""

MOST_ELEMENTS = 1024
"""Most elements of a constant from which shapes are computed."""


def values_of_shapes(model: onnx.ModelProto) -> Values:
    """Return the tensors that are computed from shapes, by name.

    Operators whose shapes ONNX does not infer end the search along their outputs.
    """
    if all(node.op_type not in STARTS for node in model.graph.node):
        return {}
    search = _Search(model)
    for node in model.graph.node:
        try:
            search.visit(node)
        except Exception:  # onnx has many classes of errors, and damaged nodes are refused later.
            continue
    return search.found


class _Search:
    """Types and known values of tensors, in the order of a file.

    Attributes:
        found: values that are computed from shapes.
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        self.found: Values = {}
        self._opsets = list(model.opset_import)
        self._version = next((each.version for each in self._opsets if not each.domain), 1)
        self._known: Values = {}
        self._types: dict[str, onnx.TypeProto] = {}
        for value in model.graph.input:
            kind = onnx.TypeProto()
            kind.CopyFrom(value.type)
            first = kind.tensor_type.shape.dim[:1]
            if first and not first[0].HasField("dim_value"):
                first[0].dim_value = FREE_BATCH
            self._types[value.name] = kind
        for constant in model.graph.initializer:
            self._keep(constant.name, constant)

    def _keep(self, name: str, constant: TensorProto) -> None:
        self._types[name] = helper.make_tensor_type_proto(constant.data_type, constant.dims)
        if np.prod(constant.dims, dtype=np.int64) <= MOST_ELEMENTS:
            self._known[name] = np.asarray(numpy_helper.to_array(constant))

    def visit(self, node: onnx.NodeProto) -> None:
        """Find the values or the types of the outputs of a node."""
        if node.op_type == "Constant":
            for attribute in node.attribute:
                value = helper.get_attribute_value(attribute)
                tensor = value if isinstance(value, TensorProto) else numpy_helper.from_array(
                    np.asarray(value)
                )  # fmt: skip
                self._keep(node.output[0], tensor)
            return
        inputs = [name for name in node.input if name]
        if node.op_type == "Shape":
            self._set(node.output[0], self._shape(inputs[0]))
        elif self._is_known(node, inputs):
            self._evaluate(node)
        else:
            self._infer(node)

    def _is_known(self, node: onnx.NodeProto, inputs: list[str]) -> bool:
        """Return whether a node computes with shapes, and with constants alone."""
        is_of_shapes = node.op_type in STARTS or any(name in self.found for name in inputs)
        return is_of_shapes and all(name in self._known for name in inputs)

    def _set(self, name: str, value: NDArray[Any]) -> None:
        self.found[name] = self._known[name] = value
        self._types[name] = numpy_helper_type(value)

    def _shape(self, name: str) -> NDArray[np.int64]:
        sizes = self._types[name].tensor_type.shape.dim
        return np.array([size.dim_value for size in sizes if size.HasField("dim_value")], np.int64)

    def _evaluate(self, node: onnx.NodeProto) -> None:
        from onnx.reference import ReferenceEvaluator

        names = dict.fromkeys(name for name in node.input if name)
        graph = helper.make_graph(
            [node],
            "node",
            [helper.make_value_info(name, self._types[name]) for name in names],
            [helper.make_empty_tensor_value_info(name) for name in node.output],
        )
        model = helper.make_model(graph, opset_imports=self._opsets, ir_version=8)
        results = ReferenceEvaluator(model).run(None, {name: self._known[name] for name in names})
        for name, value in zip(node.output, results, strict=True):
            self._set(name, np.asarray(value))

    def _infer(self, node: onnx.NodeProto) -> None:
        schema = onnx.defs.get_schema(node.op_type, self._version, node.domain)
        data = {
            name: numpy_helper.from_array(self._known[name], name)
            for name in node.input
            if name in self._known
        }
        types = {name: self._types[name] for name in node.input if name}
        self._types |= shape_inference.infer_node_outputs(
            schema, node, types, data, opset_imports=self._opsets
        )


def numpy_helper_type(value: NDArray[Any]) -> onnx.TypeProto:
    """Return the type of an array."""
    return helper.make_tensor_type_proto(helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
