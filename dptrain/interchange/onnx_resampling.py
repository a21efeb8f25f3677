"""Layers that ONNX operators are which pad, resize or cut maps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx

from dptrain.errors import UserError
from dptrain.interchange.onnx_matching import Match
from dptrain.interchange.onnx_reading import ReadGraph, attributes
from dptrain.network.layers import Layer, Shape
from dptrain.network.rearranging import ChannelSlice, Crop2d, Pad2d, Resize2d

PAD_MODES = {"constant": "zeros", "reflect": "reflect", "edge": "replicate"}


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


def read_pad(graph: ReadGraph, node: onnx.NodeProto) -> Match:
    """Match rows and columns around maps."""
    x, values = node.input[0], _settings(graph, node, ("pads", "constant_value", "axes"))
    mode = values.get("mode", "constant")
    if mode not in PAD_MODES:
        raise UserError(f"mode is {mode}; expected {', '.join(PAD_MODES)}")
    value = np.ravel(values.get("constant_value", values.get("value", 0.0)))[0]
    if mode == "constant" and value != 0:
        raise UserError(f"it pads with {value}; expected 0")
    pads = values["pads"]
    half = len(pads) // 2
    axes = [graph.axis(x, int(axis)) for axis in values.get("axes", range(half))]
    by_axis = dict(zip(axes, zip(pads[:half], pads[half:], strict=True), strict=True))
    (top, bottom), (left, right) = by_axis.get(2, (0, 0)), by_axis.get(3, (0, 0))
    if any(any(by_axis.get(axis, ())) for axis in (0, 1)) or min(pads) < 0:
        raise UserError(f"pads are {pads}; expected numbers from 0 of rows and columns alone")
    padding = int(top), int(bottom), int(left), int(right)
    layers = (Pad2d(padding, PAD_MODES[mode]),) if any(padding) else ()  # type: ignore[arg-type]
    return Match((x,), lambda shape: layers)


def read_resize(graph: ReadGraph, node: onnx.NodeProto) -> Match:
    """Match a resizing by nearest or bilinear interpolation, as PyTorch has it."""
    x, values = node.input[0], _settings(graph, node, ("roi", "scales", "sizes"))
    transform = values.get("coordinate_transformation_mode", "half_pixel")
    mode = (values.get("mode", "nearest"), transform, values.get("nearest_mode", ""))
    if mode == ("nearest", "asymmetric", "floor"):
        settings: dict[str, Any] = {"mode": "nearest"}
    elif mode[0] == "linear" and transform in ("half_pixel", "pytorch_half_pixel", "align_corners"):
        settings = {"mode": "bilinear", "align_corners": transform == "align_corners"}
    else:
        raise UserError(
            f"it resizes by {' '.join(filter(None, mode))}; expected nearest asymmetric floor, or "
            "linear with half_pixel or align_corners"
        )

    def make(shape: Shape) -> tuple[Layer, ...]:
        wanted = _wanted_sizes(graph, x, values, shape)
        if transform == "pytorch_half_pixel" and 1 in wanted:
            raise UserError(f"it resizes to {wanted} pixels; expected more than 1 with {transform}")
        return (Resize2d(wanted, **settings),)

    return Match((x,), make)


def _wanted_sizes(
    graph: ReadGraph, x: str, values: dict[str, Any], shape: Shape
) -> tuple[int, int]:
    """Return height and width after a resizing."""
    found = []
    for axis, size in enumerate(shape, 1):
        place = next(i for i in range(4) if graph.axis(x, i) == axis)
        exact = values["sizes"][place] if "sizes" in values else size * values["scales"][place]
        if not math.isclose(exact, round(exact), rel_tol=1e-5):
            raise UserError(f"it resizes {size} to {exact} pixels; expected a whole number")
        found.append(round(exact))
    if found[0] != shape[0]:
        raise UserError(f"it resizes {shape[0]} channels to {found[0]}; expected rows and columns")
    return found[1], found[2]


def read_slice(graph: ReadGraph, node: onnx.NodeProto) -> Match:
    """Match consecutive channels, and rows and columns with any step."""
    x, values = node.input[0], _settings(graph, node, ("starts", "ends", "axes", "steps"))
    starts, ends = values["starts"], values["ends"]
    axes = [graph.axis(x, int(axis)) for axis in values.get("axes", range(len(starts)))]
    steps = values.get("steps", [1] * len(starts))
    parts = {
        axis: slice(*map(int, bounds))
        for axis, *bounds in zip(axes, starts, ends, steps, strict=True)
    }
    if min(steps) < 1 or (1 in parts and parts[1].step != 1) or 0 in parts:
        raise UserError(
            f"it has the axes {axes} and steps {list(steps)}; expected consecutive channels, and "
            "rows and columns with steps from 1"
        )

    def make(shape: Shape) -> tuple[Layer, ...]:
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
