"""Time a ladder of convolution kernels on a GPU, from a naive product to the kernels of training.

    python3 -m benchmarks.ladder.gpu [--direction D] [--batch N] [--precision P] [LAYER ...]

Requires a GPU and CuPy. PyTorch's convolution by cuDNN is timed as well if PyTorch is installed. A
layer is that of a network, such as cifar:conv2; the direction is forward, weights (weight gradient)
or input (input gradient). Each rung is compared with float64 and then timed in a CUDA graph.
docs/developers/kernels/convolution-gpu.md describes the rungs.
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
from benchmarks.ladder.layer import DIRECTIONS, Layer, Numbers, bound, error, exact, layer_of
from benchmarks.ladder.rungs import Rung, rungs
from dptrain.backends.cuda.backend import CudaBackend
from dptrain.backends.cuda.device.device import Device
from dptrain.backends.memory import as_numbers
from dptrain.backends.replica import Replica
from dptrain.batch import Batch
from dptrain.errors import UserError
from dptrain.network.layers import Conv2d, Dense, Flatten
from dptrain.network.losses import MeanSquaredError
from dptrain.network.network import Network
from dptrain.plan.lowering import Phase
from dptrain.plan.plan import make_plan

LAYERS = ("model0:conv1", "model2:conv2", "cifar:conv2", "solar:conv2")


def own(device: Device, layer: Layer, numbers: Numbers, direction: Phase, precision: str) -> Rung:
    """Return the kernels of the `cuda` backend without fused layers.

    The weight gradient includes the bias gradient.
    """
    backend = CudaBackend(device)
    conv = Conv2d(layer.filters, layer.kernel, layer.stride, layer.padding)
    # The first layer has no input gradient.
    first = [Conv2d(layer.channels, 1)] if direction is Phase.BACKWARD_INPUT else []
    group = f"conv{len(first) + 1}"
    shape = layer.channels, layer.height, layer.width
    network = Network(shape, [*first, conv, Flatten(), Dense(1)], MeanSquaredError(), "ladder")
    training = direction is not Phase.FORWARD
    plan = make_plan(network, backend, layer.samples, precision=precision, training=training)
    replica = backend.make_replica(plan)
    replica.parameters[f"{group}.weight"] = numbers.w
    replica.parameters[f"{group}.bias"] = numbers.b
    targets = np.zeros((layer.samples, 1), np.float32) if training else None
    replica.load(Batch.of(numbers.x, targets), training=training)
    stages = {stage.phase: kernel for stage, kernel in replica.stages if stage.group == group}
    if training:
        # The forward pass also packs the weights for the backward pass.
        stages[Phase.FORWARD](replica.context)
        _store_maps(replica, plan.resolve(f"d{group}"), numbers.dy)
    kernel = stages[direction]

    def result() -> NDArray[Any]:
        if direction is Phase.BACKWARD_WEIGHT:
            return replica.gradients[f"{group}.weight"]
        written = plan.resolve("dconv1" if training else group)
        stored = as_numbers(device.download(replica._views[written]))
        return np.asarray(stored.transpose(0, 3, 1, 2))

    return Rung(f"dptrain {precision}", lambda: kernel(replica.context), result)


def _store_maps(replica: Replica, name: str, values: NDArray[np.float32]) -> None:
    """Store feature maps (N, C, H, W) in a buffer, in its layout and data type."""
    view = replica._views[name]
    stored = np.ascontiguousarray(values.transpose(0, 2, 3, 1))
    if view.dtype == np.uint16:
        bits = stored.view(np.uint32)
        # Round to the nearest bfloat16, ties to even.
        stored = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    replica.memory.upload(view, stored)


def torch_ms(
    layer: Layer, numbers: Numbers, direction: Phase, precision: str
) -> list[float] | None:
    """Times of PyTorch's convolution, channels last, in a CUDA graph; None without PyTorch."""
    if importlib.util.find_spec("torch") is None:
        return None
    import torch

    from benchmarks.gpu.peers.torch_layers import laps_us

    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    last = torch.channels_last
    x, w, dy = (torch.from_numpy(v).to("cuda", dtype).contiguous(memory_format=last)
                for v in (numbers.x, numbers.w, numbers.dy))  # fmt: skip
    b = torch.from_numpy(numbers.b).to("cuda", dtype)
    if direction is Phase.FORWARD:
        run = partial(torch.conv2d, x, w, b, layer.stride, layer.padding)
    else:
        by_weights = direction is Phase.BACKWARD_WEIGHT
        steps, pads = [layer.stride] * 2, [layer.padding] * 2
        run = partial(
            torch.ops.aten.convolution_backward, dy, x, w, [layer.filters], steps, pads, [1, 1],
            False, [0, 0], 1, [not by_weights, by_weights, by_weights],
        )  # fmt: skip
    return [us / 1e3 for us in laps_us(run, 10)]


