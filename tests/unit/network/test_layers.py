"""Layers as descriptions: shapes, names, starts, and every refusal with its message."""

from __future__ import annotations

import math
import re
import tracemalloc
import zlib
from collections.abc import Callable

import numpy as np
import pytest

from dptrain.errors import UserError
from dptrain.network import (
    LAYERS,
    Affine,
    AveragePool2d,
    ChannelShuffle,
    ChannelSlice,
    Constant,
    Conv2d,
    Crop2d,
    Dense,
    Dilate2d,
    Dropout,
    Flatten,
    LocalResponseNorm,
    MaxPool2d,
    MeanSquaredError,
    Network,
    Normal,
    Pad2d,
    ReLU,
    Reshape,
    Resize2d,
    Sigmoid,
    SigmoidBinaryCrossEntropy,
    StochasticDepth,
    SumPool2d,
    Uniform,
    initial_parameters,
    transposed_convolution,
)
from dptrain.network.initial import BLOCK, draw
from dptrain.network.layers import PaddingName

REFUSALS: list[tuple[Callable[[], object], str]] = [
    (lambda: Conv2d(0), "conv filters is 0; expected a whole number from 1 to 2,147,483,647"),
    (lambda: Conv2d(True), "conv filters is True; expected a whole number"),
    (
        lambda: Conv2d(2, 0),
        "conv kernel or stride is 0; expected a whole number from 1 to 2,147,483,647",
    ),
    (lambda: Conv2d(2**31), "conv filters is 2147483648; expected a whole number from 1 to"),
    (lambda: Dense(10**5000), "dense units is a int with a number of thousands of digits"),
    (lambda: Conv2d(2, padding=10**10), "conv padding is 10000000000; expected a whole number"),
    (lambda: Dense(2, weight_decay=-0.1), "dense weight_decay is -0.1; expected a finite number"),
    (lambda: Normal(math.nan), "standard deviation is nan; expected a finite number"),
    (lambda: Constant(math.inf), "constant is inf; expected a finite number"),
    (lambda: LocalResponseNorm(alpha=math.nan), "lrn alpha is nan; expected a finite number"),
    (lambda: Network((10**10,), [ReLU()]), "numbers from 1 to 2,147,483,647"),
    (lambda: Conv2d(2, (3, -1)), "conv kernel or stride is -1"),
    (lambda: ChannelSlice(3, 3), "slice stop is 3; expected a whole number from 4 to"),
    (lambda: ChannelSlice(-1, 3), "slice start is -1; expected a whole number from 0 to"),
    (
        lambda: ChannelSlice(1, 5).output_shape((4, 2, 2)),
        "slice stop is 5; expected at most 4 channels",
    ),
    (lambda: Crop2d((1, 1), (1, 2)), "crop stop is 1; expected a whole number from 2"),
    (lambda: Crop2d((0, 0), (1, 1), (0, 1)), "crop step is 0; expected a whole number from 1"),
    (lambda: Crop2d((0, 0), (4, 1)).output_shape((1, 3, 3)), "crop stop is 4; expected at most 3"),
    (lambda: Affine(math.nan), "affine scale is nan; expected a finite number"),
    (lambda: Reshape((2, 1, 4)), "reshape shape is (2, 1, 4); expected one size above 1 at most"),
    (lambda: Reshape((0, 1, 1)), "reshape size is 0; expected a whole number from 1 to"),
    (
        lambda: Reshape((1, 1, 8)).output_shape((2, 1, 4)),
        "reshape makes (1, 1, 8) of (2, 1, 4); expected as many elements, on one axis alone",
    ),
    (lambda: ChannelShuffle(0), "shuffle groups is 0; expected a whole number from 1 to"),
    (
        lambda: ChannelShuffle(2).output_shape((3, 2, 2)),
        "shuffle has 2 groups, but its input has 3 channels; expected a divisor",
    ),
    (lambda: Pad2d((1, 2, 3)), "pad padding is (1, 2, 3); expected a whole number or"),
    (lambda: Pad2d(-1), "pad padding is -1; expected a whole number from 0"),
    (lambda: Pad2d(mode="wrap"), "pad mode is 'wrap'; expected zeros or reflect or replicate"),
    (
        lambda: Pad2d(3, mode="reflect").output_shape((1, 5, 3)),
        "pad reflects 3 positions of an axis with 3; expected at most 2",
    ),
    (lambda: Resize2d(0.0), "resize scale is 0.0; expected a number above 0"),
    (lambda: Resize2d(mode="cubic"), "resize mode is 'cubic'; expected nearest or bilinear"),
    (lambda: Resize2d(align_corners=True), "resize aligns corners; expected the mode bilinear"),
    (lambda: Resize2d(0.3).output_shape((1, 3, 3)), "resize makes 0 of 3 rows or columns"),
    (
        lambda: Resize2d(2.1).output_shape((1, 4, 4)),
        "makes 8 of 4 rows or columns without a definite",
    ),
    (lambda: Resize2d(1.1, mode="bilinear").output_shape((1, 4, 4)), "use the scale 1, or a size"),
    (lambda: transposed_convolution(2, (3,)), "conv kernel is (3,); expected a whole number"),
    (lambda: transposed_convolution(2, padding=(1, 1)), "is (1, 1); expected four whole numbers"),
    (lambda: Resize2d(size=0), "resize size is 0; expected a whole number from 1"),
    (lambda: Dilate2d(0), "dilate factor is 0; expected a whole number from 1"),
    (
        lambda: transposed_convolution(2, 3, padding=(3, 0, 0, 0)),
        "the padding of a transposed convolution is (3, 0, 0, 0); expected at most",
    ),
    (lambda: StochasticDepth(1.0), "stochastic_depth rate is 1.0; expected 0 ≤ rate < 1"),
    (lambda: Conv2d(2, rounding="ceil"), "conv rounding is 'ceil'; expected strict or floor"),
    (lambda: MaxPool2d(rounding="up"), "pool rounding is 'up'; expected strict, ceil or floor"),
    (
        lambda: AveragePool2d(rounding="ceil", count_padding=True).output_shape((1, 3, 3)),
        "avgpool counts positions outside the map, but windows reach beyond the padding",
    ),
    (lambda: Conv2d(2, stride=0), "conv kernel or stride is 0"),
    (lambda: Conv2d(2, 1, dilation=0), "conv dilation is 0; expected a whole number from 1"),
    (
        lambda: Conv2d(2, 3, dilation=2**30),
        "conv extent of the dilated kernel is 2147483649; expected a whole number from 1",
    ),
    (
        lambda: Conv2d(2, 3, padding="valid", dilation=(1, 3)).output_shape((1, 9, 6)),
        "conv width: extent of the dilated kernel 7 is larger than the input, padding included",
    ),
    (
        lambda: Conv2d(2, (1, 2, 3)),
        "conv kernel is (1, 2, 3); expected a whole number or (a whole number, a whole number)",
    ),
    (
        lambda: Conv2d(2, padding="some"),
        "padding is 'some'; expected a number, same, valid or full",
    ),
    (lambda: Conv2d(2, padding=-1), "conv padding is -1; expected a whole number from 0"),
    (
        lambda: Conv2d(2, 4, stride=2, padding="valid").output_shape((1, 7, 8)),
        "conv height: (7 − 4 + 0) / 2 + 1 is not a whole number; change kernel, stride or padding",
    ),
    (
        lambda: Conv2d(2, 3, stride=3, padding=1).output_shape((1, 7, 6)),
        "conv width: (6 − 3 + 2) / 3 + 1 is not a whole number",
    ),
    (
        lambda: Conv2d(2, 5, padding="valid").output_shape((1, 9, 4)),
        "conv width: kernel 5 is larger than the input, padding included (4 + 0)",
    ),
    (lambda: Conv2d(2).output_shape((5,)), "conv needs an input of shape (C, H, W), got (5,)"),
    (
        lambda: MaxPool2d(0),
        "pool window or stride is 0; expected a whole number from 1 to 2,147,483,647",
    ),
    (lambda: AveragePool2d(2, 0), "avgpool window or stride is 0"),
    (
        lambda: SumPool2d(2, padding="full"),
        "sumpool padding is 'full'; expected a number, same or valid",
    ),
    (
        lambda: MaxPool2d(4).output_shape((1, 3, 8)),
        "pool: window 4 is larger than the input, padding included (3 + 0)",
    ),
    (lambda: MaxPool2d(2).output_shape((5,)), "pool needs an input of shape (C, H, W), got (5,)"),
    (lambda: Dense(0), "dense units is 0; expected a whole number from 1 to 2,147,483,647"),
    (
        lambda: Dense(2).output_shape((1, 2, 3)),
        "dense needs a vector, got (1, 2, 3); put a flatten before it",
    ),
    (lambda: Dropout(1.0), "dropout rate is 1.0; expected 0 ≤ rate < 1"),
    (lambda: Dropout(-0.1), "dropout rate is -0.1; expected 0 ≤ rate < 1"),
    (lambda: LocalResponseNorm(-1), "lrn radius is -1; expected a whole number from 0"),
    (lambda: LocalResponseNorm(bias=0.0), "lrn bias is 0.0; expected a finite number above 0"),
    (
        lambda: LocalResponseNorm().output_shape((5,)),
        "lrn needs an input of shape (C, H, W), got (5,)",
    ),
    (lambda: Network((3, 2), [ReLU()]), "input shape (3, 2); expected (C, H, W) or (F,)"),
    (lambda: Network((0,), [ReLU()]), "input shape (0,); expected (C, H, W) or (F,)"),
    (lambda: Network((4,), [], name="nothing"), "network nothing has no layers"),
    (lambda: Network((4,), ["relu"]), "layer 1 of the network is 'relu'; expected a layer"),
    (
        lambda: Network((3, 8, 8), [Conv2d(2), Dense(3)], name="mine"),
        "network mine, layer 2 (dense1): dense needs a vector, got (2, 8, 8)",
    ),
    (
        lambda: Network((3, 8, 8), [Conv2d(2)]),
        "the network ends in maps of shape (2, 8, 8), but softmax_cross_entropy needs a vector",
    ),
    (
        lambda: Network((4,), [Dense(1)]),
        "softmax needs at least 2 outputs; use sigmoid_cross_entropy for one",
    ),
]


