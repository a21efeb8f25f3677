"""Networks that put one layer, or a few, at odd shapes, and the numbers that go through them.

`dx` of a layer is no output of a replica, so each network starts with a layer that makes it one:
a 1×1 convolution (or a dense layer) on a one-hot input. Pixel p of the batch has channel p set
and nothing else, so what the convolution gives is its weight, y[k, p] = w[k, p], and the gradient
of its weight is the gradient by its output, dw[k, p] = dy[k, p]: exactly the input and the `dx`
of the layer behind it. The mean squared error at the end gives every output a gradient of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dptrain.backends import BACKENDS, load_backend
from dptrain.network import (
    ACTIVATIONS,
    GELU,
    AveragePool2d,
    BatchNorm2d,
    ChannelShuffle,
    ChannelSlice,
    Conv2d,
    Crop2d,
    Dense,
    Dilate2d,
    Dropout,
    Flatten,
    GlobalAveragePool2d,
    GlobalMaxPool2d,
    GroupNorm,
    Layer,
    LayerNorm,
    LeakyReLU,
    LocalResponseNorm,
    Loss,
    MaxPool2d,
    MeanSquaredError,
    Multiply,
    Network,
    Pad2d,
    ReLU,
    Reshape,
    Resize2d,
    Shape,
    Sigmoid,
    SigmoidBinaryCrossEntropy,
    SiLU,
    SoftmaxCrossEntropy,
    SoftmaxSquaredError,
    StochasticDepth,
    SumPool2d,
    transposed_convolution,
)
from dptrain.network.activations import ELU, Clip, Tanh
from dptrain.network.elementwise import Activation

FEATURES: dict[type[Layer], str] = {
    layer: layer.kind
    for layer in (
        *ACTIVATIONS.values(), GlobalAveragePool2d, GlobalMaxPool2d, StochasticDepth,
        BatchNorm2d, GroupNorm, LayerNorm, Multiply, Pad2d, Resize2d, Crop2d, Dilate2d,
        ChannelSlice, ChannelShuffle, Reshape,
    )
    if layer not in (ReLU, Sigmoid)
}  # fmt: skip
"""Layers that cases require as features, with the names in `IMPLEMENTED`."""

EVERYTHING = frozenset(FEATURES.values()) | {
    "groups",
    "no bias",
    "floor",
    "dilation",
    "pool padding",
    "graph",
}
IMPLEMENTED = dict.fromkeys(("reference", "numba", "cuda", "cudnn"), EVERYTHING)
"""The features of cases with which each backend is tested: kinds of layers in `FEATURES`, and

- "groups", "no bias": convolutions with them;
- "floor": convolutions whose windows do not end at the last row and column;
- "dilation": convolutions whose kernels read pixels at a distance;
- "pool padding": pooling with a number as padding;
- "graph": networks that are no chains.

