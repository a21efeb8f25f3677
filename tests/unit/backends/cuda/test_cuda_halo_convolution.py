"""Convolutions over halo tiles on the emulator: all kinds of tile configurations, odd shapes."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from dptrain.api import make_replica
from dptrain.backends import load_backend
from dptrain.backends.cuda.convolution.halo import halo_convolution, implicit_gemm_candidates
from dptrain.backends.cuda.convolution.halo.halo_tiles import InputView, supports_halo_tiles
from dptrain.backends.cuda.convolution.halo.implicit_gemm_candidates import (
    BLOCK_SHAPES,
    PERSISTENT_SHAPES,
    efficient_pixel_tiles,
)
from dptrain.backends.cuda.convolution.halo.implicit_gemm_cost import (
    HALO_LAUNCH_US,
    estimated_cycles,
    rank_implicit_gemm_tiles,
)
from dptrain.backends.cuda.convolution.halo.implicit_gemm_tiles import ImplicitGemmTile
from dptrain.backends.cuda.device.hardware import CYCLES_PER_US, DEFAULT_LIMITS, VECTOR_BYTES
from dptrain.backends.replica import Replica
from dptrain.network import (
    Add,
    Conv2d,
    Dense,
    Dropout,
    Flatten,
    MaxPool2d,
    MeanSquaredError,
    Network,
    NodeSpec,
    ReLU,
    get_network,
)
from dptrain.philox import dropout_keep
from dptrain.plan import make_plan
from dptrain.plan.limits import DeviceLimits
from dptrain.plan.plan import Plan
from tests.emulator.emulator import Emulator
from tests.tiers import tiered
from tests.unit.backends.cuda import test_cuda_backend as whole
from tests.unit.backends.cuda.gpu_algorithms import (
    HALO,
    HALO_GRADIENT,
    WGMMA,
    best,
    exclude,
    prefer,
)
from tests.unit.backends.cuda.test_cuda_backend import assert_close, rounding
from tests.unit.backends.pytorch_reference import ROUNDOFFS
from tests.unit.cuda.launching import as_numbers

# Pooling drops a column. The filter of the third convolution is larger than its input and of even
# width, so the padding is asymmetric. 96 filters are a tile and a half.
WIDE = Network(
    (3, 6, 7),
    [
        Conv2d(32), ReLU(), Conv2d(96, padding="valid"), ReLU(), MaxPool2d(2), Dropout(0.25),
        Conv2d(32, (3, 4), padding="same"), ReLU(), Conv2d(32, 2, padding="full"), Flatten(),
        Dense(3),
    ],
    name="wide",
)  # fmt: skip

# Few filters, and channels that fill no whole step or pack of 16 bytes.
NARROW = Network(
    (3, 7, 6),
    [
        Conv2d(6, 4), ReLU(), Conv2d(16), ReLU(), MaxPool2d(2), Conv2d(20), ReLU(), MaxPool2d(2),
        Flatten(), Dense(3),
    ],
    name="narrow",
)  # fmt: skip

# Strides, equal or not, that the filter's size is a multiple of, or not.
STRIDED = Network(
    (3, 13, 10),
    [
        Conv2d(16, 7, stride=2), ReLU(), Conv2d(20, 4, stride=(2, 1)), ReLU(), MaxPool2d(2),
        Flatten(), Dense(3),
    ],
    name="strided",
)  # fmt: skip

# Filters of one tap with strides: only a part of the pixels of the input is read.
POINTWISE = Network(
    (3, 7, 10),
    [
        Conv2d(20, 2), ReLU(), Conv2d(32, 1, stride=2, padding=0, rounding="floor"), ReLU(),
        Conv2d(10, 1, stride=(1, 3), padding=0, rounding="floor"), Flatten(), Dense(3),
    ],
    name="pointwise",
)  # fmt: skip

# Work tiles have several output lines, forward and backward.
LINES = Network(
    (32, 7, 9),
    [Conv2d(32), ReLU(), MaxPool2d(2), Conv2d(32, 2, padding="same"), Flatten()],
    MeanSquaredError(), name="lines",
)  # fmt: skip

# The same, with a map of four pixels in a row.
SHORT_LINES = Network(
    (32, 6, 8),
    [Conv2d(32), ReLU(), MaxPool2d(2), Conv2d(32, 2, padding="same"), Flatten()],
    MeanSquaredError(), name="short-lines",
)  # fmt: skip

# The filters do not fill the taps of the folded maps.
FOLDS = Network(
    (4, 13, 12),
    [
        Conv2d(16, 3, stride=2), ReLU(), MaxPool2d(2), Conv2d(32, (2, 3), stride=(1, 2)),
        Flatten(),
    ],
    MeanSquaredError(), name="folds",
)  # fmt: skip

# Two convolutions read a tensor, so one of them adds its input gradient to that of the other.
ADDED = Network.from_nodes(
    (32, 15, 5),
    [
        NodeSpec(Conv2d(32)), NodeSpec(ReLU()), NodeSpec(MaxPool2d(2), "pool"),
        NodeSpec(Conv2d(32, 2, padding="same"), "first", ("pool",)),
        NodeSpec(Conv2d(32, 2, padding="same"), "second", ("pool",)),
        NodeSpec(Add(), "sum", ("first", "second")), NodeSpec(Flatten()),
    ],
    MeanSquaredError(), name="added",
)  # fmt: skip

# Maps of four and two pixels in a row. The first padding is asymmetric.
TINY = Network(
    (32, 5, 4),
    [
        Conv2d(96, (2, 4)), ReLU(), Conv2d(32), ReLU(), Conv2d(32, (2, 3), stride=(1, 2)),
        Flatten(), Dense(3),
    ],
    name="tiny",
)  # fmt: skip

TILES = (
    # persistent_groups, weight_stages, strip, lines, pixel_tiles, warp_groups, k_warp_groups,
    # channel_chunks
    (0, 0, True, 2, 1, 2, 1, 1),
    (0, 0, False, 3, 2, 1, 2, 2),
    (0, 0, True, 4, 1, 3, 1, 2),
    (1, 3, True, 4, 2, 1, 1, 2),
    (3, 0, False, 1, 1, 1, 1, 1),
    (2, 0, True, 2, 1, 1, 1, 1),
)
"""Tile configurations: every kind of work tiles_per_group, strips and lines, incomplete tiles."""

# tf32 and bf16 share the main loop, so configurations alternate between them.
TILES_BY_PRECISION = [(number, ("tf32", "bf16")[number % 2]) for number in range(len(TILES))]


def work_sharing(tile: ImplicitGemmTile) -> tuple[int, ...]:
    return (
        tile.persistent_groups, tile.weight_stages, tile.pixel_tile.strip, tile.pixel_tile.lines,
        tile.pixel_tiles, tile.warp_groups, tile.k_warp_groups, tile.channel_chunks,
    )  # fmt: skip


def row_sharing(tile: ImplicitGemmTile) -> tuple[int, ...]:
    return tile.view.row_samples, *work_sharing(tile)


def tiles_per_group(tile: ImplicitGemmTile) -> tuple[int, ...]:
    return tile.k_warp_groups, tile.pixel_tiles, tile.warp_groups, tile.channel_chunks


def nearest_tile(
    wanted: tuple[int, ...], facts: Callable[[ImplicitGemmTile], tuple[int, ...]]
) -> Any:
    """Return a `rank_implicit_gemm_tiles` with the tile whose `facts` are nearest to `wanted`."""

    @functools.cache
    def rank(
        view: InputView, precision: str, samples: int, limits: DeviceLimits, **known: Any
    ) -> Any:
        tile = min(
            implicit_gemm_candidates.implicit_gemm_candidates(view, precision, limits, **known),
            key=lambda tile: [abs(a - b) for a, b in zip(facts(tile), wanted, strict=True)],
        )
        return ((HALO_LAUNCH_US + estimated_cycles(tile, samples) / CYCLES_PER_US, tile),)

    return rank


@pytest.fixture(autouse=True)
def without_patches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the kernels for which TMA copies patches."""
    exclude(monkeypatch, WGMMA)


