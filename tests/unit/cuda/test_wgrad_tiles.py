"""Weight gradients over halo tiles on the emulator, compared with float64."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from dptrain.backends.cuda.convolution.halo.halo_tiles import InputView
from dptrain.backends.cuda.convolution.halo.wgrad_tiles import (
    LINE_SAMPLES,
    MIN_PIXELS,
    WgradTile,
    rank_wgrad_tiles,
    supports_wgrad_tiles,
    wgrad_candidates,
)
from dptrain.backends.cuda.dense.gemm_tiles import ceil_div, vector_elements
from dptrain.backends.cuda.device.hardware import DEFAULT_LIMITS, DEVICES, ELEMENT_BYTES
from dptrain.network import Conv2d, get_network
from tests.emulator.emulator import Emulator
from tests.tiers import tiered
from tests.unit.backends.cuda.gpu_algorithms import best
from tests.unit.cuda.launching import BF16, FP32, ints

NO_EPILOGUE, RELU, POOLING = range(3)
SAMPLES, FACTOR = 2, 1.25
PRECISIONS = ("fp32", "tf32", "bf16")
"""Values of the macro PRECISION."""

ODD = InputView(9, 11, 32, 0, 0, 7, 9, 64, 3, 3)
"""No padding; pooling drops a row and a column."""
WIDE_TAPS = InputView(5, 6, 64, 2, 2, 5, 6, 32, 5, 5)
"""Filter rows that different blocks compute."""
PARTLY = InputView(6, 5, 32, 1, 1, 7, 6, 96, 2, 2)
"""The output is larger than the input; a tile and a half of filters."""
EVEN = InputView(7, 5, 64, 1, 1, 7, 5, 16, 3, 4)
FEW = InputView(6, 8, 16, 1, 1, 6, 8, 32, 3, 3)
COLOURS = InputView(9, 13, 3, 2, 2, 9, 13, 64, 5, 5)
GREY = InputView(10, 9, 1, 0, 0, 8, 7, 32, 3, 3)
PIXEL = InputView(3, 3, 32, 0, 0, 1, 1, 64, 3, 3)

# Layer, epilogue, precision, and the tile with these channels, tap rows, strip lines, contiguous
# lines, quads over several lines, K groups and buffers.
CASES: list[tuple[InputView, int, str, tuple[int, int, int, int, bool, int, int]]] = [
    (ODD, NO_EPILOGUE, "bf16", (32, 3, 4, 2, False, 2, 2)),
    (ODD, POOLING, "bf16", (32, 3, 4, 1, False, 2, 2)),
    (ODD, RELU, "tf32", (32, 3, 3, 1, False, 1, 1)),
    (ODD, POOLING, "tf32", (32, 3, 2, 1, False, 2, 2)),
    (WIDE_TAPS, RELU, "bf16", (64, 1, 5, 1, False, 1, 2)),
    (WIDE_TAPS, NO_EPILOGUE, "tf32", (64, 1, 2, 1, True, 2, 1)),
    (PARTLY, RELU, "bf16", (32, 2, 7, 7, False, 1, 2)),
    (PARTLY, POOLING, "tf32", (32, 2, 2, 1, True, 1, 2)),
    (EVEN, POOLING, "bf16", (64, 1, 6, 1, False, 2, 1)),
    (EVEN, NO_EPILOGUE, "tf32", (32, 2, 5, 1, False, 2, 2)),
    (FEW, POOLING, "bf16", (16, 3, 2, 1, False, 2, 2)),
    (FEW, POOLING, "tf32", (16, 3, 6, 1, False, 1, 1)),
    (COLOURS, NO_EPILOGUE, "bf16", (16, 5, 4, 1, False, 1, 2)),
    (COLOURS, POOLING, "tf32", (16, 5, 4, 1, False, 1, 2)),
    (GREY, RELU, "bf16", (16, 3, 8, 1, False, 2, 1)),
    (GREY, RELU, "tf32", (16, 3, 1, 1, True, 1, 2)),
    (PIXEL, NO_EPILOGUE, "bf16", (32, 3, 1, 1, False, 1, 2)),
    (PIXEL, NO_EPILOGUE, "tf32", (32, 3, 1, 1, False, 2, 1)),
    (ODD, RELU, "fp32", (16, 3, 3, 1, False, 1, 2)),
    (WIDE_TAPS, NO_EPILOGUE, "fp32", (32, 1, 2, 1, True, 2, 1)),
    (PARTLY, POOLING, "fp32", (32, 1, 2, 1, True, 1, 2)),
    (COLOURS, POOLING, "fp32", (16, 5, 4, 1, False, 1, 1)),
]


def key(tile: WgradTile) -> tuple[int, int, int, int, bool, int, int]:
    return (
        tile.channels, tile.tap_rows, tile.strip_lines, tile.contiguous_lines,
        tile.quad_rows_apart > 0, tile.k_groups, tile.buffers,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("view", "epilogue", "precision", "wanted"),
    tiered(CASES, [CASES[0], CASES[7], CASES[18]]),
    ids=str,
)
def test_weight_gradients_equal_float64(
    view: InputView,
    epilogue: int,
    precision: str,
    wanted: tuple[int, int, int, int, bool, int, int],
) -> None:
    tile = next(
        tile
        for tile in wgrad_candidates(view, precision, epilogue, DEFAULT_LIMITS)
        if key(tile) == wanted
    )
    check_gradients(tile, view, (1, 1), precision, epilogue)


@pytest.mark.parametrize(
    ("epilogue", "precision"),
    tiered(itertools.product([NO_EPILOGUE, RELU, POOLING], ["tf32", "bf16"]), [(RELU, "bf16")]),
)
@pytest.mark.parametrize(
    ("view", "strides"),
    [
        (InputView(9, 11, 20, 1, 1, 9, 11, 44, 3, 3), (1, 1)),
        (InputView(9, 12, 3, 2, 2, 5, 6, 32, 7, 7), (2, 2)),
        (InputView(8, 9, 12, 0, 0, 4, 9, 6, 2, 1), (2, 1)),
    ],
    ids=str,
)
def test_any_channels_filters_and_strides(
    view: InputView, strides: tuple[int, int], epilogue: int, precision: str
) -> None:
    found = list(wgrad_candidates(view.folded(strides), precision, epilogue, DEFAULT_LIMITS))
    check_gradients(found[len(found) // 2], view, strides, precision, epilogue)


NARROW = InputView(4, 4, 32, 1, 1, 4, 4, 64, 3, 3)
UNEVEN = InputView(5, 3, 64, 1, 2, 4, 4, 16, 4, 4)
TINY = InputView(2, 2, 32, 1, 0, 2, 1, 32, 3, 2)
HALVED = InputView(7, 8, 20, 1, 1, 4, 4, 44, 3, 3)


@pytest.mark.parametrize("precision", tiered(["fp32", "tf32", "bf16"], ["bf16"]))
@pytest.mark.parametrize(
    ("view", "strides", "samples"),
    tiered(
        [(NARROW, (1, 1), 5), (UNEVEN, (1, 1), 9), (TINY, (1, 1), 3), (HALVED, (2, 2), 7)],
        [(TINY, (1, 1), 3)],
    ),
    ids=str,
)
def test_strips_of_several_samples(
    view: InputView, strides: tuple[int, int], samples: int, precision: str
) -> None:
    """The last strip lacks samples. Numbers of samples alternate between one and two buffers."""
    found: dict[int, list[WgradTile]] = {}
    for tile in wgrad_candidates(view.folded(strides), precision, RELU, DEFAULT_LIMITS):
        found.setdefault(tile.samples_across, []).append(tile)
    assert list(found) == [1, *(LINE_SAMPLES[precision] if precision == "bf16" else (4, 8))]
    for number, (across, tiles) in enumerate(found.items()):
        tile = tiles[(number * 7 + view.width) % len(tiles)]
        if across > 1:
            check_gradients(tile, view, strides, precision, number % 2, samples)


def check_gradients(
    tile: WgradTile, view: InputView, strides: tuple[int, int], precision: str, epilogue: int,
    n: int = SAMPLES,
) -> None:  # fmt: skip
    """Compute with one strip per part and with one part; blocks and threads in random order.

    Factors are rounded like operands of tensor cores. What remains is the rounding of float32 sums
    of at most 2 · 9 · 13 terms, far below 2e-6.
    """
    rng = np.random.default_rng(3)
    k = view.filters
    unit = 2 if epilogue == POOLING else 1
    outputs = n, view.out_height // unit, view.out_width // unit, k
    x = rng.standard_normal((n, view.height, view.width, view.channels), np.float32)
    dy = rng.standard_normal(outputs, np.float32)
    y = np.maximum(rng.standard_normal(outputs, np.float32), 0.0)
    marks = rng.choice(np.array([0, 1, 2, 3, 255], np.uint8), outputs)
    dz = FACTOR * spread_out(view, epilogue, factors(dy, precision), y, marks)
    dw, db = sums(view, strides, factors(x, precision), dz)
    for part in (1, tile.strips(n)):
        inputs = x, dy, marks if unit == 2 else y
        got = launch(tile, view, strides, precision, epilogue, inputs, part)
        assert np.linalg.norm(got[:-1] - dw) < 2e-6 * np.linalg.norm(dw)
        assert np.linalg.norm(got[-1] - db) < 2e-6 * np.linalg.norm(db)


def factors(x: NDArray[Any], precision: str) -> NDArray[np.float64]:
    """Round operands like tensor cores."""
    if precision == "bf16":
        return BF16.round(x).astype(np.float64)
    if precision == "fp32":
        return np.asarray(x, np.float64)
    bits = np.asarray(x, np.float32).view(np.uint32)
    rounded = bits + 0xFFF + (bits >> 13 & 1) & 0xFFFFE000
    nearest = rounded.astype(np.uint32).view(np.float32)
    return np.where(np.isfinite(x), nearest, x).astype(np.float64)


def spread_out(
    view: InputView, epilogue: int, dy: NDArray[Any], y: NDArray[Any], marks: NDArray[Any]
) -> NDArray[Any]:
    """Return dz, the gradients of all outputs of the convolution."""
    if epilogue != POOLING:
        return dy * (y > 0) if epilogue == RELU else dy
    dz = np.zeros((len(dy), view.out_height, view.out_width, view.filters))
    for member in range(4):
        to = dz[:, member // 2 :: 2, member % 2 :: 2][:, : dy.shape[1], : dy.shape[2]]
        to[...] = dy * (marks == member)
    return dz


def sums(
    view: InputView, strides: tuple[int, int], x: NDArray[Any], dz: NDArray[Any]
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the gradients of weights and bias, summed tap by tap."""
    down, across = strides
    height, width = (view.out_height - 1) * down + 1, (view.out_width - 1) * across + 1
    rows, columns = (
        max(height + view.r - 1, view.height + view.top),
        max(width + view.s - 1, view.width + view.left),
    )
    around = np.zeros((len(x), rows, columns, view.channels))
    around[:, view.top :, view.left :][:, : view.height, : view.width] = x
    dw = [
        np.tensordot(
            around[:, r : r + height : down, s : s + width : across], dz, ((0, 1, 2), (0, 1, 2))
        )
        for r in range(view.r)
        for s in range(view.s)
    ]
    return np.concatenate(dw), dz.sum((0, 1, 2))


