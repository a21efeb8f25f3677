"""Dense layers of few samples on the emulator: every cut, odd shapes, and how they are cut."""

from __future__ import annotations

import pytest

from dptrain.api import make_replica
from dptrain.backends.cuda import skinny_gemm
from dptrain.backends.cuda.halo_tiles import MULTIPROCESSORS, SIZES
from dptrain.backends.cuda.skinny_gemm import COLUMNS, SAMPLES, SHARED_BYTES, SkinnyTile
from dptrain.network import Dense, Dropout, Flatten, Network, ReLU
from tests.emulator.emulator import Emulator
from tests.unit.backends import test_cuda_backend as whole
from tests.unit.backends.test_cuda_backend import assert_close, rounding
from tests.unit.backends.twin import ROUNDOFFS

# Rows of 37, 132 and 10 are copied by pieces of 4, 16 and 8 bytes; in bfloat16 37 not by copies.
DEEP = Network(
    (3, 5, 7),
    [Flatten(), Dense(37), ReLU(), Dense(132), ReLU(), Dropout(0.25), Dense(10), ReLU(), Dense(3)],
    name="deep",
)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of any size have these kernels here."""
    monkeypatch.setattr(skinny_gemm, "MANY_WEIGHTS", 0)


@pytest.mark.parametrize("precision", SIZES)
@pytest.mark.parametrize("columns", COLUMNS)
def test_every_cut_gives_the_same(
    precision: str, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In two tiles of samples, blocks and threads in a random order, races reported."""
    emulator = Emulator(seed=3)
    monkeypatch.setattr("dptrain.backends.cuda.backend.open_device", lambda rank: emulator)
    monkeypatch.setattr(skinny_gemm, "COLUMNS", (columns,))
    n = SAMPLES + 3
    if columns in (32, 128):  # As if blocks had room for no more.
        monkeypatch.setattr(
            skinny_gemm, "SHARED_BYTES", SkinnyTile(columns, 48, SIZES[precision]).shared_bytes
        )
    ours = make_replica(DEEP, "cuda", n, precision=precision)
    in_parts = any("forward_partial" in name for name in ours.plan.buffers)
    assert in_parts == (columns in (32, 128))
    monkeypatch.setattr(skinny_gemm, "MOST_SAMPLES", 0)
    sliced = make_replica(DEEP, "cuda", n, precision=precision)
    # Factors are rounded the same way. Only the order of sums differs, by which one in many is
    # rounded to its other neighbour later.
    tolerance = rounding(DEEP, n) + ROUNDOFFS[precision]
    assert_close(whole.step(ours, n, 0), whole.step(sliced, n, 0), tolerance)
    for name, value in sliced.gradients.items():
        assert_close(ours.gradients[name], value, tolerance, name)


def test_a_device_with_little_shared_memory_computes_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    emulator = Emulator()
    emulator.shared_bytes = 0
    roomy = make_replica(DEEP, "cuda", 5, precision="tf32")
    monkeypatch.setattr("dptrain.backends.cuda.backend.open_device", lambda rank: emulator)
    tight = make_replica(DEEP, "cuda", 5, precision="tf32")
    loss = whole.step(roomy, 5, 0)
    assert_close(whole.step(tight, 5, 0), loss, rounding(DEEP, 5))


@pytest.mark.parametrize("precision", SIZES)
@pytest.mark.parametrize("inputs", [1, 50, 2048, 33856, 10**6])
@pytest.mark.parametrize("outputs", [1, 10, 128, 3000])
def test_parts_cover_the_sum_once(precision: str, inputs: int, outputs: int) -> None:
    tiling = skinny_gemm.forward_tiling(precision, 32, inputs, outputs)
    parts = tiling.parts
    assert (parts.count - 1) * parts.terms < inputs <= parts.count * parts.terms
    assert tiling.tile.shared_bytes <= SHARED_BYTES


def test_few_samples_of_few_weights_take_one_pass_and_many_weights_all_multiprocessors() -> None:
    small, large = (skinny_gemm.forward_tiling("tf32", 32, n, 100) for n in (100, 30000))
    assert small.parts.count == 1
    assert large.parts.count * large.tile.grid(32, 100)[1] >= MULTIPROCESSORS


def test_more_outputs_than_a_block_has_room_for_are_not_for_it() -> None:
    assert skinny_gemm.backward_tile("tf32", 32, 100, 384) is not None
    assert skinny_gemm.backward_tile("tf32", 32, 100, 3200) is None


def test_they_are_for_few_samples_of_many_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert skinny_gemm.suits("tf32", 32, 33856 * 128)
    assert not skinny_gemm.suits("tf32", 32, 2304 * 384)
    assert not skinny_gemm.suits("bf16", 128, 33856 * 128)
    assert not skinny_gemm.suits("fp32", 32, 33856 * 128)
