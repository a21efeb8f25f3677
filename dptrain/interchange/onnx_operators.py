"""The layers that ONNX operators are.

A reader for an operator receives a node and returns a `Match`, or None if the node does not end the
pattern of operators that the reader knows. To import a new layer, add a reader and an entry in
`READERS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto

from dptrain.errors import UserError, shown
from dptrain.interchange.onnx_channels import (
    read_blocks,
    read_scale,
    read_scale_and_shift,
    read_shuffle,
    read_space_to_depth,
    read_split,
    read_transpose,
    require_channels,
)
from dptrain.interchange.onnx_constants import FREE_BATCH
from dptrain.interchange.onnx_functions import ending_operators, match_function, operators
from dptrain.interchange.onnx_layer_norm import (
    read_layer_norm,
    read_layer_norm_of_operators,
    read_transposed_layer_norm,
)
from dptrain.interchange.onnx_matching import (
    Match,
    always,
    axes_of,
    constants,
    convolution_arrays,
    epsilon_of,
)
from dptrain.interchange.onnx_reading import ReadGraph, attributes, number
from dptrain.interchange.onnx_resampling import (
    before_padding,
    read_pad,
    read_resize,
    read_slice,
    read_transposed_convolution,
)
from dptrain.network.activations import Affine
from dptrain.network.combining import (
    Add,
    Concatenate,
    GlobalAveragePool2d,
    GlobalMaxPool2d,
    GlobalPool2d,
    Multiply,
)
from dptrain.network.layers import (
    AveragePool2d,
    Conv2d,
    Dense,
    Dropout,
    Flatten,
    Layer,
    LocalResponseNorm,
    MaxPool2d,
    Reshape,
    Shape,
    StochasticDepth,
    SumPool2d,
)
from dptrain.network.normalization import BatchNorm2d, GroupNorm

CHANNELS_ARE_LAST = "its input has the channels on the last axis; expected axis 1"

FLOATS = (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16)
"""Types of elements that the network computes as its own type."""


def match(graph: ReadGraph, node: onnx.NodeProto) -> Match | None:
    """Return the layers that end with a node; None if dptrain has no such layers.

    Raises:
        UserError: the operator has a setting that its layer does not have.
    """
    read = [x for x in node.input if x and not graph.is_constant(x)]
    layouts = {graph.is_channels_last(x) for x in read}
    if len(layouts) > 1:
        raise UserError("its inputs have the channels on different axes; expected one axis")
    if True in layouts and node.op_type not in _ANY_LAYOUT:
        raise UserError(CHANNELS_ARE_LAST)
    rows = {graph.is_row(x) for x in read}
    if True in rows and (len(rows) > 1 or node.op_type not in _OF_ROWS):
        raise UserError("its input is (N, C, W); expected maps (N, C, H, W)")
    for reader in READERS.get(node.op_type, ()):
        found = reader(graph, node)
        if found is not None:
            return found
    return None


def _same(graph: ReadGraph, node: onnx.NodeProto) -> Match:
    return Match((node.input[0],), always())


def _cast(graph: ReadGraph, node: onnx.NodeProto) -> Match:
    to = attributes(node)["to"]
    if to not in FLOATS:
        raise UserError("it converts to a type that is not floating-point, which rounds numbers")
    return _same(graph, node)


# Convolutions and dense layers.


def _conv(graph: ReadGraph, node: onnx.NodeProto) -> Match:
    arrays = convolution_arrays(graph, list(node.input[1:]))
    weight, values = arrays["weight"], attributes(node)
    if weight.ndim == 3:
        # Along a row of pixels, which is what (N, C, W) is read as.
        arrays["weight"] = weight = weight[:, :, None]
        values = _as_row(values)
    if weight.ndim != 4:
        raise UserError(f"its weight has {weight.ndim} axes; expected 4 (K, C, R, S)")
    filters, window = len(weight), (weight.shape[2], weight.shape[3])
    settings: dict[str, Any] = {
        "filters": filters,
        "kernel": _plain(window),
        "groups": values.get("group", 1),
        "stride": _plain(values.get("strides", (1, 1))),
        "dilation": _plain(values.get("dilations", (1, 1))),
        "bias": "bias" in arrays,
    }

    def make(shape: Shape) -> tuple[Layer, ...]:
        return (_with_padding(partial(Conv2d, **settings), values, shape, ("same", "full")),)

    return Match((node.input[0],), make, arrays, graph.source(node.input[1]))


def _as_row(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of a convolution of one axis for maps of one row."""
    found = dict(values)
    if "pads" in found:
        left, right = found["pads"]
        found["pads"] = [0, left, 0, right]
    return found | {name: (1, *found.get(name, (1,))) for name in ("strides", "dilations")}


