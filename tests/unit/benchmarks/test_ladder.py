"""Every rung computes the same of a layer, at shapes that fit no tile."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.coarse_check import WrongResultError
from benchmarks.ladder import cpu
from benchmarks.ladder.gpu import LAYERS, climb, own
from benchmarks.ladder.layer import Layer, Numbers, bound, error, exact, layer_of
from benchmarks.ladder.rungs import FOLDER, rungs
from dptrain.backends.cuda.device.nvrtc import find_compiler
from dptrain.network.layers import Conv2d, Flatten
from dptrain.network.losses import MeanSquaredError
from dptrain.network.network import Network
from tests.emulator.emulator import Emulator
from tests.tiers import tiered

pytestmark = pytest.mark.more

SHAPES = [
    Layer(2, 3, 7, 5, 5, 3, padding=1),
    Layer(1, 1, 1, 1, 1, 1),
    Layer(3, 5, 9, 11, 17, 5, stride=2, padding=2),
    Layer(2, 2, 13, 6, 18, 2),
]
WIDE = Layer(2, 32, 6, 7, 32, 3, padding=1)
"""Between so many channels weights are brought into an order of their own first."""
SOURCES = sorted(path.name for path in FOLDER.glob("*.cu"))
NAMES = [
    "direct, by image", "direct", "one block", "one block, tiles", "many blocks", "shared tiles",
    "implicit",
]  # fmt: skip


def test_exact_is_a_sum_over_windows() -> None:
    layer = SHAPES[2]
    numbers = Numbers.of(layer)
    y = exact(layer, numbers)
    assert y.shape == (3, 17, 5, 6)
    padded = np.pad(numbers.x, ((0, 0), (0, 0), (2, 2), (2, 2))).astype(float)
    window = padded[1, :, 4:9, 6:11]
    assert y[1, 16, 2, 3] == pytest.approx((window * numbers.w[16]).sum() + numbers.b[16])


@pytest.mark.parametrize("seed", tiered([0, 1], [1]), ids=["in order", "in random order"])
@pytest.mark.parametrize("layer", tiered(SHAPES, [SHAPES[1]]), ids=str)
def test_every_rung_computes_the_layer(layer: Layer, seed: int) -> None:
    numbers = Numbers.of(layer)
    wanted = exact(layer, numbers)
    # The emulator finds sources in its own folder, and reports every race and stray access.
    ladder = rungs(Emulator(seed, FOLDER), layer, numbers, "")
    assert [rung.name for rung in ladder] == NAMES
    ladder.append(own(Emulator(seed), layer, numbers, "fp32"))
    for rung in ladder:
        rung.start()
        rung.start()
        assert rung.result().shape == wanted.shape
        assert error(rung.result(), wanted) <= bound(layer), rung.name


@pytest.mark.parametrize("layer", SHAPES, ids=str)
def test_every_version_on_the_processor_computes_the_layer(layer: Layer) -> None:
    numbers = Numbers.of(layer)
    wanted = exact(layer, numbers)
    found = cpu.rungs(layer, numbers)
    assert [rung.extra_bytes for rung in found] == [0, *[4 * layer.terms * layer.pixels] * 2]
    for rung in found:
        rung.start()
        rung.start()
        assert error(rung.result(), wanted) <= bound(layer), rung.name


def test_a_version_that_computes_something_else_is_not_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def wrong(a: np.ndarray, b: np.ndarray, bias: np.ndarray, c: np.ndarray) -> None:
        np.matmul(a, b, out=c)

    monkeypatch.setattr(cpu, "library_product", wrong)
    with pytest.raises(WrongResultError, match="im2col, BLAS"):
        cpu.measure_rungs(SHAPES[0], rounds=1, block_s=0.0)


@pytest.mark.parametrize("layer", tiered([SHAPES[2], WIDE], [SHAPES[2]]), ids=str)
def test_our_own_kernels_are_given_what_they_keep_in_fewer_bits(layer: Layer) -> None:
    numbers = Numbers.of(layer)
    wanted = exact(layer, numbers)
    rung = own(Emulator(0), layer, numbers, "bf16")
    rung.start()
    off = error(rung.result(), wanted)
    assert bound(layer) < off <= bound(layer, "bf16")


def test_a_buffer_serves_one_image_after_another() -> None:
    few, many = SHAPES[0], Layer(9, 3, 7, 5, 5, 3, padding=1)
    sizes = [
        [rung.extra_bytes for rung in rungs(Emulator(0, FOLDER), layer, Numbers.of(layer), "")]
        for layer in (few, many)
    ]  # fmt: skip
    assert sizes[0] == sizes[1] == [0] * 2 + [4 * 27 * 35] * 4 + [0]


def test_a_wrong_result_is_noticed() -> None:
    layer = SHAPES[0]
    wanted = exact(layer, Numbers.of(layer))
    most = bound(layer)
    assert error(wanted * (1 + 1e-4), wanted) > most
    turned = wanted[..., ::-1, :]
    assert error(turned, wanted) > most


@pytest.mark.more
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
        conv = Conv2d(layer.filters, layer.kernel, layer.stride, layer.padding)
        shape = layer.channels, layer.height, layer.width
        node = Network(shape, [conv, Flatten()], MeanSquaredError(), name).nodes[0]
        assert node.output_shape == (layer.filters, *layer.out)
        assert 4 * node.flops.forward == layer.flops + 4 * layer.filters * layer.pixels


def test_climbing_prints_a_line_a_rung(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    times_ms = {"PyTorch fp32": [0.4, 0.5, 0.6]}
    monkeypatch.setattr("benchmarks.ladder.gpu.torch_ms", lambda *_: times_ms)
    layer = SHAPES[0]
    device = Emulator(0)
    monkeypatch.setattr(
        "benchmarks.ladder.gpu.rungs",
        lambda _, *rest: rungs(Emulator(0, FOLDER), *rest, ""),
    )
    monkeypatch.setattr(Emulator, "times_ms", lambda self, start: (start(), [1.0, 2.0, 3.0])[1])
    climb(device, "a layer", layer, "fp32")
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("a layer: 2 images 3x7x5 to 5x7x5")
    names = [name.split()[0] for name in NAMES]
    assert [line.split()[0] for line in lines[3:]] == [*names, "dptrain", "PyTorch"]