def cublas_ms(layer: Layer, numbers: Numbers) -> list[float] | None:
    """Times of im2col and cuBLAS's product for each image, by PyTorch in fp32; None without it."""
    if importlib.util.find_spec("torch") is None:
        return None
    import torch

    from benchmarks.gpu.peers.torch_layers import laps_us

    torch.backends.cuda.matmul.allow_tf32 = False
    x, w, b = (torch.from_numpy(v).to("cuda") for v in (numbers.x, numbers.w, numbers.b))
    w, b, unfold = w.reshape(layer.filters, -1), b[:, None], torch.nn.functional.unfold

    def run() -> Any:
        return [
            torch.addmm(b, w, unfold(image[None], layer.kernel, 1, layer.padding, layer.stride)[0])
            for image in x
        ]

    return [us / 1e3 for us in laps_us(run, 10)]


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


def measure_rungs(
    device: Device, layer: Layer, direction: str, precisions: Sequence[str]
) -> Iterator[Row]:
    """Check and time every rung of a layer, then the backend's own kernels, then libraries.

    Args:
        device: the GPU.
        layer: the convolution.
        direction: one of `DIRECTIONS`.
        precisions: of the backend's own kernels and of PyTorch.
    """
    numbers, phase = Numbers.of(layer), DIRECTIONS[direction]
    wanted = exact(layer, numbers, phase)
    ladder = [(rung, "fp32") for rung in rungs(device, layer, numbers, phase)]
    ladder += [(own(device, layer, numbers, phase, word), word) for word in precisions]
    for rung, word in ladder:
        rung.start()
        off, most = error(rung.result(), wanted), bound(layer, phase, wanted.size, word)
        if off > most:
            raise WrongResultError(f"{rung.name}: {off:.1e} from float64, more than {most:.1e}")
        yield _row(rung.name, device.times_ms(rung.start), layer, rung.extra_bytes)
    theirs = {f"PyTorch {word}": torch_ms(layer, numbers, phase, word) for word in precisions}
    if phase is Phase.FORWARD:
        theirs = {"im2col, cuBLAS": cublas_ms(layer, numbers), **theirs}
    for name, times_ms in theirs.items():
        if times_ms is not None:
            yield _row(name, times_ms, layer, 0)


def _row(name: str, times_ms: Sequence[float], layer: Layer, extra_bytes: int) -> Row:
    low, middle, high = statistics.quantiles(times_ms, n=4)
    rate = layer.flops / middle / 1e6
    return Row(name, middle, low, high, rate, extra_bytes, len(times_ms))


def climb(device: Device, name: str, layer: Layer, direction: str, precision: str) -> None:
    """Check and time every rung of a layer, and print a table."""
    out = "x".join(map(str, (layer.filters, *layer.out)))
    shape = f"{layer.channels}x{layer.height}x{layer.width}"
    print(f"\n{name}, {direction}: {layer.samples} images {shape} to {out}")
    print(f"{'rung':<18}{'µs':>12}{'quartiles':>20}{'GFLOP/s':>12}{'gains':>8}{'buffer MB':>11}")
    before = None
    for row in measure_rungs(device, layer, direction, tuple(dict.fromkeys(("fp32", precision)))):
        gains = f"{before / row.median_ms:.1f}" if before else ""
        print(
            f"{row.rung:<18}{1e3 * row.median_ms:>12,.1f}{1e3 * row.low_ms:>10,.1f}"
            f"{1e3 * row.high_ms:>10,.1f}{row.gflops:>12,.0f}{gains:>8}"
            f"{row.extra_bytes / 1e6:>11.2f}",
            flush=True,
        )
        before = row.median_ms


@click.command()
@click.option("--direction", type=click.Choice(list(DIRECTIONS)), default="forward",
              show_default=True, help="Output, or the gradient by this.")  # fmt: skip
@click.option("--batch", default=32, show_default=True, help="Images.")
@click.option("--precision", default="tf32", show_default=True, help="Of a last rung.")
@click.argument("names", nargs=-1, metavar="[LAYER]...")
def main(direction: str, batch: int, precision: str, names: tuple[str, ...]) -> None:
    """Check and time every rung of the ladder on some layers."""
    from dptrain.backends.cuda.backend import open_device

    try:
        device = open_device(0)
        print(device.name)
        for name in names or LAYERS:
            climb(device, name, layer_of(name, batch), direction, precision)
    except UserError as problem:
        print(f"benchmarks.ladder.gpu: {problem}", file=sys.stderr)
        sys.exit(2)
    except WrongResultError as problem:
        sys.exit(str(problem))


if __name__ == "__main__":
    main()
