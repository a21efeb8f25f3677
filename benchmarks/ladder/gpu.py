"""Time a ladder of convolution kernels on a GPU, from a naive product to the kernels of training.

    python3 -m benchmarks.ladder.gpu [--batch N] [--precision P] [LAYER ...]

Requires a GPU and CuPy. PyTorch's convolution by cuDNN is timed as well if PyTorch is installed. A
layer is that of a network, such as cifar:conv2. Each rung is compared with float64 and then timed
in a CUDA graph. docs/developers/kernels/convolution-gpu.md describes the rungs.
"""

from __future__ import annotations

import importlib.util
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

from benchmarks.coarse_check import WrongResultError
from benchmarks.ladder.layer import Layer, Numbers, bound, error, exact, layer_of
from benchmarks.ladder.rungs import Rung, rungs
from dptrain.backends.cuda.backend import CudaBackend
from dptrain.backends.cuda.device.device import Device
from dptrain.backends.memory import as_numbers
from dptrain.batch import Batch
from dptrain.errors import UserError
from dptrain.network.layers import Conv2d, Dense, Flatten
from dptrain.network.losses import MeanSquaredError
from dptrain.network.network import Network
from dptrain.plan.plan import make_plan

LAYERS = ("model0:conv1", "model2:conv2", "cifar:conv2", "solar:conv2")


def own(device: Device, layer: Layer, numbers: Numbers, precision: str) -> Rung:
    """Return the kernels of the `cuda` backend without fused layers."""
    backend = CudaBackend(device)
    conv = Conv2d(layer.filters, layer.kernel, layer.stride, layer.padding)
    shape = layer.channels, layer.height, layer.width
    network = Network(shape, [conv, Flatten(), Dense(1)], MeanSquaredError(), "ladder")
    plan = make_plan(network, backend, layer.samples, precision=precision, training=False)
    replica = backend.make_replica(plan)
    replica.parameters["conv1.weight"], replica.parameters["conv1.bias"] = numbers.w, numbers.b
    replica.load(Batch.of(numbers.x), training=False)
    kernel = next(kernel for stage, kernel in replica.stages if stage.group == "conv1")

    def result() -> NDArray[Any]:
        stored = as_numbers(device.download(replica._views[plan.resolve("conv1")]))
        return np.asarray(stored.transpose(0, 3, 1, 2))

    return Rung(f"dptrain {precision}", lambda: kernel(replica.context), result)


def torch_ms(layer: Layer, numbers: Numbers, precisions: Sequence[str]) -> dict[str, list[float]]:
    """Return times of PyTorch in CUDA graphs by program; none if it is not installed.

    The programs are im2col and cuBLAS's product for each image in fp32, and the convolutions of
    cuDNN, channels last.
    """
    if importlib.util.find_spec("torch") is None:
        return {}
    import torch

    from benchmarks.gpu.peers.theirs import set_arithmetic
    from benchmarks.gpu.peers.torch_layers import laps_us

    torch.backends.cudnn.benchmark = True
    x, w, b = (torch.from_numpy(v).to("cuda") for v in (numbers.x, numbers.w, numbers.b))
    rows, column = w.reshape(layer.filters, -1), b[:, None]

    def products() -> Any:
        unfold = partial(torch.nn.functional.unfold, kernel_size=layer.kernel,
                         padding=layer.padding, stride=layer.stride)  # fmt: skip
        return [torch.addmm(column, rows, unfold(image[None])[0]) for image in x]

    def times_ms(run: Any, precision: str) -> list[float]:
        set_arithmetic(precision)
        return [us / 1e3 for us in laps_us(run, 10)]

    found = {"im2col, cuBLAS": times_ms(products, "fp32")}
    for precision in precisions:
        cast = torch.bfloat16 if precision == "bf16" else torch.float32
        maps, filters = (v.to(cast, memory_format=torch.channels_last) for v in (x, w))
        run = partial(torch.conv2d, maps, filters, b.to(cast), layer.stride, layer.padding)
        found[f"PyTorch {precision}"] = times_ms(run, precision)
    return found


@dataclass(frozen=True)
class Row:
    """Time of a rung in ms with its quartiles, rate, memory for intermediate values, repeats."""

    rung: str
    median_ms: float
    low_ms: float
    high_ms: float
    gflops: float
    extra_bytes: int
    n: int


def measure_rungs(device: Device, layer: Layer, precisions: Sequence[str]) -> Iterator[Row]:
    """Check and time every rung of a layer, then the backend's own kernels, then libraries.

    Args:
        device: the GPU.
        layer: the convolution.
        precisions: of the backend's own kernels and of PyTorch.
    """
    numbers = Numbers.of(layer)
    wanted = exact(layer, numbers)
    ladder = [(rung, "fp32") for rung in rungs(device, layer, numbers)]
    ladder += [(own(device, layer, numbers, word), word) for word in precisions]
    for rung, word in ladder:
        rung.start()
        off, most = error(rung.result(), wanted), bound(layer, word)
        if off > most:
            raise WrongResultError(f"{rung.name}: {off:.1e} from float64, more than {most:.1e}")
        yield _row(rung.name, device.times_ms(rung.start), layer, rung.extra_bytes)
    for name, times_ms in torch_ms(layer, numbers, precisions).items():
        yield _row(name, times_ms, layer, 0)


def _row(name: str, times_ms: Sequence[float], layer: Layer, extra_bytes: int) -> Row:
    low, middle, high = statistics.quantiles(times_ms, n=4)
    rate = layer.flops / middle / 1e6
    return Row(name, middle, low, high, rate, extra_bytes, len(times_ms))


def climb(device: Device, name: str, layer: Layer, precision: str) -> None:
    """Check and time every rung of a layer, and print a table."""
    out = "x".join(map(str, (layer.filters, *layer.out)))
    shape = f"{layer.channels}x{layer.height}x{layer.width}"
    print(f"\n{name}: {layer.samples} images {shape} to {out}")
    print(f"{'rung':<18}{'µs':>12}{'quartiles':>20}{'GFLOP/s':>12}{'gains':>8}{'buffer MB':>11}")
    before = None
    for row in measure_rungs(device, layer, tuple(dict.fromkeys(("fp32", precision)))):
        gains = f"{before / row.median_ms:.1f}" if before else ""
        print(
            f"{row.rung:<18}{1e3 * row.median_ms:>12,.1f}{1e3 * row.low_ms:>10,.1f}"
            f"{1e3 * row.high_ms:>10,.1f}{row.gflops:>12,.0f}{gains:>8}"
            f"{row.extra_bytes / 1e6:>11.2f}",
            flush=True,
        )
        before = row.median_ms


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
        print(f"benchmarks.ladder.gpu: {problem}", file=sys.stderr)
        sys.exit(2)
    except WrongResultError as problem:
        sys.exit(str(problem))


if __name__ == "__main__":
    main()
