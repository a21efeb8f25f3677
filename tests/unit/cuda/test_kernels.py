"""Kernels of layers without parameters, compared with the reference backend at odd shapes.

Unless stated otherwise, an error bound is a few float32 roundings (ε = 1.2e-7) of the largest
operand. With bfloat16 activations, inputs are bfloat16 and arithmetic is float32, so results have
an additional relative error of 2⁻⁸: they are rounded once, to 8 significant bits. Each kernel
computes the same bits in every order of blocks and threads.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from dptrain.backends.cuda.elementwise import activations
from dptrain.backends.cuda.geometry import GEOMETRY_MACROS, geometry
from dptrain.backends.memory import as_numbers
from dptrain.backends.reference.operations import operation_of
from dptrain.backends.replica import Context
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
from dptrain.network.elementwise import Activation
from dptrain.network.network import Node
from dptrain.philox import dropout_keep, threshold
from dptrain.plan.lowering import Group
from tests.lazy import LazyModule
from tests.tiers import tiered
from tests.unit.cuda.launching import BF16, FP32, Kept, ints, launch, launch_in_every_order

torch = LazyModule("torch")

EPSILON = float(np.finfo(np.float32).eps)

Maps = NDArray[Any]


def node_of(layer: Layer, shape: tuple[int, ...]) -> Node:
    return Network(shape, [layer, Flatten()], MeanSquaredError()).nodes[0]


def spread(seed: int, *shape: int) -> NDArray[np.float32]:
    """Return distinct numbers between −1 and 1."""
    size = math.prod(shape)
    numbers = np.random.default_rng(seed).permutation(2.0 * np.arange(size) + 1.0) / size - 1.0
    return numbers.reshape(shape).astype(np.float32)


def first(x: Maps) -> Maps:
    """Transpose (N, H, W, C) to (N, C, H, W), in float64."""
    return x.transpose(0, 3, 1, 2).astype(np.float64)


def last(x: Maps) -> Maps:
    return np.ascontiguousarray(x.transpose(0, 2, 3, 1))


def expected(layer: Layer, x: Maps, dy: Maps) -> tuple[Maps, Maps]:
    """Return y and dx of the reference backend; arrays are (N, H, W, C)."""
    n, h, w, c = x.shape
    node = node_of(layer, (c, h, w))
    operation = operation_of(layer)
    arrays = {"x": first(x), "dy": first(dy), "dx": np.zeros((n, c, h, w))}
    arrays["y"] = np.zeros((n, *node.output_shape))
    arrays["argmax"] = np.zeros(arrays["y"].shape, np.int64)
    bound = operation(Group((node,)), arrays)
    context = Context(seed=1, n=n)
    bound.forward(context)
    bound.backward(context)  # type: ignore[attr-defined]
    return last(arrays["y"]), last(arrays["dx"])


def assert_close(
    actual: Maps, wanted: Maps, roundings: float, kept: Kept, scale: float = 1.0
) -> None:
    """Compare; `actual` has the storage format of the kernel."""
    np.testing.assert_allclose(
        as_numbers(actual), wanted, rtol=kept.unit, atol=roundings * EPSILON * scale
    )


by_kept = pytest.mark.parametrize("kept", [FP32, BF16], ids=["fp32", "bf16"])


# Storage formats.


def test_bfloat16_is_float32_rounded_to_nearest_even() -> None:
    """Compare all signs and exponents with PyTorch; every bfloat16 is unchanged."""
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 1 << 32, 1 << 16, dtype=np.uint64).astype(np.uint32)
    ties = (np.arange(1 << 16, dtype=np.uint32) << 16) + 0x8000
    x = np.concatenate([bits, ties, ties & 0xFFFF0000]).view(np.float32)
    finite = x[np.isfinite(x)]
    theirs = torch.from_numpy(finite).bfloat16().view(torch.uint16).numpy()
    np.testing.assert_array_equal(BF16.store(finite), theirs)


# Elementwise kernels.

COUNTS = [1, 255, 4, 1028, 2056]
by_count = pytest.mark.parametrize("count", tiered(COUNTS, [255, 1028, 2056]))


def elementwise(
    name: str,
    kept: Kept,
    count: int,
    *arrays: NDArray[Any],
    factor: float | None = None,
    function: Activation | None = None,
) -> NDArray[Any]:
    """Run a kernel with each vector width; return its result, equal for all widths."""
    file = "elementwise.cu" if function is None else activations.FILE
    defines = {} if function is None else activations.macros(function)
    factors = [] if factor is None else [np.float32(factor)]
    last = 0 if name == "relu_dropout_backward" else -1
    results = [
        launch_in_every_order(
            file, name, count // width, *map(kept.store, arrays), *factors,
            *ints(count), VECTOR=width, PRECISION=kept.precision, **defines,
        )[last]
        for width in kept.vectors(count)
    ]  # fmt: skip
    for result in results:
        np.testing.assert_array_equal(result, results[0])
    return results[0]


@by_kept
@by_count
@pytest.mark.parametrize("layer", [ReLU(), Sigmoid()], ids=["relu", "sigmoid"])
def test_activations_equal_the_reference(layer: Activation, count: int, kept: Kept) -> None:
    x = kept.round(4.0 * spread(1, 1, 1, 1, count))
    dy = kept.round(spread(2, 1, 1, 1, count))
    y, _ = expected(layer, x, dy)
    forward = elementwise(f"{layer.kind}_forward", kept, count, x, np.zeros_like(x), function=layer)
    assert_close(forward, y, 4 if isinstance(layer, Sigmoid) else 0, kept)
    output = as_numbers(forward)
    backward = elementwise(
        f"{layer.kind}_backward", kept, count, dy, output, np.zeros_like(x), function=layer
    )
    slope = output * (1.0 - output) if isinstance(layer, Sigmoid) else output > 0
    assert_close(backward, dy * slope, 4 if isinstance(layer, Sigmoid) else 0, kept)


@by_kept
@by_count
def test_relu_dropout_backward_scales_kept_elements(count: int, kept: Kept) -> None:
    y, dy = kept.round(np.maximum(spread(1, count), 0)), kept.round(spread(2, count))
    masked = elementwise("relu_dropout_backward", kept, count, dy, y, factor=1.25)
    np.testing.assert_array_equal(masked, kept.store(np.where(y > 0, dy * np.float32(1.25), 0)))


@by_kept
@by_count
def test_a_copy_is_equal(count: int, kept: Kept) -> None:
    x = spread(1, count)
    np.testing.assert_array_equal(elementwise("copy", kept, count, x, 0 * x), kept.store(x))


@by_kept
def test_extreme_values_pass_through(kept: Kept) -> None:
    x = kept.round(np.array([np.nan, np.inf, -np.inf, -0.0, 1e-40, 3e38, 0, 1], np.float32))
    relu = elementwise("relu_forward", kept, 8, x, np.zeros_like(x), function=ReLU())
    np.testing.assert_array_equal(as_numbers(relu), np.maximum(x, 0))
    sigmoid = as_numbers(
        elementwise("sigmoid_forward", kept, 8, x, np.zeros_like(x), function=Sigmoid())
    )[:6]
    np.testing.assert_array_equal(sigmoid, np.float32([np.nan, 1.0, 0.0, 0.5, 0.5, 1.0]))


# Pooling.

POOLINGS: list[tuple[str, tuple[int, int, int, int], dict[str, Any]]] = [
    ("one pixel", (1, 1, 1, 1), {"window": 1}),
    ("2/2", (2, 6, 4, 4), {"window": 2}),
    ("2/2, last row and column left out", (2, 7, 5, 3), {"window": 2}),
    ("2/2, same, odd", (1, 7, 5, 8), {"window": 2, "padding": "same"}),
    ("3/2, overlapping", (2, 7, 9, 3), {"window": 3, "stride": 2}),
    ("3/2, same", (2, 6, 8, 24), {"window": 3, "stride": 2, "padding": "same"}),
    ("3/1, same", (1, 5, 5, 4), {"window": 3, "stride": 1, "padding": "same"}),
    ("5/1, same", (1, 6, 7, 8), {"window": 5, "stride": 1, "padding": "same"}),
    ("5x7/2, padding 2", (2, 7, 8, 4), {"window": (5, 7), "stride": 2, "padding": 2}),
    ("2/3, gaps", (1, 8, 8, 2), {"window": 2, "stride": 3}),
    ("3x2/2x3, same", (1, 7, 8, 4), {"window": (3, 2), "stride": (2, 3), "padding": "same"}),
    ("whole map", (3, 3, 7, 5), {"window": (3, 7)}),
    ("more elements than a byte counts", (1, 17, 16, 4), {"window": (16, 16), "stride": 1}),
]
by_pooling = pytest.mark.parametrize(
    ("shape", "options"), [p[1:] for p in POOLINGS], ids=[p[0] for p in POOLINGS]
)


def numbers_of(layer: Any, shape: tuple[int, int, int, int]) -> tuple[list[np.int32], Any]:
    """Return the arguments from the number of samples on, and the shape of y."""
    n, h, w, c = shape
    node = node_of(layer, (c, h, w))
    _, ho, wo = node.output_shape
    return [np.int32(n), *geometry(node, layer, layer.windows)], (n, ho, wo, c)


def cells(layer: Any, shape: tuple[int, int, int, int]) -> int:
    """Return the number of cells times channels in backward; a cell has the size of the strides."""
    n, h, w, c = shape
    (top, _), (left, _) = layer.pads((c, h, w))
    down, across = layer.strides
    return n * -(-(h + top) // down) * -(-(w + left) // across) * c


def pool(
    name: str, kept: Kept, width: int, elements: int, *args: Any, **defines: int
) -> list[NDArray[Any]]:
    arrays = [
        kept.store(arg) if getattr(arg, "ndim", 0) == 4 and arg.dtype == np.float32 else arg
        for arg in args
    ]
    defines.update(VECTOR=width, PRECISION=kept.precision)
    return launch_in_every_order("pooling.cu", name, elements // width, *arrays, **defines)


def wide(layer: Any) -> dict[str, int]:
    return {"WIDE_ARGMAX": 1} if math.prod(layer.windows) > 255 else {}


@by_kept
@by_pooling
def test_max_pooling_equals_the_reference(
    shape: tuple[int, int, int, int], options: dict[str, Any], kept: Kept
) -> None:
    layer = MaxPool2d(**options)
    numbers, pooled = numbers_of(layer, shape)
    x, dy = kept.round(spread(3, *shape)), kept.round(spread(4, *pooled))
    y, dx = expected(layer, x, dy)
    blank = np.zeros(pooled, np.int32 if wide(layer) else np.uint8)
    for width in kept.vectors(shape[3]):
        args = x, np.zeros_like(dy), blank, *numbers
        _, forward, argmax = pool("max_pool2d_forward", kept, width, y.size, *args, **wide(layer))
        assert_close(forward, y, 0, kept)
        args = dy, argmax, np.full_like(x, np.nan), np.float32(1.25), *numbers
        *_, backward = pool(
            "max_pool2d_backward", kept, width, cells(layer, shape), *args, **wide(layer)
        )
        assert_close(backward, 1.25 * dx, 8, kept)


@by_kept
def test_kernels_for_one_geometry_compute_the_same_bits(kept: Kept) -> None:
    """Constants change loops and divisions but not the order of additions."""
    layer, shape = MaxPool2d(3, 2, "same"), (2, 6, 8, 24)
    numbers, pooled = numbers_of(layer, shape)
    fixed = {name: int(n) for name, n in zip(GEOMETRY_MACROS, numbers[1:], strict=True)}
    x, dy = spread(3, *shape), spread(4, *pooled)
    results = []
    for defines in ({}, fixed):
        args = x, np.zeros_like(dy), np.zeros(pooled, np.uint8), *numbers
        forward = pool("max_pool2d_forward", kept, kept.widths[1], dy.size, *args, **defines)
        args = dy, forward[2], np.full_like(x, np.nan), np.float32(1.0), *numbers
        elements = cells(layer, shape)
        backward = pool("max_pool2d_backward", kept, kept.widths[1], elements, *args, **defines)
        results.append([*forward, *backward])
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)


@by_kept
def test_rectified_or_dropped_elements_have_no_gradient(kept: Kept) -> None:
    """With dropout after pooling, the gradient is that of pooling where y is not 0."""
    layer, shape, rate, index = MaxPool2d(2), (3, 6, 4, 8), 0.4, 2
    numbers, pooled = numbers_of(layer, shape)
    x = kept.round(np.maximum(spread(3, *shape) - 0.6, 0.0))
    dy = kept.round(spread(4, *pooled))
    plain, _ = expected(layer, x, dy)
    samples, step = np.array([40, 2**33 + 5, 7]), 3
    size = math.prod(pooled[1:])
    keep = dropout_keep(rate, size, seed=SEED, step=step, layer=index, samples=samples)
    factor = np.float32(1.0 / (1.0 - rate))
    dropped = kept.round(plain * keep.reshape(pooled) * factor)
    assert (plain == 0).any()
    assert (dropped != plain * factor).any()
    for width in kept.vectors(8):
        blank = np.zeros(pooled, np.uint8)
        args = x, np.zeros_like(dy), blank, *numbers
        for name, behind, y, scale in (
            ("relu_max_pool2d_forward", [], plain, 1.0),
            (
                "relu_max_pool2d_dropout_forward",
                drops(rate, index, step, samples),
                dropped,
                float(factor),
            ),
        ):
            _, forward, argmax, *_ = pool(name, kept, width, y.size, *args, *behind)
            np.testing.assert_array_equal(as_numbers(forward), y)
            back = dy, argmax, np.full_like(x, np.nan), np.float32(scale), *numbers
            *_, backward = pool("max_pool2d_backward", kept, width, cells(layer, shape), *back)
            _, dx = expected(layer, x, dy * (y > 0) * scale)
            assert_close(backward, dx, 4, kept)


@by_kept
@by_pooling
@pytest.mark.parametrize("kind", [SumPool2d, AveragePool2d])
def test_sum_and_average_pooling_equal_the_reference(
    kind: Any, shape: tuple[int, int, int, int], options: dict[str, Any], kept: Kept
) -> None:
    layer = kind(**options)
    numbers, pooled = numbers_of(layer, shape)
    x, dy = kept.round(spread(3, *shape)), kept.round(spread(4, *pooled))
    y, dx = expected(layer, x, dy)
    factor, blank = np.float32(kind is SumPool2d), np.full_like(dy, np.nan)
    terms = math.prod(layer.windows)
    for width in kept.vectors(shape[3]):
        _, forward = pool("sum_pool2d_forward", kept, width, y.size, x, blank, factor, *numbers)
        assert_close(forward, y, terms, kept, np.abs(y).max())
        args = dy, np.full_like(x, np.nan), factor, *numbers
        _, backward = pool("sum_pool2d_backward", kept, width, cells(layer, shape), *args)
        assert_close(backward, dx, 9, kept)


def test_the_first_of_equal_maxima_and_nan_win() -> None:
    layer, shape = MaxPool2d(2), (1, 2, 4, 1)
    x = np.array([1, 1, 2, np.nan, 1, 1, 3, 4], np.float32).reshape(shape)
    numbers, pooled = numbers_of(layer, shape)
    blank = np.zeros(pooled, np.uint8)
    _, y, argmax = launch(
        "pooling.cu", "max_pool2d_forward", 2, x, np.zeros(pooled, np.float32), blank, *numbers
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
    ("64 channels, several blocks", (2, 5, 5, 64), LocalResponseNorm(4, alpha=0.1)),
    ("a pixel wider than a block", (1, 1, 2, 300), LocalResponseNorm(4, alpha=0.1)),
    ("pixels that blocks divide", (2, 11, 5, 40), LocalResponseNorm(4, alpha=0.1)),
    ("neighbours beyond the next vector", (1, 3, 2, 24), LocalResponseNorm(9, alpha=0.1)),
]


def normalise(
    name: str, kept: Kept, width: int, layer: LocalResponseNorm, *args: Any, **defines: int
) -> NDArray[Any]:
    """Run an LRN kernel and return its last array; `args` begin with its arrays."""
    arrays = [kept.store(arg) if isinstance(arg, np.ndarray) else arg for arg in args]
    count, channels = args[0].size, args[0].shape[3]
    numbers = [np.float32(value) for value in (layer.bias, layer.alpha, layer.beta)]
    defines.update(RADIUS=layer.radius, ROOTS=int(layer.beta == 0.75))
    defines.update(VECTOR=width, PRECISION=kept.precision)
    results = launch_in_every_order(
        "normalization.cu", name, count // width, *arrays, *ints(count, channels), *numbers,
        **defines,
    )  # fmt: skip
    return results[-1]


@by_kept
@pytest.mark.parametrize(
    ("shape", "layer"),
    tiered([n[1:] for n in NORMS], [NORMS[1][1:], NORMS[7][1:]]),
    ids=[n[0] for n in NORMS],
)
def test_normalisation_equals_the_reference(
    shape: tuple[int, int, int, int], layer: LocalResponseNorm, kept: Kept
) -> None:
    x, dy = kept.round(spread(5, *shape)), kept.round(spread(6, *shape))
    x[x < -0.5] = 0.0
    y, dx = expected(layer, x, dy)
    for width in kept.vectors(shape[3]):
        # Sums of up to 11 squares, then a power.
        assert_close(normalise("lrn_forward", kept, width, layer, x, 0 * x), y, 20, kept)
        for rectified in (0, 1):
            args = x, dy, 0 * x, *ints(rectified)
            backward = normalise("lrn_backward", kept, width, layer, *args)
            assert_close(backward, np.where((x <= 0) & (rectified == 1), 0.0, dx), 60, kept)


def test_normalisation_for_fixed_channels_computes_the_same_bits() -> None:
    layer, x, dy = LocalResponseNorm(4, alpha=0.1), spread(5, 2, 3, 3, 64), spread(6, 2, 3, 3, 64)
    for args in (("lrn_forward", FP32, 4, layer, x, 0 * x),
                 ("lrn_backward", FP32, 4, layer, x, dy, 0 * x, *ints(0))):  # fmt: skip
        np.testing.assert_array_equal(normalise(*args), normalise(*args, FIXED_CHANNELS=64))


@by_kept
@pytest.mark.parametrize("band", tiered([1, 2], [2]))
@pytest.mark.parametrize(
    ("shape", "layer", "pooling"),
    [
        ((2, 6, 4, 8), LocalResponseNorm(4, alpha=0.2), MaxPool2d(3, 2, "same")),
        ((1, 7, 5, 3), LocalResponseNorm(1, alpha=0.5, beta=0.6), MaxPool2d(3, 2, "same")),
        ((2, 5, 3, 16), LocalResponseNorm(2, alpha=0.2), MaxPool2d(2)),
    ],
)
def test_normalisation_and_pooling_in_one_equal_the_reference(
    shape: tuple[int, int, int, int],
    layer: LocalResponseNorm,
    pooling: MaxPool2d,
    band: int,
    kept: Kept,
) -> None:
    """Two elements of a window may round to the same bfloat16 but differ in float32."""
    numbers, pooled = numbers_of(pooling, shape)
    x, dy = kept.round(np.maximum(spread(5, *shape), 0.0)), kept.round(spread(6, *pooled))
    normal, _ = expected(layer, x, x)
    y, by_normal = expected(pooling, normal, dy)
    _, dx = expected(layer, x, by_normal)
    dx[x <= 0.0] = 0.0
    reals = [np.float32(value) for value in (layer.bias, layer.alpha, layer.beta)]
    rows = min((band - 1) * pooling.strides[0] + pooling.windows[0], shape[1])
    for width in kept.vectors(shape[3]):
        run = {"RADIUS": layer.radius, "BETA_THREE_QUARTERS": int(layer.beta == 0.75)}
        run.update(VECTOR=width, PRECISION=kept.precision)
        blocks = shape[0] * -(-pooled[1] // band)
        _, forward, argmax = launch_in_every_order(
            "normalization.cu", "lrn_max_pool2d_forward", blocks * 256,
            kept.store(x), kept.store(0 * dy), np.zeros(pooled, np.uint8), *ints(band), *reals,
            *numbers[1:], shared_bytes=4 * rows * shape[2] * shape[3], **run,
        )  # fmt: skip
        assert_close(forward, y, 20, kept)
        *_, backward = launch_in_every_order(
            "normalization.cu", "lrn_max_pool2d_backward", x.size // width,
            kept.store(x), kept.store(dy), argmax, kept.store(0 * x), numbers[0],
            *reals, *numbers[1:], **run,
        )  # fmt: skip
        assert_close(backward, dx, 60, kept)


# Dropout.

SEED = 5 + (7 << 32)


def drops(rate: float, layer: int, step: int, samples: NDArray[Any]) -> list[Any]:
    """Return the arguments of `DROPOUT_PARAMETERS`."""
    numbers = np.zeros(5, np.float32)
    numbers.view(np.uint32)[3] = step
    key = np.uint32(SEED & 0xFFFFFFFF), np.uint32(SEED >> 32)
    factor = np.float32(1.0 / (1.0 - rate))
    return [samples, numbers, np.uint64(threshold(rate)), np.uint32(layer), *key, factor]


@by_kept
@pytest.mark.parametrize("rate", tiered([0.0, 0.3, 0.9], [0.3]))
@pytest.mark.parametrize(
    ("n", "size"), tiered([(1, 1), (3, 13), (5, 64), (2, 260), (2, 257)], [(3, 13), (5, 64)])
)
def test_dropout_has_the_masks_of_the_published_generator(
    n: int, size: int, rate: float, kept: Kept
) -> None:
    """Bit-identical, with sample indices and seeds above 32 bits."""
    step, layer = 3, 2
    samples = np.array([40, 2**33 + 5, 0, 907, 2**31])[:n]
    keep = dropout_keep(rate, size, seed=SEED, step=step, layer=layer, samples=samples)
    arguments, factor = drops(rate, layer, step, samples), np.float32(1.0 / (1.0 - rate))
    x = kept.round(spread(1, n, size))
    blank, wanted = np.zeros((n, -(-size // 8)), np.uint8), kept.store(x * (keep * factor))
    for width in kept.vectors(size):
        run = {"VECTOR": width, "PRECISION": kept.precision}
        _, y, mask, *_ = launch_in_every_order(
            "dropout.cu", "dropout_forward", blank.size,
            kept.store(x), kept.store(0 * x), blank, *ints(n, size), *arguments, **run,
        )  # fmt: skip
        np.testing.assert_array_equal(y, wanted)
        bits = np.unpackbits(mask, axis=1, bitorder="little")
        np.testing.assert_array_equal(bits[:, :size], keep)
        *_, dx = launch_in_every_order(
            "dropout.cu", "dropout_backward", blank.size,
            kept.store(x), mask, kept.store(0 * x), *ints(n, size), factor, **run,
        )  # fmt: skip
        np.testing.assert_array_equal(dx, wanted)


def test_dropout_propagates_nan() -> None:
    x, mask = np.full((1, 4), np.nan, np.float32), np.zeros((1, 1), np.uint8)
    args = x, mask, np.zeros_like(x), *ints(1, 4), np.float32(2.0)
    assert np.isnan(launch("dropout.cu", "dropout_backward", 4, *args)[2]).all()


def test_dropout_is_a_layer_of_the_reference() -> None:
    """`dropout_keep`, with which the kernel is compared, is also used by the reference."""
    layer, n, size = Dropout(0.3), 3, 13
    node = node_of(layer, (1, 1, size))
    x = np.ones((n, 1, 1, size))
    arrays = {"x": x, "y": 0 * x, "factor": 0 * x}
    samples = np.arange(n)
    operation_of(node.layer)(Group((node,)), arrays).forward(
        Context(seed=9, n=n, step=2, samples=samples)
    )
    keep = dropout_keep(0.3, size, seed=9, step=2, layer=node.index, samples=samples)
    np.testing.assert_array_equal(arrays["y"].reshape(n, size) > 0, keep)


# Unpacking of staged batches.


@by_kept
@pytest.mark.parametrize(
    "shape", tiered([((1, 1, 1),), ((3, 3, 35),), ((2, 5, 64),), ((1, 130, 3),)], [((3, 3, 35),)])
)
@pytest.mark.parametrize(("loss", "always", "taken"), [(1.0, 0, 1), (np.nan, 0, 0), (np.nan, 1, 1)])
def test_a_staged_batch_is_unpacked(
    shape: tuple[int, int, int], loss: float, always: int, taken: int, kept: Kept
) -> None:
    """Images are transposed, words copied; nothing changes if the previous loss was not finite."""
    x, words = spread(1, *shape), np.arange(1, 11, dtype=np.uint32)
    blank = np.zeros((shape[0], shape[2], shape[1]), np.float32)
    results = launch_in_every_order(
        "unpack_batch.cu", "unpack_batch", max(x.size, 4),
        x, kept.store(blank), *ints(*shape), words, 0 * words, *ints(10), words[:6],
        0 * words[:6], *ints(6), words[:9], 0 * words[:9], *ints(9), words[:6],
        0 * words[:6], np.float32([loss]), *ints(always),
        PRECISION=kept.precision,
    )  # fmt: skip
    turned = kept.round(x.transpose(0, 2, 1))
    np.testing.assert_array_equal(as_numbers(results[1]), taken * turned)
    for source, target in ((2, 3), (4, 5), (6, 7), (8, 9)):
        np.testing.assert_array_equal(results[target], taken * results[source])
