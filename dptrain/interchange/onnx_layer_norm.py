"""Layer normalisation as ONNX operators: one operator, or those of opset 16 and before."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import onnx

from dptrain.errors import UserError
from dptrain.interchange.onnx_matching import Match, axes_of, constants, epsilon_of
from dptrain.interchange.onnx_reading import ReadGraph, attributes, number
from dptrain.network.layers import Layer, Shape
from dptrain.network.normalization import LayerNorm


def read_layer_norm(graph: ReadGraph, node: onnx.NodeProto) -> Match:
    """Match a normalisation of the channels of maps, or of vectors."""
    axis = attributes(node).get("axis", -1)
    return _normalised(graph, node.input[0], axis, list(node.input[1:]), epsilon_of(node))


def _normalised(graph: ReadGraph, x: str, axis: int, names: list[str], epsilon: float) -> Match:
    """Return the layer that normalises a tensor over an axis and those after it."""
    arrays = constants(graph, names, ("weight", "bias"))
    arrays = {part: values.reshape(-1) for part, values in arrays.items()}
    arrays.setdefault("bias", np.zeros_like(arrays["weight"]))
    is_last = graph.is_channels_last(x)

    def make(shape: Shape) -> tuple[Layer, ...]:
        axes = 1 + len(shape)
        if axis % axes != (axes - 1 if is_last else 1) or len(arrays["weight"]) != shape[0]:
            raise UserError(f"axis is {axis}; expected the channels, or the elements of a vector")
        return (LayerNorm(epsilon=epsilon),)

    return Match((x,), make, arrays, graph.source(names[0]))


def read_transposed_layer_norm(graph: ReadGraph, node: onnx.NodeProto) -> Match | None:
    """Match Transpose, LayerNormalization and Transpose, which dptrain names after one layer."""
    norm = graph.node(node.input[0], "LayerNormalization")
    first = None if norm is None else graph.node(norm.input[0], "Transpose")
    if norm is None or first is None or not graph.is_own:
        return None
    return replace(read_layer_norm(graph, norm), inputs=(first.input[0],))


def _orders(node: onnx.NodeProto | None) -> Iterator[tuple[str, str]]:
    """Yield the two inputs of a node in both orders."""
    if node is not None and len(node.input) == 2:
        first, second = node.input
        yield first, second
        yield second, first


def read_layer_norm_of_operators(graph: ReadGraph, node: onnx.NodeProto) -> Match | None:
    """Match w · (x − mean) / sqrt(variance + epsilon) + b, as older opsets have it."""
    for scaled, bias in _orders(node):
        for normal, weight in _orders(graph.node(scaled, "Mul")):
            quotient = graph.node(normal, "Div")
            if quotient is None or not graph.is_constant(bias) or not graph.is_constant(weight):
                continue
            found = _standardised(graph, quotient)
            if found is not None:
                x, axis, epsilon = found
                return _normalised(graph, x, axis, [weight, bias], epsilon)
    return None


def _standardised(graph: ReadGraph, quotient: onnx.NodeProto) -> tuple[str, int, float] | None:
    """Return x, the axis and epsilon of (x − mean) / sqrt(variance + epsilon)."""
    centred, root = _difference(graph, quotient.input[0]), graph.node(quotient.input[1], "Sqrt")
    mean = None if centred is None else graph.node(centred[1], "ReduceMean")
    if centred is None or root is None or mean is None or mean.input[0] != centred[0]:
        return None
    for variance, constant in _orders(graph.node(root.input[0], "Add")):
        square_mean, epsilon = graph.node(variance, "ReduceMean"), graph.constant(constant)
        power = None if square_mean is None else graph.node(square_mean.input[0])
        if square_mean is None or power is None or epsilon is None or epsilon.size != 1:
            continue
        axes = axes_of(graph, mean)
        is_same = _difference(graph, power.input[0]) == centred
        if is_same and _is_square(graph, power) and axes == axes_of(graph, square_mean):
            return (mean.input[0], axes[0], number(epsilon.item())) if len(axes) == 1 else None
    return None


def _difference(graph: ReadGraph, tensor: str) -> tuple[str, str] | None:
    """Return the tensors of which another one is the difference: a sum with a negative one."""
    for x, name in _orders(graph.node(tensor, "Add")):
        negative = graph.node(name, "Neg")
        if negative is not None:
            return x, negative.input[0]
    return None


def _is_square(graph: ReadGraph, node: onnx.NodeProto) -> bool:
    if node.op_type == "Mul":
        return bool(node.input[0] == node.input[1])
    power = graph.constant(node.input[1]) if node.op_type == "Pow" else None
    return power is not None and power.size == 1 and power.item() == 2
