"""Networks of ONNX files that are made of dptrain's layers, with their parameters.

Files of dptrain are read from the first to the last layer, without the preprocessing: a run has the
preprocessing of its data.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from dptrain.errors import UserError, shown
from dptrain.interchange.onnx_export import INPUT_TENSOR, OUTPUT_TENSOR
from dptrain.interchange.onnx_matching import Match
from dptrain.interchange.onnx_operators import LAYER_OPERATORS, match, sigmoid_argument
from dptrain.interchange.onnx_reading import ReadGraph, attributes, describe, read_graph
from dptrain.interchange.own_functions import known_loss
from dptrain.network.combining import Multiply
from dptrain.network.layers import Flatten, Layer, Parameter, Shape, Statistic
from dptrain.network.losses import (
    Loss,
    MeanSquaredError,
    SigmoidBinaryCrossEntropy,
    SoftmaxCrossEntropy,
)
from dptrain.network.maps.resampling import Resize2d
from dptrain.network.network import (
    INPUT,
    NAME,
    RESERVED_NAMES,
    Network,
    NodeSpec,
    check_layer_count,
)
from dptrain.network.normalization import BatchNorm2d, GroupNorm


@dataclass(frozen=True)
class OnnxNetwork:
    """A network and its parameters.

    Attributes:
        network: the network.
        arrays: float32, parameters and statistics by name, in canonical shape.
        is_own: True if dptrain wrote the file.
    """

    network: Network
    arrays: dict[str, NDArray[np.float32]]
    is_own: bool


def read_onnx(path: Path) -> OnnxNetwork:
    """Read the network and the parameters of an ONNX file.

    Args:
        path: a file of dptrain or of another program. Its output is taken as the input of the loss:
            softmax and sigmoid at the end are parts of losses.

    Raises:
        UserError: the file cannot be read, or an operator is no layer of dptrain; the message names
            the file and the node.
    """
    graph = read_graph(path)
    try:
        return _read(graph, path.stem)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def _read(graph: ReadGraph, stem: str) -> OnnxNetwork:
    first, shape = _input(graph)
    last, loss = _output(graph)
    matches = _matches(graph, first, last)
    specs, arrays = _specs(graph, matches, first, shape)
    if not specs:
        raise UserError("the graph has no layers")
    name = graph.metadata.get("dptrain.network", stem) if graph.is_own else stem
    if loss is None:
        loss = _default_loss(Network.from_nodes(shape, specs, MeanSquaredError(), "network"))
    return OnnxNetwork(Network.from_nodes(shape, specs, loss, name), arrays, graph.is_own)


def _input(graph: ReadGraph) -> tuple[str, Shape]:
    """Return name and shape, without the batch, of the tensor that the first layer reads."""
    own = _own_tensor(graph, INPUT_TENSOR)
    if own is not None:
        try:
            values = json.loads(graph.metadata["dptrain.preprocessing"])
            return own, tuple(map(int, values["input_shape"]))
        except (KeyError, TypeError, ValueError):
            raise UserError("the metadata of dptrain is damaged; export the model again") from None
    if len(graph.inputs) != 1:
        raise UserError(f"the graph has {len(graph.inputs)} inputs; expected one")
    ((name, sizes),) = graph.inputs.items()
    shape = sizes[1:]
    if len(shape) not in (1, 3) or any(size is None or size < 1 for size in shape):
        listed = ", ".join("?" if size is None else str(size) for size in sizes)
        raise UserError(
            f"the input '{shown(name)}' has shape ({listed}); expected (N, C, H, W) or (N, F) with "
            "fixed C, H, W and F"
        )
    return name, tuple(size for size in shape if size is not None)


def _own_tensor(graph: ReadGraph, key: str) -> str | None:
    """Return a tensor that the metadata of dptrain names; None if another program renamed it."""
    name = graph.metadata.get(key, "") if graph.is_own else ""
    return name if graph.node(name) is not None else None


def _output(graph: ReadGraph) -> tuple[str, Loss | None]:
    """Return the tensor that the last layer computes, and the loss if the file states it."""
    own = _own_tensor(graph, OUTPUT_TENSOR)
    if own is not None:
        return own, known_loss(graph.metadata)
    if len(graph.outputs) != 1:
        raise UserError(f"the graph has {len(graph.outputs)} outputs; expected one")
    name = graph.before_identities(graph.outputs[0])
    node = graph.node(name)
    loss = None if node is None else _ENDS.get(node.op_type)
    if node is None or loss is None:
        z = sigmoid_argument(graph, name)
        return (name, None) if z is None else (z, SigmoidBinaryCrossEntropy())
    with _naming(node):
        axis = attributes(node).get("axis", -1)
        if loss is SoftmaxCrossEntropy and axis not in (1, -1):
            raise UserError(f"axis is {axis}; expected 1, the classes")
        return str(node.input[0]), loss()


_ENDS: dict[str, type[Loss]] = {
    "Softmax": SoftmaxCrossEntropy,
    "LogSoftmax": SoftmaxCrossEntropy,
    "Sigmoid": SigmoidBinaryCrossEntropy,
}
"""Operators at the end of a graph that are a part of the loss."""


def _default_loss(network: Network) -> Loss:
    """Return the loss of a network that does not state it: several outputs mean classes."""
    return SoftmaxCrossEntropy() if network.num_outputs > 1 else MeanSquaredError()


def _matches(graph: ReadGraph, first: str, last: str) -> dict[str, tuple[onnx.NodeProto, Match]]:
    """Return the layers that compute tensors, in topological order."""
    found: dict[str, tuple[onnx.NodeProto, Match]] = {}
    ordered: dict[str, tuple[onnx.NodeProto, Match]] = {}
    stack = [last]
    while stack:
        tensor = stack[-1]
        if tensor == first or tensor in ordered:
            stack.pop()
            continue
        if tensor not in found:
            found[tensor] = _match(graph, tensor)
            check_layer_count(len(found))
            stack += reversed(found[tensor][1].inputs)
            continue
        if any(name != first and name not in ordered for name in found[tensor][1].inputs):
            raise UserError(f"the graph has a cycle through '{shown(tensor)}'")
        ordered[tensor] = found[tensor]
        stack.pop()
    return ordered


def _match(graph: ReadGraph, tensor: str) -> tuple[onnx.NodeProto, Match]:
    node = graph.node(tensor)
    if node is None:
        what = "a constant" if graph.is_constant(tensor) else "another input"
        raise UserError(f"'{shown(tensor)}' is {what}; expected a tensor that a layer computes")
    with _naming(node):
        found = match(graph, node)
    if found is None:
        is_known = node.op_type in LAYER_OPERATORS
        known = "" if is_known else f"; expected {', '.join(LAYER_OPERATORS)}"
        raise UserError(f"{describe(node)} is no layer of dptrain in this place{known}")
    return node, found


@contextmanager
def _naming(node: onnx.NodeProto) -> Iterator[None]:
    """Name the node in errors of its reader, and in those that a damaged node causes there."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{describe(node)}: {error}") from None
    except (ArithmeticError, LookupError, TypeError, ValueError):
        # onnx's checker would also refuse files that runtimes accept.
        raise UserError(
            f"{describe(node)} lacks an input or an attribute, or has one that is not valid"
        ) from None


