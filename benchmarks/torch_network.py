"""The same network as PyTorch modules: what dptrain is checked against, and timed against.

Each layer becomes the module that a PyTorch user would write. Where PyTorch's layers differ from
ours (one-sided padding, local response normalisation) the difference is mapped here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from dptrain.network import (
    AveragePool2d,
    Conv2d,
    Dense,
    Dropout,
    Flatten,
    LocalResponseNorm,
    MaxPool2d,
    Network,
    Node,
    ReLU,
    Sigmoid,
    SumPool2d,
)

LossFunction = Callable[[Tensor, Tensor], Tensor]

LOSSES: Mapping[str, LossFunction] = {
    "classes": functional.cross_entropy,
    "binary": functional.binary_cross_entropy_with_logits,
    "values": functional.mse_loss,
}


def torch_network(network: Network, parameters: Mapping[str, NDArray[Any]]) -> nn.Sequential:
    """`network` in PyTorch, with copies of `parameters`, in their dtype.

    Args:
        network: what to build.
        parameters: by name, in canonical layout.
    """
    modules = nn.Sequential()
    for node in network.nodes:
        for i, module in enumerate(_modules(node)):
            if isinstance(module, nn.Conv2d | nn.Linear):
                module.weight = nn.Parameter(torch.tensor(parameters[f"{node.name}.weight"]))
                module.bias = nn.Parameter(torch.tensor(parameters[f"{node.name}.bias"]))
                modules.add_module(node.name, module)
            else:
                modules.add_module(f"{node.name}_{i}", module)
    return modules


def parameter_names(network: Network) -> list[str]:
    """Names in the order of the PyTorch network's parameters."""
    return [parameter.name for node in network.nodes for parameter in node.parameters]


def fix_dropout(modules: nn.Sequential, network: Network, factors: Mapping[str, Tensor]) -> None:
    """Replace every dropout layer by a product with a given factor, 0 or 1 / (1 − rate)."""
    for node in network.nodes:
        if isinstance(node.layer, Dropout):
            setattr(modules, f"{node.name}_0", _Scale(factors[node.name]))


def _modules(node: Node) -> list[nn.Module]:
    layer = node.layer
    if isinstance(layer, Conv2d):
        return _convolution(node, layer)
    if isinstance(layer, Dense):
        return [nn.Linear(math.prod(node.input_shape), layer.units)]
    if isinstance(layer, MaxPool2d):
        return _max_pool(node, layer)
    if isinstance(layer, AveragePool2d | SumPool2d):
        return [_SumPool(node, average=isinstance(layer, AveragePool2d))]
    if isinstance(layer, LocalResponseNorm):
        # PyTorch takes the mean over the window of squares where we take the sum.
        size = 2 * layer.radius + 1
        return [nn.LocalResponseNorm(size, layer.alpha * size, layer.beta, layer.bias)]
    if isinstance(layer, Dropout):
        return [nn.Dropout(layer.rate)]
    return [{ReLU: nn.ReLU, Sigmoid: nn.Sigmoid, Flatten: nn.Flatten}[type(layer)]()]


def _convolution(node: Node, layer: Conv2d) -> list[nn.Module]:
    (top, bottom), (left, right) = layer.pads(node.input_shape)
    even = top == bottom and left == right
    # On the meta device nothing is allocated: the parameters come from outside.
    convolution = nn.Conv2d(
        node.input_shape[0], layer.filters, layer.window, layer.strides,
        (top, left) if even else 0, device="meta",
    )  # fmt: skip
    return [convolution] if even else [nn.ZeroPad2d((left, right, top, bottom)), convolution]


def _max_pool(node: Node, layer: MaxPool2d) -> list[nn.Module]:
    (top, bottom), (left, right) = layer.pads(node.input_shape)
    # PyTorch's own padding is faster than a padding layer, but supports only these cases.
    if (top, left) == (bottom, right) and 2 * max(top, left) <= min(layer.windows):
        return [nn.MaxPool2d(layer.windows, layer.strides, (top, left))]
    reaches_over = nn.MaxPool2d(layer.windows, layer.strides, ceil_mode=True)
    sizes = zip(node.input_shape[1:], layer.windows, layer.strides, strict=True)
    ceiled = tuple(-((window - size) // stride) + 1 for size, window, stride in sizes)
    if top == left == 0 and ceiled == node.output_shape[1:]:
        return [reaches_over]
    pad = nn.ConstantPad2d((left, right, top, bottom), -math.inf)
    return [pad, nn.MaxPool2d(layer.windows, layer.strides)]


class _SumPool(nn.Module):
    """Sum of each window, or the mean of its pixels inside the feature map."""

    def __init__(self, node: Node, *, average: bool) -> None:
        super().__init__()
        layer: Any = node.layer
        (top, bottom), (left, right) = layer.pads(node.input_shape)
        self.pads, self.window, self.stride = (
            (left, right, top, bottom),
            layer.windows,
            layer.strides,
        )
        inside = self._sum(torch.ones(1, *node.input_shape)) if average else torch.ones(1)
        self.register_buffer("inside", inside)

    def _sum(self, x: Tensor) -> Tensor:
        padded = functional.pad(x, self.pads)
        return functional.avg_pool2d(padded, self.window, self.stride, divisor_override=1)

    def forward(self, x: Tensor) -> Tensor:
        inside = self.inside
        assert isinstance(inside, Tensor)
        return self._sum(x) / inside


class _Scale(nn.Module):
    def __init__(self, factor: Tensor) -> None:
        super().__init__()
        self.register_buffer("factor", factor)

    def forward(self, x: Tensor) -> Tensor:
        factor = self.factor
        assert isinstance(factor, Tensor)
        return x * factor
