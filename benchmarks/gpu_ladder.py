"""From a naive matrix product to the convolution that trains: what each step up gains on a GPU.

    python3 -m benchmarks.gpu_ladder [--batch N] [--precision P] [LAYER ...]

Needs a GPU and CuPy; PyTorch's convolution, by cuDNN, is timed too where it is there. A layer is a
network's, such as cifar:conv2. Each rung is first compared with float64, then timed in a CUDA
graph. docs/kernels.md says what the rungs are.
"""

from __future__ import annotations

import importlib.util
import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

from dptrain.backends.cuda.backend import CudaBackend
from dptrain.backends.cuda.device import Array, Device
from dptrain.backends.cuda.tiles import ceil_div
from dptrain.errors import UserError
from dptrain.network.layers import Conv2d, Dense, Flatten
from dptrain.network.losses import MeanSquaredError
from dptrain.network.network import Network
from dptrain.network.zoo import network
from dptrain.plan.lowering import Phase
from dptrain.plan.plan import make_plan

FOLDER = Path(__file__).parent / "ladder"
"""Of the sources."""

LAYERS = ("model0:conv1", "model2:conv2", "cifar:conv2", "solar:conv2")
TILE = 16
BLOCK = 256
"""Threads where they stand in a row."""


@dataclass(frozen=True)
class Layer:
    """A convolution of square kernels, N images (C, H, W) to (K, Ho, Wo)."""

    samples: int
    channels: int
    height: int
    width: int
    filters: int
    kernel: int
    stride: int = 1
    padding: int = 0

    @property
    def out(self) -> tuple[int, int]:
        """Ho and Wo."""
        reach = 2 * self.padding - self.kernel
        return (self.height + reach) // self.stride + 1, (self.width + reach) // self.stride + 1

    @property
    def pixels(self) -> int:
        """Ho · Wo."""
        return self.out[0] * self.out[1]

    @property
    def terms(self) -> int:
        """C · R · S."""
        return self.channels * self.kernel**2

    @property
    def geometry(self) -> tuple[int, ...]:
        """What kernels are told: C, H, W, R, S, stride, padding, Ho, Wo."""
        maps = self.channels, self.height, self.width
        return *maps, self.kernel, self.kernel, self.stride, self.padding, *self.out

    @property
    def flops(self) -> int:
        """Of all images, a multiply-add being two."""
        return 2 * self.samples * self.filters * self.pixels * self.terms

    @property
    def network(self) -> Network:
        """One that begins with it."""
        conv = Conv2d(self.filters, self.kernel, self.stride, self.padding)
        shape = self.channels, self.height, self.width
        return Network(shape, [conv, Flatten(), Dense(1)], MeanSquaredError(), "ladder")


@dataclass(frozen=True)
class Numbers:
    """Inputs of a layer: x (N, C, H, W), w (K, C, R, S), b (K,)."""

    x: NDArray[np.float32]
    w: NDArray[np.float32]
    b: NDArray[np.float32]

    @classmethod
    def of(cls, layer: Layer) -> Numbers:
        """Normal ones."""
        random = np.random.default_rng(0)
        images = layer.samples, layer.channels, layer.height, layer.width
        filters = layer.filters, layer.channels, layer.kernel, layer.kernel
        shapes = images, filters, (layer.filters,)
        return cls(*(random.standard_normal(shape, dtype=np.float32) for shape in shapes))


def exact(layer: Layer, numbers: Numbers) -> NDArray[np.float64]:
    """(N, K, Ho, Wo) in float64."""
    p, step = layer.padding, layer.stride
    x = np.pad(numbers.x.astype(np.float64), ((0, 0), (0, 0), (p, p), (p, p)))
    windows = np.lib.stride_tricks.sliding_window_view(x, numbers.w.shape[2:], (2, 3))
    y = np.einsum("nchwrs,kcrs->nkhw", windows[:, :, ::step, ::step], numbers.w, optimize=True)
    return np.asarray(y + numbers.b[:, None, None])


@dataclass(frozen=True)
class Rung:
    """A way of computing the layer, bound to memory.

    Attributes:
        name: of the rung.
        start: enqueues it.
        result: (N, K, Ho, Wo) as the last start left it.
        extra_bytes: memory besides input, weights and output.
    """

    name: str
    start: Callable[[], None]
    result: Callable[[], NDArray[Any]]
    extra_bytes: int = 0