@pytest.mark.parametrize(("build", "message"), REFUSALS)
def test_a_mistake_is_one_line_with_the_value(build: Callable[[], object], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        build()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kernel", [1, 2, 3, 5])
@pytest.mark.parametrize("padding", ["valid", "full", "same", 0, 1, 2])
def test_a_convolution_has_one_output_for_each_position_of_its_kernel(
    kernel: int, padding: int | str
) -> None:
    """Counted by sliding the kernel over the padded row."""
    layer = Conv2d(4, kernel, padding=padding)
    (before, after), _ = layer.pads((3, 7, 11))
    places = sum(1 for start in range(-before, 7 + after) if start + kernel <= 7 + after)
    channels, height, _ = layer.output_shape((3, 7, 11))
    assert (channels, height) == (4, places)
    assert {"valid": 7 - kernel + 1, "full": 7 + kernel - 1, "same": 7}.get(
        padding, 7 + 2 * before - kernel + 1
    ) == height


@pytest.mark.parametrize("padding", ["valid", "same", "full", 0, 3])
@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("dilation", [1, 2, (2, 1), (3, 4)])
@pytest.mark.parametrize("kernel", [1, 2, 3, (4, 1)])
def test_a_dilated_convolution_equals_one_with_zeros_between_its_weights(
    kernel: int | tuple[int, int],
    dilation: int | tuple[int, int],
    stride: int,
    padding: int | PaddingName,
) -> None:
    layer = Conv2d(4, kernel, stride, padding, rounding="floor", dilation=dilation)
    other = Conv2d(4, layer.extents, stride, padding, rounding="floor")
    shape = (3, 13, 16)
    assert layer.pads(shape) == other.pads(shape)
    assert layer.output_shape(shape) == other.output_shape(shape)
    assert layer.parameters(shape) == Conv2d(4, kernel).parameters(shape)
    assert layer.flops(shape).forward <= other.flops(shape).forward
    assert (layer.dilations == (1, 1)) == (layer.extents == layer.window)


@pytest.mark.parametrize("layer", [Conv2d(1, 3, 2, "same"), MaxPool2d(3, 2, "same")])
@pytest.mark.parametrize(("size", "pads"), [(7, (1, 1)), (6, (0, 1)), (1, (1, 1))])
def test_same_puts_the_odd_zero_at_the_end(
    layer: Conv2d | MaxPool2d, size: int, pads: tuple[int, int]
) -> None:
    """As TensorFlow does: ceil(size / stride) outputs, the extra zero below and at the right."""
    assert layer.pads((1, size, size)) == (pads, pads)
    assert layer.output_shape((1, size, size))[1] == math.ceil(size / 2)


def test_pooling_ignores_an_incomplete_last_window() -> None:
    assert MaxPool2d(2).output_shape((3, 7, 5)) == (3, 3, 2)
    assert MaxPool2d(2, padding="same").output_shape((3, 7, 5)) == (3, 4, 3)
    assert MaxPool2d(3, 2).output_shape((3, 8, 7)) == (3, 3, 3)


def test_layers_are_numbered_by_kind() -> None:
    layers = [Conv2d(2), ReLU(), Conv2d(3), Sigmoid(), MaxPool2d(), Flatten(), Dense(4), Dense(2)]
    names = [node.name for node in Network((1, 8, 8), layers).nodes]
    expected = "conv1 relu1 conv2 sigmoid1 pool1 flatten1 dense1 dense2"
    assert " ".join(names) == expected
    assert len({layer.kind for layer in LAYERS.values()}) == len(LAYERS)


def test_a_flattened_tensor_remembers_its_maps() -> None:
    network = Network((2, 3, 4), [ReLU(), Flatten(), Dropout(0.5), Dense(5), ReLU()])
    assert [node.output_maps for node in network.nodes] == [
        (2, 3, 4),
        (2, 3, 4),
        (2, 3, 4),
        (5, 1, 1),
        (5, 1, 1),
    ]


def test_a_dense_layer_as_wide_as_its_input_returns_a_new_vector() -> None:
    network = Network((2, 3, 4), [Flatten(), Dense(24)])
    assert network.nodes[1].output_maps == (24, 1, 1)


def test_parameters_are_named_shaped_and_counted() -> None:
    network = Network(
        (3, 8, 8), [Conv2d(5, (3, 2), weight_decay=0.1), Flatten(), Dense(7, weight_decay=0.2)]
    )
    shapes = {p.name: p.shape for p in network.parameters}
    assert shapes == {
        "conv1.weight": (5, 3, 3, 2),
        "conv1.bias": (5,),
        "dense1.weight": (7, 320),
        "dense1.bias": (7,),
    }
    assert network.num_parameters == 5 * 3 * 3 * 2 + 5 + 7 * 320 + 7
    decays = {p.name: p.weight_decay for p in network.parameters}
    assert decays == {
        "conv1.weight": 0.1,
        "conv1.bias": 0.0,
        "dense1.weight": 0.2,
        "dense1.bias": 0.0,
    }


def test_initial_values_have_the_stated_deviation() -> None:
    """Five standard errors of a sample deviation, σ/√(2n), around σ."""
    network = Network(
        (8, 16, 16),
        [
            Conv2d(64, 3, bias_init=Constant(0.1)),
            Conv2d(9, 3, weight_init=Uniform(2.0)),
            *(Flatten(), Dense(10, weight_init=Normal(0.04))),
        ],
        MeanSquaredError(),
    )
    values = initial_parameters(network, 0)
    for name, deviation in (
        ("conv1.weight", math.sqrt(2.0 / (8 * 9))),
        ("conv2.weight", 2.0 / math.sqrt(3 * 64 * 9)),
        ("dense1.weight", 0.04),
    ):
        error = deviation / math.sqrt(2 * values[name].size)
        assert abs(values[name].std() - deviation) < 5.0 * error
        assert abs(values[name].mean()) < 5.0 * deviation / math.sqrt(values[name].size)
    assert 0.99 < np.abs(values["conv2.weight"]).max() / (2.0 / math.sqrt(64 * 9)) <= 1.0
    assert (values["conv1.bias"] == 0.1).all()
    assert (values["dense1.bias"] == 0.0).all()


def test_initial_values_depend_only_on_seed_and_name() -> None:
    short = Network((6,), [Dense(5)], SigmoidBinaryCrossEntropy())
    long = Network((6,), [Dense(5), ReLU(), Dense(5)], SigmoidBinaryCrossEntropy())
    one, other = initial_parameters(short, 3), initial_parameters(long, 3)
    np.testing.assert_array_equal(one["dense1.weight"], other["dense1.weight"])
    assert not np.array_equal(other["dense1.weight"][:, :5], other["dense2.weight"])
    reseeded = initial_parameters(short, 4)
    assert not np.array_equal(one["dense1.weight"], reseeded["dense1.weight"])


def test_drawing_in_blocks_gives_the_stream_drawn_at_once_in_little_memory() -> None:
    (weight, _) = Network((700,), [Dense(501)], MeanSquaredError()).parameters
    assert weight.size > 2 * BLOCK
    key = (3, zlib.crc32(b"dense1.weight"))
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))
    expected = math.sqrt(2.0 / 700) * generator.standard_normal(weight.shape)
    stored = np.zeros((700, 501), np.float32)
    tracemalloc.start()
    draw(weight, 3, stored.T)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    np.testing.assert_array_equal(stored.T, expected.astype(np.float32))
    # A block's numbers before and after scaling, of 8 bytes each.
    assert peak < 2.5 * BLOCK * 8 < expected.nbytes