def _refuse_dilations(values: Mapping[str, Any]) -> None:
    if any(value != 1 for value in values.get("dilations", ())):
        raise UserError(f"dilations are {list(values['dilations'])}; expected 1")


def _plain(pair: Any) -> int | tuple[int, int]:
    first, second = (int(value) for value in pair)
    return first if first == second else (first, second)


def _with_padding(
    make: Callable[..., Any], values: Mapping[str, Any], shape: Shape, names: tuple[str, ...]
) -> Any:
    """Return the convolution or pooling whose pads for an input are those of a node."""
    automatic = values.get("auto_pad", "NOTSET")
    top, left, bottom, right = values.get("pads", (0, 0, 0, 0))
    wanted = ((top, bottom), (left, right))
    if automatic == "SAME_UPPER":
        return make(padding="same")
    if automatic not in ("NOTSET", "VALID"):
        raise UserError(f"auto_pad is {automatic}; expected NOTSET, VALID or SAME_UPPER")
    equal = [int(top)] if len({top, left, bottom, right}) == 1 else []
    for padding in (*equal, *names):
        layer = make(padding=padding)
        if layer.pads(shape) == wanted:
            return layer if _fits(layer, shape) else make(padding=padding, rounding="floor")
    # Files of dptrain pad the last windows of a pooling that rounds up.
    with suppress(UserError):
        layer = make(padding=int(top), rounding="ceil")
        if layer.pads(shape) == wanted:
            return layer
    raise UserError(
        f"pads are {[top, left, bottom, right]}; expected equal numbers, or those of "
        f"{' or '.join(names)} padding"
    )


def _fits(layer: Layer, shape: Shape) -> bool:
    """Return True if a layer accepts an input."""
    try:
        layer.output_shape(shape)
    except UserError:
        return False
    return True


def _gemm(graph: ReadGraph, node: onnx.NodeProto) -> Match:
    values = attributes(node)
    if values.get("transA", 0) or values.get("alpha", 1.0) != 1 or values.get("beta", 1.0) != 1:
        raise UserError("transA, alpha or beta has another value than its default")
    return _dense(graph, node, list(node.input[1:]), transposed=bool(values.get("transB", 0)))


def _dense(graph: ReadGraph, node: onnx.NodeProto, names: list[str], *, transposed: bool) -> Match:
    arrays = constants(graph, names, ("weight", "bias"))
    weight = arrays["weight"]
    if weight.ndim != 2:
        raise UserError(f"its weight has {weight.ndim} axes; expected 2")
    weight = weight if transposed else np.ascontiguousarray(weight.T)
    units, x = len(weight), node.input[0]
    bias = arrays.get("bias", np.zeros(units, np.float32))
    if math.prod(bias.shape[:-1]) != 1 or bias.size not in (1, units) or bias.ndim > 2:
        raise UserError(f"its bias has shape {bias.shape}; expected ({units},)")
    bias = np.ascontiguousarray(np.broadcast_to(bias.reshape(-1), (units,)))
    layer: Layer = Dense(units)
    if graph.is_channels_last(x):
        weight, layer = weight[..., None, None], Conv2d(units, 1, bias="bias" in arrays)
    return Match((x,), always(layer), {"weight": weight, "bias": bias}, graph.source(names[0]))


def _matmul(graph: ReadGraph, node: onnx.NodeProto) -> Match | None:
    if not graph.is_constant(node.input[1]):
        return None
    return _dense(graph, node, [node.input[1]], transposed=False)


