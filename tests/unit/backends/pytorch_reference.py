"""The same network in PyTorch, in float64: what every backend's operations are compared with.

PyTorch computes gradients by itself from the forward pass, so nothing of our derivatives is
shared. Where its layers differ from ours (padding, local response normalisation) the difference
is mapped here, in one place.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dptrain.interchange.torch_layers import code_of
from dptrain.network import (
    Add,
    AveragePool2d,
    BatchNorm2d,
    ChannelShuffle,
    ChannelSlice,
    Concatenate,
    Conv2d,
    Crop2d,
    Dense,
    Dilate2d,
    Flatten,
    GlobalAveragePool2d,
    GlobalMaxPool2d,
    GroupNorm,
    LayerNorm,
    LocalResponseNorm,
    MaxPool2d,
    Multiply,
    Network,
    Node,
    Pad2d,
    Reshape,
    Resize2d,
    StochasticDepth,
    SumPool2d,
    expressions,
)
from dptrain.network.elementwise import Activation, Formula
from dptrain.network.layers import RandomMask
from dptrain.network.maps.resampling import Resampling, transposed
from dptrain.network.network import INPUT
from dptrain.philox import dropout_keep
from tests.lazy import LazyModule

if TYPE_CHECKING:
    from torch import Tensor

torch = LazyModule("torch")
functional = LazyModule("torch.nn.functional")

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Result:
    """Output before the loss, the loss, and its gradient by every parameter."""

    output: Array
    loss: float
    gradients: dict[str, Array]


def _pad(x: Tensor, pads: tuple[tuple[int, int], tuple[int, int]], value: float = 0.0) -> Tensor:
    (top, bottom), (left, right) = pads
    return functional.pad(x, (left, right, top, bottom), value=value)


def _sum_pool(x: Tensor, layer: SumPool2d | AveragePool2d | MaxPool2d, node: Node) -> Tensor:
    padded = _pad(x, layer.pads(node.input_shape))
    return functional.avg_pool2d(padded, layer.windows, layer.strides, divisor_override=1)


def _function(node: Node, x: Tensor) -> Tensor:
    """The function of PyTorch by the same name, whose derivative PyTorch knows by itself."""
    layer = node.layer
    assert isinstance(layer, Activation)
    names = {"torch": torch, "F": functional, "x": x}
    y: Tensor = eval(code_of(node).expression.format("x"), names)
    return y


def _normalize(node: Node, x: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    layer = node.layer
    weight, bias, mean, variance = (
        weights.get(f"{node.name}.{part}")
        for part in ("weight", "bias", "running_mean", "running_var")
    )
    if isinstance(layer, BatchNorm2d):
        training = mean is None
        return functional.batch_norm(x, mean, variance, weight, bias, training, eps=layer.epsilon)
    if isinstance(layer, GroupNorm):
        return functional.group_norm(x, layer.groups, weight, bias, layer.epsilon)
    last = x.movedim(1, -1)  # A vector stays as it is.
    return functional.layer_norm(last, last.shape[-1:], weight, bias, layer.epsilon).movedim(-1, 1)


def _combine(node: Node, inputs: Sequence[Tensor]) -> Tensor:
    if isinstance(node.layer, Concatenate):
        return torch.cat(tuple(inputs), dim=1)
    return torch.stack(tuple(inputs)).sum(dim=0)


def _apply(
    node: Node, inputs: Sequence[Tensor], weights: Mapping[str, Tensor], keys: Mapping[str, object]
) -> Tensor:
    layer, x = node.layer, inputs[0]
    weight, bias = (weights.get(f"{node.name}.{part}") for part in ("weight", "bias"))
    if isinstance(layer, Crop2d):
        (top, left), (bottom, right), (down, across) = layer.start, layer.stop, layer.step
        return x[:, :, top:bottom:down, left:right:across]
    if isinstance(layer, ChannelSlice):
        return x[:, layer.start : layer.stop]
    if isinstance(layer, ChannelShuffle):
        return torch.nn.functional.channel_shuffle(x, layer.groups)
    if isinstance(layer, Multiply):
        return inputs[0] * inputs[1]
    if isinstance(layer, Add | Concatenate):
        return _combine(node, inputs)
    if isinstance(layer, Conv2d):
        padded = _pad(x, layer.pads(node.input_shape))
        y = functional.conv2d(
            padded, weight, bias, layer.strides, dilation=layer.dilations, groups=layer.groups
        )
        return y[:, :, : node.output_shape[1], : node.output_shape[2]]
    if isinstance(layer, Dense):
        return functional.linear(x, weight, bias)
    if isinstance(layer, MaxPool2d):
        padded = _pad(x, layer.pads(node.input_shape), -torch.inf)
        return functional.max_pool2d(padded, layer.windows, layer.strides)
    if isinstance(layer, AveragePool2d) and layer.count_padding:
        return _sum_pool(x, layer, node) / math.prod(layer.windows)
    if isinstance(layer, AveragePool2d):
        inside = _sum_pool(torch.ones_like(x), layer, node)
        return _sum_pool(x, layer, node) / inside
    if isinstance(layer, SumPool2d):
        return _sum_pool(x, layer, node)
    if isinstance(layer, GlobalAveragePool2d):
        return functional.adaptive_avg_pool2d(x, 1)
    if isinstance(layer, Pad2d):
        top, bottom, left, right = layer.sides
        mode = "constant" if layer.mode == "zeros" else layer.mode
        return functional.pad(x, (left, right, top, bottom), mode)
    if isinstance(layer, Dilate2d):
        channels = len(x[0])
        ones = x.new_ones(channels, 1, 1, 1)
        return functional.conv_transpose2d(x, ones, stride=layer.factors, groups=channels)
    if isinstance(layer, Resize2d):
        size = node.output_shape[1:] if layer.size else None
        scales = None if layer.size else layer.scales
        corners = layer.align_corners if layer.mode == "bilinear" else None
        return functional.interpolate(x, size, scales, layer.mode, align_corners=corners)
    if isinstance(layer, GlobalMaxPool2d):
        return functional.adaptive_max_pool2d(x, 1)
    if isinstance(layer, LocalResponseNorm):
        # PyTorch takes the mean over the window of squares where we take the sum.
        size = 2 * layer.radius + 1
        return functional.local_response_norm(x, size, layer.alpha * size, layer.beta, layer.bias)
    if isinstance(layer, BatchNorm2d | GroupNorm | LayerNorm):
        return _normalize(node, x, weights)
    if isinstance(layer, RandomMask):
        return x * _dropout_factor(node, layer, keys) if keys else x
    if isinstance(layer, Flatten):
        return x.flatten(1)
    if isinstance(layer, Reshape):
        return x.reshape(-1, *layer.shape)
    return _function(node, x)


def _forward(
    network: Network,
    x: NDArray[np.generic],
    weights: Mapping[str, Tensor],
    keys: Mapping[str, object],
) -> dict[str, Tensor]:
    """The output of every node, by name, and the input.

    With running statistics among the weights, batch normalisation uses these.
    """
    tensors = {INPUT: torch.tensor(np.asarray(x, np.float64))}
    for node in network.nodes:
        inputs = [tensors[name] for name in node.inputs]
        tensors[node.name] = _apply(node, inputs, weights, keys)
    return tensors


def _dropout_factor(node: Node, layer: RandomMask, keys: Mapping[str, object]) -> Tensor:
    """Our mask: PyTorch's own random numbers cannot be keyed by sample."""
    if isinstance(layer, StochasticDepth):
        kept = dropout_keep(layer.rate, 1, layer=node.index, **keys)
        return torch.tensor(kept / (1.0 - layer.rate)).reshape(-1, *[1] * len(node.output_shape))
    channels, height, width = node.output_maps
    keep = dropout_keep(layer.rate, channels * height * width, layer=node.index, **keys)
    ordered = keep.reshape(-1, height, width, channels).transpose(0, 3, 1, 2)
    factor = torch.tensor(ordered / (1.0 - layer.rate))
    return factor.reshape(-1, *node.output_shape)