def _specs(
    graph: ReadGraph, matches: dict[str, tuple[onnx.NodeProto, Match]], first: str, shape: Shape
) -> tuple[list[NodeSpec], dict[str, NDArray[np.float32]]]:
    """Return the nodes of the network and its arrays."""
    names = _Names(graph, matches)
    tensors, shapes = {first: INPUT}, {INPUT: shape}
    # Maps of one pixel by the vectors that they become.
    pixels: dict[str, str] = {}
    specs: list[NodeSpec] = []
    arrays: dict[str, NDArray[np.float32]] = {}
    for tensor, (node, found) in matches.items():
        inputs = tuple(tensors[name] for name in found.inputs)
        with _naming(node):
            last = inputs[0]
            layers = found.make(shapes[last])
            if layers and last in pixels and isinstance(layers[0], BatchNorm2d | GroupNorm):
                # These layers normalise maps, so the vector follows after them.
                inputs, layers = (pixels[last],), (layers[0], Flatten())
            if layers == (Multiply(),):
                inputs = tuple(
                    _repeated(name, other, shapes, names, specs)
                    for name, other in zip(inputs, reversed(inputs), strict=True)
                )
            owner = _owner(layers, found)
            for number, layer in enumerate(layers):
                read = inputs if not number else (last,)
                combined = layer.combine_shapes(tuple(shapes[name] for name in read))
                last = names.of(tensor, layer, is_owner=number == owner)
                shapes[last] = layer.output_shape(combined)
                specs.append(NodeSpec(layer, last, read))
                if isinstance(layer, Flatten) and combined[1:] == (1, 1):
                    pixels[last] = read[0]
                if number == owner:
                    arrays |= _arrays(layer, combined, last, found)
        tensors[tensor] = last
    read_names = {name for spec in specs for name in spec.inputs or ()}
    return [spec for spec in specs if spec.name in read_names or spec is specs[-1]], arrays