A backend that does not compute a feature yet has ``EVERYTHING - {name}``."""


@dataclass(frozen=True)
class Case:
    """A network, a batch size and the seed of its numbers."""

    name: str
    network: Network
    batch_size: int

    @cached_property
    def features(self) -> frozenset[str]:
        """What a backend must implement for this case, see `IMPLEMENTED`."""
        found = {FEATURES[type(layer)] for layer in self.network.layers if type(layer) in FEATURES}
        for layer in self.network.layers:
            if isinstance(layer, Conv2d):
                conditions = {
                    "groups": layer.groups > 1,
                    "no bias": not layer.bias,
                    "floor": layer.rounding == "floor",
                    "dilation": layer.dilations != (1, 1),
                }
                found |= {name for name, holds in conditions.items() if holds}
            elif isinstance(layer, MaxPool2d | AveragePool2d | SumPool2d):
                found |= {"pool padding"} if isinstance(layer.padding, int) else set()
        return frozenset(found if self.network.is_chain else {*found, "graph"})

    def is_implemented(self, backend: str) -> bool:
        """True if `backend` computes every layer of the case."""
        return self.features <= IMPLEMENTED[backend]

    def data(self) -> tuple[NDArray[np.float64], NDArray[np.generic]]:
        """Inputs, one-hot over the pixels of the batch, and targets."""
        n, shape = self.batch_size, self.network.input_shape
        x = np.eye(shape[0])
        if len(shape) == 3:
            x = x.reshape(n, *shape[1:], shape[0]).transpose(0, 3, 1, 2)
        rng = np.random.default_rng(7)
        outputs = (n, self.network.num_outputs)
        kind = self.network.loss.targets
        if kind == "classes":
            return x, rng.integers(0, outputs[1], n)
        return x, rng.integers(0, 2, outputs) if kind == "binary" else 2.0 * spread(rng, outputs)

    def parameters(self) -> dict[str, NDArray[np.float64]]:
        """Weights whose values are spread out, so that no maximum and no sign is undecided.

        Behind the first layer they shrink with the number of inputs: magnitudes then neither grow
        nor vanish from layer to layer, and rounding bounds stay narrow in a stack.
        """
        rng = np.random.default_rng(11)
        first, *rest = (node for node in self.network.nodes if node.parameters)
        weight, bias = first.parameters
        values = {weight.name: spread(rng, weight.shape), bias.name: np.zeros(bias.shape)}
        for parameter in (p for node in rest for p in node.parameters):
            values[parameter.name] = 3.0 * spread(rng, parameter.shape) / parameter.fan_in
        return values


def variants(*features: str) -> list[tuple[str, str]]:
    """Backends that compute something, with each of their precisions, if they have `features`."""
    present = [name for name in BACKENDS if name != "null" and IMPLEMENTED[name] >= set(features)]
    return [(name, precision) for name in present for precision in load_backend(name).precisions]


def spread(rng: np.random.Generator, shape: Shape) -> NDArray[np.float64]:
    """Distinct numbers in (−1, 1), each at least 0.3/size from zero and 2/size from the others."""
    size = math.prod(shape)
    return rng.permutation((2.0 * np.arange(size) + 1.0) / size - 1.0 + 0.3 / size).reshape(shape)


def behind_maps(
    name: str,
    shape: tuple[int, int, int, int],
    layers: Sequence[Layer],
    loss: Loss = MeanSquaredError(),  # noqa: B008
) -> Case:
    """`layers` with an input of shape (N, C, H, W)."""
    n, channels, height, width = shape
    last = () if isinstance(layers[-1], Dense) else (Flatten(),)
    stack = [Conv2d(channels, 1), *layers, *last]
    return Case(name, Network((n * height * width, height, width), stack, loss, name), n)


def behind_vector(
    name: str,
    shape: tuple[int, int],
    layers: Sequence[Layer],
    loss: Loss = MeanSquaredError(),  # noqa: B008
) -> Case:
    """`layers` with an input of shape (N, F)."""
    n, width = shape
    return Case(name, Network((n,), [Dense(width), *layers], loss, name), n)


def _convolutions() -> list[Case]:
    same, valid, full = "same", "valid", "full"
    depthwise = Conv2d(5, 3, stride=2, padding=1, groups=5, bias=False, rounding="floor")
    conv7 = Conv2d(5, 7, stride=2, padding=3, rounding="floor")
    uneven = Conv2d(3, (3, 2), stride=(3, 2), padding=valid, rounding="floor")
    uneven_groups = Conv2d(4, (3, 2), stride=(2, 3), padding=valid, groups=4)
    dilated = Conv2d(6, 3, stride=2, dilation=(4, 6))
    table = [
        ("one of everything", (1, 1, 1, 1), Conv2d(1, 1)),
        ("one pixel, 3x3 around it", (2, 3, 1, 1), Conv2d(4, 3, padding=same)),
        ("primes", (2, 3, 7, 11), Conv2d(5, 3, padding=same)),
        ("one sample, one channel", (1, 1, 5, 7), Conv2d(3, 3, padding=valid)),
        ("one filter", (3, 2, 5, 5), Conv2d(1, 3, padding=1)),
        ("even kernel", (2, 2, 5, 7), Conv2d(3, 2, padding=same)),
        ("wide kernel", (2, 3, 5, 11), Conv2d(2, (1, 5), padding=valid)),
        ("tall kernel, full", (1, 2, 5, 3), Conv2d(3, (3, 2), padding=full)),
        ("full", (2, 3, 3, 5), Conv2d(2, 3, padding=full)),
        ("two zeros on every side", (1, 3, 5, 5), Conv2d(3, 3, padding=2)),
        ("more zeros than kernel", (1, 2, 2, 3), Conv2d(2, 2, padding=3)),
        ("kernel as large as the map", (2, 3, 5, 3), Conv2d(7, (5, 3), padding=valid)),
        ("kernel larger than the map", (1, 2, 3, 2), Conv2d(2, 5, padding=same)),
        ("5x5 as in cifar", (1, 3, 7, 7), Conv2d(5, 5, padding=same)),
        ("stride 2", (2, 3, 7, 5), Conv2d(4, 3, stride=2, padding=valid)),
        ("stride 3", (1, 2, 10, 7), Conv2d(3, 4, stride=3, padding=valid)),
        ("stride 2, one zero", (1, 2, 7, 9), Conv2d(3, 3, stride=2, padding=1)),
        ("stride 2, full", (1, 2, 5, 7), Conv2d(2, 3, stride=2, padding=full)),
        ("stride 2, same, odd", (1, 2, 7, 5), Conv2d(3, 3, stride=2, padding=same)),
        ("stride 2, same, even: one zero", (2, 2, 6, 8), Conv2d(3, 3, stride=2, padding=same)),
        ("stride 3, same", (1, 3, 8, 7), Conv2d(2, 3, stride=3, padding=same)),
        ("stride 2 and 3", (1, 2, 7, 8), Conv2d(3, (3, 2), stride=(2, 3), padding=valid)),
        ("stride larger than kernel", (2, 2, 5, 7), Conv2d(3, 1, stride=2, padding=same)),
        ("stride larger than kernel, gaps", (1, 2, 8, 8), Conv2d(3, 2, stride=3, padding=valid)),
        ("many filters", (1, 3, 5, 5), Conv2d(37, 3, padding=same)),
        ("many channels", (1, 37, 3, 3), Conv2d(5, 3, padding=same)),
        ("powers of two", (2, 16, 8, 8), Conv2d(32, 3, padding=same)),
        ("no bias", (2, 3, 5, 7), Conv2d(5, 3, bias=False)),
        ("no bias, 1x1, stride 2", (2, 3, 5, 7), Conv2d(4, 1, stride=2, bias=False)),
        ("1x1, many channels", (2, 37, 3, 5), Conv2d(19, 1)),
        ("two groups", (2, 6, 5, 7), Conv2d(4, 3, groups=2)),
        ("groups, stride 2", (1, 9, 7, 6), Conv2d(6, (3, 2), stride=2, padding="same", groups=3)),
        ("groups, no bias", (3, 4, 5, 3), Conv2d(10, 1, groups=2, bias=False)),
        ("groups, stride 2 and 3", (1, 4, 7, 8), replace(uneven_groups, groups=2)),
        ("depthwise, stride 2 and 3", (2, 4, 7, 8), uneven_groups),
        ("depthwise", (2, 7, 5, 6), Conv2d(7, 3, groups=7)),
        ("depthwise, stride 2, no bias", (2, 5, 6, 8), depthwise),
        ("depthwise, two filters a channel", (1, 3, 5, 5), Conv2d(6, 5, padding=2, groups=3)),
        ("depthwise, 32 channels", (2, 32, 5, 3), Conv2d(32, 3, groups=32)),
        ("7x7 stride 2, last row left out", (2, 3, 10, 12), conv7),
        ("stride 2, one zero, floor", (2, 3, 6, 8), Conv2d(4, 3, 2, padding=1, rounding="floor")),
        ("1x1, stride 2, floor", (1, 4, 6, 4), Conv2d(3, 1, 2, padding=0, rounding="floor")),
        ("stride 3 and 2, floor", (1, 2, 9, 8), uneven),
        ("dilation 2", (2, 3, 7, 9), Conv2d(5, 3, dilation=2)),
        ("dilation 2, 32 channels and filters", (1, 32, 5, 6), Conv2d(32, 3, dilation=2)),
        ("dilation 1 and 3, wide kernel", (1, 2, 4, 11), Conv2d(3, (1, 4), 1, 2, dilation=(5, 3))),
        ("dilation 4, full", (2, 2, 3, 4), Conv2d(3, (3, 2), padding=full, dilation=4)),
        ("dilation 3, stride 2", (2, 3, 9, 8), Conv2d(4, 3, stride=2, dilation=3)),
        ("dilation 2, stride 2", (1, 4, 9, 8), replace(dilated, dilation=2)),
        ("dilation 4 and 6, stride 6 and 4", (1, 2, 14, 17), replace(dilated, stride=(6, 4))),
        ("two groups, dilation 2 and 3", (2, 4, 7, 9), Conv2d(6, 3, groups=2, dilation=(2, 3))),
        (
            "depthwise, dilation 4 and 6",
            (2, 4, 7, 9),
            replace(dilated, filters=4, stride=1, groups=4),
        ),
        ("depthwise, dilation 3, stride 2", (1, 3, 7, 5), Conv2d(3, 3, 2, groups=3, dilation=3)),
    ]
    return [behind_maps(f"conv: {name}", shape, [layer]) for name, shape, layer in table]


def _poolings() -> list[Case]:
    table = [
        ("one pixel", (1, 1, 1, 1), {"window": 1}),
        ("2/2", (2, 3, 6, 4), {"window": 2}),
        ("2/2, last row and column left out", (2, 3, 7, 5), {"window": 2}),
        ("2/2, same, odd", (1, 3, 7, 5), {"window": 2, "padding": "same"}),
        ("3/2, overlapping", (2, 2, 7, 9), {"window": 3, "stride": 2}),
        ("3/2, same, odd", (1, 3, 7, 5), {"window": 3, "stride": 2, "padding": "same"}),
        ("3/2, same, even", (2, 2, 6, 8), {"window": 3, "stride": 2, "padding": "same"}),
        ("3/1, nine windows a pixel", (1, 2, 5, 5), {"window": 3, "stride": 1}),
        ("3/1, same, one pixel", (2, 1, 1, 1), {"window": 3, "stride": 1, "padding": "same"}),
        ("2x3/1x2", (1, 3, 5, 7), {"window": (2, 3), "stride": (1, 2)}),
        ("2/3, gaps", (1, 2, 8, 8), {"window": 2, "stride": 3}),
        ("3x2/2x3, same", (1, 2, 7, 8), {"window": (3, 2), "stride": (2, 3), "padding": "same"}),
        ("whole map", (3, 5, 3, 7), {"window": (3, 7)}),
        ("many channels", (1, 37, 5, 5), {"window": 3, "stride": 2, "padding": "same"}),
        ("3/2, one around, odd", (2, 3, 7, 5), {"window": 3, "stride": 2, "padding": 1}),
        ("3/2, one around, even", (2, 2, 6, 8), {"window": 3, "stride": 2, "padding": 1}),
        ("4x5/2, two around", (1, 3, 7, 6), {"window": (4, 5), "stride": 2, "padding": 2}),
        ("5/1, same", (2, 2, 6, 7), {"window": 5, "stride": 1, "padding": "same"}),
    ]
    up = {"rounding": "ceil"}
    table += [
        ("3/2, rounded up", (2, 3, 6, 8), {"window": 3, "stride": 2, **up}),
        ("2x3/2, rounded up, one more column", (1, 4, 6, 8), {"window": (2, 3), "stride": 2, **up}),
        ("3/2, one around, rounded up", (1, 2, 6, 7),
         {"window": 3, "stride": 2, "padding": 1, **up}),
        ("2/3, one around, no window in the padding", (1, 2, 5, 6),
         {"window": 2, "stride": 3, "padding": 1, **up}),
        ("5/3, larger than the map", (2, 2, 4, 5), {"window": 5, "stride": 3, **up}),
    ]  # fmt: skip
    counted = [
        ("3/1, one around, counted", (2, 4, 5, 3), {"window": 3, "stride": 1, "padding": 1}),
        ("3x2/2, same, counted", (1, 3, 7, 6), {"window": (3, 2), "stride": 2, "padding": "same"}),
    ]
    return [
        behind_maps(f"{kind.kind}: {name}", shape, [kind(**options)])
        for kind in (MaxPool2d, AveragePool2d, SumPool2d)
        for name, shape, options in table
    ] + [
        behind_maps(f"avgpool: {name}", shape, [AveragePool2d(**options, count_padding=True)])
        for name, shape, options in counted
    ]


FUNCTIONS = (
    ReLU(), LeakyReLU(), LeakyReLU(0.3), Sigmoid(), Tanh(), GELU(), SiLU(), Clip(0.0, 2.0),
    Clip(-2.0, 0.9), ELU(0.6),
)  # fmt: skip
"""Functions with cases of their own; `graph_cases` has one with all functions. No number of a case
is so near to a kink that it is rounded across."""


def _elementwise() -> list[Case]:
    lrn = [
        ("as in cifar", (2, 11, 3, 2), LocalResponseNorm()),
        ("strong", (2, 7, 2, 3), LocalResponseNorm(2, bias=2.0, alpha=0.5, beta=0.6)),
        ("radius 0", (1, 3, 2, 2), LocalResponseNorm(0, alpha=0.5)),
        ("radius beyond the channels", (1, 3, 2, 2), LocalResponseNorm(5, alpha=0.3, beta=2.0)),
        ("one pixel, one channel", (1, 1, 1, 1), LocalResponseNorm(1, alpha=0.7)),
        ("64 channels", (1, 64, 2, 3), LocalResponseNorm(4, alpha=0.1)),
    ]
    cases = [behind_maps(f"lrn: {name}", shape, [layer]) for name, shape, layer in lrn]
    for layer in (Dropout(0.3), StochasticDepth(0.4), *FUNCTIONS):
        values = "".join(f" {value}" for value in vars(layer).values())
        name = f"{layer.kind}{values}" if isinstance(layer, Activation) else layer.kind
        cases += [
            behind_maps(f"{name}: maps", (2, 3, 5, 7), [layer]),
            # Behind a sigmoid, which no backend fuses with it, the layer stands alone.
            behind_maps(f"{name}: alone", (1, 5, 3, 2), [Sigmoid(), layer, Sigmoid()]),
        ]
    # The shape makes no difference to the functions that no backend fuses.
    for layer in (ReLU(), Dropout(0.3), StochasticDepth(0.4), GELU()):
        cases += [
            behind_maps(f"{layer.kind}: one pixel", (1, 1, 1, 1), [layer]),
            behind_vector(f"{layer.kind}: vector", (3, 13), [layer]),
        ]
    return cases


def _normalizations() -> list[Case]:
    table = [
        ("primes", (2, 3, 5, 7), BatchNorm2d()),
        ("one sample", (1, 3, 5, 2), BatchNorm2d()),
        ("one pixel", (5, 7, 1, 1), BatchNorm2d(epsilon=0.1)),
        ("one channel", (3, 1, 3, 5), BatchNorm2d(epsilon=0.01)),
        ("64 channels", (3, 64, 2, 3), BatchNorm2d()),
        ("37 channels", (2, 37, 3, 3), BatchNorm2d()),
        ("groups of two", (2, 6, 3, 5), GroupNorm(groups=3)),
        ("groups of one: instance norm", (2, 3, 5, 7), GroupNorm(groups=3, epsilon=0.02)),
        ("one group", (3, 5, 3, 2), GroupNorm(groups=1)),
        ("groups of 37", (1, 74, 3, 1), GroupNorm(groups=2)),
        ("one pixel", (3, 8, 1, 1), GroupNorm(groups=2)),
        ("32 groups", (2, 64, 3, 3), GroupNorm()),
        ("primes", (2, 5, 3, 7), LayerNorm()),
        ("two channels", (1, 2, 5, 3), LayerNorm(epsilon=0.1)),
        ("one pixel", (3, 11, 1, 1), LayerNorm()),
        ("64 channels", (2, 64, 3, 2), LayerNorm(epsilon=0.01)),
    ]
    vectors = [((3, 13), LayerNorm()), ((1, 64), LayerNorm(epsilon=0.1)), ((4, 37), LayerNorm())]
    flattened = [Flatten(), LayerNorm(), Dense(7)]
    return [
        *(behind_maps(f"{layer.kind}: {name}", shape, [layer]) for name, shape, layer in table),
        *(behind_vector(f"layernorm: {width} elements", (n, width), [layer])
          for (n, width), layer in vectors),
        behind_maps("layernorm: flattened maps", (2, 3, 5, 2), flattened),
        behind_maps("layernorm: flattened maps last", (2, 4, 3, 2), flattened[:2]),
    ]  # fmt: skip


def _global_pooling() -> list[Case]:
    shapes = {"one pixel": (2, 3, 1, 1), "primes": (2, 5, 3, 7), "64 channels": (3, 64, 2, 2)}
    return [
        behind_maps(f"{layer.kind}: {name}", shape, [layer])
        for layer in (GlobalAveragePool2d(), GlobalMaxPool2d())
        for name, shape in {**shapes, "600 pixels": (1, 2, 24, 25)}.items()
    ]


def _channels() -> list[Case]:
    table: list[tuple[str, tuple[int, int, int, int], Layer]] = [
        ("first of primes", (2, 7, 3, 5), ChannelSlice(0, 3)),
        ("last of primes", (2, 7, 3, 5), ChannelSlice(5, 7)),
        ("all", (1, 3, 2, 2), ChannelSlice(0, 3)),
        ("vectors", (2, 24, 2, 3), ChannelSlice(8, 16)),
        ("from 8 to 15", (1, 16, 3, 2), ChannelSlice(8, 15)),
        ("one channel", (3, 1, 1, 2), ChannelShuffle(1)),
        ("2 groups of 4", (2, 8, 3, 5), ChannelShuffle(2)),
        ("3 groups of 5", (1, 15, 2, 3), ChannelShuffle(3)),
        ("16 groups of 2", (2, 32, 2, 2), ChannelShuffle(16)),
    ]
    turned: dict[str, tuple[int, tuple[Layer, ...]]] = {
        str(count): (count, (Reshape((1, 1, count)), Conv2d(1, (1, 3)), Reshape((count, 1, 1))))
        for count in (1, 7, 16)
    }
    turned["columns"] = 9, (Reshape((1, 9, 1)), Conv2d(2, (2, 1)), ReLU())
    return [
        *(behind_maps(f"{layer.kind}: {name}", shape, [layer]) for name, shape, layer in table),
        *(
            behind_maps(f"reshape: {name}", (3, count, 4, 2), [GlobalAveragePool2d(), *layers])
            for name, (count, layers) in turned.items()
        ),
    ]


def _resampling() -> list[Case]:
    table = [
        ("one zero", (2, 3, 4, 5), Pad2d()),
        ("zeros at two sides", (1, 8, 3, 2), Pad2d((2, 0, 0, 3))),
        ("nothing", (2, 3, 2, 2), Pad2d(0)),
        ("reflected", (2, 3, 4, 5), Pad2d((3, 2, 1, 4), mode="reflect")),
        ("reflected, 8 channels", (1, 8, 3, 3), Pad2d(2, mode="reflect")),
        ("replicated", (2, 3, 4, 2), Pad2d((1, 4, 3, 0), mode="replicate")),
        ("replicated, one pixel", (3, 5, 1, 1), Pad2d(2, mode="replicate")),
        ("inside", (2, 3, 5, 6), Crop2d((1, 0), (4, 5))),
        ("every second", (1, 8, 5, 6), Crop2d((0, 1), (5, 6), (2, 2))),
        ("one pixel", (2, 1, 3, 4), Crop2d((2, 3), (3, 4), (1, 3))),
        ("two", (2, 3, 4, 3), Dilate2d()),
        ("one and three, 8 channels", (1, 8, 2, 3), Dilate2d((1, 3))),
        ("twice", (2, 3, 4, 5), Resize2d()),
        ("2.5 and 1.5 times", (1, 8, 4, 5), Resize2d((2.5, 1.5))),
        ("half", (2, 3, 4, 7), Resize2d(0.5)),
        ("nearest of a size", (2, 3, 4, 5), Resize2d(size=(7, 3))),
        ("bilinear, twice", (2, 3, 4, 5), Resize2d(2, mode="bilinear")),
        ("bilinear, 2.5 and 0.5 times", (1, 8, 4, 5), Resize2d((2.5, 0.5), mode="bilinear")),
        ("bilinear of a size", (2, 3, 5, 4), Resize2d(size=(3, 9), mode="bilinear")),
        ("bilinear of one pixel", (2, 5, 1, 1), Resize2d(size=3, mode="bilinear")),
        ("corners", (1, 3, 4, 5), Resize2d(size=(7, 3), mode="bilinear", align_corners=True)),
        ("corners of one pixel", (1, 3, 4, 5),
         Resize2d(size=1, mode="bilinear", align_corners=True)),
    ]  # fmt: skip
    up = transposed_convolution(6, 3, (2, 3), (1, 0, 1, 1), groups=2)
    dilated = transposed_convolution(6, (3, 2), 2, (1, 3, 0, 2), groups=2, dilation=(2, 3))
    depthwise = transposed_convolution(4, 3, (1, 2), (1, 1, 1, 1), groups=4, dilation=2)
    return [
        *(behind_maps(f"{layer.kind}: {name}", shape, [layer]) for name, shape, layer in table),
        behind_maps("stack: a transposed convolution", (2, 4, 3, 2), up),
        behind_maps("stack: a dilated transposed convolution", (2, 4, 3, 2), dilated),
        behind_maps("stack: a dilated depthwise transposed one", (1, 4, 2, 4), depthwise),
    ]


def _dense() -> list[Case]:
    table = [
        ("one by one", (1, 1), 1),
        ("primes", (5, 13), 11),
        ("one sample", (1, 37), 3),
        ("one input", (7, 1), 5),
        ("one output", (3, 17), 1),
        ("powers of two", (8, 64), 32),
    ]
    cases = [behind_vector(f"dense: {name}", shape, [Dense(k)]) for name, shape, k in table]
    maps = [Flatten(), Dense(7)]
    return [*cases, behind_maps("dense: on flattened maps", (2, 3, 5, 2), maps)]


def _losses() -> list[Case]:
    cases = []
    for loss, widths in (
        (SoftmaxCrossEntropy(), (2, 11)),
        (SoftmaxSquaredError(), (2, 11)),
        (SigmoidBinaryCrossEntropy(), (1, 3)),
        (MeanSquaredError(), (1, 5)),
    ):
        for n in (1, 7):
            for width in widths:
                name = f"{loss.kind}: {n} of {width}"
                cases.append(behind_vector(name, (n, width), [Dense(width)], loss))
        cases.append(behind_maps(f"{loss.kind}: on maps", (2, 3, 2, 2), [ReLU()], loss))
    return cases


def _stacks() -> list[Case]:
    """Layers in a row, as networks have them and as backends fuse them."""
    conv, pool = Conv2d(5, 3), MaxPool2d(2)
    bare = Conv2d(5, 3, bias=False)
    # A large ε, because errors grow with 1 / standard deviation, and bounds with them.
    norm = BatchNorm2d(epsilon=0.5)
    overlap = MaxPool2d(3, 2, padding="same")
    lrn = LocalResponseNorm(2, alpha=0.2)
    softmax = SoftmaxCrossEntropy()
    shape = (2, 3, 8, 6)
    return [
        behind_maps("stack: conv relu", shape, [conv, ReLU()]),
        behind_maps("stack: conv relu pool", shape, [conv, ReLU(), pool]),
        behind_maps("stack: conv relu pool, odd", (1, 2, 7, 5), [conv, ReLU(), pool]),
        behind_maps("stack: conv relu overlapping pool", shape, [conv, ReLU(), overlap]),
        behind_maps("stack: conv pool relu", shape, [conv, pool, ReLU()]),
        behind_maps("stack: conv sigmoid pool", shape, [conv, Sigmoid(), pool]),
        behind_maps("stack: conv relu lrn", shape, [conv, ReLU(), lrn]),
        behind_maps("stack: conv relu lrn pool", shape, [conv, ReLU(), lrn, overlap]),
        behind_maps(
            "stack: conv relu overlapping pool dropout",
            shape,
            [conv, ReLU(), overlap, Dropout(0.4)],
        ),
        behind_maps("stack: conv relu average pool", shape, [conv, ReLU(), AveragePool2d(2)]),
        behind_maps("stack: conv conv", shape, [conv, Conv2d(2, 2, padding="full")]),
        behind_maps("stack: relu relu", shape, [ReLU(), ReLU()]),
        behind_maps("stack: conv dropout", shape, [conv, ReLU(), Dropout(0.25)]),
        behind_vector("stack: dense relu dense", (5, 7), [Dense(11), ReLU(), Dense(3)], softmax),
        behind_vector("stack: dense sigmoid", (5, 7), [Dense(11), Sigmoid(), Dense(3)]),
        behind_vector("stack: dense relu dropout", (3, 7), [Dense(9), ReLU(), Dropout(0.5)]),
        behind_maps("stack: conv groupnorm relu", shape, [conv, GroupNorm(groups=1), ReLU()]),
        behind_maps("stack: conv layernorm gelu", shape, [conv, LayerNorm(epsilon=0.5), GELU()]),
        behind_maps("stack: conv leaky_relu pool", shape, [conv, LeakyReLU(0.1), pool]),
        behind_maps(
            "stack: conv silu global pool dense",
            shape,
            [conv, SiLU(), GlobalAveragePool2d(), Flatten(), Dense(3)],
            softmax,
        ),
        behind_maps(
            "stack: relu pool with padding",
            shape,
            [ReLU(), MaxPool2d(3, 2, padding=1), GlobalAveragePool2d()],
        ),
        behind_maps("stack: conv batchnorm", shape, [bare, norm]),
        behind_maps("stack: conv batchnorm relu", shape, [bare, norm, ReLU()]),
        behind_maps("stack: conv batchnorm relu pool", shape, [bare, norm, ReLU(), pool]),
        behind_maps("stack: batchnorm relu conv", shape, [norm, ReLU(), bare]),
        behind_maps(
            "stack: as in mobilenet",
            (2, 6, 8, 6),
            [
                Conv2d(6, 3, stride=2, padding=1, groups=6, bias=False, rounding="floor"),
                norm,
                ReLU(),
                Conv2d(5, 1, bias=False),
            ],
        ),
        behind_maps(
            "stack: as in model0",
            (2, 1, 8, 6),
            [Conv2d(3), ReLU(), pool, Conv2d(2), ReLU(), pool, Flatten(), Dense(5), ReLU()],
            softmax,
        ),
    ]


CASES = (
    *_convolutions(), *_poolings(), *_elementwise(), *_normalizations(), *_global_pooling(),
    *_channels(), *_resampling(), *_dense(), *_losses(), *_stacks(),
)  # fmt: skip