def losses_of(kind: str, z: Tensor, y: Tensor) -> Tensor:
    """Return the loss of each sample."""
    if kind == "softmax_cross_entropy":
        return functional.cross_entropy(z, y.long(), reduction="none")
    if kind == "softmax_squared_error":
        onehot = functional.one_hot(y.long(), z.shape[1]).to(z.dtype)
        return functional.mse_loss(z.softmax(1), onehot, reduction="none").mean(1)
    if kind == "sigmoid_cross_entropy":
        return functional.binary_cross_entropy_with_logits(z, y, reduction="none").mean(1)
    assert kind == "mean_squared_error"
    return functional.mse_loss(z, y, reduction="none").mean(1)


def compute(
    network: Network,
    parameters: Mapping[str, NDArray[np.generic]],
    x: NDArray[np.generic],
    y: NDArray[np.generic],
    **keys: object,
) -> Result:
    """Output, mean loss and gradients.

    Args:
        network: the network.
        parameters: by name, canonical shapes.
        x: (N, C, H, W) or (N, F).
        y: targets.
        **keys: ``seed``, ``step`` and ``samples`` of the dropout masks, if there are any.
    """
    weights = {
        name: torch.tensor(np.asarray(value, np.float64), requires_grad=True)
        for name, value in parameters.items()
    }
    z = _forward(network, x, weights, keys)[network.nodes[-1].name]
    loss = losses_of(network.loss.kind, z, torch.tensor(np.asarray(y, np.float64))).mean()
    loss.backward()
    gradients = {name: weight.grad.numpy() for name, weight in weights.items()}
    return Result(z.detach().numpy(), float(loss.detach()), gradients)