def _matmul_and_bias(graph: ReadGraph, node: onnx.NodeProto) -> Match | None:
    for product, bias in (tuple(node.input), tuple(reversed(node.input))):
        before = graph.node(product, "MatMul")
        if before is None or not graph.is_constant(bias):
            continue
        if graph.is_constant(before.input[1]) and graph.num_readers(product) == 1:
            return _dense(graph, before, [before.input[1], bias], transposed=False)
    return None


# Poolings and shapes.


def _pool(
    kind: type[MaxPool2d | AveragePool2d | SumPool2d], graph: ReadGraph, node: onnx.NodeProto
) -> Match:
    """Match a pooling; for a sum, the mean that is multiplied by the size of the window."""
    values, x = attributes(node), node.input[0]
    if kind is MaxPool2d and values.get("auto_pad", "NOTSET") in ("NOTSET", "VALID"):
        x, around = before_padding(graph, x)
        if any(around):
            inner = values.get("pads", [0, 0, 0, 0])
            values["pads"] = [a + b for a, b in zip(inner, around, strict=True)]
    _refuse_dilations(values)
    window = values["kernel_shape"]
    if len(window) != 2:
        raise UserError(f"the window has {len(window)} axes; expected 2")
    stride = _plain(values.get("strides", (1, 1)))
    settings: dict[str, Any] = {"window": _plain(window), "stride": stride}

    def make(shape: Shape) -> tuple[Layer, ...]:
        layer = _with_padding(partial(kind, **settings), values, shape, ("same",))
        pads = layer.pads(shape)
        if values.get("ceil_mode", 0) and not _fits(replace(layer, rounding="strict"), shape):
            layer = replace(layer, rounding="ceil")
        counts = bool(values.get("count_include_pad", 0))
        if kind is AveragePool2d and counts and np.any(pads):
            layer = replace(layer, count_padding=True)
        elif kind is SumPool2d and not counts and np.any(layer.pads(shape)):
            raise UserError(
                "count_include_pad is 0; expected a mean with the positions outside the map"
            )
        return (layer,)

    return Match((x,), make)


def sigmoid_argument(graph: ReadGraph, tensor: str) -> str | None:
    """Return z if a tensor is 1 / (1 + exp(−z)), as dptrain exports it; None if it is not."""
    total = graph.node(tensor, "Reciprocal")
    add = None if total is None else graph.node(total.input[0], "Add")
    for power, one in () if add is None else ((0, 1), (1, 0)):
        assert add is not None
        exp, constant = graph.node(add.input[power], "Exp"), graph.constant(add.input[one])
        negative = None if exp is None else graph.node(exp.input[0], "Neg")
        is_one = constant is not None and constant.size == 1 and constant.reshape(-1)[0] == 1
        if negative is not None and is_one:
            return str(negative.input[0])
    return None


def _sum_pool(graph: ReadGraph, node: onnx.NodeProto) -> Match | None:
    for means, factor in (tuple(node.input), tuple(reversed(node.input))):
        before, size = graph.node(means, "AveragePool"), graph.constant(factor)
        if before is None or size is None or size.size != 1:
            continue
        if float(size.reshape(-1)[0]) == math.prod(attributes(before)["kernel_shape"]):
            return _pool(SumPool2d, graph, before)
    return None


def _global_pool(kind: type[GlobalPool2d], graph: ReadGraph, node: onnx.NodeProto) -> Match:
    return Match((node.input[0],), always(kind()))


def _reduction(kind: type[GlobalPool2d], graph: ReadGraph, node: onnx.NodeProto) -> Match:
    """Match the mean or the maximum of all pixels."""
    values = attributes(node)
    axes = sorted(graph.axis(node.input[0], axis) for axis in axes_of(graph, node))
    if axes != [2, 3]:
        raise UserError(f"the axes of the reduction are {axes}; expected 2 and 3")
    if values.get("keepdims", 1) and graph.is_channels_last(node.input[0]):
        raise UserError(CHANNELS_ARE_LAST)
    layers: tuple[Layer, ...] = (kind(),) if values.get("keepdims", 1) else (kind(), Flatten())
    return Match((node.input[0],), always(*layers))


