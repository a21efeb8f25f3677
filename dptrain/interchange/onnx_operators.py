"""The layers that ONNX operators are.

A reader for an operator receives a node and returns a `Match`, or None if the node does not end the
pattern of operators that the reader knows. To import a new layer, add a reader and an entry in
`READERS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto

from dptrain.errors import UserError
from dptrain.interchange.onnx_functions import ending_operators, match_function, operators
from dptrain.interchange.onnx_reading import (
    TO_CHANNELS_FIRST,
    TO_CHANNELS_LAST,
    ReadGraph,
    attributes,
    number,
)
from dptrain.network.combining import Add, Concatenate, GlobalAveragePool2d
from dptrain.network.layers import (
    AveragePool2d,
    Conv2d,
    Dense,
    Dropout,
    Flatten,
    Layer,
    LocalResponseNorm,
    MaxPool2d,
    Shape,
    SumPool2d,
)
from dptrain.network.normalization import BatchNorm2d, GroupNorm, LayerNorm

MakeLayers = Callable[[Shape], tuple[Layer, ...]]
Arrays = dict[str, NDArray[Any]]

FLOATS = (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16)
"""Types of elements that the network computes as its own type."""


@dataclass(frozen=True)
class Match:
    """Operators that are a layer, or several in a row.

    Attributes:
        inputs: names of the tensors that the first layer reads.
        make: returns the layers for the shape of the input, or of the combination of the inputs;
            none if the output is the input.
        arrays: parameters and statistics of the first layer by name, such as ``weight``.
        weight: name of the constant that is the first of them.
    """

    inputs: tuple[str, ...]
    make: MakeLayers
    arrays: Arrays = field(default_factory=dict)
    weight: str = ""


def match(graph: ReadGraph, node: onnx.NodeProto) -> Match | None:
    """Return the layers that end with a node; None if dptrain has no such layers.

    Raises:
        UserError: the operator has a setting that its layer does not have.
    """
    last = [name in graph.channels_last for name in node.input if graph.constant(name) is None]
    if any(last) and (node.op_type not in CHANNELS_LAST or not all(last)):
        raise UserError(
            "the channels are the last axis of its input; expected a transposition to (N, C, H, W) "
            "before it"
        )
    for read in READERS.get(node.op_type, ()):
        found = read(graph, node)
        if found is not None:
            return found
    return None


def _always(*layers: Layer) -> MakeLayers:
    return lambda shape: layers


def _same(graph: ReadGraph, node: onnx.NodeProto) -> Match:
    return Match((node.input[0],), _always())


def _cast(graph: ReadGraph, node: onnx.NodeProto) -> Match:
    to = attributes(node)["to"]
    if to not in FLOATS:
        raise UserError("it converts to a type that is not floating-point, which rounds numbers")
    return _same(graph, node)


def _constants(graph: ReadGraph, names: list[str], parts: tuple[str, ...]) -> Arrays:
    """Return constant parameters in float32; a missing last one is omitted."""
    found = {}
    for part, name in zip(parts, names, strict=False):
        if not name:
            continue
        values = graph.constant(name)
        if values is None:
            raise UserError(f"its {part} '{name}' is computed; expected a constant")
        found[part] = np.asarray(values, np.float32)
    return found


# Convolutions and dense layers.


def _conv(graph: ReadGraph, node: onnx.NodeProto) -> Match:
    arrays = _constants(graph, list(node.input[1:]), ("weight", "bias"))
    weight, values = arrays["weight"], attributes(node)
    if weight.ndim != 4:
        raise UserError(f"its weight has {weight.ndim} axes; expected 4 (K, C, R, S)")
    _refuse_dilations(values)
    filters, window = len(weight), (weight.shape[2], weight.shape[3])
    settings: dict[str, Any] = {
        "filters": filters,
        "kernel": _plain(window),
        "groups": values.get("group", 1),
        "stride": _plain(values.get("strides", (1, 1))),
        "bias": "bias" in arrays,
    }

    def make(shape: Shape) -> tuple[Layer, ...]:
        return (_with_padding(partial(Conv2d, **settings), values, shape, ("same", "full")),)

    return Match((node.input[0],), make, arrays, graph.source(node.input[1]))


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
    arrays = _constants(graph, names, ("weight", "bias"))
    weight = arrays["weight"]
    if weight.ndim != 2:
        raise UserError(f"its weight has {weight.ndim} axes; expected 2")
    weight = weight if transposed else np.ascontiguousarray(weight.T)
    units = len(weight)
    bias = arrays.get("bias", np.zeros(units, np.float32))
    if math.prod(bias.shape[:-1]) != 1 or bias.size not in (1, units) or bias.ndim > 2:
        raise UserError(f"its bias has shape {bias.shape}; expected ({units},)")
    bias = np.ascontiguousarray(np.broadcast_to(bias.reshape(-1), (units,)))
    layer: Layer = Dense(units)
    if node.input[0] in graph.channels_last:
        layer, weight = Conv2d(units, 1), weight.reshape(*weight.shape, 1, 1)
    arrays = {"weight": weight, "bias": bias}
    return Match((node.input[0],), _always(layer), arrays, graph.source(names[0]))


def _matmul(graph: ReadGraph, node: onnx.NodeProto) -> Match | None:
    if graph.constant(node.input[1]) is None:
        return None
    return _dense(graph, node, [node.input[1]], transposed=False)


def _matmul_and_bias(graph: ReadGraph, node: onnx.NodeProto) -> Match | None:
    for product, bias in (tuple(node.input), tuple(reversed(node.input))):
        before = graph.node(product, "MatMul")
        if before is None or graph.constant(bias) is None:
            continue
        if graph.constant(before.input[1]) is not None and graph.num_readers(product) == 1:
            return _dense(graph, before, [before.input[1], bias], transposed=False)
    return None


# Poolings and shapes.


def _pool(
    kind: type[MaxPool2d | AveragePool2d | SumPool2d],
    counts_pads: bool | None,
    graph: ReadGraph,
    node: onnx.NodeProto,
) -> Match:
    """Match a pooling whose mean counts positions outside the map, or not; None for a maximum."""
    values = attributes(node)
    _refuse_dilations(values)
    window = values["kernel_shape"]
    if len(window) != 2:
        raise UserError(f"the window has {len(window)} axes; expected 2")
    stride = _plain(values.get("strides", (1, 1)))
    settings: dict[str, Any] = {"window": _plain(window), "stride": stride}

    def make(shape: Shape) -> tuple[Layer, ...]:
        layer = _with_padding(partial(kind, **settings), values, shape, ("same",))
        if values.get("ceil_mode", 0) and not _fits(replace(layer, rounding="strict"), shape):
            raise UserError("ceil_mode is 1, and the windows leave rows or columns over")
        counts = bool(values.get("count_include_pad", 0))
        if counts_pads not in (None, counts) and np.any(layer.pads(shape)):
            expected = "with" if counts_pads else "without"
            raise UserError(
                f"count_include_pad is {int(counts)}; expected a mean {expected} the positions "
                "outside the map"
            )
        return (layer,)

    return Match((node.input[0],), make)


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
            return _pool(SumPool2d, True, graph, before)
    return None


def _global_average_pool(graph: ReadGraph, node: onnx.NodeProto) -> Match:
    return Match((node.input[0],), _always(GlobalAveragePool2d()))


def _global_max_pool(graph: ReadGraph, node: onnx.NodeProto) -> Match:
    return Match((node.input[0],), lambda shape: (MaxPool2d((shape[1], shape[2])),))


def _mean(graph: ReadGraph, node: onnx.NodeProto) -> Match:
    values, axes = attributes(node), sorted(axis % 4 for axis in _axes(graph, node))
    if axes != [2, 3]:
        raise UserError(f"the axes of the mean are {axes}; expected 2 and 3")
    pool = GlobalAveragePool2d()
    layers: tuple[Layer, ...] = (pool,) if values.get("keepdims", 1) else (pool, Flatten())
    return Match((node.input[0],), _always(*layers))


def _flatten(graph: ReadGraph, node: onnx.NodeProto) -> Match:
    axis = attributes(node).get("axis", 1)
    if axis != 1:
        raise UserError(f"axis is {axis}; expected 1")
    return Match((node.input[0],), _always(Flatten()))


def _reshape(graph: ReadGraph, node: onnx.NodeProto) -> Match:
    target = graph.constant(node.input[1])
    before = graph.node(node.input[1], "Concat")
    if target is None and before is not None and len(before.input) == 2:
        # The first size is that of the batch, the second may be computed from the map.
        second = graph.constant(before.input[1])
        target = np.array([0, -1 if second is None else np.ravel(second)[0]])
    if target is None or target.size != 2:
        raise UserError("the new shape is no vector per sample; expected (N, F)")
    batch, features = (int(size) for size in target.reshape(-1))
    batches = {0, *(sizes[0] for sizes in graph.inputs.values() if sizes)}

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


def _squeeze(graph: ReadGraph, node: onnx.NodeProto) -> Match:
    def make(shape: Shape) -> tuple[Layer, ...]:
        if shape[1:] != (1, 1):
            raise UserError(f"axes of {shape} are removed; expected maps of one pixel")
        return (Flatten(),)

    return Match((node.input[0],), make)


# Normalisations.


def _batch_norm(graph: ReadGraph, node: onnx.NodeProto) -> Match:
    parts = ("weight", "bias", "running_mean", "running_var")
    arrays, values = _constants(graph, list(node.input[1:]), parts), attributes(node)
    if values.get("training_mode", 0):
        raise UserError("training_mode is 1; export the network for inference")
    layer = BatchNorm2d(
        epsilon=_epsilon(node),
        momentum=number(1.0 - number(values.get("momentum", 0.9))),
    )
    return Match((node.input[0],), _always(layer), arrays, graph.source(node.input[1]))


def _epsilon(node: onnx.NodeProto) -> float:
    return number(attributes(node).get("epsilon", 1e-5))


def _instance_norm(graph: ReadGraph, node: onnx.NodeProto) -> Match:
    arrays = _constants(graph, list(node.input[1:]), ("weight", "bias"))
    groups = attributes(node).get("num_groups", len(arrays["weight"]))
    layer = GroupNorm(groups=groups, epsilon=_epsilon(node))
    return Match((node.input[0],), _always(layer), arrays, graph.source(node.input[1]))


def _group_norm(graph: ReadGraph, node: onnx.NodeProto) -> Match | None:
    """Match Reshape, InstanceNormalization, Reshape, Mul and Add."""
    for scaled, bias in (tuple(node.input), tuple(reversed(node.input))):
        product = graph.node(scaled, "Mul")
        if product is None or graph.constant(bias) is None:
            continue
        for normal, weight in (tuple(product.input), tuple(reversed(product.input))):
            last = graph.node(normal, "Reshape")
            norm = None if last is None else graph.node(last.input[0], "InstanceNormalization")
            first = None if norm is None else graph.node(norm.input[0], "Reshape")
            if norm is not None and first is not None and graph.constant(weight) is not None:
                return _grouped(graph, norm, first.input[0], [weight, bias])
    return None


def _grouped(graph: ReadGraph, norm: onnx.NodeProto, x: str, names: list[str]) -> Match | None:
    inner = _constants(graph, list(norm.input[1:]), ("weight", "bias"))
    if not ((inner["weight"] == 1).all() and (inner["bias"] == 0).all()):
        return None
    arrays = _constants(graph, names, ("weight", "bias"))
    arrays = {part: values.reshape(-1) for part, values in arrays.items()}
    layer = GroupNorm(groups=len(inner["weight"]), epsilon=_epsilon(norm))
    return Match((x,), _always(layer), arrays, graph.source(names[0]))


def _layer_norm(graph: ReadGraph, node: onnx.NodeProto) -> Match:
    axis = attributes(node).get("axis", -1)
    return _normalised(graph, node.input[0], axis, list(node.input[1:]), _epsilon(node))


def _normalised(graph: ReadGraph, x: str, axis: int, names: list[str], epsilon: float) -> Match:
    """Return the layer that normalises a tensor over an axis and those after it."""
    arrays = _constants(graph, names, ("weight", "bias"))
    arrays = {part: values.reshape(-1) for part, values in arrays.items()}
    arrays.setdefault("bias", np.zeros_like(arrays["weight"]))
    is_last = x in graph.channels_last

    def make(shape: Shape) -> tuple[Layer, ...]:
        axes = 1 + len(shape)
        if axis % axes != (axes - 1 if is_last else 1) or len(arrays["weight"]) != shape[0]:
            raise UserError(
                f"axis {axis} of an input with {axes} axes is normalised; expected the channels or "
                "a vector"
            )
        return (LayerNorm(epsilon=epsilon),)

    return Match((x,), make, arrays, graph.source(names[0]))


def _transposed_layer_norm(graph: ReadGraph, node: onnx.NodeProto) -> Match | None:
    """Match Transpose, LayerNormalization and Transpose."""
    norm = graph.node(node.input[0], "LayerNormalization")
    first = None if norm is None else graph.node(norm.input[0], "Transpose")
    if norm is None or first is None or node.output[0] in graph.channels_last:
        return None
    found = _layer_norm(graph, norm)
    return replace(found, inputs=(first.input[0],))


def _transpose(graph: ReadGraph, node: onnx.NodeProto) -> Match:
    order = list(attributes(node).get("perm", ()))
    is_last = node.input[0] in graph.channels_last
    expected = TO_CHANNELS_FIRST if is_last else TO_CHANNELS_LAST
    if order != expected:
        raise UserError(f"the order of the axes is {order}; expected {expected}")
    return _same(graph, node)


def _orders(node: onnx.NodeProto | None) -> Iterator[tuple[str, str]]:
    """Yield the two inputs of a node in both orders."""
    if node is not None and len(node.input) == 2:
        first, second = node.input
        yield first, second
        yield second, first


def _layer_norm_of_operators(graph: ReadGraph, node: onnx.NodeProto) -> Match | None:
    """Match w · (x − mean) / sqrt(variance + epsilon) + b, as older opsets have it."""
    for scaled, bias in _orders(node):
        for normal, weight in _orders(graph.node(scaled, "Mul")):
            quotient = graph.node(normal, "Div")
            if quotient is None or graph.constant(bias) is None or graph.constant(weight) is None:
                continue
            found = _standardised(graph, quotient)
            if found is not None:
                x, axis, epsilon = found
                return _normalised(graph, x, axis, [weight, bias], epsilon)
    return None


def _standardised(graph: ReadGraph, quotient: onnx.NodeProto) -> tuple[str, int, float] | None:
    """Return x, the axis and epsilon of (x − mean) / sqrt(variance + epsilon)."""
    centred, root = graph.node(quotient.input[0], "Sub"), graph.node(quotient.input[1], "Sqrt")
    mean = None if centred is None else graph.node(centred.input[1], "ReduceMean")
    if centred is None or root is None or mean is None or mean.input[0] != centred.input[0]:
        return None
    for variance, constant in _orders(graph.node(root.input[0], "Add")):
        square_mean, epsilon = graph.node(variance, "ReduceMean"), graph.constant(constant)
        power = None if square_mean is None else graph.node(square_mean.input[0])
        if square_mean is None or power is None or epsilon is None or epsilon.size != 1:
            continue
        axes = _axes(graph, mean)
        distance = graph.node(power.input[0], "Sub")
        is_same = distance is not None and list(distance.input) == list(centred.input)
        if is_same and _is_square(graph, power) and axes == _axes(graph, square_mean):
            return (mean.input[0], axes[0], number(epsilon.item())) if len(axes) == 1 else None
    return None


def _is_square(graph: ReadGraph, node: onnx.NodeProto) -> bool:
    if node.op_type == "Mul":
        return bool(node.input[0] == node.input[1])
    power = graph.constant(node.input[1]) if node.op_type == "Pow" else None
    return power is not None and power.size == 1 and power.item() == 2


def _axes(graph: ReadGraph, node: onnx.NodeProto) -> list[int]:
    """Return the axes of a reduction, which are an attribute or an input."""
    listed = attributes(node).get("axes", ())
    found = graph.constant(node.input[1]) if len(node.input) > 1 else listed
    return [int(axis) for axis in np.ravel(() if found is None else found)]


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
    return Match((node.input[0],), _always(layer))


# Functions of elements, and combinations.


def _dropout(graph: ReadGraph, node: onnx.NodeProto) -> Match:
    rate = attributes(node).get("ratio", 0.5)
    if len(node.input) > 1 and node.input[1]:
        values = graph.constant(node.input[1])
        rate = 0.5 if values is None else float(values.reshape(-1)[0])
    return Match((node.input[0],), _always(Dropout(number(rate))))


def _function(graph: ReadGraph, node: onnx.NodeProto) -> Match | None:
    """Match a function of single elements."""
    found = match_function(graph, node, graph.functions)
    return None if found is None else Match((found[1],), _always(found[0]))


def _sum(graph: ReadGraph, node: onnx.NodeProto) -> Match | None:
    inputs = tuple(node.input)
    if any(graph.constant(name) is not None for name in inputs):
        return None
    return Match(inputs, _always(*([Add(len(inputs))] if len(inputs) > 1 else [])))


def _concatenate(graph: ReadGraph, node: onnx.NodeProto) -> Match:
    axis = attributes(node).get("axis", 1)
    if axis not in (1, -3):
        raise UserError(f"axis is {axis}; expected 1, the channels")
    inputs = tuple(node.input)
    return Match(inputs, _always(*([Concatenate(len(inputs))] if len(inputs) > 1 else [])))


Reader = Callable[[ReadGraph, onnx.NodeProto], "Match | None"]

_LAYERS: Mapping[str, tuple[Reader, ...]] = {
    "Add": (_matmul_and_bias, _group_norm, _layer_norm_of_operators, _function, _sum),
    "AveragePool": (partial(_pool, AveragePool2d, False),),
    "BatchNormalization": (_batch_norm,),
    "Cast": (_cast,),
    "Concat": (_concatenate,),
    "Conv": (_conv,),
    "Dropout": (_dropout,),
    "Flatten": (_flatten,),
    "Gemm": (_gemm,),
    "GlobalAveragePool": (_global_average_pool,),
    "GlobalMaxPool": (_global_max_pool,),
    "GroupNormalization": (_instance_norm,),
    "Identity": (_same,),
    "InstanceNormalization": (_instance_norm,),
    "LRN": (_lrn,),
    "LayerNormalization": (_layer_norm,),
    "MatMul": (_matmul,),
    "MaxPool": (partial(_pool, MaxPool2d, None),),
    "Mul": (_function, _sum_pool),
    "ReduceMean": (_mean,),
    "Reshape": (_reshape,),
    "Squeeze": (_squeeze,),
    "Sum": (_sum,),
    "Transpose": (_transposed_layer_norm, _transpose),
}
"""Readers by operator, the more special ones first."""

READERS = {**dict.fromkeys(sorted(ending_operators()), (_function,)), **_LAYERS}
"""Readers by operator, with those that may end an expression."""

CHANNELS_LAST = ending_operators() | {
    "Cast", "Dropout", "Identity", "LayerNormalization", "MatMul", "Sum", "Transpose",
}  # fmt: skip
"""Operators that are layers for (N, H, W, C), too: matrix products are 1×1 convolutions there."""

LAYER_OPERATORS = sorted({*_LAYERS, *operators()})
"""Operators that are, or end, a layer of dptrain."""
