"""The same network as an ONNX model, which ONNX Runtime and OpenVINO read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from dptrain.network import (
    AveragePool2d,
    Conv2d,
    Dense,
    Dropout,
    Flatten,
    LocalResponseNorm,
    MaxPool2d,
    Network,
    Node,
    ReLU,
    Sigmoid,
    SumPool2d,
)

INPUT, OUTPUT = "x", "z"
OPSET, IR_VERSION = 17, 8
"""Versions that both runtimes have read for years."""


def write_onnx(
    network: Network, parameters: Mapping[str, NDArray[Any]], batch_size: int, path: Path
) -> None:
    """Write the inference of `network` for batches of a fixed size."""
    path.write_bytes(onnx_model(network, parameters, batch_size).SerializeToString())


def onnx_model(
    network: Network, parameters: Mapping[str, NDArray[Any]], batch_size: int
) -> onnx.ModelProto:
    """Return the checked model, with `parameters` as constants."""
    nodes, constants, tensor = [], [], INPUT
    for node in network.nodes:
        made = _nodes(node, tensor)
        nodes += made
        tensor = made[-1].output[0] if made else tensor
        for parameter in node.parameters:
            value = np.ascontiguousarray(parameters[parameter.name], np.float32)
            constants.append(numpy_helper.from_array(value, parameter.name))
        if isinstance(node.layer, SumPool2d):
            size = np.array(math.prod(node.layer.windows), np.float32)
            constants.append(numpy_helper.from_array(size, f"{node.name}.size"))
    nodes.append(helper.make_node("Identity", [tensor], [OUTPUT]))
    graph = helper.make_graph(
        nodes, network.name or "network",
        [_value(INPUT, (batch_size, *network.input_shape))],
        [_value(OUTPUT, (batch_size, *network.output_shape))],
        constants,
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)])
    model.ir_version = IR_VERSION
    onnx.checker.check_model(model)
    return model


def _value(name: str, shape: tuple[int, ...]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, list(shape))


def _nodes(node: Node, x: str) -> list[onnx.NodeProto]:
    """Return the operations of a layer; none for dropout, which inference skips."""
    layer, y = node.layer, f"{node.name}.y"
    weights = [f"{node.name}.weight", f"{node.name}.bias"]
    if isinstance(layer, Dropout):
        return []
    if isinstance(layer, Conv2d):
        (top, bottom), (left, right) = layer.pads(node.input_shape)
        return [helper.make_node(
            "Conv", [x, *weights], [y], kernel_shape=layer.window, strides=layer.strides,
            pads=[top, left, bottom, right],
        )]  # fmt: skip
    if isinstance(layer, Dense):
        return [helper.make_node("Gemm", [x, *weights], [y], transB=1)]
    if isinstance(layer, MaxPool2d | AveragePool2d | SumPool2d):
        return _pool(node, layer, x, y)
    if isinstance(layer, LocalResponseNorm):
        # ONNX takes the mean over the window of squares where dptrain takes the sum.
        size = 2 * layer.radius + 1
        return [helper.make_node(
            "LRN", [x], [y], size=size, alpha=layer.alpha * size, beta=layer.beta, bias=layer.bias
        )]  # fmt: skip
    kind = {ReLU: "Relu", Sigmoid: "Sigmoid", Flatten: "Flatten"}[type(layer)]
    return [helper.make_node(kind, [x], [y])]


def _pool(
    node: Node, layer: MaxPool2d | AveragePool2d | SumPool2d, x: str, y: str
) -> list[onnx.NodeProto]:
    (top, bottom), (left, right) = layer.pads(node.input_shape)
    options: dict[str, Any] = {
        "kernel_shape": layer.windows,
        "strides": layer.strides,
        "pads": [top, left, bottom, right],
    }
    if isinstance(layer, MaxPool2d):
        return [helper.make_node("MaxPool", [x], [y], **options)]
    if isinstance(layer, AveragePool2d):
        return [helper.make_node("AveragePool", [x], [y], count_include_pad=0, **options)]
    mean = f"{node.name}.mean"
    return [
        helper.make_node("AveragePool", [x], [mean], count_include_pad=1, **options),
        helper.make_node("Mul", [mean, f"{node.name}.size"], [y]),
    ]