def _flatten(graph: ReadGraph, node: onnx.NodeProto) -> Match:
    axis = attributes(node).get("axis", 1)
    if axis != 1:
        raise UserError(f"axis is {axis}; expected 1")
    is_last = graph.is_channels_last(node.input[0])

    def make(shape: Shape) -> tuple[Layer, ...]:
        if is_last and shape[1:] != (1, 1):
            raise UserError(CHANNELS_ARE_LAST)
        return (Flatten(),)

    return Match((node.input[0],), make)


def _reshapes(graph: ReadGraph, node: onnx.NodeProto) -> Match | None:
    """Match several reshapes after which the shape is that of the input."""
    shape, before = graph.shape(node.output[0]), graph.node(node.input[0], "Reshape")
    passed = set[str]()
    while shape is not None and before is not None and before.output[0] not in passed:
        passed.add(before.output[0])
        if graph.shape(before.input[0]) == shape:
            return Match((before.input[0],), always())
        before = graph.node(before.input[0], "Reshape")
    return None


def _reshape(graph: ReadGraph, node: onnx.NodeProto) -> Match:
    target = graph.constant(node.input[1])
    if target is not None and target.size in (3, 4):
        return _reshape_to_maps(node, [int(size) for size in target.reshape(-1)])
    if target is None or target.size != 2:
        raise UserError("the new shape is no vector per sample; expected (N, F)")
    batch, features = (int(size) for size in target.reshape(-1))
    batches = {0, *graph.batches}

    def make(shape: Shape) -> tuple[Layer, ...]:
        count = math.prod(shape)
        keeps = (batch == -1 and features == count) or (
            batch in batches and features in (-1, count)
        )
        if not keeps:
            raise UserError(
                f"the new shape is ({batch}, {features}) for {count} numbers per sample; expected "
                f"a vector per sample, (0, -1) or (-1, {count})"
            )
        return (Flatten(),) if len(shape) > 1 else ()

    return Match((node.input[0],), make)


