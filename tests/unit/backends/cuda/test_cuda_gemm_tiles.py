"""Matrix products on the emulator: every tile, split-K, and kernels specialized for a layer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dptrain.api import make_replica
from dptrain.backends.cuda.convolution import gather_convolution
from dptrain.backends.cuda.dense import dense
from dptrain.backends.cuda.dense.gemm_tiles import (
    MAX_K_STEP,
    MIN_SPLIT_TERMS,
    TARGET_THREADS,
    TENSOR_TILES,
    THREAD_TILES,
    GemmConfig,
    GemmTile,
    SplitK,
    rank_gemm_configs,
    split_terms,
    vector_elements,
)
from dptrain.backends.cuda.device.hardware import DEFAULT_LIMITS
from dptrain.network import Conv2d, Dense, Dropout, Flatten, MaxPool2d, Network, ReLU
from dptrain.plan.limits import DeviceLimits
from tests.emulator.emulator import Emulator
from tests.tiers import tiered
from tests.unit.backends.cuda import test_cuda_backend as whole
from tests.unit.backends.cuda.gpu_algorithms import best
from tests.unit.backends.cuda.test_cuda_backend import PLAIN, assert_close, batch, rounding
from tests.unit.backends.pytorch_reference import ROUNDOFFS

# 35 columns leave incomplete tiles; strides and padding reach every branch.
ODD = Network(
    (3, 11, 9),
    [Conv2d(35, (3, 2)), ReLU(), Conv2d(5, 3, stride=2, padding=1), Flatten(), Dense(37), ReLU(),
     Dense(3)],
    name="odd",
)  # fmt: skip


# tf32 and bf16 share the main loop, so tiles alternate between them.
PRODUCTS = [("fp32", tile) for tile in THREAD_TILES] + [
    (("tf32", "bf16")[number % 2], tile) for number, tile in enumerate(TENSOR_TILES)
]


@pytest.mark.parametrize(
    ("precision", "tile"), tiered(PRODUCTS, [PRODUCTS[0], PRODUCTS[-1]]), ids=str
)
def test_every_tile_computes_the_same(
    precision: str, tile: GemmTile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks and threads run in random order, on an emulator that reports races."""
    emulator = Emulator(seed=5)
    monkeypatch.setattr("dptrain.backends.cuda.backend.open_device", lambda rank: emulator)
    shared = replace(tile, k_groups={32: 4, 64: 2}.get(tile.block[0], 1))

    def rank(
        _: str, rows: int, columns: int, terms: int, limits: DeviceLimits, *, split: bool = False
    ) -> list[tuple[float, GemmConfig]]:
        split_k = split_terms(terms, 8 * tile.block[0], limits) if split else SplitK(1, terms)
        return [(1.0, GemmConfig(shared, split_k))]

    for module in (gather_convolution, dense):
        monkeypatch.setattr(module, "rank_gemm_configs", rank)
    ours, reference = (
        make_replica(ODD, "cuda", 5, precision=precision),
        make_replica(ODD, "reference", 5),
    )
    # Every layer rounds both factors of its products, forward and backward.
    tolerance = rounding(ODD, 5) + 4 * ROUNDOFFS.get(precision, 0.0) * len(ODD.nodes)
    assert_close(whole.step(ours, 5, 0), whole.step(reference, 5, 0), tolerance)
    for name, value in reference.gradients.items():
        assert_close(ours.gradients[name], value, tolerance, name)


@pytest.mark.more
def test_specialized_kernels_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    general = make_replica(ODD, "cuda", 3)
    emulator = Emulator(specializes=True)
    monkeypatch.setattr("dptrain.backends.cuda.backend.open_device", lambda rank: emulator)
    special = make_replica(ODD, "cuda", 3)
    assert special.forward_backward(*batch(ODD, 3)) == general.forward_backward(*batch(ODD, 3))
    for name, value in general.gradients.items():
        assert (special.gradients[name] == value).all(), name