def _repeated(
    gate: str, other: str, shapes: dict[str, Shape], names: _Names, specs: list[NodeSpec]
) -> str:
    """Return an input of a product; a gate (C, 1, 1) is repeated if the other one is (1, H, W)."""
    shape, pixels = shapes[gate], shapes[other]
    if len(shape) != 3 or len(pixels) != 3 or shape[1:] != (1, 1) or pixels[0] != 1:
        return gate
    if shape[0] == 1 or pixels[1:] == (1, 1):
        return gate
    layer = Resize2d(size=(pixels[1], pixels[2]))
    name = names.of("", layer, is_owner=False)
    shapes[name] = layer.output_shape(shape)
    specs.append(NodeSpec(layer, name, (gate,)))
    return name


def _owner(layers: Sequence[Layer], found: Match) -> int:
    """Return which layer of a match has its name and arrays: with arrays, the last of maps."""
    of_maps = [i for i, layer in enumerate(layers) if not isinstance(layer, Flatten)]
    return of_maps[-1] if found.arrays and of_maps else 0


def _arrays(
    layer: Layer, shape: Shape, name: str, found: Match
) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Yield the arrays of a layer by their names in the network."""
    described: tuple[Parameter | Statistic, ...] = layer.parameters(shape)
    for array in (*described, *layer.statistics(shape)):
        values: NDArray[Any] = found.arrays[array.name]
        if values.shape != array.shape:
            raise UserError(f"its {array.name} has shape {values.shape}; expected {array.shape}")
        yield f"{name}.{array.name}", np.ascontiguousarray(values, np.float32)


class _Names:
    """Names of nodes: of the parameters, of the file if dptrain wrote it, or kind and number."""

    def __init__(self, graph: ReadGraph, matches: dict[str, tuple[onnx.NodeProto, Match]]) -> None:
        in_file = {tensor: _file_name(graph, *found) for tensor, found in matches.items()}
        counts = Counter(name for name in in_file.values() if name)
        # A name that several nodes would have identifies none of them.
        self._chosen = {t: name for t, name in in_file.items() if name and counts[name] == 1}
        self._taken = {*self._chosen.values(), *RESERVED_NAMES}
        self._numbers: Counter[str] = Counter()

    def of(self, tensor: str, layer: Layer, *, is_owner: bool) -> str:
        """Return the name of a layer; one of those of a match has the name of the file."""
        if is_owner and tensor in self._chosen:
            return self._chosen[tensor]
        while True:
            self._numbers[layer.kind] += 1
            name = f"{layer.kind}{self._numbers[layer.kind]}"
            if name not in self._taken:
                return name


def _file_name(graph: ReadGraph, node: onnx.NodeProto, found: Match) -> str:
    """Return the name that a file has for a layer, or ""."""
    name = node.name.rpartition("/")[0] if graph.is_own else ""
    if not name and found.weight.endswith(".weight"):
        name = found.weight.removesuffix(".weight")
    return name if re.fullmatch(NAME, name) and name not in RESERVED_NAMES else ""