def _reshape_to_maps(node: onnx.NodeProto, target: list[int]) -> Match:
    """Match a reshape of one axis per sample into another axis of maps, or of rows (N, C, W)."""

    def make(shape: Shape) -> tuple[Layer, ...]:
        count = math.prod(shape)
        batch, *sizes = target
        maps = [shape[i] if size == 0 and len(shape) > i else size for i, size in enumerate(sizes)]
        known = math.prod(size for size in maps if size != -1)
        maps = [count // known if size == -1 and known else size for size in maps]
        if len(maps) == 2:
            maps.insert(1, 1)
        keeps = batch in (0, FREE_BATCH) or (batch == -1 and -1 not in sizes)
        is_same = tuple(maps) == shape
        is_one_axis = max(shape) == max(maps) == count == math.prod(maps)
        if not (keeps and (is_same or is_one_axis)):
            raise UserError(
                f"the new shape is {target} for {shape} per sample; expected a vector per sample, "
                "or one axis as another axis"
            )
        channels, height, width = maps
        return () if is_same else (Reshape((channels, height, width)),)

    return Match((node.input[0],), make)


def _squeeze(graph: ReadGraph, node: onnx.NodeProto) -> Match:
    def make(shape: Shape) -> tuple[Layer, ...]:
        if shape[1:] != (1, 1):
            raise UserError(f"axes of {shape} are removed; expected maps of one pixel")
        return (Flatten(),)

    return Match((node.input[0],), make)


# Normalisations.


def _batch_norm(graph: ReadGraph, node: onnx.NodeProto) -> Match:
    parts = ("weight", "bias", "running_mean", "running_var")
    arrays, values = constants(graph, list(node.input[1:]), parts), attributes(node)
    layer = BatchNorm2d(
        epsilon=epsilon_of(node),
        momentum=number(1.0 - number(values.get("momentum", 0.9))),
    )
    return Match((node.input[0],), always(layer), arrays, graph.source(node.input[1]))


def _instance_norm(graph: ReadGraph, node: onnx.NodeProto) -> Match:
    arrays = constants(graph, list(node.input[1:]), ("weight", "bias"))
    groups = attributes(node).get("num_groups", len(arrays["weight"]))
    layer = GroupNorm(groups=groups, epsilon=epsilon_of(node))
    return Match((node.input[0],), always(layer), arrays, graph.source(node.input[1]))


def _group_norm(graph: ReadGraph, node: onnx.NodeProto) -> Match | None:
    """Match Reshape, InstanceNormalization, Reshape, Mul and Add."""
    for scaled, bias in (tuple(node.input), tuple(reversed(node.input))):
        product = graph.node(scaled, "Mul")
        if product is None or not graph.is_constant(bias):
            continue
        for normal, weight in (tuple(product.input), tuple(reversed(product.input))):
            last = graph.node(normal, "Reshape")
            norm = None if last is None else graph.node(last.input[0], "InstanceNormalization")
            first = None if norm is None else graph.node(norm.input[0], "Reshape")
            if norm is not None and first is not None and graph.is_constant(weight):
                return _grouped(graph, norm, first.input[0], [weight, bias])
    return None


def _grouped(graph: ReadGraph, norm: onnx.NodeProto, x: str, names: list[str]) -> Match | None:
    inner = constants(graph, list(norm.input[1:]), ("weight", "bias"))
    if not ((inner["weight"] == 1).all() and (inner["bias"] == 0).all()):
        return None
    arrays = constants(graph, names, ("weight", "bias"))
    arrays = {part: values.reshape(-1) for part, values in arrays.items()}
    layer = GroupNorm(groups=len(inner["weight"]), epsilon=epsilon_of(norm))
    return Match((x,), always(layer), arrays, graph.source(names[0]))


def _lrn(graph: ReadGraph, node: onnx.NodeProto) -> Match:
    values = attributes(node)
    size = values["size"]
    if size % 2 == 0:
        raise UserError(f"size is {size}; expected an odd number")
    # ONNX takes the mean over the window of squares, dptrain the sum.
    layer = LocalResponseNorm(
        radius=size // 2,
        bias=number(values.get("bias", 1.0)),
        alpha=number(values.get("alpha", 1e-4)) / size,
        beta=number(values.get("beta", 0.75)),
    )
    return Match((node.input[0],), always(layer))


# Dropout and stochastic depth.


def _dropout(graph: ReadGraph, node: onnx.NodeProto) -> Match:
    rate = attributes(node).get("ratio", 0.5)
    if len(node.input) > 1 and node.input[1]:
        values = graph.constant(node.input[1])
        rate = 0.5 if values is None else float(values.reshape(-1)[0])
    return Match((node.input[0],), always(Dropout(number(rate))))


def _random_mask(graph: ReadGraph, node: onnx.NodeProto) -> Match | None:
    """Match the product of a tensor with a random mask: 1 with probability p, divided by p."""
    for x, mask in (tuple(node.input), tuple(reversed(node.input))):
        found = _scaled_mask(graph, mask)
        if found is not None:
            kept, scale, source = found
            if not math.isclose(kept * scale, 1.0, rel_tol=1e-5):
                raise UserError(
                    f"its random mask is {scale:g} with probability {kept:g}; expected "
                    f"{1 / kept:g}, 1 / probability"
                )
            layer = _mask_layer(graph, source, x, number(1.0 - kept))
            return Match((x,), always(layer))
    return None


def _mask_layer(graph: ReadGraph, mask: str, x: str, rate: float) -> Layer:
    shape = graph.shape(mask)
    if shape is not None and math.prod(shape[1:]) == 1:
        return StochasticDepth(rate)
    if shape is not None and shape == graph.shape(x):
        return Dropout(rate)
    raise UserError(
        f"its random mask has shape {shape}; expected a number for each sample or each element"
    )


def _scaled_mask(graph: ReadGraph, tensor: str) -> tuple[float, float, str] | None:
    """Return the probability of a mask that is not 0, its number there, and its tensor."""
    scale = 1.0
    while (node := graph.node(tensor)) is not None:
        if node.op_type in ("Cast", "Identity"):
            tensor = node.input[0]
            continue
        factor = graph.constant(node.input[1]) if node.op_type in ("Div", "Mul") else None
        if factor is None or factor.size != 1 or not factor.item():
            break
        scale *= float(factor.item()) if node.op_type == "Mul" else 1.0 / float(factor.item())
        tensor = node.input[0]
    kept = _probability(graph, node)
    return None if kept is None else (kept, scale, tensor)


def _probability(graph: ReadGraph, node: onnx.NodeProto | None) -> float | None:
    """Return the probability with which a mask is 1; None if a tensor is no mask."""
    if node is None or node.op_type not in ("Bernoulli", "Less"):
        return None
    if node.op_type == "Bernoulli":
        values = graph.constant(node.input[0])
        kept = None if values is None or not values.size else values.reshape(-1)
        return float(kept[0]) if kept is not None and (kept == kept[0]).all() else None
    uniform, bound = graph.node(node.input[0]), graph.constant(node.input[1])
    if uniform is None or uniform.op_type not in ("RandomUniform", "RandomUniformLike"):
        return None
    settings = attributes(uniform)
    is_unit = (settings.get("low", 0.0), settings.get("high", 1.0)) == (0.0, 1.0)
    is_probability = bound is not None and bound.size == 1 and 0.0 < bound.item() <= 1.0
    return float(bound.item()) if is_unit and is_probability and bound is not None else None


# Functions of elements, and combinations.


def _function(graph: ReadGraph, node: onnx.NodeProto) -> Match | None:
    """Match a function of single elements."""
    found = match_function(graph, node, graph.functions)
    return None if found is None else Match((found[1],), always(found[0]))


def _affine(graph: ReadGraph, node: onnx.NodeProto) -> Match | None:
    """Match operators that multiply by one number and add one, of which none is a parameter."""
    scale, shift, x = 1.0, 0.0, node.output[0]
    passed = {x}
    while True:
        step = _affine_step(graph, x)
        if step is None or (x != node.output[0] and graph.num_readers(x) != 1):
            break
        shift += scale * step[1]
        scale, x = scale * step[0], step[2]
        if x in passed:
            raise UserError(f"the graph has a cycle through '{shown(x)}'")
        passed.add(x)
    if x == node.output[0]:
        return None
    is_copy = (scale, shift) == (1.0, 0.0) and not graph.is_own
    return Match((x,), always(*(() if is_copy else (Affine(number(scale), number(shift)),))))


def _affine_step(graph: ReadGraph, tensor: str) -> tuple[float, float, str] | None:
    """Return factor, summand and input of an operator with one number; None for another one."""
    node = graph.node(tensor)
    if node is None or node.op_type not in ("Add", "Sub", "Mul", "Div", "Neg"):
        return None
    if node.op_type == "Neg":
        return -1.0, 0.0, node.input[0]
    for x, name, is_second in ((*node.input, True), (*reversed(node.input), False)):
        values = graph.constant(name)
        if values is None or values.size != 1 or graph.is_constant(x):
            continue
        if graph.is_parameter(name):
            raise UserError(f"its number '{name}' is a parameter; expected one for each channel")
        c = float(values.reshape(-1)[0])
        steps = {"Add": (1.0, c), "Mul": (c, 0.0), "Sub": (1.0, -c) if is_second else (-1.0, c)}
        if node.op_type in steps:
            return *steps[node.op_type], x
        return (1.0 / c, 0.0, x) if is_second and c else None
    return None


def _sum(graph: ReadGraph, node: onnx.NodeProto) -> Match | None:
    inputs = tuple(node.input)
    if any(graph.is_constant(name) for name in inputs):
        return None
    return Match(inputs, always(*([Add(len(inputs))] if len(inputs) > 1 else [])))


def _product(graph: ReadGraph, node: onnx.NodeProto) -> Match | None:
    """Match a product; a gate in the size of the maps (Expand) is the gate."""
    inputs = tuple(node.input)
    if any(graph.is_constant(name) for name in inputs):
        return None
    for position, name in enumerate(inputs):
        repeat, whole = graph.node(name, "Expand"), inputs[1 - position]
        if repeat is not None and graph.node(whole, "Expand") is None:
            target = graph.constant(repeat.input[1])
            sizes = None if target is None else target.tolist()
            return Match((whole, repeat.input[0]), partial(_gated, sizes))
    return Match(inputs, always(Multiply()))


def _gated(target: list[int] | None, shape: Shape) -> tuple[Layer, ...]:
    """Return the product of maps and a gate that is repeated to the shape of the maps."""
    if target is None or target[1:] != list(shape):
        raise UserError(f"a gate is repeated to {target}; expected the shape of the maps, {shape}")
    return (Multiply(),)


def _concatenate(graph: ReadGraph, node: onnx.NodeProto) -> Match:
    require_channels(graph, node.input[0], attributes(node).get("axis", 1))
    inputs = tuple(node.input)
    return Match(inputs, always(*([Concatenate(len(inputs))] if len(inputs) > 1 else [])))


Reader = Callable[[ReadGraph, onnx.NodeProto], "Match | None"]

_LAYERS: Mapping[str, tuple[Reader, ...]] = {
    "Add": (
        _matmul_and_bias,
        _group_norm,
        read_layer_norm_of_operators,
        _function,
        read_scale_and_shift,
        _affine,
        _sum,
    ),
    "AveragePool": (partial(_pool, AveragePool2d),),
    "BatchNormalization": (_batch_norm,),
    "Cast": (_cast,),
    "Concat": (_concatenate,),
    "Conv": (_conv,),
    "ConvTranspose": (read_transposed_convolution,),
    "Div": (_function, _affine),
    "Dropout": (_dropout,),
    "Flatten": (_flatten,),
    "Gemm": (_gemm,),
    "GlobalAveragePool": (partial(_global_pool, GlobalAveragePool2d),),
    "GlobalMaxPool": (partial(_global_pool, GlobalMaxPool2d),),
    "GroupNormalization": (_instance_norm,),
    "Identity": (_same,),
    "InstanceNormalization": (_instance_norm,),
    "LRN": (_lrn,),
    "LayerNormalization": (read_layer_norm,),
    "MatMul": (_matmul,),
    "MaxPool": (partial(_pool, MaxPool2d),),
    "Mul": (_random_mask, _function, _sum_pool, read_scale, _affine, _product),
    "Neg": (_function, _affine),
    "Pad": (read_pad,),
    "ReduceMax": (partial(_reduction, GlobalMaxPool2d),),
    "ReduceMean": (partial(_reduction, GlobalAveragePool2d),),
    "Reshape": (read_shuffle, read_blocks, _reshapes, _reshape),
    "Resize": (read_resize,),
    "Slice": (read_slice,),
    "SpaceToDepth": (read_space_to_depth,),
    "Split": (read_split,),
    "Squeeze": (_squeeze,),
    "Sub": (_function, _affine),
    "Sum": (_sum,),
    "Transpose": (read_transposed_layer_norm, read_transpose),
}
"""Readers by operator, the more special ones first."""

READERS = {**dict.fromkeys(sorted(ending_operators()), (_function,)), **_LAYERS}
"""Readers by operator, with those that may end an expression."""

_ANY_LAYOUT = frozenset({
    *ending_operators(), "Cast", "Concat", "Dropout", "Flatten", "Identity", "LayerNormalization",
    "MatMul", "Pad", "ReduceMax", "ReduceMean", "Resize", "Slice", "Split", "Sum", "Transpose",
})  # fmt: skip
"""Operators that are read with the channels on the last axis, too."""

_OF_ROWS = frozenset({*ending_operators(), "BatchNormalization", "Cast", "Conv", "Reshape"})
"""Operators that are read for rows (N, C, W), which are maps of height 1."""

LAYER_OPERATORS = sorted({*_LAYERS, *operators()})
"""Operators that are, or end, a layer of dptrain."""
