"""What a reader of ONNX operators returns, and how it reads constants."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from dptrain.errors import UserError
from dptrain.interchange.onnx_reading import ReadGraph, attributes, number
from dptrain.network.layers import Layer, Shape

MakeLayers = Callable[[Shape], tuple[Layer, ...]]
Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Match:
    """Operators that are a layer, or several in a row.

    Attributes:
        inputs: names of the tensors that the first layer reads.
        make: returns the layers for the shape of the input, or of the combination of the inputs;
            none if the output is the input.
        arrays: parameters and statistics of the last layer by name, such as ``weight``.
        weight: name of the constant that is the first of them.
    """

    inputs: tuple[str, ...]
    make: MakeLayers
    arrays: Arrays = field(default_factory=dict)
    weight: str = ""


def always(*layers: Layer) -> MakeLayers:
    """Return a function that makes the same layers for any shape."""
    return lambda shape: layers


def constants(graph: ReadGraph, names: list[str], parts: tuple[str, ...]) -> Arrays:
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


def convolution_arrays(graph: ReadGraph, names: list[str]) -> Arrays:
    """Return weight and bias; zeros that an exporter computes for a bias are none."""
    arrays = constants(graph, names, ("weight", "bias"))
    if "bias" in arrays and graph.is_computed(names[1]) and not arrays["bias"].any():
        del arrays["bias"]
    return arrays


def axes_of(graph: ReadGraph, node: onnx.NodeProto) -> list[int]:
    """Return the axes of a reduction, which are an attribute or an input."""
    listed = attributes(node).get("axes", ())
    found = graph.constant(node.input[1]) if len(node.input) > 1 else listed
    return [int(axis) for axis in np.ravel(() if found is None else found)]


def epsilon_of(node: onnx.NodeProto) -> float:
    """Return the number that a normalisation adds to variances."""
    return number(attributes(node).get("epsilon", 1e-5))
