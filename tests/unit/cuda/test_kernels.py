"""Kernels of layers without parameters against the reference backend, at odd shapes.

Where nothing else is said, a bound is a few roundings of float32 (ε = 1.2e-7) of the largest number
that takes part. Each kernel gives the same bits whatever the order of blocks and threads.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from dptrain.backends.base import Context
from dptrain.backends.reference.operations import OPERATIONS
from dptrain.network import (
    AveragePool2d,
    Dropout,
    Flatten,
    Layer,
    LocalResponseNorm,
    MaxPool2d,
    MeanSquaredError,
    Network,
    ReLU,
    Sigmoid,
    SumPool2d,
)
from dptrain.network.network import Node
from dptrain.plan.random import dropout_keep, threshold
from tests.unit.cuda.launching import ints, launch, launch_in_every_order

EPSILON = float(np.finfo(np.float32).eps)

Maps = NDArray[Any]


def node_of(layer: Layer, shape: tuple[int, ...]) -> Node:
    return Network(shape, [layer, Flatten()], MeanSquaredError()).nodes[0]


def spread(seed: int, *shape: int) -> NDArray[np.float32]:
    """Distinct numbers between −1 and 1."""
    size = math.prod(shape)
    numbers = np.random.default_rng(seed).permutation(2.0 * np.arange(size) + 1.0) / size - 1.0
    return numbers.reshape(shape).astype(np.float32)


def first(x: Maps) -> Maps:
    """(N, H, W, C) to (N, C, H, W), in float64."""
    return x.transpose(0, 3, 1, 2).astype(np.float64)


def last(x: Maps) -> Maps:
    return np.ascontiguousarray(x.transpose(0, 2, 3, 1))


def expected(layer: Layer, x: Maps, dy: Maps) -> tuple[Maps, Maps]:
    """Y and dx by the reference backend; arrays are (N, H, W, C)."""
    n, h, w, c = x.shape
    node = node_of(layer, (c, h, w))
    operation = OPERATIONS[type(layer)]
    arrays = {"x": first(x), "dy": first(dy), "dx": np.zeros((n, c, h, w))}
    arrays["y"] = np.zeros((n, *node.output_shape))
    arrays["argmax"] = np.zeros(arrays["y"].shape, np.int64)
    bound = operation(node, arrays)
    context = Context(seed=1, n=n)
    bound.forward(context)
    bound.backward(context)  # type: ignore[attr-defined]
    return last(arrays["y"]), last(arrays["dx"])


def assert_close(actual: Maps, wanted: Maps, roundings: float, scale: float = 1.0) -> None:
    np.testing.assert_allclose(actual, wanted, rtol=0.0, atol=roundings * EPSILON * scale)


# Element by element.

COUNTS = [(1, 1), (1, 255), (1, 257), (4, 4), (4, 1028), (1, 1028)]
by_count = pytest.mark.parametrize(("vector", "count"), COUNTS)


def elementwise(name: str, vector: int, count: int, *args: Any) -> list[NDArray[Any]]:
    file, threads = "elementwise.cu", count // vector
    return launch_in_every_order(file, name, threads, *args, *ints(count), VECTOR=vector)


@by_count
@pytest.mark.parametrize("layer", [ReLU(), Sigmoid()], ids=["relu", "sigmoid"])
def test_activations_equal_the_reference(layer: Layer, vector: int, count: int) -> None:
    x, dy = 4.0 * spread(1, 1, 1, 1, count), spread(2, 1, 1, 1, count)
    y, dx = expected(layer, x, dy)
    _, forward = elementwise(f"{layer.kind}_forward", vector, count, x, np.zeros_like(x))
    assert_close(forward, y, 4 if isinstance(layer, Sigmoid) else 0)
    *_, backward = elementwise(
        f"{layer.kind}_backward", vector, count, dy, forward, np.zeros_like(x)
    )
    assert_close(backward, dx, 4 if isinstance(layer, Sigmoid) else 0)


@by_count
def test_the_mask_of_relu_scales_what_is_kept(vector: int, count: int) -> None:
    y, dy = np.maximum(spread(1, count), 0), spread(2, count)
    masked, _ = elementwise("relu_mask", vector, count, dy, y, np.float32(1.25))
    np.testing.assert_array_equal(masked, np.where(y > 0, dy * np.float32(1.25), 0))


@by_count
def test_a_copy_is_the_same(vector: int, count: int) -> None:
    x = spread(1, count)
    np.testing.assert_array_equal(elementwise("copy", vector, count, x, 0 * x)[1], x)


def test_extreme_numbers_pass_through() -> None:
    x = np.array([np.nan, np.inf, -np.inf, -0.0, 1e-40, 3e38], np.float32)
    relu = launch("elementwise.cu", "relu_forward", 6, x, np.zeros_like(x), np.int32(6))[1]
    np.testing.assert_array_equal(relu, np.maximum(x, 0))
    sigmoid = launch("elementwise.cu", "sigmoid_forward", 6, x, np.zeros_like(x), np.int32(6))[1]
    np.testing.assert_array_equal(sigmoid, np.float32([np.nan, 1.0, 0.0, 0.5, 0.5, 1.0]))


# Pooling.

POOLINGS: list[tuple[str, tuple[int, int, int, int], dict[str, Any]]] = [
    ("one pixel", (1, 1, 1, 1), {"window": 1}),
    ("2/2", (2, 6, 4, 4), {"window": 2}),
    ("2/2, last row and column left out", (2, 7, 5, 3), {"window": 2}),
    ("2/2, same, odd", (1, 7, 5, 8), {"window": 2, "padding": "same"}),
    ("3/2, overlapping", (2, 7, 9, 3), {"window": 3, "stride": 2}),
    ("3/2, same", (2, 6, 8, 12), {"window": 3, "stride": 2, "padding": "same"}),
    ("3/1, same", (1, 5, 5, 4), {"window": 3, "stride": 1, "padding": "same"}),
    ("2/3, gaps", (1, 8, 8, 2), {"window": 2, "stride": 3}),
    ("3x2/2x3, same", (1, 7, 8, 4), {"window": (3, 2), "stride": (2, 3), "padding": "same"}),
    ("whole map", (3, 3, 7, 5), {"window": (3, 7)}),
]
by_pooling = pytest.mark.parametrize(
    ("shape", "options"), [p[1:] for p in POOLINGS], ids=[p[0] for p in POOLINGS]
)


def geometry(layer: Any, shape: tuple[int, int, int, int]) -> tuple[list[np.int32], Any]:
    """Arguments from the number of samples on, and the shape of y."""
    n, h, w, c = shape
    _, ho, wo = layer.output_shape((c, h, w))
    (top, _), (left, _) = layer.pads((c, h, w))
    return ints(n, h, w, c, ho, wo, *layer.windows, *layer.strides, top, left), (n, ho, wo, c)


def vectors(channels: int) -> list[int]:
    return [1, 4] if channels % 4 == 0 else [1]


@by_pooling
def test_max_pooling_equals_the_reference(
    shape: tuple[int, int, int, int], options: dict[str, Any]
) -> None:
    layer = MaxPool2d(**options)
    numbers, pooled = geometry(layer, shape)
    x, dy = spread(3, *shape), spread(4, *pooled)
    y, dx = expected(layer, x, dy)
    for vector in vectors(shape[3]):
        run = "pooling.cu", "max_forward", y.size // vector
        blank = np.zeros(pooled, np.int32)
        _, forward, argmax = launch_in_every_order(
            *run, x, np.zeros_like(dy), blank, *numbers, VECTOR=vector
        )
        np.testing.assert_array_equal(forward, y)
        run = "pooling.cu", "max_backward", x.size // vector
        *_, backward = launch_in_every_order(
            *run, dy, argmax, np.full_like(x, np.nan), *numbers, VECTOR=vector
        )
        assert_close(backward, dx, 4)


@by_pooling
@pytest.mark.parametrize("kind", [SumPool2d, AveragePool2d])
def test_sum_and_average_pooling_equal_the_reference(
    kind: Any, shape: tuple[int, int, int, int], options: dict[str, Any]
) -> None:
    layer = kind(**options)
    numbers, pooled = geometry(layer, shape)
    x, dy = spread(3, *shape), spread(4, *pooled)
    y, dx = expected(layer, x, dy)
    average, blank = np.int32(kind is AveragePool2d), np.full_like(dy, np.nan)
    for vector in vectors(shape[3]):
        run = "pooling.cu", "sum_forward", y.size // vector
        _, forward = launch_in_every_order(*run, x, blank, average, *numbers, VECTOR=vector)
        assert_close(forward, y, 21)
        run = "pooling.cu", "sum_backward", x.size // vector
        _, backward = launch_in_every_order(
            *run, dy, np.full_like(x, np.nan), average, *numbers, VECTOR=vector
        )
        assert_close(backward, dx, 9)


def test_the_first_of_equals_and_a_nan_win() -> None:
    layer, shape = MaxPool2d(2), (1, 2, 4, 1)
    x = np.array([1, 1, 2, np.nan, 1, 1, 3, 4], np.float32).reshape(shape)
    numbers, pooled = geometry(layer, shape)
    blank = np.zeros(pooled, np.int32)
    _, y, argmax = launch(
        "pooling.cu", "max_forward", 2, x, np.zeros(pooled, np.float32), blank, *numbers
    )
    np.testing.assert_array_equal(y.reshape(-1), [1.0, np.nan])
    assert argmax.reshape(-1)[0] == 0


# Local response normalisation.

NORMS: list[tuple[str, tuple[int, int, int, int], LocalResponseNorm]] = [
    ("as in cifar", (2, 3, 2, 11), LocalResponseNorm()),
    ("strong", (2, 2, 3, 7), LocalResponseNorm(2, bias=2.0, alpha=0.5, beta=0.6)),
    ("radius 0", (1, 2, 2, 3), LocalResponseNorm(0, alpha=0.5)),
    ("radius beyond the channels", (1, 2, 2, 3), LocalResponseNorm(5, alpha=0.3, beta=2.0)),
    ("one pixel, one channel", (1, 1, 1, 1), LocalResponseNorm(1, alpha=0.7)),
    ("64 channels, several blocks", (2, 3, 3, 64), LocalResponseNorm(4, alpha=0.1)),
    ("a pixel wider than a block", (1, 1, 2, 300), LocalResponseNorm(4, alpha=0.1)),
]


@pytest.mark.parametrize(("shape", "layer"), [n[1:] for n in NORMS], ids=[n[0] for n in NORMS])
def test_normalisation_equals_the_reference(
    shape: tuple[int, int, int, int], layer: LocalResponseNorm
) -> None:
    x, dy = spread(5, *shape), spread(6, *shape)
    y, dx = expected(layer, x, dy)
    numbers = [np.float32(value) for value in (layer.bias, layer.alpha, layer.beta)]
    counts, defines = ints(x.size, shape[3]), {"RADIUS": layer.radius}
    run = "normalization.cu", "lrn_forward", x.size
    _, forward = launch_in_every_order(*run, x, 0 * x, *counts, *numbers, **defines)
    # Sums of up to 11 squares, then a power.
    assert_close(forward, y, 20)
    run = "normalization.cu", "lrn_backward", x.size
    *_, backward = launch_in_every_order(*run, x, dy, 0 * x, *counts, *numbers, **defines)
    assert_close(backward, dx, 60)


# Dropout.


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.9])
@pytest.mark.parametrize(("n", "size"), [(1, 1), (3, 13), (5, 64), (2, 257)])
def test_dropout_has_the_masks_of_the_published_generator(n: int, size: int, rate: float) -> None:
    """Bit by bit, with identities and seeds above 32 bits."""
    seed, step, layer = 5 + (7 << 32), 3, 2
    samples = np.array([40, 2**33 + 5, 0, 907, 2**31])[:n]
    keep = dropout_keep(rate, size, seed=seed, step=step, layer=layer, samples=samples)
    blocks, factor = -(-size // 4), np.float32(1.0 / (1.0 - rate))
    mask = launch_in_every_order(
        "dropout.cu", "dropout_mask", n * blocks,
        np.zeros((n, blocks), np.uint32), samples, *ints(n, blocks), np.uint64(threshold(rate)),
        np.uint32(layer), np.uint32(seed & 0xFFFFFFFF), np.uint32(seed >> 32), np.uint32(step),
    )[0]  # fmt: skip
    np.testing.assert_array_equal(mask.view(np.uint8)[:, :size], keep)
    x = spread(1, n, size)
    for vector in vectors(size):
        *_, y = launch_in_every_order(
            "dropout.cu", "dropout_apply", x.size // vector,
            x, mask, 0 * x, *ints(n, size, blocks), factor, VECTOR=vector,
        )  # fmt: skip
        np.testing.assert_array_equal(y, x * (keep * factor))


def test_dropout_lets_nan_through() -> None:
    x, mask = np.full((1, 4), np.nan, np.float32), np.zeros((1, 1), np.uint32)
    args = x, mask, np.zeros_like(x), *ints(1, 4, 1), np.float32(2.0)
    assert np.isnan(launch("dropout.cu", "dropout_apply", 4, *args)[2]).all()


def test_dropout_is_a_layer_of_the_reference() -> None:
    """`dropout_keep`, which the kernel is compared with, is what the reference drops by."""
    layer, n, size = Dropout(0.3), 3, 13
    node = node_of(layer, (1, 1, size))
    x = np.ones((n, 1, 1, size))
    arrays = {"x": x, "y": 0 * x, "factor": 0 * x}
    samples = np.arange(n)
    OPERATIONS[Dropout](node, arrays).forward(Context(seed=9, n=n, step=2, samples=samples))
    keep = dropout_keep(0.3, size, seed=9, step=2, layer=node.index, samples=samples)
    np.testing.assert_array_equal(arrays["y"].reshape(n, size) > 0, keep)


# Layout.


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 3, 35), (2, 5, 64), (1, 130, 3)])
def test_images_are_turned(shape: tuple[int, int, int]) -> None:
    x = spread(1, *shape)
    blank = np.zeros((shape[0], shape[2], shape[1]), np.float32)
    _, y = launch_in_every_order("layout.cu", "channels_last", x.size, x, blank, *ints(*shape))
    np.testing.assert_array_equal(y, x.transpose(0, 2, 1))
