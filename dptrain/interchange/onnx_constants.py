"""Tensors of an ONNX graph that are known before data is: constants, and what follows from them.

One pass over the nodes, in the order of a file, infers the type of each tensor and finds the nodes
that compute with constants and shapes alone: sizes of a reshape, transposed weights, weights that
are standardised. Only the number of samples is free.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper, shape_inference

from dptrain.errors import UserError, shown

Values = dict[str, NDArray[Any]]

FREE_BATCH = 1_000_003
"""Stands for the number of samples if it is free: a prime, which is no size of a map."""

MOST_ELEMENTS = 1024
"""Most elements of a constant that is kept, from which types are inferred. A larger one is computed
when it is read, and has at most as many elements as all constants of the file."""

TRAINING_MODE = 15
"""Version of ONNX from which batch normalisations have the attribute `training_mode`, with the
types of today."""

RANDOM = (
    "Bernoulli", "Dropout", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform",
    "RandomUniformLike",
)  # fmt: skip
"""Operators whose values differ each time."""


class Constants:
    """Known tensors of a model.

    Attributes:
        nodes: the nodes of the graph in fewer forms: no input is a copy, CastLike is Cast, parts of
            a sequence are Slice, and what adds or removes axes of maps is Reshape, if types of
            tensors and sizes of parts are known.
        given: names of the constants that the file contains as such.
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        graph = model.graph
        self.nodes: list[onnx.NodeProto] = []
        self._opsets = list(model.opset_import)
        self._version = next((each.version for each in self._opsets if not each.domain), 1)
        self._tensors: dict[str, TensorProto] = {}
        self._values: Values = {}
        self._copies: dict[str, str] = {}
        self._splits: dict[str, onnx.NodeProto] = {}
        self._computed: dict[str, onnx.NodeProto] = {}
        self._types = {value.name: _type_of_input(value) for value in graph.input}
        for constant in graph.initializer:
            self._keep(constant.name, constant)
        self.given = frozenset(self._tensors)
        sizes = (math.prod(each.dims) for each in graph.initializer)
        self._most_elements = max(MOST_ELEMENTS, sum(sizes))
        for each in graph.node:
            node = self._as_slice(self._as_newer(self._without_copies(each)))
            # onnx has many classes of errors, and damaged nodes are refused when they are read.
            with suppress(Exception):
                self._visit(node)
            self.nodes.append(self._as_reshape(node))

    def __contains__(self, tensor: str) -> bool:
        return tensor in self._values or tensor in self._tensors or tensor in self._computed

    def shape(self, tensor: str) -> tuple[int, ...] | None:
        """Return the shape of a tensor; None if it does not follow from the graph.

        The number of samples is `FREE_BATCH` if it is free.
        """
        kind = self._types.get(tensor)
        if kind is None or not kind.tensor_type.HasField("shape"):
            return None
        dims = kind.tensor_type.shape.dim
        is_known = all(size.HasField("dim_value") for size in dims)
        return tuple(size.dim_value for size in dims) if is_known else None

    def value(self, tensor: str) -> NDArray[Any] | None:
        """Return the value of a known tensor; None for others.

        Raises:
            UserError: the constant is damaged.
        """
        if tensor in self._values:
            return self._values[tensor]
        if tensor in self._tensors:
            return _array(self._tensors[tensor])
        if tensor not in self._computed:
            return None
        found: Values = {}
        for node in self._before(tensor):
            try:
                found |= self._evaluate(node, found)
            except Exception as error:  # onnx has many classes of errors.
                raise UserError(
                    f"the constant '{shown(tensor)}' cannot be computed ({shown(error)}); export "
                    "the model again"
                ) from None
        return found[tensor]

    def _before(self, tensor: str) -> list[onnx.NodeProto]:
        """Return the nodes that compute a tensor from values, in their order."""
        needed, waiting = dict[str, onnx.NodeProto](), [tensor]
        while waiting:
            name = waiting.pop()
            node = None if name in self._values else self._computed.get(name)
            if node is not None and node.output[0] not in needed:
                needed[node.output[0]] = node
                waiting += node.input
        order = {output: index for index, output in enumerate(self._computed)}
        return sorted(needed.values(), key=lambda node: order[node.output[0]])

    def _keep(self, name: str, constant: TensorProto) -> None:
        self._types[name] = helper.make_tensor_type_proto(constant.data_type, constant.dims)
        self._tensors[name] = constant
        if math.prod(constant.dims) <= MOST_ELEMENTS:
            self._values[name] = _array(constant)

    def _without_copies(self, node: onnx.NodeProto) -> onnx.NodeProto:
        """Return a node that reads what Identity copies, not the copy."""
        if any(name in self._copies for name in node.input):
            direct = onnx.NodeProto()
            direct.CopyFrom(node)
            direct.input[:] = [self._copies.get(name, name) for name in node.input]
            node = direct
        if node.op_type == "Identity" and node.input:
            self._copies[node.output[0]] = node.input[0]
        return node

    def _as_newer(self, node: onnx.NodeProto) -> onnx.NodeProto:
        """Return Cast for CastLike, whose second input has a type alone that counts.

        A batch normalisation has `training_mode`, which older versions state by their outputs.
        """
        if (
            node.op_type == "BatchNormalization"
            and self._version < TRAINING_MODE
            and len(node.output) > 3
        ):
            newer = onnx.NodeProto()
            newer.CopyFrom(node)
            del newer.output[3:]
            newer.attribute.append(helper.make_attribute("training_mode", 1))
            return newer
        kind = self._types.get(node.input[1]) if len(node.input) == 2 else None
        if node.op_type != "CastLike" or kind is None:
            return node
        to = kind.tensor_type.elem_type
        return replacement(node, "Cast", node.input[:1], to=to)

    def _as_slice(self, node: onnx.NodeProto) -> onnx.NodeProto:
        """Return Slice for an element of a sequence that a split makes."""
        if node.op_type == "SplitToSequence":
            self._splits[node.output[0]] = node
        split = self._splits.get(node.input[0]) if node.op_type == "SequenceAt" else None
        shape = None if split is None else self.shape(split.input[0])
        index = self._values.get(node.input[1]) if split is not None else None
        sizes = self._values.get(split.input[1]) if split and len(split.input) > 1 else None
        if split is None or shape is None or index is None or sizes is None:
            return node
        axis = next((each.i for each in split.attribute if each.name == "axis"), 0)
        number = int(index)
        # One number is the size of every part; the last one may be smaller.
        bounds = np.cumsum([0, *sizes]) if sizes.ndim else np.arange(number + 2) * int(sizes)
        output, parts = node.output[0], {"start": bounds[number], "stop": bounds[number + 1]}
        for name, value in (*parts.items(), ("axis", axis)):
            self._values[f"{output}:{name}"] = np.array([value], np.int64)
            self._types[f"{output}:{name}"] = helper.make_tensor_type_proto(TensorProto.INT64, [1])
        inputs = [split.input[0], *(f"{output}:{name}" for name in (*parts, "axis"))]
        return replacement(node, "Slice", inputs)

    def _as_reshape(self, node: onnx.NodeProto) -> onnx.NodeProto:
        """Return Reshape for an operator that adds or removes axes; of vectors, there is none."""
        shape = self.shape(node.output[0]) if node.op_type in ("Squeeze", "Unsqueeze") else None
        if shape is None or len(shape) < 3 or node.output[0] in self:
            return node
        sizes = f"{node.output[0]}:shape"
        self._values[sizes] = np.array(shape, np.int64)
        return replacement(node, "Reshape", [node.input[0], sizes])

    def _visit(self, node: onnx.NodeProto) -> None:
        """Find the types of the outputs of a node, and whether their values are known."""
        if node.op_type == "Constant":
            self._keep(node.output[0], _tensor_of(node))
            return
        self._infer(node)
        inputs = [name for name in node.input if name]
        if node.op_type == "Shape":
            self._read_shape(node)
        elif node.op_type not in RANDOM and all(name in self for name in inputs):
            self._compute(node, inputs)

    def _read_shape(self, node: onnx.NodeProto) -> None:
        shape = self.shape(node.input[0])
        if shape is not None:
            bounds = {each.name: each.i for each in node.attribute}
            kept = shape[bounds.get("start", 0) : bounds.get("end", len(shape))]
            self._values[node.output[0]] = np.array(kept, np.int64)

    def _compute(self, node: onnx.NodeProto, inputs: Iterable[str]) -> None:
        """Keep the values of a node if they are few, and otherwise the node that computes them."""
        sizes = [self._num_elements(name) for name in node.output if name]
        if max(sizes) <= MOST_ELEMENTS and all(name in self._values for name in inputs):
            self._values |= self._evaluate(node, {})
        # The batch may make a tensor of any size of a few numbers.
        elif max(sizes) <= self._most_elements:
            self._computed |= {name: node for name in node.output if name}

    def _num_elements(self, tensor: str) -> float:
        shape = self.shape(tensor)
        return math.inf if shape is None else math.prod(shape)

    def _evaluate(self, node: onnx.NodeProto, before: Mapping[str, NDArray[Any]]) -> Values:
        """Return the outputs of a node by name."""
        from onnx.reference import ReferenceEvaluator

        values = {name: self._input(name, before) for name in node.input if name}
        graph = helper.make_graph(
            [node],
            "node",
            [helper.make_value_info(name, self._types[name]) for name in values],
            [helper.make_empty_tensor_value_info(name) for name in node.output if name],
        )
        opsets = self._opsets_of(node)
        model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
        results = ReferenceEvaluator(model).run(None, values)
        names = [name for name in node.output if name]
        return {name: np.asarray(each) for name, each in zip(names, results, strict=True)}

    def _input(self, name: str, before: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
        if name in before:
            return before[name]
        return self._values[name] if name in self._values else _array(self._tensors[name])

    def _opsets_of(self, node: onnx.NodeProto) -> list[onnx.OperatorSetIdProto]:
        """Return the versions by which a node is computed; see `_as_newer`."""
        is_older = node.op_type == "BatchNormalization" and self._version < TRAINING_MODE
        return [helper.make_opsetid("", TRAINING_MODE)] if is_older else self._opsets

    def _infer(self, node: onnx.NodeProto) -> None:
        opsets = self._opsets_of(node)
        version = next((each.version for each in opsets if not each.domain), 1)
        schema = onnx.defs.get_schema(node.op_type, version, node.domain)
        data = {
            name: numpy_helper.from_array(self._values[name], name)
            for name in node.input
            if name in self._values
        }
        types = {name: self._types[name] for name in node.input if name}
        self._types |= shape_inference.infer_node_outputs(
            schema, node, types, data, opset_imports=opsets
        )


def replacement(
    node: onnx.NodeProto, operator: str, inputs: Iterable[str], **attributes: Any
) -> onnx.NodeProto:
    """Return a node with the output of another one, and what the exporter wrote about that."""
    found = helper.make_node(operator, list(inputs), node.output, node.name, **attributes)
    found.metadata_props.extend(node.metadata_props)
    return found


def _type_of_input(value: onnx.ValueInfoProto) -> onnx.TypeProto:
    """Return the type of an input of a graph, with `FREE_BATCH` samples if their number is free."""
    kind = onnx.TypeProto()
    kind.CopyFrom(value.type)
    first = kind.tensor_type.shape.dim[:1]
    if first and not first[0].HasField("dim_value"):
        first[0].dim_value = FREE_BATCH
    return kind


def _tensor_of(node: onnx.NodeProto) -> TensorProto:
    """Return the constant of a node Constant."""
    (attribute,) = node.attribute
    value = helper.get_attribute_value(attribute)
    if isinstance(value, TensorProto):
        return value
    dtype = np.float32 if attribute.name.startswith("value_float") else np.int64
    return numpy_helper.from_array(np.asarray(value, dtype))


def _array(constant: TensorProto) -> NDArray[Any]:
    try:
        return np.asarray(numpy_helper.to_array(constant))
    except Exception as error:  # onnx has many classes of errors.
        raise UserError(
            f"the constant '{shown(constant.name)}' is damaged ({shown(error)}); export the model "
            "again"
        ) from None