def launch(
    tile: WgradTile,
    view: InputView,
    strides: tuple[int, int],
    precision: str,
    epilogue: int,
    inputs: tuple[NDArray[Any], NDArray[Any], NDArray[Any]],
    part: int,
) -> NDArray[Any]:
    """Run the kernel; return the sum of all parts: dw and, in one more row, db."""
    device, kept = Emulator(seed=4), BF16 if precision == "bf16" else FP32
    arrays = []
    for array in inputs:
        values = array if array.dtype == np.uint8 else kept.store(array)
        arrays.append(device.zeros(values.shape, values.dtype))
        device.upload(arrays[-1], values)
    samples, rows = len(inputs[0]), view.r * view.s * view.channels
    count = ceil_div(tile.strips(samples), part)
    gradients = device.zeros((count, rows + 1, view.filters), np.float32)
    device.upload(gradients, np.full(gradients.shape, np.nan, np.float32))
    flat = gradients.reshape(-1)
    function = device.function(
        "conv2d_backward_weight_halo.cu", "conv2d_backward_weight_halo", **tile.defines,
        EPILOGUE=epilogue, PRECISION=PRECISIONS.index(precision),
        IN_VECTOR=vector_elements(view.channels, ELEMENT_BYTES.get(precision, 4)),
        OUT_VECTOR=vector_elements(view.filters, ELEMENT_BYTES.get(precision, 4)),
        FOLDED=int(strides != (1, 1)),
    )  # fmt: skip
    geometry = ints(
        view.height, view.width, view.channels, view.out_height, view.out_width, view.filters,
        view.r, view.s, *strides, view.top, view.left, 1, 1,
    )  # fmt: skip
    function(
        tile.grid(rows, view.filters, count), tile.block,
        [*arrays, np.float32(FACTOR), flat, flat[rows * view.filters :], *ints(samples, part),
         *geometry],
        shared_bytes=tile.shared_bytes,
    )  # fmt: skip
    total: NDArray[Any] = device.download(gradients).astype(np.float64).sum(0)
    return total


