"""What a reader of ONNX operators returns, and how it reads constants."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptrain.errors import UserError
from dptrain.interchange.onnx_reading import ReadGraph
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
        arrays: parameters and statistics of the first layer by name, such as ``weight``.
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