def evaluate(
    network: Network,
    parameters: Mapping[str, NDArray[np.generic]],
    statistics: Mapping[str, NDArray[np.generic]],
    x: NDArray[np.generic],
) -> Array:
    """Output in evaluation: without dropout, and with running statistics."""
    numbers = {**parameters, **statistics}
    weights = {name: torch.tensor(np.asarray(v, np.float64)) for name, v in numbers.items()}
    return _forward(network, x, weights, {})[network.nodes[-1].name].numpy()


def bounds(
    network: Network,
    parameters: Mapping[str, NDArray[np.generic]],
    x: NDArray[np.generic],
    y: NDArray[np.generic],
    dtype: str,
    precision: str = "",
    statistics: Mapping[str, NDArray[np.generic]] | None = None,
) -> Result:
    """How far a correct computation in `dtype` may lie from the exact one, element by element.

    A sum of n products, in whatever order, is off by at most n·u·Σ|aᵢ||bᵢ| to first order, u the
    unit roundoff (Higham, "Accuracy and stability of numerical algorithms", 2002, section 3.1).
    Σ|aᵢ||bᵢ| is what the same layer gives for absolute values. So the network runs once more with
    every number replaced by its magnitude and every other layer by a linear one that is nowhere
    smaller and nowhere less steep: what comes out, times u, times the length of all sums on the
    way, bounds the error, those of earlier layers included.

    Where products are of rounded factors, `precision` tf32 or bf16, each is off by the roundoff of
    both besides: 2^-11 for numbers of 11 significant bits, 2^-8 for those of 8. Under bf16 every
    layer rounds what it gives, too.

    Returns:
        Bounds of output, loss and gradients; with `statistics`, of evaluation.
    """
    n, outputs = len(x), network.num_outputs
    weights = {
        name: torch.tensor(np.abs(np.asarray(value, np.float64)), requires_grad=True)
        for name, value in parameters.items()
    }
    running = {k: torch.tensor(np.asarray(v, np.float64)) for k, v in (statistics or {}).items()}
    numbers = {k: torch.tensor(np.asarray(v, np.float64)) for k, v in parameters.items()} | running
    # Normalisations need the numbers themselves, without dropout, which no case has before one.
    exact = _forward(network, x, numbers, {})
    majorants = {INPUT: torch.tensor(np.abs(np.asarray(x, np.float64)))}
    length, rounded = 0, 1
    for node in network.nodes:
        inputs = [majorants[name] for name in node.inputs]
        majorants[node.name] = _majorant(node, inputs, weights | running, exact[node.inputs[0]])
        length += _longest_sum(node, n) + ELEMENTWISE_ROUNDINGS
        rounded += 2 if node.parameters else precision == "bf16"
    z = majorants[network.nodes[-1].name]
    targets = 1.0 if network.loss.targets == "classes" else np.abs(np.asarray(y, np.float64))
    # Every loss: |dz| ≤ share, and |d²loss/dz²| ≤ share.
    share = 2.0 / n if network.loss.targets == "classes" else 2.0 / (n * outputs)
    reach = z.detach() + torch.as_tensor(targets)
    z.backward(share * (1.0 + reach))
    # Twice, because the network in PyTorch, in float64, rounds as well.
    roundoff = 2.0 * 0.5 * float(np.finfo(dtype).eps)
    factor = roundoff * length + 2.0 * ROUNDOFFS.get(precision, 0.0) * rounded
    # A squared error is the steepest loss: |z − y|² summed over n·F.
    loss = (factor + roundoff * n * outputs) * float((1.0 + reach).square().sum()) * share
    gradients = {name: factor * weight.grad.numpy() for name, weight in weights.items()}
    return Result(factor * z.detach().numpy(), loss, gradients)


