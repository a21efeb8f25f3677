"""Convolutions by windows of maps on the emulator: every tile to cut them, at odd shapes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dptrain.api import make_replica
from dptrain.backends.cuda import (
    convolution,
    halo_convolution,
    implicit_gemm_candidates,
    implicit_gemm_tiles,
)
from dptrain.backends.cuda.halo_convolution import HaloConvolution
from dptrain.backends.cuda.halo_tiles import InputView, supports_halo_tiles
from dptrain.backends.cuda.hardware import VECTOR_BYTES
from dptrain.backends.cuda.implicit_gemm_cost import select_implicit_gemm_tile
from dptrain.backends.cuda.implicit_gemm_tiles import ImplicitGemmTile
from dptrain.backends.replica import Replica
from dptrain.network import (
    Conv2d,
    Dense,
    Dropout,
    Flatten,
    MaxPool2d,
    MeanSquaredError,
    Network,
    ReLU,
    get_network,
)
from dptrain.plan.random import dropout_keep
from tests.emulator.emulator import Emulator
from tests.unit.backends import test_cuda_backend as whole
from tests.unit.backends.test_cuda_backend import assert_close, rounding
from tests.unit.backends.twin import ROUNDOFFS

# Pooling leaves out a column; patches of the third convolution are larger than its maps, and of an
# even width, so that maps have more zeros behind them than before; 96 filters are a tile and a
# half.
WIDE = Network(
    (3, 6, 7),
    [
        Conv2d(32), ReLU(), Conv2d(96, padding="valid"), ReLU(), MaxPool2d(2), Dropout(0.25),
        Conv2d(32, (3, 4), padding="same"), ReLU(), Conv2d(32, 2, padding="full"), Flatten(),
        Dense(3),
    ],
    name="wide",
)  # fmt: skip


CUTS = (
    # holders, ring, strip, lines, segments, teams, shares, chunks
    (0, 0, True, 2, 1, 2, 1, 1),
    (0, 0, False, 3, 2, 1, 2, 2),
    (0, 0, True, 4, 1, 3, 1, 2),
    (1, 3, True, 4, 2, 1, 1, 2),
    (3, 0, False, 1, 1, 1, 1, 1),
    (2, 0, True, 2, 1, 1, 1, 1),
)
"""Of slides: each tile of sharing work, strips and lines, lines that are left over."""


def cut(tile: ImplicitGemmTile) -> tuple[int, ...]:
    return (
        tile.persistent_groups, tile.weight_stages, tile.pixel_tile.strip, tile.pixel_tile.lines,
        tile.pixel_tiles, tile.warp_groups, tile.k_warp_groups, tile.channel_chunks,
    )  # fmt: skip


def sharing(tile: ImplicitGemmTile) -> tuple[int, ...]:
    return tile.k_warp_groups, tile.pixel_tiles, tile.warp_groups, tile.channel_chunks


def most_like(wanted: tuple[int, ...], facts: Callable[[ImplicitGemmTile], tuple[int, ...]]) -> Any:
    """`select_implicit_gemm_tile` that whose tile has the `facts` nearest to `wanted`."""

    def slide(
        view: InputView, precision: str, samples: int, *, max_shared_bytes: int, **known: Any
    ) -> Any:
        return min(
            implicit_gemm_candidates.implicit_gemm_candidates(view, precision, **known),
            key=lambda tile: [abs(a - b) for a, b in zip(facts(tile), wanted, strict=True)],
        )

    return slide


@pytest.fixture
def in_random_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks and threads are, on an emulator that reports races."""
    emulator = Emulator(seed=5)
    monkeypatch.setattr("dptrain.backends.cuda.backend.open_device", lambda rank: emulator)


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
@pytest.mark.parametrize("number", range(len(CUTS)))
def test_every_way_gives_the_same(
    number: int, precision: str, in_random_order: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside products that gather their patches, which round the same factors.

    A value may be rounded the other tile where sums in another order differ, in each layer, there
    and back. Gradients of the last biases are sums over samples that nearly cancel; those of
    weights round dz before they scale it by what dropout keeps, products that gather behind it.
    """
    gathered = gathering(5, precision, monkeypatch)
    monkeypatch.setattr(halo_convolution, "select_implicit_gemm_tile", most_like(CUTS[number], cut))
    # So few blocks that they go from tile to tile, where they do.
    monkeypatch.setattr(implicit_gemm_tiles, "NUM_MULTIPROCESSORS", 1)
    ours = make_replica(WIDE, "cuda", 5, precision=precision)
    assert sum(name.endswith("packed") for name in ours.plan.buffers) == 3
    tolerance = rounding(WIDE, 5) + 4 * ROUNDOFFS[precision]
    for n in (5, 2):
        assert_close(whole.step(ours, n, 0), whole.step(gathered, n, 0), tolerance)
        for name, value in gathered.gradients.items():
            assert_close(ours.gradients[name], value, tolerance, name)


@pytest.mark.parametrize(
    "wanted", [(1, 1, 3, 2), (1, 3, 2, 1), (1, 4, 1, 1), (2, 5, 1, 1), (4, 1, 1, 2)], ids=str
)
@pytest.mark.parametrize("filters", [32, 96])
def test_lanes_that_share_random_numbers_drop_what_is_to_be_dropped(
    filters: int, wanted: tuple[int, ...], in_random_order: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The masks of `dropout_keep`; all outputs are 1 before.

    Two lanes share a block of random numbers, with 32 filters four. They take turns in odd and even
    numbers, not all of which a team's segments have; the last segments are those of no sample.
    """
    monkeypatch.setattr(halo_convolution, "select_implicit_gemm_tile", most_like(wanted, sharing))
    layers = [Conv2d(32), ReLU(), Conv2d(filters), ReLU(), MaxPool2d(2), Dropout(0.37), Flatten()]
    network = Network((1, 7, 11), layers, MeanSquaredError())
    seed, step, samples = 2**40 + 17, 2**31 + 5, np.array([7, 2**33 + 1])
    replica = make_replica(network, "cuda", 3, precision="tf32", seed=seed)
    assert "conv2+relu2+pool1+dropout1.forward" in {stage.name for stage in replica.plan.stages}
    replica.parameters["conv2.weight"] = np.zeros((filters, 32, 3, 3))
    replica.parameters["conv2.bias"] = np.ones(filters)
    node = next(node for node in network.nodes if isinstance(node.layer, Dropout))
    x, size = np.ones((2, 1, 7, 11), np.float32), math.prod(node.output_shape)
    replica.forward_backward(x, np.zeros((2, size)), samples=samples, step=step)
    keep = dropout_keep(0.37, size, seed=seed, step=step, layer=node.index, samples=samples)
    height, width = node.output_maps[1:]
    expected = keep.reshape(2, height, width, filters).transpose(0, 3, 1, 2).reshape(2, size)
    factor = np.float32(1 / (1 - 0.37))
    np.testing.assert_array_equal(replica.output(), expected * factor)


class Mapping(Emulator):
    """A device that has tensor maps, and keeps what kernels are to be compiled with."""

    def __init__(self) -> None:
        super().__init__(specializes=True)
        self.boxes: list[tuple[tuple[int, ...], str]] = []
        self.seen: dict[str, list[dict[str, int]]] = {}

    def tensor_map(self, maps: Any, shape: Any, box: Any, kind: str, **_: Any) -> np.void:
        self.boxes.append((tuple(box), kind))
        known: np.void = np.void(bytes(128))
        return known

    def function(self, file: str, name: str, **defines: int) -> Any:
        self.seen.setdefault(file, []).append({**defines, "maps": len(self.boxes)})
        return lambda *args, **known: None


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
@pytest.mark.parametrize("number", range(len(CUTS)))
def test_boxes_are_as_large_as_kernels_take_them_for(
    number: int, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that waits for other bytes than come would never end.

    As the kernels work it out: rows of windows, columns that their segments look at, or whole rows
    of these. Behind a rectifier alone windows are made of what threads read, so there are no maps.
    """
    device = Mapping()
    monkeypatch.setattr("dptrain.backends.cuda.backend.open_device", lambda rank: device)
    monkeypatch.setattr(halo_convolution, "select_implicit_gemm_tile", most_like(CUTS[number], cut))
    make_replica(WIDE, "cuda", 5, precision=precision)
    run = 4 if precision == "tf32" else 8
    found = set()
    for back, file in enumerate(("conv2d_forward_halo.cu", "conv2d_backward_input_halo.cu")):
        for d in device.seen[file]:
            mapped, undone = d.get("TENSOR_MAPS", 0), back and d["EPILOGUE"] == 2
            assert mapped == (
                0 if back and d["EPILOGUE"] == 1 else 1 if not undone else 2 * d["PERSISTENT"]
            )
            rows = d["PIXEL_TILE_LINES"] * d["LINES_IN_M"] + d["FIXED_R"] - 1
            width = d["FIXED_WIDTH" if back else "FIXED_OUT_WIDTH"] + d["FIXED_S"] - 1
            each = d["FIXED_FILTERS" if back else "FIXED_CHANNELS"] // d["CHANNEL_CHUNKS"]
            if undone:
                box = 1, rows // 2 + 1, d["CROPPED_WIDTH"] // 2 + 1, each
            elif d["CROPPED_WIDTH"]:
                box = 1, rows, d["CROPPED_WIDTH"], d["SLAB_PACKS"] * run
            else:
                box = 1, 1, width, d["SLAB_PACKS"] * run
            boxes = device.boxes[d["maps"] - mapped : d["maps"]]
            assert boxes == [(box, precision), (box, "marks")][:mapped]
            found.add(mapped)
    assert found >= {0, 1}


def gathering(n: int, precision: str, monkeypatch: pytest.MonkeyPatch) -> Replica:
    """A replica of `WIDE` without windows."""
    with monkeypatch.context() as patch:
        patch.setattr(convolution, "select_wgrad_tile", lambda *_: None)
        patch.setattr(HaloConvolution, "supports", lambda group, setting: False)
        return make_replica(WIDE, "cuda", n, precision=precision)


def test_blocks_with_little_shared_memory_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    gathered = gathering(3, "tf32", monkeypatch)
    monkeypatch.setattr(Emulator, "shared_bytes", 1 << 8)
    ours = make_replica(WIDE, "cuda", 3, precision="tf32")
    assert whole.step(ours, 3, 0) == whole.step(gathered, 3, 0)
    for name, value in gathered.gradients.items():
        assert (ours.gradients[name] == value).all(), name


VIEWS = [
    InputView.forward(node)
    for name in ("cifar", "solar", "model2", "model-large")
    for node in get_network(name).nodes[1:]
    if isinstance(node.layer, Conv2d)
] + [InputView(7, 5, 32, 1, 0, 8, 5, 32, 3, 2)]


@pytest.mark.parametrize(
    ("layer", "precision", "expected"),
    [
        (Conv2d(64, 5), "bf16", True), (Conv2d(64, 5), "fp32", False),
        (Conv2d(64, stride=2), "tf32", False), (Conv2d(48), "tf32", False),
        (Conv2d(32, padding="full"), "tf32", True), (Conv2d(32, 2, padding=2), "tf32", False),
    ],
)  # fmt: skip
def test_wide_layers_of_stride_one_have_windows(
    layer: Conv2d, precision: str, expected: bool
) -> None:
    node = Network((32, 8, 8), [layer, Flatten(), Dense(2)]).nodes[0]
    assert supports_halo_tiles(InputView.forward(node), precision, layer.strides) == expected


def test_maps_without_room_are_gathered() -> None:
    wide = Network((1024, 640, 640), [Conv2d(1024), Flatten(), Dense(2)]).nodes[0]
    assert select_implicit_gemm_tile(InputView.forward(wide), "tf32", 64) is None
    assert select_implicit_gemm_tile(VIEWS[0], "bf16", 1) is not None


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("view", VIEWS, ids=str)
def test_segments_cover_the_map_and_windows_their_segments(
    view: InputView, pooled: bool, precision: str
) -> None:
    found = list(implicit_gemm_candidates.implicit_gemm_candidates(view, precision, pooled=pooled))
    assert found
    height, width = view.out_height, view.out_width
    needed = height // 2 * 2 * (width // 2 * 2) if pooled else height * width
    for tile in found[:: max(len(found) // 40, 1)]:
        assert tile.tiles_per_sample * tile.pixel_tile.columns * tile.lines_in_m >= needed
        assert tile.k_steps % (tile.k_warp_groups * tile.channel_chunks * tile.stage_steps) == 0
        assert (
            tile.blocks_per_sm * tile.threads * (tile.pixel_tiles * tile.pixel_tile.columns // 2)
            <= 1 << 16
        )
        # Barriers lie behind windows, and behind sums that teams share.
        sums = (
            tile.threads
            * tile.pixel_tiles
            * (tile.pixel_tile.columns // 8)
            * 16
            * (tile.k_warp_groups > 1)
        )
        held = (
            (tile.weight_stages * tile.stage_steps or tile.k_steps) * 128 * 16
            if tile.persistent
            else 0
        )
        come = max(tile.persistent_groups, 1) * tile.halo_bytes
        barriers = tile.shared_bytes - held - max(come, sums)
        assert barriers >= 16 * max(tile.persistent_groups, 1) + (
            16 * max(tile.weight_stages, 1) if tile.persistent else 0
        )
        count = tile.warp_groups * tile.pixel_tiles
        if tile.cropped:
            # Side by side.
            assert tile.tiles_across % count == 0
            assert tile.halo_rows * tile.halo_pitch <= tile.slab_pixels
            continue
        for first in range(0, 3 * tile.tiles_per_sample, count):
            rows = [
                i // tile.tiles_per_sample * view.sample_rows
                + i
                % tile.tiles_per_sample
                // tile.tiles_across
                * tile.pixel_tile.lines
                * tile.lines_in_m
                for i in range(first, first + count)
            ]
            needed_rows = (
                max(rows) - min(rows) + tile.pixel_tile.lines * tile.lines_in_m + view.r - 1
            )
            # The last eights of columns begin in the last row, and end behind it.
            assert needed_rows * tile.view.row_pitch + view.s - 1 + 8 <= tile.slab_pixels


def test_few_samples_share_sums_and_many_do_not() -> None:
    cifar = VIEWS[0]
    few, many = (select_implicit_gemm_tile(cifar, "tf32", n) for n in (32, 2048))
    assert few is not None
    assert many is not None
    assert few.k_warp_groups > many.k_warp_groups == 1


def test_many_samples_keep_weights_where_there_is_room() -> None:
    solar = VIEWS[1]
    few, many = (select_implicit_gemm_tile(solar, "bf16", n, pooled=True) for n in (32, 2048))
    small = select_implicit_gemm_tile(solar, "bf16", 2048, pooled=True, max_shared_bytes=48 << 10)
    assert few is not None
    assert many is not None
    assert small is not None
    assert few.persistent_groups == 0 < many.persistent_groups
    assert many.weight_stages == 0 < many.k_steps
    assert small.shared_bytes <= 48 << 10 < many.shared_bytes


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
@pytest.mark.parametrize("view", VIEWS, ids=str)
def test_boxes_of_pooled_maps_cover_their_windows(view: InputView, precision: str) -> None:
    """Wherever these begin, at an odd line or column, too."""
    found = [
        tile
        for tile in implicit_gemm_candidates.implicit_gemm_candidates(view, precision, epilogue=2)
        if tile.persistent
    ]
    for tile in found[:: max(len(found) // 20, 1)]:
        assert tile.cropped
        _, lines, columns, channels = tile.box
        raw = tile.halo_bytes - tile.chunk_packs * tile.slab_pixels * VECTOR_BYTES
        runs = lines * columns * channels * tile.element_bytes // VECTOR_BYTES
        assert runs * VECTOR_BYTES + runs * VECTOR_BYTES // tile.element_bytes <= raw
        for odd in (0, 1):
            assert lines * 2 - odd >= tile.halo_rows
            assert columns * 2 - odd >= tile.halo_pitch
