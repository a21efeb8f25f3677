"""The ONNX operators of each layer, in inference.

A function for a class of layers adds nodes to a graph and returns the name of the output tensor.
Parameters are constants with their own names, such as ``conv1.weight``. To export a new class, add
a function and an entry in `OPERATORS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from dptrain.errors import UserError
from dptrain.interchange.onnx_functions import add_function
from dptrain.interchange.onnx_graph import OPSET, OnnxGraph
from dptrain.interchange.onnx_resampling import PAD_MODES
from dptrain.network.combining import (
    Add,
    Concatenate,
    GlobalAveragePool2d,
    GlobalMaxPool2d,
    Multiply,
)
from dptrain.network.elementwise import Activation
from dptrain.network.layers import (
    AveragePool2d,
    Conv2d,
    Dense,
    Dropout,
    Flatten,
    Layer,
    LocalResponseNorm,
    MaxPool2d,
    Pads,
    Reshape,
    StochasticDepth,
    SumPool2d,
    entry_of,
)
from dptrain.network.maps.channels import ChannelShuffle, ChannelSlice
from dptrain.network.maps.resampling import Crop2d, Dilate2d, Pad2d, Resize2d
from dptrain.network.network import Node
from dptrain.network.normalization import BatchNorm2d, GroupNorm, LayerNorm

Tensors = list[str]
"""Names of the tensors that a layer reads."""


def add_layer(graph: OnnxGraph, node: Node, inputs: Tensors) -> str:
    """Add the operators of a layer and return the name of its output.

    Raises:
        UserError: the class of the layer has no entry in `OPERATORS`.
    """
    add = entry_of(OPERATORS, node.layer)
    if add is None:
        raise UserError(f"layer {node.name}: {node.layer.kind} cannot be exported to ONNX")
    with graph.scope(node.name):
        return add(graph, node, node.layer, inputs)


def _weights(node: Node) -> list[str]:
    return [p.name for p in node.parameters]


def _pads(pads: Pads) -> list[int]:
    (top, bottom), (left, right) = pads
    return [top, left, bottom, right]


def _conv(graph: OnnxGraph, node: Node, layer: Conv2d, inputs: Tensors) -> str:
    return graph.add(
        "Conv",
        inputs[0],
        *_weights(node),
        kernel_shape=layer.window,
        strides=layer.strides,
        pads=_pads(layer.pads(node.input_shape)),
        dilations=layer.dilations,
        group=layer.groups,
    )


def _dense(graph: OnnxGraph, node: Node, layer: Dense, inputs: Tensors) -> str:
    return graph.add("Gemm", inputs[0], *_weights(node), transB=1)


def _windows(node: Node, layer: MaxPool2d | AveragePool2d | SumPool2d) -> dict[str, Any]:
    return {
        "kernel_shape": layer.windows,
        "strides": layer.strides,
        "pads": _pads(layer.pads(node.input_shape)),
    }


def _max_pool(graph: OnnxGraph, node: Node, layer: MaxPool2d, inputs: Tensors) -> str:
    return graph.add("MaxPool", inputs[0], **_windows(node, layer))


def _average_pool(graph: OnnxGraph, node: Node, layer: AveragePool2d, inputs: Tensors) -> str:
    return graph.add(
        "AveragePool",
        inputs[0],
        count_include_pad=int(layer.count_padding),
        **_windows(node, layer),
    )


def _sum_pool(graph: OnnxGraph, node: Node, layer: SumPool2d, inputs: Tensors) -> str:
    means = graph.add("AveragePool", inputs[0], count_include_pad=1, **_windows(node, layer))
    return graph.add("Mul", means, graph.constant("size", math.prod(layer.windows)))


def _dropout(graph: OnnxGraph, node: Node, layer: Dropout, inputs: Tensors) -> str:
    # In inference, ONNX's Dropout returns its input. It keeps the rate for an import.
    return graph.add("Dropout", inputs[0], graph.constant("rate", layer.rate))


def _activation(graph: OnnxGraph, node: Node, layer: Activation, inputs: Tensors) -> str:
    return add_function(graph, layer, inputs[0], OPSET)


def _batch_norm(graph: OnnxGraph, node: Node, layer: BatchNorm2d, inputs: Tensors) -> str:
    statistics = [s.name for s in node.statistics]
    return graph.add(
        "BatchNormalization",
        inputs[0],
        *_weights(node),
        *statistics,
        epsilon=layer.epsilon,
        momentum=1.0 - layer.momentum,
    )


def _group_norm(graph: OnnxGraph, node: Node, layer: GroupNorm, inputs: Tensors) -> str:
    # The operator GroupNormalization needs opset 21.
    channels, height, width = node.input_shape
    groups = layer.groups
    ones, zeros = graph.constant("ones", [1.0] * groups), graph.constant("zeros", [0.0] * groups)
    rows = graph.add("Reshape", inputs[0], graph.constant("rows", [0, groups, -1], "int64"))
    normal = graph.add("InstanceNormalization", rows, ones, zeros, epsilon=layer.epsilon)
    maps = graph.constant("maps", [0, channels, height, width], "int64")
    normal = graph.add("Reshape", normal, maps)
    axes = graph.constant("axes", [1, 2], "int64")
    weight, bias = (graph.add("Unsqueeze", name, axes) for name in _weights(node))
    return graph.add("Add", graph.add("Mul", normal, weight), bias)


def _layer_norm(graph: OnnxGraph, node: Node, layer: LayerNorm, inputs: Tensors) -> str:
    is_vector = len(node.input_shape) == 1
    x = inputs[0] if is_vector else graph.add("Transpose", inputs[0], perm=[0, 2, 3, 1])
    y = graph.add("LayerNormalization", x, *_weights(node), axis=-1, epsilon=layer.epsilon)
    return y if is_vector else graph.add("Transpose", y, perm=[0, 3, 1, 2])


def _lrn(graph: OnnxGraph, node: Node, layer: LocalResponseNorm, inputs: Tensors) -> str:
    # ONNX takes the mean over the window of squares, dptrain the sum.
    size = 2 * layer.radius + 1
    return graph.add(
        "LRN", inputs[0], size=size, alpha=layer.alpha * size, beta=layer.beta, bias=layer.bias
    )


def _add(graph: OnnxGraph, node: Node, layer: Add, inputs: Tensors) -> str:
    return graph.add("Add" if len(inputs) == 2 else "Sum", *inputs)


def _concatenate(graph: OnnxGraph, node: Node, layer: Concatenate, inputs: Tensors) -> str:
    return graph.add("Concat", *inputs, axis=1)


def _slice(graph: OnnxGraph, node: Node, layer: ChannelSlice, inputs: Tensors) -> str:
    bounds = [
        graph.constant(name, [value], "int64")
        for name, value in (("start", layer.start), ("stop", layer.stop), ("axis", 1))
    ]
    return graph.add("Slice", inputs[0], *bounds)


def _shuffle(graph: OnnxGraph, node: Node, layer: ChannelShuffle, inputs: Tensors) -> str:
    channels, height, width = node.input_shape
    parts = [0, layer.groups, channels // layer.groups, height, width]
    groups = graph.add("Reshape", inputs[0], graph.constant("groups", parts, "int64"))
    turned = graph.add("Transpose", groups, perm=[0, 2, 1, 3, 4])
    maps = graph.constant("maps", [0, channels, height, width], "int64")
    return graph.add("Reshape", turned, maps)


def _reshape(graph: OnnxGraph, node: Node, layer: Reshape, inputs: Tensors) -> str:
    return graph.add("Reshape", inputs[0], graph.constant("shape", [-1, *layer.shape], "int64"))


def _pad(graph: OnnxGraph, node: Node, layer: Pad2d, inputs: Tensors) -> str:
    top, bottom, left, right = layer.sides
    pads = graph.constant("pads", [0, 0, top, left, 0, 0, bottom, right], "int64")
    return graph.add("Pad", inputs[0], pads, mode=PAD_MODES[layer.mode])


def _crop(graph: OnnxGraph, node: Node, layer: Crop2d, inputs: Tensors) -> str:
    parts = {"start": layer.start, "stop": layer.stop, "axes": (2, 3), "step": layer.step}
    bounds = [graph.constant(name, list(values), "int64") for name, values in parts.items()]
    return graph.add("Slice", inputs[0], *bounds)


def _dilate(graph: OnnxGraph, node: Node, layer: Dilate2d, inputs: Tensors) -> str:
    channels = node.input_shape[0]
    ones = graph.constant("ones", np.ones((channels, 1, 1, 1)))
    return graph.add("ConvTranspose", inputs[0], ones, strides=layer.factors, group=channels)


def _resize(graph: OnnxGraph, node: Node, layer: Resize2d, inputs: Tensors) -> str:
    if layer.size is None:
        sizes = ["", graph.constant("scales", [1.0, 1.0, *layer.scales])]
    else:
        bounds = [graph.constant("bound", [bound], "int64") for bound in (0, 2)]
        channels = graph.add("Slice", graph.add("Shape", inputs[0]), *bounds)
        maps = graph.constant("size", node.output_shape[1:], "int64")
        sizes = ["", "", graph.add("Concat", channels, maps, axis=0)]
    if layer.mode == "nearest":
        settings = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    else:
        positions = "align_corners" if layer.align_corners else "half_pixel"
        settings = {"mode": "linear", "coordinate_transformation_mode": positions}
    return graph.add("Resize", inputs[0], *sizes, **settings)


def _input(graph: OnnxGraph, node: Node, layer: Layer, inputs: Tensors) -> str:
    return inputs[0]


def _operator(name: str, graph: OnnxGraph, node: Node, layer: Layer, inputs: Tensors) -> str:
    return graph.add(name, *inputs)


AddOperators = Callable[[OnnxGraph, Node, Any, Tensors], str]

OPERATORS: Mapping[type[Layer], AddOperators] = {
    Conv2d: _conv,
    Dense: _dense,
    MaxPool2d: _max_pool,
    AveragePool2d: _average_pool,
    SumPool2d: _sum_pool,
    GlobalAveragePool2d: partial(_operator, "GlobalAveragePool"),
    GlobalMaxPool2d: partial(_operator, "GlobalMaxPool"),
    Flatten: partial(_operator, "Flatten"),
    Reshape: _reshape,
    Activation: _activation,
    Dropout: _dropout,
    StochasticDepth: _input,
    Dilate2d: _dilate,
    BatchNorm2d: _batch_norm,
    GroupNorm: _group_norm,
    LayerNorm: _layer_norm,
    LocalResponseNorm: _lrn,
    Add: _add,
    Concatenate: _concatenate,
    ChannelSlice: _slice,
    ChannelShuffle: _shuffle,
    Pad2d: _pad,
    Resize2d: _resize,
    Crop2d: _crop,
    Multiply: partial(_operator, "Mul"),
}
"""Functions that add the operators of a layer to a graph, by the class of the layer."""
