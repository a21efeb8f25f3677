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

from dptrain.interchange.torch_layers import code_of
from dptrain.network import (
    GELU,
    Add,
    AveragePool2d,
    BatchNorm2d,
    Concatenate,
    Conv2d,
    Dense,
    Dropout,
    Flatten,
    GlobalAveragePool2d,
    GlobalMaxPool2d,
    GroupNorm,
    Layer,
    LocalResponseNorm,
    MaxPool2d,
    Multiply,
    Network,
    Node,
    ReLU,
    Sigmoid,
    SiLU,
    StochasticDepth,
    SumPool2d,
    Tanh,
)
from dptrain.network.elementwise import Activation
from dptrain.network.maps.channels import ChannelLayer
from dptrain.network.maps.resampling import Resampling
from dptrain.network.network import INPUT
from dptrain.network.normalization import Normalization

LossFunction = Callable[[Tensor, Tensor], Tensor]

LOSSES: Mapping[str, LossFunction] = {
    "classes": functional.cross_entropy,
    "binary": functional.binary_cross_entropy_with_logits,
    "values": functional.mse_loss,
}


def torch_network(network: Network, parameters: Mapping[str, NDArray[Any]]) -> nn.Module:
    """`network` in PyTorch, with copies of `parameters`, in their dtype.

    Args:
        network: what to build.
        parameters: by name, in canonical layout.

    Returns:
        An `nn.Sequential` for a chain, and otherwise a `TorchGraph`.
    """
    modules = nn.Sequential() if network.is_chain else TorchGraph(network)
    for node in network.nodes:
        parts = _modules(node)
        for module in parts if node.parameters else ():
            if getattr(module, "weight", None) is not None:
                for parameter in node.parameters:
                    short = parameter.name.rpartition(".")[2]
                    value = nn.Parameter(torch.tensor(parameters[parameter.name]))
                    setattr(module, short, value)
        if not network.is_chain:
            modules.add_module(_module_name(node), parts[0] if not parts[1:] else _chain(parts))
            continue
        for i, module in enumerate(parts):
            is_weighted = node.parameters and module is parts[-1]
            modules.add_module(node.name if is_weighted else f"{node.name}_{i}", module)
    return modules


def _chain(parts: list[nn.Module]) -> nn.Module:
    return nn.Sequential(*parts)


def _module_name(node: Node) -> str:
    """Return the name of a layer's module in a graph; PyTorch allows no dots in it."""
    return node.name.replace(".", "_")


class TorchGraph(nn.Module):
    """A network whose layers read the outputs of any layers before them.

    Outputs are released after their last use, so that PyTorch keeps only what it needs itself.
    """

    def __init__(self, network: Network) -> None:
        super().__init__()
        last_use = {name: node.index for node in network.nodes for name in node.inputs}
        self._layers = [
            (node, [name for name in set(node.inputs) if last_use[name] == node.index])
            for node in network.nodes
        ]

    def forward(self, x: Tensor) -> Tensor:
        values = {INPUT: x}
        for node, unneeded in self._layers:
            inputs = [values[name] for name in node.inputs]
            for name in unneeded:
                del values[name]
            values[node.name] = getattr(self, _module_name(node))(*inputs)
        return values[self._layers[-1][0].name]


def parameter_names(network: Network) -> list[str]:
    """Names in the order of the PyTorch network's parameters."""
    return [parameter.name for node in network.nodes for parameter in node.parameters]


def fix_dropout(modules: nn.Module, network: Network, factors: Mapping[str, Tensor]) -> None:
    """Replace every dropout layer by a product with a given factor, 0 or 1 / (1 − rate)."""
    for node in network.nodes:
        if isinstance(node.layer, Dropout):
            name = f"{node.name}_0" if network.is_chain else _module_name(node)
            setattr(modules, name, _Scale(factors[node.name]))


