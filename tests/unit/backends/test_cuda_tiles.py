"""Matrix products on the emulator: every tile, parts of sums, and kernels made for one layer."""

from __future__ import annotations

import pytest

from dptrain.api import compile
from dptrain.backends.cuda import weighted
from dptrain.backends.cuda.tiles import (
    DEPTH,
    SMALLEST_PART,
    TILES,
    WANTED_BLOCKS,
    Tile,
    choose_tile,
    cut,
)
from dptrain.network import Conv2d, Dense, Flatten, Network, ReLU
from tests.emulator.emulator import Emulator
from tests.unit.backends.test_cuda_backend import PLAIN, assert_close, batch, rounding, step

# 35 columns leave every tile but the largest a rest; strides and pads reach every branch.
ODD = Network(
    (3, 11, 9),
    [Conv2d(35, (3, 2)), ReLU(), Conv2d(5, 3, stride=2, padding=1), Flatten(), Dense(37), ReLU(),
     Dense(3)],
    name="odd",
)  # fmt: skip


@pytest.mark.parametrize("tile", TILES, ids=lambda tile: f"{tile.rows}x{tile.columns}")
def test_every_tile_gives_the_same(tile: Tile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks and threads in a random order, on an emulator that reports races."""
    emulator = Emulator(seed=5)
    monkeypatch.setattr("dptrain.backends.cuda.backend.open_device", lambda rank: emulator)
    monkeypatch.setattr(weighted, "choose_tile", lambda rows, columns: tile)
    ours, reference = compile(ODD, "cuda", 5), compile(ODD, "reference", 5)
    assert_close(step(ours, 5, 0), step(reference, 5, 0), rounding(ODD, 5))
    for name, value in reference.gradients.items():
        assert_close(ours.gradients[name], value, rounding(ODD, 5), name)


def test_kernels_made_for_a_layer_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    general = compile(ODD, "cuda", 3)
    emulator = Emulator(specializes=True)
    monkeypatch.setattr("dptrain.backends.cuda.backend.open_device", lambda rank: emulator)
    special = compile(ODD, "cuda", 3)
    assert special.forward_backward(*batch(ODD, 3)) == general.forward_backward(*batch(ODD, 3))
    for name, value in general.gradients.items():
        assert (special.gradients[name] == value).all(), name


@pytest.mark.parametrize("rows", [1, 64, 1000, 10**6])
@pytest.mark.parametrize("columns", [1, 16, 17, 33, 64, 65, 1000])
def test_the_tile_chosen_is_no_wider_than_it_must_be(rows: int, columns: int) -> None:
    tile = choose_tile(rows, columns)
    narrower = [t for t in TILES if t.columns < tile.columns]
    assert all(t.columns < columns for t in narrower)


@pytest.mark.parametrize("terms", [1, 15, 16, 255, 257, 4097, 123457, 10**7])
@pytest.mark.parametrize("tiles", [1, 7, 300])
def test_parts_cover_a_sum_once(terms: int, tiles: int) -> None:
    parts = cut(terms, tiles)
    assert (parts.count - 1) * parts.terms < terms <= parts.count * parts.terms
    assert parts.terms % DEPTH == 0
    assert parts.terms >= SMALLEST_PART
    assert parts.count * tiles < WANTED_BLOCKS + tiles
    assert parts.used(terms) == parts.count
    assert parts.used(0) == 1


def test_a_smaller_batch_has_the_same_parts() -> None:
    """Where no part is larger than it must be, gradients do not depend on the room there is."""
    small, large = compile(PLAIN, "cuda", 8), compile(PLAIN, "cuda", 16)
    x, y = batch(PLAIN, 8)
    assert small.forward_backward(x, y) == large.forward_backward(x, y)
    for name, value in small.gradients.items():
        assert (large.gradients[name] == value).all(), name