def rungs(device: Device, layer: Layer, numbers: Numbers, folder: str = f"{FOLDER}/") -> list[Rung]:
    """The rungs below our own kernels, lowest first.

    Args:
        device: what computes.
        layer, numbers: what is computed.
        folder: of the sources, as the device is to be told.
    """
    x, w, b = (_uploaded(device, values) for values in (numbers.x, numbers.w, numbers.b))
    bind = partial(_unrolled, device, layer, (x, w, b), folder)
    wide, high = ceil_div(layer.pixels, TILE), ceil_div(layer.filters, TILE)
    square = (TILE, TILE, 1)
    return [
        bind("one block", "one_block.cu", (1, 1, 1), (1024, 1, 1)),
        bind("many blocks", "many_blocks.cu", (wide, high, 1), square),
        bind("shared tiles", "shared_tiles.cu", (wide, high, 1), square),
        _implicit(device, layer, (x, w, b), folder),
    ]


def _uploaded(device: Device, values: NDArray[np.float32]) -> Array:
    array = device.zeros(values.shape, "float32")
    device.upload(array, values)
    return array


def _unrolled(
    device: Device,
    layer: Layer,
    arrays: tuple[Array, Array, Array],
    folder: str,
    name: str,
    file: str,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
) -> Rung:
    """Image by image: unroll it into a buffer that is used again, then multiply."""
    x, w, b = arrays
    y = device.zeros((layer.samples, layer.filters, *layer.out), "float32")
    buffer = device.zeros((layer.terms, layer.pixels), "float32")
    unroll = device.function(f"{folder}im2col.cu", "im2col")
    tile = {"TILE": TILE} if "tiles" in file else {}
    product = device.function(f"{folder}{file}", "product", **tile)
    shape = [np.int32(value) for value in layer.geometry]
    sizes = [np.int32(v) for v in (layer.filters, layer.pixels, layer.terms)]
    unroll_grid = ceil_div(layer.terms * layer.pixels, BLOCK), 1, 1

    def start() -> None:
        for n in range(layer.samples):
            unroll(unroll_grid, (BLOCK, 1, 1), [x[n], buffer, *shape])
            product(grid, block, [w, buffer, b, y[n], *sizes])

    return Rung(name, start, lambda: device.download(y), buffer.nbytes)


def _implicit(
    device: Device, layer: Layer, arrays: tuple[Array, Array, Array], folder: str
) -> Rung:
    x, w, b = arrays
    y = device.zeros((layer.samples, layer.filters, *layer.out), "float32")
    function = device.function(f"{folder}implicit.cu", "convolution", TILE=TILE)
    grid = ceil_div(layer.samples * layer.pixels, TILE), ceil_div(layer.filters, TILE), 1
    channels, height, width, *rest = layer.geometry
    numbers = layer.samples, channels, height, width, layer.filters, *rest
    sizes = [np.int32(value) for value in numbers]
    return Rung("implicit", lambda: function(grid, (TILE, TILE, 1), [x, w, b, y, *sizes]),
                lambda: device.download(y))  # fmt: skip


def own(device: Device, layer: Layer, numbers: Numbers, precision: str) -> Rung:
    """The kernel of the `cuda` backend, with nothing fused behind it."""
    backend = CudaBackend()
    backend.__dict__["device"] = device
    plan = make_plan(layer.network, backend, layer.samples, precision=precision, training=False)
    replica = backend.compile(plan)
    replica.parameters["conv1.weight"] = numbers.w
    replica.parameters["conv1.bias"] = numbers.b
    replica.load(numbers.x, None, training=False)
    kernel = next(k for s, k in replica.stages if s.group == "conv1" and s.phase is Phase.FORWARD)
    name = plan.resolve("conv1")

    def result() -> NDArray[Any]:
        from dptrain.backends.memory import as_numbers

        stored = as_numbers(device.download(replica._views[name]))
        return np.asarray(stored.transpose(0, 3, 1, 2))

    return Rung(f"dptrain {precision}", lambda: kernel(replica.context), result)


def torch_ms(layer: Layer, numbers: Numbers, precision: str) -> float | None:
    """Median of PyTorch's convolution, channels last, in a CUDA graph; None without PyTorch."""
    if importlib.util.find_spec("torch") is None:
        return None
    import torch

    from benchmarks.gpu_products import torch_timed

    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    last = torch.channels_last
    x, w = (torch.from_numpy(v).to("cuda", dtype).contiguous(memory_format=last)
            for v in (numbers.x, numbers.w))  # fmt: skip
    b = torch.from_numpy(numbers.b).to("cuda", dtype)
    run = partial(torch.conv2d, x, w, b, layer.stride, layer.padding)
    return float(torch_timed(run, 10)) / 1e3