ROUNDOFFS = {"tf32": 2.0**-11, "bf16": 2.0**-8}
"""Of the factors of products, by precision, where these are coarser than sums."""

ELEMENTWISE_ROUNDINGS = 16
"""Roundings of an element outside of sums: exponentials, powers, a division; with room."""


def _majorant(
    node: Node, inputs: Sequence[Tensor], weights: Mapping[str, Tensor], exact: Tensor
) -> Tensor:
    """The layer that is nowhere smaller and nowhere less steep, for magnitudes `inputs`.

    `exact` is the first input of the layer itself.
    """
    layer, x = node.layer, inputs[0]
    if isinstance(layer, MaxPool2d):
        # The value of the maximum, the gradient of the sum: whichever element is the largest.
        total = _sum_pool(x, layer, node)
        return total + (_apply(node, inputs, weights, {}) - total).detach()
    if isinstance(layer, GlobalMaxPool2d):
        total = x.sum(dim=(2, 3), keepdim=True)
        return total + (_apply(node, inputs, weights, {}) - total).detach()
    if isinstance(layer, Activation):
        return _function_majorant(layer, x)
    if isinstance(layer, RandomMask):
        return x / (1.0 - layer.rate)
    if isinstance(layer, LocalResponseNorm):
        window = (2 * layer.radius + 1) * float(x.detach().max()) ** 2
        steepness = 1.0 + 2.0 * layer.alpha * layer.beta * window / layer.bias
        return x * (steepness * layer.bias**-layer.beta)
    if isinstance(layer, BatchNorm2d | GroupNorm | LayerNorm):
        return _normalization_majorant(node, x, weights, exact)
    return _apply(node, inputs, weights, {})


