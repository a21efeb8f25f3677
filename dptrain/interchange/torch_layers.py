"""The PyTorch code of each layer.

A function for a class of layers returns the module that holds its parameters, and the expression
that computes the output. To export a new class, add a function and an entry in `CODE`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from dptrain.errors import UserError
from dptrain.interchange.torch_functions import torch_code
from dptrain.network.combining import (
    Add,
    Concatenate,
    GlobalAveragePool2d,
    GlobalMaxPool2d,
    Multiply,
)
from dptrain.network.elementwise import Activation
from dptrain.network.layers import (
    AveragePool2d,
    Conv2d,
    Dense,
    Dropout,
    Flatten,
    Layer,
    LocalResponseNorm,
    MaxPool2d,
    Pads,
    Reshape,
    StochasticDepth,
    SumPool2d,
    entry_of,
)
from dptrain.network.maps.channels import ChannelShuffle, ChannelSlice
from dptrain.network.maps.resampling import Crop2d, Dilate2d, Pad2d, Resize2d
from dptrain.network.network import Node
from dptrain.network.normalization import BatchNorm2d, GroupNorm, LayerNorm


class Code(NamedTuple):
    """Python code of a layer.

    Attributes:
        expression: computes the output; ``{0}``, ``{1}`` are the inputs, and ``{m}`` the module.
        module: constructs the module; "" if the layer needs none.
    """

    expression: str
    module: str = ""


def code_of(node: Node) -> Code:
    """Return the code of a layer.

    Raises:
        UserError: the class of the layer has no entry in `CODE`.
    """
    write = entry_of(CODE, node.layer)
    if write is None:
        raise UserError(f"layer {node.name}: {node.layer.kind} cannot be exported to PyTorch")
    return write(node, node.layer)


def _pair(values: tuple[int, int]) -> str:
    """Return one number for two equal ones."""
    return str(values[0]) if values[0] == values[1] else str(values)


def _padded(pads: Pads, value: str = "") -> tuple[str, str]:
    """Return the expression of the padded input, and the padding that is left to the operation.

    PyTorch's operations pad both sides equally.
    """
    (top, bottom), (left, right) = pads
    if top == bottom and left == right:
        return "{0}", _pair((top, left))
    return f"F.pad({{0}}, ({left}, {right}, {top}, {bottom}){value})", "0"


def _conv(node: Node, layer: Conv2d) -> Code:
    x, padding = _padded(layer.pads(node.input_shape))
    arguments = [str(node.input_shape[0]), str(layer.filters), _pair(layer.window)]
    if layer.strides != (1, 1):
        arguments.append(f"stride={_pair(layer.strides)}")
    if padding != "0":
        arguments.append(f"padding={padding}")
    if layer.dilations != (1, 1):
        arguments.append(f"dilation={_pair(layer.dilations)}")
    if layer.groups > 1:
        arguments.append(f"groups={layer.groups}")
    if not layer.bias:
        arguments.append("bias=False")
    return Code(f"{{m}}({x})", f"nn.Conv2d({', '.join(arguments)})")


def _dense(node: Node, layer: Dense) -> Code:
    return Code("{m}({0})", f"nn.Linear({node.input_shape[0]}, {layer.units})")


def _max_pool(node: Node, layer: MaxPool2d) -> Code:
    pads = layer.pads(node.input_shape)
    (top, bottom), (left, right) = pads
    sizes = zip(node.input_shape[1:], layer.windows, layer.strides, strict=True)
    ceiled = tuple(-((window - size) // stride) + 1 for size, window, stride in sizes)
    if top == left == 0 and (bottom or right) and ceiled == node.output_shape[1:]:
        # Windows that reach over the map are faster than a padded copy.
        return Code(f"F.max_pool2d({{0}}, {_windows(layer, '0')}, ceil_mode=True)")
    x, padding = _padded(pads, ", value=-torch.inf")
    return Code(f"F.max_pool2d({x}, {_windows(layer, padding)})")


def _average_pool(node: Node, layer: AveragePool2d) -> Code:
    x, padding = _padded(layer.pads(node.input_shape))
    windows = _windows(layer, padding)
    if layer.count_padding:
        return Code(f"F.avg_pool2d({x}, {windows})")
    if x == "{0}":
        counts = "" if padding == "0" else ", count_include_pad=False"
        return Code(f"F.avg_pool2d({{0}}, {windows}{counts})")
    # Positions outside the map do not count.
    ones = x.replace("{0}", "torch.ones_like({0}[:1, :1])")
    means, covered = f"F.avg_pool2d({x}, {windows})", f"F.avg_pool2d({ones}, {windows})"
    return Code(f"({means}\n             / {covered})")


def _sum_pool(node: Node, layer: SumPool2d) -> Code:
    # PyTorch's older exporter of ONNX files ignores divisor_override.
    x, padding = _padded(layer.pads(node.input_shape))
    size = math.prod(layer.windows)
    return Code(f"F.avg_pool2d({x}, {_windows(layer, padding)}) * {size}")


def _windows(layer: MaxPool2d | AveragePool2d | SumPool2d, padding: str) -> str:
    """Return the arguments of a pooling."""
    arguments = [_pair(layer.windows)]
    if layer.strides != layer.windows:
        arguments.append(f"stride={_pair(layer.strides)}")
    if padding != "0":
        arguments.append(f"padding={padding}")
    return ", ".join(arguments)


def _dropout(node: Node, layer: Dropout) -> Code:
    return Code("{m}({0})", f"nn.Dropout({layer.rate!r})")


def _batch_norm(node: Node, layer: BatchNorm2d) -> Code:
    settings = _changed(eps=(layer.epsilon, 1e-5), momentum=(layer.momentum, 0.1))
    return Code("{m}({0})", f"nn.BatchNorm2d({node.input_shape[0]}{settings})")


def _group_norm(node: Node, layer: GroupNorm) -> Code:
    settings = _changed(eps=(layer.epsilon, 1e-5))
    return Code("{m}({0})", f"nn.GroupNorm({layer.groups}, {node.input_shape[0]}{settings})")


def _layer_norm(node: Node, layer: LayerNorm) -> Code:
    settings = _changed(eps=(layer.epsilon, 1e-5))
    module = f"nn.LayerNorm({node.input_shape[0]}{settings})"
    is_vector = len(node.input_shape) == 1
    return Code("{m}({0})" if is_vector else "{m}({0}.movedim(1, -1)).movedim(-1, 1)", module)


def _changed(**values: tuple[float, float]) -> str:
    """Return the arguments whose value is not their default."""
    changed = {name: value for name, (value, default) in values.items() if value != default}
    return "".join(f", {name}={value!r}" for name, value in changed.items())


def _lrn(node: Node, layer: LocalResponseNorm) -> Code:
    # PyTorch takes the mean over the window of squares, dptrain the sum.
    size = 2 * layer.radius + 1
    settings = f"{size}, {layer.alpha * size!r}, {layer.beta!r}, {layer.bias!r}"
    return Code(f"F.local_response_norm({{0}}, {settings})")


def _add(node: Node, layer: Add) -> Code:
    return Code(" + ".join(f"{{{i}}}" for i in range(layer.num_inputs)))


def _concatenate(node: Node, layer: Concatenate) -> Code:
    return Code(f"torch.cat(({', '.join(f'{{{i}}}' for i in range(layer.num_inputs))}), 1)")


def _slice(node: Node, layer: ChannelSlice) -> Code:
    return Code(f"{{0}}[:, {layer.start}:{layer.stop}]")


def _shuffle(node: Node, layer: ChannelShuffle) -> Code:
    groups = f"{{0}}.unflatten(1, ({layer.groups}, {node.input_shape[0] // layer.groups}))"
    return Code(f"{groups}.transpose(1, 2).flatten(1, 2)")


def _reshape(node: Node, layer: Reshape) -> Code:
    return Code(f"{{0}}.reshape(-1, {', '.join(map(str, layer.shape))})")


def _pad(node: Node, layer: Pad2d) -> Code:
    top, bottom, left, right = layer.sides
    mode = "" if layer.mode == "zeros" else f', mode="{layer.mode}"'
    return Code(f"F.pad({{0}}, ({left}, {right}, {top}, {bottom}){mode})")


def _crop(node: Node, layer: Crop2d) -> Code:
    rows, columns = (
        f"{first}:{stop}:{step}"
        for first, stop, step in zip(layer.start, layer.stop, layer.step, strict=True)
    )
    return Code(f"{{0}}[:, :, {rows}, {columns}]")


def _dilate(node: Node, layer: Dilate2d) -> Code:
    channels = node.input_shape[0]
    ones = f"{{0}}.new_ones({channels}, 1, 1, 1)"
    settings = f"stride={_pair(layer.factors)}, groups={channels}"
    return Code(f"F.conv_transpose2d({{0}}, {ones}, {settings})")


def _resize(node: Node, layer: Resize2d) -> Code:
    sizes = f"scale_factor={layer.scales}" if layer.size is None else f"{node.output_shape[1:]}"
    corners = ", align_corners=True" if layer.align_corners else ""
    return Code(f'F.interpolate({{0}}, {sizes}, mode="{layer.mode}"{corners})')


def _activation(node: Node, layer: Activation) -> Code:
    formula = layer.formula
    if not layer.function.torch:
        return Code(torch_code(formula.output()))
    code = layer.function.torch
    for name, value in formula.values.items():
        code = code.replace(f"{{{name}}}", repr(value))
    return Code(code)


def _function(expression: str, node: Node, layer: Layer) -> Code:
    return Code(expression)


CODE: Mapping[type[Layer], Callable[[Node, Any], Code]] = {
    Conv2d: _conv,
    Dense: _dense,
    MaxPool2d: _max_pool,
    AveragePool2d: _average_pool,
    SumPool2d: _sum_pool,
    GlobalAveragePool2d: partial(_function, "{0}.mean((2, 3), keepdim=True)"),
    GlobalMaxPool2d: partial(_function, "F.adaptive_max_pool2d({0}, 1)"),
    Flatten: partial(_function, "{0}.flatten(1)"),
    Reshape: _reshape,
    Activation: _activation,
    Dropout: _dropout,
    StochasticDepth: partial(_function, "{0}"),
    Dilate2d: _dilate,
    BatchNorm2d: _batch_norm,
    GroupNorm: _group_norm,
    LayerNorm: _layer_norm,
    LocalResponseNorm: _lrn,
    Add: _add,
    Concatenate: _concatenate,
    ChannelSlice: _slice,
    ChannelShuffle: _shuffle,
    Pad2d: _pad,
    Resize2d: _resize,
    Crop2d: _crop,
    Multiply: partial(_function, "{0} * {1}"),
}
"""Functions that write the code of a layer, by the class of the layer."""