POOLED = Network(
    (2, 9, 8),
    [Conv2d(3), ReLU(), Conv2d(5), ReLU(), MaxPool2d(2), Dropout(0.25), Flatten(), Dense(3)],
    name="pooled",
)  # fmt: skip


@pytest.mark.more
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gradients_of_pooled_outputs_are_equal_if_unpooled_separately(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row of the output is in no window, so the sums over pixels have different lengths."""
    reference = make_replica(POOLED, "reference", 3)
    whole.step(reference, 3, 0)
    replicas = []
    for spread in (1, 10**9):
        monkeypatch.setattr(gather_convolution, "MIN_UNPOOL_ELEMENTS", spread)
        ours = make_replica(POOLED, "cuda", 3, precision=precision)
        assert any(name.endswith("dmaps") for name in ours.plan.buffers) == (spread == 1)
        whole.step(ours, 3, 0)
        replicas.append(ours)
    written, made = replicas
    for name, value in reference.gradients.items():
        tolerance = rounding(POOLED, 3)
        assert_close(written.gradients[name], made.gradients[name], tolerance, name)
        if precision == "fp32":
            assert_close(made.gradients[name], value, tolerance, name)


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
def test_small_products_get_small_tiles_and_large_ones_large(precision: str) -> None:
    small, large = (
        best(rank_gemm_configs(precision, rows, 64, 576, DEFAULT_LIMITS)).tile
        for rows in (1024, 10**6)
    )
    assert small.rows * small.columns < large.rows * large.columns
    assert best(rank_gemm_configs(precision, 10**6, 16, 576, DEFAULT_LIMITS)).tile.columns == 16


def test_groups_share_a_tile_if_blocks_are_few_and_sums_long() -> None:
    few, many, short = (
        best(rank_gemm_configs("tf32", rows, 64, terms, DEFAULT_LIMITS)).tile.k_groups
        for rows, terms in ((1024, 576), (10**6, 576), (1024, 16))
    )
    assert few > many == short == 1


def test_shared_memory_suffices_for_slices_and_exchanged_sums() -> None:
    for tile in TENSOR_TILES:
        for groups in (1, 4):
            assert replace(tile, k_groups=groups).shared_bytes <= 227 << 10


@pytest.mark.parametrize(("length", "itemsize", "expected"), [
    (1, 4, 1), (3, 2, 1), (10, 4, 2), (16, 4, 4), (100, 2, 4), (64, 2, 8),
])  # fmt: skip
def test_rows_are_read_in_vectors_that_divide_them(
    length: int, itemsize: int, expected: int
) -> None:
    assert vector_elements(length, itemsize) == expected


@pytest.mark.parametrize("terms", [1, 15, 16, 255, 257, 4097, 123457, 10**7])
@pytest.mark.parametrize("threads", [32, 128 * 7, 128 * 1000])
def test_split_k_covers_a_sum_once(terms: int, threads: int) -> None:
    parts = split_terms(terms, threads, DEFAULT_LIMITS)
    assert (parts.count - 1) * parts.terms < terms <= parts.count * parts.terms
    assert parts.terms % MAX_K_STEP == 0
    assert parts.terms >= MIN_SPLIT_TERMS[0]
    assert (
        parts.count == 1 or parts.count * threads <= DEFAULT_LIMITS.multiprocessors * TARGET_THREADS
    )
    assert parts.used(terms) == parts.count
    assert parts.used(0) == 1


def test_a_smaller_batch_has_the_same_split() -> None:
    """With parts of minimal size, gradients do not depend on the planned batch size."""
    small, large = make_replica(PLAIN, "cuda", 8), make_replica(PLAIN, "cuda", 16)
    x, y = batch(PLAIN, 8)
    assert small.forward_backward(x, y) == large.forward_backward(x, y)
    for name, value in small.gradients.items():
        assert (large.gradients[name] == value).all(), name