def error(found: NDArray[Any], wanted: NDArray[np.float64]) -> float:
    """Largest distance, in root mean squares of what is wanted."""
    return float(np.abs(found - wanted).max() / np.sqrt(np.mean(wanted**2)))


ROUNDING = {"fp32": 2.0**-24, "tf32": 2.0**-11, "bf16": 2.0**-8}


def bound(layer: Layer, precision: str = "fp32") -> float:
    """Most that `error` of a right result is.

    A sum of `terms` products in any order errs by at most (terms + 1) roundings of the sum of their
    magnitudes, which for normal factors is about 0.64 · terms, where the sum itself has a root mean
    square of about √terms; factors of TF32 and bfloat16 are rounded besides.
    Source: Higham, "Accuracy and stability of numerical algorithms", 2002, section 3.1.
    """
    sums = (layer.terms + 1) * ROUNDING["fp32"]
    factors = 0.0 if precision == "fp32" else 3 * ROUNDING[precision]
    return (sums + factors) * math.sqrt(layer.terms)


def layer_of(name: str, samples: int) -> Layer:
    """A layer of the zoo by a name such as ``cifar:conv2``."""
    title, _, wanted = name.partition(":")
    for node in network(title).nodes:
        if node.name == wanted and isinstance(node.layer, Conv2d):
            (channels, height, width), layer = node.input_shape, node.layer
            (top, _), _ = layer.pads(node.input_shape)
            size, step = layer.window[0], layer.strides[0]
            return Layer(samples, channels, height, width, layer.filters, size, step, top)
    raise UserError(f"no convolution '{name}'; expected a network's layer such as cifar:conv2")


def climb(device: Device, name: str, layer: Layer, precision: str) -> None:
    """Check and time every rung of a layer, and print a table."""
    numbers = Numbers.of(layer)
    wanted = exact(layer, numbers)
    ladder = [(rung, "fp32") for rung in rungs(device, layer, numbers)]
    words = dict.fromkeys(("fp32", precision))
    ladder += [(own(device, layer, numbers, word), word) for word in words]
    out = "x".join(map(str, (layer.filters, *layer.out)))
    print(
        f"\n{name}: {layer.samples} images {layer.channels}x{layer.height}x{layer.width} to {out}"
    )
    print(f"{'rung':<16}{'µs':>12}{'quartiles':>20}{'GFLOP/s':>12}{'gains':>8}{'buffer MB':>11}")
    before = None
    for rung, word in ladder:
        rung.start()
        off = error(rung.result(), wanted)
        if off > bound(layer, word):
            raise SystemExit(
                f"{rung.name}: {off:.1e} from float64, more than {bound(layer, word):.1e}"
            )
        times = device.times_ms(rung.start)
        low, middle, high = statistics.quantiles(times, n=4)
        gains = f"{before / middle:.1f}" if before else ""
        print(
            f"{rung.name:<16}{1e3 * middle:>12,.1f}{1e3 * low:>10,.1f}{1e3 * high:>10,.1f}"
            f"{layer.flops / middle / 1e6:>12,.0f}{gains:>8}{rung.extra_bytes / 1e6:>11.2f}",
            flush=True,
        )
        before = middle
    for word in words:
        theirs = torch_ms(layer, numbers, word)
        if theirs is not None:
            print(f"{f'PyTorch {word}':<16}{1e3 * theirs:>12,.1f}{'':>20}"
                  f"{layer.flops / theirs / 1e6:>12,.0f}")  # fmt: skip


@click.command()
@click.option("--batch", default=32, show_default=True, help="Images.")
@click.option("--precision", default="tf32", show_default=True, help="Of a last rung.")
@click.argument("names", nargs=-1, metavar="[LAYER]...")
def main(batch: int, precision: str, names: tuple[str, ...]) -> None:
    """Check and time every rung of the ladder on some layers."""
    from dptrain.backends.cuda.backend import open_device

    try:
        device = open_device(0)
        print(device.name)
        for name in names or LAYERS:
            climb(device, name, layer_of(name, batch), precision)
    except UserError as problem:
        print(f"benchmarks.gpu_ladder: {problem}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
