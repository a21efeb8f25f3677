"""Kernels of batch normalisation compared with float64, at odd shapes and in every order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from dptrain.backends.cuda.channels import ChannelLaunch
from dptrain.plan.lowering import Setting
from tests.tiers import tiered
from tests.unit.cuda.launching import BF16, FP32, Kept, ints, launch_in_every_order

Floats = NDArray[Any]

SHAPES = [(1, 1), (37, 3), (50, 16), (130, 64), (40, 136), (300, 8)]
"""Pixels and channels; 136 channels need two columns of blocks."""

PLUS = np.float32(1e-3)
"""Epsilon."""

MOMENTUM = np.float32(0.25)

BLOCKS = 3


every_case = pytest.mark.parametrize(
    ("kept", "pixels", "channels"),
    tiered(
        [(kept, *shape) for kept in (FP32, BF16) for shape in SHAPES],
        [(FP32, *SHAPES[1]), (BF16, *SHAPES[4])],
    ),
)


def random(seed: int, *shape: int) -> Floats:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def run(
    file: str, name: str, kept: Kept, sums: bool, channels: int, *args: Any, **defines: int
) -> list[Floats]:
    """Run a kernel with `BLOCKS` blocks in each column."""
    dtype = "uint16" if kept is BF16 else "float32"
    layout = ChannelLaunch.of(channels, Setting(1, "fp32", "float32", dtype), sums=sums)
    return launch_in_every_order(
        file, name, BLOCKS * layout.threads, *args, block=layout.threads, columns=layout.columns,
        PRECISION=kept.precision, **layout.defines, **defines,
    )  # fmt: skip


def statistics(kept: Kept, x: Floats, ranks: int = 1) -> list[Floats]:
    """Return totals, moments, running mean and running variance."""
    pixels, channels = x.shape
    running = [np.full(channels, 2.0, np.float32), np.full(channels, 3.0, np.float32)]
    arrays = run(
        "batch_norm_statistics.cu", "batch_norm_statistics", kept, True, channels,
        kept.store(x), np.full((BLOCKS, 3, channels), np.nan, np.float32),
        np.zeros(8, np.uint32), *ints(pixels, channels), np.zeros(1 + 2 * channels),
        np.zeros((2, channels), np.float32), *running, PLUS, MOMENTUM, np.int32(ranks),
    )  # fmt: skip
    assert not arrays[2].any()
    return arrays[3:]


def test_the_shift_keeps_the_variance_of_values_far_from_zero() -> None:
    x = 1e4 + random(1, 500, 8)
    _, moments, _, _ = statistics(FP32, x)
    exact = x.astype(np.float64)
    np.testing.assert_allclose(moments[0], exact.mean(0), rtol=1e-7)
    np.testing.assert_allclose(moments[1], (exact.var(0) + 1e-3) ** -0.5, rtol=1e-5)


@every_case
def test_statistics(kept: Kept, pixels: int, channels: int) -> None:
    x = kept.round(3.0 + 2.0 * random(2, pixels, channels))
    totals, moments, mean, variance = statistics(kept, x)
    exact = x.astype(np.float64)
    assert totals[0] == pixels
    np.testing.assert_allclose(totals[1 : 1 + channels], exact.sum(0), rtol=1e-6)
    np.testing.assert_allclose(totals[1 + channels :], (exact**2).sum(0), rtol=1e-6)
    np.testing.assert_allclose(moments[0], exact.mean(0), rtol=1e-6)
    np.testing.assert_allclose(moments[1], (exact.var(0) + 1e-3) ** -0.5, rtol=2e-6)
    np.testing.assert_allclose(mean, 0.75 * 2.0 + 0.25 * exact.mean(0), rtol=1e-6)
    unbiased = exact.var(0) * pixels / max(pixels - 1, 1)
    np.testing.assert_allclose(variance, 0.75 * 3.0 + 0.25 * unbiased, rtol=2e-6)


def test_totals_of_ranks_give_the_moments_of_all() -> None:
    x = random(3, 60, 24)
    parts = x[:7], x[7:7], x[7:]
    totals = sum(statistics(FP32, part, ranks=0)[0] for part in parts)
    running = np.zeros(24, np.float32), np.zeros(24, np.float32)
    moments = launch_in_every_order(
        "batch_norm_statistics.cu", "batch_norm_moments", 24,
        totals, np.zeros((2, 24), np.float32), *running, np.int32(24), PLUS, MOMENTUM,
    )[1]  # fmt: skip
    np.testing.assert_allclose(moments, statistics(FP32, x)[1], rtol=1e-5, atol=1e-7)


def normalized(x: Floats, moments: Floats, weight: Floats, bias: Floats) -> Floats:
    result: Floats = (x - moments[0]) * moments[1] * weight + bias
    return result


@every_case
@pytest.mark.parametrize(
    ("add", "relu"), tiered([(0, 0), (0, 1), (1, 0), (1, 1)], [(0, 0), (1, 1)])
)
def test_forward(kept: Kept, pixels: int, channels: int, add: int, relu: int) -> None:
    x, x2 = (kept.round(random(seed, pixels, channels)) for seed in (4, 5))
    weight, bias, mean = (random(seed, channels) for seed in (6, 7, 8))
    variance = np.abs(random(9, channels)) + 0.5
    for is_variance in (0, 1):
        deviation = variance if is_variance else 1.0 / np.sqrt(variance + PLUS)
        y = run(
            "batch_norm_forward.cu", "batch_norm_forward", kept, False, channels,
            kept.store(x), kept.store(x2), kept.store(0 * x), mean, deviation.astype(np.float32),
            weight, bias, *ints(pixels, channels), PLUS, np.int32(is_variance), ADD=add,
            ACTIVATES=relu,
        )[2]  # fmt: skip
        moments = mean.astype(np.float64), (variance + 1e-3) ** -0.5
        exact = normalized(x, moments, weight, bias) + add * x2
        exact = np.maximum(exact, 0.0) if relu else exact
        found = y if kept is FP32 else (y.astype(np.uint32) << 16).view(np.float32)
        np.testing.assert_allclose(found, exact, rtol=kept.unit + 1e-6, atol=5e-6)


@every_case
@pytest.mark.parametrize(
    ("mask", "stores"), tiered([(0, 1), (1, 0), (1, 1), (2, 1)], [(1, 0), (2, 1)])
)
def test_backward(kept: Kept, pixels: int, channels: int, mask: int, stores: int) -> None:
    x, dy, saved = (kept.round(random(seed, pixels, channels)) for seed in (10, 11, 12))
    weight, bias = random(13, channels), random(14, channels)
    _, moments, _, _ = statistics(kept, x)
    exact = x.astype(np.float64)
    mean, invstd = exact.mean(0), (exact.var(0) + 1e-3) ** -0.5
    hat = (exact - mean) * invstd
    z = (hat * weight + bias, saved)[mask == 2] if mask else np.ones_like(x)
    dz = np.where(z > 0, dy, 0.0).astype(np.float64)
    count = np.array([float(pixels)])
    zeros = np.zeros(channels, np.float32)
    arrays = run(
        "batch_norm_backward_statistics.cu", "batch_norm_backward_statistics", kept, True, channels,
        kept.store(dy), kept.store(saved), kept.store(x), kept.store(0 * x), moments, weight, bias,
        np.full((BLOCKS, 2, channels), np.nan, np.float32), np.zeros(8, np.uint32),
        np.zeros((2, channels)), count, np.zeros((2, channels), np.float32), zeros, zeros.copy(),
        *ints(pixels, channels, 1), ACTIVATION_FROM=mask, STORE_DZ=stores,
    )  # fmt: skip
    totals, sums, dweight, dbias = arrays[9], *arrays[11:14]
    scale = np.sqrt(pixels)
    np.testing.assert_allclose(dbias, dz.sum(0), rtol=1e-5, atol=1e-6 * scale)
    np.testing.assert_allclose(dweight, (dz * hat).sum(0), rtol=1e-5, atol=1e-5 * scale)
    np.testing.assert_allclose(totals, [dbias, dweight], rtol=1e-6)
    if stores:
        np.testing.assert_array_equal(arrays[3], kept.store(dz))
    again = launch_in_every_order(
        "batch_norm_backward_statistics.cu", "batch_norm_backward_sums", channels,
        totals, count, moments, 0 * sums, np.int32(channels),
    )[3]  # fmt: skip
    np.testing.assert_array_equal(again, sums)
    dx = run(
        "batch_norm_backward_input.cu", "batch_norm_backward_input", kept, False, channels,
        kept.store(dy), kept.store(saved), kept.store(x), kept.store(0 * x), moments, weight, bias,
        sums, *ints(pixels, channels), ACTIVATION_FROM=mask,
    )[3]  # fmt: skip
    found = dx if kept is FP32 else (dx.astype(np.uint32) << 16).view(np.float32)
    expected = weight * invstd * (dz - dz.mean(0) - hat * (dz * hat).mean(0))
    np.testing.assert_allclose(found, expected, rtol=kept.unit + 1e-5, atol=3e-5)
