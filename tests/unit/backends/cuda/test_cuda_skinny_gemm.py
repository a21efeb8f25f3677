"""Dense layers with few samples on the emulator: every tile, odd shapes, and the selection."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

from dptrain.api import make_replica
from dptrain.backends.cuda.dense import skinny_gemm
from dptrain.backends.cuda.dense.skinny_gemm import (
    COLUMN_CHOICES,
    MAX_SHARED_BYTES,
    TILE_SAMPLES,
    SkinnyTile,
)
from dptrain.backends.cuda.device.hardware import DEFAULT_LIMITS
from dptrain.network import Dense, Dropout, Flatten, Network, ReLU
from tests.emulator.emulator import Emulator
from tests.tiers import tiered
from tests.unit.backends.cuda import test_cuda_backend as whole
from tests.unit.backends.cuda.gpu_algorithms import best
from tests.unit.backends.cuda.test_cuda_backend import assert_close, rounding
from tests.unit.backends.pytorch_reference import ROUNDOFFS

PRECISIONS = "fp32", "tf32", "bf16"

# Rows of 37, 132 and 10 are copied in units of 4, 16 and 8 bytes; in bf16, 37 without cp.async.
DEEP = Network(
    (3, 5, 7),
    [Flatten(), Dense(37), ReLU(), Dense(132), ReLU(), Dropout(0.25), Dense(10), ReLU(), Dense(3)],
    name="deep",
)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the skinny kernels for layers of any size."""
    monkeypatch.setattr(skinny_gemm, "MIN_WEIGHTS", 0)
    monkeypatch.setattr(skinny_gemm, "MAX_SAMPLES", dict.fromkeys(skinny_gemm.MAX_SAMPLES, 64))


@pytest.mark.parametrize(
    ("precision", "columns", "n"),
    tiered(
        itertools.product(PRECISIONS, COLUMN_CHOICES, [5, TILE_SAMPLES + 3]),
        [("bf16", COLUMN_CHOICES[-1], TILE_SAMPLES + 3)],
    ),
)
def test_every_tile_computes_the_same(
    precision: str, columns: int, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One or two tiles of samples, blocks and threads in random order, races reported."""
    emulator = Emulator(seed=3)
    monkeypatch.setattr("dptrain.backends.cuda.backend.open_device", lambda rank: emulator)
    monkeypatch.setattr(skinny_gemm, "COLUMN_CHOICES", (columns,))
    if columns in (32, 128):  # As if blocks had room for no more.
        monkeypatch.setattr(
            skinny_gemm,
            "MAX_SHARED_BYTES",
            SkinnyTile(TILE_SAMPLES, columns, 48, precision).shared_bytes,
        )
    ours = make_replica(DEEP, "cuda", n, precision=precision)
    in_parts = any("forward_partial" in name for name in ours.plan.buffers)
    assert in_parts or columns in (16, 64)
    assert not in_parts or columns > 16
    monkeypatch.setattr(skinny_gemm, "MIN_WEIGHTS", math.inf)
    sliced = make_replica(DEEP, "cuda", n, precision=precision)
    # Factors are rounded equally. Sums have another order, so some values are rounded
    # differently.
    tolerance = rounding(DEEP, n) + ROUNDOFFS.get(precision, 0.0)
    assert_close(whole.step(ours, n, 0), whole.step(sliced, n, 0), tolerance)
    for name, value in sliced.gradients.items():
        assert_close(ours.gradients[name], value, tolerance, name)


@pytest.mark.more
def test_a_device_with_little_shared_memory_computes_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    emulator = Emulator(limits=replace(DEFAULT_LIMITS, shared_bytes=40 << 10))
    roomy = make_replica(DEEP, "cuda", 5, precision="tf32")
    monkeypatch.setattr("dptrain.backends.cuda.backend.open_device", lambda rank: emulator)
    tight = make_replica(DEEP, "cuda", 5, precision="tf32")
    loss = whole.step(roomy, 5, 0)
    assert_close(whole.step(tight, 5, 0), loss, rounding(DEEP, 5))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("inputs", [1, 50, 2048, 33856, 10**6])
@pytest.mark.parametrize("outputs", [1, 10, 128, 3000])
def test_split_k_covers_the_sum_once(precision: str, inputs: int, outputs: int) -> None:
    config = best(skinny_gemm.rank_forward_configs(precision, 32, inputs, outputs, DEFAULT_LIMITS))
    parts = config.split_k
    assert (parts.count - 1) * parts.terms < inputs <= parts.count * parts.terms
    assert config.tile.shared_bytes <= MAX_SHARED_BYTES


def test_many_weights_are_split_over_all_multiprocessors() -> None:
    limits = DEFAULT_LIMITS
    small, large = (
        best(skinny_gemm.rank_forward_configs("tf32", 32, n, 100, limits)) for n in (100, 30000)
    )
    assert small.split_k.count == 1
    assert large.split_k.count * large.tile.grid(32, 100)[1] >= limits.multiprocessors


def test_too_many_outputs_have_no_backward_tile() -> None:
    assert skinny_gemm.select_backward_input_tile("tf32", 32, 100, 384, DEFAULT_LIMITS) is not None
    assert skinny_gemm.select_backward_input_tile("tf32", 32, 100, 3200, DEFAULT_LIMITS) is None


def test_the_kernels_are_used_for_few_samples_and_many_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()
    old = replace(DEFAULT_LIMITS, capability=(7, 5))
    assert skinny_gemm.is_worthwhile("tf32", 16, 33856 * 128, DEFAULT_LIMITS)
    assert skinny_gemm.is_worthwhile("tf32", 8, 9216 * 4096, DEFAULT_LIMITS)
    assert not skinny_gemm.is_worthwhile("tf32", 16, 9216 * 4096, DEFAULT_LIMITS)
    assert skinny_gemm.is_worthwhile("fp32", 1, 33856 * 128, DEFAULT_LIMITS)
    assert not skinny_gemm.is_worthwhile("tf32", 16, 2304 * 384, DEFAULT_LIMITS)
    assert not skinny_gemm.is_worthwhile("bf16", 128, 33856 * 128, DEFAULT_LIMITS)
    assert not skinny_gemm.is_worthwhile("fp32", 32, 33856 * 128, old)