VIEWS = [
    (InputView.forward(node), epilogue)
    for name in ("cifar", "solar", "model0", "model2", "model-large")
    for node in get_network(name).nodes
    if isinstance(node.layer, Conv2d)
    for epilogue in (NO_EPILOGUE, POOLING)
]


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
@pytest.mark.parametrize("samples", [1, 32, 2048])
def test_split_k_covers_all_strips_once(samples: int, precision: str) -> None:
    for view, epilogue in VIEWS:
        tile = best(rank_wgrad_tiles(view, precision, (1, 1), epilogue, samples, DEFAULT_LIMITS))
        few = samples * view.out_height * view.out_width < MIN_PIXELS
        first = view.channels % 16 > 0 and epilogue == POOLING and precision == "tf32"
        assert (tile is None) == (few and first)
        if tile is None:
            continue
        config = tile.config(view.filters, samples)
        count, part = config.split_k.count, config.split_k.terms
        assert (count - 1) * part < tile.strips(samples) <= count * part
        # Strips cover all lines, and no strip is superfluous.
        tall = tile.strip_lines * (4 if tile.quad_rows_apart else 1)
        unit = 2 if epilogue == POOLING else 1
        assert (
            (tile.strips_per_sample - 1) * tall
            < view.out_height // unit * unit
            <= tile.strips_per_sample * tall
        )
        kinds, _, _ = tile.grid(0, view.filters)
        assert kinds * tile.tap_rows * tile.channels >= view.r * min(
            view.channels, tile.all_channels
        )