def _modules(node: Node) -> list[nn.Module]:
    layer = node.layer
    if isinstance(layer, Conv2d):
        return _convolution(node, layer)
    if isinstance(layer, Dense):
        return [nn.Linear(math.prod(node.input_shape), layer.units)]
    if isinstance(layer, MaxPool2d):
        return _max_pool(node, layer)
    if isinstance(layer, AveragePool2d | SumPool2d):
        return [_SumPool(node)]
    if isinstance(layer, LocalResponseNorm):
        # PyTorch takes the mean over the window of squares where we take the sum.
        size = 2 * layer.radius + 1
        return [nn.LocalResponseNorm(size, layer.alpha * size, layer.beta, layer.bias)]
    if isinstance(layer, Normalization):
        return [_normalization(node, layer)]
    if isinstance(layer, Dropout):
        return [nn.Dropout(layer.rate)]
    is_function = isinstance(layer, Activation) and type(layer) not in _PLAIN
    if isinstance(layer, StochasticDepth):
        return [_DropSamples(layer.rate)]
    if is_function or isinstance(layer, ChannelLayer | Resampling):
        return [_Function(code_of(node).expression)]
    return [_PLAIN[type(layer)]()]


def _normalization(node: Node, layer: Normalization) -> nn.Module:
    channels = node.input_shape[0]
    if isinstance(layer, BatchNorm2d):
        return nn.BatchNorm2d(channels, layer.epsilon, layer.momentum)
    if isinstance(layer, GroupNorm):
        return nn.GroupNorm(layer.groups, channels, layer.epsilon)
    is_vector = len(node.input_shape) == 1
    kind = nn.LayerNorm if is_vector else _ChannelLayerNorm
    return kind(channels, layer.epsilon)


class _ChannelLayerNorm(nn.LayerNorm):
    """Layer normalisation over the channels of maps (N, C, H, W)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class _DropSamples(nn.Module):
    """Stochastic depth."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self._rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        kept = torch.rand(len(x), *[1] * (x.dim() - 1), device=x.device) >= self._rate
        return x * kept / (1.0 - self._rate)


class _Function(nn.Module):
    """A layer with one input and no parameters, from the code with which dptrain exports it."""

    def __init__(self, expression: str) -> None:
        super().__init__()
        names = {"torch": torch, "F": functional}
        self._compute = eval(f"lambda x: {expression.format('x')}", names)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self._compute(x)
        return result


class _Add(nn.Module):
    def forward(self, *inputs: Tensor) -> Tensor:
        first, *rest = inputs
        for each in rest:
            first = first + each
        return first


class _Multiply(nn.Module):
    def forward(self, x: Tensor, x2: Tensor) -> Tensor:
        return x * x2


class _Concatenate(nn.Module):
    def forward(self, *inputs: Tensor) -> Tensor:
        return torch.cat(inputs, dim=1)


_PLAIN: Mapping[type[Layer], Callable[[], nn.Module]] = {
    ReLU: nn.ReLU,
    Sigmoid: nn.Sigmoid,
    Tanh: nn.Tanh,
    GELU: nn.GELU,
    SiLU: nn.SiLU,
    Flatten: nn.Flatten,
    GlobalAveragePool2d: lambda: nn.AdaptiveAvgPool2d(1),
    GlobalMaxPool2d: lambda: nn.AdaptiveMaxPool2d(1),
    Add: _Add,
    Concatenate: _Concatenate,
    Multiply: _Multiply,
}


def _convolution(node: Node, layer: Conv2d) -> list[nn.Module]:
    (top, bottom), (left, right) = layer.pads(node.input_shape)
    even = top == bottom and left == right
    # On the meta device nothing is allocated: the parameters come from outside.
    convolution = nn.Conv2d(
        node.input_shape[0], layer.filters, layer.window, layer.strides,
        (top, left) if even else 0, layer.dilations, layer.groups, layer.bias, device="meta",
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
    """Sum of each window, or the mean of its pixels, or of those inside the feature map."""

    def __init__(self, node: Node) -> None:
        super().__init__()
        layer: Any = node.layer
        (top, bottom), (left, right) = layer.pads(node.input_shape)
        self.pads, self.window, self.stride = (
            (left, right, top, bottom),
            layer.windows,
            layer.strides,
        )
        inside = torch.ones(1)
        if isinstance(layer, AveragePool2d):
            ones = self._sum(torch.ones(1, *node.input_shape))
            inside = inside * math.prod(layer.windows) if layer.count_padding else ones
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