def _function_majorant(layer: Activation, x: Tensor) -> Tensor:
    """|f(0)| + slope · x, by the largest derivatives of f up to the largest magnitude.

    An error of x moves the slope, too, by the derivative of second order.
    """
    formula, largest = layer.formula, 1.0 + 1.1 * float(x.detach().max())
    points = np.linspace(-largest, largest, 4001)
    y, slopes = (
        np.broadcast_to(expressions.evaluate(tree, {**formula.values, **values}), points.shape)
        for tree, values in (
            (formula.forward, {"x": points}),
            (formula.slope, {"x": points, "y": _values_at(formula, points)}),
        )
    )
    slope = max(1.0, 1.01 * float(np.abs(slopes).max()))
    changes = np.abs(np.diff(slopes)) / np.diff(points)
    # Where the slope has a step, there is a kink, which cases keep away from.
    smooth = changes[changes < STEEPEST]
    curvature = 1.01 * float(smooth.max(initial=0.0))
    offset = float(np.abs(y[len(points) // 2])) + (0.5 if curvature else 0.0)
    return offset + _with_gradient_factor(x * slope, 1.0 + curvature * x.detach() / slope)


STEEPEST = 8.0
"""A change of the slope of a function per unit that counts as a kink."""


def _values_at(formula: Formula, x: Array) -> Array:
    return np.asarray(expressions.evaluate(formula.forward, {"x": x, **formula.values}))


def _normalization_majorant(
    node: Node, x: Tensor, weights: Mapping[str, Tensor], exact: Tensor
) -> Tensor:
    """|w| · s · (x + mean(x) + |x̂| · mean(|x̂| x)) + |b| with s = 1 / sqrt(variance + ε).

    For dx instead of x, it bounds the derivative. An error of x moves the derivative, too, by about
    twice the error relative to the standard deviation.
    """
    layer = node.layer
    assert isinstance(layer, BatchNorm2d | GroupNorm | LayerNorm)
    sides = [1] * (x.dim() - 2)
    weight, bias = (
        weights[f"{node.name}.{part}"].reshape(-1, *sides) for part in ("weight", "bias")
    )
    if f"{node.name}.running_mean" in weights:
        mean, variance = (
            weights[f"{node.name}.running_{part}"].reshape(-1, 1, 1) for part in ("mean", "var")
        )
        return weight * (x + mean.abs()) * (variance + layer.epsilon).rsqrt() + bias
    centred = exact - _mean(layer, exact)
    inverse = (_mean(layer, centred.square()) + layer.epsilon).rsqrt()
    normalized = (centred * inverse).abs()
    reach = inverse * (x + _mean(layer, x) + normalized * _mean(layer, normalized * x))
    steepness = 1.0 + 2.0 * inverse * (x + _mean(layer, x)).detach()
    return weight * _with_gradient_factor(reach, steepness) + bias


def _with_gradient_factor(y: Tensor, factor: Tensor) -> Tensor:
    """Return y, whose derivatives count `factor` times."""
    steeper = factor * y
    return steeper + (y - steeper).detach()


def _mean(layer: BatchNorm2d | GroupNorm | LayerNorm, x: Tensor) -> Tensor:
    """The means that the layer takes, for each element."""
    if isinstance(layer, BatchNorm2d):
        return x.mean(dim=(0, 2, 3), keepdim=True).expand_as(x)
    if isinstance(layer, LayerNorm):
        return x.mean(dim=1, keepdim=True).expand_as(x)
    divided = x.reshape(len(x), layer.groups, -1)
    return divided.mean(dim=2, keepdim=True).expand_as(divided).reshape(x.shape)


def _longest_sum(node: Node, n: int) -> int:
    """Of forward, gradient by input and gradient by weight."""
    layer = node.layer
    if isinstance(layer, Conv2d):
        taps = math.prod(layer.window)
        pixels = n * math.prod(node.output_shape[1:])
        channels = max(node.input_shape[0], layer.filters) // layer.groups
        return max(channels * taps, pixels) + 1
    if isinstance(layer, Dense):
        return max(node.input_shape[0], layer.units, n) + 1
    if isinstance(layer, MaxPool2d | AveragePool2d | SumPool2d):
        return math.prod(layer.windows)
    if isinstance(layer, BatchNorm2d | GroupNorm | LayerNorm):
        return max(n * math.prod(node.input_shape[1:]), math.prod(node.input_shape))
    if isinstance(layer, Resampling):
        pairs = zip(layer.taps(node.input_shape), node.input_shape[1:], strict=True)
        return 4 + math.prod(max(map(len, transposed(*pair))) for pair in pairs)
    if isinstance(layer, GlobalAveragePool2d):
        return math.prod(node.input_shape[1:])
    if isinstance(layer, Add):
        return layer.num_inputs
    if isinstance(layer, Multiply):
        return max(node.input_shape[0], math.prod(node.input_shape[1:]))
    return 2 * layer.radius + 1 if isinstance(layer, LocalResponseNorm) else 0
