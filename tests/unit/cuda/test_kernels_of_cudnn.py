"""Kernels of the cuDNN backend: conversion to and from bfloat16, bias gradients, and losses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from dptrain.backends.cuda.device.nvrtc import Compiler, find_compiler
from dptrain.backends.cuda.device.sources import source_path
from tests.emulator.fake_cudnn_functions import to_bfloat16
from tests.tiers import tiered
from tests.unit.cuda.launching import SEEDS, THREADS, ints, launch, launch_in_every_order


@pytest.mark.parametrize("vector", [1, 4])
@pytest.mark.parametrize("seed", SEEDS)
def test_conversions_round_to_nearest_and_are_exact(vector: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(1000, dtype=np.float32)
    # Ties to even on both sides, the largest number, infinities and zeros.
    x[:8] = 1 + 2**-8, 1 + 3 * 2**-8, 3.4e38, np.inf, -np.inf, 0.0, -0.0, np.nan
    rounded = np.zeros(1000, np.uint16)
    sizes = {"VECTOR": vector, "seed": seed}
    threads = 1000 // vector
    _, bits = launch("cast.cu", "float_to_bfloat16", threads, x, rounded, np.int32(1000), **sizes)
    np.testing.assert_array_equal(np.delete(bits, 7), to_bfloat16(np.delete(x, 7)))
    _, wide = launch(
        "cast.cu", "bfloat16_to_float", threads, bits, np.zeros_like(x), np.int32(1000), **sizes
    )
    np.testing.assert_array_equal(wide.view(np.uint32), bits.astype(np.uint32) << 16)
    assert np.isnan(wide[7])
    np.testing.assert_allclose(np.delete(wide, [2, 7]), np.delete(x, [2, 7]), rtol=2.0**-8)


@pytest.mark.parametrize("precision", [0, 2])
@pytest.mark.parametrize(
    ("channels", "vector", "lanes", "pixels", "part"),
    tiered(
        [(1, 1, 1, 700, 256), (3, 1, 4, 100, 100), (16, 4, 4, 1000, 256), (150, 1, 32, 37, 16)],
        [(16, 4, 4, 1000, 256)],
    ),
)
def test_bias_gradients_are_reproducible(
    precision: int, channels: int, vector: int, lanes: int, pixels: int, part: int
) -> None:
    """Equal bits for every order of execution; each sum is within float32 rounding."""
    dy = np.random.default_rng(0).standard_normal((pixels, channels), dtype=np.float32)
    stored = to_bfloat16(dy) if precision == 2 else dy
    exact = (stored.astype(np.uint32) << 16).view(np.float32) if precision == 2 else dy
    parts = -(-pixels // part)
    columns = -(-channels // (lanes * vector))
    _, partial = launch_in_every_order(
        "backward_bias.cu", "backward_bias", parts * THREADS,
        stored, np.zeros((parts, channels), np.float32), *ints(pixels, channels, part),
        columns=columns, VECTOR=vector, CHANNEL_VECTORS=lanes, PRECISION=precision,
    )  # fmt: skip
    for i, sums in enumerate(partial):
        terms = exact[i * part : (i + 1) * part].astype(np.float64)
        bound = len(terms) * 2.0**-24 * np.abs(terms).sum(0)
        assert (np.abs(sums - terms.sum(0)) <= bound).all()


@pytest.mark.parametrize(("outputs", "lanes"), tiered([(2, 2), (10, 16), (50, 32)], [(10, 16)]))
@pytest.mark.parametrize("backward", [0, 1])
def test_the_loss_is_summed_from_log_softmax(outputs: int, lanes: int, backward: int) -> None:
    """1000 samples are several blocks; the largest of each row occurs twice."""
    rng = np.random.default_rng(0)
    n, scale = 1000, 0.25
    z = rng.integers(-3, 3, (n, outputs)).astype(np.float32)
    logs = rng.standard_normal((n, outputs), dtype=np.float32)
    labels = rng.integers(0, outputs, n).astype(np.int32)
    blocks = -(-n * lanes // 512)
    arguments = z, logs, labels, np.full_like(z, 7.0), np.zeros(3, np.float32)
    *_, dlogs, sums, _, _ = launch_in_every_order(
        "losses.cu", "negative_log_likelihood", blocks * 512, *arguments,
        np.array([0, 0, 1, 0], np.float32), np.zeros(1 + blocks, np.uint64),
        *ints(n, outputs), np.float32(scale), np.int32(backward), block=512,
        SAMPLE_LANES=lanes, PRECISION=0,
    )  # fmt: skip
    _expect_smoothed(arguments, blocks, scale, backward, lanes)
    chosen = logs[np.arange(n), labels].astype(np.float64)
    assert sums[0] == pytest.approx(-scale * chosen.sum(), rel=1e-5)
    assert sums[1] == (z.argmax(1) == labels).sum()
    expected = -scale * (np.arange(outputs) == labels[:, None]) if backward else 7.0
    np.testing.assert_array_equal(dlogs, np.broadcast_to(expected, dlogs.shape))


def _expect_smoothed(
    arguments: tuple[NDArray[Any], ...], blocks: int, scale: float, backward: int, lanes: int
) -> None:
    """Compare the kernel for smoothed labels with its equation."""
    z, logs, labels, *_ = arguments
    (n, outputs), smoothing = z.shape, 0.125
    *_, dlogs, sums, _, _ = launch_in_every_order(
        "losses.cu", "negative_log_likelihood", blocks * 512, *arguments,
        np.array([0, 0, 1, 0, 0], np.float32), np.zeros(1 + blocks, np.uint64),
        *ints(n, outputs), np.float32(scale), np.int32(backward), np.float32(smoothing), block=512,
        SAMPLE_LANES=lanes, PRECISION=0, SMOOTHED=1,
    )  # fmt: skip
    rows = np.arange(n)
    loss = -logs[rows, labels].astype(np.float64)
    if backward:
        loss += smoothing * (z[rows, labels] - z.mean(1, np.float64))
    assert sums[0] == pytest.approx(scale * loss.sum(), rel=1e-5)
    target = (1 - smoothing) * (np.arange(outputs) == labels[:, None]) + smoothing / outputs
    expected = -scale * target if backward else np.full_like(z, 7.0)
    np.testing.assert_allclose(dlogs, expected, rtol=1e-6)


@pytest.mark.more
@pytest.mark.parametrize("smoothed", [0, 1])
def test_losses_compile(smoothed: int) -> None:
    compiler: Compiler = find_compiler([12])
    defines = {"SAMPLE_LANES": 16, "PRECISION": 0, "SMOOTHED": smoothed}
    assert compiler.compile(source_path("losses.cu"), 90, defines).startswith(b"\x7fELF")


@pytest.mark.more
@pytest.mark.parametrize("lanes", [1, 32])
@pytest.mark.parametrize("precision", [0, 2])
def test_bias_gradients_compile_for_every_width(lanes: int, precision: int) -> None:
    compiler: Compiler = find_compiler([12])
    defines = {"CHANNEL_VECTORS": lanes, "VECTOR": 4, "PRECISION": precision}
    assert compiler.compile(source_path("backward_bias.cu"), 90, defines).startswith(b"\x7fELF")
