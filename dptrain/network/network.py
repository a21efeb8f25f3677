"""A network: named layers with their shapes, ending in a loss. Pure description."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from dptrain.errors import UserError
from dptrain.network.layers import Flops, Layer, Parameter, Shape
from dptrain.network.losses import Loss, SoftmaxCrossEntropy


@dataclass(frozen=True)
class Node:
    """A layer in its place: what goes in, what comes out, which parameters it has.

    Attributes:
        index: position in the network, from 0.
        name: kind and running number, ``conv1``.
        layer: the description.
        input_shape, output_shape: per sample.
        input_maps, output_maps: (C, H, W) that the elements come from; (F, 1, 1) for vectors that
            never were maps. A flattened tensor keeps the shape of its maps, so that a backend may
            store it in another order than C, H, W and still know which element is which.
        parameters: trainable arrays by full name, ``conv1.weight``.
    """

    index: int
    name: str
    layer: Layer
    input_shape: Shape
    output_shape: Shape
    input_maps: Shape
    output_maps: Shape
    parameters: tuple[Parameter, ...]

    @property
    def flops(self) -> Flops:
        """Operations for one sample."""
        return self.layer.flops(self.input_shape)


def _maps_of(shape: Shape) -> Shape:
    return shape if len(shape) == 3 else (shape[0], 1, 1)


@dataclass(frozen=True)
class Network:
    """Layers from input to loss.

    Args:
        input_shape: (C, H, W) or (F,), without the batch.
        layers: layers in order.
        loss: what training minimises.
        name: used in reports and run names.

    Raises:
        UserError: a layer does not fit what comes before it; the message names the layer.

    Example:
        >>> from dptrain.network import Conv2d, Dense, Flatten, MaxPool2d, Network, ReLU
        >>> net = Network((3, 32, 32), [Conv2d(16), ReLU(), MaxPool2d(2), Flatten(), Dense(10)])
        >>> [node.name for node in net.nodes]
        ['conv1', 'relu1', 'pool1', 'flatten1', 'dense1']
        >>> net.num_parameters
        41418
    """

    input_shape: Shape
    layers: Sequence[Layer]
    loss: Loss = SoftmaxCrossEntropy()
    name: str = "network"
    nodes: tuple[Node, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "input_shape", tuple(self.input_shape))
        object.__setattr__(self, "layers", tuple(self.layers))
        if len(self.input_shape) not in (1, 3) or min(self.input_shape) < 1:
            raise UserError(
                f"network {self.name}: input shape {self.input_shape}; expected (C, H, W) or (F,)"
            )
        if not self.layers:
            raise UserError(f"network {self.name} has no layers")
        object.__setattr__(self, "nodes", self._place())
        self.loss.check(self.output_shape)

    def _place(self) -> tuple[Node, ...]:
        nodes: list[Node] = []
        counts: Counter[str] = Counter()
        shape, maps = self.input_shape, _maps_of(self.input_shape)
        for index, layer in enumerate(self.layers):
            if not isinstance(layer, Layer):
                raise UserError(f"layer {index + 1} of {self.name} is {layer!r}; expected a layer")
            counts[layer.kind] += 1
            name = f"{layer.kind}{counts[layer.kind]}"
            try:
                out = layer.output_shape(shape)
            except UserError as error:
                raise UserError(
                    f"network {self.name}, layer {index + 1} ({name}): {error}"
                ) from None
            keeps_elements = math.prod(out) == math.prod(shape) and not layer.parameters(shape)
            out_maps = maps if len(out) == 1 and keeps_elements else _maps_of(out)
            parameters = tuple(replace(p, name=f"{name}.{p.name}") for p in layer.parameters(shape))
            nodes.append(Node(index, name, layer, shape, out, maps, out_maps, parameters))
            shape, maps = out, out_maps
        return tuple(nodes)

    @property
    def output_shape(self) -> Shape:
        """Shape of what goes into the loss, per sample."""
        return self.nodes[-1].output_shape

    @property
    def num_outputs(self) -> int:
        """Number of outputs F."""
        return math.prod(self.output_shape)

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """All trainable arrays, first layer first."""
        return tuple(p for node in self.nodes for p in node.parameters)

    @property
    def num_parameters(self) -> int:
        """Number of trainable numbers."""
        return sum(p.size for p in self.parameters)
