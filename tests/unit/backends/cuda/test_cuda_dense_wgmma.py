"""Large dense layers for Hopper on the emulator, which multiplies with scalar instructions."""

from __future__ import annotations

import pytest

from dptrain.api import make_replica
from dptrain.backends.cuda.dense import wgmma_gemm_tiles
from dptrain.backends.cuda.dense.wgmma_gemm_tiles import (
    TILES,
    WgmmaTile,
    is_worthwhile,
    rank_configs,
)
from dptrain.backends.cuda.device.hardware import DEVICES, ELEMENT_BYTES
from dptrain.network import Dense, Dropout, Flatten, Network, ReLU
from dptrain.plan.lowering import Phase
from tests.emulator.emulator import Emulator
from tests.tiers import tiered
from tests.unit.backends.cuda import test_cuda_backend as whole
from tests.unit.backends.cuda.gpu_algorithms import best
from tests.unit.backends.cuda.test_cuda_backend import assert_close, rounding
from tests.unit.backends.pytorch_reference import ROUNDOFFS

H100 = DEVICES["H100"]

MIN_PRODUCTS = wgmma_gemm_tiles.MIN_PRODUCTS

DEEP = Network(
    (2, 5, 8),
    [Flatten(), Dense(136), ReLU(), Dropout(0.25), Dense(24)],
    name="deep",
)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the kernels for layers of any size."""
    monkeypatch.setattr(wgmma_gemm_tiles, "MIN_PRODUCTS", 0)
    monkeypatch.setattr(wgmma_gemm_tiles, "MIN_EXTENT", 1)


@pytest.fixture
def in_random_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run blocks and threads in random order, and report races."""
    emulator = Emulator(seed=3)
    monkeypatch.setattr("dptrain.backends.cuda.backend.open_device", lambda rank: emulator)


@pytest.mark.usefixtures("in_random_order")
@pytest.mark.parametrize("precision", tiered(ELEMENT_BYTES, ["bf16"]))
@pytest.mark.parametrize(
    ("shape", "split"),
    tiered([((128, 64, 4, 2), False), ((64, 128, 4, 2), True)], [((64, 128, 4, 2), True)]),
)
def test_every_phase_computes_what_the_general_kernels_do(
    precision: str, shape: tuple[int, int, int, int], split: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several tiles of samples, and fewer samples than a batch."""
    monkeypatch.setattr(wgmma_gemm_tiles, "TILES", (shape,))
    monkeypatch.setattr(wgmma_gemm_tiles, "MIN_SPLIT_STEPS", 1)
    if split:
        monkeypatch.setattr(wgmma_gemm_tiles, "SECOND_PASS", -1e9)
    n = 67
    ours = make_replica(DEEP, "cuda", n, precision=precision)
    assert sum("db_partial" in name for name in ours.plan.buffers) == 2
    in_parts = any("forward_partial" in name for name in ours.plan.buffers)
    assert in_parts == split
    monkeypatch.setattr(wgmma_gemm_tiles, "MIN_PRODUCTS", 10**9)
    general = make_replica(DEEP, "cuda", n, precision=precision)
    tolerance = rounding(DEEP, n) + ROUNDOFFS[precision]
    for samples in (n, 5):
        assert_close(whole.step(ours, samples, 0), whole.step(general, samples, 0), tolerance)
        for name, value in general.gradients.items():
            assert_close(ours.gradients[name], value, tolerance, name)


@pytest.mark.parametrize("precision", ELEMENT_BYTES)
@pytest.mark.parametrize("phase", [Phase.FORWARD, Phase.BACKWARD_WEIGHT, Phase.BACKWARD_INPUT])
def test_tiles_fit_and_cover_the_product(precision: str, phase: Phase) -> None:
    for shape in TILES:
        tile = WgmmaTile(*shape, transposed=phase is Phase.FORWARD)
        assert H100.blocks_per_sm(tile.block[0], 96, tile.shared_bytes) >= tile.blocks_per_sm
    config = best(rank_configs(precision, 2048, 128, 33856, H100, phase))
    x, y, parts = config.tile.grid(2048, 128, config.split_k.count)
    assert isinstance(config.tile, WgmmaTile)
    assert x * y * config.tile.rows * config.tile.columns >= 2048 * 128
    assert parts * config.split_k.terms >= 33856


def test_only_aligned_layers_of_hopper_use_the_kernels() -> None:
    assert is_worthwhile("bf16", 64, 64, 64, H100)
    assert not is_worthwhile("fp32", 64, 64, 64, H100)
    assert not is_worthwhile("bf16", 64, 60, 64, H100)
    assert is_worthwhile("tf32", 64, 60, 64, H100)
    assert not is_worthwhile("bf16", 64, 64, 64, DEVICES["A100"])
    assert not is_worthwhile("bf16", 64, 64, 64, DEVICES["B200"])


def test_only_large_layers_use_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """dense1 of model0 was faster with 512 samples and not with 77 (H100)."""
    monkeypatch.setattr(wgmma_gemm_tiles, "MIN_PRODUCTS", MIN_PRODUCTS)
    assert [is_worthwhile("tf32", n, 2048, 100, H100) for n in (77, 512)] == [False, True]
