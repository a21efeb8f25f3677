"""Forward convolutions of few input channels on the emulator: every tile configuration."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from dptrain.api import make_replica
from dptrain.backends.cuda.convolution.few_channels import few_channel_tiles
from dptrain.backends.cuda.convolution.few_channels.few_channel_tiles import (
    MIN_BLOCKS_PER_SM,
    FewChannelTile,
    few_channel_candidates,
    select_few_channel_tile,
)
from dptrain.backends.cuda.convolution.halo.halo_tiles import InputView
from dptrain.backends.cuda.dense.gemm_tiles import ceil_div
from dptrain.backends.cuda.device.hardware import (
    DEFAULT_LIMITS,
    DEFAULT_SHARED_BYTES,
    ELEMENT_BYTES,
)
from dptrain.backends.cuda.geometry import GEOMETRY_MACROS, geometry
from dptrain.network import (
    Conv2d,
    Dense,
    Dropout,
    Flatten,
    MaxPool2d,
    Network,
    Node,
    ReLU,
    get_network,
)
from tests.emulator.emulator import Emulator
from tests.tiers import tiered
from tests.unit.backends.cuda import test_cuda_backend as whole
from tests.unit.backends.cuda.test_cuda_backend import assert_close, rounding
from tests.unit.backends.pytorch_reference import ROUNDOFFS
from tests.unit.cuda.launching import BF16, FP32, ints, launch_in_every_order

NO_MAXIMUM = 255

FEW_BLOCKS = replace(DEFAULT_LIMITS, multiprocessors=1)
"""So few that blocks iterate over strips."""


def node(shape: tuple[int, int, int], layer: Conv2d) -> Node:
    return Network(shape, [layer, Flatten(), Dense(2)]).nodes[0]


CASES = {
    # Rows of patches have 15, 9 (27 words in three dense rows), 4 and 6 elements.
    "5x5, three channels": (node((3, 7, 11), Conv2d(64, 5, padding="same")), False),
    "5x5, pooled": (node((3, 7, 11), Conv2d(32, 5, padding="same")), True),
    "one channel, two tiles of filters": (node((1, 6, 20), Conv2d(48, padding="valid")), False),
    "one channel, pooled": (node((1, 9, 10), Conv2d(32, padding="valid")), True),
    "two channels, 2x3, pooled": (node((2, 8, 9), Conv2d(16, (2, 3), padding="same")), True),
    "far apart": (
        node((3, 11, 10), Conv2d(16, 3, stride=(2, 3), padding=1)), False,
    ),
    "3x4, the last patch at an odd place": (
        node((3, 5, 8), Conv2d(16, (3, 4), stride=(2, 1), padding="same")), False,
    ),
    "16 channels, pooled": (node((16, 5, 8), Conv2d(32, padding="same")), True),
    "every place a pixel reaches": (node((3, 3, 5), Conv2d(16, (3, 2), padding="full")), False),
}  # fmt: skip


def some(
    view: InputView, strides: tuple[int, int], precision: str, *, pooled: bool
) -> list[FewChannelTile]:
    """Return the first and last candidate, and a tile whose warps and lines divide nothing."""
    first, *_, last = few_channel_candidates(view, strides, precision, FEW_BLOCKS, pooled=pooled)
    odd = replace(
        first,
        warp_filters=16,
        filter_warps=1,
        pixel_warps=2,
        strip_lines=(1 + pooled) * 3,
        octets=1,
    )
    return [first, last, odd]


def expected(
    node: Node, x: NDArray[Any], w: NDArray[Any], b: NDArray[Any], *, pooled: bool
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the output after ReLU (N, Ho, Wo, K) in float64, and the argmax of each window."""
    layer: Any = node.layer
    pads = layer.pads(node.input_shape)
    padded = np.pad(x.astype(np.float64), ((0, 0), *pads, (0, 0)))
    patches = np.lib.stride_tricks.sliding_window_view(padded, layer.window, (1, 2))
    down, across = layer.strides
    z = np.einsum("nhwcrs,rsck->nhwk", patches[:, ::down, ::across], w.astype(np.float64)) + b
    if not pooled:
        return np.maximum(z, 0), np.zeros(0)
    n, height, width, k = z.shape
    cells = z[:, : height // 2 * 2, : width // 2 * 2]
    cells = cells.reshape(n, height // 2, 2, width // 2, 2, k).transpose(0, 1, 3, 5, 2, 4)
    members = cells.reshape(*cells.shape[:4], 4)
    largest = members.max(-1)
    return np.maximum(largest, 0), np.where(largest > 0, members.argmax(-1), NO_MAXIMUM)


@pytest.mark.parametrize(
    ("precision", "case"),
    tiered(
        itertools.product(ELEMENT_BYTES, CASES), [("tf32", "far apart"), ("bf16", "5x5, pooled")]
    ),
)
def test_every_tile_is_exact(case: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads and blocks in every order; a few blocks iterate over all strips.

    Factors are eighths (in memory slightly less, so that rounding yields eighths). Sums of their
    products are multiples of 1/64 that float32 represents exactly, so only y is rounded.
    """
    node, pooled = CASES[case]
    layer: Any = node.layer
    view, (k, *_), c = InputView.forward(node), node.output_shape, node.input_shape[0]
    kept = BF16 if precision == "bf16" else FP32
    rng, n = np.random.default_rng(3), 3
    x, w, b = (
        rng.integers(-8, 9, size).astype(np.float32) / 8
        for size in ((n, *node.input_shape[1:], c), (*layer.window, c, k), (k,))
    )
    y, marks = expected(node, x, w, b, pooled=pooled)
    less = np.float32(1 - 2.0 ** -(13 if precision == "tf32" else 10))
    memory = x * less if precision == "tf32" else kept.store(x)
    mark, numbers = np.uint8 if pooled else memory.dtype, geometry(node, layer, layer.window)
    common = {
        "PRECISION": 2 if precision == "bf16" else 1, "EPILOGUE": 1 + pooled, "IN_VECTOR": 1,
        "OUT_VECTOR": 16 // ELEMENT_BYTES[precision],
        **dict(zip(GEOMETRY_MACROS, map(int, numbers), strict=True)),
    }  # fmt: skip
    for tile in some(view, layer.strides, precision, pooled=pooled):
        grid = tile.grid(n * tile.strips_per_sample, k)
        got, which = launch_in_every_order(
            "conv2d_forward_few_channels.cu", "conv2d_forward_few_channels",
            grid[0] * tile.block[0],
            *[memory, w * less, b, np.zeros(y.shape, memory.dtype), np.zeros_like(y, mark)],
            *ints(n), *numbers, block=tile.block[0], columns=grid[1], **common, **tile.defines,
        )[3:]  # fmt: skip
        np.testing.assert_array_equal(got, kept.store(y), str(tile))
        if pooled:
            np.testing.assert_array_equal(which, marks, str(tile))


LAYERS = [
    Conv2d(32, 5, padding="same"), ReLU(), MaxPool2d(2), Dropout(0.25), Flatten(), Dense(3),
]  # fmt: skip


@pytest.mark.more
@pytest.mark.parametrize("precision", ELEMENT_BYTES)
def test_a_network_trains_as_with_gathering_kernels(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums have another order, so some values are rounded differently."""
    net = Network((3, 9, 10), LAYERS, name="narrow")
    monkeypatch.setattr(few_channel_tiles, "select_few_channel_tile", lambda *_, **__: None)
    gathered = make_replica(net, "cuda", 5, precision=precision)
    tiles = some(InputView.forward(net.nodes[0]), (1, 1), precision, pooled=True)
    monkeypatch.setattr(few_channel_tiles, "select_few_channel_tile", lambda *_, **__: tiles[1])
    emulator = Emulator(seed=7)
    monkeypatch.setattr("dptrain.backends.cuda.backend.open_device", lambda rank: emulator)
    ours = make_replica(net, "cuda", 5, precision=precision)
    tolerance = rounding(net, 5) + 2 * ROUNDOFFS[precision]
    for n in (5, 2):
        assert_close(whole.step(ours, n, 0), whole.step(gathered, n, 0), tolerance)
        for name, value in gathered.gradients.items():
            assert_close(ours.gradients[name], value, tolerance, name)


@pytest.mark.parametrize("precision", ELEMENT_BYTES)
@pytest.mark.parametrize("case", CASES)
def test_rows_contain_all_reads_and_strips_cover_the_output(case: str, precision: str) -> None:
    node, pooled = CASES[case]
    layer: Any = node.layer
    view, (down, across) = InputView.forward(node), layer.strides
    unit, each = 1 + pooled, 4 // ELEMENT_BYTES[precision]
    for tile in few_channel_candidates(
        view, layer.strides, precision, DEFAULT_LIMITS, pooled=pooled
    ):
        assert tile.strips_per_sample * tile.strip_lines >= view.out_height // unit * unit
        columns = tile.units_across * tile.octets * 8
        assert columns >= view.out_width // unit * unit
        # In bf16 a patch that starts at an odd element starts a word of the second copy.
        last = (columns - 1) * across * tile.pixel_pitch
        row = (view.s - 1) * tile.pixel_pitch + view.channels
        assert last % each < tile.row_copies
        assert tile.row_pitch >= last // each + ceil_div(row, each)
        assert tile.input_rows >= (tile.strip_lines - 1) * down + view.r
        assert tile.patch_row_words * each >= view.s * view.channels
        assert tile.k_steps * 8 >= view.r * tile.patch_row_words
        assert tile.strip_bytes <= DEFAULT_SHARED_BYTES
        assert tile.blocks_per_sm * math.prod(tile.block) * tile.registers <= 1 << 16
        for strips in (1, 7, 10**6):
            blocks, filter_tiles, _ = tile.grid(strips, view.filters)
            assert 1 <= blocks <= strips
            assert filter_tiles * tile.warp_filters * tile.filter_warps == view.filters


@pytest.mark.parametrize("precision", ELEMENT_BYTES)
@pytest.mark.parametrize("name", ["cifar", "solar", "model0", "model1", "model-large"])
def test_first_layers_have_a_tile_that_fills_the_gpu(name: str, precision: str) -> None:
    node = get_network(name).nodes[0]
    pooled = name.startswith("model")
    few, many = (
        select_few_channel_tile(
            InputView.forward(node), (1, 1), precision, n, DEFAULT_LIMITS, pooled=pooled
        )
        for n in (32, 2048)
    )
    assert few is not None
    assert many is not None
    assert many.strip_lines >= few.strip_lines
    assert 32 * few.strips_per_sample * few.filter_tiles >= MIN_BLOCKS_PER_SM * 132


@pytest.mark.parametrize(
    ("shape", "layer", "samples", "expected"),
    [
        ((3, 8, 8), Conv2d(16), 1, True), ((3, 8, 8), Conv2d(24), 512, False),
        ((16, 16, 16), Conv2d(32), 32, False), ((16, 16, 16), Conv2d(32), 512, True),
        ((32, 16, 16), Conv2d(16), 512, False), ((3, 12, 12), Conv2d(16, 11), 512, False),
    ],
)  # fmt: skip
def test_the_kernel_is_used_for_few_channels_and_many_filters(
    shape: tuple[int, int, int], layer: Conv2d, samples: int, expected: bool
) -> None:
    """And not for more weights than a thread has registers for."""
    view = InputView.forward(node(shape, layer))
    limits = DEFAULT_LIMITS
    assert (select_few_channel_tile(view, (1, 1), "tf32", samples, limits) is not None) == expected
    assert select_few_channel_tile(view, (1, 1), "fp32", samples, limits) is None