@pytest.mark.parametrize(
    ("view", "precision", "strides", "expected"),
    [
        (ODD, "bf16", (1, 1), True), (ODD, "fp32", (1, 1), True), (ODD, "fp32", (2, 1), False),
        (ODD, "tf32", (2, 1), True),
        (InputView(8, 8, 24, 1, 1, 8, 8, 64, 3, 3), "tf32", (1, 1), True),
        (InputView(8, 8, 64, 1, 1, 8, 8, 24, 3, 3), "tf32", (1, 1), True),
        (InputView(8, 8, 64, 1, 1, 8, 8, 9, 3, 3), "tf32", (1, 1), False),
        (InputView(8, 8, 64, 1, 1, 8, 8, 32, 3, 21), "tf32", (1, 1), False),
    ],
)  # fmt: skip
def test_supported_layers(
    view: InputView, precision: str, strides: tuple[int, int], expected: bool
) -> None:
    assert supports_wgrad_tiles(view.folded(strides), precision, DEFAULT_LIMITS) == expected


def test_fp32_requires_wgmma() -> None:
    for name in ("A100", "H100"):
        assert supports_wgrad_tiles(ODD, "fp32", DEVICES[name]) == (name == "H100")


@pytest.mark.more
@pytest.mark.parametrize(
    ("view", "strides", "epilogue", "precision", "contiguous"),
    [
        (FEW, (1, 1), RELU, "fp32", 1),
        (FEW, (1, 1), RELU, "bf16", 6),
        (ODD, (1, 1), NO_EPILOGUE, "tf32", 1),
        (InputView(10, 12, 3, 2, 2, 10, 12, 64, 5, 5), (1, 1), POOLING, "tf32", 1),
        (InputView(8, 9, 12, 0, 0, 4, 9, 6, 2, 1), (2, 1), NO_EPILOGUE, "bf16", 4),
        (NARROW, (1, 1), RELU, "bf16", -4),
        (NARROW, (1, 1), NO_EPILOGUE, "tf32", -4),
    ],
    ids=str,
)
def test_operands_that_are_not_finite_have_the_results_of_float32(
    view: InputView, strides: tuple[int, int], epilogue: int, precision: str, contiguous: int
) -> None:
    """Sums without such operands stay finite; products with 0 are not left out.

    The last pixel of a line has no product with the first tap. In tf32, the positions after the
    line have one, with zeros. The number is that of contiguous lines or, if negative, of samples.
    """
    rng = np.random.default_rng(3)
    unit = 2 if epilogue == POOLING else 1
    outputs = SAMPLES, view.out_height // unit, view.out_width // unit, view.filters
    x = rng.standard_normal((SAMPLES, view.height, view.width, view.channels), np.float32)
    x[0, 0, -1, 0], x[1, -1, 2, -1] = np.inf, np.nan
    dy = rng.standard_normal(outputs, np.float32)
    y = np.maximum(rng.standard_normal(outputs, np.float32), 0.0)
    marks = rng.choice(np.array([0, 1, 2, 3, 255], np.uint8), outputs)
    dz = FACTOR * spread_out(view, epilogue, factors(dy, precision), y, marks)
    with np.errstate(invalid="ignore"):
        dw, _ = sums(view, strides, factors(x, precision), dz)
        tile = next(
            tile
            for tile in wgrad_candidates(view.folded(strides), precision, epilogue, DEFAULT_LIMITS)
            if contiguous in (tile.contiguous_lines, -tile.samples_across)
        )
        inputs = x, dy, marks if unit == 2 else y
        got = launch(tile, view, strides, precision, epilogue, inputs, tile.strips(SAMPLES))
    assert np.isfinite(dw).any()
    assert not np.isfinite(dw).all()
    np.testing.assert_allclose(got[:-1], dw, rtol=1e-4, atol=1e-4)


def test_inputs_that_exceed_shared_memory_are_gathered() -> None:
    view = InputView(4, 8192, 64, 1, 1, 4, 8192, 64, 3, 3)
    assert best(rank_wgrad_tiles(view, "tf32", (1, 1), NO_EPILOGUE, 64, DEFAULT_LIMITS)) is None
