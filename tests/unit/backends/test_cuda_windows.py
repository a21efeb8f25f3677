"""Convolutions by windows of maps on the emulator: every way to cut them, at odd shapes."""

from __future__ import annotations

from typing import Any

import pytest

from dptrain.api import compile
from dptrain.backends.cuda import windows
from dptrain.backends.cuda.sliding import SlidingConvolution
from dptrain.backends.cuda.windows import View, pixel_sums, slides
from dptrain.backends.replica import Replica
from dptrain.network import Conv2d, Dense, Dropout, Flatten, MaxPool2d, Network, ReLU
from dptrain.network.zoo import network
from tests.emulator.emulator import Emulator
from tests.unit.backends import test_cuda_backend as whole
from tests.unit.backends.test_cuda_backend import assert_close, rounding
from tests.unit.backends.twin import ROUNDOFFS

# Pooling leaves out a column; patches of the third convolution are larger than its maps, and of an
# even width, so that maps have more zeros behind them than before; 96 filters are a tile and a
# half.
WIDE = Network(
    (3, 6, 7),
    [
        Conv2d(32), ReLU(), Conv2d(96, padding="valid"), ReLU(), MaxPool2d(2), Dropout(0.25),
        Conv2d(32, (3, 4), padding="same"), ReLU(), Conv2d(32, 2, padding="full"), Flatten(),
        Dense(3),
    ],
    name="wide",
)  # fmt: skip


def ways(number: int) -> tuple[Any, Any]:
    """The ways of this number, the last again and again, to slide and to sum."""

    def slide(view: View, precision: str, samples: int, *, pooled: bool = False) -> Any:
        found = list(slides(view, precision, pooled=pooled))
        return found[min(number, len(found) - 1)]

    def pixel_sum(view: View, precision: str, terms: int, *, pooled: bool = False) -> Any:
        found = list(pixel_sums(view, precision, pooled=pooled))
        rows = view.r * view.s * view.channels + 1
        return found[min(number * 2, len(found) - 1)].tiling(rows, view.filters, terms)

    return slide, pixel_sum


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
@pytest.mark.parametrize("number", range(3))
def test_every_way_gives_the_same(
    number: int, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks and threads in a random order, on an emulator that reports races.

    Beside products that gather their patches, which round the same factors: a value may be rounded
    the other way where sums in another order differ, once in each layer, there and back.
    """
    gathered = gathering(5, precision, monkeypatch)
    emulator = Emulator(seed=5)
    monkeypatch.setattr("dptrain.backends.cuda.backend.open_device", lambda rank: emulator)
    slide, pixel_sum = ways(number)
    # One block for all tiles, and several.
    monkeypatch.setattr(windows, "MULTIPROCESSORS", number)
    monkeypatch.setattr(windows, "choose_slide", slide)
    monkeypatch.setattr(windows, "choose_pixel_sum", pixel_sum)
    ours = compile(WIDE, "cuda", 5, precision=precision)
    assert sum(name.endswith("packed") for name in ours.plan.buffers) == 3
    tolerance = rounding(WIDE, 5) + ROUNDOFFS[precision]
    for n in (5, 2):
        assert_close(whole.step(ours, n, 0), whole.step(gathered, n, 0), tolerance)
        for name, value in gathered.gradients.items():
            assert_close(ours.gradients[name], value, tolerance, name)


def gathering(n: int, precision: str, monkeypatch: pytest.MonkeyPatch) -> Replica:
    """A replica of `WIDE` without windows."""
    with monkeypatch.context() as patch:
        patch.setattr(SlidingConvolution, "suits", lambda group, setting: False)
        return compile(WIDE, "cuda", n, precision=precision)


def test_blocks_with_little_shared_memory_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    gathered = gathering(3, "tf32", monkeypatch)
    monkeypatch.setattr(Emulator, "shared_bytes", 16 << 10)
    monkeypatch.setattr(windows, "FEWEST_PIXELS", {"tf32": 0})
    monkeypatch.setattr(windows, "FEWEST_TERMS", 0)
    ours = compile(WIDE, "cuda", 3, precision="tf32")
    assert whole.step(ours, 3, 0) == whole.step(gathered, 3, 0)
    for name, value in gathered.gradients.items():
        assert (ours.gradients[name] == value).all(), name


VIEWS = [
    View.forward(node)
    for name in ("cifar", "solar", "model2", "model-large")
    for node in network(name).nodes[1:]
    if isinstance(node.layer, Conv2d)
] + [View(7, 5, 32, 1, 0, 8, 5, 32, 3, 2)]


@pytest.mark.parametrize("unit", [1, 2])
@pytest.mark.parametrize("view", VIEWS, ids=str)
def test_a_window_has_room_for_the_patches_of_any_pixels(view: View, unit: int) -> None:
    width, height = view.out_width // unit, view.out_height // unit
    samples = 64 // height + 2

    def row(square: int) -> int:
        """First of a square's patches, counted over all samples."""
        sample, line = divmod(square // width, height)
        return sample * view.down + line * unit

    for count in (64, 128, 256):
        squares = count // unit**2
        rows = [
            row(first + squares - 1) + unit - 1 + view.r - row(first)
            for first in range(0, samples * width * height - squares)
        ]
        assert max(rows) <= view.rows(count, unit, view.r)


@pytest.mark.parametrize(
    ("layer", "precision", "expected"),
    [
        (Conv2d(64, 5), "bf16", True), (Conv2d(64, 5), "fp32", False),
        (Conv2d(64, stride=2), "tf32", False), (Conv2d(48), "tf32", False),
        (Conv2d(32, padding="full"), "tf32", True), (Conv2d(32, 2, padding=2), "tf32", False),
    ],
)  # fmt: skip
def test_wide_layers_of_stride_one_have_windows(
    layer: Conv2d, precision: str, expected: bool
) -> None:
    node = Network((32, 8, 8), [layer, Flatten(), Dense(2)]).nodes[0]
    assert windows.suits(View.forward(node), precision, layer.strides) == expected


def test_small_products_and_maps_without_room_are_gathered() -> None:
    wide = Network((1024, 64, 64), [Conv2d(1024), Flatten(), Dense(2)]).nodes[0]
    cifar = VIEWS[0]
    assert windows.choose_slide(View.forward(wide), "tf32", 64) is None
    assert windows.choose_pixel_sum(View.forward(wide), "tf32", 10**6) is None
    assert windows.choose_slide(cifar, "bf16", 1) is None
    assert windows.choose_slide(cifar, "bf16", 2048) is not None


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
@pytest.mark.parametrize("samples", [64, 256, 2048])
def test_parts_of_pixels_cover_the_sum_once(samples: int, precision: str) -> None:
    for view in VIEWS[:5]:
        terms = samples * view.out_height * view.out_width
        tiling = windows.choose_pixel_sum(view, precision, terms)
        assert tiling is not None
        count, part = tiling.parts.count, tiling.parts.terms
        assert (count - 1) * part < terms <= count * part
        # Members of a window are in one part.
        assert part % 4 == 0
