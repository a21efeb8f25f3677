"""The comparison of switched kernels, with the emulator in place of a GPU."""

from __future__ import annotations

from benchmarks.gpu_switches import report, variant
from dptrain.backends.cuda import few_channel_wgrad_tiles, wgmma_gemm_tiles
from dptrain.backends.cuda.backend import CudaBackend
from dptrain.network import Conv2d, Dense, Flatten, MaxPool2d, Network, ReLU
from tests.emulator.emulator import Emulator

NETWORK = Network(
    (3, 6, 8), [Conv2d(16, padding=1), ReLU(), MaxPool2d(2), Flatten(), Dense(8)], name="small"
)


def test_switches_are_restored() -> None:
    before = wgmma_gemm_tiles.MIN_PRODUCTS, few_channel_wgrad_tiles.MIN_PIXELS
    with variant("on"):
        assert (wgmma_gemm_tiles.MIN_PRODUCTS, few_channel_wgrad_tiles.MIN_PIXELS) == (0, 0)
    assert before == (wgmma_gemm_tiles.MIN_PRODUCTS, few_channel_wgrad_tiles.MIN_PIXELS)


def test_both_variants_are_close_to_float64() -> None:
    """Without a GPU, nothing is timed."""
    lines = list(report(NETWORK, 3, "tf32", CudaBackend(Emulator())))
    assert lines[0].split() == ["small,", "batch", "3,", "tf32:", "µs", "off", "on"]
    found = {line.split()[2]: line.split()[3:] for line in lines[1:]}
    assert {"output", "conv1.weight", "dense1.bias"} <= set(found)
    assert all(float(error) < 1e-2 for row in found.values() for error in row)
