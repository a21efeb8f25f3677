"""Every rung of the ladder computes the same convolution, at shapes that fit no tile."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.gpu_ladder import (
    FOLDER,
    LAYERS,
    Layer,
    Numbers,
    bound,
    climb,
    error,
    exact,
    layer_of,
    own,
    rungs,
)
from dptrain.backends.cuda.nvrtc import find_compiler
from tests.emulator.emulator import Emulator

SHAPES = [
    Layer(2, 3, 7, 5, 5, 3, padding=1),
    Layer(1, 1, 1, 1, 1, 1),
    Layer(3, 5, 9, 11, 17, 5, stride=2, padding=2),
    Layer(2, 2, 13, 6, 18, 2),
]
SOURCES = sorted(path.name for path in FOLDER.glob("*.cu"))


def test_exact_is_a_sum_over_windows() -> None:
    layer = SHAPES[2]
    numbers = Numbers.of(layer)
    y = exact(layer, numbers)
    assert y.shape == (3, 17, 5, 6)
    padded = np.pad(numbers.x, ((0, 0), (0, 0), (2, 2), (2, 2))).astype(float)
    window = padded[1, :, 4:9, 6:11]
    assert y[1, 16, 2, 3] == pytest.approx((window * numbers.w[16]).sum() + numbers.b[16])


@pytest.mark.parametrize("seed", [0, 1], ids=["in order", "in random order"])
@pytest.mark.parametrize("layer", SHAPES, ids=str)
def test_every_rung_computes_the_convolution(layer: Layer, seed: int) -> None:
    numbers = Numbers.of(layer)
    wanted = exact(layer, numbers)
    # The emulator finds sources in its own folder, and reports every race and stray access.
    ladder = rungs(Emulator(seed, FOLDER), layer, numbers, "")
    ladder.append(own(Emulator(seed), layer, numbers, "fp32"))
    assert len({rung.name for rung in ladder}) == 5
    for rung in ladder:
        rung.start()
        rung.start()
        assert error(rung.result(), wanted) <= bound(layer), rung.name


def test_a_buffer_serves_one_image_after_another() -> None:
    few, many = SHAPES[0], Layer(9, 3, 7, 5, 5, 3, padding=1)
    sizes = [[r.extra_bytes for r in rungs(Emulator(0, FOLDER), layer, Numbers.of(layer), "")]
             for layer in (few, many)]  # fmt: skip
    assert sizes[0] == sizes[1] == [4 * 27 * 35] * 3 + [0]


def test_a_wrong_result_is_noticed() -> None:
    layer = SHAPES[0]
    numbers = Numbers.of(layer)
    wanted = exact(layer, numbers)
    assert error(wanted + numbers.b[:, None, None], wanted) > bound(layer)
    assert error(wanted * (1 + 1e-4), wanted) > bound(layer)


@pytest.mark.parametrize("architecture", [70, 90])
@pytest.mark.parametrize("file", SOURCES)
def test_every_rung_compiles(file: str, architecture: int) -> None:
    code = find_compiler([12]).compile(FOLDER / file, architecture)
    assert code.startswith(b"\x7fELF")


def test_layers_of_networks() -> None:
    assert layer_of("cifar:conv2", 32) == Layer(32, 64, 12, 12, 64, 5, 1, 2)
    assert layer_of("solar:conv2", 2) == Layer(2, 32, 48, 48, 64, 3, 1, 0)
    for name in LAYERS:
        layer = layer_of(name, 4)
        node = layer.network.nodes[0]
        assert node.output_shape == (layer.filters, *layer.out)
        assert 4 * node.flops.forward == layer.flops + 4 * layer.filters * layer.pixels


def test_climbing_prints_a_line_a_rung(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("benchmarks.gpu_ladder.torch_ms", lambda *_: 0.5)
    layer = SHAPES[0]
    device = Emulator(0)
    monkeypatch.setattr(
        "benchmarks.gpu_ladder.rungs",
        lambda _, layer, numbers: rungs(Emulator(0, FOLDER), layer, numbers, ""),
    )
    monkeypatch.setattr(Emulator, "times_ms", lambda self, start: (start(), [1.0, 2.0, 3.0])[1])
    climb(device, "a layer", layer, "fp32")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[3:]] == [
        "one", "many", "shared", "implicit", "dptrain", "PyTorch",
    ]  # fmt: skip
