"""The same network in JAX: what dptrain is timed against, next to PyTorch.

Maps are (N, H, W, C), the layout in which XLA's convolutions are fastest on CPUs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import NDArray

from dptrain.network import (
    GELU,
    Add,
    AveragePool2d,
    ChannelShuffle,
    ChannelSlice,
    Concatenate,
    Conv2d,
    Dense,
    Dropout,
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
    ReLU,
    Sigmoid,
    SiLU,
    StochasticDepth,
    SumPool2d,
)
from dptrain.network.elementwise import Activation
from dptrain.network.expressions import CONSTANT, nodes, variable
from dptrain.network.maps.resampling import Resampling, Taps
from dptrain.network.network import INPUT
from dptrain.network.normalization import Normalization

Arrays = Mapping[str, Any]
Forward = Callable[[Arrays, Any, Arrays], Any]
"""Computes outputs from parameters, inputs and, in training, the factors of each dropout layer.

Batch normalisations use the minibatch. Their running values are not computed, which is less work
than in the other programs."""


def jax_parameters(network: Network, parameters: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    """Return copies of canonical parameters, filters as (R, S, C, K)."""
    return {name: jnp.array(_to_jax(value)) for name, value in parameters.items()}


def canonical(parameters: Arrays) -> dict[str, NDArray[Any]]:
    """Return copies of parameters in canonical layout, filters as (K, C, R, S)."""
    arrays = {name: np.array(value) for name, value in parameters.items()}
    return {n: a.transpose(3, 2, 0, 1) if a.ndim == 4 else a for n, a in arrays.items()}


def jax_input(x: NDArray[Any]) -> Any:
    """Return a batch as a JAX array, maps as (N, H, W, C)."""
    return jnp.array(_channels_last(x))


def jax_factors(factors: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    """Return the factors of dropout layers as JAX arrays."""
    return {n: jnp.array(_channels_last(f), jnp.float32) for n, f in factors.items()}


def jax_forward(network: Network) -> Forward:
    """Return a function that computes the outputs of `network`; `factors` may lack layers."""

    def forward(parameters: Arrays, x: Any, factors: Arrays) -> Any:
        values = {INPUT: x}
        for node in network.nodes:
            inputs = [values[name] for name in node.inputs]
            values[node.name] = _apply(node, parameters, inputs, factors)
        return values[network.nodes[-1].name]

    return forward


def random_factors(network: Network, n: int, key: Any) -> dict[str, Any]:
    """Return random factors of each dropout layer: 0 or 1 / (1 − rate)."""
    factors = {}
    for node in network.nodes:
        if isinstance(node.layer, Dropout):
            key, own = jax.random.split(key)
            shape = _channels_last_shape(node.output_shape)
            keep = jax.random.bernoulli(own, 1.0 - node.layer.rate, (n, *shape))
            factors[node.name] = keep / (1.0 - node.layer.rate)
    return factors


def jax_loss(network: Network) -> Callable[[Any, Any], Any]:
    """Return the loss function of `network`, of outputs and targets."""
    return {"classes": _cross_entropy, "binary": _binary_cross_entropy, "values": _squares}[
        network.loss.targets
    ]


def _cross_entropy(z: Any, y: Any) -> Any:
    chosen = jnp.take_along_axis(jax.nn.log_softmax(z), y[:, None], axis=1)
    return -jnp.mean(chosen)


def _binary_cross_entropy(z: Any, y: Any) -> Any:
    return jnp.mean(jnp.maximum(z, 0.0) - z * y + jnp.log1p(jnp.exp(-jnp.abs(z))))


def _squares(z: Any, y: Any) -> Any:
    return jnp.mean((z - y) ** 2)


def _apply(node: Node, parameters: Arrays, inputs: list[Any], factors: Arrays) -> Any:
    layer, x = node.layer, inputs[0]
    if isinstance(layer, Add):
        return reduce(jnp.add, inputs)
    if isinstance(layer, ChannelSlice):
        return x[..., layer.start : layer.stop]
    if isinstance(layer, ChannelShuffle):
        groups = x.reshape(*x.shape[:3], layer.groups, -1)
        return groups.swapaxes(3, 4).reshape(x.shape)
    if isinstance(layer, Multiply):
        return inputs[0] * inputs[1]
    if isinstance(layer, Concatenate):
        return jnp.concatenate(inputs, axis=3)
    if isinstance(layer, Conv2d):
        y = lax.conv_general_dilated(
            x, parameters[f"{node.name}.weight"], layer.strides, layer.pads(node.input_shape),
            rhs_dilation=layer.dilations, dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=layer.groups,
        )  # fmt: skip
        return y + parameters[f"{node.name}.bias"] if layer.bias else y
    if isinstance(layer, Normalization):
        weight, bias = (parameters[f"{node.name}.{short}"] for short in ("weight", "bias"))
        return _normalize(layer, x) * weight + bias
    if isinstance(layer, Dense):
        return x @ parameters[f"{node.name}.weight"].T + parameters[f"{node.name}.bias"]
    if isinstance(layer, MaxPool2d | AveragePool2d | SumPool2d):
        return _pool(node, layer, x)
    if isinstance(layer, LocalResponseNorm):
        r = layer.radius
        squares = jnp.pad(x * x, ((0, 0), (0, 0), (0, 0), (r, r)))
        sums = sum(squares[..., i : i + x.shape[3]] for i in range(2 * r + 1))
        return x * (layer.bias + layer.alpha * sums) ** -layer.beta
    if isinstance(layer, Dropout | StochasticDepth):
        return x * factors[node.name] if node.name in factors else x
    if isinstance(layer, Flatten):
        return x.transpose(0, 3, 1, 2).reshape(x.shape[0], math.prod(node.output_shape))
    if isinstance(layer, Resampling):
        pairs = zip(layer.taps(node.input_shape), node.input_shape[1:], strict=True)
        rows, columns = (_matrix(taps, size) for taps, size in pairs)
        return jnp.einsum("ih,jw,nhwc->nijc", rows, columns, x)
    if isinstance(layer, GlobalMaxPool2d):
        return x.max((1, 2), keepdims=True)
    if isinstance(layer, GlobalAveragePool2d):
        return x.mean((1, 2), keepdims=True)
    if isinstance(layer, ReLU | Sigmoid | SiLU):
        return getattr(jax.nn, layer.kind)(x)
    if isinstance(layer, GELU):
        return jax.nn.gelu(x, approximate=False)
    assert isinstance(layer, Activation), layer.kind
    return _function(layer, x)


def _function(layer: Activation, x: Any) -> Any:
    """Evaluate the expression of a function."""
    computed = {variable("x"): x}
    own: dict[str, Any] = {
        "neg": jnp.negative, "+": jnp.add, "-": jnp.subtract, "*": jnp.multiply, "/": jnp.divide,
        "<": jnp.less, "<=": jnp.less_equal, ">": jnp.greater, ">=": jnp.greater_equal,
        "min": jnp.minimum, "max": jnp.maximum, "where": jnp.where, "erf": lax.erf,
        "sigmoid": jax.nn.sigmoid, "softplus": jax.nn.softplus,
        "normal_cdf": jax.scipy.stats.norm.cdf, "normal_pdf": jax.scipy.stats.norm.pdf,
    }  # fmt: skip
    for node in nodes(layer.formula.output()):
        if node.operator == CONSTANT:
            computed[node] = node.value
        elif node.operands:
            compute = own.get(node.operator) or getattr(jnp, node.operator)
            computed[node] = compute(*(computed[operand] for operand in node.operands))
    return computed[node]


def _matrix(taps: Taps, size: int) -> NDArray[np.float32]:
    """Return the weights of taps as a matrix (outputs, size)."""
    matrix = np.zeros((len(taps), size), np.float32)
    for position, read in enumerate(taps):
        for source, weight in read:
            matrix[position, source] += weight
    return matrix


def _normalize(layer: Normalization, x: Any) -> Any:
    """Return maps (N, H, W, C) or vectors (N, F) with mean 0 and variance 1 of the layer's sets."""
    shape = x.shape
    axes: tuple[int, ...] = (0, 1, 2)
    if isinstance(layer, LayerNorm):
        axes = (-1,)
    elif isinstance(layer, GroupNorm):
        x = x.reshape(*shape[:3], layer.groups, shape[3] // layer.groups)
        axes = (1, 2, 4)
    mean = x.mean(axes, keepdims=True)
    variance = jnp.square(x - mean).mean(axes, keepdims=True)
    return ((x - mean) * lax.rsqrt(variance + layer.epsilon)).reshape(shape)


def _pool(node: Node, layer: MaxPool2d | AveragePool2d | SumPool2d, x: Any) -> Any:
    window, strides = (1, *layer.windows, 1), (1, *layer.strides, 1)
    pads = ((0, 0), *layer.pads(node.input_shape), (0, 0))
    if isinstance(layer, MaxPool2d):
        return _max_pool(node, layer, x)
    sums = lax.reduce_window(x, 0.0, lax.add, window, strides, pads)
    if isinstance(layer, SumPool2d):
        return sums
    if isinstance(layer, AveragePool2d) and layer.count_padding:
        return sums / math.prod(layer.windows)
    ones = jnp.ones((1, *x.shape[1:3], 1), x.dtype)
    return sums / lax.reduce_window(ones, 0.0, lax.add, window, strides, pads)


def _max_pool(node: Node, layer: MaxPool2d, x: Any) -> Any:
    """Return the maximum of strided slices.

    The gradient of `lax.reduce_window` takes 5 to 20 times as long on a CPU (JAX 0.10).
    """
    x = jnp.pad(x, ((0, 0), *layer.pads(node.input_shape), (0, 0)), constant_values=-jnp.inf)
    _, height, width = node.output_shape
    (r, s), (vertical, horizontal) = layer.windows, layer.strides
    slices = (
        x[:, i : i + (height - 1) * vertical + 1 : vertical,
          j : j + (width - 1) * horizontal + 1 : horizontal]
        for i in range(r) for j in range(s)
    )  # fmt: skip
    return reduce(jnp.maximum, slices)


def _to_jax(value: NDArray[Any]) -> NDArray[Any]:
    return value.transpose(2, 3, 1, 0) if value.ndim == 4 else value


def _channels_last(x: NDArray[Any]) -> NDArray[Any]:
    return x.transpose(0, 2, 3, 1) if x.ndim == 4 else x


def _channels_last_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[1:], shape[0]) if len(shape) == 3 else shape
