"""Networks whose biases are layers of their own, to time the addition of biases in inference."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

from dptrain.network.initializers import Constant
from dptrain.network.layers import Conv2d, Dense, Flops, Layer, Parameter, Shape
from dptrain.network.network import Network, NodeSpec


@dataclass(frozen=True)
class BiasAdd(Layer):
    """y = x + bias, with a bias per channel or unit.

    Only `separate_biases` makes this layer, and backends compute it only in inference.
    """

    kind: ClassVar[str] = "bias_add"

    initial: Constant = Constant(0.0)

    def output_shape(self, input_shape: Shape) -> Shape:
        return input_shape

    def parameters(self, input_shape: Shape) -> tuple[Parameter, ...]:
        return (Parameter("bias", (input_shape[0],), 1, self.initial),)

    def flops(self, input_shape: Shape) -> Flops:
        return Flops(math.prod(input_shape))


def separate_biases(network: Network) -> Network:
    """Return the network with a `BiasAdd` after each convolution and dense layer.

    These keep biases of zero, which their kernels add to sums in registers without measurable cost.

    Example:
        >>> from dptrain.network import Dense, Network, ReLU
        >>> net = separate_biases(Network((5,), [Dense(4), ReLU(), Dense(2)]))
        >>> [node.name for node in net.nodes]
        ['dense1', 'dense1_bias', 'relu1', 'dense2', 'dense2_bias']
    """
    nodes, renamed = list[NodeSpec](), dict[str, str]()
    for node in network.nodes:
        layer, inputs = node.layer, tuple(renamed.get(name, name) for name in node.inputs)
        if not isinstance(layer, Conv2d | Dense):
            nodes.append(NodeSpec(layer, node.name, inputs))
            continue
        renamed[node.name] = f"{node.name}_bias"
        nodes += [
            NodeSpec(replace(layer, bias_init=Constant(0.0)), node.name, inputs),
            NodeSpec(BiasAdd(layer.bias_init), renamed[node.name], (node.name,)),
        ]
    return Network.from_nodes(network.input_shape, nodes, network.loss, network.name)