@pytest.fixture
def in_random_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run blocks and threads in random order, on an emulator that reports races."""
    # So few multiprocessors that persistent kernels iterate over tiles.
    emulator = Emulator(seed=5, limits=replace(DEFAULT_LIMITS, multiprocessors=1))
    monkeypatch.setattr("dptrain.backends.cuda.backend.open_device", lambda rank: emulator)


@pytest.mark.more
@pytest.mark.parametrize(("number", "precision"), TILES_BY_PRECISION)
def test_every_tile_configuration_computes_the_same(
    number: int, precision: str, in_random_order: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare with the gathering kernels, which round the same factors.

    Sums in another order can round a value differently, in each layer and direction. Gradients of
    the last biases are sums that nearly cancel. Weight gradients round dz before they scale it by
    the dropout factor, gathering kernels afterwards.
    """
    monkeypatch.setattr(
        halo_convolution, "rank_implicit_gemm_tiles", nearest_tile(TILES[number], work_sharing)
    )
    ours = make_replica(WIDE, "cuda", 5, precision=precision)
    assert sum(name.endswith("packed") for name in ours.plan.buffers) == 3
    assert_steps_as_gathered(ours, (5, 2), roundoffs=8.0)


@pytest.mark.parametrize(
    ("network", "number", "precision"),
    tiered(
        [(NARROW, 2, "tf32"), (STRIDED, 5, "bf16"), (POINTWISE, 2, "bf16"), (POINTWISE, 5, "tf32")],
        [(STRIDED, 5, "bf16")],
    ),
    ids=["narrow", "strided", "pointwise", "pointwise-persistent"],
)
def test_any_channels_filters_and_strides(
    network: Network,
    number: int,
    precision: str,
    in_random_order: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Compare with the gathering kernels; a persistent kernel and one that is not."""
    prefer(monkeypatch, HALO, HALO_GRADIENT)
    monkeypatch.setattr(
        halo_convolution, "rank_implicit_gemm_tiles", nearest_tile(TILES[number], work_sharing)
    )
    ours = make_replica(network, "cuda", 3, precision=precision)
    convolutions = sum(isinstance(node.layer, Conv2d) for node in network.nodes)
    assert num_packed(ours.plan) == 2 * convolutions - 1
    assert_steps_as_gathered(ours, (3,))


@pytest.mark.more
@pytest.mark.parametrize(
    ("number", "precision"),
    [(0, "bf16"), (1, "tf32"), (2, "fp32"), (3, "bf16"), (5, "tf32")],
)
def test_rows_of_several_samples(
    number: int, precision: str, in_random_order: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare with the gathering kernels; the last row lacks samples."""
    prefer(monkeypatch, HALO)
    exclude(monkeypatch, HALO_GRADIENT)
    rank, selected = nearest_tile((8, *TILES[number]), row_sharing), list[ImplicitGemmTile]()

    def record(*product: Any, **known: Any) -> Any:
        [(time, tile)] = rank(*product, **known)
        selected.append(tile)
        return ((time, tile),)

    monkeypatch.setattr(halo_convolution, "rank_implicit_gemm_tiles", record)
    ours = make_replica(TINY, "cuda", 5, precision=precision)
    assert {tile.view.row_samples for tile in selected} >= ({2} if precision == "fp32" else {2, 4})
    assert_steps_as_gathered(ours, (5, 2))


@pytest.mark.more
@pytest.mark.parametrize(
    ("network", "number", "precision"),
    [
        (LINES, 0, "bf16"), (LINES, 2, "tf32"), (LINES, 5, "tf32"), (FOLDS, 1, "tf32"),
        (FOLDS, 3, "bf16"), (SHORT_LINES, 0, "bf16"), (ADDED, 0, "bf16"), (ADDED, 2, "tf32"),
        (ADDED, 5, "tf32"),
    ],
)  # fmt: skip
def test_infinite_inputs_change_the_same_elements_as_in_gathering_kernels(
    network: Network,
    number: int,
    precision: str,
    in_random_order: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Products with the zeros that complete the taps do not spread NaN.

    Sums that scalar instructions repeat begin with the gradient that they are added to only once.
    """
    gathered = gathering(network, 2, precision)
    prefer(monkeypatch, HALO)
    exclude(monkeypatch, HALO_GRADIENT)
    rank = nearest_tile((8 if network is SHORT_LINES else 1, *TILES[number]), row_sharing)
    monkeypatch.setattr(halo_convolution, "rank_implicit_gemm_tiles", rank)
    ours = make_replica(network, "cuda", 2, precision=precision)
    convolutions = sum(isinstance(node.layer, Conv2d) for node in network.nodes)
    assert num_packed(ours.plan) == 2 * convolutions - 1
    x = np.random.default_rng(3).standard_normal((2, *network.input_shape), np.float32)
    x[1, 3, 2, 4] = np.inf
    if network is ADDED:
        x[0, 3, 5, 0] = np.inf  # Elements with finite gradients are on other lines.
    found = []
    for replica in (ours, gathered):
        replica.forward_backward(x, np.zeros((2, network.num_outputs), np.float32))
        found.append((replica.output(), gradient_of_maps(replica)))
    for got, expected in zip(*found, strict=True):
        np.testing.assert_array_equal(np.isnan(got), np.isnan(expected))
        infinite = np.isinf(expected)
        np.testing.assert_array_equal(got[infinite], expected[infinite])
        finite = np.isfinite(expected)
        assert infinite.any() or np.isnan(expected).any()
        assert finite.any()
        np.testing.assert_allclose(got[finite], expected[finite], rtol=0.02, atol=0.02)


def gradient_of_maps(replica: Replica) -> NDArray[np.float32]:
    """Return the gradient with respect to the input of the second convolution."""
    name = next(name for name in replica.plan.buffers if name.startswith("dpool"))
    found = replica.memory.download(replica._views[replica.plan.resolve(name)])
    return as_numbers(found) if found.dtype == np.uint16 else found


@pytest.mark.parametrize(("batch_size", "expected"), [(2048, 2), (8, 1)])
def test_layers_that_do_not_fill_halo_tiles_use_them_if_that_is_estimated_to_be_faster(
    batch_size: int, expected: int
) -> None:
    """The second convolution of model0 has 16 channels."""
    plan = make_plan(get_network("model0"), load_backend("cuda"), batch_size, precision="bf16")
    assert num_packed(plan) == expected


def test_pixels_of_few_bytes_are_gathered() -> None:
    network = Network(
        (3, 64, 64),
        [Conv2d(32, 7, stride=2), ReLU(), Conv2d(64, 4, stride=2), ReLU(), Flatten(), Dense(3)],
        name="strided",
    )
    plan = make_plan(network, load_backend("cuda"), 512, precision="bf16")
    packed = [name for name in plan.buffers if name.endswith(".packed")]
    assert packed == ["conv2+relu2.packed"]


Results = tuple[float, dict[str, NDArray[Any]]]
"""The loss of a step, and the gradients by name."""


def results_of_step(replica: Replica, n: int) -> Results:
    return whole.step(replica, n, 0), {k: replica.gradients[k] for k in replica.gradients}


def gathering(network: Network, n: int, precision: str) -> Replica:
    """Return a replica with gathering kernels only, on an emulator that runs threads in order."""
    emulator = Emulator(limits=replace(DEFAULT_LIMITS, multiprocessors=1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dptrain.backends.cuda.backend.open_device", lambda rank: emulator)
        exclude(patch, HALO, HALO_GRADIENT, WGMMA)
        replica = make_replica(network, "cuda", n, precision=precision)
    assert num_packed(replica.plan) == 0
    return replica


@functools.cache
def gathered_steps(network: Network, precision: str, counts: tuple[int, ...]) -> list[Results]:
    """Return the results of gathering kernels."""
    replica = gathering(network, max(counts), precision)
    return [results_of_step(replica, n) for n in counts]


def num_packed(plan: Plan) -> int:
    """Return the number of buffers for packed weights, one for each pass over halo tiles."""
    return sum(name.endswith(("packed", "packed_back")) for name in plan.buffers)


def assert_steps_as_gathered(
    ours: Replica, counts: tuple[int, ...], *, roundoffs: float = 4.0
) -> None:
    """Compare steps with these numbers of samples with the gathering kernels.

    Args:
        ours: the replica.
        counts: samples of each step.
        roundoffs: of a factor, by which results may differ from the largest number of an array.
    """
    network, precision = ours.plan.network, ours.plan.precision
    tolerance = rounding(network, ours.plan.batch_size) + roundoffs * ROUNDOFFS.get(precision, 0.0)
    expected = gathered_steps(network, precision, counts)
    for n, (loss, gradients) in zip(counts, expected, strict=True):
        found = results_of_step(ours, n)
        assert_close(found[0], loss, tolerance)
        for name, value in gradients.items():
            assert_close(found[1][name], value, tolerance, name)


@pytest.mark.parametrize(
    "wanted",
    tiered(
        [((1, 1, 3, 2),), ((1, 3, 2, 1),), ((1, 4, 1, 1),), ((2, 5, 1, 1),), ((4, 1, 1, 2),)],
        [((2, 5, 1, 1),)],
    ),
    ids=str,
)
@pytest.mark.parametrize("filters", tiered([32, 96], [96]))
def test_lanes_that_share_random_numbers_drop_the_right_elements(
    filters: int, wanted: tuple[int, ...], in_random_order: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The masks equal those of `dropout_keep`; all outputs before dropout are 1.

    Two lanes share a block of random numbers, with 32 filters four lanes. They alternate, also if a
    warp group has an odd number of pixel tiles. The last pixel tiles belong to no sample.
    """
    monkeypatch.setattr(
        halo_convolution, "rank_implicit_gemm_tiles", nearest_tile(wanted, tiles_per_group)
    )
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
    """A device with tensor maps that records the macros of kernels."""

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
@pytest.mark.parametrize("number", tiered(range(len(TILES)), [0, 3]))
def test_boxes_have_the_size_that_kernels_expect(
    number: int, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that waits for another number of bytes than TMA copies would never end.

    The expected boxes are computed as in the kernels. After a ReLU alone, threads load the halo
    tile, so there are no tensor maps.
    """
    device = Mapping()
    monkeypatch.setattr("dptrain.backends.cuda.backend.open_device", lambda rank: device)
    monkeypatch.setattr(
        halo_convolution, "rank_implicit_gemm_tiles", nearest_tile(TILES[number], work_sharing)
    )
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


@pytest.mark.more
def test_devices_with_little_shared_memory_use_smaller_tiles_or_gather(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    roomy = make_plan(WIDE, load_backend("cuda"), 3, precision="tf32")
    emulator = Emulator(limits=replace(DEFAULT_LIMITS, shared_bytes=9 << 10))
    monkeypatch.setattr("dptrain.backends.cuda.backend.open_device", lambda rank: emulator)
    ours = make_replica(WIDE, "cuda", 3, precision="tf32")
    assert 0 < num_packed(ours.plan) < num_packed(roomy)
    assert_steps_as_gathered(ours, (3,))


VIEWS = [
    InputView.forward(node)
    for name in ("cifar", "solar", "model2", "model-large")
    for node in get_network(name).nodes[1:]
    if isinstance(node.layer, Conv2d)
] + [InputView(7, 5, 32, 1, 0, 8, 5, 32, 3, 2)]


@pytest.mark.parametrize(
    ("layer", "precision", "expected"),
    [
        (Conv2d(64, 5), "bf16", True), (Conv2d(64, 5), "fp32", True),
        (Conv2d(64, stride=2), "tf32", True), (Conv2d(6), "bf16", True), (Conv2d(6), "fp32", False),
        (Conv2d(32, padding="full"), "tf32", True), (Conv2d(32, 2, padding=2), "tf32", False),
    ],
)  # fmt: skip
def test_layers_on_tensor_cores_have_halo_tiles(
    layer: Conv2d, precision: str, expected: bool
) -> None:
    node = Network((32, 8, 8), [layer, Flatten(), Dense(2)]).nodes[0]
    view = InputView.forward(node)
    assert supports_halo_tiles(view, precision, layer.strides, DEFAULT_LIMITS) == expected


def test_inputs_that_exceed_shared_memory_are_gathered() -> None:
    wide = Network((1024, 640, 640), [Conv2d(1024), Flatten(), Dense(2)]).nodes[0]
    limits = DEFAULT_LIMITS
    assert best(rank_implicit_gemm_tiles(InputView.forward(wide), "tf32", 64, limits)) is None
    assert best(rank_implicit_gemm_tiles(VIEWS[0], "bf16", 1, limits)) is not None


def test_pixel_tiles_do_not_decide_whether_weights_fit() -> None:
    """Candidates with weights that do not fit are left out without looking at their pixels."""
    found = set()
    shapes = [*((*shape, 0, 0) for shape in BLOCK_SHAPES), *PERSISTENT_SHAPES]
    for view, shape in itertools.product(VIEWS, shapes):
        pixel_tiles = efficient_pixel_tiles(view, pooled=False)
        each = {
            ImplicitGemmTile(view, 2, False, tile, count, *shape).weights_fit
            for tile in pixel_tiles for count in (1, 2)
        }  # fmt: skip
        assert len(each) == 1
        found |= each
    assert found == {False, True}


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("view", VIEWS, ids=str)
def test_pixel_tiles_cover_the_output_and_halo_tiles_their_input(
    view: InputView, pooled: bool, precision: str
) -> None:
    find = implicit_gemm_candidates.implicit_gemm_candidates
    found = list(find(view, precision, DEFAULT_LIMITS, pooled=pooled))
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
        # Barriers are stored after the halo tiles and after the exchanged sums.
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
            # The pixel tiles are adjacent.
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
            # The last eight columns start in the last row and extend beyond it.
            assert needed_rows * tile.view.row_pitch + view.s - 1 + 8 <= tile.slab_pixels


def test_small_batches_split_k_and_large_ones_do_not() -> None:
    cifar = VIEWS[0]
    few, many = (
        best(rank_implicit_gemm_tiles(cifar, "tf32", n, DEFAULT_LIMITS)) for n in (32, 2048)
    )
    assert few is not None
    assert many is not None
    assert few.k_warp_groups > many.k_warp_groups == 1


def test_large_batches_use_persistent_kernels() -> None:
    solar = VIEWS[1]
    tight = replace(DEFAULT_LIMITS, shared_bytes=48 << 10)
    few, many, small = (
        best(rank_implicit_gemm_tiles(solar, "bf16", n, limits, pooled=True))
        for n, limits in ((32, DEFAULT_LIMITS), (2048, DEFAULT_LIMITS), (2048, tight))
    )
    assert few is not None
    assert many is not None
    assert small is not None
    assert few.persistent_groups == 0 < many.persistent_groups
    assert many.weight_stages == 0 < many.k_steps
    assert small.shared_bytes <= 48 << 10 < many.shared_bytes


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
@pytest.mark.parametrize("view", VIEWS, ids=str)
def test_boxes_of_pooled_gradients_cover_their_halo_tiles(view: InputView, precision: str) -> None:
    """Also if the halo tile starts at an odd line or column."""
    found = [
        tile
        for tile in implicit_gemm_candidates.implicit_gemm_candidates(
            view, precision, DEFAULT_LIMITS, epilogue=2
        )
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
