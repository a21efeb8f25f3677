"""Estimates of gathering kernels, compared with the measurements of November 2026."""

from __future__ import annotations

import statistics

import pytest

from dptrain.backends.cuda.convolution.gather_convolution import UNPOOL_IN_KERNEL, gather_us
from dptrain.backends.cuda.dense.gemm_tiles import rank_gemm_configs
from dptrain.backends.cuda.device.hardware import DEVICES

# benchmarks/results/log/kernels-2026-11.md, "Halo tiles, 32 samples": channels, filters, filter
# size, pixels, whether dx unpools dy, and µs of forward and input gradient in tf32 and bf16 with
# gathered operands (H200, 2026-11-21).
MEASURED = {
    "solar conv2": (32, 64, 9, 48 * 48, True, {"tf32": (35, 85), "bf16": (27, 55)}),
    "cifar conv2": (64, 64, 25, 12 * 12, False, {"tf32": (28, 27), "bf16": (20, 20)}),
    "model-large conv2": (32, 64, 9, 32 * 32, True, {"tf32": (15, 32), "bf16": (12, 25)}),
    "model-large conv3": (64, 64, 9, 16 * 16, False, {"tf32": (12, 15), "bf16": (9, 11)}),
}


def ratios() -> list[float]:
    """Return measured times divided by estimates."""
    found = []
    for channels, filters, taps, pixels, unpools, times in MEASURED.values():
        for precision, (forward, backward) in times.items():
            rows = 32 * pixels
            found.append(forward / estimated_us(precision, rows, filters, taps * channels))
            estimate = estimated_us(precision, rows, channels, taps * filters)
            found.append(backward / (estimate * (UNPOOL_IN_KERNEL if unpools else 1.0)))
    return found


def estimated_us(precision: str, *product: int) -> float:
    """Return the estimate of a product with rows, columns and terms."""
    ranked = rank_gemm_configs(precision, *product, DEVICES["H200"])
    return gather_us(precision, min(cost for cost, _ in ranked))


def test_measured_times_are_near_the_estimates() -> None:
    """The documentation of `gather_convolution.GATHER_COST_US` states the range and the median."""
    found = ratios()
    assert len(found) == 16
    assert statistics.median(found) == pytest.approx(1.17, abs=0.01)
    assert min(found) == pytest.approx(0.81, abs=0.01)
    assert max(found) == pytest.approx(1.64, abs=0.01)
