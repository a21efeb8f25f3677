"""Padding, resizing, slices and transposed convolutions that ONNX operators are."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import onnx
from numpy.typing import NDArray

from dptrain.errors import UserError
from dptrain.interchange.onnx_matching import Match, always, convolution_arrays
from dptrain.interchange.onnx_reading import ReadGraph, attributes, number
from dptrain.network.layers import Layer, Shape, maps_of
from dptrain.network.maps.channels import ChannelSlice
from dptrain.network.maps.resampling import (
    Crop2d,
    Dilate2d,
    Pad2d,
    Resize2d,
    transposed_convolution,
)

FIRST_SIZES = 11
"""Opset from which on Resize has sizes, regions of interest before the scales, and positions."""

WHOLE = 2**31 - 1
"""A slice that ends there ends with the axis."""

PAD_MODES = {"zeros": "constant", "reflect": "reflect", "replicate": "edge"}
"""Modes of ONNX by those of `Pad2d`."""


def _values(graph: ReadGraph, node: onnx.NodeProto, position: int) -> NDArray[Any] | None:
    """Return the constant that is an input of a node; None if it is omitted or empty.

    Raises:
        UserError: it depends on the input of the network.
    """
    name = node.input[position] if len(node.input) > position else ""
    if not name:
        return None
    found = graph.constant(name)
    if found is None:
        raise UserError(f"its input '{name}' is computed; expected a constant")
    return found.reshape(-1) if found.size else None


def _axes(graph: ReadGraph, node: onnx.NodeProto, listed: Iterable[Any]) -> list[int]:
    """Return which axes of maps (N, C, H, W) the axes of the input of a node are.

    Raises:
        UserError: an axis is none of maps, or is listed twice.
    """
    axes = [int(axis) for axis in listed]
    found = [graph.axis(node.input[0], axis) for axis in axes]
    if len(set(found)) < len(found) or not all(-4 <= axis < 4 for axis in axes):
        raise UserError(f"its axes are {axes}; expected different ones, from -4 to 3")
    return found


def read_pad(graph: ReadGraph, node: onnx.NodeProto) -> Match:
    """Match a padding of rows and columns."""
    values = attributes(node)
    found, constant, axes = (_values(graph, node, position) for position in (1, 2, 3))
    pads = values.get("pads", ()) if found is None else [int(value) for value in found]
    mode = values.get("mode", "constant")
    modes = {name: own for own, name in PAD_MODES.items()}
    if mode not in modes:
        raise UserError(f"its mode is {mode}; expected {', '.join(modes)}")
    filled = values.get("value", 0.0) if constant is None else float(constant[0])
    if mode == "constant" and filled:
        raise UserError(f"it pads with {filled:g}; expected 0")
    half = len(pads) // 2
    listed = _axes(graph, node, range(half) if axes is None else axes)
    sides = dict.fromkeys(range(4), (0, 0))
    sides |= dict(zip(listed, zip(pads[:half], pads[half:], strict=True), strict=True))
    if any(any(sides[axis]) for axis in sides if axis not in (2, 3)):
        raise UserError(f"its pads are {list(pads)}; expected those of rows and columns alone")
    if not any(pads) and not graph.is_own:
        return Match((node.input[0],), always())
    (top, bottom), (left, right) = sides[2], sides[3]

    def make(shape: Shape) -> tuple[Layer, ...]:
        layers = list[Layer]()
        if min(pads) < 0:
            # Negative numbers remove rows and columns.
            start = max(-top, 0), max(-left, 0)
            stop = shape[1] + min(bottom, 0), shape[2] + min(right, 0)
            layers.append(Crop2d(start, stop))
        around = max(top, 0), max(bottom, 0), max(left, 0), max(right, 0)
        if any(around) or not layers:
            layers.append(_pad(around, modes[mode]))
        return tuple(layers)

    return Match((node.input[0],), make)


def before_padding(graph: ReadGraph, x: str) -> tuple[str, list[int]]:
    """Return the maps that are padded with −∞ to x, and the pads [top, left, bottom, right].

    A maximum ignores such pixels. Without a padding, these are x and zeros.
    """
    node = graph.node(x, "Pad")
    if node is None or (len(node.input) > 3 and node.input[3]):
        return x, [0, 0, 0, 0]
    values = attributes(node)
    found, constant = (_values(graph, node, position) for position in (1, 2))
    pads = [int(pad) for pad in (values.get("pads", ()) if found is None else found)]
    filled = values.get("value", 0.0) if constant is None else float(constant[0])
    is_plain = len(pads) == 8 and not any((*pads[:2], *pads[4:6])) and min(pads) >= 0
    if filled != -math.inf or not is_plain:
        return x, [0, 0, 0, 0]
    return str(node.input[0]), [*pads[2:4], *pads[6:]]


def _pad(sides: tuple[int, int, int, int], mode: Any) -> Pad2d:
    return Pad2d(sides[0] if len(set(sides)) == 1 else sides, mode)


def read_transposed_convolution(graph: ReadGraph, node: onnx.NodeProto) -> Match:
    """Match a transposed convolution: zeros between and around the pixels, and a convolution."""
    values, names = attributes(node), list(node.input[1:])
    arrays = convolution_arrays(graph, names)
    weight, groups = arrays["weight"], int(values.get("group", 1))
    if weight.ndim != 4:
        raise UserError(f"its weight has {weight.ndim} axes; expected 4 (C, K, R, S)")
    for name in ("auto_pad", "output_shape"):
        if values.get(name, "NOTSET") != "NOTSET":
            raise UserError(f"it has {name}; expected pads and output_padding")
    channels, filters, height, width = weight.shape
    stride, dilation = (_single(values.get(key, (1, 1))) for key in ("strides", "dilations"))
    top, left, bottom, right = values.get("pads", (0, 0, 0, 0))
    extra_rows, extra_columns = values.get("output_padding", (0, 0))
    padding = top, bottom - extra_rows, left, right - extra_columns
    is_plain = (filters, height, width, *padding) == (1, 1, 1, 0, 0, 0, 0) and groups == channels
    if is_plain and "bias" not in arrays and (weight == 1).all():
        return Match((node.input[0],), always(Dilate2d(stride)))
    parts = weight.reshape(groups, channels // groups, filters, height, width)
    turned = parts.transpose(0, 2, 1, 3, 4)[..., ::-1, ::-1]
    arrays["weight"] = turned.reshape(groups * filters, channels // groups, height, width)
    layers = transposed_convolution(
        groups * filters, _single((height, width)), stride, padding, groups=groups,
        bias="bias" in arrays, dilation=dilation,
    )  # fmt: skip
    return Match((node.input[0],), always(*layers), arrays, graph.source(names[0]))


def _single(pair: Sequence[int]) -> int | tuple[int, int]:
    first, second = map(int, pair)
    return first if first == second else (first, second)


def read_resize(graph: ReadGraph, node: onnx.NodeProto) -> Match:
    """Match a resizing by the nearest pixel or by linear interpolation."""
    values = attributes(node)
    is_old = graph.version < FIRST_SIZES
    sizes = None if is_old else _values(graph, node, 3)
    scales = _values(graph, node, 1 if is_old else 2) if sizes is None else None
    given = scales if sizes is None else sizes
    if given is None:
        raise UserError("it has neither scales nor sizes; expected one of them")
    if is_old:
        values |= {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
        if given.min() < 1:
            raise UserError(
                f"its scales are {given.tolist()}, and its opset {graph.version} does not define "
                f"which pixels remain; expected scales from 1, or opset {FIRST_SIZES} and later"
            )
    for name, expected in (("antialias", 0), ("keep_aspect_ratio_policy", "stretch")):
        if values.get(name, expected) != expected:
            raise UserError(f"its {name} is {values[name]}; expected {expected}")
    axes = _axes(graph, node, values.get("axes", range(4)))
    by_axis = dict(zip(axes, given.tolist(), strict=True))
    kept = {1} if sizes is None else graph.batches
    if by_axis.get(0, min(kept)) not in kept:
        raise UserError("it changes the number of samples; expected that of rows and columns")

    def make(shape: Shape) -> tuple[Layer, ...]:
        channels = by_axis.get(1, 1 if sizes is None else shape[0])
        if channels != (1 if sizes is None else shape[0]) or len(shape) != 3:
            raise UserError("it changes the number of channels; expected that of rows and columns")
        if sizes is None:
            height, width = (number(by_axis.get(axis, 1)) for axis in (2, 3))
            scale = height if height == width else (height, width)
            layer = Resize2d(scale, **_mode(values))
        else:
            rows, columns = (int(by_axis.get(axis, shape[axis - 1])) for axis in (2, 3))
            size = rows if rows == columns else (rows, columns)
            layer = Resize2d(size=size, **_mode(values))
        _check_positions(values, layer, shape)
        return (layer,)

    return Match((node.input[0],), make)


def _mode(values: dict[str, Any]) -> dict[str, Any]:
    """Return the mode of a layer, as arguments."""
    mode, positions = values.get("mode", "nearest"), _positions(values)
    if mode not in ("nearest", "linear"):
        raise UserError(f"its mode is {mode}; expected nearest or linear")
    if mode == "nearest":
        return {"mode": "nearest"}
    return {"mode": "bilinear", "align_corners": positions == "align_corners"}


def _positions(values: dict[str, Any]) -> str:
    return str(values.get("coordinate_transformation_mode", "half_pixel"))


def _check_positions(values: dict[str, Any], layer: Resize2d, shape: Shape) -> None:
    """Raise a `UserError` if pixels of the output are at other positions than those of a layer."""
    positions, rounding = _positions(values), values.get("nearest_mode", "round_prefer_floor")
    if layer.mode == "bilinear":
        sizes = layer.output_shape(shape)[1:]
        allowed = ("half_pixel", "align_corners")
        if positions in allowed or (positions == "pytorch_half_pixel" and min(sizes) > 1):
            return
        raise UserError(
            f"its coordinate_transformation_mode is {positions}; expected {' or '.join(allowed)}"
        )
    pairs = zip(layer.output_shape(shape)[1:], shape[1:], strict=True)
    # A size is rounded down, but positions are those of the exact scale.
    ratios = layer.scales if layer.size is None else [new / old for new, old in pairs]
    is_whole = all(ratio.is_integer() for ratio in ratios)
    is_near = positions in ("half_pixel", "pytorch_half_pixel") and rounding.startswith("round")
    if not ((positions, rounding) == ("asymmetric", "floor") or (is_whole and is_near)):
        raise UserError(
            f"its positions are {positions} with {rounding}; expected asymmetric with floor, or "
            "sizes that are multiples"
        )


def _settings(graph: ReadGraph, node: onnx.NodeProto, parts: Sequence[str]) -> dict[str, Any]:
    """Return attributes, and constant inputs after the first as lists; older files have no inputs.

    Raises:
        UserError: an input is computed from numbers other than shapes.
    """
    found = attributes(node)
    for part, name in zip(parts, node.input[1:], strict=False):
        values = graph.constant(name) if name else None
        if name and values is None:
            raise UserError(f"its {part} are computed; expected constants")
        if values is not None and values.size:
            found[part] = values.reshape(-1).tolist()
    return found


def read_slice(graph: ReadGraph, node: onnx.NodeProto) -> Match:
    """Match consecutive channels, and rows and columns with any step."""
    x, values = node.input[0], _settings(graph, node, ("starts", "ends", "axes", "steps"))
    starts, ends = values["starts"], values["ends"]
    axes = _axes(graph, node, values.get("axes", range(len(starts))))
    steps = values.get("steps", [1] * len(starts))
    parts = {
        axis: slice(*map(int, bounds))
        for axis, *bounds in zip(axes, starts, ends, steps, strict=True)
        if bounds[0] or bounds[1] < WHOLE or bounds[2] != 1
    }
    if not parts:
        return Match((x,), always())
    if min(steps) < 1 or (1 in parts and parts[1].step != 1) or 0 in parts:
        raise UserError(
            f"it has the axes {axes} and steps {list(steps)}; expected consecutive channels, and "
            "rows and columns with steps from 1"
        )

    def make(shape: Shape) -> tuple[Layer, ...]:
        maps_of("slice", shape)
        bounds = [parts.get(axis, slice(None)).indices(size) for axis, size in enumerate(shape, 1)]
        (first, after, _), *pixels = bounds
        layers = list[Layer]()
        if after - first < shape[0]:
            layers.append(ChannelSlice(first, after))
        if pixels != [(0, size, 1) for size in shape[1:]]:
            start, stop, step = zip(*pixels, strict=True)
            layers.append(Crop2d(start, stop, step))
        return tuple(layers)

    return Match((x,), make)
