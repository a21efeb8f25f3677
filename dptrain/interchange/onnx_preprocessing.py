"""The ONNX operators that convert raw samples to inputs of a network."""

from __future__ import annotations

import numpy as np

from dptrain.backends.resizing import bilinear_weights
from dptrain.data.preprocessing.images import LUMA
from dptrain.data.preprocessing.sensor_maps import interpolation_weights
from dptrain.interchange.onnx_graph import DOUBLE, FLOAT, INT64, OnnxGraph
from dptrain.interchange.raw_inputs import RawInputs, Size


def add_preprocessing(graph: OnnxGraph, raw: RawInputs, x: str) -> str:
    """Add the conversion of raw samples and return the name of the converted tensor.

    Args:
        graph: receives the operators.
        raw: the steps.
        x: name of the raw tensor, (N, *raw.shape) of type ``raw.dtype``.
    """
    if raw.mean:
        x = graph.add("Sub", x, graph.constant("mean", raw.mean, np.float64))
        x = graph.add("Div", x, graph.constant("deviation", raw.deviation, np.float64))
    if raw.crop is not None:
        x = _centre(graph, raw, raw.crop, x)
    x = graph.cast(x, FLOAT)
    if raw.becomes_grey:
        weights = graph.constant("luma", np.reshape(LUMA, (1, 3, 1, 1)))
        axis = graph.constant("channels", [1], np.int64)
        x = graph.add("ReduceSum", graph.add("Mul", x, weights), axis, keepdims=1)
    if raw.resize is not None:
        x = _resize(graph, raw, raw.resize, x)
    if raw.scale != 1.0:
        x = graph.add("Mul", x, graph.constant("scale", raw.scale))
    if raw.offset != 0.0:
        x = graph.add("Add", x, graph.constant("offset", raw.offset))
    if raw.positions:
        by_sensor = interpolation_weights(raw.positions, *raw.shape_of_inputs[1:])
        flat = graph.constant("map_weights", by_sensor.reshape(len(by_sensor), -1))
        shape = graph.constant("map_shape", [-1, *raw.shape_of_inputs], np.int64)
        x = graph.add("Reshape", graph.add("MatMul", x, flat), shape)
    if raw.transposes:
        x = graph.add("Transpose", x, perm=[0, 3, 1, 2])
    if raw.repeats_channels:
        repeats = graph.constant("repeats", [1, raw.shape_of_inputs[0], 1, 1], np.int64)
        x = graph.add("Expand", x, repeats)
    return graph.add("Flatten", x) if raw.flattens else x


def _centre(graph: OnnxGraph, raw: RawInputs, size: Size, x: str) -> str:
    """Cut out the centre of images."""
    shape = graph.constant("size", size, np.int64)
    axes = graph.constant("axes", [2, 3], np.int64)
    two = graph.constant("two", 2, np.int64)
    # Whole numbers are divided without a remainder.
    found = graph.add("Shape", x, start=2, end=4)
    first = graph.add("Div", graph.add("Sub", found, shape), two)
    return graph.add("Slice", x, first, graph.add("Add", first, shape), axes)


def _resize(graph: OnnxGraph, raw: RawInputs, size: Size, x: str) -> str:
    """Resize images by products with the weights of rows and columns.

    ONNX's Resize has no weights that are normalised at the border of images that get smaller.
    """
    for axis, (source, target) in enumerate(zip(raw.shape[1:], size, strict=True), 2):
        if source == target:
            continue
        if source is None:
            weights = _weights_of_any_size(graph, x, axis, target)
        else:
            weights = graph.constant("weights", bilinear_weights(source, target))
        if axis == 2:
            x = graph.add("MatMul", weights, x)
        else:
            x = graph.add("MatMul", x, graph.add("Transpose", weights, perm=[1, 0]))
    return x


def _weights_of_any_size(graph: OnnxGraph, x: str, axis: int, target: int) -> str:
    """Compute `bilinear_weights` of an axis whose size is known only when the file is run."""

    def number(value: float) -> str:
        return graph.constant("number", value, np.float64)

    source = graph.cast(graph.add("Shape", x, start=axis, end=axis + 1), DOUBLE)
    scale = graph.add("Div", source, number(target))
    width = graph.add("Max", scale, number(1.0))
    centres = graph.constant("centres", np.arange(target)[:, None] + 0.5, np.float64)
    count = graph.add("Squeeze", graph.cast(source, INT64))
    zero, one = (graph.constant("step", value, np.int64) for value in (0, 1))
    pixels = graph.cast(graph.add("Range", zero, count, one), DOUBLE)
    pixels = graph.add("Add", pixels, number(0.5))
    distances = graph.add("Abs", graph.add("Sub", pixels, graph.add("Mul", centres, scale)))
    falling = graph.add("Sub", number(1.0), graph.add("Div", distances, width))
    weights = graph.add("Max", falling, number(0.0))
    last = graph.constant("axis", [1], np.int64)
    sums = graph.add("ReduceSum", weights, last, keepdims=1)
    return graph.cast(graph.add("Div", weights, sums), FLOAT)
